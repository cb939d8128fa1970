"""The caches of mlx-lm, with mlx-lm's own masks, under kvtwin's oracle:
docs/backends/mlx.md."""

import copy
import types

import mlx.core as mx
import numpy
import pipe as kvtwin
from mlx.utils import tree_map
from mlx_lm.generate import (
    BatchGenerator,
    _extend_cache,
    _merge_caches,
    generate_step,
    speculative_generate_step,
)
from mlx_lm.models import base, cache, llama, llama4


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
        kvtwin.check_memory(setup)
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
            raise ValueError(f"the cache reports {start} tokens, expected "
                             f"{positions[0]}")
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
        elif count > 0:
            self.trim(count)

    def trim(self, count):
        if cache.trim_prompt_cache(self.caches, count) != count:
            raise kvtwin.NotSupported

    def can_resume(self, sequence, position):
        if position >= self.length():
            return position == self.length()
        return position == 0 or self.can_trim(position)

    def can_trim(self, length):
        return cache.can_trim_prompt_cache(self.caches)


class KV(Cache):
    kvtwin = kvtwin.Description(
        name="KVCache", kinds={"causal", "swa_mem"}, can={"remove_tail"},
        cannot={"bound_memory"})

    def make(self):
        if self.setup.kind == "swa_mem":
            self.window_size = self.setup.window + 1
        return cache.KVCache()


class Concatenate(KV):
    kvtwin = kvtwin.Description(
        name="ConcatenateKVCache", kinds={"causal", "swa_mem"},
        can={"remove_tail"},
        cannot={"bound_memory"})

    def make(self):
        super().make()
        return cache.ConcatenateKVCache()


class Rotating(Cache):
    kvtwin = kvtwin.Description(
        name="RotatingKVCache, keep=0", kinds={"swa_mem"}, can={"remove_tail"},
        cannot={"bound_memory"})

    def make(self):  # Theirs counts the query, ours does not.
        self.window_size = self.setup.window + 1
        return cache.RotatingKVCache(max_size=self.window_size)


class RotatingSpeculative(Rotating):
    """As generate.speculative_generate_step goes back: can_trim_prompt_cache is
    asked once, of the empty cache, and what is trimmed is not looked at."""
    kvtwin = kvtwin.Description(
        name="RotatingKVCache, keep=0, as speculative decoding goes back",
        kinds={"swa_mem"}, can={"remove_tail"},
        cannot={"bound_memory"})

    def can_trim(self, length):
        return True

    def trim(self, count):
        cache.trim_prompt_cache(self.caches, count)


class RotatingKeep(Cache):
    """The first four tokens and a window: attention sinks. The mask hides what
    is a sink only, as our rules know of none."""
    kvtwin = kvtwin.Description(
        name="RotatingKVCache, keep=4", kinds={"swa_mem"}, can={"remove_tail"},
        cannot={"bound_memory"})
    keep = 4

    def make(self):
        return cache.RotatingKVCache(
            max_size=self.keep + self.setup.window + 1, keep=self.keep)

    def clear(self):
        super().clear()
        self.first = {}  # The first tokens: their rows, and positions.

    def start_forward(self, positions, sequences):
        super().start_forward(positions, sequences)
        self.positions = numpy.array(positions)

    def put(self, layer, key, value):
        super().put(layer, key, value)
        for position, row in zip(self.positions, key):
            if position < self.keep:
                self.first[row.tobytes()] = position

    def get(self, layer):
        key, value, mask = super().get(layer)
        at = numpy.array([self.first.get(row.tobytes(), 2147483647)
                          for row in key])
        return key, value, mask & (at >= self.positions[:, None]
                                   - self.setup.window)


class Chunked(Cache):
    kvtwin = kvtwin.Description(
        name="ChunkedKVCache", kinds={"chunked"}, can={"remove_tail"},
        max_layers=3)

    def clear(self):
        """As llama4.Model.make_cache: each fourth layer attends to all."""
        self.caches = [cache.ChunkedKVCache(self.setup.chunk)
                       for _ in range(3)]
        self.full = cache.KVCache()

    def masks(self):
        """Runs llama4's own forward pass, whose layers note the mask."""
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

    def trim(self, count):
        done = cache.trim_prompt_cache(self.caches + [self.full], count)
        if done != count:
            raise ValueError(f"it said that it can be trimmed, and trimmed"
                             f" {done} of {count} tokens")


class ChunkedWithin(Chunked):
    kvtwin = kvtwin.Description(
        name="ChunkedKVCache, trimmed by what it has", kinds={"chunked"},
        can={"remove_tail"}, max_layers=3)

    def can_trim(self, length):
        return length >= self.caches[0].start_position


