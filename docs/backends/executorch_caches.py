"""The caches of ExecuTorch that are written in Python, under kvtwin's oracle:
docs/backends/executorch.md."""

import numpy as np
import pipe as kvtwin
import torch
from executorch.examples.models.llama.attention import KVCache, RingKVCache
from executorch.examples.models.llama.source_transformation import (
    attention_sink, custom_kv_cache)
from executorch.extension.llm.cache import reference_cache as reference
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401

REFUSALS = ("KV cache overflow", "out of bounds", "Expected cond to be True")


def check(setup):
    """Refuses setups that these caches do not have."""
    kvtwin.check_memory(setup)
    if setup.v_head_dim > setup.k_head_dim:
        raise kvtwin.NotSupported


def heads_first(rows, dim):
    """Returns V padded to the dimension of K, as most caches require."""
    rows = torch.tensor(rows).transpose(0, 1)[None]
    return torch.nn.functional.pad(rows, (0, dim - rows.shape[-1]))


def tokens_first(rows, dim):
    return rows[0, ..., :dim].transpose(0, 1).numpy()


def diagonal(masks):
    """Returns one mask for queries that each see their own part of the columns."""
    out = np.zeros((sum(map(len, masks)), sum(m.shape[1] for m in masks)), bool)
    row = column = 0
    for mask in masks:
        row, column = row + len(mask), column + mask.shape[1]
        out[row - len(mask):row, column - mask.shape[1]:column] = mask
    return out


def config_of(setup, sizing):
    window = setup.window
    policy = (reference.LayerPolicy.flat() if window is None else
              reference.LayerPolicy.ring(window + 1))  # It counts the query.
    return reference.CacheConfig(
        n_layers=setup.layers, n_kv_heads=setup.kv_heads,
        head_dim=setup.k_head_dim, capacity=setup.capacity * setup.max_sequences,
        sizing=sizing, layers=(policy,))


def mask_of(spec, queries, columns):
    """Returns the mask in the form that reference.attend takes."""
    if spec.kind is reference.MaskKind.EXPLICIT:
        return spec.mask
    every = torch.ones(queries, columns, dtype=torch.bool)
    return every if spec.kind is reference.MaskKind.NONE else every.tril()


class Contiguous:
    """One sequence, without rollback. The cache refuses what does not fit."""
    kvtwin = kvtwin.Description(
        name="ContiguousReferenceCache, static", kinds={"causal", "swa_mem"},
        can={"refuse_full"})
    sizing = reference.CacheSizing.STATIC

    def __init__(self, setup):
        check(setup)
        self.setup = setup
        self.cache = reference.ContiguousReferenceCache(
            config_of(setup, self.sizing))
        self.got = {}

    def start_forward(self, positions, sequences):
        self.positions = torch.tensor(positions)[:, None]
        if positions[-1] >= self.setup.capacity:
            self.overfill()

    def overfill(self):
        """Gives a batch that does not fit to the first layer, as models do."""
        rows = (len(self.positions), self.setup.kv_heads)
        try:
            self.put(0, np.zeros((*rows, self.setup.k_head_dim), np.float32),
                     np.zeros((*rows, self.setup.v_head_dim), np.float32))
        except (IndexError, RuntimeError) as error:
            if not any(text in str(error) for text in REFUSALS):
                raise
            raise kvtwin.CacheFull from error
        raise ValueError("a batch that does not fit raises no error")

    def put(self, layer, key, value):
        self.got[layer] = self.cache.update_and_fetch(
            layer, *self.padded(key, value), self.positions)

    def padded(self, *rows):
        return [heads_first(x, self.setup.k_head_dim) for x in rows]

    def cut(self, key, value):
        return (tokens_first(key, self.setup.k_head_dim),
                tokens_first(value, self.setup.v_head_dim))

    def get(self, layer):
        key, value, spec = self.got[layer]
        mask = mask_of(spec, len(self.positions), key.shape[2])
        return *self.cut(key, value), mask.numpy()

    def remove(self, sequence, begin, end):
        self.cache.reset()

    def can_resume(self, sequence, position):
        return position in (0, self.cache.used(0))


class ContiguousDynamic(Contiguous):
    kvtwin = kvtwin.Description(
        name="ContiguousReferenceCache, dynamic", kinds={"causal", "swa_mem"},
        can={"refuse_full"})
    sizing = reference.CacheSizing.DYNAMIC


class Cells(Contiguous):
    """Several sequences, which share cells."""
    kvtwin = kvtwin.Description(
        name="CellReferenceCache, static", kinds={"causal", "swa_mem"},
        can={"remove_tail", "copy_prefix", "mix", "refuse_full"},
        max_sequences=3)

    def __init__(self, setup):
        super().__init__(setup)
        self.cache = reference.CellReferenceCache(config_of(setup, self.sizing))

    def start_forward(self, positions, sequences):
        fits = self.cache.can_extend(len(positions))
        try:
            self.cache.begin_step(sequences)
        except RuntimeError as error:
            if fits or "KV cache full" not in str(error):
                raise
            raise kvtwin.CacheFull from error
        self.positions = torch.tensor(positions)[:, None]

    def remove(self, sequence, begin, end):
        self.cache.seq_rm(sequence, begin)

    def copy_prefix(self, source, target, length):
        if source == target:  # Whole sequences are copied.
            return
        self.cache.seq_rm(target)
        self.cache.seq_cp(source, target, length)

    def can_resume(self, sequence, position):
        return position <= self.cache.seq_len(sequence)


