"""The results of driving a cache, or a pool of blocks, that is written in Python."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Literal


def by_python_names(text: str) -> str:
    """Returns a text with the names of abilities in C replaced by those in Python."""
    return re.sub(
        "KVTWIN_CAN(NOT)?_[A-Z_]+",
        lambda name: repr(re.sub("KVTWIN_CAN(NOT)?_", "", name[0]).lower()),
        text,
    )


@dataclasses.dataclass(frozen=True)
class Finding:
    """An error of a backend."""

    #: The level at which it was found.
    level: str
    #: The comparison that failed: "mine: K bytes", ...
    check: str
    #: The shortest history that shows it, for `kvtwin.run`.
    history: str
    #: The error, and its place.
    reason: str
    #: The whole report: the calls, the wrong row, the command.
    text: str
    #: The name of this kind of failure, for `known`; empty if each __init__ fails.
    bucket: str = ""
    #: The command that runs the history again, for a shell (for a local class, code for
    #: Python); empty if each __init__ fails.
    rerun: str = ""

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class FuzzResult:
    """The result of random histories on a backend. True if the backend is right: it
    keeps the level that it claims, and raises only refusals."""

    ok: bool
    #: The strongest level that holds.
    level: Literal["identity", "visibility", "numeric", "attention", "none"]
    #: True if nothing shows that a level holds: every history ended in a finding before
    #: a view was compared, or a pool took no token in all its layers.
    not_judged: bool
    operations: int
    histories: int
    seed: int
    findings: tuple[Finding, ...]
    #: How often each known finding occurred, by its bucket; 0: never.
    passed_over: dict[str, int]
    #: The page of the first finding; None if no page was asked for.
    page: pathlib.Path | None
    #: Each note names an answer that the class may give but never gave:
    #: "find_prefix found nothing in 12 prompts". A note is not a failure.
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.ok

    @property
    def failure(self) -> str:
        """The report of the first finding, and a list of the others; empty without
        findings."""
        if not self.findings:
            return ""
        also = (
            f"  also    {finding.check} ({finding.level}): {finding.history}\n"
            for finding in self.findings[1:]
        )
        return self.findings[0].text + "".join(also)

    @property
    def history(self) -> str:
        """The shortest history of the first finding; empty without findings."""
        return self.findings[0].history if self.findings else ""

    def __str__(self) -> str:
        counts = (
            f"{self.operations} operations in {self.histories} histories, seed "
            f"{self.seed}: "
        )
        known = "".join(
            f"\n  known   {bucket}: {count or 'never met'}"
            for bucket, count in self.passed_over.items()
        ) + "".join(f"\n  note    {note}" for note in self.notes)
        if self.ok:
            but = ", except for known findings" if any(self.passed_over.values()) else ""
            return f"{counts}right ({self.level}){but}{known}"
        page = f"\n  page    {self.page}" if self.page else ""
        holds = f"wrong; the strongest level that holds: {self.level}"
        if self.not_judged:
            holds = "not judged: every history that compares a view ended in a finding"
            if not self.findings:
                holds = "not judged: no append to all layers succeeded"
        failure = f"{self.failure}{page}\n" if self.findings else ""
        return f"{failure}{counts}{holds}{known}"


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of one history on a backend. True if something was judged, and nothing
    is wrong."""

    #: Each call and its answer; of a pool, each call that changes it, and the last one.
    calls: tuple[str, ...]
    finding: Finding | None
    page: pathlib.Path | None
    #: The operations that the class did not get, or not as they are written, each with
    #: the reason: "pin 0: it does not declare 'pin'".
    not_run: tuple[str, ...] = ()
    #: Why nothing was judged; empty if something was.
    not_judged: str = ""

    @property
    def ok(self) -> bool:
        """Whether something was judged, and the class did what it should."""
        return self.finding is None and not self.not_judged

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        not_run = [f"  not run {operation}" for operation in self.not_run]
        if self.finding is None:
            return "\n".join([*self.calls, *not_run, self.not_judged or "no difference"])
        page = [f"  page    {self.page}"] if self.page else []
        return "\n".join([self.finding.text.removesuffix("\n"), *not_run, *page])


