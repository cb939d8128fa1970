"""The cases that all peers compute: K and V that are the same numbers in every
dtype, queries, and the formula in double."""

import dataclasses
import math
import mmap

import ml_dtypes
import numpy as np

DTYPES = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "int8": np.int8,  # A multiple of SCALE.
    "f8_e4m3": ml_dtypes.float8_e4m3fn,
}
SCALE = 1 / 64  # One for all numbers of int8 and q8_0.
Q8_BLOCK = np.dtype([("scale", np.float16), ("elements", np.int8, 32)])


def _numbers_of_codes():
    """Multiples of SCALE below 2 with four significant bits: they are numbers
    of f8_e4m3, and so of all dtypes."""
    codes = np.arange(256).astype(np.uint8).view(np.int8).astype(int)
    size = np.maximum(np.abs(codes), 1)
    step = 2.0 ** np.maximum(np.floor(np.log2(size)) - 3, 0)
    rounded = np.sign(codes) * np.floor(np.abs(codes) / step) * step
    return np.clip(rounded, -120, 120)


MULTIPLES = _numbers_of_codes()


@dataclasses.dataclass(frozen=True)
class Case:
    """`rows` queries: the last of `cells` tokens, which see their past."""
    dtype: str  # f32, f16, bf16 or 8-bit.
    cells: int
    rows: int = 1
    kv_heads: int = 8
    dim: int = 128

    def visible(self):
        """The sum over the rows of the cells that they see."""
        return self.rows * (2 * self.cells - self.rows + 1) // 2

    def layers(self):
        """Copies of K and V that take turns, so that they come from memory as
        in a model, and not from the processor's caches."""
        if self.rows > 1:
            return 1
        elements = 2 * self.cells * self.kv_heads * self.dim
        width = {"f32": 4, "f16": 2, "bf16": 2, "8-bit": 1}[self.dtype]
        return -(-(128 << 20) // (elements * width))

    def checked_rows(self):
        return sorted({*range(min(self.rows, 4)),
                       *np.linspace(0, self.rows - 1, 8).astype(int)})


def empty(shape, dtype):
    """An array on a page boundary, of huge pages if the system has them: the
    same memory for all peers."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    memory = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, int(np.prod(shape))).reshape(shape)


class Numbers:
    """The codes of a case's K and V, [kv_heads, cells, dim]."""

    def __init__(self, case):
        self.case = case
        random = np.random.Generator(np.random.SFC64(case.cells))
        shape = (case.kv_heads, case.cells, case.dim)
        size = int(np.prod(shape))
        self.codes = [
            np.frombuffer(random.bytes(size), np.uint8).reshape(shape)
            for _ in range(2)]
        self.kept = {}

    def stored(self, which, dtype, token_major=False):
        """K (0) or V (1) as numbers of a dtype."""
        codes = self.codes[which]
        if token_major:
            codes = codes.transpose(1, 0, 2)
        if dtype == "q8_0":
            out = empty((*codes.shape[:2], codes.shape[2] // 32), Q8_BLOCK)
            out["scale"] = SCALE
            out["elements"] = MULTIPLES.astype(np.int8)[codes].reshape(
                *out.shape, 32)
            return out
        scale = 1 if dtype == "int8" else SCALE
        out = empty(codes.shape, DTYPES[dtype])
        table = (MULTIPLES * scale).astype(DTYPES[dtype])
        for to, part in zip(out, codes):
            np.take(table, part, out=to)
        return out

    def copies(self, which, dtype, token_major=False):
        """The same for each layer. Peers of a process share them."""
        kept = self.kept.get((which, dtype, token_major))
        if kept is None:
            first = self.stored(which, dtype, token_major)
            kept = [first] + [empty(first.shape, first.dtype)
                              for _ in range(self.case.layers() - 1)]
            for copy in kept[1:]:
                copy[...] = first
            self.kept[which, dtype, token_major] = kept
        return kept

    def query(self, heads):
        """[rows, heads, dim], f32 that are numbers of bf16. Each is drawn for
        one of the cells it sees, to which it gives about half of its weight: a
        missing or a wrong cell shows. Among these cells are the first and the
        last."""
        case = self.case
        random = np.random.Generator(np.random.SFC64(heads))
        last = case.cells - case.rows + np.arange(case.rows)
        cells = (random.random((case.rows, heads)) * (last + 1)[:, None])
        cells = cells.astype(int)
        cells[:, 0] = 0
        cells[:, -1] = last
        shared = np.arange(heads) // (heads // case.kv_heads)
        key = MULTIPLES[self.codes[0][shared[None], cells]] * SCALE
        score = math.log(case.cells) + 1
        query = key * score * math.sqrt(case.dim) / np.sum(
            key * key, axis=-1, keepdims=True)
        return query.astype(ml_dtypes.bfloat16).astype(np.float32)

    def expected(self, query):
        """The formula in double, for checked_rows(): [rows, heads, dim]."""
        case = self.case
        rows = case.checked_rows()
        query = query[rows].astype(np.float64)
        heads = query.shape[1]
        share = heads // case.kv_heads
        out = np.empty(query.shape)
        last = case.cells - case.rows + np.array(rows)
        hidden = np.arange(case.cells)[None, None] > last[:, None, None]
        for head in range(case.kv_heads):
            key, value = (MULTIPLES[codes[head]] * SCALE
                          for codes in self.codes)
            own = slice(head * share, (head + 1) * share)
            score = query[:, own] @ key.T / math.sqrt(case.dim)
            score[np.broadcast_to(hidden, score.shape)] = -np.inf
            weight = np.exp(score - score.max(axis=-1, keepdims=True))
            weight /= weight.sum(axis=-1, keepdims=True)
            out[:, own] = weight @ value
        return out


# The largest difference of an element from the formula that is taken as
# rounding. V is below 2. A missing, wrong or doubled cell is 0.2 or more away.
TOLERANCES = {"f32": 2e-4, "f16": 2e-2, "bf16": 5e-2, "8-bit": 5e-2}
