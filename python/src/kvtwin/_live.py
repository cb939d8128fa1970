"""Driving a cache that is written in Python."""

from __future__ import annotations

import os
import pathlib
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from keyword import iskeyword
from typing import Any

import numpy as np

from kvtwin import _arrays, _kvtwin
from kvtwin._errors import NotSupported
from kvtwin._kvtwin import Tensor
from kvtwin._pool import PoolBackend
from kvtwin._results import (
    Certificate,
    Finding,
    FuzzResult,
    LawResult,
    LawsResult,
    ProfileResult,
    RunResult,
    by_python_names,
)
from kvtwin._setup import (
    ABILITIES,
    CANNOT,
    DTYPES,
    KINDS,
    LEVELS,
    PLACEMENTS,
    SHIFTS,
    V_LAYOUTS,
    Description,
    PoolDescription,
    Rope,
    Setup,
)
from kvtwin._types import Array

OPTIONAL = (
    "get",
    "attend",
    "remove",
    "copy_prefix",
    "can_resume",
    "shift",
    "set_causal",
    "set_layer_type",
    "encoder_cached",
    "commit",
    "find_prefix",
    "checkpoint",
)
CELLS = ("cells", "batch_cells", "cell_count")
TAKE_STRIDED = 1 << 9

# Decorates functions that put rows with numbers that are too large for f16, of which a
# right class makes infinities (docs/dtypes.md).
_casts_overflow = np.errstate(over="ignore")


def _bits(names: Any, known: tuple[str, ...]) -> int:
    return sum(1 << known.index(name) for name in names)


def ends_run(error: BaseException) -> bool:
    """Returns True if the exception ends the run: Ctrl-C, or the outcome of a test of
    pytest. Every other exception of the user's class is a finding."""
    if isinstance(error, KeyboardInterrupt):
        return True
    return any(kind.__module__ == "_pytest.outcomes" for kind in type(error).__mro__)


def story_of(error: BaseException) -> str:
    """Describes an exception of the user's class, with the frames of their code."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(pathlib.Path(__file__).parent)
    theirs = [frame for frame in frames if not frame.filename.startswith(ours)]
    where = "".join(
        f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in theirs or frames
    )
    what = "".join(traceback.format_exception_only(error)).strip()
    return f"exception: {what}{where}"


class Backend:
    """A user's class of caches, as the compiled part sees it."""

    def __init__(self, cls: type) -> None:
        description = getattr(cls, "kvtwin", None) or Description(name=cls.__name__)
        if not isinstance(description, Description):
            raise TypeError(
                f"{cls.__name__}.kvtwin is {description!r}, it must be a "
                "kvtwin.Description"
            )
        attends = description.level == "attention"
        for name in ("start_forward", "put", "attend" if attends else "get"):
            if not callable(getattr(cls, name, None)):
                raise TypeError(f"{cls.__name__} has no method {name}")
        for ability, name in (
            ("remove_tail", "remove"),
            ("remove_middle", "remove"),
            ("copy_prefix", "copy_prefix"),
            ("soft_cap", "attend"),
            ("sinks", "attend"),
            ("draft", "commit"),
            ("draft_trees", "commit"),
            ("find_prefix", "find_prefix"),
            ("pin", "checkpoint"),
        ):
            if ability in description.can and not hasattr(cls, name):
                raise TypeError(
                    f"{cls.__name__} declares the ability {ability}, but has no method "
                    f"{name}"
                )
        self.cls = cls
        self.refuses_misuse = "refuse_misuse" in description.can
        self.description = description
        self.has = {name for name in OPTIONAL if callable(getattr(cls, name, None))}
        if description.level == "identity":
            for name in CELLS:
                if not hasattr(cls, name):
                    raise TypeError(
                        f"{cls.__name__} claims identity, but has no "
                        f"method {name}"
                    )
            self.has.add("cells")

    def describe(self) -> tuple[Any, ...]:
        """Returns name, profile, level, kinds, can, dtypes, v_layouts, shifts,
        max_sequences, max_layers, max_padding, tolerance, cannot, placements,
        max_position, max_mask_padding, attend_dtype, max_query_heads,
        attend_tolerance."""
        d = self.description
        return (
            d.name,
            d.profile,
            LEVELS.index(d.level),
            _bits(d.kinds, KINDS),
            # The rows of a put are made dense before the class sees them.
            sum(1 << ABILITIES[name] for name in d.can) | TAKE_STRIDED,
            _bits(d.dtypes, DTYPES),
            _bits(d.v_layouts, V_LAYOUTS),
            _bits(d.shifts, SHIFTS),
            d.max_sequences,
            d.max_layers,
            d.max_padding,
            d.tolerance,
            _bits(d.cannot, CANNOT),
            _bits(d.placements, PLACEMENTS),
            d.max_position,
            d.max_mask_padding,
            DTYPES.index(d.attend_dtype),
            d.max_query_heads,
            d.attend_tolerance,
        )

    def init(self, fields: dict[str, Any]) -> Instance:
        caches = tuple(_setup(one) for one in fields.pop("caches"))
        setup = _setup({**fields, "caches": caches})
        try:
            return Instance(self.cls, setup)
        except NotSupported as error:
            if getattr(self.cls, "kvtwin", None) is not None:
                raise
            name = self.cls.__name__
            raise NotSupported(
                f"{error} ({name} has no attribute `kvtwin` (a kvtwin.Description), so it is "
                "asked for causal caches only)"
            ) from error


