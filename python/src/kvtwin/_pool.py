"""Driving a pool of blocks that is written in Python."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from kvtwin import _arrays
from kvtwin._errors import NotSupported
from kvtwin._setup import (
    DTYPES,
    POOL_ABILITIES,
    POOL_HAS_WINDOW,
    PoolDescription,
    PoolSetup,
)
from kvtwin._types import Array

NEEDED = ("open", "seq_len", "append", "commit", "free")
SHOWN = ("views", "attend")  # At least one of them.
OPTIONAL = ("fork", "truncate", "commit_unknown", "usage", "table", "slots", "add_media")


class PoolBackend:
    """A user's class of pools, as the compiled part sees it."""

    refuses_misuse = False  # Misuse is not tried at visibility.

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.description: PoolDescription = cls.kvtwin  # type: ignore[attr-defined]
        for name in NEEDED:
            if not callable(getattr(cls, name, None)):
                raise TypeError(f"{cls.__name__} has no method {name}")
        self.has = {n for n in SHOWN + OPTIONAL if callable(getattr(cls, n, None))}
        if self.has.isdisjoint(SHOWN):
            raise TypeError(f"{cls.__name__} has neither views nor attend")
        for ability in ("soft_cap", "sinks"):
            if ability in self.description.can and "attend" not in self.has:
                raise TypeError(
                    f"{cls.__name__} declares the ability {ability}, but has no method attend"
                )
        if "media" in self.description.can and "add_media" not in self.has:
            raise TypeError(
                f"{cls.__name__} declares the ability media, but has no method add_media"
            )

    def describe(self) -> tuple[str, int, int, int, int, float, int, int, int, int]:
        """Returns name, can, window, attend_dtype, max_query_heads, attend_tolerance,
        dtypes, block_multiple, head_dim_multiple, max_sequences."""
        said = self.description
        can = sum(1 << POOL_ABILITIES[name] for name in said.can)
        if said.window is not None:
            can |= POOL_HAS_WINDOW
        return (
            said.name,
            can,
            said.window or 0,
            DTYPES.index(said.attend_dtype),
            said.max_query_heads,
            said.attend_tolerance,
            sum(1 << DTYPES.index(dtype) for dtype in said.dtypes),
            said.block_multiple,
            said.head_dim_multiple,
            said.max_sequences,
        )

    def init(self, fields: dict[str, Any]) -> PoolInstance:
        groups = tuple(PoolSetup(**group) for group in fields.pop("groups"))
        if "groups" in self.description.can and not groups:
            raise NotSupported("the class has pools with groups only")
        setup = PoolSetup(**fields, groups=groups)
        return PoolInstance(self.cls, setup, self.description.can)


class PoolInstance:
    """One pool of the user's class."""

    def __init__(self, cls: type, setup: PoolSetup, can: Collection[str]) -> None:
        self.setup = setup
        self.can = can
        self.pool: Any = cls(setup)
        self.shown: list[tuple[Array, Array, int, int]] = []

    def close(self) -> None:
        self.shown = []
        if hasattr(self.pool, "close"):
            self.pool.close()

    def open(
        self, prompt: list[int], salt: str, extra: list[str], media: list[tuple[int, str]]
    ) -> int:
        more: dict[str, Any] = {"media": tuple(media)} if "media" in self.can else {}
        made = self.pool.open(prompt, salt=salt, extra=tuple(extra), **more)
        return _arrays.integer(made, "the sequence")

    def add_media(self, sequence: int, position: int, hash: str) -> None:
        self.pool.add_media(sequence, position, hash)

    def seq_len(self, sequence: int) -> int:
        return _arrays.integer(self.pool.seq_len(sequence), "seq_len")

    def append(self, sequence: int, layer: int, key: Array, value: Array) -> None:
        # Copies, which the pool may keep or write to.
        self.pool.append(sequence, layer, np.array(key), np.array(value))

    def commit(self, sequence: int, tokens: list[int]) -> None:
        self.pool.commit(sequence, tokens)

    def commit_unknown(self, sequence: int, count: int) -> None:
        self.pool.commit_unknown(sequence, count)

    def views(self, sequence: int, layer: int) -> list[tuple[Array, Array, int, int]]:
        """Returns key, value, block and first position of each view, valid until the
        next call of views."""
        setup = self.setup.of_layer(layer)
        dtype, v_dtype = setup.dtype, setup.v_dtype
        key_row = setup.kv_heads, _arrays.width(setup.k_head_dim, dtype)
        value_row = setup.kv_heads, _arrays.width(setup.v_head_dim, v_dtype)
        shown = []
        start = 0
        for view in self.pool.views(sequence, layer):
            try:
                found_key, found_value, *more = view
                block, at = more + [-1, start][len(more) :]
            except (TypeError, ValueError):
                raise TypeError(
                    "a view is (key, value), (key, value, block) or (key, value, "
                    f"block, start), not {type(view).__name__}"
                ) from None
            key = _arrays.stored(found_key, "key", dtype)
            value = _arrays.stored(found_value, "value", v_dtype)
            tokens = key.shape[0] if key.ndim == 3 else 0
            _arrays.check_shape(key, "key", (tokens, *key_row))
            _arrays.check_shape(value, "value", (tokens, *value_row))
            start = _arrays.integer(at, "start")
            shown.append((key, value, _arrays.integer(block, "block"), start))
            start += tokens
        self.shown = shown
        return shown

    def attend(
        self,
        layer: int,
        sequences: list[int],
        query_rows: list[int],
        query: Array,
        soft_cap: float,
        sinks: list[float],
    ) -> Array:
        """Returns the outputs, (rows, heads, v_head_dim), as dense float32."""
        given = {
            "soft_cap": soft_cap,
            "sinks": np.array(sinks, np.float32) if sinks else None,
        }
        declared = {name: value for name, value in given.items() if name in self.can}
        # A copy, which the class may write to.
        answer = self.pool.attend(
            layer, sequences, query_rows, np.array(query), **declared
        )
        found = _arrays.outputs(answer)
        width = self.setup.of_layer(layer).v_head_dim
        _arrays.check_shape(found, "the output", (*query.shape[:2], width))
        return found

    def free(self, sequence: int) -> None:
        self.pool.free(sequence)

    def fork(self, sequence: int, length: int) -> int:
        return _arrays.integer(self.pool.fork(sequence, length), "the sequence")

    def truncate(self, sequence: int, length: int) -> None:
        self.pool.truncate(sequence, length)

    def usage(self) -> tuple[int, int, int, int]:
        free, cached, used, shared = (
            _arrays.integer(count, "a count of usage") for count in self.pool.usage()
        )
        return free, cached, used, shared

    def table(self, sequences: list[int], group: int | None) -> list[list[int]]:
        more = () if group is None else (group,)
        rows = self.pool.table(sequences, *more)
        return [[_arrays.integer(block, "block") for block in row] for row in rows]

    def slots(self, sequence: int, begin: int, end: int, group: int | None) -> list[int]:
        more = () if group is None else (group,)
        found = self.pool.slots(sequence, begin, end, *more)
        return [_arrays.integer(slot, "slot", 64) for slot in found]
