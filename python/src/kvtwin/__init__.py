"""kvtwin: an LLM's attention KV cache, and an oracle for yours.

`Cache` is the library's; `check` judges recordings, which `Recorder` writes of a
cache of yours.
"""

from importlib.metadata import version as _version

from kvtwin._check import Verdict, check
from kvtwin._errors import (
    CacheFull,
    NotSupported,
    Refusal,
    SharedCells,
    StaleViewError,
)
from kvtwin._kvtwin import Cache, Tensor, View
from kvtwin._recorder import Recorder
from kvtwin._setup import OPEN_END, Description, Rope, Setup
from kvtwin._types import Array, Float32Array

__version__ = _version("kvtwin")

__all__ = [
    "OPEN_END",
    "Array",
    "Cache",
    "CacheFull",
    "Description",
    "Float32Array",
    "NotSupported",
    "Recorder",
    "Refusal",
    "Rope",
    "Setup",
    "SharedCells",
    "StaleViewError",
    "Tensor",
    "Verdict",
    "View",
    "check",
]
