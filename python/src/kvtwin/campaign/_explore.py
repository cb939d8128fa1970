"""The explorer on many processors.

States are numbers, as `kvtwin explore --batches` has them. They are divided by hash
among partitions. A partition is an actor that knows the states that it has seen. A
round expands all states of one depth in batches. A batch is a task without a memory;
the states that it finds go to the actors without passing through the driver. The new
states of a partition in a round depend on the partition alone, and are stored when the
round ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtwin.campaign._searches import Answer, crash_of, digest_of
from kvtwin.campaign._shards import (
    KILLED_MOST,
    KILLS,
    CampaignError,
    Cost,
    Progress,
    cpu_seconds,
    crash,
    parameters_of,
)
from kvtwin.campaign._store import DamagedError, Store

States = NDArray[np.uint64]
Found = NDArray[np.uint64]  # (n, 3): the state, its parent, the step.

_BATCH_MOST = 20_000
_BATCH_LEAST = 64
_BATCHES = 8  # A round has this many for each worker, unless they are too small.
_ODD = np.uint64(0x9E3779B97F4A7C15)


def partition_of(states: States, partitions: int) -> NDArray[np.int64]:
    """Returns the partition of each state."""
    mixed = (states * _ODD) >> np.uint64(32)
    return (mixed % np.uint64(partitions)).astype(np.int64)


def digest_of_states(states: States, depth: int) -> int:
    """Returns a hash that does not depend on the order of the states."""
    mixed = (states ^ np.uint64(depth + 1)) * _ODD
    mixed = (mixed ^ (mixed >> np.uint64(29))) * _ODD
    return int((mixed ^ (mixed >> np.uint64(32))).sum(dtype=np.uint64))


class Program:
    """The command that expands states, in a process of its own."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words = words
        self._process: subprocess.Popen[bytes] | None = None
        # A pipe, which is read only at the end, would block a program that prints much.
        self._errors = tempfile.TemporaryFile(buffering=0)

    def ask(self, request: str, body: bytes = b"") -> tuple[Answer, bytes]:
        """Returns the answer and the states that were found.

        The answer of a program that a signal ended has the signal as `crash`.
        """
        for _ in range(KILLED_MOST):
            process = self._process or self._start()
            answer = self._ask(process, request, body)
            if answer is not None:
                return answer
            process.communicate()
            code, self._process = process.returncode, None
            if code not in KILLS:
                break
        if code in KILLS:
            raise CampaignError(f"{self._words[0]}: it was killed {KILLED_MOST} times")
        error = self._error_text()
        if code >= 0:
            raise CampaignError(f"{self._words[0]} exited with {code}: {error}")
        return crash(code, error), b""

    def _start(self) -> subprocess.Popen[bytes]:
        self._errors.seek(0)
        self._errors.truncate()
        try:
            self._process = subprocess.Popen(
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        except OSError as error:
            raise CampaignError(f"{self._words[0]}: {error.strerror}") from error
        return self._process

    def _error_text(self) -> str:
        """Returns the end of the program's standard error."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 500))
        return self._errors.read().decode(errors="replace").strip()

    @staticmethod
    def _ask(
        process: subprocess.Popen[bytes], request: str, body: bytes
    ) -> tuple[Answer, bytes] | None:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request.encode() + b"\n" + body)
            process.stdin.flush()
        except BrokenPipeError:
            return None
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            return None
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise CampaignError(f"--command: an answer is not JSON: {line[:200]!r}") from error
        size = 24 * answer.get("found", 0) if isinstance(answer, dict) else 0
        found = process.stdout.read(size)
        return (answer, found) if len(found) == size else None

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None


_programs: dict[tuple[str, ...], Program] = {}  # The programs of this worker.


def _program(words: tuple[str, ...]) -> Program:
    return _programs.setdefault(words, Program(words))


def _expand(
    words: tuple[str, ...], case: int, states: States, begin: int, end: int, partitions: int
) -> list[Any]:
    """Expands a batch. Returns the answer, and the states that it found by partition."""
    start = cpu_seconds()
    body = states[begin:end].astype("<u8").tobytes()
    answer, found = _program(words).ask(f"expand {case} {end - begin}", body)
    rows: Found = np.frombuffer(found, dtype="<u8").reshape(-1, 3)
    owner = partition_of(rows[:, 0], partitions)
    by_owner = [rows[owner == number] for number in range(partitions)]
    answer["first"] = int(states[begin])
    answer["worker_cpu_seconds"] = cpu_seconds() - start
    return [answer, *by_owner]


def _along(words: tuple[str, ...], case: int, path: Found) -> Answer:
    """Returns the failure of the last state of a path, shrunk and explained."""
    body = path.astype("<u8").tobytes()
    return _program(words).ask(f"along {case} {len(path)}", body)[0]


def merged(seen: States, batches: Iterator[Found]) -> Found:
    """Returns the rows of new states, each once, by the least parent and step."""
    fresh = [np.zeros((0, 3), np.uint64)]
    for rows in batches:
        at = np.searchsorted(seen, rows[:, 0])
        known = at < len(seen)
        known[known] = seen[at[known]] == rows[known, 0]
        fresh.append(rows[~known])
    rows = np.concatenate(fresh)
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    first = np.ones(len(rows), bool)
    first[1:] = rows[1:, 0] != rows[:-1, 0]
    return rows[first]


class Partition:
    """An actor: the states of one partition, by the round in which they were found."""

    def __init__(self, uri: str, number: int) -> None:
        self._store = Store(uri)
        self._number = number
        self._case = -1
        self._rounds: list[Found] = []
        self._seen = np.zeros(0, np.uint64)

    def _name(self, round_: int) -> str:
        return f"case-{self._case}-round-{round_}-part-{self._number}.npy"

    def _add(self, rows: Found) -> None:
        self._rounds.append(rows)
        both = np.concatenate([self._seen, rows[:, 0]])
        both.sort(kind="stable")
        self._seen = both

    def load(self, case: int) -> list[str]:
        """Reads the stored rounds of a case. Returns the names of damaged files."""
        self._case, self._rounds = case, []
        self._seen = np.zeros(0, np.uint64)
        names = self._store.names()
        while (name := self._name(len(self._rounds))) in names:
            try:
                rows = self._store.read_array(name)
                if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype != np.uint64:
                    raise DamagedError(f"{name}: it has no states")
            except DamagedError as error:
                return [str(error)]
            self._add(rows)
        return []

    def has(self, case: int, round_: int) -> bool:
        """Returns whether the states of a round are known."""
        if case != self._case:
            self.load(case)  # The actor was restarted.
        return round_ < len(self._rounds)

    def absorb(self, case: int, round_: int, refs: list[Any]) -> tuple[Answer, States]:
        """Keeps the states of a round that are new, and returns them."""
        import ray

        start = cpu_seconds()
        if not self.has(case, round_):
            # A stored round has no refs: it must be there when the actor is restarted.
            if round_ != len(self._rounds) or (round_ > 0 and not refs):
                raise CampaignError(f"{self._name(len(self._rounds))}: it was damaged just now")
            rows = merged(self._seen, (ray.get(ref) for ref in refs))
            self._store.write_array(self._name(round_), rows)
            self._add(rows)
        states = np.ascontiguousarray(self._rounds[round_][:, 0])
        answer = {
            "states": len(states),
            "digest": digest_of_states(states, round_),
            "cpu_seconds": cpu_seconds() - start,
        }
        return answer, states

    def origin(self, case: int, round_: int, state: int) -> tuple[int, int]:
        """Returns the parent and the step of a state of a round."""
        assert self.has(case, round_)
        rows = self._rounds[round_]
        row = rows[np.searchsorted(rows[:, 0], np.uint64(state))]
        return int(row[1]), int(row[2])


@dataclasses.dataclass
class _Case:
    """The result of one kind of cache."""

    case: str
    states: int = 0
    transitions: int = 0
    differences: int = 0
    depth: int = 0
    fixed_point: bool = False
    digest: int = 0
    not_made: bool = False
    # The first state that failed: the least of the first round that has any.
    failed: tuple[int, int] | None = None  # The round, and the state.
    crash: Answer | None = None  # The crash of the batch with the least first state.


class Explore:
    """Every state that small caches can reach."""

    name = "explore"

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        sizes = [f"--{name}={getattr(asked, name)}" for name in self._sizes]
        self._words = (asked.command, "explore", "--batches", *sizes, *asked.options)
        program = Program(self._words)
        self.cases: list[str] = list(program.ask("cases")[0])
        program.close()
        self._results: list[_Case] = []
        self._findings: dict[str, Answer] = {}

    _sizes = ("cells", "sequences", "positions")

    def parameters(self) -> dict[str, Any]:
        return {
            "campaign": self.name,
            **{name: getattr(self._asked, name) for name in self._sizes},
            "partitions": self._asked.partitions,
            **parameters_of(self._asked.command, self._asked.options),
        }

    def run(self, ray: Any, store: Store, cost: Cost, progress: Progress) -> None:
        """Explores all cases."""
        actor = ray.remote(num_cpus=0, max_restarts=1000, max_task_retries=1000)(Partition)
        actors = [actor.remote(store.uri, i) for i in range(self._asked.partitions)]
        ray.get([actor.load.remote(-1) for actor in actors])
        self._results, self._findings, cost.seconds = [], {}, 0
        for number, name in enumerate(self.cases):
            result = _Case(name)
            self._results.append(result)
            run = _CaseRun(self, ray, store, cost, progress, actors, number, result)
            run.run()
            if result.failed or result.crash:
                self._add_finding(run, result)

    def _add_finding(self, run: _CaseRun, result: _Case) -> None:
        found = result.crash or run.finding()
        if "crash" in found:
            found = crash_of(found, result.case)
        found.setdefault("bucket", found.get("check", "failed"))
        self._findings.setdefault(found["bucket"], {**found, "shard": result.case})

    def report(self) -> dict[str, Any]:
        made = [result for result in self._results if not result.not_made]
        complete = len(self._results) == len(self.cases) and all(
            result.fixed_point for result in made
        )
        cases = []
        for result in made:
            case = dataclasses.asdict(result)
            for key in ("not_made", "failed", "crash"):
                del case[key]
            cases.append({**case, "digest": f"{result.digest:016x}"})
        return {
            "states": sum(result.states for result in made),
            "transitions": sum(result.transitions for result in made),
            "differences": sum(result.differences for result in made),
            "digest": digest_of((case["case"], case["digest"]) for case in cases),
            "complete": complete,
            "cases": cases,
            "findings": list(self._findings.values()),
        }

    @property
    def words(self) -> tuple[str, ...]:
        return self._words

    @property
    def partitions(self) -> int:
        return int(self._asked.partitions)


@dataclasses.dataclass
class _CaseRun:
    """The exploration of one kind of cache."""

    explore: Explore
    ray: Any
    store: Store
    cost: Cost
    progress: Progress
    actors: list[Any]
    number: int
    result: _Case
    crashed: int = 0  # The first state of the batch that crashed.
    began: float = dataclasses.field(default_factory=time.monotonic)

    def _summary(self, round_: int) -> str:
        return f"case-{self.number}-round-{round_}.json"

    def run(self) -> None:
        result, before = self.result, self.cost.seconds
        loads = [actor.load.remote(self.number) for actor in self.actors]
        for damaged in self.ray.get(loads):
            for text in damaged:
                print(f"kvtwin.campaign: done again: {text}", file=sys.stderr)
        expand = self.ray.remote(num_cpus=1, max_retries=1000)(_expand)
        found: list[list[Any]] = [[] for _ in self.actors]
        root = np.zeros((1, 3), np.uint64)
        found[int(partition_of(root[:, 0], len(found))[0])] = [self.ray.put(root)]
        round_ = 0
        while True:
            frontier = self._absorb(round_, found)
            sizes = [size for size, _ in frontier]
            if sum(sizes) == 0:
                result.fixed_point = True
                break
            result.depth = round_
            self.cost.seconds = before + time.monotonic() - self.began
            summary = self._stored(round_)
            if summary is None:
                summary, found = self._round(expand, round_, frontier)
                if summary is None:
                    break
            else:
                found = [[] for _ in self.actors]  # The actors have the next round.
            result.transitions += summary["checked"]
            result.differences += summary["differences"]
            if summary["failed"] is not None and result.failed is None:
                result.failed = (round_, summary["failed"])
            round_ += 1
        self.cost.seconds = before + time.monotonic() - self.began

    def _absorb(self, round_: int, found: list[list[Any]]) -> list[tuple[int, Any]]:
        """Gives the found states to the actors. Returns the new states of each actor."""
        calls = [
            actor.absorb.options(num_returns=2).remote(self.number, round_, refs)
            for actor, refs in zip(self.actors, found, strict=True)
        ]
        frontier = []
        for answer_ref, states in calls:
            answer = self.ray.get(answer_ref)
            self.result.states += answer["states"]
            self.result.digest = (self.result.digest + answer["digest"]) % 2**64
            self.cost.worker_cpu_seconds += answer["cpu_seconds"]
            frontier.append((answer["states"], states))
        return frontier

    def _stored(self, round_: int) -> Answer | None:
        """Returns the summary of a round whose successors are all stored."""
        names = self.store.names()
        parts = [
            f"case-{self.number}-round-{round_ + 1}-part-{i}.npy"
            for i in range(len(self.actors))
        ]
        if self._summary(round_) not in names or not names.issuperset(parts):
            return None
        calls = [actor.has.remote(self.number, round_ + 1) for actor in self.actors]
        loaded = self.ray.get(calls)
        if not all(loaded):
            return None
        try:
            summary = self.store.read(self._summary(round_))
            if not {"checked", "differences", "failed"} <= summary.keys():
                raise DamagedError(f"{self._summary(round_)}: it has no counts")
        except DamagedError as error:
            print(f"kvtwin.campaign: done again: {error}", file=sys.stderr)
            return None
        self.cost.reused += 1
        return summary

    def _round(
        self, expand: Any, round_: int, frontier: list[tuple[int, Any]]
    ) -> tuple[Answer | None, list[list[Any]]]:
        """Expands all states of a round. Returns its summary, and the found states."""
        size = -(-sum(size for size, _ in frontier) // (_BATCHES * self.cost.workers))
        size = min(max(size, _BATCH_LEAST), _BATCH_MOST)
        partitions = len(self.actors)
        task = expand.options(num_returns=1 + partitions)
        found: list[list[Any]] = [[] for _ in self.actors]
        summary: Answer = {"checked": 0, "differences": 0, "failed": None}
        running: list[Any] = []
        ended = False

        def take(most: int) -> None:
            nonlocal running, ended
            while len(running) > most:
                done, running = self.ray.wait(running, num_returns=1)
                ended = self._count(self.ray.get(done[0]), summary) or ended

        for count, states in frontier:
            for begin in range(0, count, size):
                end = min(count, begin + size)
                answer, *parts = task.remote(
                    self.explore.words, self.number, states, begin, end, partitions
                )
                running.append(answer)
                for refs, part in zip(found, parts, strict=True):
                    refs.append(part)
                take(3 * self.cost.workers)
        take(0)
        if ended:
            # The counts of this round depend on the batches, and so on the workers.
            self.result.differences += 0 if self.result.not_made else 1
            if summary["failed"] is not None and self.result.failed is None:
                self.result.failed = (round_, summary["failed"])
            return None, found
        self.store.write(self._summary(round_), summary)
        return summary, found

    def _count(self, answer: Answer, summary: Answer) -> bool:
        """Adds the answer for a batch. Returns whether the exploration ends."""
        self.cost.worker_cpu_seconds += answer.pop("worker_cpu_seconds")
        first = answer.pop("first")
        if "crash" in answer:
            if self.result.crash is None or first < self.crashed:
                self.result.crash, self.crashed = answer, first
            summary["differences"] += 1
            return True
        self.cost.cpu_seconds += answer["cpu_seconds"]
        summary["checked"] += answer["checked"]
        summary["differences"] += answer["differences"]
        if answer["failed"] is not None:
            known = summary["failed"]
            least = answer["failed"] if known is None else min(known, answer["failed"])
            summary["failed"] = least
        self.result.not_made = self.result.not_made or answer["not_made"]
        self.progress.show(
            f"{self.result.case}: {self.result.states} states, depth {self.result.depth}, "
            f"{self.cost.cpu_seconds:.0f} s of processors"
        )
        return bool(answer["ended"] or answer["not_made"])

    def finding(self) -> Answer:
        """Returns the failure of the first state that failed."""
        assert self.result.failed is not None
        round_, state = self.result.failed
        path = []
        for depth in range(round_, 0, -1):
            owner = int(partition_of(np.array([state], np.uint64), len(self.actors))[0])
            call = self.actors[owner].origin.remote(self.number, depth, state)
            parent, step = self.ray.get(call)
            path.append((state, parent, step))
            state = parent
        rows = np.array(path[::-1], np.uint64).reshape(-1, 3)
        task = self.ray.remote(num_cpus=1, max_retries=1000)(_along)
        answer: Answer = self.ray.get(task.remote(self.explore.words, self.number, rows))
        return answer
