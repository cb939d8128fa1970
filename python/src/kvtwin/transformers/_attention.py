"""The attention function that transformers calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvtwin._errors import NotSupported
from kvtwin.transformers import _masks
from kvtwin.transformers._state import Handle


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends to the rows of a kvtwin cache; without one, as "sdpa" does."""
    handle: Handle | None = getattr(key, "_kvtwin", None)
    if handle is None:
        if key.is_meta:
            raise NotSupported(
                f"{type(module).__name__} changes keys after the cache got them"
            )
        if softcap is not None or s_aux is not None:
            raise NotSupported(
                f"{type(module).__name__} has a soft cap or sinks, and no cache: pass "
                "past_key_values=kvtwin.transformers.Cache(model.config, ...)"
            )
        found = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            _masks.for_sdpa(attention_mask),
            dropout=dropout,
            scaling=scaling,
            **kwargs,
        )
        return found[0], None
    for name in ("position_bias", "output_attentions"):
        given = kwargs.get(name)
        if given is not None and given is not False:
            raise NotSupported(f"{type(module).__name__}: {name}")
    if dropout:
        raise NotSupported(f"{type(module).__name__}: dropout {dropout}, for training")
    if kwargs.get("is_causal") is False and not handle.state.storage.cross:
        raise NotSupported(f"{type(module).__name__}: is_causal=False")
    options = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
    out = handle.state.attend(
        handle, query, attention_mask, *options_of(query, options)
    )
    return out, None


def options_of(
    query: torch.Tensor, options: dict[str, Any]
) -> tuple[float, float, Any]:
    """Returns the scale, the soft cap and the sinks of a call of attention."""
    scaling, sinks = options.get("scaling"), options.get("s_aux")
    if sinks is not None:
        sinks = np.ascontiguousarray(sinks.detach().float().flatten().numpy())
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return scale, options.get("softcap") or 0.0, sinks
