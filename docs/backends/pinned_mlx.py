"""The caches of older versions of mlx-lm, for pinned.py. Only cache.py, base.py
and llama4.py are loaded: the rest of an older package needs older packages."""

import importlib
import inspect
import types

import mlx.core as mx
import numpy
import pipe as kvtwin
from pinned import without_init

without_init("mlx_lm", "mlx_lm.models")
base = importlib.import_module("mlx_lm.models.base")
cache = importlib.import_module("mlx_lm.models.cache")
TAKES_WINDOW = "window_size" in inspect.signature(
    base.create_attention_mask).parameters


def mask_of(queries, caches, window_size):
    """Returns the mask of create_attention_mask, which has two forms."""
    h = mx.zeros((1, queries, 1))
    if not TAKES_WINDOW:
        return base.create_attention_mask(h, caches)
    return base.create_attention_mask(h, caches[0], window_size=window_size)


def visible(mask, queries, columns):
    """A mask for mx.fast.scaled_dot_product_attention as (queries, columns).
    "causal" aligns the last query with the last column."""
    every = numpy.ones((queries, columns), bool)
    if mask is None:
        return every
    if isinstance(mask, str):
        return numpy.tril(every, columns - queries)
    return numpy.array(mask).reshape(queries, -1)


def mlx_rows(rows):
    return mx.array(rows).transpose(1, 0, 2)[None]


class Single:
    """One sequence."""
    window_size = None

    def __init__(self, setup):
        if setup.kind == "swa_mem" and setup.memory < setup.capacity:
            raise kvtwin.NotSupported  # Those keep what they keep.
        self.setup = setup
        self.got = {}
        self.clear()

    def clear(self):
        self.caches = [self.make() for _ in range(self.setup.layers)]

    def remove(self, sequence, begin, end):
        self.clear()  # None of these goes back.

    def can_resume(self, sequence, position):
        return position == 0

    def start_forward(self, positions, sequences):
        if positions[-1] >= self.setup.capacity:
            raise kvtwin.CacheFull
        self.queries = len(positions)
        self.masks()

    def masks(self):
        self.mask = mask_of(self.queries, self.caches, self.window_size)

    def put(self, layer, key, value):
        self.got[layer] = self.caches[layer].update_and_fetch(
            mlx_rows(key), mlx_rows(value))

    def get(self, layer):
        key, value = (numpy.array(x[0].transpose(1, 0, 2))
                      for x in self.got[layer])
        return key, value, visible(self.mask, self.queries, len(key))


class Rotating(Single):
    kvtwin = kvtwin.Description(name="RotatingKVCache", kinds={"swa_mem"})

    def make(self):  # Theirs counts the query, ours does not.
        self.window_size = self.setup.window + 1
        return cache.RotatingKVCache(max_size=self.window_size)


class WindowOnly(Single):
    """A window that is in the mask alone."""
    kvtwin = kvtwin.Description(name="KVCache, window", kinds={"swa_mem"})

    def make(self):
        self.window_size = self.setup.window + 1
        return cache.KVCache()


class Chunked(Single):
    kvtwin = kvtwin.Description(
        name="ChunkedKVCache", kinds={"chunked"}, can={"remove_tail"})

    def make(self):
        self.full = cache.KVCache()
        return cache.ChunkedKVCache(self.setup.chunk)

    def start_forward(self, positions, sequences):
        self.more = [cache.ChunkedKVCache(self.setup.chunk)
                     for _ in range(3 - len(self.caches))]
        super().start_forward(positions, sequences)

    def masks(self):
        """Runs llama4's own forward pass, whose layers note the mask."""
        def layer(h, mask, cache):
            if cache is not self.full:
                self.mask = mask
            return h
        model = types.SimpleNamespace(
            embed_tokens=lambda x: x, norm=lambda x: x,
            attention_chunk_size=self.setup.chunk, layers=[layer] * 4)
        llama4 = importlib.import_module("mlx_lm.models.llama4")
        caches = self.caches + self.more + [self.full]
        llama4.LlamaModel.__call__(
            model, mx.zeros((1, self.queries, 1)), cache=caches)

    def remove(self, sequence, begin, end):
        if begin == 0:
            return self.clear()
        for c in self.caches:
            c.trim(c.offset - begin)

    def can_resume(self, sequence, position):
        """A trim may go back as far as the chunk has its first token."""
        first = position - position % self.setup.chunk
        return first >= self.caches[0].start_position


