"""vLLM's engine for CPUs as a pool that attends: its KVCacheManager decides about
blocks, and its attention layers write rows and compute outputs through the block
tables. vllm-manager.md has the results. `vllm_engine.py LIBRARY` judges by one
library of kernels: _C, _C_AVX512 or _C_AVX2."""

import dataclasses
import functools
import json
import math
import os
import pathlib
import random
import sys
import tempfile

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

LIBRARY = sys.argv[1] if sys.argv[1:] else "_C"
# vLLM asks torch what the processor has, and loads one library.
if LIBRARY != "_C":
    torch.cpu._is_avx512_bf16_supported = lambda: False
if LIBRARY == "_C_AVX2":
    torch.cpu._is_avx512_supported = lambda: False

import kvtwin
import numpy as np
import page
import vllm_steps
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm_manager import Full

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
HISTORIES = 15
# Blocks and heads for which vLLM chooses these instructions.
SIZES = {"vec": [(32, 32), (32, 64), (64, 32), (96, 128)],
         "vec16": [(16, 32), (16, 64), (48, 32), (32, 80)]}


@functools.cache
def config_of(dtype):
    """vLLM's configuration; its model is never loaded."""
    home = pathlib.Path(tempfile.mkdtemp())
    (home / "config.json").write_text(json.dumps(vllm_steps.MODEL))
    return EngineArgs(
        model=str(home), skip_tokenizer_init=True, max_model_len=64,
        dtype=str(dtype).removeprefix("torch.")).create_engine_config()


class Engine(Full):
    """Full attention. Rows lie in the order that the kernels read, so that only
    outputs are judged."""
    kvtwin = kvtwin.PoolDescription(name="full attention")
    views = None

    def __init__(self, setup):
        self.dtype = DTYPES[self.kvtwin.attend_dtype]
        super().__init__(setup)
        self.config = config_of(self.dtype)
        self.config.compilation_config.static_forward_context.clear()
        self.layers = {}

    def memory_of(self, part, blocks):
        """Returns the memory of a layer, as vLLM shapes it."""
        return torch.zeros(blocks, part.kv_heads, part.block_size,
                           2 * part.k_head_dim, dtype=self.dtype)

    def layer(self, number, heads):
        """Returns vLLM's layer with this number of query heads, and the builder of
        its metadata."""
        if (number, heads) not in self.layers:
            part = self.setup.of_layer(number)
            name = f"layers.{number}.{heads}"
            with set_current_vllm_config(self.config):
                layer = Attention(
                    heads, part.k_head_dim, 1 / math.sqrt(part.k_head_dim),
                    part.kv_heads, per_layer_sliding_window=self.window_of(part),
                    prefix=name)
            spec = self.spec(
                part, block_size=part.block_size, num_kv_heads=part.kv_heads,
                head_size=part.k_head_dim, dtype=self.dtype)
            self.layers[number, heads] = layer, (
                layer.attn_backend.get_builder_cls()(
                    spec, [name], self.config, torch.device("cpu")))
            assert (part.block_size, part.k_head_dim) in SIZES[layer.isa]
        return self.layers[number, heads]

    def batch(self, layer, sequences, rows, ends):
        """Returns a step of vLLM: the last `rows` tokens of sequences."""
        group = self.setup.group_of(layer)
        tables = [self.table_of(sequence, group) for sequence in sequences]
        table = torch.zeros(len(tables), max(map(len, tables)),
                            dtype=torch.int32)
        for i, blocks in enumerate(tables):
            table[i, :len(blocks)] = torch.tensor(blocks)
        starts = torch.tensor(np.cumsum([0, *rows]), dtype=torch.int32)
        positions = torch.cat([torch.arange(end - count, end)
                               for count, end in zip(rows, ends)])
        slots = torch.empty_like(positions)
        torch.ops._C.compute_slot_mapping_kernel_impl(
            starts, positions, table, slots,
            self.setup.of_layer(layer).block_size)
        return CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts,
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            num_reqs=len(rows), num_actual_tokens=sum(rows),
            max_query_len=max(rows), max_seq_len=max(ends),
            block_table_tensor=table, slot_mapping=slots)

    def write(self, sequence, number, begin, key, value):
        layer, _ = self.layer(number, key.shape[1])
        step = self.batch(number, [sequence], [len(key)], [begin + len(key)])
        key, value = (self.tensor(rows) for rows in (key, value))
        layer.impl.do_kv_cache_update(
            layer, key, value, self.rows[number], step.slot_mapping)

    def tensor(self, rows):
        """Returns rows of float32, or as the pool stores them."""
        if rows.dtype == np.uint16:
            return torch.from_numpy(rows).view(torch.bfloat16)
        return torch.from_numpy(rows).to(self.dtype)

    def attend(self, number, sequences, query_rows, query):
        layer, builder = self.layer(number, query.shape[1])
        ends = [self.seq_len(s) + self.sequences[s].pending[number]
                for s in sequences]
        step = self.batch(number, sequences, query_rows, ends)
        query = self.tensor(query)
        out = torch.full_like(query, float("nan"))
        layer.impl.forward(layer, query, None, None, self.rows[number],
                           builder.build(0, step), out)
        return out.float()


