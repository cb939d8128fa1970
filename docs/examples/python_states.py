"""A cache of recurrent states in Python, the same with drafts and pinned states, and a
hybrid of attention and states, each with a bug, and the tests that find them
(docs/hybrid.md):

    pytest docs/examples/python_states.py
"""

import dataclasses

import numpy as np

import kvtwin

BUG = True  # False: all three classes are correct.


class StateCache:
    kvtwin = kvtwin.Description(
        name="state cache",
        kinds={"recurrent"},
        can={"remove_tail", "copy_prefix", "share"},
        max_sequences=0,
    )

    def __init__(self, setup):
        self.setup = setup
        self.states = {}  # By sequence, then by length, then by layer: K and V.
        self.pins = {}  # By sequence: the lengths of its pinned states.

    def start_forward(self, positions, sequences):
        self.lengths = [position + 1 for position in positions]
        self.add(sequences[0], {length: {} for length in self.lengths})

    def add(self, sequence, added):
        """Adds states by length, and drops states that later calls cannot need."""
        setup, now = self.setup, self.states.get(sequence, {})
        self.read = max(now, default=0)  # The whole batch reads this state.
        every = setup.checkpoint_every or setup.capacity + 1
        marks = [n for n in sorted({*now, *added}) if n % every == 0]
        last_marks = marks[max(0, len(marks) - setup.checkpoints) :]
        kept = {self.read, max(added, default=0), *last_marks, *self.pins.get(sequence, ())}
        self.now = {n: state for n, state in (now | added).items() if n in kept}
        self.states[sequence] = self.now

    def put(self, layer, key, value):  # Row i is the state after token i.
        for length, *state in zip(self.lengths, key, value):
            if length in self.now:
                self.now[length][layer] = state

    def get(self, layer):
        setup = self.setup
        zeros = [np.zeros((setup.kv_heads, n), "f4") for n in (setup.k_head_dim, setup.v_head_dim)]
        key, value = self.now.get(self.read, {}).get(layer, zeros)
        mask = np.full((len(self.lengths), 1), self.read > 0)
        return key[None], value[None], mask

    def can_resume(self, sequence, position):
        return position == 0 or position in self.states.get(sequence, {})

    def remove(self, sequence, begin, end):
        begin += BUG  # It keeps the state of one token too many.
        self.copy_prefix(sequence, sequence, begin)

    def copy_prefix(self, source, target, length):
        held = self.states.get(source, {})
        self.states[target] = {n: held[n] for n in held if n <= length}


class DraftingCache(StateCache):
    """Each draft has a state, and states can be pinned."""

    kvtwin = dataclasses.replace(
        StateCache.kvtwin,
        name="drafting cache",
        can={*StateCache.kvtwin.can, "draft_trees", "draft_states", "pin"},
    )

    def __init__(self, setup):
        super().__init__(setup)
        self.drafts = {}  # By sequence: the parent and the state of each draft.

    def start_forward(self, positions, sequences, parents=None):
        self.batch, self.first = self.drafts.setdefault(sequences[0], []), None
        if parents is None:
            return super().start_forward(positions, sequences)
        self.first, self.lengths = len(self.batch), positions
        self.batch += [(parent, {}) for parent in parents]
        self.add(sequences[0], {})  # As in every pass, old states are dropped.

    def put(self, layer, key, value):
        if self.first is None:
            return super().put(layer, key, value)
        for (_, state), *rows in zip(self.batch[self.first :], key, value):
            state[layer] = rows

    def get(self, layer):
        if self.first is None:
            return super().get(layer)
        key, value, _ = super().get(layer)
        shown = [(key[0], value[0])]  # The state that the first drafts read, then others.
        reads = []
        for parent, _ in self.batch[self.first :]:
            while parent >= self.first:  # A draft of this batch has no state yet.
                parent = self.batch[parent][0]
            reads.append(0 if parent < 0 else len(shown))
            shown += [self.batch[parent][1][layer]] if parent >= 0 else []
        mask = np.eye(len(shown), dtype=bool)[reads]
        mask[:, 0] &= self.read > 0
        return *(np.array(rows) for rows in zip(*shown)), mask

    def commit(self, sequence, path):
        if not self.setup.drafts:
            raise kvtwin.NotSupported("the setup has room for 0 drafts")
        drafts = [state for _, state in self.drafts.pop(sequence, [])]
        if not path:
            return
        accepted = [drafts[number] for number in path]
        if BUG:  # Keeps the state after all drafts.
            accepted[-1] = drafts[-1]
        end = max(self.states.get(sequence, {}), default=0)
        self.add(sequence, dict(enumerate(accepted, end + 1)))

    def checkpoint(self, sequence):
        if not self.setup.pins:
            raise kvtwin.NotSupported("the setup has room for 0 pins")
        lengths = {*self.pins.get(sequence, ()), *sorted(self.states.get(sequence, {}))[-1:]}
        self.pins[sequence] = sorted(lengths)[-self.setup.pins :]

    def remove(self, sequence, begin, end):
        self.copy_prefix(sequence, sequence, begin)

    def copy_prefix(self, source, target, length):
        super().copy_prefix(source, target, length)
        self.pins[target] = [n for n in self.pins.get(source, ()) if n <= length]
        self.drafts.pop(target, None)


