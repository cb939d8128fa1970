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
# vLLM asks torch what the processor has, and loads one library. It would choose
# AMX for bf16.
torch.cpu._is_amx_tile_supported = lambda: False
if LIBRARY != "_C":
    torch.cpu._is_avx512_bf16_supported = lambda: False
if LIBRARY == "_C_AVX2":
    torch.cpu._is_avx512_supported = lambda: False

import kvtwin
import numpy as np
import page
import vllm_steps
from histories import shrink
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm_manager import Full

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
HISTORIES = 8
WINDOW = 40  # Longer than some blocks.
# The sizes of a block and of a head, for which vLLM chooses these instructions.
SIZES = {"vec": [(32, 32), (32, 128), (64, 32), (96, 64)],
         "vec16": [(16, 32), (16, 64), (48, 32), (32, 80)],
         "SGLang": [(1, 32), (3, 64), (16, 96), (64, 32)]}


@functools.cache
def config_of(dtype):
    """vLLM's configuration; its model is never loaded."""
    home = pathlib.Path(tempfile.mkdtemp())
    (home / "config.json").write_text(json.dumps(vllm_steps.MODEL))
    return EngineArgs(
        model=str(home), skip_tokenizer_init=True, max_model_len=64,
        dtype=str(dtype).removeprefix("torch.")).create_engine_config()


class Engine(Full):
    """Layers of full attention, or of a window. Rows lie in the order that the
    kernels read, so that only outputs are judged."""
    kvtwin = kvtwin.PoolDescription(
        name="vLLM's layers", can={"soft_cap", "sinks"})
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

    def layer(self, number, heads, soft_cap=0, sinks=None):
        """Returns vLLM's layer with this number of query heads, and the builder of
        its metadata."""
        kind = number, heads, soft_cap, sinks is None
        if kind not in self.layers:
            part = self.setup.of_layer(number)
            name = f"layers.{len(self.layers)}"
            more = {} if sinks is None else {"sinks": torch.from_numpy(sinks)}
            with set_current_vllm_config(self.config):
                layer = Attention(
                    heads, part.k_head_dim, 1 / math.sqrt(part.k_head_dim),
                    part.kv_heads, logits_soft_cap=soft_cap or None,
                    per_layer_sliding_window=self.window_of(part), prefix=name,
                    **more)
            spec = self.spec(
                part, block_size=part.block_size, num_kv_heads=part.kv_heads,
                head_size=part.k_head_dim, dtype=self.dtype)
            self.layers[kind] = layer, (
                layer.attn_backend.get_builder_cls()(
                    spec, [name], self.config, torch.device("cpu")))
            assert (part.block_size, part.k_head_dim) in SIZES[layer.isa]
        return self.layers[kind]

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

    def ends(self, number, sequences):
        return [self.seq_len(s) + self.sequences[s].pending[number]
                for s in sequences]

    def attend(self, number, sequences, query_rows, query, soft_cap, sinks):
        layer, builder = self.layer(number, query.shape[1], soft_cap, sinks)
        step = self.batch(number, sequences, query_rows,
                          self.ends(number, sequences))
        query = self.tensor(query)
        out = torch.full_like(query, float("nan"))
        layer.impl.forward(layer, query, None, None, self.rows[number],
                           builder.build(0, step), out)
        return out.float()


class Groups(Engine):
    """Layers of full attention, and layers of a window."""
    kvtwin = kvtwin.PoolDescription(
        name="groups", can={"groups", "one_stock", "soft_cap", "sinks"})


class Decode(Engine):
    """SGLang's kernel for one query of each sequence, over the slots of vLLM's
    blocks. A query is a sequence of its own."""
    kvtwin = kvtwin.PoolDescription(
        name="decode_attention_cpu", can={"soft_cap", "sinks"})

    def memory_of(self, part, blocks):
        return [torch.zeros(blocks * part.block_size, part.kv_heads, dim,
                            dtype=self.dtype)
                for dim in (part.k_head_dim, part.v_head_dim)]

    def write(self, sequence, number, begin, key, value):
        slots = self.slots_of(sequence, number, begin + len(key))[begin:]
        for to, rows in zip(self.rows[number], (key, value)):
            to[slots] = self.tensor(rows)

    def slots_of(self, sequence, number, end):
        return self.batch(number, [sequence], [end], [end]).slot_mapping

    def options(self, number, soft_cap, sinks):
        part = self.setup.of_layer(number)
        return (1 / math.sqrt(part.k_head_dim), soft_cap, False,
                self.window_of(part) or -1, None,
                None if sinks is None else self.tensor(sinks))

    def tables(self, number, sequences, ends):
        """Returns the slots of each sequence, and which row is whose."""
        table = torch.zeros(len(ends), max(ends), dtype=torch.int32)
        for row, sequence, end in zip(table, sequences, ends):
            row[:end] = self.slots_of(sequence, number, end)
        return table, torch.arange(len(ends))

    def attend(self, number, sequences, query_rows, query, soft_cap, sinks):
        parts = [(sequence, end - back)
                 for sequence, end, rows in zip(
                     sequences, self.ends(number, sequences), query_rows)
                 for back in reversed(range(rows))]
        sequences, ends = zip(*parts)
        tables = self.tables(number, sequences, ends)
        places = torch.stack([row[end - 1] for row, end in
                              zip(tables[0], ends)]).long()
        key, value = self.rows[number]
        query = self.tensor(query)
        out = torch.full_like(query, float("nan"))
        scratch = torch.zeros(*query.shape[:2], 8, query.shape[2] + 1)
        torch.ops._C.decode_attention_cpu(
            query, key, value, out, key[places], value[places], places,
            scratch, *tables, torch.tensor(ends),
            *self.options(number, soft_cap, sinks))
        return out.float()