class Batch:
    """Sequences that come, continue and leave as in generate.BatchGenerator: each
    pass is of a batch split off from the others, padded on the right, which
    they join again; a prefix is that of a cache that was extracted."""
    kvtwin = kvtwin.Description(
        name="BatchKVCache", kinds={"causal"},
        can={"copy_prefix", "mix", "remove_tail"}, max_sequences=3)
    window_size = None

    def __init__(self, setup):
        kvtwin.check_memory(setup)
        self.setup = setup
        self.rows = []  # Which sequence is which row.
        self.caches = []
        self.passing = None
        self.got = {}

    def single(self):
        return [cache.KVCache() for _ in range(self.setup.layers)]

    def length(self, sequence):
        if sequence not in self.rows:
            return 0
        return int(self.caches[0].offset[self.rows.index(sequence)].item())

    def extract(self, sequence):
        row = self.rows.index(sequence)
        return [c.extract(row) for c in self.caches]

    def join(self, rows, caches):
        """BatchGenerator's _extend_cache."""
        self.caches = _extend_cache(self.caches, caches)
        self.rows = self.rows + rows

    def leave(self, sequences):
        """PromptProcessingBatch.split: what is left, and what leaves."""
        left = [i for i, s in enumerate(self.rows) if s not in sequences]
        gone = [i for i, s in enumerate(self.rows) if s in sequences]
        caches = copy.deepcopy(self.caches) if gone else []
        for c in caches:
            c.filter(gone)
        rows = [self.rows[i] for i in gone]
        self.rows = [self.rows[i] for i in left]
        if not left:
            self.caches = []
        elif gone:
            for c in self.caches:
                c.filter(left)
        return rows, caches

    def finish(self):
        """The end of a pass: its batch joins those that waited."""
        if self.passing:
            if max(self.padding) > 0:
                for c in self.passing:
                    c.finalize()
            self.join(self.order, self.passing)
            self.passing = None

    def start_forward(self, positions, sequences):
        self.finish()
        if any(p >= self.setup.capacity for p in positions):
            raise kvtwin.CacheFull
        wanted = set(sequences)
        new = [s for s in sorted(wanted) if s not in self.rows]
        if new:
            self.join(new, _merge_caches(
                [self.single() for _ in new]))
        self.order, self.passing = self.leave(wanted)
        counts = [list(sequences).count(s) for s in self.order]
        self.queries = max(counts)
        self.padding = [self.queries - n for n in counts]
        if max(self.padding) > 0:
            for c in self.passing:
                c.prepare(lengths=counts, right_padding=self.padding)
        starts = self.starts()
        self.where = []
        for position, sequence in zip(positions, sequences):
            row = self.order.index(sequence)
            self.where.append((row, position - starts[row]))
        if not all(0 <= i < counts[row] for row, i in self.where):
            raise ValueError(f"it says that its lengths are {starts}, and the"
                             f" batch is of {positions} in {sequences}")
        self.before_mask()
        self.mask = self.mask_of_pass()

    def starts(self):
        return self.passing[0].offset.tolist()

    def before_mask(self):
        pass

    def mask_of_pass(self):
        return base.create_attention_mask(
            mx.zeros((len(self.order), self.queries, 1)), self.passing[0],
            window_size=self.window_size)

    def put(self, layer, key, value):
        def spread(rows):
            out = numpy.full((len(self.order), self.queries, *rows.shape[1:]),
                             -1, numpy.float32)
            for place, row in zip(self.where, rows):
                out[place] = row
            return mx.array(out).transpose(0, 2, 1, 3)
        self.got[layer] = self.passing[layer].update_and_fetch(
            spread(key), spread(value))

    def get(self, layer):
        key, value = (numpy.array(x.transpose(0, 2, 1, 3))
                      for x in self.got[layer])
        rows, columns = key.shape[:2]
        if self.mask is None or isinstance(self.mask, str):
            mask = visible(self.mask, self.queries, columns)
        else:
            mask = numpy.array(self.mask)[:, 0]
        mask = numpy.broadcast_to(mask, (rows, self.queries, columns))
        out = numpy.zeros((len(self.where), rows, columns), bool)
        for i, (row, query) in enumerate(self.where):
            out[i, row] = mask[row, query]
        return (key.reshape(-1, *key.shape[2:]),
                value.reshape(-1, *value.shape[2:]),
                out.reshape(len(self.where), -1))

    def insert(self, sequence, caches):
        self.leave({sequence})
        if caches[0].offset > 0:
            self.join([sequence], _merge_caches([caches]))

    def remove(self, sequence, begin, end):
        self.finish()
        if begin == 0:
            self.leave({sequence})
        if begin >= self.length(sequence):
            return
        single = self.extract(sequence)
        cache.trim_prompt_cache(single, single[0].offset - begin)
        self.insert(sequence, single)

    def copy_prefix(self, source, target, length):
        self.finish()
        if source not in self.rows:
            self.leave({target})
            return
        single = self.extract(source)
        cache.trim_prompt_cache(single, single[0].offset - length)
        self.insert(target, single)

    def can_resume(self, sequence, position):
        self.finish()
        if position >= self.length(sequence):
            return position == self.length(sequence)
        return (position == 0
                or cache.can_trim_prompt_cache(self.extract(sequence)))


class BatchRotating(Batch):
    kvtwin = kvtwin.Description(
        name="BatchRotatingKVCache", kinds={"swa_mem"},
        can={"copy_prefix", "mix", "remove_tail"}, max_sequences=3,
        cannot={"bound_memory"})

    def single(self):
        self.window_size = self.setup.window + 1
        return [cache.RotatingKVCache(max_size=self.window_size)
                for _ in range(self.setup.layers)]


