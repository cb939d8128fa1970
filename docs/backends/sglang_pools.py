"""SGLang's prefix caches as pools, under kvtwin's oracle: docs/backends/sglang.md.

The trees, the allocators and the functions that a scheduler calls are SGLang's;
a request and the tensors of K and V are kept here.
"""

import array
import ast
import dataclasses
import importlib
import importlib.machinery
import random
import sys
import types
from unittest import mock

import kvtwin
import numpy as np
import torch
from page import compare, say
from pinned import without_init

# Modules of SGLang that trees and allocators import and do not call here.
UNUSED = tuple(f"sglang.{name}" for name in (
    "kernels", "srt.configs", "srt.distributed", "srt.layers", "srt.managers",
    "srt.model", "srt.observability", "srt.mem_cache.allocator.hisparse"))


class StandIn(types.ModuleType):
    """A module whose names are empty classes and functions that do nothing."""
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return type(name, (), {"__init__": lambda self, *a, **k: None})
        return mock.MagicMock(name=name)


class StandIns:
    """Finds stand-ins for UNUSED, and for modules that SGLang imports and pip did not
    install."""

    def find_spec(self, name, path, target=None):
        top = name.partition(".")[0]
        if name.startswith(UNUSED) or top != "sglang" and self.missing(top):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    @staticmethod
    def missing(top):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename or (
                frame.f_code.co_filename == __file__):
            frame = frame.f_back
        return (frame.f_globals.get("__name__", "").startswith("sglang")
                and top not in sys.stdlib_module_names
                and not importlib.machinery.PathFinder.find_spec(top))

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def load():
    """SGLang's modules, without the code of its package, which needs a GPU."""
    without_init("sglang")
    sys.meta_path.insert(0, StandIns())
    names = types.SimpleNamespace()
    for name in ("unified_radix_cache", "radix_cache", "pure_swa_radix_cache",
                 "common", "memory_pool", "base_swa_memory_pool", "allocator.swa",
                 "allocator.token", "allocator.paged", "cache_init_params",
                 "base_prefix_cache"):
        module = importlib.import_module(f"sglang.srt.mem_cache.{name}")
        setattr(names, name.rpartition(".")[2], module)
    # As in speculation, some allocated rows never get a committed token.
    names.common.get_spec = lambda: types.SimpleNamespace(
        speculative_algorithm="NGRAM")
    return names


def kv_info():
    """ReqKvInfo, the record of what a request holds, taken out of its module."""
    folder = sys.modules["sglang"].__path__[0]
    with open(f"{folder}/srt/managers/schedule_batch.py") as source:
        tree = ast.parse(source.read())
    tree.body = [node for node in tree.body
                 if getattr(node, "name", "") == "ReqKvInfo"]
    component = importlib.import_module(
        "sglang.srt.mem_cache.unified_cache.component_type").ComponentType
    names = {"dataclasses": dataclasses, "torch": torch, "ComponentType": component,
             "RetractionBackup": None, "ceil_align": SG.radix_cache.ceil_align,
             "__name__": __name__}
    exec(compile("from typing import Optional", "", "exec"), names)
    exec(compile(tree, "schedule_batch.py", "exec"), names)
    return names["ReqKvInfo"]


SG = load()
Component = SG.unified_radix_cache.ComponentType
ReqKvInfo = kv_info()


class Request:
    """The attributes of a request that the trees read."""
    skip_radix_cache_insert = False
    session = session_id = priority = kv_rotation_base = lock = None
    swa_branching_seqlen = mamba_branching_seqlen = None
    decode_batch_idx = extend_end = 0
    over = False

    def __init__(self, rid, prompt, salt, extra):
        self.rid = str(rid)
        self.kv = ReqKvInfo()
        self.origin_input_ids = array.array("q", prompt)
        self.output_ids = array.array("q")
        self.extra_key = repr(extra) if extra else None
        self.cache_salt = salt or None

    def _compute_max_prefix_len(self, input_len):
        return max(0, input_len - 1)

    def finished(self):
        return self.over

    def refresh_fill_ids(self):
        pass

    def get_fill_ids(self):
        return self.full_untruncated_fill_ids

    @property
    def full_untruncated_fill_ids(self):
        return self.origin_input_ids + self.output_ids

    @property
    def seqlen(self):
        return len(self.full_untruncated_fill_ids)

    def owned_kv_len(self):
        return self.kv.kv_committed_len


