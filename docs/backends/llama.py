"""Holds llama.cpp's KV cache to our own forward pass, by logits.

Random histories of decodes, removals, copies and shifts go to llama.cpp and
to a list of tokens that follows the comments of llama.h; after each decode
the logits of all its tokens must agree. See llama.md beside this file.
"""

import argparse
import collections
import copy
import dataclasses
import random
import sys
import tempfile

import llama_cpp
import numpy as np

import llama_model
from llama_model import ARCHS

lib = llama_cpp.llama_cpp

SEQUENCES = 3
BATCH = 64
DTYPES = {"f32": 0, "f16": 1, "q8_0": 8}  # ggml_type.
# The largest difference of logits, whose standard deviation is about 1. Seen
# are 2e-5, 0.02 and 0.15; a single wrong token among a hundred makes 0.01.
TOLERANCES = {"f32": 2e-4, "f16": 0.05, "q8_0": 0.4}

# What llama.cpp does today, and llama.h does not say: see llama.md. Without
# one of these, our side follows llama.h there.
QUIRKS = {
    "div": "seq_div turns K the wrong way",
    "nope": "a shift turns K of layers without RoPE",
    "swa-base": "a shift of granite_swa's windowed layers takes base 10000",
    "keep": "seq_keep keeps the sequences of other streams",
    "save": "saved sequences lack shifts and copies that are pending",
    "forgotten": "a sequence is called empty while tokens of it are seen",
}
# What nobody does. Each must be found.
BREAKS = {
    "copy-replaces": "seq_cp takes the target's own tokens away",
    "no-turn": "seq_add leaves K as it is",
    "window-plus-one": "a window does not count the query",
    "remove-shifts": "seq_rm closes the gap",
    "add-own": "seq_add moves a shared token for one sequence only",
}


@dataclasses.dataclass(frozen=True)
class Config:
    arch: str
    unified: bool = True
    dtype: str = "f32"
    flash: bool = False
    cells: int = 256  # Of a stream; llama.cpp rounds up to 256.
    ubatch: int = BATCH

    def __str__(self):
        return (
            f"{self.arch}, {'one stream' if self.unified else 'streams'}, "
            f"{self.dtype}{', flash attention' if self.flash else ''}, "
            f"{self.cells} cells, n_ubatch {self.ubatch}"
        )


CONFIGS = [
    Config("llama"),
    Config("llama", unified=False),
    Config("llama", flash=True, cells=512, ubatch=24),
    Config("llama", unified=False, flash=True, ubatch=24),
    Config("smollm3"),
    Config("smollm3", unified=False),
    Config("granite_swa"),
    Config("granite_swa", unified=False),
    Config("granite_swa", cells=512, ubatch=24),
    Config("granite_swa", unified=False, cells=512, flash=True),
    Config("llama", dtype="f16"),
    Config("granite_swa", dtype="f16", flash=True),
    Config("llama", dtype="q8_0", flash=True),
]

Difference = collections.namedtuple("Difference", "kind text")


@dataclasses.dataclass
class Token:
    """One decoded token. K is as rotated and rounded when it was decoded."""

    position: int
    sequences: set
    past: int  # Tells apart tokens that have seen different things.
    keys: list  # Of each layer: [KV_HEADS, head_dim].
    values: list
    turned: int = 0  # K has been rotated by this since,
    pending: int = 0  # and the next decode rotates it by this.


