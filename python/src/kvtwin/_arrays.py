"""Conversions of the arrays of caches that are written in Python."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from kvtwin._kvtwin import Tensor, numbers_of
from kvtwin._types import Array, BoolArray, Float32Array

_BLOCK_BYTES = {"q8_0": 34, "q4_0": 18}
_RAW = {"bf16": np.uint16, "f8_e4m3": np.uint8, "q8_0": np.uint8, "q4_0": np.uint8}


def integer(answer: Any, what: str, bits: int = 32) -> int:
    """Returns an answer as an int. Raises ValueError unless it fits into `bits` bits."""
    try:
        number = operator.index(answer)
    except TypeError:
        number = 2**bits
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise ValueError(f"{what} is {answer!r}, it must be an int of {bits} bits")
    return number


def numbers(array: Any, what: str, dtype: str = "f32") -> Float32Array:
    """Returns the array as float32. Rows of `dtype` may be given as its bits or blocks
    (docs/python.md). Raises TypeError unless it has numbers."""
    if isinstance(array, Tensor):
        return array.float32()
    found = np.asarray(array)
    raw = _RAW.get(dtype)
    if raw is not None and found.dtype == raw:  # numpy takes None as float64.
        return numbers_of(np.ascontiguousarray(found), what, dtype)
    if found.dtype.kind not in "fiub" and found.dtype.name != "bfloat16":
        raise TypeError(f"{what} is an array of {found.dtype}, not of numbers")
    with np.errstate(over="ignore"):  # Callers judge infinities.
        return np.asarray(found, dtype=np.float32)


def outputs(array: Any) -> Float32Array:
    """Returns the outputs of attention as dense float32: an array of numpy, a tensor of
    torch, or anything else that converts to numpy or has DLPack."""
    if hasattr(array, "detach"):  # torch: numpy has no bf16, and no gradients.
        array = array.detach().float().cpu()
    elif hasattr(array, "__dlpack__") and not hasattr(array, "__array__"):
        array = np.from_dlpack(array)
    return np.asarray(numbers(array, "the output"), order="C")  # Keeps the shape ().


def rows(array: Any, what: str, dtype: str = "f32") -> Float32Array:
    """Returns K or V, which may be rows of `dtype`, as float32, (n, kv_heads, head_dim)."""
    found = numbers(array, what, dtype)
    if found.ndim != 3:
        raise ValueError(f"{what} has shape {found.shape}, expected (n, kv_heads, head_dim)")
    return found


def may_attend(mask: Any, rows: int | None, columns: int) -> BoolArray:
    """Returns a mask of bools, or of 0 and -inf, as bools, (rows, columns)."""
    found: Array
    found = mask.float32() if isinstance(mask, Tensor) else np.asarray(mask)
    expected = (found.shape[0] if rows is None and found.ndim else rows, columns)
    if found.shape != expected:
        shown = f"({rows or 'tokens'}, {columns})"
        raise ValueError(f"the mask has shape {found.shape}, expected {shown}")
    if found.dtype == np.bool_:
        return found.astype(np.bool_, copy=False)
    if found.dtype.kind != "f":
        raise TypeError(
            f"the mask is of {found.dtype}; it must be of bool, True where a row "
            "may attend, or of 0 and -inf"
        )
    allowed: BoolArray = found == 0
    if not (allowed | (found == -np.inf)).all():
        other = found[~(allowed | (found == -np.inf))][0]
        text = f"the mask has a {other}, which is neither 0 nor -inf"
        if other <= np.finfo(np.float16).min:  # As models of transformers have it.
            text += ": pass mask == 0, an array of bool, or -inf in place of the lowest number"
        raise ValueError(text)
    return allowed


def width(head_dim: int, dtype: str) -> int:
    return head_dim // 32 * _BLOCK_BYTES.get(dtype, 0) or head_dim


def stored(array: Any, what: str, dtype: str) -> Array:
    """Returns K or V, dense, in the form in which rows of `dtype` are stored."""
    found: Array = array.numpy() if isinstance(array, Tensor) else np.asarray(array)
    if dtype in ("f32", "f16"):
        if found.dtype.kind not in "fiu":
            raise TypeError(f"{what} is an array of {found.dtype}, not of numbers")
        return np.ascontiguousarray(
            found, dtype=np.float32 if dtype == "f32" else np.float16
        )
    raw = np.dtype(_RAW[dtype])
    if found.dtype != raw:
        if found.dtype.itemsize != raw.itemsize or found.dtype.kind in "fiu":
            raise TypeError(f"{what} is an array of {found.dtype}, expected {raw}")
        found = np.ascontiguousarray(found).view(raw)  # The bits of ml_dtypes' types.
    return np.ascontiguousarray(found)


def check_shape(array: Array, what: str, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        if what == "the output":
            raise ValueError(f"{what} has shape {array.shape}, expected {shape}")
        shown = ", ".join(str(extent) for extent in shape[1:])
        first = "columns" if what == "key" else str(shape[0])
        raise ValueError(f"{what} has shape {array.shape}, expected ({first}, {shown})")
