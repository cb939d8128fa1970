"""Repairs of the bugs of vllm_mlx.md, so that others would show. Each takes a
function of vLLM-MLX or mlx-lm and returns another."""

import contextlib
from unittest import mock

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, RotatingKVCache
from vllm_mlx.paged_cache import PagedCacheManager
from vllm_mlx.prefix_cache import BlockAwarePrefixCache, PrefixCacheManager


def mask_padding(rule):
    """States leave out the padding of prompts (mlx-lm)."""
    def make_mask(cache, count):
        mask = rule(cache, count)
        if cache.left_padding is not None and cache.lengths is not None:
            mask = mask & (mx.arange(count) < cache.lengths[:, None])
        return mask
    return make_mask


def leave_token(rule):
    """A prompt that is stored as a whole is computed again."""
    def fetch_cache(store, tokens):
        cache, remaining = rule(store, tokens)
        return (cache, remaining) if remaining else (None, tokens)
    return fetch_cache


def leave_block(rule):
    """The last block of a prompt that is stored as a whole is computed again."""
    def find_shared_prefix(manager, tokens):
        return rule(manager, tokens[:-1])[0], None
    return find_shared_prefix
