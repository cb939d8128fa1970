"""kvtwin: an LLM's attention KV cache, and a tester of your own.

`Cache` and `Pool` are the library's cache and its pool of blocks, and `Attention`
computes attention over them. `Sessions` is the part of a server before them.
`Recorder` records the calls of your cache, and `check` judges the recording. `fuzz`
runs random histories on your class, which is a cache or a pool of blocks; `laws`
checks a class of caches by laws, `profile` works out whose rules it follows, and
`certify` does everything that the class claims, for CI;
`explore` runs all short histories on a pool.
"""

TYPE_CHECKING = False  # For type checkers, as in typing, whose import is slow.

if TYPE_CHECKING:
    from kvtwin._attention import Attended, Attention
    from kvtwin._check import Verdict, check
    from kvtwin._errors import (
        CacheFull,
        NotSupported,
        Refusal,
        SharedCells,
        StaleViewError,
    )
    from kvtwin._kvtwin import Cache, Pool, SessionBatch, Sessions, Tensor, View
    from kvtwin._live import certify, explore, fuzz, laws, profile, run
    from kvtwin._recorder import Recorder
    from kvtwin._results import (
        Certificate,
        Finding,
        FuzzResult,
        LawResult,
        LawsResult,
        ProfileResult,
        RunResult,
    )
    from kvtwin._setup import (
        COMMITTED,
        NOT_A_DRAFT,
        OPEN_END,
        Description,
        PoolDescription,
        PoolSetup,
        Rope,
        Setup,
    )
    from kvtwin._types import Array, Float32Array

    __version__: str

__all__ = [
    "COMMITTED",
    "NOT_A_DRAFT",
    "OPEN_END",
    "Array",
    "Attended",
    "Attention",
    "Cache",
    "CacheFull",
    "Certificate",
    "Description",
    "Finding",
    "Float32Array",
    "FuzzResult",
    "LawResult",
    "LawsResult",
    "NotSupported",
    "Pool",
    "PoolDescription",
    "PoolSetup",
    "ProfileResult",
    "Recorder",
    "Refusal",
    "Rope",
    "RunResult",
    "SessionBatch",
    "Sessions",
    "Setup",
    "SharedCells",
    "StaleViewError",
    "Tensor",
    "Verdict",
    "View",
    "certify",
    "check",
    "explore",
    "fuzz",
    "laws",
    "profile",
    "run",
]

# The module of each public name. It is imported when the name is first used: numpy
# alone takes longer than all the rest. A test compares this with the imports above.
_HOMES = {
    "_attention": "Attended Attention",
    "_check": "Verdict check",
    "_errors": "CacheFull NotSupported Refusal SharedCells StaleViewError",
    "_kvtwin": "Cache Pool SessionBatch Sessions Tensor View",
    "_live": "certify explore fuzz laws profile run",
    "_recorder": "Recorder",
    "_results": "Certificate Finding FuzzResult LawResult LawsResult ProfileResult "
    "RunResult",
    "_setup": "COMMITTED NOT_A_DRAFT OPEN_END Description PoolDescription PoolSetup "
    "Rope Setup",
    "_types": "Array Float32Array",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

if not TYPE_CHECKING:  # With it, a type checker would accept kvtwin.any_name.

    def __getattr__(name):
        from importlib import import_module

        if name == "__version__":
            found = import_module("importlib.metadata").version(__name__)
        elif name in _HOME_OF:
            found = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found

    def __dir__():
        return sorted({*globals(), *__all__, "__version__"} - {"TYPE_CHECKING"})
