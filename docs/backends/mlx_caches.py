"""The caches of mlx-lm, with mlx-lm's own masks, under kvtwin's oracle:
docs/backends/mlx.md."""

import types

import mlx.core as mx
import numpy
import pipe as kvtwin
from mlx_lm.models import base, cache, llama4


def visible(mask, queries, columns):
    """A mask for mx.fast.scaled_dot_product_attention as (queries, columns).
    "causal" aligns the last query with the last column."""
    every = numpy.ones((queries, columns), bool)
    if mask is None:
        return every
    if isinstance(mask, str):
        return numpy.tril(every, columns - queries)
    return numpy.array(mask)


class Cache:
    """One sequence. Subclasses say which cache."""
    window_size = None

    def __init__(self, setup):
        self.setup = setup
        self.clear()
        self.got = {}

    def clear(self):
        self.caches = [self.make() for _ in range(self.setup.layers)]

    def length(self):
        return self.caches[0].offset

    def start_forward(self, positions, sequences):
        start = self.length()
        if start + len(positions) > self.setup.capacity:
            raise kvtwin.CacheFull  # Where generation ends.
        if positions[0] != start:
            raise ValueError(f"it says that it has {start} tokens, and the next"
                             f" one is due at {positions[0]}")
        self.queries = len(positions)
        self.masks()

    def masks(self):
        self.mask = base.create_attention_mask(
            mx.zeros((1, self.queries, 1)), self.caches[0],
            window_size=self.window_size)

    def put(self, layer, key, value):
        self.got[layer] = self.caches[layer].update_and_fetch(
            mx.array(key).transpose(1, 0, 2)[None],
            mx.array(value).transpose(1, 0, 2)[None])

    def get(self, layer):
        key, value = (numpy.array(x[0].transpose(1, 0, 2))
                      for x in self.got[layer])
        return key, value, visible(self.mask, self.queries, len(key))

    def remove(self, sequence, begin, end):
        count = self.length() - begin
        if begin == 0:
            self.clear()
        elif cache.trim_prompt_cache(self.caches, count) != count:
            raise kvtwin.NotSupported

    def can_resume(self, sequence, position):
        return (position == self.length()
                or cache.can_trim_prompt_cache(self.caches))


class KV(Cache):
    kvtwin = kvtwin.Description("KVCache", "mlx", {"causal", "swa_mem"},
                                {"remove_tail"})

    def make(self):
        if self.setup.kind == "swa_mem":
            self.window_size = self.setup.window + 1
        return cache.KVCache()


class Concatenate(KV):
    kvtwin = kvtwin.Description("ConcatenateKVCache", "mlx",
                                {"causal", "swa_mem"}, {"remove_tail"})

    def make(self):
        super().make()
        return cache.ConcatenateKVCache()


class Rotating(Cache):
    kvtwin = kvtwin.Description("RotatingKVCache, keep=0", "mlx", {"swa_mem"},
                                {"remove_tail"})

    def make(self):  # Theirs counts the query, ours does not.
        self.window_size = self.setup.window + 1
        return cache.RotatingKVCache(max_size=self.window_size)


class RotatingSpeculative(Rotating):
    """As generate.speculative_generate_step goes back: can_trim_prompt_cache is
    asked once, of the empty cache, and what is trimmed is not looked at."""
    kvtwin = kvtwin.Description(
        "RotatingKVCache, keep=0, as speculative decoding goes back", "mlx",
        {"swa_mem"}, {"remove_tail"})

    def can_resume(self, sequence, position):
        return True

    def remove(self, sequence, begin, end):
        if begin == 0:
            self.clear()
        else:
            cache.trim_prompt_cache(self.caches, self.length() - begin)


class RotatingKeep(Cache):
    """The first four tokens and a window: attention sinks. The mask hides what
    is a sink only, as our rules know of none."""
    kvtwin = kvtwin.Description("RotatingKVCache, keep=4", "mlx", {"swa_mem"},
                                {"remove_tail"})
    keep = 4

    def make(self):
        return cache.RotatingKVCache(
            max_size=self.keep + self.setup.window + 1, keep=self.keep)

    def start_forward(self, positions, sequences):
        super().start_forward(positions, sequences)
        self.positions = numpy.array(positions)

    def get(self, layer):
        key, value, mask = super().get(layer)
        stands_for = key[:, 0, -1]  # The last of a head is its position.
        oldest = self.positions[:, None] - self.setup.window
        sink = (stands_for < self.keep) & (stands_for < oldest)
        return key, value, mask & ~sink


class Chunked(Cache):
    kvtwin = kvtwin.Description("ChunkedKVCache", "mlx", {"chunked"},
                                {"remove_tail"})

    def clear(self):
        """As llama4.Model.make_cache: each fourth layer attends to all."""
        self.caches = [cache.ChunkedKVCache(self.setup.chunk)
                       for _ in range(3)]
        self.full = cache.KVCache()

    def masks(self):
        """Those of llama4's own forward pass, whose layers note the mask."""
        def layer(h, mask, cache):
            if cache is not self.full:
                self.mask = mask
            return h
        model = types.SimpleNamespace(
            embed_tokens=lambda x: x, norm=lambda x: x,
            attention_chunk_size=self.setup.chunk, layers=[layer] * 4)
        llama4.LlamaModel.__call__(
            model, mx.zeros((1, self.queries, 1)), self.caches + [self.full])

    def put(self, layer, key, value):
        super().put(layer, key, value)
        if layer == 0:
            for other in [*self.caches[self.setup.layers:], self.full]:
                rows = mx.zeros((1, 1, self.queries, 1))
                other.update_and_fetch(rows, rows)

    def remove(self, sequence, begin, end):
        count = self.length() - begin
        if begin == 0:
            self.clear()
            return
        done = cache.trim_prompt_cache(self.caches + [self.full], count)
        if done != count:
            raise ValueError(f"it said that it can be trimmed, and trimmed"
                             f" {done} of {count} tokens")


class ChunkedWithin(Chunked):
    kvtwin = kvtwin.Description(
        "ChunkedKVCache, trimmed by what it has", "mlx", {"chunked"},
        {"remove_tail"})

    def can_resume(self, sequence, position):
        return position >= self.caches[0].start_position


if __name__ == "__main__":
    for cls in (KV, Concatenate, Rotating, RotatingSpeculative, RotatingKeep,
                Chunked, ChunkedWithin):
        print(cls.kvtwin.name)
        print("   ", kvtwin.fuzz(cls), flush=True)