class Extend(Decode):
    """SGLang's kernel for queries whose rows are not in the memory yet."""
    kvtwin = kvtwin.PoolDescription(
        name="extend_attention_cpu", can={"sinks"})

    def attend(self, number, sequences, query_rows, query, soft_cap=0.0,
               sinks=None):
        ends = self.ends(number, sequences)
        tables = self.tables(number, sequences, ends)
        places = torch.cat([row[end - count:end] for row, end, count in
                            zip(tables[0], ends, query_rows)]).long()
        key, value = self.rows[number]
        query = self.tensor(query)
        out = torch.full_like(query, float("nan"))
        starts = np.cumsum([0, *query_rows])[:-1]
        torch.ops._C.extend_attention_cpu(
            query, key[places], value[places], out, key, value, *tables,
            torch.tensor(ends), torch.tensor(query_rows, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32), max(query_rows),
            *self.options(number, soft_cap, sinks), None)
        return out.float()


class ExtendCap(Extend):
    """It ignores the soft cap."""
    kvtwin = kvtwin.PoolDescription(
        name="extend_attention_cpu with logit_cap", can={"soft_cap", "sinks"})


def draw(rng, cls, kernel):
    """Returns the pool and the operations of a history."""
    size, dim = rng.choice(SIZES[kernel])
    dtype = cls.kvtwin.attend_dtype
    blocks, heads = rng.randint(3, 20), rng.randint(1, 2)
    part = (f"block={size} blocks={blocks} layers={rng.randint(1, 2)} "
            f"heads={heads} kdim={dim} vdim={dim} dtype={dtype}")
    most = rng.randint(size, max(8 * size, 64))
    if "groups" in cls.kvtwin.can:
        part = part.replace(" ", ",").replace("=", ":")
        window = rng.choice([1, 7, 15, 16, 31, 32, 33, 50])
        part = f"groups={part}/{part},window:{window}"
    if "soft_cap" in cls.kvtwin.can and rng.random() < 0.5:
        part += f" softcap={rng.choice([4, 8, 30])}"
    if "sinks" in cls.kvtwin.can and rng.random() < 0.5:
        part += " sinks=1"
    ops = []
    for _ in range(rng.randint(10, 40)):
        sequence, dice = rng.randrange(6), rng.random()
        if dice < 0.35:
            ops.append(("open", rng.randrange(20), rng.randrange(4),
                        rng.choice([0, 0, 0, 4])))
        elif dice < 0.9:
            count = rng.choice([0, rng.randrange(64), rng.randrange(64, 400)])
            # Few different tokens, so that prompts have blocks in common.
            ops.append(("append", sequence, count, 1 + 5 * rng.randrange(3)))
            if rng.random() < 0.6:
                ops.append(("commit", sequence, rng.choice([1, 1, 1, 0]),
                            rng.randrange(400)))
        else:
            ops.append(("free", sequence, 0, 0))
    return f"kvp1 most={most} {part}", ops


def finding_of(cls, setup, ops):
    text = " | ".join([setup, *(" ".join(map(str, op)) for op in ops)])
    return kvtwin.run(cls, text).finding


def judged(cls, kernel, name):
    rng = random.Random(name)
    for _ in range(HISTORIES):
        setup, ops = draw(rng, cls, kernel)
        if finding_of(cls, setup, ops):
            ops = shrink(
                ops, lambda ops: ops and finding_of(cls, setup, ops))
            finding = finding_of(cls, setup, ops)
            return [finding.history, finding.reason]
    return [f"{HISTORIES} histories: right"]


def report(base, dtypes, kernels, window=None):
    for dtype in dtypes:
        cls = type(base.__name__, (base,), {"kvtwin": dataclasses.replace(
            base.kvtwin, attend_dtype=dtype, window=window)})
        name = f"{base.kvtwin.name}, {dtype}"
        if window:
            name += f", window of {window}"
        for kernel in kernels:
            full = f"{LIBRARY}, {kernel}, {name}"
            page.say(full, judged(cls, kernel, full))


def main():
    for base, window in ((Engine, None), (Engine, WINDOW), (Groups, None)):
        report(base, DTYPES, ("vec", "vec16"), window)
    if LIBRARY != "_C":  # It alone has SGLang's kernels.
        return
    for window in (None, WINDOW):
        report(Decode, ("f16", "bf16"), ("SGLang",), window)
        report(Extend, ("bf16",), ("SGLang",), window)
    report(ExtendCap, ("bf16",), ("SGLang",))


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