class History:
    """Our side: what was decoded, as a list of tokens for each stream."""

    def __init__(self, model, config, rules):
        self.model, self.config, self.rules = model, config, rules
        self.streams = [[] for _ in range(1 if config.unified else SEQUENCES)]
        self.copied = set()  # Streams whose rows are copied at a decode.
        self.window = max(model.arch.windows)

    def stream(self, sequence):
        return self.streams[0 if self.config.unified else sequence]

    def tokens(self, sequence):
        return [t for t in self.stream(sequence) if sequence in t.sequences]

    def end(self, sequence):
        return max((t.position for t in self.tokens(sequence)), default=-1)

    def room(self, sequence):
        return self.config.cells - len(self.stream(sequence))

    def decode(self, batch):
        """The logits of a batch of (id, position, sequences)."""
        for token in sum(self.streams, []):
            token.turned += token.pending
            token.pending = 0
        self.copied.clear()
        ids, positions, sequences = zip(*batch)
        firsts = [s[0] for s in sequences]
        x = self.model.embed(np.array(ids))
        pasts = {s: hash(tuple(t.past for t in self.tokens(s)))
                 for s in set(firsts)}
        new = []
        for i, (ident, position, owners) in enumerate(batch):
            past = hash((pasts[owners[0]], position, ident))
            pasts[owners[0]] = past
            new.append(Token(position, set(owners), past, [], []))
        for stream in {id(self.stream(s)): self.stream(s)
                       for s in firsts}.values():
            stream += [t for t, s in zip(new, firsts)
                       if self.stream(s) is stream]
        for layer, (window, rope) in enumerate(
            zip(self.model.arch.windows, self.model.arch.rope)
        ):
            q, k, v = self.model.qkv(layer, x)
            if rope:
                q = llama_model.rotate(q, positions)
                k = llama_model.rotate(k, positions)
            k = llama_model.rounded(k, self.config.dtype)
            v = llama_model.rounded(v, self.config.dtype)
            for i, token in enumerate(new):
                token.keys.append(k[i])
                token.values.append(v[i])
            x = self._attend(layer, window, rope, x, q, firsts, positions)
        return self.model.logits(x)

    def _attend(self, layer, window, rope, x, q, firsts, positions):
        streams = {id(self.stream(s)): self.stream(s) for s in firsts}
        seen = sum(streams.values(), [])
        of = np.concatenate([np.full(len(t), i) for i, t in streams.items()])
        keys = np.stack([t.keys[layer] for t in seen])
        values = np.stack([t.values[layer] for t in seen])
        turned = np.array([t.turned for t in seen])
        if "no-turn" not in self.rules and turned.any():
            base = llama_model.ROPE_BASE
            if window and "swa-base" in self.rules:
                base = 10000.0
            if rope or "nope" in self.rules:
                keys = llama_model.rotate(keys, turned, base)
        at = np.array([t.position for t in seen])
        visible = np.empty((len(firsts), len(seen)), bool)
        for i, (sequence, position) in enumerate(zip(firsts, positions)):
            mine = np.array([sequence in t.sequences for t in seen])
            mine &= (of == id(self.stream(sequence))) & (at <= position)
            if window:
                window_here = window + ("window-plus-one" in self.rules)
                mine &= position - at < window_here
            visible[i] = mine
        return self.model.after_attention(layer, x, q, keys, values, visible)

    def remove(self, sequence, begin, end):
        """Of one sequence or, -1, of all."""
        for stream in self.streams:
            for token in stream:
                if begin <= token.position < end:
                    token.sequences -= (
                        token.sequences if sequence < 0 else {sequence}
                    )
        self._drop()
        if "remove-shifts" in self.rules and sequence >= 0 and end < 1 << 30:
            self.add(sequence, end, 1 << 31, begin - end)

    def copy(self, source, target, begin, end):
        if source == target:
            return
        if "copy-replaces" in self.rules:
            self.remove(target, 0, 1 << 31)
        if self.config.unified:
            for token in self.tokens(source):
                if begin <= token.position < end:
                    token.sequences.add(target)
            return
        self._replace(target, self.tokens(source))
        self.copied.add(target)

    def _replace(self, target, tokens):
        tokens = [dataclasses.replace(t, sequences={target}) for t in tokens]
        self.remove(target, 0, 1 << 31)
        self.stream(target).extend(tokens)

    def keep(self, sequence):
        for stream in self.streams:
            if "keep" in self.rules and stream is not self.stream(sequence):
                continue
            for token in stream:
                token.sequences &= {sequence}
        self._drop()

    def add(self, sequence, begin, end, delta):
        for token in self.tokens(sequence):
            if not begin <= token.position < end:
                continue
            if "add-own" in self.rules and len(token.sequences) > 1:
                token.sequences.remove(sequence)
                token = copy.copy(token)
                token.sequences = {sequence}
                self.stream(sequence).append(token)
            token.position += delta
            token.pending += delta
            if token.position < 0:
                token.sequences.clear()
        self._drop()

    def divide(self, sequence, begin, end, by):
        for token in self.tokens(sequence):
            if begin <= token.position < end:
                delta = token.position // by - token.position
                token.position += delta
                token.pending += -delta if "div" in self.rules else delta

    def load(self, source, target):
        """What saving one sequence and loading it as another one does."""
        tokens = self.tokens(source)
        if "save" in self.rules:
            tokens = [dataclasses.replace(t, pending=0) for t in tokens]
        self._replace(target, tokens)

    def clear(self):
        for stream in self.streams:
            stream.clear()

    def _drop(self):
        for stream in self.streams:
            stream[:] = [t for t in stream if t.sequences]


