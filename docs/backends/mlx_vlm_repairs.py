"""Repairs of the bugs of mlx_vlm.md, so that others would show. Each takes a
function of mlx-vlm and returns another."""

from mlx_vlm import apc
from mlx_vlm.apc import APCManager, hash_image_payload
from mlx_vlm.apc_coordinator import APCCoordinator
from mlx_vlm.generate import dispatch
from mlx_vlm.generate.ar import PromptProcessingBatch
from mlx_vlm.generate.common import PromptCacheState
from mlx_vlm.models.cache import BatchRotatingKVCache, KVCache


def order_first(rule):
    """The mask of several tokens is made after the rows are in order."""
    def make_mask(cache, count, *args, **kwargs):
        if count > 1 and cache.keys is not None:
            cache._temporal_order()
        return rule(cache, count, *args, **kwargs)
    return make_mask


def finish_padding(rule):
    """When the rows with padding are gone, no cache waits for padding."""
    def remove(batch, uid):
        padded = any(batch._right_pad_per_row or ())
        rule(batch, uid)
        if padded and batch.uids and not any(batch._right_pad_per_row):
            for cache in batch.prompt_cache:
                cache.finalize()
    return remove


def keep_leases(rule):
    """A reset forgets all blocks, and leaves those in use out of the free list."""
    def clear(manager):
        with manager.lock:
            held = [(block, block.ref_cnt) for block in manager.pool
                    if block.ref_cnt > 0]
            rule(manager)
            for block, count in held:
                manager._free_remove(block)
                block.ref_cnt = count
    return clear


def release_at_once(rule):
    """Blocks are free again as soon as their rows are copied."""
    def materialize_single(coordinator, hit, **kwargs):
        caches = rule(coordinator, hit, **kwargs)
        coordinator.release_hit(hit)
        hit.get("matched_blocks", []).clear()
        return caches
    return materialize_single


def forget_used(rule):
    """A cache that an answer continues is known again when the answer ends."""
    def find_prefix_length(state, tokens):
        length = rule(state, tokens)
        state.token_ids = None
        return length
    return find_prefix_length


def compare_images(rule):
    """A prompt with other images is computed from the start."""
    def stream_generate(*args, prompt_cache_state=None, **kwargs):
        if prompt_cache_state is not None:
            images = hash_image_payload(kwargs.get("pixel_values"))
            if getattr(prompt_cache_state, "images", images) != images:
                prompt_cache_state.token_ids = None
            prompt_cache_state.images = images
        return rule(*args, prompt_cache_state=prompt_cache_state, **kwargs)
    return stream_generate


def store_whole_alone(rule):
    """With max_kv_size, the rows of a prompt are not stored."""
    def stream_generate(*args, max_kv_size=None, apc_manager=None, **kwargs):
        return rule(*args, max_kv_size=max_kv_size,
                    apc_manager=None if max_kv_size else apc_manager, **kwargs)
    return stream_generate


def count_parts(rule):
    """The parts of a cache say its length; a state alone is not used again."""
    def trim_amount(caches, length):
        parts = [part for cache in caches
                 for part in getattr(cache, "caches", [cache])]
        if not any(hasattr(part, "offset") for part in parts):
            return None
        return rule(parts, length)
    return trim_amount


def merge_rows(rule):
    """Each prompt gets a cache of its own, and these are merged."""
    def make_warm_batch_kv_cache_multi(picks, num_layers, kv_quant_config=None):
        rows = []
        for pick in picks:
            if pick is None:
                rows.append([KVCache() for _ in range(num_layers)])
            else:
                rows.append(pick.get("warm_cache")
                            or apc.make_warm_kv_cache(pick["matched_blocks"]))
        return apc.make_warm_batch_exact_cache_multi(
            rows, [pick["prefix_len"] if pick else 0 for pick in picks],
            kv_quant_config)
    return make_warm_batch_kv_cache_multi


REPAIRS = {
    "wide": [(apc, "make_warm_batch_kv_cache_multi", merge_rows)],
    "window": [(BatchRotatingKVCache, "make_mask", order_first)],
    "cancel": [(PromptProcessingBatch, "remove", finish_padding)],
    "reset": [(APCManager, "clear", keep_leases)],
    "held": [(APCCoordinator, "materialize_single", release_at_once)],
    "stop": [(PromptCacheState, "find_prefix_length", forget_used)],
    "image": [(dispatch, "stream_generate", compare_images)],
    "bound": [(dispatch, "stream_generate", store_whole_alone)],
    "length": [(dispatch, "_prefix_cache_trim_amount", count_parts)],
}
