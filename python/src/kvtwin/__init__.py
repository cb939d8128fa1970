"""kvtwin: an LLM's attention KV cache, and a tester of your own.

`Cache` and `Pool` are the library's cache and its pool of blocks, and `Attention`
computes attention over them. `Sessions` is the part of a server before them.
`Recorder` records the calls of your cache, and `check` judges the recording. `fuzz`
runs random histories on your class, which is a cache or a pool of blocks; `laws`
checks a class of caches by laws, `profile` works out whose rules it follows, and
`certify` does everything that the class claims, for CI;
`explore` runs all short histories on a pool.
"""

from importlib.metadata import version as _version

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

__version__ = _version("kvtwin")

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