class BatchRotatingOrdered(BatchRotating):
    """In temporal order before the mask is made, which is what it takes."""
    kvtwin = kvtwin.Description(
        name="BatchRotatingKVCache, put in order first", kinds={"swa_mem"},
        can={"copy_prefix", "mix", "remove_tail"}, max_sequences=3,
        cannot={"bound_memory"})

    def before_mask(self):
        if self.queries > 1:
            for c in self.passing:
                c._temporal_order()


def random_weights(model, seed):
    mx.random.seed(seed)
    model.update(tree_map(lambda x: mx.random.normal(x.shape) / 2,
                          model.parameters()))
    return model


def llama_of(window, seed):
    """A small model of random weights, its first layer perhaps sliding."""
    kinds = ["sliding_attention" if window else "full_attention",
             "full_attention"]
    return random_weights(llama.Model(llama.ModelArgs(
        model_type="llama", hidden_size=16, num_hidden_layers=2,
        intermediate_size=32, num_attention_heads=2, rms_norm_eps=1e-5,
        vocab_size=50, layer_types=kinds, sliding_window=window)), seed)


def llama4_of(seed):
    numbers = dict(
        attention_bias=False, attention_chunk_size=4, head_dim=8,
        hidden_size=16, interleave_moe_layer_step=1, intermediate_size=16,
        intermediate_size_mlp=16, max_position_embeddings=128,
        model_type="llama4_text", num_attention_heads=2, num_experts_per_tok=1,
        num_hidden_layers=4, num_key_value_heads=1, num_local_experts=2,
        rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0,
        use_qk_norm=True, vocab_size=50)
    return random_weights(llama4.Model(llama4.ModelArgs(
        text_config=numbers, model_type="llama4")), seed)


def batched(model, prompts, count=6):
    """The tokens of BatchGenerator for prompts that come in segments."""
    generator = BatchGenerator(model, max_tokens=count)
    out = {uid: [] for uid in generator.insert_segments(prompts)}
    while any(len(tokens) < count for tokens in out.values()):
        for response in generator.next()[1]:
            out[response.uid].append(response.token)
    return list(out.values())


def logits(model, batches, caches):
    for tokens in batches:
        out = model(mx.array([tokens]), cache=caches)
    return out[0, -1]


def compared(same, what="tokens"):
    return f"the same {what}" if same else f"other {what}"


def generation():
    """The same in mlx-lm's own generation by whole models."""
    prompt, draft = mx.array([1, 2, 3, 4, 5, 6, 7]), llama_of(None, 2)
    for window in (None, 4):
        model = llama_of(window, 1)
        greedy = [t for t, _ in generate_step(prompt, model, max_tokens=12)]
        guessed = [t for t, _, _ in speculative_generate_step(
            prompt, model, draft, max_tokens=12, num_draft_tokens=2)]
        yield (f"sliding_window={window}, speculative and greedy generation",
               compared(list(map(int, greedy)) == list(map(int, guessed))))
    a = [[1, 2, 3, 4, 5], [6], [7, 8, 9, 10], [11]]
    b = [[21], [22], [23, 24, 25, 26], [27]]
    for what, one, other in (("whole", [sum(a, [])], [sum(b, [])]),
                             ("in segments", a, b)):
        together = batched(model, [one, other])
        alone = batched(model, [one]) + batched(model, [other])
        yield (f"sliding_window=4, two prompts {what}, in a batch and alone",
               compared(together == alone))
    model = llama4_of(5)
    for steps in ([[1, 2, 3, 4, 5, 6, 7, 8]],
                  [[1, 2, 3, 4, 5, 6, 7, 8], [9], [10]]):
        count = sum(map(len, steps))
        trimmed, fresh = model.make_cache(), model.make_cache()
        logits(model, steps, trimmed)
        cache.trim_prompt_cache(trimmed, count - 7)
        same = mx.allclose(logits(model, [[30]], trimmed),
                           logits(model, [list(range(1, 8)), [30]], fresh))
        yield (f"llama4, chunks of 4, {count} tokens trimmed to 7 and 7 tokens",
               compared(same.item(), "logits"))
    caches = model.make_cache()
    logits(model, steps, caches)
    lru = cache.LRUPromptCache()
    lru.insert_cache("model", sum(steps, []), caches)
    found, rest = lru.fetch_nearest_cache("model", [1, 2, 40, 41])
    yield ("llama4, LRUPromptCache.fetch_nearest_cache: 2 tokens of 10 match",
           f"the layers hold {[c.offset for c in found]} tokens")


CLASSES = [
    KV, Concatenate, Rotating, RotatingSpeculative, RotatingKeep, Chunked,
    ChunkedWithin, Batch, BatchRotating, BatchRotatingOrdered,
]


if __name__ == "__main__":
    import mlx_states  # It imports this module.
    kvtwin.main(CLASSES + mlx_states.CLASSES, generation, "mlx.md")
