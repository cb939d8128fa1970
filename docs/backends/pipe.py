"""Judges caches written in Python: `kvtwin gen HISTORY`, answered by an object
of a class, and `kvtwin check -` of what it answered (docs/adapter.md)."""

import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys

from page import compare, say

OPEN_END = 2147483647
KVTWIN = os.environ.get("KVTWIN", str(
    pathlib.Path(__file__).resolve().parents[2] / "build" / "kvtwin"))


try:  # Then `kvtwin.fuzz` can drive the same classes, live (docs/python.md).
    from kvtwin import CacheFull, Description, NotSupported
except ImportError:
    class CacheFull(Exception):
        """The batch does not fit. `start_forward` may raise this."""

    class NotSupported(Exception):
        """`remove` may raise this, and `__init__` for a cache that is not supported."""

    @dataclasses.dataclass(kw_only=True)
    class Description:
        """The description of a class, its attribute `kvtwin`."""
        name: str
        kinds: set
        can: set = dataclasses.field(default_factory=set)
        cannot: set = dataclasses.field(default_factory=set)
        max_layers: int = 0
        max_sequences: int = 1


@dataclasses.dataclass
class Setup:
    """The setup of a cache."""
    kind: str
    window: int | None
    memory: int | None
    chunk: int | None
    layers: int
    kv_heads: int
    k_head_dim: int
    v_head_dim: int
    capacity: int
    max_sequences: int
    max_batch: int
    dtype: str


def check_memory(setup):
    """Refuses a swa_mem without a window, or with a memory below the capacity."""
    if setup.kind == "swa_mem" and (
            setup.window is None or setup.memory is None
            or setup.memory < setup.capacity):
        raise NotSupported


def setup_of(header):
    cache, init, model = header["cache"], header["init"], header["model"]
    return Setup(
        kind=cache["type"], window=cache.get("window"),
        memory=cache.get("memory"), chunk=cache.get("chunk"),
        capacity=init["capacity"], max_sequences=init["max_sequences"],
        max_batch=init["max_batch"], dtype=init["dtype"], **model)


def rows(tensor, numpy):
    """A tensor of a recording as (tokens, heads, dim)."""
    return numpy.array(tensor["data"], numpy.float32).reshape(
        tensor["shape"][::-1])


def tensor(array):
    return {"shape": array.shape[::-1], "data": array.ravel().tolist()}


class Answers:
    """Answers the lines of one recording by an object of `cls`."""

    def __init__(self, cls, header):
        import numpy
        self.numpy = numpy
        self.cache = cls(setup_of(header))
        self.batch = 0
        self.lengths = {}

    def start_forward(self, op):
        self.batch = 0
        try:
            self.cache.start_forward(op["positions"], op["sequences"])
        except CacheFull:
            return {"result": "cache_full"}
        self.batch = len(op["positions"])
        for position, sequence in zip(op["positions"], op["sequences"]):
            self.lengths[sequence] = position + 1
        return {"result": "ok"}

    def put(self, op):
        self.cache.put(op["layer"], rows(op["key"], self.numpy),
                       rows(op["value"], self.numpy))
        return {}

    def get(self, op):
        key, value, mask = self.cache.get(op["layer"])
        if not len(key) == len(value) == mask.shape[1]:
            raise ValueError(f"get: {len(key)} rows of K, {len(value)} of V, a"
                             f" mask of {mask.shape[1]} columns")
        lines = ["".join("01"[bool(x)] for x in row) for row in mask]
        return {"key": tensor(key), "value": tensor(value),
                "mask": {"shape": mask.shape[::-1], "rows": lines}}

    def remove(self, op):
        if self.lengths.get(op["seq"], 0) <= op["begin"]:
            return {"result": "ok"}
        try:
            self.cache.remove(op["seq"], op["begin"], op["end"])
        except NotSupported:
            return {"result": "not_supported"}
        self.lengths[op["seq"]] = op["begin"]
        return {"result": "ok"}

    def copy_prefix(self, op):
        self.cache.copy_prefix(op["src"], op["dst"], op["len"])
        self.lengths[op["dst"]] = op["len"]
        return {}

    def can_resume(self, op):
        return {"result": bool(self.cache.can_resume(op["seq"], op["pos"]))}