class Theirs:
    """A context of llama.cpp."""

    def __init__(self, model, config):
        params = lib.llama_context_default_params()
        streams = 1 if config.unified else SEQUENCES
        params.n_ctx = config.cells * streams
        params.n_batch = BATCH
        params.n_ubatch = config.ubatch
        params.n_seq_max = SEQUENCES
        params.kv_unified = config.unified
        params.type_k = params.type_v = DTYPES[config.dtype]
        params.flash_attn_type = int(config.flash)
        params.swa_full = False
        params.n_threads = params.n_threads_batch = 1
        params.no_perf = True
        self.context = lib.llama_init_from_model(model, params)
        if not self.context:
            sys.exit(f"llama.cpp refuses {config}")
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(BATCH, 0, SEQUENCES)

    def close(self):
        lib.llama_batch_free(self.batch)
        lib.llama_free(self.context)

    def extent(self, sequence):
        return (
            lib.llama_memory_seq_pos_min(self.memory, sequence),
            lib.llama_memory_seq_pos_max(self.memory, sequence),
        )

    def can_shift(self):
        return lib.llama_memory_can_shift(self.memory)

    def decode(self, batch):
        """llama_decode's answer, and the logits if it is 0."""
        self.batch.n_tokens = len(batch)
        for i, (ident, position, sequences) in enumerate(batch):
            self.batch.token[i] = ident
            self.batch.pos[i] = position
            self.batch.n_seq_id[i] = len(sequences)
            for j, sequence in enumerate(sequences):
                self.batch.seq_id[i][j] = sequence
            self.batch.logits[i] = 1
        answer = lib.llama_decode(self.context, self.batch)
        if answer:
            return answer, None
        logits = lib.llama_get_logits(self.context)
        shape = (len(batch), llama_model.VOCAB)
        return 0, np.ctypeslib.as_array(logits, shape).copy()

    def remove(self, sequence, begin, end):
        return lib.llama_memory_seq_rm(self.memory, sequence, begin, end)

    def copy(self, source, target, begin, end):
        lib.llama_memory_seq_cp(self.memory, source, target, begin, end)

    def keep(self, sequence):
        lib.llama_memory_seq_keep(self.memory, sequence)

    def add(self, sequence, begin, end, delta):
        lib.llama_memory_seq_add(self.memory, sequence, begin, end, delta)

    def divide(self, sequence, begin, end, by):
        lib.llama_memory_seq_div(self.memory, sequence, begin, end, by)

    def load(self, source, target):
        size = lib.llama_state_seq_get_size(self.context, source)
        state = (lib.ctypes.c_uint8 * size)()
        lib.llama_state_seq_get_data(self.context, state, size, source)
        return lib.llama_state_seq_set_data(self.context, state, size, target)

    def clear(self):
        lib.llama_memory_clear(self.memory, True)


def far(end):
    """llama.h's open end, as one that compares."""
    return 1 << 31 if end < 0 else end


