"""One history, done by llama.cpp and by us, and compared."""

import collections
import dataclasses
import signal
import sys

import llama_cpp
import numpy as np

import llama_model
from llama_model import ARCHS, SEQUENCES

lib = llama_cpp.llama_cpp

BATCH = 64
DTYPES = {"f32": 0, "f16": 1, "q8_0": 8}  # ggml_type.
# The largest difference of logits, whose standard deviation is about 1.
TOLERANCES = {"f32": 2e-4, "f16": 0.05, "q8_0": 0.4}


@dataclasses.dataclass(frozen=True)
class Config:
    arch: str
    unified: bool = True
    dtype: str = "f32"
    flash: bool = False
    cells: int = 256  # The cells of a stream; llama.cpp rounds up to 256.
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
            high = (
                low
                if "forgotten" in self.rules
                else [t.position for t in tokens]
            )
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
                or len(
                    {
                        tuple(sorted(id(t) for t in self.ours.tokens(s)))
                        for s in sequences
                    }
                )
                > 1
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
            self.ours.room(s)
            >= sum(
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
                "room",
                f"llama_decode says {answer}; there is "
                f"{'room' if fits else 'no room'}",
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
            begin <= t.position < far(end)
            and sequence in t.gone
            and t.sequences - t.gone
            for t in self.ours.tokens(sequence)
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
        if (
            "empty" in self.rules
            and tokens
            and (all(source in t.gone for t in tokens))
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
        """A position that does not continue its sequence."""
        end = self.theirs.extent(sequence)[1]
        if end < 0:
            return None
        self.say(f"decode {sequence} at {end + step}")
        answer, _ = self.theirs.decode([(0, end + step, (sequence,))])
        return (
            None
            if answer == -1
            else Difference("gap", f"llama_decode says {answer}")
        )

    def do_clear(self):
        self.say("clear()")
        self.theirs.clear()
        self.ours.clear()
