"""Judges attention by numpy: cases drawn for what a class says that it can do,
the formula of include/kvtwin/attention.h in double, and the bound of
docs/attention.md."""

import dataclasses
import math
import os
import random

import numpy as np

from page import compare, say

# Threads that wait by spinning take the time of the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
SIGNIFICANT = {"f32": 24, "f16": 11, "bf16": 8}  # Bits.


class NotSupported(Exception):
    """The engine says that it has no such attention."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences, whose queries are their last `rows` tokens. A row sees its past
    and itself, or `window` tokens before itself and itself, or, in a case with
    `mask`, any cells."""
    dtype: str = "f32"
    heads: int = 1
    kv_heads: int = 1
    dim: int = 8
    lengths: tuple = (1,)
    rows: tuple = (1,)
    window: int | None = None
    soft_cap: float = 0
    sinks: bool = False
    mask: bool = False
    empty: bool = False  # A row of the mask may see nothing.
    nan: bool = False  # In K and V of cells that no row sees.
    seed: int = 0

    def __str__(self):
        parts = [self.dtype, f"heads={self.heads}/{self.kv_heads}",
                 f"dim={self.dim}",
                 f"lengths={','.join(map(str, self.lengths))}",
                 f"rows={','.join(map(str, self.rows))}"]
        if self.window is not None:
            parts.append(f"window={self.window}")
        if self.soft_cap:
            parts.append(f"soft_cap={self.soft_cap:g}")
        parts += [name for name in ("sinks", "mask", "empty", "nan")
                  if getattr(self, name)]
        return " ".join([*parts, f"seed={self.seed}"])


def rounded(array, dtype):
    """To the numbers of a dtype."""
    if dtype == "f16":
        return array.astype(np.float16).astype(np.float32)
    bits = array.astype(np.float32).view(np.uint32)
    drop = 24 - SIGNIFICANT[dtype]
    half = (1 << drop >> 1) - (drop > 0) + (bits >> drop & (drop > 0))
    return (bits + half >> drop << drop).astype(np.uint32).view(np.float32)


