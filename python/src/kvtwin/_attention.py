"""Attention on the CPU over the views of caches and over the blocks of pools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtwin._kvtwin import AttentionTwin, Tensor, View, merge_attention
from kvtwin._setup import OPEN_END, DType, VLayout
from kvtwin._types import Float32Array

#: K and V: a view, or two arrays. Anything that follows, such as a mask, is ignored.
KeysAndValues: TypeAlias = View | Sequence[Any]
Ints: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]


class Attended(NamedTuple):
    """The results of attention."""

    #: (rows, heads, v_head_dim)
    out: Float32Array
    #: (rows, heads): the logarithm of the sum of exp(score), with exp(sink); -inf if
    #: the sum is 0.
    log_sum_exp: Float32Array


class Attention:
    """Attention as include/kvtwin/attention.h defines it. A pass is planned once, and
    its plan serves all layers. One thread at a time.

    Wrong arguments raise ValueError, or TypeError for a wrong type, and write nothing.
    """

    __slots__ = ("_twin",)

    def __init__(self, twin: Literal["optimized", "reference"] = "optimized") -> None:
        self._twin = AttentionTwin(twin)

    def plan(
        self,
        mask: Tensor | npt.ArrayLike | None,
        rows: int | None = None,
        first_row: int = 0,
    ) -> None:
        """Plans `rows` rows of a mask from `first_row` on, all by default. The mask,
        (rows, columns), is that of a view, an array of bool, True where a row may
        attend, or of 0 and -inf. Raises ValueError for other elements."""
        if mask is not None and not isinstance(mask, Tensor):
            found = np.asarray(mask)
            if found.dtype.kind in "iu":
                raise ValueError(
                    f"mask is of {found.dtype}, it must be of bool, True where a row "
                    "may attend, or of 0 and -inf"
                )
            if found.dtype == np.bool_:
                mask = np.ascontiguousarray(
                    np.where(found, np.float32(0), np.float32(-np.inf))
                )
            elif isinstance(mask, np.ndarray):
                mask = np.ascontiguousarray(mask)
        self._twin.plan(mask, rows, first_row)

    def plan_table(
        self,
        blocks: Sequence[Ints] | npt.NDArray[np.integer[Any]],
        lengths: Ints,
        query_rows: Ints | None = None,
        *,
        block_size: int,
        window: int | None = None,
        sees_all: bool = False,
    ) -> None:
        """Plans sequences of a pool: the blocks of each, and its length in tokens. Its
        query rows, one by default, are its last tokens. A row sees the tokens up to its
        own, or only `window` tokens before its own. With `sees_all`, each row sees all
        tokens of its sequence: a prefix that any number of rows share. Raises
        ValueError for blocks that make a table of over 256 MiB."""
        if query_rows is None:
            query_rows = [1] * len(lengths)
        self._twin.plan_table(
            blocks,
            lengths,
            query_rows,
            block_size,
            OPEN_END if window is None else window,
            sees_all,
        )

    def attend(
        self,
        query: npt.ArrayLike,
        kv: KeysAndValues,
        *,
        scale: float = 1.0,
        soft_cap: float = 0.0,
        sinks: npt.ArrayLike | None = None,
        splits: int = 0,
        bf16_products: bool = False,
        v_layout: VLayout | None = None,
        dtype: DType = "f8_e4m3",
        v_dtype: DType | None = None,
        out: Float32Array | None = None,
    ) -> Attended:
        """Computes a layer. `query` is (rows, heads, k_head_dim), of float32, float16
        or bfloat16; `sinks`, (heads,), are logits of cells without V. With
        `bf16_products`, numbers may be rounded to bfloat16 before they are multiplied.

        `v_layout` is that of the view, or "plain". `dtype` and `v_dtype` say what
        arrays of bytes are. Results are written to `out` if it is given.
        """
        if v_layout is None:
            v_layout = kv.v_layout if isinstance(kv, View) else "plain"
        given = (scale, soft_cap, _sinks(sinks), splits, bf16_products, out)
        return self._attend(query, kv, False, v_layout, dtype, v_dtype, given)

    def attend_blocks(
        self,
        query: npt.ArrayLike,
        kv: KeysAndValues,
        *,
        scale: float = 1.0,
        soft_cap: float = 0.0,
        sinks: npt.ArrayLike | None = None,
        splits: int = 0,
        bf16_products: bool = False,
        layout: Literal["token_major", "head_major"] = "token_major",
        dtype: DType = "f8_e4m3",
        v_dtype: DType | None = None,
        out: Float32Array | None = None,
    ) -> Attended:
        """Does the same over all blocks of a layer: K is (blocks, block_size, kv_heads,
        k_head_dim), or (blocks, kv_heads, block_size, k_head_dim) if head-major."""
        given = (scale, soft_cap, _sinks(sinks), splits, bf16_products, out)
        return self._attend(query, kv, True, layout, dtype, v_dtype, given)

    def _attend(
        self,
        query: npt.ArrayLike,
        kv: KeysAndValues,
        blocks: bool,
        layout: str,
        dtype: str,
        v_dtype: str | None,
        given: tuple[
            float, float, Float32Array | None, int, bool, Float32Array | None
        ],
    ) -> Attended:
        key, value, *_ = kv
        found = self._twin.attend(
            query, key, value, blocks, layout, dtype, v_dtype or dtype, *given
        )
        return Attended(*found)

    @staticmethod
    def merge(parts: Iterable[tuple[npt.ArrayLike, npt.ArrayLike]]) -> Attended:
        """Merges results over disjoint cells; only one of them may have the sinks."""
        arrays = []
        for part in parts:
            out, log_sum_exp = (np.ascontiguousarray(a, np.float32) for a in part)
            if out.ndim != 3 or log_sum_exp.shape != out.shape[:2]:
                raise ValueError(
                    f"out has shape {out.shape}, expected (rows, heads, v_head_dim), "
                    f"and log_sum_exp {log_sum_exp.shape}, expected (rows, heads)"
                )
            arrays.append((out, log_sum_exp))
        shapes = {out.shape for out, _ in arrays}
        if len(shapes) != 1:
            raise ValueError(f"the parts have the shapes {sorted(shapes)}")
        return Attended(*merge_attention(arrays, shapes.pop()))


def _sinks(sinks: npt.ArrayLike | None) -> Float32Array | None:
    return None if sinks is None else np.ascontiguousarray(sinks, np.float32)
