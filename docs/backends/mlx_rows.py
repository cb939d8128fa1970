"""A model whose rows are hashes, for engines on mlx. Its layers use the caches of
mlx-lm or mlx-vlm as their models do, and it checks each row that a query sees."""

import functools

import mlx.core as mx
import numpy as np
from hashes import mix

LETTERS = 32  # The size of the vocabulary. Token 0 is padding,
END = 2  # and this token ends answers.
DIMS = 64  # A row: 0, 1, 20 bits of a position, 40 bits of a value, 0, 0.
VALUE = (1 << 40) - 1


def scramble(x):
    """Returns a hash of each number of an array, of 40 bits."""
    x = np.asarray(x).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) & np.uint64(VALUE)


def rows_of(positions, values):
    """Returns rows of bits. Quantization leaves them as they are."""
    numbers = (values.astype(np.uint64) << np.uint64(22)) | (
        positions.astype(np.uint64) << np.uint64(2)) | np.uint64(2)
    shifts = np.arange(DIMS, dtype=np.uint64)
    bits = (numbers[..., None] >> shifts) & np.uint64(1)
    return mx.array(bits.astype(np.float32))


def read(rows):
    """Returns the positions and values of rows."""
    bits = (np.array(rows) > 0.5).astype(np.uint64)
    numbers = (bits << np.arange(DIMS, dtype=np.uint64)).sum(-1)
    positions = (numbers >> np.uint64(2)) & np.uint64((1 << 20) - 1)
    return positions.astype(np.int64), numbers >> np.uint64(22)


def answer(sums, positions):
    """Returns what a layer of attention passes on."""
    return scramble(sums + scramble(positions))


@functools.lru_cache(1 << 14)
def expected(kinds, window, tokens, keep=0):
    """Returns the values of the rows of each layer, and what the last passes
    on. A window has its first `keep` tokens for ever."""
    x, layers = np.array(tokens, np.uint64), []
    positions = np.arange(len(tokens))
    for kind in kinds:
        layers.append(x)
        if kind == "state":
            x = np.array(fold(0, x), np.uint64)
            continue
        sums = scramble(x).cumsum(dtype=np.uint64)
        if kind == "window":
            kept = sums[:keep][-1:].sum(dtype=np.uint64)
            sums[window:] -= sums[keep:keep - window].copy() - kept
        if kind == "list":
            sums *= np.uint64(2)
        x = answer(sums, positions)
    return layers, x


def kept(setup):
    """Returns the first tokens that a window keeps."""
    return getattr(setup, "keep", 0)


def fold(state, values):
    """Returns the state after each value."""
    states = []
    for value in values:
        state = mix(int(state), int(value)) & VALUE
        states.append(state)
    return states


def best(value):
    """Returns the token after an output."""
    return 2 + mix(int(value)) % (LETTERS - 2)


class Truth:
    """A prompt and its answer, which depends on the prompt alone."""

    def __init__(self, setup, prompt, name, limit):
        self.setup, self.prompt, self.tokens = setup, prompt, list(prompt)
        self.name, self.limit = name, limit

    def reach(self, length):
        while len(self.tokens) < length:
            _, outputs = expected(self.setup.kinds, self.setup.seen,
                                  tuple(self.tokens), kept(self.setup))
            self.tokens.append(best(outputs[-1]))
        return self.tokens

    def right(self):
        """Returns the answer to the prompt, of at most `limit` tokens."""
        begin = len(self.prompt)
        tokens = self.reach(begin + self.limit)[begin:begin + self.limit]
        return tokens[:tokens.index(END) + 1] if END in tokens else tokens


def caches_of(setup, module):
    """Returns the caches of the layers: classes of a module of mlx-lm or
    mlx-vlm."""
    made = {"full": module.KVCache, "state": lambda: module.ArraysCache(1),
            "window": lambda: module.RotatingKVCache(setup.window),
            "list": lambda: module.CacheList(module.KVCache(),
                                             module.KVCache())}
    return [made[kind]() for kind in setup.layers]


