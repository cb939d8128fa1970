"""A pool with groups of layers and a bug, and the test that finds it (docs/python.md):

    pytest docs/examples/python_groups.py
"""

import numpy as np

import kvtwin


class Group:
    """The blocks of some layers. Each layer attends to all tokens, to a window of them,
    or has a state in place of rows."""

    def __init__(self, setup):
        self.setup, self.size = setup, setup.block_size
        self.owners = [0] * setup.blocks
        self.rows = {}  # By block, layer and offset: K and V.
        self.known = {}  # By key and tokens up to its end: a block.
        self.tables = {}  # By sequence: its blocks; None for blocks that were given up.
        self.ends = {}  # By sequence and layer, while rows are appended: their end.

    def first_needed(self, length):
        """Returns the first block that the token after `length` tokens needs."""
        window = 1 if self.setup.states else self.setup.window or length
        return max(0, length - window) // self.size

    def find(self, key, tokens):
        ends = range(self.size, len(tokens) + 1, self.size)
        return [self.known.get((key, tuple(tokens[:end]))) for end in ends]

    def serves(self, key, tokens):
        first = self.first_needed(len(tokens))
        whole = len(tokens) % self.size == 0
        return whole and None not in self.find(key, tokens)[first:]

    def open(self, sequence, key, tokens):
        self.tables[sequence] = self.find(key, tokens)
        for block in self.tables[sequence]:
            if block is not None:
                self.owners[block] += 1

    def append(self, sequence, layer, start, rows):
        table, end = self.tables[sequence], start + len(rows)
        missing = max(0, -(-end // self.size) - len(table))
        free = [block for block, owners in enumerate(self.owners) if owners == 0]
        if missing > len(free):
            raise kvtwin.CacheFull
        for block in free[:missing]:
            self.owners[block] = 1
            table.append(block)
        for position, row in enumerate(rows, start):
            offset = 0 if self.setup.states else position % self.size
            self.rows[table[position // self.size], layer, offset] = row
        self.ends[sequence, layer] = end

    def commit(self, sequence, key, tokens):
        for i in range(len(tokens) // self.size):
            block = self.tables[sequence][i]
            if block is not None:
                self.known.setdefault((key, tuple(tokens[: (i + 1) * self.size])), block)
        self.keep(sequence, self.first_needed(len(tokens)), len(tokens))

    def keep(self, sequence, first, length):
        """Keeps the blocks from `first` on; gives up the others."""
        table, end = self.tables[sequence], -(-length // self.size)
        for i, block in enumerate(table):
            if block is None or first <= i < end:
                continue
            table[i] = None
            self.owners[block] -= 1
            if self.owners[block] == 0:  # Prompts find blocks in use only.
                self.known = {k: b for k, b in self.known.items() if b != block}
        del table[end:]
        self.ends = {k: end for k, end in self.ends.items() if k[0] != sequence}

    def views(self, sequence, layer, length):
        end, views = self.ends.get((sequence, layer), length), []
        for i, block in enumerate(self.tables[sequence]):
            start, stop = i * self.size, min((i + 1) * self.size, end)
            if block is None or start >= stop:
                continue
            offsets = range(stop - start)
            if self.setup.states:
                start, offsets = stop - 1, range(1)
            rows = [self.rows[block, layer, offset] for offset in offsets]
            key, value = (np.stack(part) for part in zip(*rows, strict=True))
            views.append((key, value, block, start))
        return views


class GroupsPool:
    """A new sequence begins with the longest prefix that every group can serve."""

    kvtwin = kvtwin.PoolDescription(
        name="groups pool", can={"groups", "states_in_place"}
    )

    def __init__(self, setup):
        if any((g.dtype, g.v_dtype) != ("f32", "f32") for g in setup.groups):
            raise kvtwin.NotSupported("f32 only")
        self.setup = setup
        self.groups = [Group(group) for group in setup.groups]
        self.sequences = {}  # By number: key and tokens.

    def open(self, prompt, salt, extra):
        key, length = (salt, extra), max(0, len(prompt) - 1)
        asked = self.groups[:1]  # The bug: self.groups
        while not all(group.serves(key, prompt[:length]) for group in asked):
            length -= 1
        sequence = min(set(range(len(self.sequences) + 1)) - set(self.sequences))
        self.sequences[sequence] = key, list(prompt[:length])
        for group in self.groups:
            group.open(sequence, key, prompt[:length])
        return sequence

    def seq_len(self, sequence):
        return len(self.sequences[sequence][1])

    def append(self, sequence, layer, key, value):
        length = self.seq_len(sequence)
        if length + len(key) > self.setup.max_seq_len:
            raise kvtwin.CacheFull
        group = self.groups[self.setup.group_of(layer)]
        group.append(sequence, layer, length, list(zip(key, value, strict=True)))

    def commit(self, sequence, tokens):
        key, known = self.sequences[sequence]
        known += tokens
        for group in self.groups:
            group.commit(sequence, key, known)

    def free(self, sequence):
        del self.sequences[sequence]
        for group in self.groups:
            group.keep(sequence, 0, 0)
            del group.tables[sequence]

    def views(self, sequence, layer):
        group = self.groups[self.setup.group_of(layer)]
        return group.views(sequence, layer, self.seq_len(sequence))

    def table(self, sequences, group):
        """Returns the blocks of the committed tokens; -1 for blocks that were given up."""
        tables = self.groups[group].tables
        size = self.setup.groups[group].block_size
        return [
            [-1 if block is None else block for block in tables[s][: -(-self.seq_len(s) // size)]]
            for s in sequences
        ]


def test_groups_pool(kvtwin_fuzz):
    kvtwin_fuzz(GroupsPool)
