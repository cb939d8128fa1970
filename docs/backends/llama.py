"""Holds llama.cpp's KV cache to our own forward pass, by logits.

Random histories of decodes, removals, copies and shifts go to llama.cpp and
to a list of tokens that follows the comments of llama.h; after each decode
the logits of all its tokens must agree. See llama.md beside this file.
"""

import argparse
import collections
import dataclasses
import os
import pathlib
import pickle
import random
import signal
import sys
import tempfile
import traceback

# Tiny matrices gain nothing from threads.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import llama_cpp
import numpy as np

import llama_model
from llama_model import ARCHS, SEQUENCES

lib = llama_cpp.llama_cpp


BATCH = 64
DTYPES = {"f32": 0, "f16": 1, "q8_0": 8}  # ggml_type.
# The largest difference of logits, whose standard deviation is about 1.
TOLERANCES = {"f32": 2e-4, "f16": 0.05, "q8_0": 0.4}

# What llama.cpp does today, and llama.h does not say: see llama.md. Without
# one of these, our side follows llama.h there.
QUIRKS = {
    "div": "seq_div turns K the wrong way",
    "nope": "a shift turns K of layers without RoPE",
    "swa-base": "a shift of granite_swa's windowed layers takes base 10000",
    "crash": "a shift of quantized K crashes unless heads are multiples of 64",
    "save": "saved sequences lack shifts and copies that are pending",
    "empty": "loading an empty sequence keeps the tokens that were there",
    "keep": "seq_keep keeps the sequences of other streams",
    "replace": "between streams, seq_cp takes the target's own tokens away",
    "whole": "between streams, seq_cp with p1 = 0 copies all",
    "prepare": "a batch of several ubatches takes from a window what it needs",
    "split": "seq_add moves shared tokens in the cache without window only",
    "forgotten": "seq_pos_max leaves out tokens that some layers still see",
}
# Where to look for them first, of architectures and dtypes.
PLACES = {
    "nope": "smollm3", "swa-base": "granite_swa", "crash": "q8_0",
    "prepare": "granite_swa", "split": "granite_swa",
    "forgotten": "granite_swa", "eager": "granite_swa",
    "window-plus-one": "granite_swa",
}
# What nobody does. Each must be found.
BREAKS = {
    "copy-replaces": "seq_cp takes the target's own tokens away",
    "no-turn": "seq_add leaves K as it is",
    "window-plus-one": "a window does not count the query",
    "remove-shifts": "seq_rm closes the gap",
    "add-own": "seq_add moves a shared token for one sequence only",
    "eager": "what leaves the window is gone at once",
}


@dataclasses.dataclass(frozen=True)
class Config:
    arch: str
    unified: bool = True
    dtype: str = "f32"
    flash: bool = False
    cells: int = 256  # Of a stream; llama.cpp rounds up to 256.
    ubatch: int = BATCH

    def tolerance(self):
        # Flash attention takes K and V of f32 as f16.
        f16 = self.flash and self.dtype == "f32"
        return TOLERANCES["f16" if f16 else self.dtype]

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
    Config("smollm3", dtype="q8_0", flash=True),
]

Difference = collections.namedtuple("Difference", "kind text")


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

    def reload(self):
        size = lib.llama_state_get_size(self.context)
        state = (lib.ctypes.c_uint8 * size)()
        size = lib.llama_state_get_data(self.context, state, size)
        return lib.llama_state_set_data(self.context, state, size)

    def clear(self):
        lib.llama_memory_clear(self.memory, True)


def span(first, last):
    if last < 0:
        return "no position"
    if first < 0:
        return f"positions up to {last}"
    return f"{first}..{last}" if first < last else f"{first}"


def far(end):
    """llama.h's open end, as one that compares."""
    return 1 << 31 if end < 0 else end


