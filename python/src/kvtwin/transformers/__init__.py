"""kvtwin in Hugging Face transformers: docs/transformers.md.

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="kvtwin")
    cache = kvtwin.transformers.Cache(model.config, capacity=8192)
    model.generate(..., past_key_values=cache)

Importing this module registers the attention "kvtwin" with transformers.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from kvtwin.transformers import _masks
from kvtwin.transformers._attention import attend
from kvtwin.transformers._audit import Audit
from kvtwin.transformers._cache import Cache, EncoderDecoderCache

AttentionInterface.register("kvtwin", attend)
AttentionMaskInterface.register("kvtwin", _masks.describe)

__all__ = ["Audit", "Cache", "EncoderDecoderCache"]