class Pool:
    """A tree with full attention in all layers. Subclasses choose the tree."""
    core = None
    is_eagle = False

    def __init__(self, setup):
        if {setup.dtype, setup.v_dtype} != {"f32"}:
            raise kvtwin.NotSupported
        self.setup, self.size = setup, setup.block_size
        self.slots = setup.blocks * self.size
        self.requests = {}
        self.rows = {}  # By slot and layer: K, V.
        self.pool = SG.memory_pool.ReqToTokenPool(
            64, setup.max_seq_len + self.size, "cpu", False)
        self.allocator = self.make_allocator()
        for one in (self.allocator, *vars(self.allocator).values()):
            if hasattr(one, "use_triton_kernels"):
                one.use_triton_kernels = False
        self.tree = self.make_tree()

    def make_allocator(self):
        if self.size == 1:
            return SG.token.TokenToKVPoolAllocator(
                self.slots, torch.float32, "cpu", None, False)
        return SG.paged.PagedTokenToKVPoolAllocator(
            self.slots, self.size, torch.float32, "cpu", None, False)

    def params(self, **options):
        return SG.cache_init_params.CacheInitParams(
            disable=False, req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator, page_size=self.size,
            is_eagle=self.is_eagle, **options)

    def make_tree(self):
        return SG.radix_cache.RadixCache(self.params())

    def open(self, prompt, salt, extra):
        number = next(i for i in range(1000) if i not in self.requests)
        one = Request(number, prompt, salt, extra)
        SG.common.match_kv_cache(
            one, self.tree, one.origin_input_ids,
            max_prefix_len=one._compute_max_prefix_len(len(prompt)))
        kv, length = one.kv, one.prefix_len
        kv.cache_protected_len = kv.kv_committed_len = kv.kv_allocated_len = length
        one.lock = self.tree.lock(one.last_node)
        self.pool.alloc([one])
        self.pool.write((kv.req_pool_idx, slice(0, length)),
                        self.tree.prefix_device_indices(one).to(torch.int32))
        del one.origin_input_ids[length:]
        one.found = length
        one.appended = {}
        self.requests[number] = one
        return number

    def seq_len(self, sequence):
        return self.requests[sequence].kv.kv_committed_len

    def append(self, sequence, layer, key, value):
        one = self.requests[sequence]
        start, end = one.kv.kv_committed_len, one.kv.kv_committed_len + len(key)
        if end > self.setup.max_seq_len:
            raise kvtwin.CacheFull
        self.slide(one)
        self.extend(one, end)
        one.appended[layer] = end
        for slot, *rows in zip(self.slots_of(one, start, end), key, value):
            self.rows[slot, layer] = rows

    def extend(self, one, end):
        """Allocates rows up to `end`, as SGLang's allocation.py does."""
        start = one.kv.kv_allocated_len
        if end <= start:
            return
        count = end - start
        row = self.pool.req_to_token[one.kv.req_pool_idx]
        if self.size == 1:
            SG.common.evict_from_tree_cache(self.tree, count)
            found = self.allocator.alloc(count)
        else:
            SG.common.evict_from_tree_cache(self.tree, count + self.size)
            before, after = torch.tensor([start]), torch.tensor([end])
            last = row[start - 1:start].long() if start else torch.tensor([-1])
            found = self.allocator.alloc_extend(
                before, before, after, after, last, count)
        if found is None:
            raise kvtwin.CacheFull
        row[start:end] = found.to(torch.int32)
        one.kv.kv_allocated_len = end

    def slide(self, one):
        """Frees rows that the window has left."""

    def commit(self, sequence, tokens):
        one = self.requests[sequence]
        one.appended = {}
        if not tokens:
            return
        # Chunks of a prompt until a token comes alone, then tokens that are decoded.
        prefill = not one.seqlen or len(tokens) > 1 and not one.output_ids
        (one.origin_input_ids if prefill else one.output_ids).extend(tokens)
        one.kv.kv_committed_len = one.extend_end = one.seqlen
        if prefill:
            SG.common.checkpoint_kv_cache(one, self.tree)
        else:
            one.decode_batch_idx += 1

    def free(self, sequence):
        one = self.requests.pop(sequence)
        one.over = True
        # A request that ends before its first pass has no tokens of its own.
        if one.kv.kv_allocated_len:
            SG.common.release_kv_cache(
                one, self.tree, checkpoint=one.seqlen > one.found)
        else:
            self.tree.unlock(one.lock)
            self.pool.free(one)

    def slots_of(self, one, start, end):
        return self.pool.req_to_token[one.kv.req_pool_idx, start:end].tolist()

    def views(self, sequence, layer):
        """A view for each page; page 0 is SGLang's padding."""
        one = self.requests[sequence]
        start, out = self.first(one), []
        slots = self.slots_of(
            one, start, one.appended.get(layer, one.kv.kv_committed_len))
        while slots:
            page = slots[:self.size - start % self.size]
            rows = zip(*(self.rows[slot, layer] for slot in page))
            out.append((*(np.stack(x) for x in rows),
                        page[0] // self.size - 1, start))
            start, slots = start + len(page), slots[len(page):]
        return out

    def first(self, one):
        return 0


class Radix(Pool):
    kvtwin = kvtwin.PoolDescription(name="RadixCache", can={"deduplicates"})


class Unified(Pool):
    kvtwin = kvtwin.PoolDescription(
        name="UnifiedRadixCache of full attention, core in Python",
        can={"deduplicates"})
    core = "python"
    components = (Component.FULL,)

    def make_tree(self, **options):
        return SG.unified_radix_cache.UnifiedRadixCache(self.params(
            tree_components=self.components, tree_core_backend=self.core,
            **options))


class UnifiedRust(Unified):
    kvtwin = kvtwin.PoolDescription(
        name="UnifiedRadixCache of full attention, core in Rust",
        can={"deduplicates"})
    core = "rust"


class WindowMemory(SG.base_swa_memory_pool.BaseSWAKVPool):
    """Stands in for the tensors of windowed layers."""
    swa_req_ring_size = None

    def __init__(self):
        pass

    def register_mapping(self, mapping):
        self.full_to_swa_index_mapping = mapping

    def translate_loc_from_full_to_swa(self, indices):
        return self.full_to_swa_index_mapping[indices]


WindowMemory.__abstractmethods__ = frozenset()


class Hybrid(Unified):
    """The rows of windowed layers, beside layers of full attention: these have
    memory of their own, which is smaller."""
    window = 3
    kvtwin = kvtwin.PoolDescription(
        name="UnifiedRadixCache with a window, core in Python, windowed layers",
        window=window, can={"deduplicates"})
    components = (Component.FULL, Component.SWA)

    def make_allocator(self):
        small = max(1, self.setup.blocks * 3 // 4) * self.size
        return SG.swa.SWATokenToKVPoolAllocator(
            self.slots, small, self.size, torch.float32, "cpu", WindowMemory(),
            False)

    def make_tree(self):
        return super().make_tree(sliding_window_size=self.window)

    def slide(self, one):
        if one.decode_batch_idx >= 1:
            self.tree.evict_sliding_windows(one, one.seqlen - 1)
        if one.decode_batch_idx >= self.window:
            self.tree.release_swa_prefix_lock(one)

    def slots_of(self, one, start, end):
        full = self.pool.req_to_token[one.kv.req_pool_idx, start:end].long()
        return self.allocator.translate_loc_from_full_to_swa(full).tolist()

    def first(self, one):
        return max(0, one.kv.kv_committed_len - self.window)

    def views(self, sequence, layer):
        gone = np.full((self.setup.kv_heads, self.setup.k_head_dim), -1, "f4")
        self.rows[0, layer] = gone, gone[:, :1].repeat(self.setup.v_head_dim, 1)
        return super().views(sequence, layer)


class HybridRust(Hybrid):
    kvtwin = kvtwin.PoolDescription(
        name="UnifiedRadixCache with a window, core in Rust, windowed layers",
        window=Hybrid.window, can={"deduplicates"})
    core = "rust"


class HybridFull(Hybrid):
    kvtwin = kvtwin.PoolDescription(
        name="UnifiedRadixCache with a window, core in Python, other layers",
        can={"deduplicates"})
    slots_of, first, views = Pool.slots_of, Pool.first, Pool.views


class HybridFullRust(HybridFull):
    kvtwin = kvtwin.PoolDescription(
        name="UnifiedRadixCache with a window, core in Rust, other layers",
        can={"deduplicates"})
    core = "rust"


class Control(Hybrid):
    """A planted bug: a match counts on through tokens whose rows are gone."""
    kvtwin = kvtwin.PoolDescription(
        name="Hybrid with a planted bug, to show what would be seen",
        window=Hybrid.window, can={"deduplicates"})

    def make_tree(self):
        tree = super().make_tree()
        tree.components[Component.SWA].create_match_validator = (
            lambda match_device_only=False: lambda node: (
                node.component_data[Component.SWA].value is not None))
        return tree


def draw(rng):
    """Draws a client of a small vocabulary that continues the prompts of others, in
    pools of more pages than kvtwin.fuzz draws; memory runs short while sequences are
    open."""
    parts = [f"kvp1 block={rng.choice([1, 1, 2, 3])} "
             f"blocks={rng.choice([6, 10, 14, 18, 24])} "
             f"most={rng.choice([14, 20, 30])} layers=1 heads=1 kdim=1 vdim=1 "
             "dtype=f32"]
    for _ in range(rng.randint(10, 70)):
        dice, one = rng.random(), rng.randrange(6)
        if dice < 0.3:
            parts.append(f"open {rng.randrange(40)} {rng.randrange(4)} "
                         f"{rng.choice([0, 0, 0, 4])}")
        elif dice < 0.8:
            parts.append(f"append {one} {rng.choice([0, 0, 1, 2, 3, 5])} "
                         f"{2 * rng.randrange(6)}")
            parts.append(f"commit {one} {rng.choice([1, 1, 1, 0])} "
                         f"{rng.randrange(4)}")
        else:
            parts.append(f"free {one} 0 0")
    return " | ".join(parts)


def judge(cls, operations=20_000, drawn=150):
    result = kvtwin.fuzz(cls, operations=operations)
    if result.not_judged:
        return ["not judged"]
    rng = random.Random(5)
    findings = (kvtwin.run(cls, draw(rng)).finding for _ in range(drawn))
    for finding in (*result.findings, *filter(None, findings)):
        return [finding.history, finding.reason]
    return ["right"]


CLASSES = (Radix, Unified, UnifiedRust, Hybrid, HybridRust, HybridFull,
           HybridFullRust, Control)


if __name__ == "__main__":
    torch.set_num_threads(1)
    lines = []
    for cls in CLASSES:
        lines += say(f"{cls.__name__}: {cls.kvtwin.name}", judge(cls))
    compare(lines, "sglang.md")
