"""The caches and masks of older versions of transformers, for pinned.py. Of
versions before 5 only the modules that are driven are loaded."""

import ast
import importlib
import inspect
import types

import pipe as kvtwin
import torch
from pinned import without_init


def torch_rows(rows):
    return torch.tensor(rows).transpose(0, 1)[None]


class Window:
    """One sequence with a window: the base of what follows."""

    def __init__(self, setup):
        if setup.memory < setup.capacity:
            raise kvtwin.NotSupported
        self.setup = setup
        self.clear()

    def clear(self):
        self.length = 0
        self.rows = {}

    def start_forward(self, positions, sequences):
        if positions[-1] >= self.setup.capacity:
            raise kvtwin.CacheFull
        self.queries = len(positions)
        self.past, self.length = self.length, self.length + self.queries

    def remove(self, sequence, begin, end):
        self.clear()  # None of these goes back.

    def can_resume(self, sequence, position):
        return position == 0

    def get(self, layer):
        key, value = (x[0].transpose(0, 1).numpy() for x in self.rows[layer])
        return key, value, self.mask(len(key)).numpy()


class Static(Window):
    """SlidingWindowCache, driven by its cache positions."""
    kvtwin = kvtwin.Description(
        name="SlidingWindowCache", kinds={"swa_mem"})

    def clear(self):
        super().clear()
        utils = importlib.import_module("transformers.cache_utils")
        config = types.SimpleNamespace(
            sliding_window=self.setup.window + 1, head_dim=self.setup.k_head_dim,
            num_attention_heads=self.setup.kv_heads,
            num_key_value_heads=self.setup.kv_heads,
            hidden_size=self.setup.kv_heads * self.setup.k_head_dim,
            num_hidden_layers=self.setup.layers)
        config.get_text_config = lambda decoder=False: config
        self.cache = utils.SlidingWindowCache(
            config, max_batch_size=1, max_cache_len=self.setup.capacity)

    def put(self, layer, key, value):
        positions = torch.arange(self.past, self.length)
        less = self.setup.k_head_dim - self.setup.v_head_dim
        keys, values = self.cache.update(
            torch_rows(key),
            torch.nn.functional.pad(torch_rows(value), (0, less)), layer,
            {"cache_position": positions,
             "sliding_window": self.setup.window + 1})
        self.rows[layer] = keys, values[..., :self.setup.v_head_dim]

    def mask(self, columns):
        """Rows that were written: of a prompt, of a cache that is not full, of
        a full cache that ends with the last token."""
        query = torch.arange(self.past, self.length)[:, None]
        first = 0 if columns >= self.length else self.length - columns
        key = torch.arange(columns) + first
        return (key <= query) & (key >= query - self.setup.window)

    @staticmethod
    def limited(ops):
        """A prompt, then a token at a time: as its update takes them."""
        out, first = [], True
        for name, args in ops:
            if name == "put" and not first:
                args = [(s, 1) for s, _ in args]
            first = name == "drop"
            out.append((name, args))
        return out


class Mask(Window):
    """A cache of all tokens, and the mask of eager attention."""

    def put(self, layer, key, value):
        before = self.rows.get(layer)
        after = torch_rows(key), torch_rows(value)
        self.rows[layer] = after if before is None else [
            torch.cat(pair, 2) for pair in zip(before, after)]


class ConverterMask(Mask):
    kvtwin = kvtwin.Description(
        name="AttentionMaskConverter, a window that leaves the query out",
        kinds={"swa_mem"})
    counts_query = 0

    def __init__(self, setup):
        if setup.window == 0:
            raise kvtwin.NotSupported  # A window of 0 is refused.
        super().__init__(setup)

    def mask(self, columns):
        without_init("transformers")
        module = importlib.import_module("transformers.modeling_attn_mask_utils")
        made = module.AttentionMaskConverter(
            True, sliding_window=self.setup.window + self.counts_query
        ).to_causal_4d(1, self.queries, columns, dtype=torch.float32)
        return made[0, 0] == 0


class MistralMask(ConverterMask):
    """The mask of modeling_mistral.py before there was a converter: a prompt
    has it, a token alone has none. Its function is taken out of the module."""
    kvtwin = kvtwin.Description(name="Mistral's mask", kinds={"swa_mem"})
    counts_query = 1

    def mask(self, columns):
        without_init("transformers")
        try:
            return super().mask(columns)
        except ImportError:
            pass
        spec = importlib.util.find_spec("transformers")
        path = spec.submodule_search_locations[0]
        with open(f"{path}/models/mistral/modeling_mistral.py") as source:
            tree = ast.parse(source.read())
        tree.body = [node for node in tree.body if getattr(node, "name", "")
                     == "_make_sliding_window_causal_mask"]
        names = {"torch": torch}
        exec(compile(tree, path, "exec"), names)
        made = names["_make_sliding_window_causal_mask"](
            (1, self.queries), torch.float32, "cpu", columns - self.queries,
            self.setup.window + 1)
        return made[0, 0] == 0

    @staticmethod
    def limited(ops):
        return ops[:1]  # Its window was not made for a cache.