class TokenCache:
    """The part of the hybrid for attention: a row for each token."""

    def __init__(self, setup):
        self.setup = setup
        self.tokens = {}  # By sequence: the rows of each token, by layer.

    def start_forward(self, positions, sequences):
        self.now = self.tokens.setdefault(sequences[0], [])
        if len(self.now) + len(positions) > self.setup.capacity:
            raise kvtwin.CacheFull(f"sequence {sequences[0]} has no more room")
        self.batch = [{} for _ in positions]
        self.shown = self.now = [*self.now, *self.batch]
        self.tokens[sequences[0]] = self.now

    def put(self, layer, key, value):
        for rows, *token in zip(self.batch, key, value):
            rows[layer] = token

    def get(self, layer):
        key, value = zip(*(rows[layer] for rows in self.shown))
        count, added = len(self.shown), len(self.batch)
        mask = np.tri(added, count, count - added, dtype=bool)
        return np.array(key), np.array(value), mask

    def can_resume(self, sequence, position):
        return position <= len(self.tokens.get(sequence, []))

    def copy_prefix(self, source, target, length):
        self.tokens[target] = self.tokens.get(source, [])[:length]


class HybridCache:
    kvtwin = kvtwin.Description(
        name="hybrid cache",
        kinds={"causal", "recurrent", "hybrid"},
        can={"remove_tail", "copy_prefix", "share"},
        max_sequences=0,
    )

    def __init__(self, setup):
        if setup.kind != "hybrid":
            raise kvtwin.NotSupported("only hybrids")
        kinds = {"causal": TokenCache, "recurrent": StateCache}
        self.parts = [kinds[part.kind](part) for part in setup.caches]

    def set_layer_type(self, type):
        self.active = self.parts[type]

    def start_forward(self, positions, sequences):
        # Attention first: it may be full, and then nothing has changed.
        for part in sorted(self.parts, key=lambda part: isinstance(part, StateCache)):
            part.start_forward(positions, sequences)
        self.active = self.parts[0]

    def put(self, layer, key, value):
        self.active.put(layer, key, value)

    def get(self, layer):
        return self.active.get(layer)

    def can_resume(self, sequence, position):
        return all(part.can_resume(sequence, position) for part in self.parts)

    def remove(self, sequence, begin, end):
        self.copy_prefix(sequence, sequence, begin)

    def copy_prefix(self, source, target, length):
        # With the bug, each part keeps as much as it can.
        while not BUG and not self.can_resume(source, length):
            length -= 1
        for part in self.parts:
            part.copy_prefix(source, target, length)


def test_state_cache(kvtwin_fuzz):
    kvtwin_fuzz(StateCache)


def test_drafting_cache(kvtwin_fuzz):
    kvtwin_fuzz(DraftingCache)


def test_hybrid_cache(kvtwin_fuzz):
    kvtwin_fuzz(HybridCache)
