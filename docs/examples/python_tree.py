"""A KV cache in Python for speculative decoding with trees of drafts, with a bug, and
the test that finds it (docs/speculation.md):

    pytest docs/examples/python_tree.py
"""

import numpy as np

import kvtwin

BUG = True  # False: it keeps the drafts of the path, and not just as many.


class Token:
    def __init__(self, parent=None):
        self.parent = parent  # The draft before it. None: the committed tokens.
        self.rows = {}  # K and V, by layer.


class TreeCache:
    kvtwin = kvtwin.Description(name="tree cache", can={"draft_trees", "remove_tail"})

    def __init__(self, setup):
        self.capacity = setup.capacity
        self.committed, self.drafts = [], []

    def start_forward(self, positions, sequences, parents=None):
        if len(self.committed + self.drafts + positions) > self.capacity:
            raise kvtwin.CacheFull(f"{len(positions)} tokens do not fit")
        self.batch = []
        for parent in parents or positions:
            after = self.drafts[parent] if parents and parent >= 0 else None
            self.batch.append(Token(after))
            (self.drafts if parents else self.committed).append(self.batch[-1])
        self.shown = self.committed + self.drafts

    def put(self, layer, key, value):
        for token, *rows in zip(self.batch, key, value):
            token.rows[layer] = rows

    def seen_by(self, token):
        if token in self.committed:
            return self.committed[: self.committed.index(token) + 1]
        before = self.committed if token.parent is None else self.seen_by(token.parent)
        return [*before, token]

    def get(self, layer):
        key, value = zip(*(token.rows[layer] for token in self.shown))
        seen = [self.seen_by(row) for row in self.batch]
        mask = [[token in row for token in self.shown] for row in seen]
        return np.array(key), np.array(value), np.array(mask)

    def commit(self, sequence, path):
        kept = range(len(path)) if BUG else path
        self.committed += [self.drafts[number] for number in kept]
        self.drafts = []

    def remove(self, sequence, begin, end):
        del self.committed[begin:]
        self.drafts = []


def test_tree_cache(kvtwin_fuzz):
    kvtwin_fuzz(TreeCache)
