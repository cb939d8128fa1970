"""LMCache's store of chunks in the memory of the CPU, LocalCPUBackend, under an oracle of
its own: docs/backends/lmcache.md.

The calls are those of LMCacheEngine for store, lookup, retrieve, lookup_unpin and clear.
The reference is a list of the stored chunks, in the order in which a policy gives them up.
"""

import os
import random

os.environ.setdefault("LMCACHE_LOG_LEVEL", "CRITICAL")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from page import compare, say

# Objects of 4096 bytes, the alignment of memory.
CHUNK = torch.Size([2, 2, 16, 16])  # K and V, layers, tokens, width.
LAYER = torch.Size([32, 2, 16])  # Tokens, K and V, width.
CHUNKS = 6


class Theirs:
    """A store for `room` chunks, with an object for each, or for each of its 2 layers."""

    def __init__(self, policy, layers, room):
        self.layers = layers
        config = LMCacheEngineConfig.from_defaults(
            cache_policy=policy, use_layerwise=layers > 1, local_cpu=True)
        PinMonitor.GetOrCreate(config)
        self.store_of = LocalCPUBackend(
            config, memory_allocator=MixedMemoryAllocator(room * layers * 4096))
        self.values = {}
        self.time = 0

    def keys(self, chunk):
        key = CacheEngineKey("model", 1, 0, 1000 + chunk, torch.float32)
        return key.split_layers(self.layers) if self.layers > 1 else [key]

    def store(self, chunk):
        """As LMCacheEngine.store and store_layer. Returns False if it is refused."""
        keys = self.keys(chunk)
        if self.store_of.contains(keys[0]):
            return True
        if self.layers > 1:
            objects = self.store_of.batched_allocate(
                LAYER, torch.float32, self.layers, MemoryFormat.KV_T2D, busy_loop=False)
        else:
            one = self.store_of.allocate(CHUNK, torch.float32, busy_loop=False)
            objects = one and [one]
        if objects is None:
            return False
        self.time += 1
        self.values[chunk] = self.time
        for layer, one in enumerate(objects):
            one.tensor.fill_(self.time + layer / 2)
        self.store_of.batched_submit_put_task(keys, objects)
        for one in objects:
            one.ref_count_down()
        return True

    def look(self, chunk):
        """As LMCacheEngine.lookup with pins."""
        found = all([self.store_of.contains(key, pin=True) for key in self.keys(chunk)])
        self.store_of.touch_cache()
        return found

    def load(self, chunk):
        """As LMCacheEngine.retrieve. Returns None, True, or what is wrong."""
        objects = [self.store_of.get_blocking(key) for key in self.keys(chunk)]
        if None in objects:
            return None
        for layer, one in enumerate(objects):
            row = one.tensor
            if not bool((row == self.values[chunk] + layer / 2).all()):
                return f"layer {layer} has rows {row.unique().tolist()}"
            one.ref_count_down()
        return True

    def unpin(self, chunk):
        for key in self.keys(chunk):
            self.store_of.unpin(key)

    def remove(self, chunk):
        for key in self.keys(chunk):
            self.store_of.remove(key)

    def clear(self, _):
        self.store_of.clear()

    def held(self):
        return [chunk for chunk in range(CHUNKS)
                if all(self.store_of.contains(key) for key in self.keys(chunk))]


class Ours:
    """The chunks that are stored, the first to go first."""

    def __init__(self, policy, layers, room):
        self.policy, self.room = policy, room
        self.order, self.pins, self.hits = [], {}, {}

    def candidates(self):
        order = self.order
        if self.policy == "MRU":
            order = order[::-1]
        if self.policy == "LFU":  # The order is kept among equals.
            order = sorted(order, key=lambda chunk: self.hits[chunk])
        return [chunk for chunk in order if not self.pins[chunk]]

    def store(self, chunk):
        if chunk in self.order:
            return True
        if len(self.order) == self.room:
            if not self.candidates():
                return False
            self.remove(self.candidates()[0])
        self.order.append(chunk)
        self.pins[chunk], self.hits[chunk] = 0, 1
        return True

    def look(self, chunk):
        if chunk not in self.order:
            return False
        self.pins[chunk] += 1
        self.hits[chunk] += 1
        if self.policy != "FIFO":
            self.order.remove(chunk)
            self.order.append(chunk)
        return True

    def load(self, chunk):
        return True if chunk in self.order else None

    def unpin(self, chunk):
        if chunk in self.order:
            self.pins[chunk] = max(0, self.pins[chunk] - 1)

    def remove(self, chunk):
        if chunk in self.order:
            self.order.remove(chunk)

    def clear(self, _):
        self.order = [chunk for chunk in self.order if self.pins[chunk]]

    def held(self):
        return sorted(self.order)


def run(policy, layers, room, calls):
    """Returns the calls up to the first difference and what it is, or None."""
    theirs, ours = Theirs(policy, layers, room), Ours(policy, layers, room)
    for number, (name, chunk) in enumerate(calls):
        if name == "unpin" and not ours.pins.get(chunk):
            continue  # No engine does this.
        expected = getattr(ours, name)(chunk)
        try:
            said = getattr(theirs, name)(chunk)
        except Exception as error:
            return calls[: number + 1], f"raises {type(error).__name__}: {error}"
        if said != expected:
            return calls[: number + 1], f"returns {said}, expected {expected}"
        if theirs.held() != ours.held():
            return (calls[: number + 1],
                    f"chunks {theirs.held()} are stored, expected {ours.held()}")
    return None


def drawn(seed):
    """Returns the number of chunks that fit, and calls."""
    random_of = random.Random(seed)
    names = random_of.choices(("store", "look", "load", "unpin", "remove", "clear"),
                              (8, 4, 3, 4, 1, 0.2), k=40)
    return random_of.randint(1, 4), [
        (name, random_of.randrange(CHUNKS)) for name in names]


def shortest(policy, layers, room, found):
    """Leaves calls out while it still goes wrong in the same way."""
    calls, text = found
    again = True
    while again:
        again = False
        for i in range(len(calls)):
            less = run(policy, layers, room, calls[:i] + calls[i + 1:])
            if less and less[1].split()[0] == text.split()[0]:
                (calls, text), again = less, True
                break
    return calls, text


def judge(policy, layers, histories=300):
    """Returns the verdict on a policy."""
    for seed in range(histories):
        room, calls = drawn(seed)
        found = run(policy, layers, room, calls)
        if found:
            calls, text = shortest(policy, layers, room, found)
            words = "; ".join(f"{name} {chunk}" for name, chunk in calls)
            return [f"room for {room}: {words}", f"-> {text}"]
    return [f"{histories} histories: right"]


def main():
    lines = []
    for layers in (1, 2):
        for policy in ("LRU", "LFU", "FIFO", "MRU"):
            kind = "an object for each layer" if layers > 1 else "an object for a chunk"
            lines += say(f"{policy}, {kind}", judge(policy, layers))
    compare(lines, "lmcache.md")


if __name__ == "__main__":
    main()
