"""Driving a cache that is written in Python."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np

from kvtwin import _arrays
from kvtwin._kvtwin import Tensor
from kvtwin._setup import ABILITIES, DTYPES, KINDS, LEVELS, SHIFTS, V_LAYOUTS
from kvtwin._setup import Description, Rope, Setup
from kvtwin._types import Array

OPTIONAL = (
    "remove",
    "copy_prefix",
    "can_resume",
    "shift",
    "set_causal",
    "set_layer_type",
    "encoder_cached",
)
CELLS = ("cells", "batch_cells", "cell_count")


def _bits(names: Any, due: tuple[str, ...]) -> int:
    return sum(1 << due.index(name) for name in names)


def story_of(error: BaseException) -> str:
    """An exception of theirs, with the frames of their code."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if frame.filename != __file__] or list(frames)
    where = "".join(
        f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in theirs
    )
    what = "".join(traceback.format_exception_only(error)).strip()
    return f"exception: {what}{where}"


class Backend:
    """What the compiled part sees of a class of theirs."""

    def __init__(self, cls: type) -> None:
        description = getattr(cls, "kvtwin", None) or Description(name=cls.__name__)
        if not isinstance(description, Description):
            raise TypeError(
                f"{cls.__name__}.kvtwin is {description!r}, it must be a "
                "kvtwin.Description"
            )
        for name in ("start_forward", "put", "get"):
            if not callable(getattr(cls, name, None)):
                raise TypeError(f"{cls.__name__} has no method {name}")
        for ability, name in (
            ("remove_tail", "remove"),
            ("remove_middle", "remove"),
            ("copy_prefix", "copy_prefix"),
        ):
            if ability in description.can and not hasattr(cls, name):
                raise TypeError(
                    f"{cls.__name__} says that it can {ability}, but has no method "
                    f"{name}"
                )
        self.cls = cls
        self.refuses_misuse = "refuse_misuse" in description.can
        self.description = description
        self.has = {name for name in OPTIONAL if hasattr(cls, name)}
        if description.level == "identity":
            for name in CELLS:
                if not hasattr(cls, name):
                    raise TypeError(
                        f"{cls.__name__} wants to be held to identity, but has no "
                        f"method {name}"
                    )
            self.has.add("cells")

    def describe(self) -> tuple[Any, ...]:
        """name, profile, level, kinds, can, dtypes, v_layouts, shifts,
        max_sequences, max_layers, max_padding, tolerance."""
        d = self.description
        return (
            d.name,
            d.profile,
            LEVELS.index(d.level),
            _bits(d.kinds, KINDS),
            _bits(d.can, ABILITIES),
            _bits(d.dtypes, DTYPES),
            _bits(d.v_layouts, V_LAYOUTS),
            _bits(d.shifts, SHIFTS),
            d.max_sequences,
            d.max_layers,
            d.max_padding,
            d.tolerance,
        )

    def init(self, fields: dict[str, Any]) -> Instance:
        caches = tuple(_setup(one) for one in fields.pop("caches"))
        return Instance(self.cls, _setup({**fields, "caches": caches}))


def _setup(fields: dict[str, Any]) -> Setup:
    return Setup(**{**fields, "rope": Rope(**fields["rope"])})


