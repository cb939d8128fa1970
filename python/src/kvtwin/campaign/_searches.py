"""The programs that each campaign runs, and the report of their results.

A report depends on the options alone: neither on the number of workers nor on the
order in which shards end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from kvtwin.campaign._shards import (
    WORKER,
    CampaignError,
    Shard,
    hash_of_file,
    parameters_of,
    run_program,
)

Answer = dict[str, Any]
Answers = Mapping[str, Answer]  # By the name of the shard.

_LAST_WAVE = 11  # The first wave is 1. In each later wave, shards run again.
# Keys that differ from run to run.
_VARYING = {"seconds", "operations_per_second", "worst_seconds", "printed"}


def seed_of(seed: int, number: int) -> int:
    """Returns the seed of a shard: shards of all seeds have different seeds."""
    digest = hashlib.sha256(f"kvtwin {seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2  # The command takes 62 bits.


def digest_of(parts: Iterable[tuple[str, Any]]) -> str:
    """Returns a hash of the shards' digests, in the order of the shards."""
    whole = hashlib.sha256()
    for name, part in parts:
        whole.update(f"{name} {part}\n".encode())
    return whole.hexdigest()[:16]


def without_varying(value: Any) -> Any:
    """Returns a copy of an answer without the keys that differ from run to run."""
    if isinstance(value, dict):
        return {k: without_varying(v) for k, v in value.items() if k not in _VARYING}
    if isinstance(value, list):
        return [without_varying(item) for item in value]
    return value


def text_of(answer: Answer) -> str:
    return json.dumps(without_varying(answer), sort_keys=True)


class Search(Protocol):
    """A campaign of shards."""

    name: str
    unit: str  # Progress counts these.

    def parameters(self) -> dict[str, Any]:
        """Returns the parameters that the report depends on."""

    def next(self, answers: Answers) -> Sequence[Shard]:
        """Returns the shards to run next; none at the end."""

    def count(self, answer: Answer) -> int:
        """Returns the number of units that an answer adds to the progress."""

    def report(self, answers: Answers) -> dict[str, Any]:
        """Returns the report. Its `findings` have a bucket each."""


def _parts(finding: Answer) -> tuple[str, list[str]]:
    """Returns the check that failed, and the kinds and operations of the history."""
    signature, *parts = str(finding["bucket"]).split("+")
    return signature, parts


def _holds(parts: Sequence[str], some: Sequence[str]) -> bool:
    """Whether `parts` has all of `some`, in this order."""
    rest = iter(parts)
    return all(part in rest for part in some)