@dataclasses.dataclass(frozen=True)
class LawResult:
    """The result of one law (docs/laws.md). True unless the law is broken."""

    name: str
    statement: str
    #: The rules of docs/semantics.md that the law states: "S29, S31".
    rules: str
    histories: int
    #: How many times the law was checked.
    judged: int
    #: Why the law is not judged; empty if it is.
    not_judged: str
    #: The name of the law, or of another check that failed; empty if none did.
    check: str
    reason: str
    #: The shortest history that breaks the law, and the command that runs it.
    history: str
    rerun: str

    def __bool__(self) -> bool:
        return not self.check

    def __str__(self) -> str:
        if self.not_judged:
            why = by_python_names(self.not_judged)
            return f"-      {self.name:22} not judged: {why}"
        if self:
            return f"holds  {self.name:22} judged {self.judged} times"
        statement = self.statement + f" ({self.rules})"
        if self.check != self.name:
            statement = self.check
        return (
            f"BROKEN {self.name}\n\n  {statement}\n  {self.reason}\n"
            f"  rerun   {self.rerun}\n"
        )


@dataclasses.dataclass(frozen=True)
class LawsResult:
    """The results of all laws. True if none is broken, and one was judged."""

    laws: tuple[LawResult, ...]
    seed: int

    def __bool__(self) -> bool:
        return all(self.laws) and any(not law.not_judged for law in self.laws)

    def __str__(self) -> str:
        broken = sum(not law for law in self.laws)
        skipped = sum(bool(law.not_judged) for law in self.laws)
        counts = (
            f"{broken} broken, {len(self.laws) - broken - skipped} hold, "
            f"{skipped} not judged, seed {self.seed}"
        )
        return "\n".join([*(str(law) for law in self.laws), counts])


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The levels and laws that hold for a class, and how they were tried. True if the
    class is as it claims; with an earlier certificate, if nothing is worse."""

    right: bool
    text: str
    #: One line, which `compare` and `kvtwin certify --compare` read.
    json: str
    #: Each level and each law as a test case of JUnit XML.
    junit: str
    #: Each difference from the earlier certificate.
    changes: tuple[str, ...]
    worse: bool
    compared: bool

    def __bool__(self) -> bool:
        return not self.worse if self.compared else self.right

    def __str__(self) -> str:
        return self.text + "".join(f"changed {change}\n" for change in self.changes)


@dataclasses.dataclass(frozen=True)
class ProfileResult:
    """The rules that a class follows (docs/profiles.md). True if it ran a history, and
    some rules explain all of its answers."""

    #: "like mlx except copy adds (kvt1 ...)"; `kvtwin.Description` takes it as profile.
    summary: str
    #: For each rule, the values that fit the answers: one, if it is known.
    rules: dict[str, list[str]]
    #: Histories that the class answers wrongly by any rules.
    unexplained: list[str]
    #: How the class ended in some of these histories: "backend: error: exception: ...".
    ended: dict[str, str] = dataclasses.field(default_factory=dict)
    #: "17 histories and 30005 operations of random histories".
    tried: str = ""
    #: How many histories ran, without the random ones; 0: the summary says why.
    histories: int = 0

    def __bool__(self) -> bool:
        return self.histories > 0 and not self.unexplained

    def __str__(self) -> str:
        lines = [self.summary, ""]
        lines += (f"  {rule:24}{' or '.join(v)}" for rule, v in self.rules.items())
        if self.unexplained:
            lines += ["", "It is wrong under any rules on these histories:"]
            for line in self.unexplained:
                lines.append(f"  {line}")
                if line in self.ended:
                    lines.append(f"    {self.ended[line]}")
        lines += ["", self.tried] if self.tried else []
        return "\n".join(lines)