def told_no(answers, op):
    """A client that goes back asks first, and does not if it cannot."""
    return (op["op"] == "remove" and
            0 < op["begin"] < answers.lengths.get(op["seq"], 0) and
            not answers.cache.can_resume(op["seq"], op["begin"]))


def record(history, cls):
    """The recording of `history`, and what the cache raised, if anything."""
    calls = subprocess.run([KVTWIN, "gen", history], check=True,
                           stdout=subprocess.PIPE, text=True).stdout
    ops = [json.loads(line) for line in calls.splitlines()]
    ops[0].update(placement="other", producer=cls.kvtwin.name)
    answers, lines = Answers(cls, ops[0]), [json.dumps(ops[0])]
    for op, then in zip(ops[1:], [*ops[2:], {"op": None}]):
        try:
            if told_no(answers, op):
                break
            answer = getattr(answers, op["op"])(op)
        except Exception as error:
            text = f"{op['op']} raised {type(error).__name__}: {error}"
            return lines, text.strip()
        lines.append(json.dumps({**op, **answer}))
        if not expected(op, then, answer, cls):
            break
    return lines, None


def expected(op, then, answer, cls):
    """Whether `then`, the operation that follows, takes this answer for given.
    Rows follow a batch that fits the capacity."""
    result = answer.get("result")
    if op["op"] == "start_forward":
        fits = then["op"] == "put"
        return fits == (result == "ok") and (
            fits or "refuse_full" in cls.kvtwin.can)
    return result != "not_supported"


def check(recordings):
    """For each recording why it is rejected, or None."""
    if not recordings:
        return []
    text = "\n".join(line for lines in recordings for line in lines)
    out = subprocess.run([KVTWIN, "check", "--json", "-"], input=text,
                         stdout=subprocess.PIPE, text=True).stdout
    verdicts = [json.loads(line) for line in out.splitlines()]
    if len(verdicts) != len(recordings):
        raise RuntimeError(f"{len(recordings)} recordings, got:\n{out}")
    return [None if v["verdict"] == "accept" else v["reason"]
            for v in verdicts]


def judge(history, cls):
    try:
        lines, raised = record(history, cls)
    except NotSupported:
        return None
    return raised or check([lines])[0]


def text_of(setup, ops):
    """A history of docs/histories.md."""
    parts = ["kvt1 " + " ".join(f"{k}={v}" for k, v in setup.items())]
    for name, args in ops:
        if name == "put":
            args = " ".join(f"{s}*{n}" for s, n in args)
        elif name == "drop":
            args = f"{args[0]}:0-" if not args[1] else f"{args[0]}:~{args[1]}-"
        elif name == "copy":
            args = f"{args[0]}>{args[1]}:~0"
        parts.append(f"{name} {args}")
    return " | ".join(parts)


def draw(rng, cls):
    """A client that fills, decodes, and goes back: in one sequence, in all at
    the same time, or, if they can be mixed, in any of them. Of a class with an
    attribute `lockstep`, prompts differ in length."""
    can, most = cls.kvtwin.can, cls.kvtwin.max_sequences
    kind = rng.choice(sorted(cls.kvtwin.kinds))
    capacity = rng.choice([4, 6, 8, 12])
    setup = {"kind": kind}
    if kind == "swa_mem":  # Nothing in the window may be forgotten.
        setup.update(window=rng.randint(0, 5), memory=capacity)
    if kind == "chunked":
        setup.update(chunk=rng.randint(1, 5))
    sequences = rng.randint(1, most)
    setup.update(seqs=sequences, cap=capacity, batch=capacity * sequences,
                 layers=rng.randint(1, 2), dims="2,2,1")
    ops = []
    for _ in range(rng.randint(2, 12)):
        dice, one = rng.random(), rng.randrange(sequences)
        if dice < 0.7 or not ops:
            counts = [1 if rng.random() < 0.6 else rng.randint(1, 6)]
            counts *= sequences
            if "mix" in can or hasattr(cls, "lockstep") and not ops:
                counts = [n if rng.random() < 0.5 else rng.randint(1, 6)
                          for n in counts]
            parts = list(enumerate(counts))
            if "mix" in can and rng.random() < 0.5:
                parts = rng.sample(parts, rng.randint(1, sequences))
            ops.append(("put", parts))
        elif dice < 0.85 and "remove_tail" in can:
            ops.append(("drop", (one, rng.randint(1, 4))))
        elif dice < 0.88 and ("mix" in can or sequences == 1):
            ops.append(("drop", (one, 0)))
        elif "copy_prefix" in can and sequences > 1:
            ops.append(("copy", rng.sample(range(sequences), 2)))
    return setup, ops


