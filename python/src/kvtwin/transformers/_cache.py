"""Caches that transformers calls, over a cache of kvtwin."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Literal

import torch
import transformers
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    get_layer_types_and_kwargs,
)

from kvtwin._errors import NotSupported
from kvtwin._setup import DType, Rope, Setup
from kvtwin.transformers._state import State, Storage

Twin = Literal["optimized", "reference"]

#: Models whose K rows `remove` can shift: pairs are halves of a head, in all layers.
_ROPE_MODELS = {
    "gemma",
    "gemma2",
    "gemma3_text",
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
}


class Layer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of a `Cache`. `keys` and `values` are handles: they have no numbers."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, state: State, index: int, window: int | None) -> None:
        super().__init__()
        self._state = state
        self._index = index
        self._window = window
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        handle = self._state.add(self._index, key_states, value_states)
        self.is_initialized = True
        length = self._state.length
        empty = handle.of_pass.empty
        self.keys = self.values = _tensor(key_states, length, empty)
        if value_states.shape != key_states.shape:
            self.values = _tensor(value_states, length, empty)
        self.keys._kvtwin = handle
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length: int = self.get_seq_length()
        offset = 0
        if self._window is not None:
            offset = max(0, length - self._window)
        return length + query_length - offset, offset

    def get_seq_length(self) -> int:
        return self._state.length_of(self._index)

    def get_max_length(self) -> int:
        return self._state.storage.setup.capacity


_META = torch.device("meta")


def _tensor(rows: torch.Tensor, length: int, made: dict[Any, Any]) -> torch.Tensor:
    """Returns a tensor without numbers: a computation with the tensor raises an error.
    `made` keeps the tensors of the pass: a copy of a tensor takes less time than a new
    tensor."""
    kind = rows.shape, rows.dtype
    found: torch.Tensor | None = made.get(kind)
    if found is None:
        batch, heads, _, head_dim = rows.shape
        found = made[kind] = torch.empty(
            (batch, heads, length, head_dim), dtype=rows.dtype, device=_META
        )
    return found.detach()


class Cache(transformers.Cache):  # type: ignore[misc]
    """A cache of transformers over a cache of kvtwin.

    `capacity` is in tokens of each sequence, `max_sequences` counts the rows of a batch
    and of its forks; together they size the cache. `dtype` is that of the stored rows.
    With `bf16_products`, attention may round numbers to bfloat16 before it multiplies
    them, where the processor has instructions for that. A cache that is full raises
    kvtwin.CacheFull.
    """

    def __init__(
        self,
        config: Any,
        *,
        capacity: int,
        max_sequences: int = 1,
        dtype: DType = "f32",
        bf16_products: bool = False,
        twin: Twin = "optimized",
    ) -> None:
        if getattr(config, "is_encoder_decoder", False):
            raise NotSupported(
                f"{config.model_type} has an encoder: use "
                "kvtwin.transformers.EncoderDecoderCache"
            )
        text = config.get_text_config(decoder=True)
        storage = make_storage(
            text, capacity, max_sequences, dtype, bf16_products, twin
        )
        self._begin(State(storage, text, "kvtwin"))

    def _begin(self, state: State) -> None:
        self._state = state
        kinds = state.storage.kinds
        layers: list[Any] = []
        for index, kind in enumerate(state.storage.types):
            if kind < 0:
                layers.append(DummyLayer())
            else:
                layers.append(Layer(state, index, kinds[kind].window))
        super().__init__(layers=layers)

    def reset(self) -> None:
        """Removes all tokens."""
        self._state.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens: -3 removes three."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop by {tokens_to_remove}, it must be negative or 0")
        if tokens_to_remove < 0:
            self._state.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row i continue what row beam_idx[i] has."""
        self._state.pick(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        self._state.pick([row for row in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these rows of the batch."""
        self._state.pick(torch.arange(self.batch_size)[indices].tolist())

    @property
    def batch_size(self) -> int:
        """The number of rows."""
        return len(self._state.ids)

    # Methods that other caches of transformers lack.

    @property
    def tokens(self) -> list[int] | None:
        """The ids of the tokens in the cache, if they were set. `fork` finds them."""
        found = self._state.tokens
        return None if found is None else list(found)

    @tokens.setter
    def tokens(self, ids: torch.Tensor | Sequence[int]) -> None:
        found = _ids(ids)
        length = self._state.length
        if self.batch_size > 1 or self._state.real is not None:
            raise NotSupported("tokens of a batch, or with padding")
        if len(found) < length:
            raise ValueError(f"{len(found)} tokens, the cache has {length}")
        self._state.tokens = found[:length]

    def fork(
        self,
        input_ids: torch.Tensor | Sequence[int] | None = None,
        *,
        length: int | None = None,
    ) -> Cache:
        """Returns a cache that shares rows with this one.

        With `input_ids`, it has the longest prefix of these tokens, without the last
        one, that this cache or another fork has and whose `tokens` were set. With
        `length`, it has that many tokens of this cache; otherwise all.
        """
        source = self._state
        if input_ids is not None:
            source, length = self._longest(_ids(input_ids))
        elif length is None:
            length = source.length
        if not 0 <= length <= source.length:
            raise ValueError(f"fork of {length} tokens, the cache has {source.length}")
        other = object.__new__(type(self))
        other._begin(source.fork(length))
        return other

    def _longest(self, ids: list[int]) -> tuple[State, int]:
        best, length = self._state, 0
        for state in list(self._state.storage.states):
            found = _common(state.tokens or [], ids[:-1])
            if found > length and _can_fork(state, found):
                best, length = state, found
        return best, length

    def remove(self, begin: int, end: int) -> None:
        """Removes the tokens from `begin` to `end`, and moves those after them down:
        their K rows are rotated to their new positions."""
        self._state.remove(begin, end)

    def save(self, path: str | os.PathLike[str], model: str = "") -> None:
        """Writes the sequence to a file, which `load` reads. An existing file is
        replaced once the new one is complete and on disk."""
        state = self._state
        if len(state.ids) != 1 or state.real is not None:
            raise NotSupported("save needs a cache of one row without padding")
        state._settle()
        state.storage.cache.save_sequence(state.ids[0], os.fspath(path), model)

    def load(self, path: str | os.PathLike[str], model: str = "") -> None:
        """Puts the sequence of a file into this cache, which must be empty."""
        state = self._state
        if state.length or state.ids:
            raise ValueError(f"load into a cache that has {state.length} tokens")
        number = state.storage.new_id()
        try:
            state.storage.cache.load_sequence(number, os.fspath(path), model)
        except BaseException:
            state.storage.free([number])
            raise
        state.loaded(number)


def _ids(ids: torch.Tensor | Sequence[int]) -> list[int]:
    if isinstance(ids, torch.Tensor):
        if ids.ndim == 2 and len(ids) == 1:
            ids = ids[0]
        ids = ids.tolist()
    return list(ids)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


def _can_fork(state: State, length: int) -> bool:
    return all(state.storage.can_resume(number, length) for number in state.ids)


class EncoderDecoderCache(transformers.EncoderDecoderCache):  # type: ignore[misc]
    """For a model with an encoder: a cache for the decoder, and one for the rows that
    cross attention reads, `encoder_capacity` of each sequence."""

    def __init__(
        self,
        config: Any,
        *,
        capacity: int,
        encoder_capacity: int,
        max_sequences: int = 1,
        dtype: DType = "f32",
        bf16_products: bool = False,
        twin: Twin = "optimized",
    ) -> None:
        text = config.get_text_config(decoder=True)
        caches = []
        for tokens, cross in ((capacity, False), (encoder_capacity, True)):
            storage = make_storage(
                text, tokens, max_sequences, dtype, bf16_products, twin, cross
            )
            cache = object.__new__(Cache)
            cache._begin(State(storage, config, "kvtwin"))
            caches.append(cache)
        super().__init__(*caches)

    def check_dynamic_cache(self, method: str) -> None:
        """Any method is supported."""

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens of the decoder: -3 removes three."""
        self.self_attention_cache.crop(tokens_to_remove)


def make_storage(
    config: Any,
    capacity: int,
    max_sequences: int,
    dtype: DType,
    bf16_products: bool,
    twin: Twin,
    cross: bool = False,
) -> Storage:
    """Makes a cache for the layers of a model."""
    names, arguments = get_layer_types_and_kwargs(config)
    setups: list[Setup] = []
    types = []
    for name, given in zip(names, arguments):
        if name == "dummy":
            types.append(-1)
            continue
        setup = _setup(config, "full_attention" if cross else name, given)
        if setup not in setups:
            setups.append(setup)
        types.append(setups.index(setup))
    if not setups:
        raise NotSupported(f"{config.model_type} has no attention")
    whole = Setup(kind="wrapper", caches=tuple(setups))
    made = dataclasses.replace(
        setups[0] if len(setups) == 1 else whole,
        placement="scatter",
        mask_dtype="bits",
        dtype=dtype,
        max_sequences=max_sequences,
        capacity=capacity,
        # Cells that are never used take no memory.
        max_batch=max_sequences * capacity,
    )
    return Storage(made, types, cross, twin, bf16_products)


def _setup(config: Any, name: str, given: dict[str, Any]) -> Setup:
    rope = _rope(config, name)
    shift: dict[str, Any] = {} if rope is None else {"shift": "rope", "rope": rope}
    if name == "full_attention":
        return Setup(kind="causal", placement="scatter", **shift)
    size = given.get("sliding_window")
    if name == "sliding_attention" and size:
        return Setup(kind="swa", window=size - 1, placement="scatter", **shift)
    if name == "chunked_attention" and size:
        return Setup(kind="chunked", chunk=size, placement="scatter", **shift)
    raise NotSupported(f"{config.model_type} has layers of {name}")


def _rope(config: Any, name: str) -> Rope | None:
    """How K rows turn with their position. None: kvtwin cannot turn them."""
    found = getattr(config, "rope_parameters", None)
    if found and name in found:
        found = found[name]
    if not found or config.model_type not in _ROPE_MODELS:
        return None
    kind = found.get("rope_type", "default")
    if kind not in ("default", "linear") or "rope_theta" not in found:
        return None
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    part = found.get("partial_rotary_factor") or getattr(
        config, "partial_rotary_factor", None
    )
    return Rope(
        halves=True,
        base=float(found["rope_theta"]),
        scale=1.0 / found["factor"] if kind == "linear" else 1.0,
        dims=int(head_dim * (part or 1.0)),
    )
