"""Recording the calls of a cache and its answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import IO, Any, Literal

import numpy as np

from kvtwin import _arrays, _kvtwin
from kvtwin._errors import CacheFull, NotSupported, SharedCells
from kvtwin._setup import OPEN_END, Setup


def _cache_object(setup: Setup) -> dict[str, Any]:
    found: dict[str, Any] = {"type": setup.kind, "shift": setup.shift}
    if setup.window is not None:
        found["window"] = setup.window
    if setup.memory is not None:
        found["memory"] = setup.memory
    if setup.kind == "chunked":
        found["chunk"] = setup.chunk
    if setup.kind == "recurrent":
        found["checkpoint_every"] = setup.checkpoint_every
        found["checkpoints"] = setup.checkpoints
        if setup.pins:
            found["pins"] = setup.pins
        if setup.drafts:
            found["drafts"] = setup.drafts
    if setup.shift == "rope":
        rope = setup.rope
        found["rope"] = {
            "pairing": "halves" if rope.halves else "adjacent",
            "base": rope.base,
            "scale": rope.scale,
            "dims": rope.dims,
        }
    if setup.kind in ("wrapper", "hybrid"):
        found["caches"] = [_cache_object(one) for one in setup.caches]
    return found


def _json(fields: dict[str, Any]) -> str:
    """Returns a line; scalars of numpy become numbers."""
    return json.dumps(fields, allow_nan=False, default=lambda scalar: scalar.item()) + "\n"


def _header(setup: Setup, placement: str, producer: str) -> dict[str, Any]:
    return {
        # 2 if the cache attends, 3 if it takes drafts, 4 if it pins or finds prefixes.
        "kvtrace": 1,
        "producer": producer,
        "placement": placement,
        "cache": _cache_object(setup),
        "config": {
            "cache_padding": setup.cache_padding,
            "mask_batch_padding": setup.mask_batch_padding,
            "permuted_v": setup.v_layout == "permuted",
            "tiled_v": setup.v_layout == "tiled",
            "mask_dtype": setup.mask_dtype,
            "v_dtype": setup.v_dtype or setup.dtype,
        },
        "init": {
            "dtype": setup.dtype,
            "max_sequences": setup.max_sequences,
            "capacity": setup.capacity,
            "max_batch": setup.max_batch,
        },
        "model": {
            "layers": setup.layers,
            "k_head_dim": setup.k_head_dim,
            "kv_heads": setup.kv_heads,
            "v_head_dim": setup.v_head_dim,
        },
    }


# A recording holds only smaller numbers of these dtypes: larger numbers of f16 become
# infinite, and those of f8 are bad input (docs/trace_format.md).
_TOO_LARGE = {"f16": 65520.0, "f8_e4m3": np.nextafter(np.float32(448), np.float32(449))}


def _tensor(array: Any, what: str, dtype: str = "f32") -> dict[str, Any]:
    """Returns the numbers for JSON. Raises ValueError unless all are finite in the
    dtype."""
    wild = ~(np.abs(array) < _TOO_LARGE.get(dtype, np.inf))
    if wild.any():
        at = tuple(int(index) for index in np.argwhere(wild)[0])
        is_finite = np.isfinite(array[at])
        why = f"too large for {dtype}" if is_finite else "not finite"
        raise ValueError(
            f"{what} has a number that is {why}, {array[at]} at {at}: a recording cannot "
            "hold it"
        )
    return {"shape": list(array.shape[::-1]), "data": array.ravel().tolist()}


class Recorder:
    """Wraps your cache, passes each call on, and records the call with its answer,
    so that `kvtwin.check` can judge it.

        cache = kvtwin.Recorder(MyCache(), "mine.jsonl", kvtwin.Setup(
            capacity=64, kv_heads=8, k_head_dim=128, v_head_dim=128))

    The cache has `start_forward(positions, sequences)`, `put(layer, key, value)`
    and `get(layer)`, and, if you call them, `remove`, `copy_prefix`,
    `can_resume`, `set_causal`, `set_layer_type`, `encoder_cached`, `commit`,
    `find_prefix`, `checkpoint`
    (docs/python.md).
    Rows are numbers, or bits and blocks of the setup's dtypes, as docs/python.md has them.
    To refuse a call it raises `CacheFull`, `NotSupported` or `SharedCells`; any
    other exception is passed on, and not recorded. Rows that you do not `get` after
    a `put` are not checked.

    A cache with `attend(layer, query)` is judged by what it answers, in addition to, or
    in place of, the rows of `get`. `attend_dtype` ("f32", "f16", "bf16") and
    `attend_tolerance` are those of `kvtwin.Description`; the soft cap and the sinks
    are those of the setup.

    `placement` is "other" unless the cache places tokens as ours does (S9, S10). In
    that case, if it has a method `batch_cells()`, cells are recorded as well.
    """

    def __init__(
        self,
        cache: Any,
        file: str | os.PathLike[str] | IO[str],
        setup: Setup,
        *,
        placement: Literal["other", "contiguous", "scatter"] = "other",
        producer: str | None = None,
        attend_dtype: Literal["f32", "f16", "bf16"] = "f32",
        attend_tolerance: float = 0,
    ) -> None:
        self._cache = cache
        self._dtypes = setup.dtype, setup.v_dtype or setup.dtype
        self._v_layout = setup.v_layout
        self._cells = placement != "other" and hasattr(cache, "batch_cells")
        self._reserving = False
        if not np.isfinite(setup.sinks).all():
            raise ValueError(f"sinks is {setup.sinks!r}: a recording cannot hold them")
        for i, part in enumerate(setup.caches):
            if placement not in ("other", part.placement):
                raise ValueError(
                    f"caches[{i}].placement is {part.placement!r}, placement is {placement!r}: "
                    "a recording has one for all caches"
                )
        header = _header(setup, placement, producer or type(cache).__qualname__)
        if hasattr(cache, "attend"):
            header["kvtrace"] = 2
            header["attend"] = {
                "dtype": attend_dtype,
                "tolerance": attend_tolerance,
                "soft_cap": setup.soft_cap,
                "sinks": list(setup.sinks),
            }
        if hasattr(cache, "commit"):
            header["kvtrace"] = 3
        if hasattr(cache, "find_prefix") or any(
            one.pins for one in (setup, *setup.caches)
        ):
            header["kvtrace"] = 4
        # An invalid header leaves a file of this name as it is.
        line = _json(header)
        verdict, _, _, why, _ = _kvtwin.judge_bytes(line.encode(), ["reference"])
        if verdict != "accept":
            raise ValueError(why)
        self._owned = isinstance(file, (str, os.PathLike))
        self._file: IO[str]
        if isinstance(file, (str, os.PathLike)):
            self._file = open(file, "w", encoding="utf-8")
        else:
            self._file = file
        self._line(header)

    def __getattr__(self, name: str) -> Any:
        if name == "_cache":  # A copy of this object is being made.
            raise AttributeError(name)
        return getattr(self._cache, name)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file, if the recorder opened it. The cache stays open."""
        if self._owned:
            self._file.close()

    def _line(self, fields: dict[str, Any]) -> None:
        self._file.write(_json(fields))
        self._file.flush()  # A crash leaves whole lines.

    def _answered(self, fields: dict[str, Any], call: Callable[[], Any]) -> None:
        """Makes the call, and records whether it was refused."""
        names = {
            CacheFull: "cache_full",
            NotSupported: "not_supported",
            SharedCells: "shared_cells",
        }
        try:
            call()
        except tuple(names) as refusal:
            expected = (
                ("cache_full",)
                if fields["op"] == "start_forward"
                else ("not_supported", "shared_cells")
            )
            result = next(n for t, n in names.items() if isinstance(refusal, t))
            if result in expected:
                self._line({**fields, "result": result})
            raise
        cells = {}
        if self._cells and fields["op"] == "start_forward":
            cells = {"cells": [int(cell) for cell in self._cache.batch_cells()]}
        self._line({**fields, "result": "ok", **cells})

    def start_forward(
        self,
        positions: Sequence[int],
        sequences: Sequence[int],
        reserve: bool = False,
        **more: Any,
    ) -> None:
        """Calls start_forward and records it, also if it is refused."""
        fields: dict[str, Any] = {
            "op": "start_forward",
            "positions": [int(position) for position in positions],
            "sequences": [int(sequence) for sequence in sequences],
        }
        if "multimodal" in more:
            fields["multimodal"] = [int(index) for index in more["multimodal"]]
        if "parents" in more:
            fields["parents"] = [int(parent) for parent in more["parents"]]
        if reserve:
            fields["reserve"] = more["reserve"] = True
        self._reserving = False
        self._answered(
            fields, lambda: self._cache.start_forward(positions, sequences, **more)
        )
        self._reserving = reserve

    def put(self, layer: int, key: Any, value: Any) -> None:
        """Calls put and records it, with the rows."""
        # The cache may overwrite its arguments.
        fields: dict[str, Any] = {"op": "put", "layer": int(layer)}
        rows = {"key": key, "value": value}
        for (name, given), dtype in zip(rows.items(), self._dtypes):
            numbers = _arrays.rows(given, name, dtype)
            fields[name] = _tensor(numbers, f"put of layer {layer}: {name}", dtype)
        self._cache.put(layer, key, value)
        self._line(fields)

    def get(self, layer: int) -> Any:
        """Calls get, records the view, and returns it."""
        view = self._cache.get(layer)
        key, value, mask = view
        fields: dict[str, Any] = {"op": "get", "layer": int(layer)}
        if getattr(view, "first_cell", None) is not None:
            fields["first_cell"] = int(view.first_cell)
        k = _arrays.numbers(key, "key", self._dtypes[0])
        v = _arrays.numbers(value, "value", self._dtypes[1])
        if mask is None:
            fields["mask"] = None
        else:
            columns = k.shape[0] if k.ndim else 0
            allowed = _arrays.may_attend(mask, None, columns)
            shape = [allowed.shape[1], allowed.shape[0]]
            if self._reserving:
                first = {k: v for k, v in fields.items() if k == "first_cell"}
                self._line({"op": "reserved_mask", "shape": shape, **first})
                return view
            if allowed.shape[1] == 0:
                columns = 32 if self._v_layout == "tiled" else 1
                k, v = _hidden_rows(k, columns), _hidden_rows(v, 1)
                allowed = np.zeros((allowed.shape[0], columns), bool)
                shape[0] = columns
            text = ["".join("01"[int(one)] for one in row) for row in allowed]
            fields["mask"] = {"shape": shape, "rows": text}
            k = _finite(k, allowed, "K", layer)
            v = _finite(v, allowed, "V", layer, self._v_layout)
        rows = {
            "key": _tensor(k, f"get of layer {layer}: K"),
            "value": _tensor(v, f"get of layer {layer}: V"),
        }
        self._line({**fields, **rows})
        return view

    def attend(self, layer: int, query: Any) -> Any:
        """Calls attend, records queries and outputs, and returns the outputs."""
        # The cache may overwrite its argument.
        asked = _tensor(_arrays.rows(query, "query"), f"attend of layer {layer}: query")
        out = self._cache.attend(layer, query)
        answer = _tensor(_arrays.outputs(out), f"attend of layer {layer}: the output")
        self._line({"op": "attend", "layer": int(layer), "query": asked, "out": answer})
        return out

    def remove(self, sequence: int, begin: int, end: int = OPEN_END) -> None:
        """Calls remove and records it, also if it is refused."""
        range_ = {"begin": int(begin), "end": int(end)}
        self._answered(
            {"op": "remove", "seq": int(sequence), **range_},
            lambda: self._cache.remove(sequence, begin, end),
        )

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Calls copy_prefix and records it."""
        self._cache.copy_prefix(source, target, length)
        ends = {"src": int(source), "dst": int(target)}
        self._line({"op": "copy_prefix", **ends, "len": int(length)})

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        """Calls commit and records it."""
        self._cache.commit(sequence, path)
        drafts = [int(number) for number in path]
        self._line({"op": "commit", "seq": int(sequence), "path": drafts})

    def find_prefix(self, sequence: int, tokens: Sequence[int]) -> int:
        """Calls find_prefix, records its answer, and returns it."""
        length = int(self._cache.find_prefix(sequence, tokens))
        ids = [int(token) for token in tokens]
        asked = {"seq": int(sequence), "tokens": ids}
        self._line({"op": "find_prefix", **asked, "len": length})
        return length

    def checkpoint(self, sequence: int) -> None:
        """Calls checkpoint and records it."""
        self._cache.checkpoint(sequence)
        self._line({"op": "checkpoint", "seq": int(sequence)})

    def can_resume(self, sequence: int, position: int) -> bool:
        """Calls can_resume, records its answer, and returns it."""
        result = bool(self._cache.can_resume(sequence, position))
        asked = {"seq": int(sequence), "pos": int(position)}
        self._line({"op": "can_resume", **asked, "result": result})
        return result

    def set_causal(self, except_: Sequence[int]) -> None:
        """Calls set_causal and records it."""
        self._cache.set_causal(except_)
        self._line({"op": "set_causal", "except": [int(index) for index in except_]})

    def set_layer_type(self, type: int) -> None:
        """Calls set_layer_type and records it."""
        self._cache.set_layer_type(type)
        self._line({"op": "set_layer_type", "type": int(type)})

    def encoder_cached(self) -> bool:
        """Calls encoder_cached, records its answer, and returns it."""
        result = bool(self._cache.encoder_cached())
        self._line({"op": "encoder_cached", "result": result})
        return result


# The axes of V that are not columns (S23).
_OTHER_AXES = {"plain": (1, 2), "permuted": (0, 1), "tiled": (1, 2)}


def _hidden_rows(empty: Any, count: int) -> Any:
    """Returns `count` rows of zeros for a view without rows: a recorded view has at
    least one row, which may be hidden."""
    return np.zeros([extent or count for extent in empty.shape], np.float32)


def _finite(
    rows: Any, allowed: Any, what: str, layer: int, v_layout: str = "plain"
) -> Any:
    """Zeroes columns that JSON cannot hold. Raises ValueError if a token sees one."""
    if rows.ndim != (4 if v_layout == "tiled" else 3):
        return rows  # `check` names this shape.
    wild = ~np.isfinite(rows).all(axis=_OTHER_AXES[v_layout], keepdims=True)
    if wild.size != allowed.shape[1]:
        return rows  # `check` rejects this shape.
    seen = wild.ravel() & allowed.any(axis=0)
    if seen.any():
        column = int(np.flatnonzero(seen)[0])
        row = int(np.flatnonzero(allowed[:, column])[0])
        raise ValueError(
            f"get of layer {layer}: {what} has a number that is not finite in column "
            f"{column}, which row {row} of the mask may attend to: a recording cannot "
            "hold that"
        )
    return np.where(wild, np.float32(0), rows)
