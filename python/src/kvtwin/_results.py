"""The results of driving a cache, or a pool of blocks, that is written in Python."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Literal


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

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class FuzzResult:
    """The result of random histories on a backend. True if the backend is right: it
    keeps the level that it claims, and raises only refusals."""

    ok: bool
    #: The strongest level that holds.
    level: Literal["identity", "visibility", "numeric", "attention", "none"]
    #: True if every history ended in a finding before a view was compared, so that
    #: nothing shows that a level holds.
    not_judged: bool
    operations: int
    histories: int
    seed: int
    findings: tuple[Finding, ...]
    #: How often each known finding occurred, by its bucket; 0: never.
    passed_over: dict[str, int]
    #: The page of the first finding; None if no page was asked for.
    page: pathlib.Path | None

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
        )
        if self.ok:
            but = ", except for known findings" if any(self.passed_over.values()) else ""
            return f"{counts}right ({self.level}){but}{known}"
        page = f"\n  page    {self.page}" if self.page else ""
        holds = f"wrong; the strongest level that holds: {self.level}"
        if self.not_judged:
            holds = "not judged: every history that compares a view ended in a finding"
        return f"{self.failure}{page}\n{counts}{holds}{known}"


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of one history on a backend. True if nothing is wrong."""

    #: Each call and its answer.
    calls: tuple[str, ...]
    finding: Finding | None
    page: pathlib.Path | None

    @property
    def ok(self) -> bool:
        """Whether the cache did what it should."""
        return self.finding is None

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.finding is None:
            return "\n".join(self.calls) + "\nno difference"
        page = f"\n  page    {self.page}" if self.page else ""
        return self.finding.text + page


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
            why = re.sub(
                "KVTWIN_CAN_[A-Z_]+",  # The name that C has for the ability.
                lambda name: repr(name[0].removeprefix("KVTWIN_CAN_").lower()),
                self.not_judged,
            )
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
    """The rules that a class follows (docs/profiles.md). True if some rules explain
    all of its answers."""

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

    def __bool__(self) -> bool:
        return not self.unexplained

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