class ChunkedExact(Chunked):
    """A chunk is a multiple of the step, as in Llama 4 (8192 and 256)."""
    kvtwin = kvtwin.Description(
        name="ChunkedKVCache, step=chunk", kinds={"chunked"})

    def make(self):
        made = super().make()
        made.step = self.setup.chunk
        return made


class Merged:
    """Sequences that are filled alone, and decode together: merged to a batch
    and extracted from it again, as a server does with prompts."""
    kvtwin = kvtwin.Description(
        name="BatchRotatingKVCache.merge", kinds={"swa_mem"}, can={"mix"},
        max_sequences=3)

    def __init__(self, setup):
        if setup.memory < setup.capacity:
            raise kvtwin.NotSupported
        self.setup = setup
        self.caches = {}  # By sequence, then by layer.
        self.got = {}

    def start_forward(self, positions, sequences):
        if max(positions) >= self.setup.capacity:
            raise kvtwin.CacheFull
        self.order = sorted(set(sequences))
        self.rows = [[i for i, s in enumerate(sequences) if s == one]
                     for one in self.order]
        for one in self.order:
            self.caches.setdefault(one, [
                cache.RotatingKVCache(max_size=self.setup.window + 1)
                for _ in range(self.setup.layers)])
        self.batched = len(self.order) > 1 and all(
            len(rows) == 1 and self.caches[one][0].offset > 0
            for one, rows in zip(self.order, self.rows))
        size = self.setup.window + 1
        if self.batched:
            self.batch = [cache.BatchRotatingKVCache.merge(
                [self.caches[one][layer] for one in self.order])
                for layer in range(self.setup.layers)]
            self.masks = numpy.array(self.batch[0].make_mask(1))[:, 0]
        else:
            self.masks = [mask_of(len(rows), self.caches[one], size)
                          for one, rows in zip(self.order, self.rows)]

    def put(self, layer, key, value):
        if self.batched:
            rows = [row for rows in self.rows for row in rows]
            k, v = self.batch[layer].update_and_fetch(
                mx.array(key[rows])[:, None].transpose(0, 2, 1, 3),
                mx.array(value[rows])[:, None].transpose(0, 2, 1, 3))
            self.got[layer] = [(k[i:i + 1], v[i:i + 1])
                               for i in range(len(rows))]
            for i, one in enumerate(self.order):
                self.caches[one][layer] = self.batch[layer].extract(i)
        else:
            self.got[layer] = [
                self.caches[one][layer].update_and_fetch(
                    mlx_rows(key[rows]), mlx_rows(value[rows]))
                for one, rows in zip(self.order, self.rows)]

    def get(self, layer):
        pieces = [[numpy.array(x[0].transpose(1, 0, 2)) for x in piece]
                  for piece in self.got[layer]]
        columns = [len(key) for key, _ in pieces]
        mask = numpy.zeros((sum(map(len, self.rows)), sum(columns)), bool)
        begin = 0
        for rows, count, own in zip(self.rows, columns, self.masks):
            mask[rows, begin:begin + count] = visible(own, len(rows), count)
            begin += count
        return (*(numpy.concatenate(x) for x in zip(*pieces)), mask)

    def remove(self, sequence, begin, end):
        self.caches.pop(sequence, None)  # It does not go back.

    def can_resume(self, sequence, position):
        return position == 0


class MergedDecoded(Merged):
    """Each pass has one token of a sequence, so that no cache is longer than
    its window."""
    kvtwin = kvtwin.Description(
        name="BatchRotatingKVCache.merge, of decoded tokens",
        kinds={"swa_mem"}, can={"mix"}, max_sequences=3)

    @staticmethod
    def limited(ops):
        return [(name, [(s, 1) for s, _ in args] if name == "put" else args)
                for name, args in ops]
