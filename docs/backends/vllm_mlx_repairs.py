"""Repairs of the bugs of vllm_mlx.md, so that others would show. Each takes a
function of vLLM-MLX or mlx-lm and returns another."""

import hashlib

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, RotatingKVCache
from vllm_mlx.memory_cache import MemoryAwarePrefixCache
from vllm_mlx.paged_cache import PagedCacheManager
from vllm_mlx.prefix_cache import BlockAwarePrefixCache, PrefixCacheManager


def mask_padding(rule):
    """States leave out the padding of prompts (mlx-lm)."""
    def make_mask(cache, count):
        if cache.lengths is not None:
            return mx.arange(count) < cache.lengths[:, None]
        return rule(cache, count)
    return make_mask


def leave_token(rule):
    """A prompt that is stored as a whole is computed again."""
    def fetch_cache(store, tokens):
        cache, remaining = rule(store, tokens)
        return (cache, remaining) if remaining else (None, tokens)
    return fetch_cache


def leave_block(rule):
    """The last block of a prompt that is stored whole is computed again."""
    def fetch_cache(store, name, tokens):
        table, remaining = rule(store, name, tokens)
        if table and not remaining:
            block = store.paged_cache.allocated_blocks[table.block_ids.pop()]
            table.num_tokens -= block.token_count
            remaining = tokens[table.num_tokens:]
        return table, remaining
    return fetch_cache


def name_whole(rule):
    """A prompt that is found as a whole is never a common prefix."""
    def fetch(store, tokens):
        cache, remaining = rule(store, tokens)
        if store._last_match_type == "lcp" and not remaining:
            store._last_match_type = "supersequence"
        return cache, remaining
    return fetch


def miss_whole(rule):
    """A prompt that is on the disk as a whole is computed again."""
    def check_ssd(store, tokens):
        found = rule(store, tokens)
        if found and found["matched_tokens"] < len(tokens):
            return found
    return check_ssd


class Text(list):
    """Tokens with the tokens before them."""
    before = ()

    def __getitem__(self, index):
        part = super().__getitem__(index)
        if isinstance(index, slice):
            part = Text(part)
            part.before = self.before + tuple(self)[:index.start or 0]
        return part

    def copy(self):
        return self[:]


def of_text(rule):
    """The tokens before a block are part of its hash."""
    def function(store, name, tokens, *rest):
        return rule(store, name, Text(tokens), *rest)
    return function


def whole_hash(rule):
    """As above."""
    def compute_block_hash(tokens):
        return hashlib.sha256(repr((*getattr(tokens, "before", ()), *tokens))
                              .encode()).hexdigest()
    return staticmethod(compute_block_hash)


def count_rows(rule):
    """A window that is built from blocks has as many rows as they have."""
    def reconstruct_cache(store, table):
        layers = rule(store, table)
        for layer in layers or ():
            if isinstance(layer, RotatingKVCache):
                layer.offset = layer._idx = layer.keys.shape[2]
        return layers
    return reconstruct_cache


def read_at_once(rule):
    """Arrays from a file are read before the file is written again."""
    def load_from_disk(store, folder):
        count = rule(store, folder)
        mx.eval([layer.state for entry in store._entries.values()
                 for layer in entry.cache])
        return count
    return load_from_disk


REPAIRS = {
    "padding": [(ArraysCache, "make_mask", mask_padding)],
    "last": [(PrefixCacheManager, "fetch_cache", leave_token),
              (BlockAwarePrefixCache, "fetch_cache", leave_block)],
    "common": [(MemoryAwarePrefixCache, "fetch", name_whole)],
    "disk": [(MemoryAwarePrefixCache, "check_ssd", miss_whole)],
    "hash": [(BlockAwarePrefixCache, "fetch_cache", of_text),
             (BlockAwarePrefixCache, "store_cache", of_text),
             (PagedCacheManager, "compute_block_hash", whole_hash)],
    "window": [(BlockAwarePrefixCache, "reconstruct_cache", count_rows)],
    "files": [(MemoryAwarePrefixCache, "load_from_disk", read_at_once)],
}
