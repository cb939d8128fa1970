"""A recurrent cache in Python, and its test (docs/hybrid.md, docs/python.md):

    pytest docs/examples/python_states.py
"""

import numpy as np

import kvtwin


class StateCache:
    """Keeps the states of each sequence by length: a key and a value for each layer."""

    kvtwin = kvtwin.Description(
        name="state cache",
        kinds={"recurrent"},
        can={"remove_tail", "copy_prefix", "share"},
        max_sequences=0,
    )

    def __init__(self, setup):
        self.setup = setup
        self.states = {}

    def start_forward(self, positions, sequences):
        held = self.states.setdefault(sequences[0], {})
        self.read = held.get(positions[0], {})
        lengths = [p + 1 for p in positions]
        every, keep = self.setup.checkpoint_every, self.setup.checkpoints
        marks = [n for n in sorted({*held, *lengths}) if every and n % every == 0]
        kept = {positions[0], lengths[-1], *marks[len(marks) - min(keep, len(marks)) :]}
        self.written = {i: {} for i, n in enumerate(lengths) if n in kept}
        now = {n: layers for n, layers in held.items() if n in kept}
        now |= {lengths[i]: layers for i, layers in self.written.items()}
        self.states[sequences[0]] = now
        self.rows = len(positions)

    def put(self, layer, key, value):
        for i, layers in self.written.items():
            layers[layer] = key[i].copy(), value[i].copy()

    def get(self, layer):
        s = self.setup
        none = np.zeros((s.kv_heads, s.k_head_dim)), np.zeros((s.kv_heads, s.v_head_dim))
        key, value = self.read.get(layer, none)
        sees = layer in self.read
        mask = np.full((self.rows, 1), sees)
        return key[None].astype(np.float32), value[None].astype(np.float32), mask

    def remove(self, sequence, begin, end):
        self.copy_prefix(sequence, sequence, begin)

    def copy_prefix(self, source, target, length):
        held = self.states.get(source, {})
        self.states[target] = {n: layers for n, layers in held.items() if n <= length}

    def can_resume(self, sequence, position):
        return position == 0 or position in self.states.get(sequence, {})


def test_state_cache(kvtwin_fuzz):
    kvtwin_fuzz(StateCache)
