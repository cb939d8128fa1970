"""Checks what the attention of a model reads from the model's own cache."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvtwin._kvtwin import View
from kvtwin._types import Array, BoolArray
from kvtwin.transformers import _masks
from kvtwin.transformers._attention import options_of
from kvtwin.transformers._cache import make_storage
from kvtwin.transformers._state import Handle, State, real_rows

_NAME = "kvtwin_audit"
_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: ("f32", torch.int32),
    torch.float16: ("f16", torch.int16),
    torch.bfloat16: ("bf16", torch.int16),
}


class Audit:
    """Runs a model with its own cache and its own attention, and compares what each
    token reads with the rows that the reference says, layer by layer.

        with kvtwin.transformers.Audit(model) as audit:
            model.generate(**inputs, past_key_values=MyCache(...))
        print(audit)

    It is true if nothing was wrong. `finding` is the first thing that was, and nothing
    is compared after it. Rows are compared bit for bit: a cache that rounds rows is
    wrong at its first token. Cross attention must read all rows of the encoder, except
    for padding.
    """

    def __init__(self, model: Any, *, capacity: int = 4096) -> None:
        #: Tokens of a sequence that can be followed.
        self.capacity = capacity
        self.finding: str | None = None
        #: The layers of passes, and the tokens that read, that were compared.
        self.layers = 0
        self.tokens = 0
        self._model = model
        self._config = model.config.get_text_config(decoder=True)
        self._mirrors: weakref.WeakKeyDictionary[Any, _Mirror] = (
            weakref.WeakKeyDictionary()
        )
        self._pending: dict[int, Handle] = {}
        #: The rows of the encoder that each layer got, in the cache of this pass.
        self._of_encoder: dict[int, Handle] = {}
        self._numbers: dict[tuple[int, int], _Numbers] = {}
        self._mask: torch.Tensor | None = None
        self._encoder_mask: torch.Tensor | None = None
        self._implementation = self._config._attn_implementation
        AttentionInterface.register(_NAME, self._attend)
        AttentionMaskInterface.register(
            _NAME, ALL_MASK_ATTENTION_FUNCTIONS[self._implementation]
        )
        model.set_attn_implementation(_NAME)
        self._hook = model.register_forward_pre_hook(self._before, with_kwargs=True)

    def close(self) -> None:
        """The model is as before."""
        if self._hook is None:
            return
        self._hook.remove()
        self._hook = None
        self._model.set_attn_implementation(self._implementation)
        for mirror in self._mirrors.values():
            mirror.close()

    def __enter__(self) -> Audit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __bool__(self) -> bool:
        return self.finding is None

    def __str__(self) -> str:
        if self.finding is not None:
            return self.finding
        if self.layers == 0:
            return "nothing compared: no cache was passed to the model"
        return f"right: {self.tokens} tokens read what they should, in all layers"

    def _before(self, _: Any, args: Any, given: dict[str, Any]) -> None:
        """Before each forward pass of the model."""
        cache = given.get("past_key_values")
        cache = given.get("cache") if cache is None else cache
        self._pending.clear()
        mask = given.get("attention_mask")
        if getattr(self._model.config, "is_encoder_decoder", False):
            self._encoder_mask = mask
            mask = given.get("decoder_attention_mask")
        if isinstance(mask, dict):
            mask = mask.get("full_attention", next(iter(mask.values()), None))
        self._mask = mask
        self._follow(getattr(cache, "self_attention_cache", cache), cross=False)
        self._of_encoder = self._follow(
            getattr(cache, "cross_attention_cache", None), cross=True
        )

    def _follow(self, cache: Any, cross: bool) -> dict[int, Handle]:
        """Returns the handles of the layers of a cache."""
        if cache is None:
            return {}
        if cache not in self._mirrors:
            self._mirrors[cache] = _Mirror(self, cache, cross)
        return self._mirrors[cache].handles

    def _attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any,
                **options: Any) -> Any:
        if self._implementation == "eager":
            attend = sys.modules[type(module).__module__].eager_attention_forward
        else:
            attend = ALL_ATTENTION_FUNCTIONS[self._implementation]
        results = attend(module, query, key, value, mask, **options)
        layer = getattr(module, "layer_idx", -1)
        handle = self._pending.pop(layer, None)
        # The layers of an encoder have numbers, too.
        if handle is None and getattr(module, "is_decoder", True):
            handle = self._of_encoder.get(layer)
        if handle is not None and self.finding is None:
            allowed = _allowed(module, query, key, mask, options)
            compare = self._compare_cross if handle.state.storage.cross else self._compare
            visible = compare(handle, key, value, allowed)
            if self.finding is None:
                self._check_output(handle, visible, query, results[0], options)
        return results

    def _padding(self, state: State) -> torch.Tensor | None:
        """Returns True for each token that is not padding."""
        mask = self._mask
        if not isinstance(mask, torch.Tensor) or mask.ndim not in (2, 4):
            return None
        if mask.ndim == 2:
            return mask.bool()
        tokens, rows = mask.shape[2], len(state.ids)
        if tokens < state.length:  # Only prompts have padding.
            real = state.real
            return None if real is None else torch.nn.functional.pad(
                real, (0, state.length - real.shape[1]), value=True)
        # A token that is not padding sees itself.
        allowed, _ = _masks.dense(mask, rows, tokens, tokens)
        itself = np.broadcast_to(allowed, (rows, tokens, tokens)).diagonal(axis1=1, axis2=2)
        return torch.from_numpy(itself.copy())

    def _put(self, handle: Handle, padding: torch.Tensor | None) -> list[int]:
        """Puts the rows of a layer, and returns which of their tokens are not padding."""
        state, current = handle.state, handle.of_pass
        storage = state.storage
        if not current.started:
            state.start(current, padding)
        storage.select(storage.types[handle.layer])
        new = [real_rows(x, current.real) for x in (handle.key, handle.value)]
        storage.put(handle.layer, *new)
        batch_tokens = range(len(handle.key) * current.tokens)
        real = list(map(int, batch_tokens if current.real is None else current.real))
        numbers = self._numbers.setdefault((id(state), handle.layer), _Numbers())
        flat = [x.transpose(1, 2).flatten(0, 1).transpose(0, 1) for x in new]
        for number, index in zip(numbers.of(*map(_bits, flat)), real):
            row, token = divmod(index, current.tokens)
            numbers.owners[int(number)] = row, state._base + token
        return real

    def _compare(self, handle: Handle, key: Any, value: Any,
                 allowed: BoolArray) -> BoolArray:
        """Returns which token may read which row of the view: (tokens, columns)."""
        real = self._put(handle, self._padding(handle.state))
        view = handle.state.storage.cache.get(handle.layer)
        visible = _visible(view)
        if self._same(handle, key, value, allowed, real, view, visible):
            self.layers += 1
            self.tokens += len(real) if handle.layer == 0 else 0
        return visible

    def _compare_cross(self, handle: Handle, key: Any, value: Any,
                       allowed: BoolArray) -> BoolArray:
        """The same for cross attention."""
        state = handle.state
        if handle.key is not None:
            self._put(handle, None)
            handle.key = handle.value = None
        view = state.storage.cache.get(handle.layer)
        tokens = allowed.shape[1]
        visible = np.zeros((len(key) * tokens, view.key.shape[0]), dtype=np.bool_)
        cells = state.storage.cells_of(0, state.ids)
        for row, number in enumerate(state.ids):
            at = np.array([cells[number][p] for p in sorted(cells[number])])
            padding = self._encoder_mask
            if padding is not None and padding.shape == (len(key), len(at)):
                at = at[padding[row].bool().numpy()]
            visible[row * tokens : (row + 1) * tokens, at - view.first_cell] = True
        if self._same(handle, key, value, allowed, range(len(visible)), view, visible):
            self.layers += 1
        return visible

    def _same(self, handle: Handle, key: Any, value: Any, allowed: BoolArray,
              real: Sequence[int], view: View, visible: BoolArray) -> bool:
        """Whether each token reads the rows that are visible to it; reports the first
        token that does not."""
        numbers = self._numbers[id(handle.state), handle.layer]
        expected = numbers.of(view.key.numpy(), view.value.numpy())
        read = [numbers.of(_bits(k), _bits(v)) for k, v in zip(key, value)]
        for row, index in enumerate(real):
            batch, token = divmod(index, allowed.shape[1])
            found = np.sort(read[batch][allowed[batch, token]])
            wanted = np.sort(expected[visible[row]])
            if not np.array_equal(found, wanted):
                self._report(handle, batch, token, Counter(wanted.tolist()),
                             Counter(found.tolist()), numbers.owners)
                return False
        return True

    def _report(self, handle: Handle, batch: int, token: int, wanted: Counter[int],
                found: Counter[int], owner: dict[int, tuple[int, int]]) -> None:
        parts = [f"misses {_name(owner.get(x), batch)}" for x in (wanted - found)]
        for x in found - wanted:
            times = "twice" if x in wanted else "which it must not see"
            if x in owner:
                parts.append(f"reads {_name(owner[x], batch)}, {times}")
            else:
                parts.append("reads a row that belongs to no token")
        if handle.state.storage.cross:
            self.finding = (
                f"layer {handle.layer}, row {batch}, token {token} of the pass: cross "
                "attention " + "; ".join(parts[:4])
            )
            return
        self.finding = (
            f"layer {handle.layer}, row {batch}, token "
            f"{handle.state._base + token}: attention " + "; ".join(parts[:4])
        )

    def _check_output(self, handle: Handle, visible: BoolArray, query: Any, out: Any,
                      options: dict[str, Any]) -> None:
        """The output of attention, within a bound of its rounding."""
        storage = handle.state.storage
        real = None if storage.cross else handle.of_pass.real
        scale, soft_cap, sinks = options_of(query, options)
        view = storage.cache.get(handle.layer)
        attention = storage.attention(0)
        attention.plan(visible)
        rows = real_rows(query.detach(), real).transpose(1, 2).flatten(0, 1)
        wanted = attention.attend(rows, view, scale=scale, soft_cap=soft_cap, sinks=sinks)
        found = real_rows(out.detach().transpose(1, 2), real).transpose(1, 2).flatten(0, 1)
        keys, values = view.key.float32(), view.value.float32()
        longest = np.abs(np.linalg.norm(keys, axis=-1)[visible.any(0)]).max()
        largest = np.abs(values[visible.any(0)]).max()
        scores = abs(scale) * float(rows.float().norm(dim=-1).max()) * longest
        unit = torch.finfo(query.dtype).eps / 2
        f32 = 2.0**-24
        # Scores (docs/attention.md), which the model may round to its dtype.
        error = f32 * (rows.shape[-1] + 16) * scores + 4 * unit * (scores + 4)
        relative = np.expm1(min(2 * error, 8.0)) + f32 * 8 * visible.shape[1]
        bound = 2 * (relative + 4 * unit) * largest
        off = np.abs(found.float().numpy() - wanted.out).max()
        if not off <= bound:
            self.finding = (
                f"layer {handle.layer}: attention reads the right rows, and its output "
                f"is off by {off:.3g}; rounding explains {bound:.3g}"
            )


class _Mirror:
    """Does with the reference what is done with a cache."""

    def __init__(self, audit: Audit, cache: Any, cross: bool) -> None:
        self._audit = audit
        self._cache = weakref.ref(cache)
        self._cross = cross
        self._state: State | None = None
        #: The rows that each layer put last.
        self.handles: dict[int, Handle] = {}
        self._wrapped: list[str] = []
        self._wrap("update", self._update)
        self._wrap("crop", lambda state, tokens: tokens and state.crop(abs(tokens)))
        self._wrap("reset", lambda state: state.reset())
        self._wrap("reorder_cache", lambda state, rows: state.pick(rows.tolist()))
        self._wrap("batch_repeat_interleave", lambda state, n: state.pick(
            [row for row in range(len(state.ids)) for _ in range(n)]))
        self._wrap("batch_select_indices", lambda state, rows: state.pick(
            torch.arange(len(state.ids))[rows].tolist()))

    def _wrap(self, name: str, mirror: Any) -> None:
        """Sets a method of the cache that calls `mirror` first."""
        cache = self._cache()
        original = getattr(type(cache), name, None)
        if original is None:
            return

        def call(*args: Any, **given: Any) -> Any:
            if self._audit.finding is None:
                if name == "update":
                    mirror(*args, **given)
                elif self._state is not None:
                    mirror(self._state, *args, **given)
            return original(self._cache(), *args, **given)

        setattr(cache, name, call)
        self._wrapped.append(name)

    def _update(self, key_states: Any, value_states: Any, layer_idx: int,
                *_: Any, **__: Any) -> None:
        audit = self._audit
        if self._state is None:
            storage = make_storage(
                audit._config, audit.capacity, len(key_states),
                _DTYPES[key_states.dtype][0], False, "reference", self._cross,
            )
            self._state = State(storage, audit._config, None)
        key, value = (x.detach().clone() for x in (key_states, value_states))
        handle = self._state.add(layer_idx, key, value)
        self.handles[layer_idx] = handle
        if not self._cross:
            audit._pending[layer_idx] = handle

    def close(self) -> None:
        cache = self._cache()
        for name in self._wrapped:
            delattr(cache, name)
        self._wrapped = []


class _Numbers:
    """Gives rows with the same bits the same number."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        #: The row and the index of the token that has this number.
        self.owners: dict[int, tuple[int, int]] = {}

    def of(self, keys: Array, values: Array) -> Array:
        pairs = zip(np.ascontiguousarray(keys), np.ascontiguousarray(values))
        return np.array(
            [
                self._numbers.setdefault(
                    hashlib.blake2b(k.tobytes() + v.tobytes(), digest_size=16).digest(),
                    len(self._numbers),
                )
                for k, v in pairs
            ],
            dtype=np.int64,
        )


