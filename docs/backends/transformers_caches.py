"""The caches of Hugging Face transformers, with transformers' own masks, under
kvtwin's oracle: docs/backends/transformers.md."""

import numpy as np
import pipe as kvtwin
import torch
import transformers
import transformers_states
from transformers import cache_utils, masking_utils


def config_of(setup):
    """Returns the configuration of a model whose layers are all of the setup's kind."""
    numbers = dict(
        num_hidden_layers=setup.layers, num_attention_heads=setup.kv_heads,
        num_key_value_heads=setup.kv_heads, head_dim=setup.k_head_dim,
        hidden_size=setup.kv_heads * setup.k_head_dim,
        attn_implementation="sdpa")
    if setup.kind == "chunked":
        return transformers.Llama4TextConfig(
            attention_chunk_size=setup.chunk,
            layer_types=["chunked_attention"] * setup.layers, **numbers)
    if setup.kind == "swa_mem":  # Theirs counts the query, ours does not.
        return transformers.MistralConfig(
            sliding_window=setup.window + 1, **numbers)
    return transformers.LlamaConfig(**numbers)


MASKS = {
    "causal": masking_utils.create_causal_mask,
    "swa_mem": masking_utils.create_sliding_window_causal_mask,
    "chunked": masking_utils.create_chunked_causal_mask,
}


def visible(mask, queries, columns):
    """A mask for scaled_dot_product_attention as (batch, queries, columns), a
    single column being one for all. What none stands for is in transformers'
    integrations/sdpa_attention.py."""
    if mask is None:
        every = torch.ones(1, queries, columns, dtype=torch.bool)
        return every if queries == 1 else every.tril()
    return mask[:, 0].expand(-1, queries, columns)


class Cache:
    """One sequence. Subclasses say which cache."""

    def __init__(self, setup):
        kvtwin.check_memory(setup)
        self.setup = setup
        self.config = config_of(setup)
        self.cache = self.make()
        self.got = {}

    def length(self):
        return int(self.cache.get_seq_length())

    def start_forward(self, positions, sequences):
        start = self.length()
        if positions[0] != start:
            raise ValueError(f"the cache reports {start} tokens, expected "
                             f"{positions[0]}")
        if start + len(positions) > self.setup.capacity:
            raise kvtwin.CacheFull  # generate() ends here as well.
        self.queries = len(positions)
        self.mask = MASKS[self.setup.kind](
            config=self.config, inputs_embeds=torch.zeros(1, self.queries, 1),
            attention_mask=None, cache=self.cache,
            position_ids=torch.tensor(positions)[None])

    def put(self, layer, key, value):
        self.got[layer] = self.cache.update(
            torch.tensor(key).transpose(0, 1)[None],
            torch.tensor(value).transpose(0, 1)[None], layer)

    def get(self, layer):
        key, value = (x[0].transpose(0, 1).numpy() for x in self.got[layer])
        mask = visible(self.mask, self.queries, len(key))[0]
        return key, value, mask.numpy()

    def remove(self, sequence, begin, end):
        if begin == 0:
            self.cache.reset()
        elif begin < self.length():
            self.cache.crop(begin - self.length())

    def can_resume(self, sequence, position):
        if position >= self.length():
            return position == self.length()
        return position == 0 or self.can_crop(position)

    def can_crop(self, length):
        return False


class Dynamic(Cache):
    kvtwin = kvtwin.Description(
        name="DynamicCache()", kinds={"causal"}, can={"remove_tail"})

    def make(self):
        return transformers.DynamicCache()

    def can_crop(self, length):
        return True


class DynamicOfConfig(Dynamic):
    kvtwin = kvtwin.Description(
        name="DynamicCache(config)", kinds={"causal"}, can={"remove_tail"})

    def make(self):
        return transformers.DynamicCache(config=self.config)


class Sliding(DynamicOfConfig):
    kvtwin = kvtwin.Description(
        name="DynamicCache(config), sliding or chunked",
        kinds={"chunked", "swa_mem"}, can={"remove_tail"},
        cannot={"bound_memory"})

    def can_crop(self, length):
        return self.length() < self.cache.layers[0].sliding_window


class SlidingFromTwo(Sliding):
    kvtwin = kvtwin.Description(
        name="DynamicCache(config), sliding or chunked, of two tokens or more",
        kinds={"chunked", "swa_mem"}, can={"remove_tail"},
        cannot={"bound_memory"})

    def __init__(self, setup):
        if setup.window == 0 or setup.chunk == 1:
            raise kvtwin.NotSupported
        super().__init__(setup)


class SlidingRecorded(SlidingFromTwo):
    kvtwin = kvtwin.Description(
        name="DynamicCache(config), sliding or chunked, with its past recorded",
        kinds={"chunked", "swa_mem"}, can={"remove_tail"},
        cannot={"bound_memory"})

    def make(self):
        cache = super().make()
        cache.activate_past_recording()
        return cache

    def can_crop(self, length):
        """If crop finds what it is to keep; it does not look."""
        layer = self.cache.layers[0]
        first = self.length() - layer.keys.shape[-2]
        return first <= max(0, length - layer.sliding_window + 1)


