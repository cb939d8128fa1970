"""Driving a pool of blocks that is written in Python."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtwin import _arrays
from kvtwin._setup import POOL_ABILITIES, PoolDescription, PoolSetup
from kvtwin._types import Array

NEEDED = ("open", "seq_len", "append", "commit", "views", "free")
OPTIONAL = ("fork", "truncate", "commit_unknown", "usage", "table", "slots")


class PoolBackend:
    """A user's class of pools, as the compiled part sees it."""

    refuses_misuse = False  # Misuse is not tried at visibility.

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.description: PoolDescription = cls.kvtwin  # type: ignore[attr-defined]
        for name in NEEDED:
            if not callable(getattr(cls, name, None)):
                raise TypeError(f"{cls.__name__} has no method {name}")
        self.has = {name for name in OPTIONAL if hasattr(cls, name)}

    def describe(self) -> tuple[str, int, int]:
        """Returns name, can, window."""
        said = self.description
        can = sum(1 << POOL_ABILITIES.index(name) for name in said.can)
        if said.window is not None:
            can |= 1 << len(POOL_ABILITIES)
        return said.name, can, said.window or 0

    def init(self, fields: dict[str, Any]) -> PoolInstance:
        return PoolInstance(self.cls, PoolSetup(**fields))


class PoolInstance:
    """One pool of the user's class."""

    def __init__(self, cls: type, setup: PoolSetup) -> None:
        self.setup = setup
        self.pool: Any = cls(setup)
        self.shown: list[tuple[Array, Array, int, int]] = []

    def close(self) -> None:
        self.shown = []
        if hasattr(self.pool, "close"):
            self.pool.close()

    def open(self, prompt: list[int], salt: str, extra: list[str]) -> int:
        return int(self.pool.open(prompt, salt=salt, extra=tuple(extra)))

    def seq_len(self, sequence: int) -> int:
        return int(self.pool.seq_len(sequence))

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
        setup = self.setup
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
            key = _arrays.stored(found_key, "key", setup.dtype)
            value = _arrays.stored(found_value, "value", setup.v_dtype)
            tokens = key.shape[0] if key.ndim == 3 else 0
            width = _arrays.width(setup.k_head_dim, setup.dtype)
            _arrays.check_shape(key, "key", (tokens, setup.kv_heads, width))
            width = _arrays.width(setup.v_head_dim, setup.v_dtype)
            _arrays.check_shape(value, "value", (tokens, setup.kv_heads, width))
            shown.append((key, value, int(block), int(at)))
            start = int(at) + tokens
        self.shown = shown
        return shown

    def free(self, sequence: int) -> None:
        self.pool.free(sequence)

    def fork(self, sequence: int, length: int) -> int:
        return int(self.pool.fork(sequence, length))

    def truncate(self, sequence: int, length: int) -> None:
        self.pool.truncate(sequence, length)

    def usage(self) -> tuple[int, int, int, int]:
        free, cached, used, shared = self.pool.usage()
        return int(free), int(cached), int(used), int(shared)

    def table(self, sequences: list[int]) -> list[list[int]]:
        return [[int(block) for block in row] for row in self.pool.table(sequences)]

    def slots(self, sequence: int, begin: int, end: int) -> list[int]:
        return [int(slot) for slot in self.pool.slots(sequence, begin, end)]
