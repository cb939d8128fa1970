"""SGLang's radix trees as pools of one-token pages, for pinned.py. The tree
decides what a prompt finds; slots and rows are kept here."""

import importlib
import sys
import types
from unittest import mock

import kvtwin
import numpy as np
import torch
from pinned import without_init

LIVE = True


class Allocator:
    """Stands in for SGLang's, whose memory is on a GPU."""
    device = torch.device("cpu")

    def __init__(self, slots):
        self.unused = list(range(slots))
        self.windowed = set()  # Slots whose rows of windowed layers are there.

    def take(self, count):
        taken = [self.unused.pop(0) for _ in range(count)]
        self.windowed.update(taken)
        return taken

    def free(self, slots):
        self.free_swa(slots)
        self.unused += [int(slot) for slot in slots]

    def free_swa(self, slots):
        self.windowed -= {int(slot) for slot in slots}


def load(name):
    """A module of mem_cache, without what needs a GPU."""
    without_init("sglang", "sglang.srt", "sglang.srt.mem_cache")
    for needed in ("sglang.srt.disaggregation", "sglang.srt.environ",
                   "sglang.srt.disaggregation.kv_events", "triton",
                   "sglang.srt.mem_cache.memory_pool", "triton.language",
                   "sglang.srt.utils", "sglang.srt.utils.common",
                   "sglang.srt.mem_cache.hicache_storage",
                   "sglang.srt.observability", "sglang.srt.metrics",
                   "sglang.srt.observability.metrics_collector",
                   "sglang.srt.metrics.collector"):
        sys.modules.setdefault(needed, mock.MagicMock())
    sys.modules["sglang.srt.mem_cache.allocator"] = types.SimpleNamespace(
        SWATokenToKVPoolAllocator=Allocator,
        BaseTokenToKVPoolAllocator=Allocator)
    sys.modules["sglang.srt.mem_cache.swa_memory_pool"] = (
        sys.modules["sglang.srt.mem_cache.allocator"])
    return importlib.import_module(f"sglang.srt.mem_cache.{name}")


class Pool:
    def __init__(self, setup):
        if setup.block_size > 1 or {setup.dtype, setup.v_dtype} != {"f32"}:
            raise kvtwin.NotSupported
        self.setup = setup
        self.allocator = Allocator(setup.blocks)
        self.radix = load("radix_cache")
        self.tree = self.make()
        self.sequences = {}
        self.rows = {}  # By slot and layer: K, V.

    def key_of(self, tokens, label):
        return self.radix.RadixKey(list(tokens), label)

    def match(self, tokens, label):
        return self.tree.match_prefix(self.key_of(tokens, label))

    def open(self, prompt, salt, extra):
        label = repr((salt, extra)) if salt or extra else None
        found = self.match(prompt[:-1], label)
        number = next(i for i in range(1000) if i not in self.sequences)
        slots = [int(slot) for slot in found.device_indices]
        self.sequences[number] = types.SimpleNamespace(
            label=label, tokens=prompt[:len(slots)], slots=slots, ahead=[],
            pending={},
            node=found.last_device_node, owned=len(slots),
            lock=self.tree.inc_lock_ref(found.last_device_node))
        return number

    def seq_len(self, sequence):
        return len(self.sequences[sequence].slots)

    def append(self, sequence, layer, key, value):
        one = self.sequences[sequence]
        if len(one.slots) + len(key) > self.setup.max_seq_len:
            raise kvtwin.CacheFull
        missing = len(key) - len(one.ahead)
        if missing > len(self.allocator.unused):
            self.evict(missing - len(self.allocator.unused))
        if missing > len(self.allocator.unused):
            raise kvtwin.CacheFull
        one.ahead += self.allocator.take(max(0, missing))
        one.pending[layer] = len(key)
        for slot, *rows in zip(one.ahead, key, value):
            self.rows[slot, layer] = rows

    def commit(self, sequence, tokens):
        one = self.sequences[sequence]
        one.tokens = one.tokens + list(tokens)
        one.slots += one.ahead[:len(tokens)]
        self.allocator.free(one.ahead[len(tokens):])
        one.ahead, one.pending = [], {}

    def views(self, sequence, layer):
        one = self.sequences[sequence]
        first = self.first(one)
        slots = one.slots[first:] + one.ahead[:one.pending.get(layer, 0)]
        return [(*(x[None] for x in self.row(slot, layer)), slot, first + i)
                for i, slot in enumerate(slots)]

    def first(self, one):
        return 0

    def row(self, slot, layer):
        return self.rows[slot, layer]


