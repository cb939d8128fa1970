"""Judging recordings (docs/trace_format.md)."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any, Literal

from kvtwin import _kvtwin

Twin = Literal["both", "optimized", "reference"]


def _twins(twin: Twin) -> list[str]:
    if twin not in ("both", "optimized", "reference"):
        raise ValueError(f"twin is {twin!r}, not both, optimized or reference")
    return ["reference", "optimized"] if twin == "both" else [twin]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The oracle's verdict on a recording. True if the recording is accepted."""

    verdict: Literal["accept", "reject", "bad_input"]
    #: The strongest equivalence that held to the end.
    level: Literal["identity", "visibility", "attention", "none"]
    #: The first wrong line, counted from 1; 0: accepted.
    line: int
    #: The error in that line. Of an accepted recording it is empty, or says that nothing
    #: was judged.
    reason: str
    #: The twin that disagrees; empty if all twins do.
    twin: str
    #: The path of the file; "-" for a recording without a file.
    name: str
    _recording: bytes | None = dataclasses.field(repr=False, compare=False)
    _twins: tuple[str, ...] = dataclasses.field(repr=False, compare=False)

    @property
    def accepted(self) -> bool:
        """Whether the recording is right."""
        return self.verdict == "accept"

    def __bool__(self) -> bool:
        return self.accepted

    def __str__(self) -> str:
        if self.accepted:
            nothing = f": {self.reason}" if self.reason else ""
            return f"accept ({self.level}): {self.name}{nothing}"
        where = f", line {self.line}" if self.line else ""
        return f"{self.verdict}: {self.name}{where}: {self.reason}"

    def html(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes the page that steps through the calls up to the first wrong line,
        as `kvtwin check --html` does. A recording that is not a file is written beside
        the page, as `.jsonl`. The page replaces the page of an earlier run, but no other
        file.

        Raises RuntimeError if the recording is not rejected.
        """
        if self.verdict != "reject":
            raise RuntimeError(f"there is no failure to draw: {self}")
        page = pathlib.Path(os.fsdecode(path))
        recording = pathlib.Path(self.name)
        _kvtwin.prepare_page(page)
        if self._recording is not None:
            recording = page.with_suffix(".jsonl")
            if not recording.exists():
                recording.write_bytes(self._recording)
            elif recording.read_bytes() != self._recording:
                raise FileExistsError(f"{recording} exists, and is another recording")
        if not _kvtwin.write_page(recording, page, list(self._twins)):
            raise RuntimeError(f"{recording} is gone, or not wrong any more: {self}")
        return page


def _line_of(given: str | bytes | dict[str, Any]) -> bytes:
    line = given if isinstance(given, (str, bytes)) else json.dumps(given)
    encoded = line.encode() if isinstance(line, str) else line
    return encoded.rstrip(b"\n") + b"\n"


def check(
    recording: str
    | os.PathLike[str]
    | bytes
    | bytearray
    | memoryview
    | Iterable[str | bytes | dict[str, Any]],
    *,
    twin: Twin = "both",
) -> Verdict:
    """Judges one recording of a cache or of a pool of blocks.

    `recording` is the path of a file, its bytes, or its lines: strings, bytes, or
    objects for json. A file that cannot be read raises OSError; a file that is not
    a recording has the verdict "bad_input".
    """
    twins = _twins(twin)
    content: bytes | None = None
    name = "-"
    if isinstance(recording, (str, os.PathLike)):
        name = os.fsdecode(recording)
        with open(name, "rb"):
            pass
        answer = _kvtwin.judge_file(name, twins)
    else:
        if isinstance(recording, (bytes, bytearray, memoryview)):
            content = bytes(recording)
        else:
            content = b"".join(_line_of(line) for line in recording)
        answer = _kvtwin.judge_bytes(content, twins)
    return Verdict(*answer, name, content, tuple(twins))  # type: ignore[arg-type]