class Numbers:
    """The numbers of a case, a list of sequences each: query [rows, heads, dim],
    key and value [length, kv_heads, dim], allowed [rows, length], sinks
    [heads]. f32, all of them numbers of the dtype."""

    def __init__(self, case, stored=None):
        draw = np.random.Generator(np.random.PCG64(case.seed))
        self.case = case
        self.query, self.key, self.value, self.allowed = [], [], [], []
        share = case.heads // case.kv_heads
        for length, rows in zip(case.lengths, case.rows):
            shape = (length, case.kv_heads, case.dim)
            key, value = (rounded(draw.uniform(-1, 1, shape), case.dtype)
                          for _ in range(2))
            if stored:  # The engine's format rounds them.
                key, value = stored(key), stored(value)
            last = length - rows + np.arange(rows)[:, None]
            cells = np.arange(length)[None]
            allowed = cells <= last
            if case.window is not None:
                allowed &= cells >= last - case.window
            if case.mask:
                allowed = draw.random((rows, length)) < 0.5
                allowed[np.arange(rows), draw.integers(length, size=rows)] = True
                if case.empty:
                    allowed[draw.integers(rows)] = False
            # A query for one of the cells, whose score is 3.
            drawn = [[draw.choice(np.flatnonzero(row)) if row.any() else 0
                      for _ in range(case.heads)] for row in allowed]
            aim = key[np.array(drawn), np.arange(case.heads) // share]
            size = np.sum(aim * aim, axis=-1, keepdims=True) + 1e-3
            self.query.append(rounded(
                3 * math.sqrt(case.dim) * aim / size, case.dtype))
            self.key.append(key)
            self.value.append(value)
            self.allowed.append(allowed)
            if case.nan:
                hidden = ~allowed.any(axis=0)
                key[hidden] = value[hidden] = np.nan
        self.sinks = rounded(draw.uniform(-2, 2, case.heads), case.dtype)

    def expected(self, unit, input_error):
        """Results and how far an engine may be from them, whose sums have the
        unit roundoff `unit`, and that rounds the numbers it multiplies by a
        relative error of `input_error`."""
        return [self._of(i, unit, input_error)
                for i in range(len(self.query))]

    def _of(self, i, unit, input_error):
        case = self.case
        query = self.query[i].astype(np.float64)
        share = case.heads // case.kv_heads
        allowed = self.allowed[i][:, None]
        key, value = (
            np.repeat(np.nan_to_num(x[i]).astype(np.float64), share, axis=1)
            for x in (self.key, self.value))
        scale = 1 / math.sqrt(case.dim)
        score = scale * np.einsum("rhd,chd->rhc", query, key)
        size = scale * np.einsum("rhd,chd->rhc", abs(query), abs(key))
        wrong = size * (gamma(case.dim + 4, unit) + 2 * input_error)
        if case.soft_cap:
            score = case.soft_cap * np.tanh(score / case.soft_cap)
            wrong = wrong + (20 * unit + input_error) * abs(score)
        score = np.where(allowed, score, -np.inf)
        sink = self.sinks[None, :, None].astype(np.float64)
        most = np.maximum(score.max(axis=-1, keepdims=True, initial=-np.inf),
                          sink if case.sinks else -np.inf)
        most = np.where(np.isfinite(most), most, 0)
        weight = np.exp(score - most)
        total = weight.sum(axis=-1, keepdims=True)
        score = np.where(allowed, score, 0)
        relative = np.exp(wrong + math.log(2) * unit * (
            abs(score - most) + 4 * abs(score) + 4 * abs(most))) - 1
        relative = relative + 4 * unit + input_error
        if case.sinks:
            total = total + np.exp(sink - most)
        sums = gamma(8 * key.shape[0] + 8, unit)
        relative = (1 + relative) * (1 + sums) - 1
        lost = (weight * relative).sum(axis=-1, keepdims=True) + total * sums
        safe = np.where(total > 0, total, 1)
        exact = np.einsum("rhc,chd->rhd", weight, value) / safe
        bound = (np.einsum("rhc,chd->rhd", weight * relative, abs(value))
                 + abs(exact) * lost) / np.maximum(safe - lost, safe / 2)
        bound += (8 * unit + 2 * input_error) * abs(exact) + 1e-30
        bound += 2.0 ** -SIGNIFICANT[case.dtype] * abs(exact)  # The output is rounded.
        return exact, bound


def gamma(count, unit):
    return count * unit / max(1 - count * unit, 0.5)


@dataclasses.dataclass
class Wrong:
    text: str
    bounds: float = math.inf  # The largest error in bounds.


def judge(cls, case):
    """None, or what is wrong."""
    numbers = Numbers(case, getattr(cls, "stored", None))
    if hasattr(cls, "restrict"):  # The engine hides further cells.
        cls.restrict(numbers)
    unit = 2.0 ** -getattr(cls, "sum_bits", 24)
    expected = numbers.expected(unit, cls.input_error(case.dtype))
    try:
        results = cls().attend(numbers)
    except NotSupported:
        return None
    except Exception as error:
        return Wrong(f"raises {type(error).__name__}: {error}")
    for i, (result, (exact, bound)) in enumerate(zip(results, expected)):
        bounds = np.nan_to_num(abs(result - exact) / bound, nan=np.inf)
        if bounds.max() > 1:
            worst = np.unravel_index(np.argmax(bounds), bounds.shape)
            row, head, element = map(int, worst)
            return Wrong(
                f"sequence {i}, row {row}, head {head}, element {element}: "
                f"{result[worst]:.3g} instead of {exact[worst]:.3g}, bound "
                f"{bound[worst]:.1g}", bounds.max())
    return None


def draw(rng, cls):
    can = cls.can
    sequences = rng.randint(1, 3) if "batch" in can else 1
    longest = rng.choice([1, 3, 8, 20, 40, 140, 300])
    lengths = [rng.randint(1, longest) for _ in range(sequences)]
    rows = [rng.randint(1, length) if "rows" in can and rng.random() < 0.5
            else 1 for length in lengths]
    if "equal_rows" in can:
        rows = [min([rng.choice([1, 2, 5]), *lengths])] * sequences
    kv_heads = rng.choice(cls.kv_heads)
    mask = "mask" in can and rng.random() < 0.5
    window = None
    if "window" in can and not mask and rng.random() < 0.5:
        window = rng.randint(0, longest)
    return Case(
        dtype=rng.choice(cls.dtypes), kv_heads=kv_heads,
        heads=kv_heads * rng.choice([1, 2, 3, 4, 8]),
        dim=rng.choice(cls.dims), lengths=tuple(lengths), rows=tuple(rows),
        window=window, mask=mask,
        empty=mask and "empty" in can and rng.random() < 0.5,
        soft_cap=rng.choice([0, 1.5]) if "soft_cap" in can else 0,
        sinks="sinks" in can and rng.random() < 0.5,
        nan="nan" in can and rng.random() < 0.5, seed=rng.randrange(1000))


def simpler(case, cls):
    """Cases that are a step simpler."""
    def instead(**fields):
        return dataclasses.replace(case, **fields)
    count = len(case.lengths)
    for i in range(count if count > 1 else 0):
        yield instead(lengths=case.lengths[:i] + case.lengths[i + 1:],
                      rows=case.rows[:i] + case.rows[i + 1:])
    for field, least in (("window", None), ("soft_cap", 0), ("sinks", False),
                         ("empty", False), ("nan", False)):
        if getattr(case, field) != least:
            yield instead(**{field: least})
    if case.mask and not case.empty:
        yield instead(mask=False)
    share = case.heads // case.kv_heads
    for fewer in (1, share // 2):
        if fewer and fewer < share:
            yield instead(heads=case.kv_heads * fewer)
    smaller = [n for n in cls.kv_heads if n < case.kv_heads]
    if smaller:
        yield instead(kv_heads=min(smaller), heads=min(smaller) * share)
    smaller = [n for n in cls.dims if n < case.dim]
    if smaller:
        yield instead(dim=min(smaller))
    if case.dtype != cls.dtypes[0]:
        yield instead(dtype=cls.dtypes[0])
    for i, (length, rows) in enumerate(zip(case.lengths, case.rows)):
        for fewer in (length // 2, length - 1):
            if fewer >= 1:
                less = case.rows if fewer >= rows else (
                    *case.rows[:i], fewer, *case.rows[i + 1:])
                yield instead(rows=less, lengths=(
                    *case.lengths[:i], fewer, *case.lengths[i + 1:]))
        if rows > 1 and "equal_rows" not in cls.can:
            for fewer in (1, rows - 1):
                yield instead(rows=(*case.rows[:i], fewer, *case.rows[i + 1:]))
    if max(case.rows) > 1:
        yield instead(rows=(1,) * count)
    if case.window:
        yield instead(window=case.window // 2)
        yield instead(window=case.window - 1)
    if case.seed:
        yield instead(seed=0)


def shrink(case, cls):
    """Keeps an error that shows at a glance if `case` has one."""
    enough = min(judge(cls, case).bounds, 1000)
    again = True
    while again:
        again = False
        for less in simpler(case, cls):
            if "equal_rows" in cls.can and len(set(less.rows)) > 1:
                continue
            found = judge(cls, less)
            if found and found.bounds >= enough:
                case, again = less, True
                break
    return case


def fuzz(cls, cases=300, seed=1):
    """None, or the simplest case found that `cls` gets wrong, and how."""
    rng = random.Random(seed)
    for _ in range(cases):
        case = draw(rng, cls)
        if judge(cls, case):
            case = shrink(case, cls)
            return str(case), judge(cls, case).text
    return None


def report(classes, prefix=""):
    """Prints the findings for each class, and returns the lines."""
    lines = []
    for cls in classes:
        lines += say(f"{prefix}{cls.__name__}: {cls.__doc__.splitlines()[0]}",
                     fuzz(cls, getattr(cls, "cases", 300)) or ["right"])
    return lines