class Windowed(Pool):
    """SWARadixCache. Windowed layers have memory for half as many tokens, so that
    it runs short while sequences are open; the tree keeps the tokens of a sequence
    after each commit, as after each chunk of a prompt."""
    kvtwin = kvtwin.PoolDescription(
        name="SWARadixCache", window=2, can={"deduplicates"})

    @staticmethod
    def draw(rng):
        """Draws clients of a small vocabulary that continue the prompts of others."""
        blocks = rng.choice([12, 16, 20, 24])
        parts = [f"kvp1 block=1 blocks={blocks} most=14 layers=1 heads=1 kdim=1 "
                 "vdim=1 dtype=f32"]
        for _ in range(rng.randint(10, 60)):
            dice, one = rng.random(), rng.randrange(6)
            if dice < 0.3:
                parts.append(f"open {rng.randrange(40)} {rng.randrange(3)} 0")
            elif dice < 0.8:
                parts.append(f"append {one} {rng.randrange(2)} "
                             f"{2 * rng.randrange(4)}")
                parts.append(f"commit {one} 1 0")
            else:
                parts.append(f"free {one} 0 0")
        return parts

    def __init__(self, setup):
        super().__init__(setup)
        self.room = setup.blocks // 2

    def make(self):
        module = load("swa_radix_cache")
        params = importlib.import_module(
            "sglang.srt.mem_cache.cache_init_params").CacheInitParams(
                disable=False, req_to_token_pool=None, page_size=1,
                token_to_kv_pool_allocator=self.allocator,
                sliding_window_size=self.kvtwin.window)
        if hasattr(module.SWARadixCache, "supports_swa"):
            return module.SWARadixCache(params)
        return module.SWARadixCache(params, self.kvtwin.window)

    def match(self, tokens, label):
        key = self.key_of(tokens, label)
        base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        if hasattr(base, "MatchPrefixParams"):
            key = base.MatchPrefixParams(key=key)
        return self.tree.match_prefix(key)

    def evict(self, count):
        self.tree.evict(count)

    def append(self, sequence, layer, key, value):
        missing = (len(key) - len(self.sequences[sequence].ahead)
                   + len(self.allocator.windowed) - self.room)
        if missing > 0:
            self.tree.evict(0, missing)
        if missing > 0 and (len(key) - len(self.sequences[sequence].ahead)
                            + len(self.allocator.windowed) > self.room):
            raise kvtwin.CacheFull
        super().append(sequence, layer, key, value)

    def commit(self, sequence, tokens):
        super().commit(sequence, tokens)
        one = self.sequences[sequence]
        if not tokens:
            return
        self.keep(one)
        found = self.match(one.tokens, one.label)
        one.slots[:len(found.device_indices)] = found.device_indices.tolist()
        self.tree.dec_lock_ref(one.node, one.lock)
        one.node, one.owned = found.last_device_node, len(found.device_indices)
        one.lock = self.tree.inc_lock_ref(one.node)

    def keep(self, one):
        self.tree.insert(self.key_of(one.tokens, one.label),
                         torch.tensor(one.slots), one.owned)

    def first(self, one):
        return max(0, len(one.slots) - self.kvtwin.window)

    def row(self, slot, layer):
        key, value = self.rows[slot, layer]
        if slot in self.allocator.windowed:
            return key, value
        return np.full_like(key, -1), np.full_like(value, -1)  # It is gone.

    def free(self, sequence):
        one = self.sequences.pop(sequence)
        self.allocator.free(one.ahead)
        if one.slots:
            self.keep(one)
        self.tree.dec_lock_ref(one.node, one.lock)


class Eagle(Pool):
    """RadixCache of EAGLE's draft model, whose row i is made of token i + 1
    too: it is the row of our token i + 1. The row of our first token is in a
    slot of each sequence."""
    kvtwin = kvtwin.PoolDescription(name="RadixCache, EAGLE")

    def make(self):
        self.trees = {}
        self.firsts = {}  # By label and token: rows by layer.

    def tree_of(self, label):
        if label not in self.trees:
            options = {"is_eagle": True} if self.pairs() else {}
            self.trees[label] = self.radix.RadixCache(
                None, self.allocator, page_size=1, **options)
        return self.trees[label]

    def pairs(self):
        """Returns True if keys are pairs of tokens."""
        return hasattr(self.radix, "RadixKey")

    def key_of(self, tokens, label):
        """Returns the key of the rows of all tokens except the first."""
        return (super().key_of(tokens, None) if self.pairs()
                else list(tokens[:-1]))

    def evict(self, count):
        for tree in self.trees.values():
            tree.evict(count)

    def open(self, prompt, salt, extra):
        label = repr((salt, extra))
        tree = self.tree_of(label)
        found = tree.match_prefix(self.key_of(prompt[:-1], label))
        slots = [int(slot) for slot in found.device_indices]
        node = found.last_device_node
        tree.inc_lock_ref(node)
        if slots and not self.allocator.unused:
            self.evict(1)
        if slots and not self.allocator.unused:
            slots = []
        if slots:
            slots = self.allocator.take(1) + slots
            for layer, rows in self.firsts[label, prompt[0]].items():
                self.rows[slots[0], layer] = rows
        number = next(i for i in range(1000) if i not in self.sequences)
        self.sequences[number] = types.SimpleNamespace(
            label=label, tokens=prompt[:len(slots)], slots=slots, ahead=[],
            pending={}, node=node, owned=max(0, len(slots) - 1))
        return number

    def commit(self, sequence, tokens):
        super().commit(sequence, tokens)
        one = self.sequences[sequence]
        if one.slots:
            self.firsts.setdefault((one.label, one.tokens[0]), {
                layer: self.rows[one.slots[0], layer]
                for layer in range(self.setup.layers)})

    def free(self, sequence):
        one = self.sequences.pop(sequence)
        tree = self.tree_of(one.label)
        self.allocator.free(one.ahead)
        rest = one.slots[1:]
        if rest:
            known = tree.insert(self.key_of(one.tokens, one.label),
                                torch.tensor(rest))
            self.allocator.free(rest[one.owned:known])
        self.allocator.free(one.slots[:1])
        tree.dec_lock_ref(one.node)