class Run:
    """One history, done by both. Calls that no caller may make are skipped,
    so that a history of which calls are left out is one as well."""

    def __init__(self, models, config, rules, send=lambda message: None):
        theirs, ours = models[config.arch]
        self.config, self.rules = config, rules
        self.ours = llama_model.History(ours, config, rules)
        self.theirs = Theirs(theirs, config)
        self.send = send
        self.done = 0
        signal.alarm(60)  # For a history that hangs.
        self.counts = collections.Counter()
        self.worst = 0.0

    def resumable(self, sequence):
        """Does no token that the next one should see miss from the window?"""
        bound = self.theirs.extent(sequence)[1] + 1 - self.ours.window
        return not any(
            t.position > bound and sequence in t.gone
            for t in self.ours.tokens(sequence)
        )

    def forget(self):
        """A caller learns from seq_pos_min what has left a window's cache."""
        for sequence in range(SEQUENCES if self.ours.window else 0):
            first = self.theirs.extent(sequence)[0]
            for token in self.ours.tokens(sequence):
                if first < 0 or token.position < first:
                    token.gone.add(sequence)

    def step(self, call):
        """None if both agree, or if the call was skipped."""
        name, *arguments = call
        before = self.done
        difference = getattr(self, "do_" + name)(*arguments)
        if self.done == before:
            return None
        self.counts[name] += 1
        self.counts["calls"] += 1
        return difference or self.positions()

    def say(self, text):
        self.done += 1
        self.send(text)

    def positions(self):
        """Do both say that the sequences reach from here to there?"""
        self.forget()
        for sequence in range(SEQUENCES):
            first, last = self.theirs.extent(sequence)
            tokens = self.ours.tokens(sequence)
            low = [t.position for t in tokens if sequence not in t.gone]
            high = low if "forgotten" in self.rules else [
                t.position for t in tokens
            ]
            low, high = min(low, default=-1), max(high, default=-1)
            if (first, last) != (low, high):
                return Difference(
                    "positions",
                    f"sequence {sequence} is at {span(low, high)}, llama.cpp "
                    f"says {span(first, last)}",
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
            end = self.theirs.extent(sequences[0])[1]
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
        if "prepare" in self.rules and self.ours.window:
            equal = self.config.unified or len({len(r) for _, r in runs}) == 1
            if len(batch) > self.config.ubatch or not equal:
                return None
        fits = all(
            self.ours.room(s) >= sum(
                self.ours.stream(s) is self.ours.stream(owners[0])
                for _, _, owners in batch
            )
            for s in range(SEQUENCES)
        )
        could = [s for s in range(SEQUENCES) if self.resumable(s)]
        parts = []
        for sequences, _ in runs:
            at = [p for _, p, owners in batch if owners == sequences]
            parts.append(
                f"{'+'.join(map(str, sequences))} at {span(at[0], at[-1])}"
            )
        self.say(
            f"decode {', '.join(parts)}"
            f"{', some twice' if repeats else ''}"
            f"{', mixed' if mixed and len(runs) > 1 else ''}"
        )
        answer, theirs = self.theirs.decode(batch)
        if answer == 1 and (not fits or self.ours.window):
            # Tokens that sequences share keep their cells in a window's
            # cache, so that it may be full while ours has room.
            self.counts["full"] += 1
            self.send("  full")
            self.ours.settle()
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
        if not wrong[worst] <= self.config.tolerance():
            _, position, owners = batch[worst]
            numbers = [
                " ".join(f"{value:.2f}" for value in row[worst][:4])
                for row in (theirs, ours)
            ]
            return Difference(
                "logits",
                f"logits of sequence {owners[0]} at {position}: llama.cpp "
                f"{numbers[0]} ..., ours {numbers[1]} ...",
            )
        for sequence in could:
            if not self.resumable(sequence):
                return Difference(
                    "evicted",
                    f"sequence {sequence} lost tokens that it still sees",
                )
        return None

    def can_shift(self):
        turned = ARCHS[self.config.arch].head_dim % 64 == 0
        if "crash" in self.rules and self.config.dtype == "q8_0":
            return turned and self.theirs.can_shift()
        return self.theirs.can_shift()

    def do_rm(self, sequence, begin, end):
        self.say(f"seq_rm({sequence}, {begin}, {end})")
        removed = self.theirs.remove(sequence, begin, end)
        self.ours.remove(sequence, begin, far(end))
        return None if removed else Difference("refused", "seq_rm is false")

    def do_cp(self, source, target, begin, end):
        if not self.config.unified and any(
            0 < bound < self.config.cells - 1 for bound in (begin, end)
        ):
            begin, end = -1, -1  # llama.cpp aborts at other ranges.
        self.say(f"seq_cp({source}, {target}, {begin}, {end})")
        self.theirs.copy(source, target, begin, end)
        self.ours.copy(source, target, begin, far(end))

    def do_keep(self, sequence):
        self.say(f"seq_keep({sequence})")
        self.theirs.keep(sequence)
        self.ours.keep(sequence)

    def do_add(self, sequence, begin, end, delta):
        last = self.theirs.extent(sequence)[1]
        if not self.can_shift() or last < 0:
            return
        if "split" in self.rules and any(
            begin <= t.position < far(end) and sequence in t.gone
            and t.sequences - t.gone for t in self.ours.tokens(sequence)
        ):
            return
        if last + delta > 2000:
            return
        self.say(f"seq_add({sequence}, {begin}, {end}, {delta})")
        self.theirs.add(sequence, begin, end, delta)
        self.ours.add(sequence, begin, far(end), delta)

    def do_div(self, sequence, begin, end, by):
        if not self.can_shift() or any(
            t.gone for t in self.ours.tokens(sequence)
        ):
            return
        self.say(f"seq_div({sequence}, {begin}, {end}, {by})")
        self.theirs.divide(sequence, begin, end, by)
        self.ours.divide(sequence, begin, far(end), by)

    def do_load(self, source, target):
        if "save" in self.rules and {source, target} & self.ours.copied:
            return None
        tokens = self.ours.tokens(source)
        if "empty" in self.rules and tokens and (
            all(source in t.gone for t in tokens)
        ):
            return None
        room = self.ours.room(target) + len(
            [t for t in self.ours.tokens(target) if len(t.sequences) == 1]
        )
        if room < len(tokens):
            return None
        self.say(f"load({source} as {target})")
        loaded = self.theirs.load(source, target)
        self.ours.load(source, target)
        return None if loaded else Difference("refused", "loads nothing")

    def do_reload(self):
        if "save" in self.rules and self.ours.copied:
            return None
        self.say("reload()")
        loaded = self.theirs.reload()
        self.ours.reload()
        return None if loaded else Difference("refused", "loads nothing")

    def do_gap(self, sequence, step):
        """A position that does not go on."""
        end = self.theirs.extent(sequence)[1]
        if end < 0:
            return None
        self.say(f"decode {sequence} at {end + step}")
        answer, _ = self.theirs.decode([(0, end + step, (sequence,))])
        return None if answer == -1 else Difference(
            "gap", f"llama_decode says {answer}"
        )

    def do_clear(self):
        self.say("clear()")
        self.theirs.clear()
        self.ours.clear()


def draw(rng, run):
    """A call that fits what the sequences hold."""
    sequence = rng.randrange(SEQUENCES)
    end = run.ours.end(sequence)
    if rng.random() < (0.9 if end < 0 else 0.45):
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
    low = rng.randint(0, max(0, end))
    high = rng.randint(low, low if end < 0 else end + 1)
    kind = rng.choices(
        ["tail", "middle", "all", "any", "copy", "prefix", "some", "shift",
         "add", "div", "keep", "load", "reload", "gap", "clear"],
        [6, 4, 4, 1, 6, 4, 2, 6, 4, 2, 1, 4, 1, 1, 0.3],
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
    if kind == "gap":
        return ("gap", sequence, rng.choice([0, 2]))
    return (kind, sequence) if kind == "keep" else (kind,)


def choose(rng, run):
    call = draw(rng, run)
    if call[0] != "shift":
        return [call]
    _, sequence, low, high = call
    return [("rm", sequence, low, high),
            ("add", sequence, high, -1, low - high)]


def in_child(work):
    """All that work(send) sends, and the signal that ended it, or 0.

    llama.cpp aborts or crashes at some histories; that is a finding."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "wb") as out:
                work(lambda message: (pickle.dump(message, out), out.flush()))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    messages = []
    with os.fdopen(reader, "rb") as received:
        while True:
            try:
                messages.append(pickle.load(received))
            except EOFError:
                break
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit("the child failed")
    return messages, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def replay(models, config, rules, calls, send=lambda message: None):
    """The first difference."""
    run = Run(models, config, rules, send)
    try:
        for call in calls:
            difference = run.step(call)
            if difference:
                return difference
        return None
    finally:
        run.theirs.close()


def replay_apart(models, config, rules, calls, send=lambda message: None):
    """The same; it is a difference if llama.cpp dies."""
    messages, number = in_child(
        lambda out: out(replay(models, config, rules, calls, out))
    )
    for line in messages if number else messages[:-1]:
        send(line)
    if number:
        text = f"llama.cpp dies: {signal.strsignal(number)}"
        return Difference("crash", text)
    return messages[-1]


def shrink(models, config, rules, calls, kind):
    """A shorter history with a difference of the same kind."""
    attempt = replay_apart if kind == "crash" else replay

    def fails(candidate):
        difference = attempt(models, config, rules, candidate)
        return difference is not None and difference.kind == kind

    def simpler(call):
        """Calls that are simpler than this one, simplest first."""
        name, *rest = call
        if name in ("rm", "cp", "add", "div"):
            begin = 2 if name == "cp" else 1
            if rest[begin] > 0:
                yield call[: begin + 1] + (0,) + call[begin + 2:]
            if rest[begin + 1] >= 0:
                yield call[: begin + 2] + (-1,) + call[begin + 3:]
        if name == "add" and abs(rest[3]) > 1:
            yield call[:4] + (1 if rest[3] > 0 else -1,)
        if name != "decode":
            return
        runs, start, mixed, repeats = rest
        if len(runs) > 1:
            for i in range(len(runs)):
                yield (name, runs[:i] + runs[i + 1:], start, mixed, repeats)
        if repeats:
            yield (name, runs, start, mixed, ())
        if start or mixed:
            yield (name, runs, 0, False, repeats)
        for i, (sequences, ids) in enumerate(runs):
            for count in sorted({1, len(ids) // 2, len(ids) - 1}):
                if 0 < count < len(ids):
                    fewer = ((sequences, ids[:count]),)
                    yield (name, runs[:i] + fewer + runs[i + 1:], start,
                           mixed, repeats)

    def joined(one, two):
        """One decode for two of the same sequences, if they are that."""
        runs = [call[1] if call[0] == "decode" else () for call in (one, two)]
        if [len(r) for r in runs] != [1, 1] or runs[0][0][0] != runs[1][0][0]:
            return None
        ids = runs[0][0][1] + runs[1][0][1]
        return ("decode", ((runs[0][0][0], ids),)) + one[2:4] + ((),)

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
        for at in range(len(calls) - 1):
            both = joined(*calls[at:at + 2])
            if both and fails(calls[:at] + [both] + calls[at + 2:]):
                calls, changed = calls[:at] + [both] + calls[at + 2:], True
                break
        for at in range(len(calls)):
            for call in simpler(calls[at]):
                candidate = calls[:at] + [call] + calls[at + 1:]
                if fails(candidate):
                    calls, changed = candidate, True
                    break
        if not changed:
            return calls


def search(models, config, rules, seed, operations):
    """Random histories until one differs.

    Answers (calls, kind) or None, what was done, the largest difference of
    logits that was let pass."""

    def work(send):
        counts, worst, number = collections.Counter(), 0.0, 0
        while counts["calls"] < operations:
            rng = random.Random(f"{seed} {config} {number}")
            number += 1
            run, difference = Run(models, config, rules), None
            left = rng.choice([10, 40, 100])
            send("new")
            while left > 0 and not difference:
                for call in choose(rng, run):
                    left -= 1
                    send(call)
                    difference = difference or run.step(call)
            run.theirs.close()
            counts += run.counts
            if difference:
                send(difference)
                break
            worst = max(worst, run.worst)
        send((counts, worst))

    messages, number = in_child(work)
    counts, worst = collections.Counter(), 0.0
    if not number:
        counts, worst = messages.pop()
    calls, found = [], None
    for message in messages:
        if message == "new":
            calls = []
        elif isinstance(message, Difference):
            found = calls, message.kind
        else:
            calls.append(message)
    return (calls, "crash") if number else found, counts, worst


def report(models, config, rules, found, say):
    if found[1] == "crash":
        calls = shrink(models, config, rules, *found)
    else:
        messages, number = in_child(
            lambda send: send(shrink(models, config, rules, *found))
        )
        calls = found[0] if number else messages[0]
    difference = replay_apart(
        models, config, rules, calls, lambda line: say(f"      {line}")
    )
    say(f"      -> {difference.text}")


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
        "--hunt", type=int, metavar="CALLS",
        help="only search: so many calls of each configuration",
    )
    parser.add_argument(
        "--break", dest="broken", choices=BREAKS, help="only this wrong rule"
    )
    parser.add_argument(
        "--write", action="store_true", help="write what is said to the page"
    )
    arguments = parser.parse_args()
    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        models = load_models(folder)
    said = []

    def say(line):
        print(line, flush=True)
        said.append(line)

    def first(rules, place, calls=2000):
        """Says the first difference under these rules, if there is one."""
        for config in CONFIGS:
            if place not in (None, config.arch, config.dtype):
                continue
            found, *_ = search(models, config, rules, arguments.seed, calls)
            if found:
                say(f"    {config}")
                report(models, config, rules, found, say)
                return
        say("    not found")

    today = frozenset(QUIRKS)
    if arguments.broken:
        first(today | {arguments.broken}, PLACES.get(arguments.broken))
        return
    say(f"llama_cpp {llama_cpp.__version__}")
    for config in CONFIGS:
        found, counts, worst = search(
            models, config, today, arguments.seed, arguments.hunt or 500
        )
        say(
            f"{config}: {counts['calls']} calls, {counts['tokens']} tokens, "
            + ("but" if found else f"right within {config.tolerance():g}")
        )
        if arguments.hunt:
            print(f"  {worst:.1g}, {dict(counts)}")
        if found:
            report(models, config, today, found, say)
    if arguments.hunt:
        return
    say("What it does today, and llama.h does not say")
    for name, text in QUIRKS.items():
        say(f"  {text}")
        first(today - {name}, PLACES.get(name))
    say("Wrong rules on our side")
    for name, text in BREAKS.items():
        say(f"  {text}")
        first(today | {name}, PLACES.get(name))
    if arguments.seed != parser.get_default("seed"):
        return
    path = pathlib.Path(__file__).with_name("llama.md")
    before, _, rest = path.read_text().partition("```text\n")
    page, _, after = rest.partition("```\n")
    if arguments.write:
        page = "\n".join(said) + "\n"
        path.write_text(f"{before}```text\n{page}```\n{after}")
    if page.splitlines() != said:
        sys.exit(f"{path} says something else")


if __name__ == "__main__":
    main()