class Run:
    """One history, done by both. Calls that no caller may make are skipped,
    so that a history of which calls are left out is one as well."""

    def __init__(self, models, config, rules):
        theirs, ours = models[config.arch]
        self.config, self.rules = config, rules
        self.ours = History(ours, config, rules)
        self.theirs = Theirs(theirs, config)
        self.done = []  # As text.
        self.counts = collections.Counter()
        self.worst = 0.0

    def resumable(self, sequence):
        """Has llama.cpp all that the next token should see in the window?

        seq_pos_min is how it tells its caller that it has not."""
        tokens = self.ours.tokens(sequence)
        if not self.ours.window or not tokens:
            return True
        bound = self.ours.end(sequence) + 1 - self.ours.window
        needed = [t.position for t in tokens if t.position > bound]
        first = self.theirs.extent(sequence)[0]
        return 0 <= first <= min(needed)

    def lost(self, sequence):
        """Positions that have left a window's cache, as seq_pos_min tells."""
        first = self.theirs.extent(sequence)[0]
        held = [t.position for t in self.ours.tokens(sequence)]
        return [p for p in held if first < 0 or p < first]

    def step(self, call):
        """None if both agree, or if the call was skipped."""
        name, *arguments = call
        before = len(self.done)
        difference = getattr(self, "do_" + name)(*arguments)
        if len(self.done) == before:
            return None
        self.counts[name] += 1
        return difference or self.positions()

    def positions(self):
        """Do both say that the sequences reach from here to there?"""
        for sequence in range(SEQUENCES):
            first, last = self.theirs.extent(sequence)
            held = [t.position for t in self.ours.tokens(sequence)]
            low, high = min(held, default=-1), max(held, default=-1)
            if self.ours.window and (first, last) != (-1, -1):
                fine = last == high and first >= low
            else:
                fine = (first, last) == (low, high)
            if self.ours.window and last == -1 and "forgotten" in self.rules:
                fine = True
            if not fine:
                return Difference(
                    "positions",
                    f"sequence {sequence} is at {low} to {high}, "
                    f"llama.cpp says {first} to {last}",
                )
        return None

    def do_decode(self, runs, start, mixed, repeats):
        """Runs of (sequences, ids). Token i of a single run has the position
        of the one before it if i is in repeats."""
        for sequences, _ in runs:
            for sequence in sequences:
                if not self.resumable(sequence):
                    return None
            # Tokens of several sequences need one past.
            if len(sequences) > 1 and (
                not self.config.unified
                or len({
                    tuple(sorted(id(t) for t in self.ours.tokens(s)))
                    for s in sequences
                }) > 1
            ):
                return None
        batch = []
        if len(runs) > 1 or len(runs[0][1]) > self.config.ubatch:
            repeats = ()
        for sequences, ids in runs:
            end = self.ours.end(sequences[0])
            position = end + 1 if end >= 0 else start
            for i, ident in enumerate(ids):
                if i and i not in repeats:
                    position += 1
                batch.append((i, len(batch), (ident, position, sequences)))
        if mixed:
            batch.sort()
        batch = [entry for _, _, entry in batch]
        if len(batch) > BATCH:
            return None
        fits = all(
            self.ours.room(s) >= sum(
                self.ours.stream(s) is self.ours.stream(owners[0])
                for _, _, owners in batch
            )
            for s in range(SEQUENCES)
        )
        could = [s for s in range(SEQUENCES) if self.resumable(s)]
        text = ", ".join(
            f"{'+'.join(map(str, s))}: {len(ids)} at "
            f"{min(p for _, p, o in batch if o == s)} to "
            f"{max(p for _, p, o in batch if o == s)}"
            for s, ids in runs
        )
        if repeats:
            text += f", some at equal positions"
        if mixed and len(runs) > 1:
            text += ", mixed"
        self.done.append(f"decode {text}")
        answer, theirs = self.theirs.decode(batch)
        if answer == 1 and (not fits or self.ours.window):
            # Tokens that sequences share keep their cells in a window's
            # cache, so that it may be full while ours has room.
            self.counts["full"] += 1
            self.done[-1] += ": full"
            # What was pending is done, nevertheless.
            for token in sum(self.ours.streams, []):
                token.turned += token.pending
                token.pending = 0
            self.ours.copied.clear()
            return None
        if answer or not fits:
            return Difference(
                "room", f"llama_decode says {answer}; there is "
                f"{'room' if fits else 'no room'}"
            )
        ours = self.ours.decode(batch)
        self.counts["tokens"] += len(batch)
        wrong = np.abs(ours - theirs).max(axis=1)
        worst = int(np.argmax(np.nan_to_num(wrong, nan=np.inf)))
        self.worst = max(self.worst, wrong[worst])
        if not wrong[worst] <= TOLERANCES[self.config.dtype]:
            _, position, owners = batch[worst]
            numbers = [
                " ".join(f"{value:7.4f}" for value in row[worst][:6])
                for row in (theirs, ours)
            ]
            return Difference(
                "logits",
                f"logits of sequence {owners[0]} at {position} differ by "
                f"{wrong[worst]:.3g}:\n    llama.cpp {numbers[0]} ...\n"
                f"    ours      {numbers[1]} ...",
            )
        for sequence in could:
            if not self.resumable(sequence):
                return Difference(
                    "evicted",
                    f"sequence {sequence} lost tokens that it still sees",
                )
        return None

    def do_rm(self, sequence, begin, end):
        self.done.append(f"seq_rm({sequence}, {begin}, {end})")
        removed = self.theirs.remove(sequence, begin, end)
        self.ours.remove(sequence, begin, far(end))
        return None if removed else Difference("refused", "seq_rm is false")

    def do_cp(self, source, target, begin, end):
        if not self.config.unified:
            begin, end = -1, -1  # All that llama.cpp can do there.
        lost = self.lost(source)
        if any(begin <= p < far(end) for p in lost) and (
            self.ours.tokens(target) or self.lost(target)
        ):
            return
        self.done.append(f"seq_cp({source}, {target}, {begin}, {end})")
        self.theirs.copy(source, target, begin, end)
        self.ours.copy(source, target, begin, far(end))

    def do_keep(self, sequence):
        self.done.append(f"seq_keep({sequence})")
        self.theirs.keep(sequence)
        self.ours.keep(sequence)

    def do_add(self, sequence, begin, end, delta):
        first, last = self.theirs.extent(sequence)
        if not self.theirs.can_shift() or last < 0:
            return
        # What has left a window's cache cannot move.
        lost = self.lost(sequence)
        if lost and min(begin, begin + delta) <= max(lost):
            return
        if last + delta > 2000:
            return
        self.done.append(f"seq_add({sequence}, {begin}, {end}, {delta})")
        self.theirs.add(sequence, begin, end, delta)
        self.ours.add(sequence, begin, far(end), delta)

    def do_div(self, sequence, begin, end, by):
        if not self.theirs.can_shift() or self.ours.window:
            return
        self.done.append(f"seq_div({sequence}, {begin}, {end}, {by})")
        self.theirs.divide(sequence, begin, end, by)
        self.ours.divide(sequence, begin, far(end), by)

    def do_load(self, source, target):
        if "save" in self.rules and {source, target} & self.ours.copied:
            return None
        # Only the window of what is saved comes back there.
        if self.ours.window and not self.resumable(source):
            return None
        kept = self.ours.room(target) + len(
            [t for t in self.ours.tokens(target) if len(t.sequences) == 1]
        )
        if kept < len(self.ours.tokens(source)) or self.ours.window:
            return None
        self.done.append(f"load({source} as {target})")
        loaded = self.theirs.load(source, target)
        self.ours.load(source, target)
        return None if loaded else Difference("refused", "loads nothing")

    def do_clear(self):
        self.done.append("clear()")
        self.theirs.clear()
        self.ours.clear()


