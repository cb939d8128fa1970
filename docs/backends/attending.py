"""Judges the classes of the *_attention.py by the level `attention` of kvtwin
(docs/live.md): each as the attention of a cache that keeps rows by numpy."""

import collections
import dataclasses
import math

import kvtwin
import numpy as np
from attention import Case
from page import say


@dataclasses.dataclass
class Numbers:
    """As attention.Numbers: what the sequences of a call have."""
    case: Case
    sinks: np.ndarray
    query: list
    key: list
    value: list
    allowed: list


class Attending:
    """Rows of each sequence in the order of their positions. `peer` attends."""
    peer = None
    dtype = "f32"

    def __init__(self, setup):
        wide = max(setup.k_head_dim, setup.v_head_dim)
        fitting = [dim for dim in self.peer.dims if dim >= wide]
        if not fitting:
            raise kvtwin.NotSupported(f"a head_dim of {wide}")
        self.dim = min(fitting)  # Rows are padded with zeros.
        self.setup = setup
        self.sequences = collections.defaultdict(dict)  # Layer: key, value.

    def start_forward(self, positions, sequences):
        if max(positions) >= self.setup.capacity:
            raise kvtwin.CacheFull
        self.batch = collections.defaultdict(list)  # Sequence: batch indices.
        for index, sequence in enumerate(sequences):
            self.batch[sequence].append(index)
        self.positions = np.array(positions)

    def padded(self, rows):
        spare = self.dim - rows.shape[2]
        return np.pad(rows.astype(np.float32), ((0, 0), (0, 0), (0, spare)))

    def put(self, layer, key, value):
        for sequence, indices in self.batch.items():
            begin = self.positions[indices[0]]
            new = [self.padded(x[indices]) for x in (key, value)]
            old = self.sequences[sequence].get(layer, [x[:0] for x in new])
            self.sequences[sequence][layer] = [
                np.concatenate([x[:begin], y]) for x, y in zip(old, new)]

    def remove(self, sequence, begin, end):
        for layer, rows in self.sequences[sequence].items():
            self.sequences[sequence][layer] = [x[:begin] for x in rows]

    def copy_prefix(self, source, target, length):
        self.sequences[target] = {
            layer: [x[:length] for x in rows]
            for layer, rows in self.sequences[source].items()}

    def numbers(self, layer, query, parts):
        """`parts` are pairs of a sequence and its batch indices."""
        setup, can = self.setup, self.peer.can
        ends = [self.positions[indices[-1]] + 1 for _, indices in parts]
        rows = [[x[:end] for x in self.sequences[sequence][layer]]
                for (sequence, _), end in zip(parts, ends)]
        case = Case(
            dtype=self.dtype, heads=query.shape[1], kv_heads=setup.kv_heads,
            dim=self.dim, lengths=tuple(map(int, ends)),
            rows=tuple(len(indices) for _, indices in parts),
            window=setup.window if setup.kind == "swa" else None,
            soft_cap=setup.soft_cap, sinks=bool(setup.sinks),
            mask="mask" in can)
        scale = math.sqrt(self.dim / setup.k_head_dim)  # Theirs is of `dim`.
        return Numbers(
            case, np.array(setup.sinks, np.float32),
            [self.padded(query[indices] * scale) for _, indices in parts],
            [key for key, _ in rows], [value for _, value in rows],
            [self.allowed(self.positions[indices][:, None], np.arange(end))
             for (_, indices), end in zip(parts, ends)])

    def allowed(self, now, cells):
        setup = self.setup
        allowed = cells <= now
        if setup.kind == "swa" and setup.window is not None:
            allowed &= cells >= now - setup.window
        if setup.kind == "chunked":
            allowed &= cells >= now - now % setup.chunk
        return allowed

    def attend(self, layer, query):
        can = self.peer.can
        parts = list(self.batch.items())
        if "rows" not in can:
            parts = [(sequence, [index])
                     for sequence, indices in parts for index in indices]
        together = "batch" in can and "equal_rows" not in can
        out = np.empty((*query.shape[:2], self.setup.v_head_dim), np.float32)
        for call in [parts] if together else [[part] for part in parts]:
            answers = self.peer().attend(self.numbers(layer, query, call))
            for (_, indices), answer in zip(call, answers):
                out[indices] = answer[:, :, :out.shape[2]]
        return out


def backend(peer, dtype):
    """The class that kvtwin.fuzz drives."""
    kinds = {"causal"}
    if peer.can & {"window", "mask"}:
        kinds.add("swa")
    if "mask" in peer.can:
        kinds.add("chunked")
    description = kvtwin.Description(
        name=f"{peer.__name__} {dtype}", level="attention", kinds=kinds,
        can={"remove_tail", "copy_prefix", "share", "mix"}
        | peer.can & {"soft_cap", "sinks"},
        max_sequences=3, attend_dtype=dtype)
    return type(peer.__name__, (Attending,),
                {"peer": peer, "dtype": dtype, "kvtwin": description})


def report(peers, prefix="", operations=10_000):
    """Prints the findings for each class in each of its dtypes, and returns the
    lines."""
    lines = []
    for peer in peers:
        for dtype in peer.dtypes:
            result = kvtwin.fuzz(backend(peer, dtype), operations=getattr(
                peer, "operations", operations))
            found = [f"{result.histories} histories: right"]
            if not result:
                found = [line for finding in result.findings
                         for line in (finding.history, finding.reason)]
            lines += say(
                f"{prefix}{peer.__name__} as a cache, {dtype}", found)
    return lines
