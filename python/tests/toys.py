"""Caches in Python: a correct one, and faulty ones; and a correct pool."""

import dataclasses

import numpy as np

import kvtwin


class Token:
    def __init__(self, position, sequence):
        self.position = position
        self.sequences = {sequence}
        self.rows = {}  # By layer.


class Right:
    """A list of tokens, which sequences share."""

    kvtwin = kvtwin.Description(
        name="right",
        profile="ollama-0.12",
        kinds={"causal", "swa", "chunked"},
        can={
            "remove_tail",
            "remove_middle",
            "copy_prefix",
            "share",
            "mix",
            "any_order",
            "any_sequence",
            "reserve",
        },
        shifts={"none", "identity", "add", "tag_add"},
        max_sequences=0,
        max_padding=4,
    )

    def __init__(self, setup):
        self.setup = setup
        self.tokens = []

    def start_forward(self, positions, sequences, reserve=False):
        self.asked = list(zip(positions, sequences))
        self.batch = []
        if reserve:
            return
        self.evict()
        room = self.setup.max_sequences * self.setup.capacity - len(self.tokens)
        if len(positions) > room and self.setup.kind != "swa":
            raise kvtwin.CacheFull(f"room for {room}")
        self.batch = [Token(*pair) for pair in self.asked]
        self.tokens += self.batch

    def evict(self):
        """Evicts the tokens of all sequences that have left the window."""
        setup = self.setup
        if setup.kind != "swa" or setup.window is None:
            return
        memory = setup.window + (setup.max_sequences > 1)
        if memory >= setup.capacity:
            return
        for sequence in {s for token in self.tokens for s in token.sequences}:
            held = self.of(sequence)
            asked = [p for p, s in self.asked if s == sequence]
            low = min(asked, default=1 + max(token.position for token in held))
            self.leave(sequence, [t for t in held if t.position < low - memory])

    def put(self, layer, key, value):
        for token, k, v in zip(self.batch, key, value):
            token.rows[layer] = (k, v)

    def sees(self, position, sequence, token):
        setup = self.setup
        if sequence not in token.sequences or token.position > position:
            return False
        if setup.kind == "swa" and setup.window is not None:
            return token.position >= position - setup.window
        if setup.kind == "chunked":
            return token.position >= position - position % setup.chunk
        return True

    def get(self, layer):
        setup = self.setup
        count, heads = len(self.tokens), setup.kv_heads
        key = np.zeros((count, heads, setup.k_head_dim), np.float32)
        value = np.zeros((count, heads, setup.v_head_dim), np.float32)
        for i, token in enumerate(self.tokens):
            if layer in token.rows:
                key[i], value[i] = token.rows[layer]
        padding = setup.mask_batch_padding
        rows = -(-len(self.asked) // padding) * padding
        mask = np.zeros((rows, count), bool)
        for i, (position, sequence) in enumerate(self.asked):
            for j, token in enumerate(self.tokens):
                mask[i, j] = self.sees(position, sequence, token)
        return key, value, mask

    def of(self, sequence):
        return [token for token in self.tokens if sequence in token.sequences]

    def leave(self, sequence, tokens):
        for token in tokens:
            token.sequences.discard(sequence)
        self.tokens = [token for token in self.tokens if token.sequences]

    def copied(self, source, length):
        return [token for token in self.of(source) if token.position < length]

    def copy_prefix(self, source, target, length):
        kept = self.copied(source, length)
        for token in self.of(target):
            token.sequences.discard(target)
        for token in kept:
            token.sequences.add(target)
        self.leave(target, [])

    def remove(self, sequence, begin, end):
        held = self.of(sequence)
        opened = end == kvtwin.OPEN_END
        gone = [t for t in held if t.position >= begin and (opened or t.position < end)]
        later = [t for t in held if t.position >= end and not opened]
        if any(len(token.sequences) > 1 for token in later):
            raise kvtwin.SharedCells(f"sequence {sequence}")
        if not opened and self.setup.shift == "none" and len(gone) < len(held):
            raise kvtwin.NotSupported("no shift function")
        self.leave(sequence, gone)
        for token in later:
            token.position += begin - end
            for key, _ in token.rows.values():
                if self.setup.shift == "add":
                    key += begin - end
                if self.setup.shift == "tag_add":
                    key[:, 1:] += begin - end


class Legal(Right):
    kvtwin = dataclasses.replace(Right.kvtwin, can={"remove_tail"})


class SeesTooFew(Right):
    def sees(self, position, sequence, token):
        found = super().sees(position, sequence, token)
        if self.setup.kind == "swa" and self.setup.window is not None:
            return found and token.position > position - self.setup.window
        return found


class ShortRing(Right):
    """Has room for the window and six tokens more: a long batch loses tokens."""

    def start_forward(self, positions, sequences, reserve=False):
        super().start_forward(positions, sequences, reserve)
        if self.setup.kind != "swa" or self.setup.window is None:
            return
        for sequence in set(sequences):
            held = sorted(self.of(sequence), key=lambda token: token.position)
            self.leave(sequence, held[: -(self.setup.window + 6)])


class CopiesOneTooFew(Right):
    def copied(self, source, length):
        return super().copied(source, length - 1)


class Raises(Right):
    def remove(self, sequence, begin, end):
        super().remove(sequence, begin, end)
        if end != kvtwin.OPEN_END:
            {}["no such key"]


class CannotBeMade(Right):
    def __init__(self, setup):
        1 / 0  # noqa: B018


class FitsNothing(Right):
    def __init__(self, setup):
        raise kvtwin.NotSupported("not today")


class Interrupts(Right):
    def put(self, layer, key, value):
        raise KeyboardInterrupt


class WrongShape(Right):
    def get(self, layer):
        key, value, mask = super().get(layer)
        return key, value, mask.T if len(mask) != len(key) else mask[:, :-1]


class NotATriple(Right):
    def get(self, layer):
        return None


class Ours(kvtwin.Cache):
    """The library's cache, which is correct to the last byte."""

    kvtwin = kvtwin.Description(
        name="ours",
        level="identity",
        kinds={"causal", "swa", "swa_mem", "chunked", "encoder", "wrapper"},
        can={
            "remove_tail",
            "remove_middle",
            "copy_prefix",
            "share",
            "mix",
            "any_order",
            "any_sequence",
            "reserve",
            "refuse_misuse",
            "mix_dtypes",
        },
        dtypes={"f32", "f16", "bf16", "f8_e4m3", "q8_0", "q4_0"},
        v_layouts={"plain", "permuted", "tiled"},
        shifts={"none", "identity", "add", "tag_add", "rope"},
        max_sequences=0,
        max_padding=0,
    )


class Attends(Right):
    """Shows no rows: it answers with the outputs of attention."""

    kvtwin = dataclasses.replace(
        Right.kvtwin,
        name="attends",
        level="attention",
        can=Right.kvtwin.can | {"soft_cap", "sinks"},
    )
    get = None

    def attend(self, layer, query):
        key, value, mask = Right.get(self, layer)
        rows, heads, head_dim = query.shape
        group = heads // self.setup.kv_heads
        key, value = (np.repeat(x, group, axis=1).astype(float) for x in (key, value))
        scores = np.einsum("rhd,chd->rhc", query, key) / np.sqrt(head_dim)
        if cap := self.soft_cap():
            scores = cap * np.tanh(scores / cap)
        mask = self.mask(mask[:rows])
        weights = np.where(mask[:, None, :], np.exp(scores), 0)
        sums = weights.sum(axis=2, keepdims=True)
        if sinks := self.sinks():
            sums = sums + np.exp(sinks)[:, None]
        weights = weights / np.where(sums == 0, 1, sums)
        return np.einsum("rhc,chd->rhd", weights, value)

    def mask(self, mask):
        return mask

    def soft_cap(self):
        return self.setup.soft_cap

    def sinks(self):
        return self.setup.sinks


class AttendsToTooFew(Attends):
    """The last of several tokens does not see the first."""

    def mask(self, mask):
        mask = mask.copy()
        if mask.shape[1] > 2:
            mask[-1, 0] = False
        return mask


class OfKvtwin:
    """A class around kvtwin's own pool with groups."""

    kvtwin = kvtwin.PoolDescription(name="own", can={"groups", "media"})

    def __init__(self, setup):
        assert setup.groups
        pool = kvtwin.Pool(setup)
        self.pool = pool
        for name in ("seq_len", "append", "commit", "commit_unknown", "views", "usage"):
            setattr(self, name, getattr(pool, name))

    # The harness looks for methods of the class.
    def seq_len(self): ...
    def append(self): ...
    def commit(self): ...
    def commit_unknown(self): ...
    def views(self): ...
    def usage(self): ...

    def open(self, prompt, salt, extra, media):
        found = self.pool.find(prompt, salt, extra, media)
        sequence = self.pool.open(prompt, salt, extra, media)
        assert self.pool.seq_len(sequence) == found
        return sequence

    def add_media(self, sequence, position, hash):
        self.pool.add_media(sequence, position, hash)

    def fork(self, sequence, length):
        kept = self.pool.resume_before(sequence, length)
        made = self.pool.fork(sequence, length)
        assert self.pool.seq_len(made) == kept
        return made

    def truncate(self, sequence, length):
        self.pool.truncate(sequence, length)

    def free(self, sequence):
        self.pool.free(sequence)

    def table(self, sequences, group):
        assert self.pool.usage(group)
        return self.pool.table(sequences, group)

    def slots(self, sequence, begin, end, group):
        return self.pool.slots(sequence, begin, end, group)