def draw(rng, run):
    """A call that fits what the sequences hold."""
    sequence = rng.randrange(SEQUENCES)
    end = run.ours.end(sequence)
    if end < 0 or rng.random() < 0.45:
        count = rng.choice([1, 1, 1, 2, 3, 5, 8, 13, 20, 40, 60])
        chosen = rng.sample(range(SEQUENCES), rng.choice([1, 1, 1, 2, 3]))
        if rng.random() < 0.1:
            runs = [(tuple(chosen), count)]
        else:
            equal = rng.random() < 0.5
            share = max(1, count // len(chosen))
            runs = [
                ((s,), share if equal else rng.randint(1, share))
                for s in chosen
            ]
        runs = tuple(
            (s, tuple(rng.randrange(llama_model.VOCAB) for _ in range(n)))
            for s, n in runs
        )
        repeats = ()
        if rng.random() < 0.1:
            repeats = tuple(i for i in range(1, 64) if rng.random() < 0.3)
        start = rng.choice([0, 0, 0, 3])
        return ("decode", runs, start, rng.random() < 0.5, repeats)
    other = rng.randrange(SEQUENCES)
    low = rng.randint(0, end)
    high = rng.randint(low, end + 1)
    kind = rng.choices(
        ["tail", "middle", "all", "any", "copy", "prefix", "some", "shift",
         "add", "div", "keep", "load", "clear"],
        [6, 4, 4, 1, 6, 4, 2, 6, 4, 2, 1, 4, 0.3],
    )[0]
    if kind == "tail":
        return ("rm", sequence, max(low, end - rng.randint(0, 20)), -1)
    if kind == "middle":
        return ("rm", sequence, low, high)
    if kind == "all":
        return ("rm", sequence, -1, -1)
    if kind == "any":
        return ("rm", -1, low, rng.choice([high, -1]))
    if kind in ("copy", "prefix", "some"):
        begin, end = {
            "copy": (-1, -1), "prefix": (0, high), "some": (low, high),
        }[kind]
        return ("cp", sequence, other, begin, end)
    if kind == "shift":
        # As servers do it: two calls, see choose().
        return ("shift", sequence, low, high)
    if kind == "add":
        delta = rng.choice([-low - 1, -low, -2, -1, 1, 2, 7, 50])
        return ("add", sequence, low, rng.choice([high, -1]), delta)
    if kind == "div":
        return ("div", sequence, low, rng.choice([high, -1]), 2)
    if kind == "load":
        return ("load", sequence, other)
    return (kind, sequence) if kind == "keep" else (kind,)


def choose(rng, run):
    call = draw(rng, run)
    if call[0] != "shift":
        return [call]
    _, sequence, low, high = call
    return [("rm", sequence, low, high),
            ("add", sequence, high, -1, low - high)]


def replay(models, config, rules, calls):
    """The first difference and the run so far."""
    run = Run(models, config, rules)
    try:
        for call in calls:
            difference = run.step(call)
            if difference:
                return difference, run
        return None, run
    finally:
        run.theirs.close()


def shrink(models, config, rules, calls, kind):
    """A shorter history with a difference of the same kind."""

    def fails(candidate):
        difference, _ = replay(models, config, rules, candidate)
        return difference is not None and difference.kind == kind

    def simpler(call):
        """Calls that are simpler than this one, simplest first."""
        if call[0] != "decode":
            return
        _, runs, start, mixed, repeats = call
        if len(runs) > 1:
            for i in range(len(runs)):
                yield ("decode", runs[:i] + runs[i + 1:], start, mixed,
                       repeats)
        if repeats:
            yield ("decode", runs, start, mixed, ())
        if start or mixed:
            yield ("decode", runs, 0, False, repeats)
        for i, (sequences, ids) in enumerate(runs):
            for count in sorted({1, len(ids) // 2, len(ids) - 1}):
                if 0 < count < len(ids):
                    fewer = ((sequences, ids[:count]),)
                    yield ("decode", runs[:i] + fewer + runs[i + 1:], start,
                           mixed, repeats)

    size = max(1, len(calls) // 2)
    while True:
        changed = False
        at = len(calls) - size
        while at > -size:
            cut = calls[: max(at, 0)] + calls[at + size:]
            if len(cut) < len(calls) and fails(cut):
                calls, changed = cut, True
            at -= size
        if size > 1:
            size //= 2
            continue
        for at in range(len(calls)):
            for call in simpler(calls[at]):
                candidate = calls[:at] + [call] + calls[at + 1:]
                if fails(candidate):
                    calls, changed = candidate, True
                    break
        if not changed:
            return calls


def search(models, config, rules, seed, operations, length=40):
    """Random histories until one differs: (calls or None, counts, worst)."""
    counts, worst, number = collections.Counter(), 0.0, 0
    while sum(counts[k] for k in counts if k not in ("tokens", "full")) < (
        operations
    ):
        rng = random.Random(f"{seed} {config} {number}")
        number += 1
        run, calls, difference = Run(models, config, rules), [], None
        while len(calls) < length and not difference:
            for call in choose(rng, run):
                calls.append(call)
                difference = difference or run.step(call)
        run.theirs.close()
        counts += run.counts
        if difference:
            return (calls, difference.kind), counts, worst
        worst = max(worst, run.worst)
    return None, counts, worst


def report(models, config, rules, found):
    calls = shrink(models, config, rules, *found)
    difference, run = replay(models, config, rules, calls)
    print(f"  {config}:")
    for line in run.done:
        print(f"    {line}")
    print(f"  {difference.text}")


def load_models(folder):
    models = {}
    for name, arch in ARCHS.items():
        weights = llama_model.random_weights(arch)
        path = f"{folder}/{name}.gguf"
        llama_model.write_gguf(path, arch, weights)
        theirs = lib.llama_model_load_from_file(
            path.encode(), lib.llama_model_default_params()
        )
        if not theirs:
            sys.exit(f"llama.cpp does not load {path}")
        models[name] = theirs, llama_model.Model(arch, weights)
    return models


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--operations", type=int, default=300, help="of each configuration"
    )
    parser.add_argument(
        "--break", dest="broken", choices=BREAKS, help="a wrong rule, ours"
    )
    arguments = parser.parse_args()
    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    print(f"llama_cpp {llama_cpp.__version__}, numpy {np.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        models = load_models(folder)
    rules = frozenset(QUIRKS) | ({arguments.broken} - {None})
    for config in CONFIGS:
        found, counts, worst = search(
            models, config, rules, arguments.seed, arguments.operations
        )
        print(f"{config}: {dict(counts)}, {worst:.2g}")
        if found:
            report(models, config, rules, found)


if __name__ == "__main__":
    main()
