"""A pool of blocks with a bug, and the test that finds it (docs/python.md):

    pytest docs/examples/python_pool.py
"""

import numpy as np

import kvtwin


class BlockPool:
    """Blocks that sequences share by reference. Before a sequence writes to a shared
    block, it copies the block."""

    kvtwin = kvtwin.PoolDescription(name="block pool")

    def __init__(self, setup):
        if (setup.dtype, setup.v_dtype) != ("f32", "f32"):
            raise kvtwin.NotSupported("f32 only")
        self.setup = setup
        shape = setup.blocks, setup.layers, setup.block_size, setup.kv_heads
        self.keys = np.zeros((*shape, setup.k_head_dim), np.float32)
        self.values = np.zeros((*shape, setup.v_head_dim), np.float32)
        self.owners = [0] * setup.blocks
        self.tables = {}  # By sequence: its blocks, tokens, rows by layer.

    def open(self, prompt, salt, extra):
        """Opens a new sequence. This pool never reuses blocks for a prompt."""
        return self._add([], 0)

    def _add(self, blocks, length):
        sequence = min(set(range(len(self.tables) + 1)) - set(self.tables))
        for block in blocks:
            self.owners[block] += 1
        self.tables[sequence] = (list(blocks), length, [length] * self.setup.layers)
        return sequence

    def seq_len(self, sequence):
        return self.tables[sequence][1]

    def append(self, sequence, layer, key, value):
        """Stores rows after the committed rows, in place of earlier appended rows."""
        blocks, length, rows = self.tables[sequence]
        end = length + len(key)
        size = self.setup.block_size
        needed = max(0, -(-end // size) - len(blocks))
        free = [block for block, owners in enumerate(self.owners) if owners == 0]
        first = length // size  # The first block that is written to.
        shared = False  # The bug: first < len(blocks) and self.owners[blocks[first]] > 1
        if end > self.setup.max_seq_len or needed + shared > len(free):
            raise kvtwin.CacheFull
        if shared:
            old, blocks[first] = blocks[first], free.pop(0)
            self.owners[old] -= 1
            self.owners[blocks[first]] = 1
            self.keys[blocks[first]] = self.keys[old]
            self.values[blocks[first]] = self.values[old]
        for _ in range(needed):
            self.owners[free[0]] = 1
            blocks.append(free.pop(0))
        for i in range(len(key)):
            block, slot = blocks[(length + i) // size], (length + i) % size
            self.keys[block, layer, slot] = key[i]
            self.values[block, layer, slot] = value[i]
        rows[layer] = end

    def commit(self, sequence, tokens):
        blocks, length, _ = self.tables[sequence]
        self._keep(sequence, blocks, length + len(tokens))

    def truncate(self, sequence, length):
        self._keep(sequence, self.tables[sequence][0], length)

    def _keep(self, sequence, blocks, length):
        kept = -(-length // self.setup.block_size)
        for block in blocks[kept:]:
            self.owners[block] -= 1
        layers = [length] * self.setup.layers
        self.tables[sequence] = (blocks[:kept], length, layers)

    def fork(self, sequence, length):
        kept = -(-length // self.setup.block_size)
        return self._add(self.tables[sequence][0][:kept], length)

    def free(self, sequence):
        self._keep(sequence, self.tables[sequence][0], 0)
        del self.tables[sequence]

    def views(self, sequence, layer):
        """Returns (key, value, block) of each block, in order."""
        blocks, _, rows = self.tables[sequence]
        size = self.setup.block_size
        views = []
        for i in range(-(-rows[layer] // size)):
            length = min(size, rows[layer] - i * size)
            key = self.keys[blocks[i], layer, :length]
            views.append((key, self.values[blocks[i], layer, :length], blocks[i]))
        return views


def test_block_pool(kvtwin_fuzz):
    kvtwin_fuzz(BlockPool)