class Rows:
    """The layers of a model. A subclass makes the caches and the masks, as its
    engine does: `make_cache`, `attention_mask`, `state_mask`."""

    def __init__(self, setup):
        self.setup, self.wrong = setup, []

    def logits(self, tokens, cache, values=None):
        """Returns logits, of which the largest is that of the next token. The rows
        of the first layer are the values, or else the tokens."""
        self.texts, self.tokens = {}, tokens
        self.positions = self.starts(cache, len(tokens))
        x = (tokens if values is None else values).astype(np.uint64)
        for number, (kind, layer) in enumerate(zip(self.setup.kinds, cache)):
            if kind == "state":
                x = self.fold(number, layer, x)
            elif kind == "list":
                sums = sum(self.attend(number, kind, part, x)
                           for part in layer.caches)
                x = answer(sums, self.positions)
            else:
                x = answer(self.attend(number, kind, layer, x), self.positions)
        logits = np.zeros((*tokens.shape, LETTERS), np.float32)
        for place in np.ndindex(*tokens.shape):
            logits[(*place, best(x[place]))] = 1
        return mx.array(logits)

    def starts(self, cache, count):
        """Returns the position of each token: a model turns rows by it."""
        for layer in cache:
            layer = getattr(layer, "caches", [layer])[0]
            if hasattr(layer, "offset"):
                start = np.array(layer.offset).astype(np.int64).reshape(-1, 1)
                return np.broadcast_to(
                    start + np.arange(self.tokens.shape[1]), self.tokens.shape)
        return np.zeros(self.tokens.shape, np.int64)

    def attend(self, number, kind, cache, x):
        """Returns the sum of the rows that each query sees."""
        window = ({"window_size": self.setup.seen}
                  if kind == "window" and not kept(self.setup) else {})
        mask = self.attention_mask(
            mx.zeros(x.shape), cache, return_array=True, **window)
        new = rows_of(np.maximum(self.positions, 0), x)[:, None]
        wide = mx.tile(1 - new, (1, 1, 1, getattr(self.setup, "wide", 1)))
        keys, values = self.plain(cache, *cache.update_and_fetch(new, wide))
        positions, stored = read(keys[:, 0])
        other, _ = read(1 - values[:, 0, :, :DIMS])
        if mask is None:
            mask = mx.ones((1, 1, *x.shape[1:], stored.shape[1]), mx.bool_)
        mask = np.broadcast_to(np.array(mask), (len(x), 1, x.shape[1],
                                                stored.shape[1]))[:, 0]
        for row, i in np.argwhere(self.tokens):
            seen = mask[row, i]
            self.check(number, kind, (row, i), positions[row][seen],
                       stored[row][seen], other[row][seen])
        return np.where(mask, scramble(stored)[:, None], np.uint64(0)).sum(
            -1, dtype=np.uint64)

    @staticmethod
    def plain(cache, keys, values):
        """Returns the rows that a cache gives a query, as arrays."""
        return keys, values

    def needed(self, kind, end):
        """Returns the positions that the query before `end` must see."""
        if kind != "window" or end <= self.setup.seen:
            return list(range(end))
        keep = kept(self.setup)
        return [*range(keep), *range(end - self.setup.seen + keep, end)]

    def check(self, number, kind, place, positions, values, other):
        """Checks which positions a query sees, and their rows."""
        end = int(self.positions[place]) + 1
        needs = self.needed(kind, end)
        order = np.argsort(positions, kind="stable")
        name = f"position {end - 1} of layer {number}"
        if list(positions[order]) != needs:
            self.wrong.append(
                f"{name} sees positions {shown(positions[order])}")
        elif list(other) != list(positions):
            self.wrong.append(f"{name} sees V of other positions than K")
        elif number == 0 and kind in ("full", "list"):
            self.texts[place] = tuple(values[order].tolist())
        elif place in self.texts:
            rows = expected(self.setup.kinds, self.setup.seen,
                            self.texts[place], kept(self.setup))[0][number]
            differs = np.flatnonzero(values[order] != rows[needs])
            if len(differs):
                self.wrong.append(f"{name} sees the row of another text at "
                                  f"position {needs[differs[0]]}")

    def fold(self, number, cache, x):
        """Updates the states of a layer, and returns them after each token."""
        mask = self.state_mask(mx.zeros(x.shape), cache)
        mask = np.ones(x.shape, bool) if mask is None else np.array(mask)
        states = cache[0]
        if states is None:
            states = mx.zeros((len(x), DIMS))
        counts, states = read(states)
        out = np.zeros(x.shape, np.uint64)
        for row in range(len(x)):
            first = np.argmax(mask[row])
            place = (row, first)
            if "full" in self.setup.kinds and mask[row].any() and (
                    counts[row] != self.positions[place]):
                self.wrong.append(
                    f"a state after {counts[row]} tokens is used at "
                    f"position {self.positions[place]}")
            after = fold(states[row], x[row][mask[row]])
            out[row][mask[row]] = after
            if after:
                states[row], counts[row] = after[-1], counts[row] + len(after)
        cache[0] = rows_of(counts, states)
        cache.advance(x.shape[1])
        return out


def shown(numbers):
    """Returns numbers in order as ranges."""
    parts = []
    for number in map(int, numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