class Instance:
    """One cache of theirs."""

    def __init__(self, cls: type, setup: Setup) -> None:
        self.setup = setup
        self.cache: Any = cls(setup)
        self.shown: tuple[Array, Array, Array | None] | None = None

    def close(self) -> None:
        self.shown = None
        if hasattr(self.cache, "close"):
            self.cache.close()

    def start_forward(
        self,
        positions: list[int],
        sequences: list[int],
        multimodal: list[int],
        reserve: bool,
    ) -> None:
        more: dict[str, Any] = {}
        if multimodal:
            more["multimodal"] = multimodal
        if reserve:
            more["reserve"] = True
        self.cache.start_forward(positions, sequences, **more)

    def put(self, layer: int, key: Array, value: Array) -> None:
        # Their own, to keep or to write to.
        self.cache.put(layer, np.array(key), np.array(value))

    def get(self, layer: int, mask_rows: int) -> tuple[Array, Array, Array | None]:
        """Dense, of the stored dtype; the memory stays until the next one."""
        setup = self.setup
        found = self.cache.get(layer)
        try:
            key, value, mask = found
        except (TypeError, ValueError):
            raise TypeError(
                f"get returns {type(found).__name__}, which is not (key, value, mask)"
            ) from None
        v_dtype = setup.v_dtype or setup.dtype
        k = _stored(key, "key", setup.dtype)
        v = _stored(value, "value", v_dtype)
        if mask is None and setup.kind in ("encoder", "wrapper"):
            self.shown = (k, v, None)
            return self.shown
        heads = setup.kv_heads
        columns = k.shape[0] if k.ndim == 3 else 0
        _due(k, "key", (columns, heads, _width(setup.k_head_dim, setup.dtype)))
        width = _width(setup.v_head_dim, v_dtype)
        if setup.v_layout == "permuted":
            due: tuple[int, ...] = (heads, width, columns)
        elif setup.v_layout == "tiled":
            due = (columns // 32, heads, width, 32)
        else:
            due = (columns, heads, width)
        _due(v, "value", due)
        allowed = _arrays.may_attend(mask, mask_rows, columns)
        self.shown = (k, v, np.where(allowed, np.float32(0), np.float32(-np.inf)))
        return self.shown

    def remove(self, sequence: int, begin: int, end: int) -> None:
        self.cache.remove(sequence, begin, end)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self.cache.copy_prefix(source, target, length)

    def can_resume(self, sequence: int, position: int) -> bool:
        return _yes("can_resume", self.cache.can_resume(sequence, position))

    def shift(self, sequence: int, begin: int, end: int, delta: int) -> None:
        self.cache.shift(sequence, begin, end, delta)

    def set_causal(self, except_: list[int]) -> None:
        self.cache.set_causal(except_)

    def set_layer_type(self, type: int) -> None:
        self.cache.set_layer_type(type)

    def encoder_cached(self) -> bool:
        return _yes("encoder_cached", self.cache.encoder_cached())

    def cells(self) -> tuple[list[tuple[int, int, int]], list[int], int]:
        cells = [(int(c), int(p), int(s)) for c, p, s in self.cache.cells()]
        batch = [int(cell) for cell in self.cache.batch_cells()]
        return cells, batch, int(self.cache.cell_count())


_BLOCK_BYTES = {"q8_0": 34, "q4_0": 18}
_RAW = {"bf16": np.uint16, "f8_e4m3": np.uint8, "q8_0": np.uint8, "q4_0": np.uint8}


def _width(head_dim: int, dtype: str) -> int:
    return head_dim // 32 * _BLOCK_BYTES.get(dtype, 0) or head_dim


def _stored(array: Any, what: str, dtype: str) -> Array:
    found: Array = array.numpy() if isinstance(array, Tensor) else np.asarray(array)
    if dtype in ("f32", "f16"):
        if found.dtype.kind not in "fiu":
            raise TypeError(f"{what} is an array of {found.dtype}, not of numbers")
        due = np.float32 if dtype == "f32" else np.float16
        return np.ascontiguousarray(found, dtype=due)
    raw = np.dtype(_RAW[dtype])
    if found.dtype != raw:
        if found.dtype.itemsize != raw.itemsize or found.dtype.kind in "fiu":
            raise TypeError(f"{what} is an array of {found.dtype}, {raw} is due")
        found = np.ascontiguousarray(found).view(raw)  # As ml_dtypes has them.
    return np.ascontiguousarray(found)


def _due(array: Array, what: str, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        shown = ", ".join(str(extent) for extent in shape[1:])
        first = "columns" if what == "key" else str(shape[0])
        raise ValueError(f"{what} has shape {array.shape}, ({first}, {shown}) is due")


def _yes(what: str, answer: Any) -> bool:
    if not isinstance(answer, (bool, np.bool_)):
        raise TypeError(f"{what} returns {answer!r}, neither True nor False")
    return bool(answer)
