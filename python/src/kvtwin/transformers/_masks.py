"""Masks as transformers describes them: which token of a row sees which."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import masking_utils

from kvtwin._errors import NotSupported
from kvtwin._setup import Setup
from kvtwin._types import BoolArray


class Description:
    """The arguments from which transformers makes a mask."""

    __slots__ = ("arguments", "made")

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        #: The mask for sdpa, once it was needed.
        self.made: Any = ()


def describe(
    batch_size: int, q_length: int, kv_length: int, **arguments: Any
) -> torch.Tensor:
    """The mask function of "kvtwin": returns a mask without numbers."""
    mask = torch.empty(
        (batch_size, 1, q_length, kv_length), dtype=torch.bool, device="meta"
    )
    arguments.update(batch_size=batch_size, q_length=q_length, kv_length=kv_length)
    mask._kvtwin = Description(arguments)  # type: ignore[attr-defined]
    return mask


def description(mask: Any) -> Description | None:
    found: Description | None = getattr(mask, "_kvtwin", None)
    if found is None and isinstance(mask, torch.Tensor) and mask.is_meta:
        raise NotSupported("the model computes with its mask before attention reads it")
    return found


def for_sdpa(mask: Any) -> Any:
    """Returns the mask that sdpa gets; it may be None."""
    found = description(mask)
    if found is None:
        return mask
    if found.made == ():
        found.made = masking_utils.sdpa_mask(**found.arguments)
    return found.made


def padding_of(mask: Any) -> torch.Tensor | None:
    """Returns (rows, tokens) of bool: which tokens are not padding."""
    found = description(mask)
    if found is None:
        return None
    padding: torch.Tensor | None = found.arguments.get("attention_mask")
    return padding


def _closure(function: Any) -> dict[str, Any]:
    names = function.__code__.co_freevars
    return dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ())))


def _kind(function: Any) -> tuple[str, int] | None:
    """Returns the kind of kvtwin's cache that has this mask, and its window or chunk."""
    if function is masking_utils.causal_mask_function:
        return "causal", 0
    if getattr(function, "__module__", "") != masking_utils.__name__:
        return None
    parts = _closure(function).get("mask_functions", ())
    if (
        function.__qualname__ != "and_masks.<locals>.and_mask"
        or len(parts) != 2
        or parts[1] is not masking_utils.causal_mask_function
    ):
        return None
    values = _closure(parts[0])
    if parts[0].__qualname__ == "sliding_window_overlay.<locals>.inner_mask":
        return "swa", int(values["sliding_window"]) - 1
    if parts[0].__qualname__ == "chunked_overlay.<locals>.inner_mask":
        return "chunked", int(values["chunk_size"])
    return None


def agrees(mask: Any, setup: Setup) -> bool:
    """Whether the mask is that of the cache itself. Raises NotSupported if the cache
    lacks tokens that the mask shows."""
    found = description(mask)
    kind = None
    if mask is None:
        kind = "causal", 0
    elif found is not None and not found.arguments.get("use_vmap"):
        kind = _kind(found.arguments.get("mask_function"))
    size = {"swa": setup.window, "chunked": setup.chunk}.get(setup.kind, 0)
    if kind == (setup.kind, size):
        return True
    if setup.kind == "swa" and kind is not None:
        raise NotSupported(
            f"a layer whose window in the cache is {(setup.window or 0) + 1} tokens has "
            f"a mask of another kind: {kind[0]}"
        )
    return False


def dense(mask: Any, rows: int, tokens: int, length: int) -> tuple[BoolArray, int]:
    """Returns a mask as bools, (rows or 1, tokens, columns), and the index of column 0.
    None: each token sees all."""
    if mask is None:
        return np.ones((1, tokens, length), dtype=np.bool_), 0
    found = description(mask)
    offset = 0
    if found is not None:
        offset = found.arguments.get("kv_offset", 0)
        mask = masking_utils.sdpa_mask(
            **{
                **found.arguments,
                "allow_is_causal_skip": False,
                "allow_is_bidirectional_skip": False,
            }
        )
    if mask.ndim != 4 or mask.shape[0] not in (1, rows) or mask.shape[1] != 1:
        raise NotSupported(f"a mask of shape {tuple(mask.shape)}")
    mask = mask[:, 0, :, :length]
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((hidden | (mask == 0)).all()):
            raise NotSupported("a mask with other numbers than 0 and -inf")
        mask = ~hidden
    return mask.expand(-1, tokens, -1).numpy(), offset