def simpler(setup, ops, mix):
    """Histories that are a step simpler."""
    for i in range(len(ops) if len(ops) > 1 else 0):
        yield setup, ops[:i] + ops[i + 1:]
    for key in ("layers", "window", "chunk", "cap", "seqs"):
        least = {"window": 0}.get(key, 1)
        if setup.get(key, least) > least:
            less = dict(setup, **{key: setup[key] - 1})
            less["batch"] = less["cap"] * less["seqs"]
            if "memory" in less:
                less["memory"] = less["cap"]
            if key == "seqs":
                kept = [(n, [a for a in args if a[0] < less["seqs"]])
                        if n == "put" else (n, args) for n, args in ops]
                yield less, [(n, args) for n, args in kept
                             if n == "put" and args
                             or n == "copy" and max(args) < less["seqs"]
                             or n == "drop" and args[0] < less["seqs"]]
            else:
                yield less, ops
    for i, (name, args) in enumerate(ops):
        def instead(new):
            return setup, ops[:i] + [(name, new)] + ops[i + 1:]
        if name == "put":
            if len(args) > 1 and mix:
                for j in range(len(args)):
                    yield instead(args[:j] + args[j + 1:])
            if any(n > 1 for _, n in args):
                yield instead([(s, max(1, n - 1)) for s, n in args])
            if mix:
                for j, (s, n) in enumerate(args):
                    if n > 1:
                        yield instead(args[:j] + [(s, n - 1)] + args[j + 1:])
        if name == "drop" and args[1] > 1:
            yield instead((args[0], args[1] - 1))
    if setup["dims"] != "2,1,1":
        yield dict(setup, dims="2,1,1"), ops


def shrink(setup, ops, cls):
    again = True
    while again:
        again = False
        for less in simpler(setup, ops, "mix" in cls.kvtwin.can):
            if less[1] and judge(text_of(*less), cls):
                setup, ops = less
                again = True
                break
    return text_of(setup, ops)


def fuzz(cls, histories=150, seed=1):
    """None, or the shortest history found that `cls` gets wrong, and why."""
    rng = random.Random(seed)
    drawn = [draw(rng, cls) for _ in range(histories)]
    recordings = []
    for setup, ops in drawn:
        try:
            lines, raised = record(text_of(setup, ops), cls)
        except NotSupported:
            lines, raised = None, None
        recordings.append((lines, raised, setup, ops))
    told = iter(check([r[0] for r in recordings if r[0] and not r[1]]))
    for lines, raised, setup, ops in recordings:
        reason = raised or (next(told) if lines else None)
        if reason:
            history = shrink(setup, ops, cls)
            return history, judge(history, cls)
    return None


def main(classes, generation, page):
    """Prints the oracle's findings for each class, and what `generation` yields:
    pairs of a name and a verdict. Then compares them with the page."""
    lines = []
    for cls in classes:
        found = fuzz(cls, getattr(cls, "histories", 150))
        lines += say(f"{cls.__name__}: {cls.kvtwin.name}", found or ["right"])
    for name, verdict in generation():
        lines += say(name, [verdict])
    compare(lines, page)
