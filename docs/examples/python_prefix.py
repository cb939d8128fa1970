"""A KV cache in Python that finds the prefix of a prompt among the tokens that it computed
before, with a bug, and the test that finds it (docs/semantics.md, F1 to F5):

    pytest docs/examples/python_prefix.py
"""

import numpy as np

import kvtwin

BUG = True  # False: tokens are found only while all layers have their rows.


class FindingCache:
    kvtwin = kvtwin.Description(
        name="finding cache",
        kinds={"causal", "swa"},
        can={"remove_tail", "find_prefix"},
        max_sequences=0,
    )

    def __init__(self, setup):
        self.setup = setup
        self.window = setup.capacity if setup.window is None else setup.window
        # By sequence: its tokens by position, and its prompt. A token has rows by layer.
        self.tokens, self.prompts = {}, {}
        self.known = {}  # By prefix: the last token of it.

    def find_prefix(self, sequence, tokens):
        self.prompts[sequence] = tokens
        for length in range(len(tokens) - 1, 0, -1):
            begin = max(0, length - max(self.window, 1))
            needed = {p: self.known.get(tuple(tokens[: p + 1])) for p in range(begin, length)}
            if all(needed.values()):
                self.tokens[sequence] = needed
                return length
        return 0

    def start_forward(self, positions, sequences):
        if positions[-1] >= self.setup.capacity:
            raise kvtwin.CacheFull(f"sequence {sequences[0]} has no more room")
        now, prompt = self.tokens.get(sequences[0], {}), self.prompts.get(sequences[0], [])
        for p in [p for p in now if p < positions[0] - self.window]:
            self.known.pop(tuple(prompt[: p + 1]), None)  # Its memory is reused.
            del now[p]
        self.batch = {p: {} for p in positions}
        self.shown = self.tokens[sequences[0]] = now | self.batch
        self.computed = {
            tuple(prompt[: p + 1]): self.batch[p] for p in positions if p < len(prompt)
        }
        self.put_layers = 0

    def put(self, layer, key, value):
        for token, *rows in zip(self.batch.values(), key, value):
            token[layer] = rows
        self.put_layers += 1
        # With the bug, the first layer is enough.
        if self.put_layers == (1 if BUG else self.setup.layers):
            self.known.update(self.computed)

    def get(self, layer):
        key, value = zip(*(token[layer] for token in self.shown.values()))
        mask = [[q - self.window <= p <= q for p in self.shown] for q in self.batch]
        return np.array(key), np.array(value), np.array(mask)

    def can_resume(self, sequence, position):
        return position == max(self.tokens.get(sequence, {}), default=-1) + 1 > 0

    def remove(self, sequence, begin, end):
        now = self.tokens.get(sequence, {})
        self.tokens[sequence] = {p: now[p] for p in now if p < begin}
        if begin == 0:
            self.prompts.pop(sequence, None)


def test_finding_cache(kvtwin_fuzz):
    kvtwin_fuzz(FindingCache)