class Assisted(SlidingRecorded):
    """A crop after each pass, of nothing if nothing was wrong, as in
    GenerationMixin._assisted_decoding."""
    kvtwin = kvtwin.Description(
        name="DynamicCache(config), sliding or chunked, cropped each time",
        kinds={"chunked", "swa_mem"}, can={"remove_tail"},
        cannot={"bound_memory"})
    cropped = True

    def start_forward(self, positions, sequences):
        if not self.cropped:
            self.cache.crop(0)
        super().start_forward(positions, sequences)
        self.cropped = False

    def remove(self, sequence, begin, end):
        super().remove(sequence, begin, end)
        self.cropped = True


class Static(Cache):
    kvtwin = kvtwin.Description(
        name="StaticCache", kinds={"causal", "chunked", "swa_mem"},
        can={"remove_tail"},
        cannot={"bound_memory"})

    def make(self):
        return transformers.StaticCache(
            config=self.config, max_cache_len=self.setup.capacity)


class StaticCropped(Static):
    kvtwin = kvtwin.Description(
        name="StaticCache, cropped", kinds={"causal", "chunked", "swa_mem"},
        can={"remove_tail"}, cannot={"bound_memory"})

    def can_crop(self, length):
        return self.cache.is_croppable


class StaticOverrun(Static):
    """Filled beyond max_cache_len, which a full layer answers with an
    IndexError."""
    kvtwin = kvtwin.Description(
        name="StaticCache, sliding, too short", kinds={"swa_mem"},
        cannot={"bound_memory"})

    def make(self):
        return transformers.StaticCache(
            config=self.config, max_cache_len=(self.setup.capacity + 1) // 2)


class StaticRefusing(Static):
    """StaticLayer refuses a batch that does not fit, in the first layer."""
    kvtwin = kvtwin.Description(
        name="StaticCache, which refuses batches itself", kinds={"causal"},
        can={"remove_tail", "refuse_full"})

    def start_forward(self, positions, sequences):
        if len(positions) > self.setup.capacity - positions[0]:
            key, value = (
                np.zeros((len(positions), self.setup.kv_heads, dim), np.float32)
                for dim in (self.setup.k_head_dim, self.setup.v_head_dim))
            try:
                self.put(0, key, value)
            except IndexError as error:
                raise kvtwin.CacheFull from error
            raise ValueError("a full StaticLayer takes a batch")
        super().start_forward(positions, sequences)


class StaticWindow(Static):
    """max_cache_len is half of the capacity, and no smaller than the window."""
    kvtwin = kvtwin.Description(
        name="StaticCache, sliding or chunked, beyond max_cache_len",
        kinds={"chunked", "swa_mem"}, can={"remove_tail"},
        cannot={"bound_memory"})

    def make(self):
        short = (self.setup.capacity + 1) // 2
        if (self.setup.chunk or self.setup.window + 1) > short:
            raise kvtwin.NotSupported
        return transformers.StaticCache(config=self.config, max_cache_len=short)


class Exact(cache_utils.QuantizedLayer):
    """Theirs, but for the rounding."""

    def __init__(self):
        super().__init__(residual_length=4)

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


class Quantized(Cache):
    kvtwin = kvtwin.Description(
        name="QuantizedLayer, by a quantizer that does not round",
        kinds={"causal"}, can={"remove_tail"})

    def make(self):
        return cache_utils.Cache(
            layers=[Exact() for _ in range(self.setup.layers)])

    def can_crop(self, length):
        return self.cache.is_croppable


class Batch(Cache):
    """The sequences are the rows of a batch, padded on the left once, and
    continue together. A copy is a beam that continues another beam."""
    kvtwin = kvtwin.Description(
        name="DynamicCache(config), a batch",
        kinds={"causal", "chunked", "swa_mem"}, can={"copy_prefix"},
        max_sequences=3, cannot={"bound_memory"})
    lockstep = True

    def __init__(self, setup):
        if setup.window == 0 or setup.chunk == 1:
            raise kvtwin.NotSupported
        super().__init__(setup)
        self.padding = torch.zeros(setup.max_sequences, 0, dtype=torch.long)

    def make(self):
        return transformers.DynamicCache(config=self.config)

    def start_forward(self, positions, sequences):
        rows = self.setup.max_sequences
        counts = [sequences.count(row) for row in range(rows)]
        self.queries = max(counts)
        if self.length() + self.queries > self.setup.capacity:
            raise kvtwin.CacheFull
        padding = [[0] * (self.queries - n) + [1] * n for n in counts]
        self.padding = torch.cat([self.padding, torch.tensor(padding)], 1)
        self.where = [(row, i) for row in range(rows)
                      for i in range(self.queries) if padding[row][i]]
        self.mask = MASKS[self.setup.kind](
            config=self.config,
            inputs_embeds=torch.zeros(rows, self.queries, 1),
            attention_mask=self.padding, cache=self.cache)

    def put(self, layer, key, value):
        def spread(rows):
            out = torch.full((self.setup.max_sequences, self.queries,
                              *rows.shape[1:]), -1.0)
            for place, row in zip(self.where, torch.tensor(rows)):
                out[place] = row
            return out.transpose(1, 2)
        self.got[layer] = self.cache.update(spread(key), spread(value), layer)

    def get(self, layer):
        key, value = (x.transpose(1, 2) for x in self.got[layer])
        columns = key.shape[1]
        mask = visible(self.mask, self.queries, columns)
        mask = mask.expand(len(key), -1, -1)
        out = torch.zeros(len(self.where), len(key), columns, dtype=torch.bool)
        for i, (row, query) in enumerate(self.where):
            out[i, row] = mask[row, query]
        return (key.flatten(0, 1).numpy(), value.flatten(0, 1).numpy(),
                out.flatten(1).numpy())

    def remove(self, sequence, begin, end):
        raise kvtwin.NotSupported

    def copy_prefix(self, source, target, length):
        rows = torch.arange(self.setup.max_sequences)
        rows[target] = source
        self.cache.reorder_cache(rows)
        self.padding = self.padding[rows]


class StaticBatch(Batch):
    kvtwin = kvtwin.Description(
        name="StaticCache, a batch", kinds={"causal", "chunked", "swa_mem"},
        can={"copy_prefix"}, max_sequences=3,
        cannot={"bound_memory"})
    lockstep = True

    def make(self):
        return transformers.StaticCache(
            config=self.config, max_cache_len=self.setup.capacity)


class QuantizedBatch(Batch):
    kvtwin = kvtwin.Description(
        name="QuantizedLayer, a batch", kinds={"causal"}, can={"copy_prefix"},
        max_sequences=3)
    lockstep = True

    def make(self):
        return cache_utils.Cache(
            layers=[Exact() for _ in range(self.setup.layers)])


class QuantizedSelect(QuantizedBatch):
    kvtwin = kvtwin.Description(
        name="QuantizedLayer, a batch, by batch_select_indices",
        kinds={"causal"}, can={"copy_prefix"}, max_sequences=3)
    lockstep = True

    def copy_prefix(self, source, target, length):
        rows = torch.arange(self.setup.max_sequences)
        rows[target] = source
        self.cache.batch_select_indices(rows)
        self.padding = self.padding[rows]


def model_of(**numbers):
    """A small model of random weights."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, head_dim=8,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        initializer_range=0.5, max_position_embeddings=128, eos_token_id=None,
        **numbers)
    return transformers.MistralForCausalLM(config).eval()


def tokens_of(model, **options):
    try:
        found = model.generate(
            torch.tensor([[1, 2, 3, 4]]), do_sample=False, max_new_tokens=10,
            pad_token_id=0, eos_token_id=None, **options)
        return found[0].tolist()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def compared(actual, expected):
    if actual == expected:
        return "the same tokens"
    return actual if isinstance(actual, str) else "other tokens"


def generation():
    """The same in generate() of a whole model: do its tokens differ?"""
    model = model_of(sliding_window=1)
    uncached = tokens_of(model, use_cache=False)
    yield ("sliding_window=1, DynamicCache and no cache",
           compared(tokens_of(model), uncached))
    yield ("sliding_window=1, StaticCache and no cache", compared(
        tokens_of(model, cache_implementation="static", disable_compile=True),
        uncached))
    for window in (10, None):
        model = model_of(sliding_window=window)
        short = transformers.StaticCache(model.config, max_cache_len=5)
        yield (f"sliding_window={window}, StaticCache of 5 and of 14",
               compared(tokens_of(model, past_key_values=short),
                        tokens_of(model)))
    model, draft = model_of(sliding_window=None), model_of(sliding_window=None)
    torch.nn.init.normal_(draft.lm_head.weight)
    for of in (lambda config: transformers.DynamicCache(config=config),
               lambda config: transformers.QuantizedCache("fp8", config)):
        cache = of(model.config)
        expected = tokens_of(model, past_key_values=of(model.config))
        found = tokens_of(model, assistant_model=draft, past_key_values=cache)
        yield (f"assisted generation and none, {type(cache).__name__}",
               compared(found, expected))


CLASSES = [
    Dynamic, DynamicOfConfig, Sliding, SlidingFromTwo, SlidingRecorded,
    Assisted, Static, StaticCropped, StaticOverrun, StaticWindow,
    StaticRefusing, Batch, StaticBatch, Quantized, QuantizedBatch,
    QuantizedSelect,
]


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    kvtwin.main(CLASSES + transformers_states.CLASSES, generation,
                "transformers.md")