class CellsDynamic(Cells):
    kvtwin = kvtwin.Description(
        name="CellReferenceCache, dynamic", kinds={"causal", "swa_mem"},
        can={"remove_tail", "copy_prefix", "mix", "refuse_full"},
        max_sequences=3)
    sizing = reference.CacheSizing.DYNAMIC


class Full(Contiguous):
    """One sequence in a cache of one tensor for each layer. The caller has the
    length of the sequence, and a lower next position rolls it back."""
    kvtwin = kvtwin.Description(
        name="KVCache", kinds={"causal"}, can={"remove_tail", "refuse_full"})

    def __init__(self, setup):
        check(setup)
        self.setup, self.length, self.got = setup, 0, {}
        self.caches = [self.make() for _ in range(setup.layers)]

    def make(self):
        return KVCache(1, self.setup.capacity, self.setup.kv_heads,
                       self.setup.k_head_dim, False)

    def start_forward(self, positions, sequences):
        super().start_forward(positions, sequences)
        self.length = positions[-1] + 1

    def put(self, layer, key, value):
        self.got[layer] = self.caches[layer].update(
            self.positions[:, 0], *self.padded(key, value))

    def get(self, layer):
        columns = np.arange(self.setup.capacity)
        return *self.cut(*self.got[layer]), columns <= self.positions.numpy()

    def remove(self, sequence, begin, end):
        self.length = begin

    def can_resume(self, sequence, position):
        return position <= self.length


class FullDynamic(Full):
    kvtwin = kvtwin.Description(
        name="KVCache, dynamic shapes", kinds={"causal"},
        can={"remove_tail", "refuse_full"})

    def make(self):
        return KVCache(1, self.setup.capacity, self.setup.kv_heads,
                       self.setup.k_head_dim, True)


class Custom(Full):
    """Its update calls llama.update_cache, which custom_ops registers."""
    kvtwin = kvtwin.Description(
        name="CustomKVCache, eager", kinds={"causal"},
        can={"remove_tail", "refuse_full"})

    def make(self):
        return custom_kv_cache.CustomKVCache(
            1, self.setup.capacity, self.setup.kv_heads,
            self.setup.k_head_dim)


class CustomFitting(Custom):
    """As Custom, for batches that fit."""
    kvtwin = kvtwin.Description(
        name="CustomKVCache, eager, batches that fit", kinds={"causal"},
        can={"remove_tail"})

    def overfill(self):
        raise kvtwin.CacheFull


class Ring(Contiguous):
    """One sequence. A lower next position rolls it back, as long as the ring has the
    rows that a window needs."""
    kvtwin = kvtwin.Description(
        name="RingKVCache", kinds={"swa_mem"}, can={"remove_tail"})
    longest = 2  # Windows of tokens in an update; a longer batch is divided.

    def __init__(self, setup):
        check(setup)
        self.setup, self.window = setup, setup.window + 1  # It counts the query.
        self.caches = [self.make() for _ in range(setup.layers)]
        self.length = self.written = 0
        self.got = {}

    def make(self):
        return RingKVCache(1, self.window, self.setup.kv_heads,
                           self.setup.k_head_dim, False)

    def start_forward(self, positions, sequences):
        if positions[-1] >= self.setup.capacity:
            raise kvtwin.CacheFull
        self.positions = torch.tensor(positions)
        self.length = positions[-1] + 1
        self.written = max(self.written, self.length)

    def put(self, layer, key, value):
        cache, most = self.caches[layer], self.longest * self.window
        self.got[layer] = []
        for i in range(0, len(self.positions), most):
            part = self.positions[i:i + most]
            rows = cache.update(part, *self.padded(key[i:i + most],
                                                   value[i:i + most]))
            mask = cache.create_causal_mask_for_ring_buffer(
                int(part[0]), len(part))
            self.got[layer].append([
                *(x.copy() for x in self.cut(*rows)), (mask == 0).numpy()])

    def get(self, layer):
        keys, values, masks = zip(*self.got[layer])
        return (np.concatenate(keys), np.concatenate(values),
                diagonal(masks))

    def remove(self, sequence, begin, end):
        self.length = begin
        if begin == 0:
            self.written = 0

    def can_resume(self, sequence, position):
        kept = self.written - 2 * self.window
        return position <= self.length and (
            kept <= max(0, position - self.window + 1))


class RingByWindows(Ring):
    kvtwin = kvtwin.Description(
        name="RingKVCache, updates of a window at most", kinds={"swa_mem"},
        can={"remove_tail"})
    longest = 1


class Sink(Ring):
    kvtwin = kvtwin.Description(
        name="KVCacheWithAttentionSink, no sinks", kinds={"swa_mem"},
        can={"remove_tail"})

    def make(self):
        return attention_sink.KVCacheWithAttentionSink(
            self.setup.kv_heads, self.setup.k_head_dim, False, None, self.window, 0)


class SinkByWindows(Sink):
    kvtwin = kvtwin.Description(
        name="KVCacheWithAttentionSink, no sinks, updates of a window at most",
        kinds={"swa_mem"}, can={"remove_tail"})
    longest = 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    kvtwin.main([Contiguous, ContiguousDynamic, Cells, CellsDynamic, Full,
                 FullDynamic, Custom, CustomFitting, Ring, RingByWindows, Sink,
                 SinkByWindows], list, "executorch.md")
