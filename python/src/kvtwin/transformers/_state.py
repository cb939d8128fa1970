"""Sequences of a kvtwin cache that are the rows of a batch of transformers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from kvtwin._attention import Attention
from kvtwin._errors import CacheFull, NotSupported
from kvtwin._kvtwin import Cache, View
from kvtwin._setup import OPEN_END, Setup
from kvtwin._types import BoolArray
from kvtwin.transformers import _masks


class Storage:
    """A kvtwin cache, and the sequences in it. Several states share it by forks."""

    def __init__(
        self,
        setup: Setup,
        types: Sequence[int],
        cross: bool,
        twin: Any,
        bf16_products: bool,
    ):
        self.setup = setup
        self.bf16_products = bf16_products
        #: For each layer, the cache of the wrapper that it is in; -1: in none.
        self.types = types
        self.kinds = setup.caches or (setup,)
        #: Whether this has the rows of an encoder, which each query sees.
        self.cross = cross
        self.cache = Cache(setup, twin)
        self.states: weakref.WeakSet[State] = weakref.WeakSet()
        self._twin = twin
        self._ids: set[int] = set()
        self._attentions: list[Attention] = []
        self._type = -1
        #: The pass that the cache is in.
        self.current: Pass | None = None

    def begin(self, positions: Sequence[int], sequences: Sequence[int]) -> None:
        self._type = -1
        self.current = None
        self.cache.start_forward(positions, sequences)

    def select(self, kind: int) -> None:
        """Makes a cache of the wrapper the active one."""
        if self.setup.caches and kind != self._type:
            self.cache.set_layer_type(kind)
            self._type = kind

    def attention(self, number: int) -> Attention:
        while len(self._attentions) <= number:
            self._attentions.append(Attention(self._twin))
        return self._attentions[number]

    def _rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows that `put` takes."""
        if rows.dtype != torch.float32 and _NAMES.get(rows.dtype) != self.setup.dtype:
            rows = rows.float()
        return _even(rows)

    def put(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        key, value = (
            self._rows(x.detach()).transpose(1, 2).flatten(0, 1) for x in (key, value)
        )
        self.cache.put(layer, key, value)

    def attend(
        self,
        attention: Attention,
        layer: int,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        query: torch.Tensor,
        scale: float,
        soft_cap: float,
        sinks: Any,
        out: torch.Tensor,
    ) -> None:
        """Puts the rows of a layer, unless they are there, and attends to it."""
        rows = "f32"
        if key is not None and value is not None:
            key, value = self._rows(key), self._rows(value)
            rows = _NAMES[key.dtype]
        self.cache.attend_layer(
            attention._twin,
            layer,
            key,
            value,
            rows,
            _even(query),
            _NAMES[query.dtype],
            scale,
            soft_cap,
            sinks,
            self.bf16_products,
            out,
        )

    def new_id(self) -> int:
        number = next(i for i in range(len(self._ids) + 1) if i not in self._ids)
        self._ids.add(number)
        return number

    def copy(self, source: int, length: int = OPEN_END) -> int:
        target = self.new_id()
        self.cache.copy_prefix(source, target, length)
        return target

    def free(self, ids: Iterable[int]) -> None:
        for number in ids:
            self.cache.remove(number, 0, OPEN_END)
            self._ids.discard(number)

    def can_resume(self, sequence: int, position: int) -> bool:
        return position == 0 or self.cache.can_resume(sequence, position)

    def cells_of(self, kind: int, ids: Sequence[int]) -> dict[int, dict[int, int]]:
        """For each sequence, the cell of each position."""
        self.select(kind)
        cells: dict[int, dict[int, int]] = {number: {} for number in ids}
        for cell, position, sequence in self.cache.cells():
            if sequence in cells:
                cells[sequence][position] = cell
        return cells


class Pass:
    """A forward pass: `tokens` new ones in each row of the batch."""

    __slots__ = ("empty", "plans", "real", "started", "tokens", "updated")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.started = False
        self.updated: set[int] = set()
        #: The indices of tokens that are not padding, row by row. None: all.
        self.real: torch.Tensor | None = None
        #: Plans by kind and mask; the masks are kept, so that no other has their id.
        self.plans: dict[tuple[int, int], tuple[Attention, Any]] = {}
        #: Tensors without numbers, by the shape and the dtype of the rows of a layer.
        self.empty: dict[Any, torch.Tensor] = {}


class Handle:
    """The value that `update` gives to attention in place of rows."""

    __slots__ = ("key", "layer", "of_pass", "state", "v_head_dim", "value")

    def __init__(
        self, state: State, layer: int, of_pass: Pass, key: Any, value: Any
    ) -> None:
        self.state = state
        self.layer = layer
        self.of_pass = of_pass
        #: The rows, until they are stored.
        self.key = key
        self.value = value
        self.v_head_dim: int = value.shape[3]


class State:
    """The rows of a batch: a sequence each. The token at index i of a row has position
    i - pad in its sequence; padding is not stored."""

    def __init__(self, storage: Storage, config: Any, needs_attention: str | None):
        self.storage = storage
        self.config = config
        #: The attention implementation without which rows would be read wrongly.
        self.needs_attention = needs_attention
        self.ids: list[int] = []
        self.pads: list[int] = []
        #: (rows, length): which tokens are not padding. None: all.
        self.real: torch.Tensor | None = None
        #: The tokens, if the user said what they are.
        self.tokens: list[int] | None = None
        self._base = 0  # The length before the current pass.
        self._pass: Pass | None = None
        storage.states.add(self)
        weakref.finalize(self, storage.free, self.ids).atexit = False

    @property
    def length(self) -> int:
        return self._base + (self._pass.tokens if self._pass else 0)

    def length_of(self, layer: int) -> int:
        current = self._pass
        return self._base + (
            current.tokens if current and layer in current.updated else 0
        )

    # A pass.

    def add(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Handle:
        """Takes the rows of a layer, (batch, kv_heads, tokens, head_dim)."""
        if self.storage.types[layer] < 0:
            raise NotSupported(f"layer {layer} shares the rows of another layer")
        batch, _, tokens, _ = key.shape
        current = self._pass
        if current is None or layer in current.updated:
            self._check(key)
            current = self._next_pass(batch, tokens)
        elif tokens != current.tokens:
            raise ValueError(
                f"layer {layer} has {tokens} new tokens, other layers have "
                f"{current.tokens}"
            )
        current.updated.add(layer)
        return Handle(self, layer, current, key, value)

    def _check(self, key: torch.Tensor) -> None:
        if key.device.type != "cpu":
            raise NotSupported(f"the rows are on {key.device}; kvtwin's are on the CPU")
        used = getattr(self.config, "_attn_implementation", None)
        if self.needs_attention not in (None, used):
            raise NotSupported(
                f"the model's attention is {used!r}: load it with attn_implementation="
                f"{self.needs_attention!r}, or call model.set_attn_implementation("
                f"{self.needs_attention!r})"
            )

    def _next_pass(self, batch: int, tokens: int) -> Pass:
        if self._pass is not None:
            self._end_pass(self._pass)
        if not self.ids:
            most = self.storage.setup.max_sequences
            if batch > most:
                raise ValueError(
                    f"the batch has {batch} sequences, max_sequences is {most}"
                )
            self.ids.extend(self.storage.new_id() for _ in range(batch))
            self.pads = [0] * batch
        if batch != len(self.ids):
            raise ValueError(
                f"the batch has {batch} sequences, the cache has {len(self.ids)}"
            )
        self._pass = Pass(tokens)
        return self._pass

    def _end_pass(self, last: Pass) -> None:
        if not last.started:
            self._pass = None  # Nothing of it is stored.
            return
        missing = [
            layer
            for layer, kind in enumerate(self.storage.types)
            if kind >= 0 and layer not in last.updated
        ]
        if missing:
            raise NotSupported(
                f"layer {missing[0]} got no rows in the last pass; crop the cache by "
                f"{last.tokens} tokens, or reset it"
            )
        self._base += last.tokens
        self._pass = None

    def attend(
        self,
        handle: Handle,
        query: torch.Tensor,
        mask: Any,
        scale: float,
        soft_cap: float,
        sinks: Any,
    ) -> torch.Tensor:
        """Attention of a layer: (batch, heads, tokens, head_dim) in, (batch, tokens,
        heads, head_dim) out."""
        storage = self.storage
        current = handle.of_pass
        if not storage.cross and current is not self._pass:
            raise RuntimeError("the rows are those of an earlier pass")
        if not current.started:
            self.start(current, _masks.padding_of(mask))
        if storage.current is not current and not storage.cross:
            raise RuntimeError("another cache of the same storage began a pass")
        kind = storage.types[handle.layer]
        storage.select(kind)
        key, value = handle.key, handle.value
        real = None if storage.cross else current.real
        found = current.plans.get((kind, id(mask)))
        if key is not None and (found is None or real is not None):
            storage.put(handle.layer, real_rows(key, real), real_rows(value, real))
            key = value = None
        batch, heads, tokens, _ = query.shape
        if found is None:
            view = storage.cache.get(handle.layer)
            found = self._plan(current, kind, mask, view, tokens)
        rows = query if real is None else real_rows(query, real)
        out = torch.empty((batch, tokens, heads, handle.v_head_dim))
        results = out if real is None else torch.empty((len(real), *out.shape[2:]))
        storage.attend(
            found[0], handle.layer, key, value, rows, scale, soft_cap, sinks, results
        )
        handle.key = handle.value = None
        if real is not None:
            out.zero_().view(-1, *out.shape[2:])[real] = results
        return out if query.dtype == out.dtype else out.to(query.dtype)

    def start(self, current: Pass, padding: torch.Tensor | None) -> None:
        """Finds cells for the tokens that are not padding. `padding`, (rows, tokens),
        says which are not. None: all."""
        begin, end = self._base, self._base + current.tokens
        if self.storage.cross:
            padding = None
        if padding is not None and bool(padding[:, :end].all()):
            if padding.shape[1] < end:
                raise ValueError(
                    f"attention_mask has {padding.shape[1]} columns, the cache and the "
                    f"batch have {end}"
                )
            padding = None
        pads, real = self.pads, self.real
        if padding is not None or real is not None:
            pads, real = self._pads(padding, begin, end)
        positions: list[int] = []
        sequences: list[int] = []
        for row, (number, pad) in enumerate(zip(self.ids, pads)):
            if real is None:
                indices: Iterable[int] = range(begin, end)
            else:
                indices = (real[row, begin:].nonzero()[:, 0] + begin).tolist()
            positions.extend(index - pad for index in indices)
            sequences.extend([number] * (len(positions) - len(sequences)))
        setup = self.storage.setup
        try:
            if len(positions) > setup.max_batch:
                raise CacheFull(f"{len(positions)} tokens are too many")
            self.storage.begin(positions, sequences)
        except CacheFull as error:
            self._pass = None
            raise CacheFull(
                f"{error} (capacity={setup.capacity}, "
                f"max_sequences={setup.max_sequences})"
            ) from None
        if real is not None and not bool(real[:, begin:].all()):
            current.real = real[:, begin:].flatten().nonzero()[:, 0]
        self.pads, self.real = pads, real
        self.storage.current = current
        current.started = True

    def _pads(
        self, padding: torch.Tensor | None, begin: int, end: int
    ) -> tuple[list[int], torch.Tensor]:
        """Returns the padding on the left of each row, and which tokens are real."""
        rows = len(self.ids)
        if padding is None:
            padding = torch.ones((rows, end), dtype=torch.bool)
        if padding.shape[1] < end:
            padding = torch.nn.functional.pad(padding, (0, end - padding.shape[1]))
        real = padding[:, :end]
        before = (
            self.real
            if self.real is not None
            else torch.ones((rows, begin), dtype=torch.bool)
        )
        if not torch.equal(real[:, :begin], before):
            raise NotSupported(
                "attention_mask has changed for tokens that the cache has already"
            )
        pads = []
        for row in range(rows):
            found = real[row].nonzero()
            pads.append(int(found[0, 0]) if len(found) else end)
        return pads, real

    # Masks.

    def _plan(
        self, current: Pass, kind: int, mask: Any, view: View, tokens: int
    ) -> tuple[Attention, Any]:
        storage = self.storage
        attention = storage.attention(len(current.plans))
        if storage.cross or not _masks.agrees(mask, storage.kinds[kind]):
            attention.plan(self._dense(current, kind, mask, view, tokens))
        else:
            attention.plan(view.mask)
        found = attention, mask
        if not storage.cross:
            current.plans[kind, id(mask)] = found
        return found

    def _dense(
        self, current: Pass, kind: int, mask: Any, view: View, tokens: int
    ) -> BoolArray:
        """Returns a mask over cells for a mask over indices."""
        allowed, offset = _masks.dense(mask, len(self.ids), tokens, self.length)
        cells = self.storage.cells_of(kind, self.ids)
        columns = view.key.shape[0]
        found = np.zeros((len(self.ids) * tokens, columns), dtype=np.bool_)
        for row, (number, pad) in enumerate(zip(self.ids, self.pads)):
            at = np.full(allowed.shape[2], -1)
            for position, cell in cells[number].items():
                index, column = position + pad - offset, cell - view.first_cell
                if 0 <= index < len(at) and 0 <= column < columns:
                    at[index] = column
            seen = allowed[row if len(allowed) > 1 else 0]
            gone = (seen & (at < 0)).any(axis=0).nonzero()[0]
            if self.real is not None:
                gone = [i for i in gone if bool(self.real[row, i + offset])]
            if len(gone):
                raise NotSupported(
                    f"attention_mask shows token {gone[0] + offset} of row {row}, which "
                    "the cache does not have any more"
                )
            held = at >= 0
            found[row * tokens : (row + 1) * tokens, at[held]] = seen[:, held]
        if current.real is not None and not self.storage.cross:
            found = found[current.real.numpy()]
        return found

    # Between passes.

    def _settle(self) -> None:
        if self._pass is not None:
            self._end_pass(self._pass)

    def crop(self, tokens: int) -> None:
        """Removes the last tokens."""
        if self._pass is not None and not self._pass.started:
            self._pass = None  # Nothing of it is stored.
        length = self.length - tokens
        if length < 0:
            raise ValueError(f"crop by {tokens} tokens, the cache has {self.length}")
        if length > self._base:
            self._settle()
        begins = [max(0, length - pad) for pad in self.pads]
        for number, begin in zip(self.ids, begins):
            if not self.storage.can_resume(number, begin):
                raise NotSupported(
                    f"crop to {length} tokens: a sliding window needs tokens before "
                    "these that were evicted"
                )
        for number, begin in zip(self.ids, begins):
            self.storage.cache.remove(number, begin, OPEN_END)
        self._pass = None
        self._base = length
        if self.real is not None:
            self.real = self.real[:, :length]
        if self.tokens is not None:
            del self.tokens[length:]

    def remove(self, begin: int, end: int) -> None:
        """Removes tokens in the middle, and shifts those after them."""
        self._settle()
        if len(self.ids) != 1 or self.real is not None:
            raise NotSupported("remove needs a cache of one row without padding")
        if not 0 <= begin <= end <= self._base:
            raise ValueError(
                f"remove from {begin} to {end}, the cache has {self._base} tokens"
            )
        self.storage.cache.remove(
            self.ids[0], begin, OPEN_END if end == self._base else end
        )
        self._base -= end - begin
        if self.tokens is not None:
            del self.tokens[begin:end]

    def pick(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was."""
        self._settle()
        kept: list[int] = []
        for row in rows:
            number = self.ids[row]
            kept.append(number if number not in kept else self.storage.copy(number))
        self.storage.free(set(self.ids) - set(kept))
        self.ids[:] = kept
        self.pads = [self.pads[row] for row in rows]
        if self.real is not None:
            self.real = self.real[list(rows)]

    def reset(self) -> None:
        self.storage.free(self.ids)
        self.ids.clear()
        self.pads, self.real, self.tokens = [], None, None
        self._base, self._pass = 0, None

    def fork(self, length: int) -> State:
        """Returns a state of the first tokens, which shares their rows."""
        self._settle()
        begins = [max(0, length - pad) for pad in self.pads]
        for number, begin in zip(self.ids, begins):
            if not self.storage.can_resume(number, begin):
                raise NotSupported(
                    f"fork of {length} tokens: a sliding window needs tokens before "
                    "these that were evicted"
                )
        other = State(self.storage, self.config, self.needs_attention)
        if length == 0:
            return other
        other.ids.extend(
            self.storage.copy(number, begin) for number, begin in zip(self.ids, begins)
        )
        other.pads = list(self.pads)
        other.real = None if self.real is None else self.real[:, :length]
        other.tokens = None if self.tokens is None else self.tokens[:length]
        other._base = length
        return other

    def loaded(self, number: int) -> None:
        """Becomes the state of a sequence that was put into the storage."""
        self.storage.current = None
        self.storage.select(0)
        cells = self.storage.cells_of(0, [number])[number]
        self.ids.append(number)
        self.pads = [0]
        self._base = max(cells, default=-1) + 1


_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def real_rows(rows: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """Returns (batch, heads, tokens, head_dim) as (1, heads, rows, head_dim), without
    padding."""
    if real is None:
        return rows
    return rows.transpose(1, 2).flatten(0, 1)[real].transpose(0, 1)[None]


def _even(rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows at equal distances from one another."""
    batch, _, tokens, _ = rows.shape
    if batch == 1 or tokens == 1 or rows.stride(0) == tokens * rows.stride(2):
        return rows
    return rows.transpose(1, 2).contiguous().transpose(1, 2)
