"""A KV cache in Python with a bug, and the test that finds it (docs/python.md):

    pytest docs/examples/python_cache.py
"""

import copy

import numpy as np

import kvtwin


class Sequence:
    """The rows of one sequence, in order, and room for more."""

    def __init__(self, setup):
        room = (setup.layers, setup.capacity, setup.kv_heads)
        self.keys = np.zeros((*room, setup.k_head_dim), np.float32)
        self.values = np.zeros((*room, setup.v_head_dim), np.float32)
        self.length = 0


class PrefixCache:
    kvtwin = kvtwin.Description(
        name="prefix cache",
        can={"remove_tail", "copy_prefix", "share"},
        max_sequences=0,
    )

    def __init__(self, setup):
        self.setup = setup
        self.sequences = {}

    def of(self, number):
        return self.sequences.setdefault(number, Sequence(self.setup))

    def start_forward(self, positions, sequences):
        self.now = self.of(sequences[0])  # Without "mix", all are the same.
        self.begin, self.end = self.now.length, self.now.length + len(positions)
        if self.end > self.setup.capacity:
            raise kvtwin.CacheFull(f"sequence {sequences[0]} has no more room")
        self.now.length = self.end

    def put(self, layer, key, value):
        self.now.keys[layer, self.begin : self.end] = key
        self.now.values[layer, self.begin : self.end] = value

    def get(self, layer):
        mask = np.arange(self.end) <= np.arange(self.begin, self.end)[:, None]
        held = slice(self.end)
        return self.now.keys[layer, held], self.now.values[layer, held], mask

    def remove(self, sequence, begin, end):
        self.of(sequence).length = min(begin, self.of(sequence).length)

    def copy_prefix(self, source, target, length):
        copied = copy.copy(self.of(source))
        copied.length = min(length, copied.length)
        self.sequences[target] = copied


def test_prefix_cache(kvtwin_fuzz):
    kvtwin_fuzz(PrefixCache)