class Buckets:
    """The bugs of all shards, each found by the lowest shard and shrunk once.

    Findings come unshrunk. A finding is of a known bug if the same comparison fails
    and its history has the operations of the bug's shortest history, in their order;
    any other is shrunk.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[Any, str], Answer] = {}
        self._known: list[tuple[Any, str, list[str]]] = []

    def is_known(self, finding: Answer) -> bool:
        signature, parts = _parts(finding)
        return any(
            level == finding.get("level") and of == signature and _holds(parts, some)
            for level, of, some in self._known
        )

    def names(self) -> list[str]:
        """Returns the buckets that the command can pass over."""
        kept = self.kept.items()
        return sorted({bucket for (_, bucket), finding in kept if "crash" not in finding})

    def add(self, shard: str, found: Sequence[Answer], shrunk: Sequence[Answer]) -> None:
        """Adds the findings of a shard, and the same findings after shrinking."""
        for finding in shrunk:
            key = (finding.get("level"), finding["bucket"])
            self.kept.setdefault(key, {**finding, "shard": shard})
        for finding in found:
            signature, _ = _parts(finding)
            level = finding.get("level")
            at_level = [known for known in shrunk if known.get("level") == level] or shrunk
            same = [known for known in at_level if _parts(known)[0] == signature]
            for known in same or at_level:
                self._known.append((level, signature, _parts(known)[1]))


_FINDING_KEYS = ("level", "check", "bucket", "history", "shrunk_to", "reason", "rules", "rerun")


def _kind_of(text: str) -> str:
    """Returns the kind of cache of the history in a text; empty without a history."""
    found = re.search(r"\bkv([tp])1 ([^|]*)", text)
    if found is None:
        return ""
    kind = re.search(r"\bkind=(\w+)", found[2])
    return kind[1] if kind else {"t": "causal", "p": "paged"}[found[1]]


def crash_of(answer: Answer, what: str = "") -> Answer:
    """Returns the finding of a program that a signal ended. Its bucket names the signal
    and `what` ran, or else the kind of cache of the history that ran."""
    parts = ["crash", str(answer["crash"]), what or _kind_of(answer["reason"])]
    return {**answer, "bucket": "-".join(filter(None, parts))}


def findings_in(answer: Answer) -> list[Answer]:
    """Returns the findings of `kvtwin fuzz`."""
    if "crash" in answer:
        return [crash_of(answer)]
    found = answer.get("findings")
    if found is None:
        found = [answer] if "bucket" in answer else []
    return [{key: finding[key] for key in _FINDING_KEYS if key in finding} for finding in found]


class Fuzz:
    """Random histories: shards of --shard-ops operations, each with its own seed."""

    name = "fuzz"
    unit = "operations"

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        count = -(-asked.ops // asked.shard_ops)
        self._shards = [self._shard(number) for number in range(count)]

    def _shard(self, number: int) -> Shard:
        ops = min(self._asked.shard_ops, self._asked.ops - number * self._asked.shard_ops)
        words = [self._asked.command, "fuzz", "--ops", str(ops), "--json", "--unshrunk"]
        words += ["--seed", str(seed_of(self._asked.seed, number)), *self._asked.options]
        return Shard(f"fuzz-{number}", tuple(words), "operations")

    @staticmethod
    def _shrinking(shard: Shard) -> Shard:
        words = tuple(word for word in shard.words if word != "--unshrunk")
        return Shard(f"shrunk-{shard.name}", words, shard.key)

    def parameters(self) -> dict[str, Any]:
        return {
            "campaign": self.name,
            "ops": self._asked.ops,
            "seed": self._asked.seed,
            "shard_ops": self._asked.shard_ops,
            **parameters_of(self._asked.command, self._asked.options),
        }

    def count(self, answer: Answer) -> int:
        return int(answer["operations"])

    def _again(self, shard: Shard, wave: int, known: Sequence[str]) -> Shard:
        """Returns a shard to its end, past the findings that are known."""
        words = ("--known", *known, *shard.words[2:])
        name = f"wave-{wave}-{shard.name}"
        return Shard(name, (*shard.words[:2], *words), shard.key)

    def _plan(self, answers: Answers) -> tuple[Buckets, dict[str, Answer], list[Shard]]:
        """Returns the bugs, the last answer of each shard, and the shards to run next.

        A shard ends with its first finding. The first wave has all shards; each
        further wave has those that ended early, past the bugs that are known by then.
        """
        buckets, last, known = Buckets(), dict[str, Answer](), list[str]()
        wave = {shard.name: shard for shard in self._shards}
        for number in range(1, _LAST_WAVE + 1):
            wanted = [shard for shard in wave.values() if shard.name not in answers]
            early, shrinks = [], False
            for name, shard in wave.items():
                if shard.name not in answers:
                    continue
                answer = last[name] = answers[shard.name]
                found = findings_in(answer)
                if found and "crash" not in answer:
                    early.append(name)
                if number == 1:
                    found = [finding for finding in found if not buckets.is_known(finding)]
                shrunk = found
                if found and number == 1 and "crash" not in answer:
                    shrinking = self._shrinking(shard)
                    if shrinking.name not in answers and not wanted:
                        wanted, shrinks = [shrinking], True
                    shrunk = findings_in(answers.get(shrinking.name, {})) or found
                buckets.add(name, found, shrunk)
                if shrinks:
                    break
            before, known = known, buckets.names()
            if wanted or not early or known == before:
                return buckets, last, wanted
            wave = {
                shard.name: self._again(shard, number, known)
                for shard in self._shards
                if shard.name in early
            }
        return buckets, last, []

    def next(self, answers: Answers) -> Sequence[Shard]:
        return self._plan(answers)[2]

    def report(self, answers: Answers) -> dict[str, Any]:
        buckets, last, left = self._plan(answers)
        findings = list(buckets.kept.values())
        return {
            "operations": sum(answer["operations"] for answer in last.values()),
            "histories": sum(answer.get("histories", 0) for answer in last.values()),
            "differences": len(findings),
            "digest": digest_of(
                (name, answer.get("digest", text_of(answer)))
                for name, answer in last.items()
            ),
            "seed": self._asked.seed,
            "shards": len(last),
            "complete": not left,
            "findings": findings,
        }


class Each:
    """A campaign whose shards are known at the start and do not depend on others."""

    name = ""
    unit = "shards"

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._shards = self.shards()

    def shards(self) -> list[Shard]:
        raise NotImplementedError

    def findings(self, shard: Shard, answer: Answer) -> list[Answer]:
        raise NotImplementedError

    def summary(self, answers: Answers) -> dict[str, Any]:
        """Returns keys of the report beside those of every campaign."""
        return {}

    def arguments(self) -> dict[str, Any]:
        """Returns the parameters beside those of every campaign."""
        return {}

    def parameters(self) -> dict[str, Any]:
        named = {"campaign": self.name, **self.arguments()}
        return {**named, **parameters_of(self._asked.command, self._asked.options)}

    def count(self, answer: Answer) -> int:
        return 1

    def next(self, answers: Answers) -> Sequence[Shard]:
        left = any(shard.name not in answers for shard in self._shards)
        return self._shards if left else []

    def report(self, answers: Answers) -> dict[str, Any]:
        done = [shard for shard in self._shards if shard.name in answers]
        kept: dict[str, Answer] = {}
        for shard in done:
            for found in self.findings(shard, answers[shard.name]):
                kept.setdefault(found["bucket"], {**found, "shard": shard.name})
        return {
            **self.summary(answers),
            "differences": len(kept),
            "digest": digest_of((shard.name, text_of(answers[shard.name])) for shard in done),
            "shards": len(done),
            "complete": not self.next(answers),
            "findings": list(kept.values()),
        }


class Laws(Each):
    """All laws, or the law that the options name; in blocks of histories."""

    name = "laws"
    unit = "blocks"

    def shards(self) -> list[Shard]:
        blocks = -(-self._asked.runs // self._asked.shard_runs)
        made = []
        for law in self._laws():
            for block in range(blocks):
                start = block * self._asked.shard_runs
                runs = min(self._asked.shard_runs, self._asked.runs - start)
                seed = seed_of(self._asked.seed, block)
                words = [self._asked.command, "laws", "--law", law, "--runs", str(runs)]
                words += ["--seed", str(seed), "--json", *self._asked.options]
                made.append(Shard(f"law-{law}-{block}", tuple(words), "laws"))
        return made

    def _laws(self) -> list[str]:
        words = [self._asked.command, "laws", "--runs", "1", "--json", *self._asked.options]
        result = run_program(Shard("laws", tuple(words), "laws"))
        if "crash" in result["answer"]:
            raise CampaignError(f"{words[0]}: {result['answer']['reason']}")
        return list(dict.fromkeys(law["law"] for law in result["answer"]["laws"]))

    def arguments(self) -> dict[str, Any]:
        return {
            "runs": self._asked.runs,
            "seed": self._asked.seed,
            "shard_runs": self._asked.shard_runs,
        }

    def findings(self, shard: Shard, answer: Answer) -> list[Answer]:
        if "crash" in answer:
            return [crash_of(answer, shard.name.rpartition("-")[0])]
        return [
            {"bucket": f"{_who(law)}-{law['law']}", **without_varying(law)}
            for law in answer["laws"]
            if law["holds"] is False
        ]

    def summary(self, answers: Answers) -> dict[str, Any]:
        laws: dict[tuple[str, str], Answer] = {}
        for shard in self._shards:
            for run in answers.get(shard.name, {}).get("laws", []):
                law = laws.setdefault(
                    (run["law"], _who(run)),
                    {"law": run["law"], "on": _who(run), "histories": 0, "judged": 0,
                     "holds": None},
                )
                law["histories"] += run["histories"]
                law["judged"] += run["judged"]
                if run["holds"] is not None and law["holds"] is not False:
                    law["holds"] = run["holds"]
        return {"seed": self._asked.seed, "laws": list(laws.values())}


def _who(law: Answer) -> str:
    return str(law.get("twin", law.get("backend")))


class Museum(Each):
    """Each bug of the museum, which `kvtwin fuzz` must find by each of its seeds."""

    name = "museum"
    unit = "bugs"

    def shards(self) -> list[Shard]:
        folder = pathlib.Path(self._asked.patches)
        twin = "cuda" if "cuda" in self._asked.options else "optimized"
        made = []
        for patch in sorted(folder.glob("*.patch")):
            header = patch.read_text(encoding="utf-8").partition("\n---")[0]
            if any(f"\ntwin: {other}" in f"\n{header}" for other in {"optimized", "cuda"} - {twin}):
                continue
            words = [self._asked.command, "museum", "--json", "--threads", "1"]
            words += ["--patches", str(folder.resolve()), "--only", patch.stem]
            words += ["--seeds", str(self._asked.seeds), *self._asked.options]
            made.append(Shard(f"museum-{patch.stem}", tuple(words), "list"))
        if not made:
            raise CampaignError(f"--patches {folder}: it has no patches")
        return made

    def arguments(self) -> dict[str, Any]:
        folder = pathlib.Path(self._asked.patches)
        patches = digest_of(
            (patch.name, hash_of_file(patch)) for patch in sorted(folder.glob("*.patch"))
        )
        return {"seeds": self._asked.seeds, "patches": patches}

    def findings(self, shard: Shard, answer: Answer) -> list[Answer]:
        if "crash" in answer:
            return [crash_of(answer, shard.name)]
        return [
            {
                "bucket": f"not-found-{bug['id']}",
                "reason": bug.get("error")
                or f"found by {bug['found_by_seeds']} of {bug['seeds']} seeds: {bug['wrong']}",
                "rerun": shlex.join(shard.words),
            }
            for bug in answer["list"]
            if not bug["found"]
        ]

    def summary(self, answers: Answers) -> dict[str, Any]:
        bugs = [
            {"id": bug["id"], "found": bug["found"], "history": bug.get("history")}
            for shard in self._shards
            for bug in answers.get(shard.name, {}).get("list", [])
        ]
        return {"bugs": bugs}


def hash_of_sources(repository: str, store: str | None) -> str:
    """Returns a hash of the files of a clone, without ignored files and the store."""
    root = pathlib.Path(repository).resolve()
    words = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
    done = subprocess.run(
        [*words, "--exclude-standard"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise CampaignError(f"--repository {repository}: {done.stderr.strip()}")
    results = pathlib.Path(store).resolve() if store else None
    files = [root / name for name in sorted(done.stdout.split("\0"))]
    return digest_of(
        (str(file.relative_to(root)), hash_of_file(file))
        for file in files
        if file.is_file() and results not in file.parents
    )


class Mutants(Each):
    """Mutants of kvtwin, which its tests must kill (docs/mutants.md)."""

    name = "mutants"
    unit = "parts"

    def shards(self) -> list[Shard]:
        repository = pathlib.Path(self._asked.repository).resolve()
        script = repository / "props/repo/mutants.py"
        if not script.is_file():
            raise CampaignError(f"--repository {self._asked.repository}: it has no {script.name}")
        # Each worker has a copy of the tree, which it builds once.
        work = str(repository / f"build/mutants/{WORKER}")
        made = []
        for number in range(self._asked.parts):
            part = f"{number}/{self._asked.parts}"
            words = [self._asked.python, str(script), "--part", part, "--work", work, "--json"]
            made.append(Shard(f"mutants-{number}", (*words, *self._asked.options), "counts"))
        return made

    def arguments(self) -> dict[str, Any]:
        sources = hash_of_sources(self._asked.repository, self._asked.store)
        return {"parts": self._asked.parts, "sources": sources}

    def findings(self, shard: Shard, answer: Answer) -> list[Answer]:
        if "crash" in answer:
            return [crash_of(answer, self.name)]
        return [
            {
                "bucket": mutant["key"],
                "reason": f"survived: {mutant['file']}:{mutant['line']}: {mutant['after']}",
                "rerun": f"./dev mutants --only {mutant['file']}",
            }
            for mutant in answer["survived"]
        ]

    def summary(self, answers: Answers) -> dict[str, Any]:
        counts: dict[str, int] = {}
        for shard in self._shards:
            for outcome, count in answers.get(shard.name, {}).get("counts", {}).items():
                counts[outcome] = counts.get(outcome, 0) + count
        return {"counts": counts}


class Backends(Each):
    """The caches of other projects, judged as `./dev backends` does."""

    name = "backends"
    unit = "projects"

    def shards(self) -> list[Shard]:
        dev = pathlib.Path(self._asked.repository).resolve() / "dev"
        if not dev.is_file():
            raise CampaignError(f"--repository {self._asked.repository}: it has no ./dev")
        command = f"KVTWIN={os.path.abspath(self._asked.command)}"
        return [
            Shard(f"backend-{name}", ("env", command, str(dev), "backends", name), "printed")
            for name in self._asked.names
        ]

    def arguments(self) -> dict[str, Any]:
        sources = hash_of_sources(self._asked.repository, self._asked.store)
        return {"names": self._asked.names, "sources": sources}

    def findings(self, shard: Shard, answer: Answer) -> list[Answer]:
        if answer.get("code", 0) == 0:
            return []
        last = (answer.get("printed", "").strip().splitlines() or ["no output"])[-1]
        rerun = shlex.join(shard.words)
        return [{"bucket": f"not-as-its-page-{shard.name}", "reason": last, "rerun": rerun}]


SEARCHES = {search.name: search for search in (Fuzz, Laws, Museum, Mutants, Backends)}