def _setup(fields: dict[str, Any]) -> Setup:
    return Setup(**{**fields, "rope": Rope(**fields["rope"])})


# Key, value, mask, first cell, and the dtypes of key and value for an encoder, whose
# mask is None, as include/kvtwin/kvtwin.h numbers them.
Shown = tuple[Array, Array, Array | None, int, tuple[int, int]]


class Instance:
    """One cache of the user's class."""

    def __init__(self, cls: type, setup: Setup) -> None:
        self.setup = setup
        # Images mean nothing to the other kinds.
        kinds = {setup.kind, *(part.kind for part in setup.caches)}
        self.takes_images = "encoder" in kinds
        self.cache: Any = cls(setup)
        self.shown: Shown | None = None

    def close(self) -> None:
        self.shown = None
        if hasattr(self.cache, "close"):
            self.cache.close()

    def start_forward(
        self,
        positions: list[int],
        sequences: list[int],
        multimodal: list[int],
        parents: list[int],
        reserve: bool,
    ) -> None:
        more: dict[str, Any] = {}
        if self.takes_images:
            if multimodal:
                more["multimodal"] = multimodal
        else:  # kvtwin refuses wrong indices (S47): the class does not get them.
            tokens = len(positions)
            for index in multimodal:
                if not 0 <= index < tokens:
                    raise ValueError(f"multimodal has index {index}; the batch has {tokens} tokens")
        if parents:
            more["parents"] = parents
        if reserve:
            more["reserve"] = True
        self.cache.start_forward(positions, sequences, **more)

    def put(self, layer: int, key: Array | None, value: Array | None) -> None:
        # Copies, which the cache may keep or write to.
        rows = [None if one is None else np.array(one) for one in (key, value)]
        self.cache.put(layer, *rows)

    def get(self, layer: int, mask_rows: int) -> Shown:
        """Returns dense arrays of the stored dtype, valid until the next get."""
        setup = self.setup
        found = self.cache.get(layer)
        try:
            key, value, mask = found
        except (TypeError, ValueError):
            raise TypeError(
                f"get returns {type(found).__name__}, which is not (key, value, mask)"
            ) from None
        v_dtype = setup.v_dtype or setup.dtype
        first_cell = _arrays.integer(getattr(found, "first_cell", 0), "first_cell")
        if mask is None and setup.kind in ("encoder", "wrapper", "hybrid"):
            types = _type_of(key, setup.dtype), _type_of(value, v_dtype)
            k, v = _arrays.stored(key, "key", types[0]), _arrays.stored(value, "value", types[1])
            codes = DTYPES.index(types[0]), DTYPES.index(types[1])
            self.shown = (k, v, None, first_cell, codes)
            return self.shown
        k = _arrays.stored(key, "key", setup.dtype)
        v = _arrays.stored(value, "value", v_dtype)
        heads = setup.kv_heads
        columns = k.shape[0] if k.ndim == 3 else 0
        _arrays.check_shape(k, "key", (columns, heads, _arrays.width(setup.k_head_dim, setup.dtype)))
        width = _arrays.width(setup.v_head_dim, v_dtype)
        if setup.v_layout == "permuted":
            shape: tuple[int, ...] = (heads, width, columns)
        elif setup.v_layout == "tiled":
            shape = (columns // 32, heads, width, 32)
        else:
            shape = (columns, heads, width)
        _arrays.check_shape(v, "value", shape)
        # There may be padding rows that were not asked for.
        rows = max([mask_rows, *getattr(mask, "shape", ())[:1]])
        allowed = _arrays.may_attend(mask, rows, columns)
        # np.where keeps the order of a transposed mask; readers want rows.
        numbers = np.ascontiguousarray(
            np.where(allowed, np.float32(0), np.float32(-np.inf))
        )
        self.shown = (k, v, numbers, first_cell, (0, 0))
        return self.shown

    def attend(self, layer: int, query: Array) -> Array:
        """Returns the outputs, (tokens, heads, v_head_dim), as dense float32."""
        # A copy, which the class may write to.
        found = _arrays.outputs(self.cache.attend(layer, np.array(query)))
        _arrays.check_shape(found, "the output", (*query.shape[:2], self.setup.v_head_dim))
        return found

    def remove(self, sequence: int, begin: int, end: int) -> None:
        self.cache.remove(sequence, begin, end)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self.cache.copy_prefix(source, target, length)

    def commit(self, sequence: int, path: list[int]) -> None:
        self.cache.commit(sequence, path)

    def find_prefix(self, sequence: int, tokens: list[int]) -> int:
        found = self.cache.find_prefix(sequence, tokens)
        if isinstance(found, bool) or not isinstance(found, (int, np.integer)):
            raise TypeError(f"find_prefix returns {found!r}, which is not a length")
        return min(max(int(found), -1), 2**31 - 1)  # A wrong length is refused later.

    def checkpoint(self, sequence: int) -> None:
        self.cache.checkpoint(sequence)

    def can_resume(self, sequence: int, position: int) -> bool:
        return _yes("can_resume", self.cache.can_resume(sequence, position))

    def shift(self, sequence: int, begin: int, end: int, delta: int) -> None:
        self.cache.shift(sequence, begin, end, delta)

    def set_causal(self, except_: list[int]) -> None:
        self.cache.set_causal(except_)

    def set_layer_type(self, type: int) -> None:
        self.cache.set_layer_type(type)

    def encoder_cached(self) -> bool:
        return _yes("encoder_cached", self.cache.encoder_cached())

    def cells(self) -> tuple[list[tuple[int, int, int]], list[int], int]:
        integer = _arrays.integer
        cells = [
            (integer(c, "cell"), integer(p, "position"), integer(s, "sequence"))
            for c, p, s in self.cache.cells()
        ]
        batch = [integer(cell, "batch cell") for cell in self.cache.batch_cells()]
        return cells, batch, integer(self.cache.cell_count(), "cell_count")


def _type_of(array: Any, dtype: str) -> str:
    """Returns the dtype of an encoder's array: the cache's, or float32."""
    if isinstance(array, Tensor):
        return array.dtype_name
    return "f32" if np.asarray(array).dtype == np.float32 else dtype


def _yes(what: str, answer: Any) -> bool:
    if not isinstance(answer, (bool, np.bool_)):
        raise TypeError(f"{what} returns {answer!r}, neither True nor False")
    return bool(answer)


def _other_folders(folder: pathlib.Path) -> list[str]:
    """Returns the folders where this program finds modules and a new one in `folder`
    would not, such as those that pytest's `pythonpath` added."""
    own = [pathlib.Path(one).resolve() for one in (sys.prefix, sys.base_prefix)]
    programs = pathlib.Path(sysconfig.get_path("scripts")).resolve()  # Such as pytest.
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = []
    for entry in sys.path:
        path = pathlib.Path(entry).resolve()
        is_own = path == programs or (
            any(path.is_relative_to(one) for one in own)
            and ("site-packages" in path.parts or "lib" in path.parts)
        )
        if path.is_dir() and path != folder.resolve() and not is_own:
            if entry not in given and str(path) not in others:
                others.append(str(path))
    return others


def _rerun(cls: type, level: str | None = None) -> Callable[[str], str]:
    """Returns a function that makes the command to run a history on a class again."""
    at = "" if level is None else f", level={level!r}"
    return _command(cls, lambda name, history: f"kvtwin.run({name}, {history!r}{at})")


def _rerun_law(cls: type) -> Callable[[str, str], str]:
    """Returns the same for a law and a history."""
    return _command(
        cls,
        lambda name, law, history: (
            f"kvtwin.laws({name}, law={law!r}, history={history!r})"
        ),
    )


def _quoted(code: str) -> str:
    """Returns the code as a word of a shell. Code is full of single quotes, so it is
    between double quotes, unless it has a character with a meaning there."""
    return shlex.quote(code) if set(code) & set('"$`\\!') else f'"{code}"'


def _command(cls: type, make_call: Callable[..., str]) -> Callable[..., str]:
    """Returns a function that makes a shell command for a call of kvtwin.
    `make_call` gets the expression that is the class, and the other arguments."""

    def command(*arguments: str) -> str:
        name = cls.__qualname__
        call = make_call(name, *arguments)
        module = sys.modules.get(cls.__module__)
        file = getattr(module, "__file__", None)
        made = getattr(cls, "kvtwin_made", None)
        if file is None or ("<locals>" in name and made is None):
            return f"print({call})  # Where {name} is made; or see kvtwin_made."
        path = pathlib.Path(file)
        if cls.__module__ == "__main__":
            module_name, folder = path.stem, path.parent
        else:
            module_name = cls.__module__
            folder = path.parents[module_name.count(".")]
        if made is not None:
            call = make_call(made, *arguments)
        parts = module_name.split(".")
        if all(part.isidentifier() and not iskeyword(part) for part in parts):
            names = name.split(".")[0] if made is None else "*"
            line = f"import kvtwin; from {module_name} import {names}"
        else:
            found = f"vars(importlib.import_module({module_name!r}))"
            line = f"import importlib; globals().update({found}); import kvtwin"
        if others := _other_folders(folder):
            line = f"import sys; sys.path += {others!r}; {line}"
        code = _quoted(f"{line}; print({call})")
        python = shlex.quote(sys.executable or "python3")
        return f"cd {shlex.quote(str(folder))} && {python} -c {code}"

    return command


def _is_pool(cls: object) -> bool:
    """Returns whether `cls` is a class of pools. Raises TypeError if it is not a class."""
    if not isinstance(cls, type):
        raise TypeError(
            f"cls is an instance of {type(cls).__name__}, it must be a class of caches "
            "or of pools"
        )
    return isinstance(getattr(cls, "kvtwin", None), PoolDescription)


def _check_numbers(least: int, **numbers: int) -> None:
    """Raises ValueError for a number below `least`, or beyond 64 bits, and TypeError for
    what is not a number."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise TypeError(f"{name} is {number!r}, it must be an int")
        if not least <= number < 2**63:
            raise ValueError(f"{name} is {number}, it must be {least} to 2**63 - 1")


def bucket_list(known: str | Iterable[str]) -> list[str]:
    """Returns the buckets of known findings as a list; a str is one bucket."""
    return [known] if isinstance(known, str) else list(known)


@_casts_overflow
def fuzz(
    cls: type,
    *,
    operations: int = 100_000,
    seconds: float | None = None,
    seed: int = 1,
    html: str | os.PathLike[str] | None = None,
    known: str | Iterable[str] = (),
    level: str | None = None,
    kind: str | None = None,
    shrink_seconds: float | None = None,
) -> FuzzResult:
    """Runs random histories on caches, or pools, of your class (docs/python.md), and
    compares what they show with what is expected.

    Runs at least `operations` operations or, if `seconds` is given, for that time. A
    failure is shrunk to the shortest history that still fails, and drawn on the page
    `html` (caches only). The page of an earlier run is removed; a path that cannot be
    written, or a file that is not a page of kvtwin, is refused before the run. A finding
    whose bucket, or the part of it before the first "+", is in `known` is counted, and
    the run continues. The same seed gives the same answer.

    With `level`, the class is compared at this level only; with `kind`, only caches of
    this kind are made. After `shrink_seconds`, the shortest history so far is the answer,
    which then depends on the speed of the machine.
    """
    _check_numbers(1, operations=operations)
    _check_numbers(0, seed=seed)
    for name, limit in (("seconds", seconds), ("shrink_seconds", shrink_seconds)):
        if limit is not None and not limit > 0:
            raise ValueError(f"{name} is {limit}, it must be above 0")
    buckets = bucket_list(known)
    limits = (0 if seconds else operations, seconds or 0, seed, buckets)
    asked = (_rerun(cls, level), *limits, shrink_seconds or 0, level)
    if _is_pool(cls):
        if kind is not None:
            raise ValueError("kind is for caches, not for pools")
        html = None
        answer = _kvtwin.fuzz_pool(PoolBackend(cls), *asked, 0)
    else:
        backend = Backend(cls)
        kinds = backend.description.kinds
        if kind is not None and kind not in kinds:
            declared = ", ".join(one for one in KINDS if one in kinds)
            raise ValueError(f"kind is {kind!r}, the class declares only {declared}")
        answer = _kvtwin.fuzz(backend, *asked, kind, html)
    return _fuzz_result(answer, seed, buckets, html)


def _fuzz_result(
    answer: Any,
    seed: int,
    buckets: list[str],
    html: str | os.PathLike[str] | None,
) -> FuzzResult:
    level, ok, not_judged, done, histories, found, met, notes = answer
    return FuzzResult(
        ok,
        level,
        not_judged,
        done,
        histories,
        seed,
        tuple(Finding(*one) for one in found),
        {bucket: met.get(bucket, 0) for bucket in sorted(buckets)},
        pathlib.Path(html) if html is not None and found else None,
        tuple(notes),
    )


@_casts_overflow
def laws(
    cls: type,
    *,
    law: str | None = None,
    histories: int = 50,
    seed: int = 1,
    history: str | None = None,
) -> LawsResult:
    """Checks your class of caches, or of pools, by the laws of docs/laws.md: all of them,
    or only `law`, on `histories` random histories each, or only on `history`.

    A law that needs an operation that your class does not have is not judged.
    """
    _check_numbers(1, histories=histories)
    _check_numbers(0, seed=seed)
    pools = _is_pool(cls)
    names = _kvtwin.pool_law_names() if pools else _kvtwin.law_names()
    if law is not None and law not in names:
        raise ValueError(f"law is {law!r}, not one of {', '.join(names)}")
    asked = (_rerun_law(cls), [law] if law else names, seed, histories, history)
    if pools:
        answers = _kvtwin.judge_pool_laws(PoolBackend(cls), *asked)
    else:
        answers = _kvtwin.judge_laws(Backend(cls), *asked)
    return LawsResult(tuple(LawResult(**one) for one in answers), seed)


def _refuse_path(compare: str) -> None:
    """Raises ValueError for a path in place of the text of a file."""
    text = str(compare)
    if text.lstrip().startswith("{"):
        return
    if text.endswith(".json") or os.path.exists(text):
        raise ValueError(
            "compare takes the text of a certificate, such as "
            f"pathlib.Path({text!r}).read_text(), not a path"
        )


@_casts_overflow
def certify(
    cls: type,
    *,
    operations: int = 20_000,
    histories: int = 50,
    seed: int = 1,
    compare: str | None = None,
) -> Certificate:
    """Tries everything that your class claims: the levels for `operations`
    operations each, and the laws on `histories` histories each.

    `compare` is the text of an earlier certificate, its `json`; if it is in a file,
    `pathlib.Path("old.json").read_text()`.
    """
    _check_numbers(1, operations=operations, histories=histories)
    _check_numbers(0, seed=seed)
    if compare is not None:
        _refuse_path(compare)
    limits = (operations, histories, seed, compare)
    if _is_pool(cls):
        fields = _kvtwin.certify_pool(
            PoolBackend(cls), _rerun(cls), _rerun_law(cls), *limits
        )
    else:
        law = _command(
            cls,
            lambda made, name: (
                f"kvtwin.laws({made}, law={name!r}, histories={histories}, seed={seed})"
            ),
        )
        fields = _kvtwin.certify(Backend(cls), _rerun(cls), law, *limits)
    return Certificate(**fields, compared=compare is not None)


@_casts_overflow
def profile(cls: type, *, operations: int = 30_000) -> ProfileResult:
    """Works out which system's rules your class of caches follows.

    Random histories of `operations` operations in all then run by these rules; 0 runs
    none.
    """
    _check_numbers(0, operations=operations)
    if _is_pool(cls):
        raise NotSupported("profiles are for caches, not for pools")
    found = _kvtwin.profile(Backend(cls), operations)
    summary, rules, unexplained, tried, histories = found
    ended = {history: text for history, text in unexplained if text}
    wrong = [history for history, _ in unexplained]
    return ProfileResult(summary, rules, wrong, ended, tried, histories)


def explore(cls: type, *, depth: int = 3) -> FuzzResult:
    """Runs all histories of `depth` operations on small pools of your class.

    A class of caches raises NotSupported: the explorer of caches restores states, for
    which docs/live.md has functions, and this package has none.
    """
    if not _is_pool(cls):
        raise NotSupported(
            "explore is for pools: a class of caches cannot restore a state"
        )
    if not 1 <= depth <= 8:
        raise ValueError(f"depth is {depth}, it must be 1 to 8")
    backend = PoolBackend(cls)
    answer = _kvtwin.fuzz_pool(backend, _rerun(cls), 0, 1e7, 1, [], 0, None, depth)
    return _fuzz_result(answer, 1, [], None)


@_casts_overflow
def run(
    cls: type,
    history: str,
    *,
    level: str | None = None,
    html: str | os.PathLike[str] | None = None,
) -> RunResult:
    """Runs one history (docs/histories.md) on your class, with `level` at this level
    only. `html` is as for `fuzz`."""
    asked = (_rerun(cls, level), history, level)
    if _is_pool(cls):
        answer = _kvtwin.run_pool(PoolBackend(cls), *asked)
        html = None
    else:
        answer = _kvtwin.run(Backend(cls), *asked, html)
    calls, found, not_run, not_judged = answer
    return RunResult(
        tuple(calls),
        Finding(*found) if found else None,
        pathlib.Path(html) if html is not None and found else None,
        tuple(by_python_names(operation) for operation in not_run),
        not_judged,
    )