def _bits(rows: torch.Tensor) -> Array:
    """Returns (heads, tokens, head_dim) as (tokens, heads, head_dim), as its bits."""
    rows = rows.detach().transpose(0, 1).contiguous()
    found: Array = rows.view(_DTYPES[rows.dtype][1]).numpy()
    return found


def _visible(view: View) -> BoolArray:
    assert view.mask is not None
    found: BoolArray = view.mask.float32() == 0
    return found


def _allowed(module: Any, query: Any, key: Any, mask: Any,
             options: dict[str, Any]) -> BoolArray:
    """Returns which token reads which, (batch, tokens, columns), as attention sees it."""
    batch, tokens, columns = len(query), query.shape[2], key.shape[2]
    if mask is not None:
        allowed, _ = _masks.dense(mask, batch, tokens, columns)
        return np.broadcast_to(allowed, (batch, tokens, columns))
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if tokens == 1 or not causal:
        return np.ones((batch, tokens, columns), dtype=np.bool_)
    return np.broadcast_to(
        np.tri(tokens, columns, dtype=np.bool_), (batch, tokens, columns)
    )


def _name(token: tuple[int, int] | None, batch: int) -> str:
    if token is None:
        return "a token"
    row, index = token
    return f"token {index}" + ("" if row == batch else f" of row {row}")