class Window(Engine):
    """Layers of a window that is longer than some blocks."""
    kvtwin = kvtwin.PoolDescription(name="window", window=40)


class Groups(Engine):
    """Layers of full attention, and layers of a window."""
    kvtwin = kvtwin.PoolDescription(
        name="both", can={"groups", "one_stock"})


def draw(rng, cls, isa):
    """Returns the pool and the operations of a history."""
    size, dim = rng.choice(SIZES[isa])
    dtype = cls.kvtwin.attend_dtype
    blocks, heads = rng.randint(3, 12), rng.randint(1, 2)
    part = (f"block={size} blocks={blocks} layers={rng.randint(1, 2)} "
            f"heads={heads} kdim={dim} vdim={dim} dtype={dtype}")
    most = rng.randint(size, 5 * size)
    if "groups" in cls.kvtwin.can:
        part = part.replace(" ", ",").replace("=", ":")
        window = rng.choice([1, 7, 15, 16, 31, 32, 33, 50])
        part = f"groups={part}/{part},window:{window}"
    ops = []
    for _ in range(rng.randint(10, 40)):
        sequence, dice = rng.randrange(6), rng.random()
        if dice < 0.25:
            ops.append(("open", rng.randrange(20), rng.randrange(4),
                        rng.choice([0, 0, 0, 4])))
        elif dice < 0.9:
            count = rng.choice([0, rng.randrange(64), rng.randrange(64, 400)])
            # Few different tokens, so that prompts have blocks in common.
            ops.append(("append", sequence, count, 1 + 5 * rng.randrange(3)))
            if rng.random() < 0.8:
                ops.append(("commit", sequence, rng.choice([1, 1, 1, 0]),
                            rng.randrange(400)))
        else:
            ops.append(("free", sequence, 0, 0))
    return f"kvp1 most={most} {part}", ops


def finding_of(cls, setup, ops):
    text = " | ".join([setup, *(" ".join(map(str, op)) for op in ops)])
    return kvtwin.run(cls, text).finding


def judged(cls, isa):
    rng = random.Random(1)
    for _ in range(HISTORIES):
        setup, ops = draw(rng, cls, isa)
        if finding_of(cls, setup, ops):
            ops = vllm_steps.shrink(
                ops, lambda ops: ops and finding_of(cls, setup, ops))
            finding = finding_of(cls, setup, ops)
            return [finding.history, finding.reason]
    return [f"{HISTORIES} histories: right"]


def main():
    for base in (Engine, Window, Groups):
        for dtype in DTYPES:
            cls = type(base.__name__, (base,), {"kvtwin": dataclasses.replace(
                base.kvtwin, attend_dtype=dtype)})
            for isa in SIZES:
                page.say(f"{LIBRARY}, {isa}, {cls.kvtwin.name}, {dtype}",
                         judged(cls, isa))


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
