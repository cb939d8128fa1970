"""Campaigns: the searches of the command `kvtwin` on many processors, by Ray.

    python -m kvtwin.campaign fuzz --ops 100000000 --seed 1 --workers 64
    python -m kvtwin.campaign laws --runs 100000 --store s3://bucket/laws
    python -m kvtwin.campaign museum --patches props/museum -- --build build
    python -m kvtwin.campaign mutants --python build/mutants/venv/bin/python
    python -m kvtwin.campaign explore --cells 6 --store runs/six

The report is the same for any number of workers. Results are stored, and a campaign
that was ended continues from them. The exit code is 1 after a finding, and 2
if the campaign could not run (docs/campaign.md).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from kvtwin._command import command_path
from kvtwin.campaign._explore import Explore
from kvtwin.campaign._searches import SEARCHES, Answer, Search
from kvtwin.campaign._shards import (
    CampaignError,
    Cost,
    Progress,
    run_shards,
    start_ray,
)
from kvtwin.campaign._store import Store, StoreError, as_uri

__all__ = ["main"]

_STARTS_MOST = 100


class _Ended(BaseException):
    """A signal asks the campaign to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _end(number: int, _frame: object) -> NoReturn:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)  # A second signal ends it at once.
    raise _Ended(number)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"it is {value}, it must be 1 or more")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"it is {value}, it must be 0 or more")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m kvtwin.campaign", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "Options after -- are those of the command: -- --kind swa --dtypes"
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--workers", type=_count, default=os.cpu_count() or 1,
        help="programs at a time; with --address, a guess of how many there can be",
    )
    common.add_argument("--address", help="of a Ray cluster: auto, or ray://HOST:10001")
    common.add_argument("--store", help="a folder, or a URI such as s3://bucket/run")
    common.add_argument("--command", default=command_path(), help="the command kvtwin")
    common.add_argument("--json", action="store_true", help="print one JSON object")
    subs = parser.add_subparsers(dest="campaign", required=True)

    fuzz = subs.add_parser("fuzz", parents=[common], help="random histories")
    fuzz.add_argument("--ops", type=_count, required=True, help="operations, at least")
    fuzz.add_argument("--seed", type=_seed, default=1)
    fuzz.add_argument(
        "--shard-ops", type=_count, default=500_000, help="operations of a shard"
    )
    laws = subs.add_parser("laws", parents=[common], help="all laws")
    laws.add_argument("--runs", type=_count, default=10_000, help="histories of each law")
    laws.add_argument("--seed", type=_seed, default=1)
    laws.add_argument("--shard-runs", type=_count, default=1000, help="histories of a shard")
    museum = subs.add_parser("museum", parents=[common], help="bugs of other caches")
    museum.add_argument("--patches", default="props/museum", help="the folder of the bugs")
    museum.add_argument("--seeds", type=_count, default=20, help="seeds for each bug")
    mutants = subs.add_parser("mutants", parents=[common], help="mutants of kvtwin: ./dev mutants")
    mutants.add_argument("--parts", type=_count, default=90, help="shards")
    mutants.add_argument("--repository", default=".", help="the folder of kvtwin")
    mutants.add_argument("--python", default="python3", help="which has universalmutator")
    backends = subs.add_parser(
        "backends", parents=[common], help="caches of other projects: ./dev backends"
    )
    backends.add_argument("names", nargs="+", help="projects, such as transformers mlx")
    backends.add_argument("--repository", default=".", help="the folder of kvtwin")
    explore = subs.add_parser("explore", parents=[common], help="all states of small caches")
    explore.add_argument("--cells", type=_count, default=5)
    explore.add_argument("--sequences", type=_count, default=2)
    explore.add_argument("--positions", type=_count, default=4)
    explore.add_argument(
        "--partitions", type=_count, default=2, help="actors, which know the states"
    )
    return parser


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    given = list(sys.argv[1:] if words is None else words)
    end = given.index("--") if "--" in given else len(given)
    parser = _parser()
    asked = parser.parse_args(given[:end])
    asked.options = given[end + 1 :]
    if asked.address is not None and asked.store is None:
        parser.error("--address needs --store: a place that all machines see")
    return asked


class _Shards:
    """The shards of a search, and their answers so far."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._answers: dict[str, Answer] = {}
        self.parameters = search.parameters

    def run(self, ray: Any, store: Store, cost: Cost, progress: Progress) -> None:
        counted = 0
        start = time.monotonic()
        while shards := self._search.next(self._answers):
            left = [shard for shard in shards if shard.name not in self._answers]
            for shard, result in run_shards(ray, store, left, cost):
                self._answers[shard.name] = result["answer"]
                counted += self._search.count(result["answer"])
                cost.seconds = time.monotonic() - start
                progress.show(
                    f"{counted} {self._search.unit}, {len(self._answers)} shards, "
                    f"{cost.seconds:.0f} s, {cost.cpu_seconds:.0f} s of processors"
                )

    def report(self) -> dict[str, Any]:
        return self._search.report(self._answers)


def _print(report: dict[str, Any], cost: Cost) -> None:
    for found in report["findings"]:
        print(found["reason"])
        print(f"  bucket  {found['bucket']}, found by {found['shard']}")
        if "rerun" in found:
            print(f"  rerun   {found['rerun']}")
    for key in ("operations", "histories", "states", "transitions"):
        if key in report:
            print(f"{report[key]} {key}, ", end="")
    print(
        f"{report['differences']} differences, digest {report['digest']}"
        f"{'' if report['complete'] else ', not complete'}; {cost.seconds:.1f} s, "
        f"{cost.cpu_seconds:.1f} s of processors, {cost.reused} shards were stored already"
    )


def _run(run: _Shards | Explore, asked: argparse.Namespace, store: Store, cost: Cost) -> int:
    """Runs all of a campaign. Returns the signal that ended it, or 0."""
    progress = Progress()
    try:
        for start in range(_STARTS_MOST):
            ray = start_ray(asked.workers, asked.address)
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, _end)
            try:
                run.run(ray, store, cost, progress)
                return 0
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None)
                if cause is not None and not isinstance(cause, ray.exceptions.ObjectLostError):
                    raise cause from None  # As it was raised in the worker.
                # Ray itself died here, and not a worker.
                if asked.address is not None or start == _STARTS_MOST - 1:
                    raise CampaignError(f"Ray ended: {error}") from error
                print(f"kvtwin.campaign: Ray starts again: {error}", file=sys.stderr)
            finally:
                ray.shutdown()
    except _Ended as signalled:
        return signalled.number
    finally:
        progress.end()
    raise AssertionError("it has returned or raised")


def _campaign(asked: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="kvtwin-campaign-") as scratch:
        store = Store(as_uri(asked.store or scratch))
        explores = asked.campaign == "explore"
        run = Explore(asked) if explores else _Shards(SEARCHES[asked.campaign](asked))
        store.begin(run.parameters())
        cost = Cost(workers=asked.workers)
        # Ray says on the standard output that a worker died.
        with contextlib.redirect_stdout(sys.stderr):
            ended = _run(run, asked, store, cost)
    used = resource.getrusage(resource.RUSAGE_SELF)
    report = {"campaign": asked.campaign, **run.report()}
    if asked.json:
        driver = used.ru_utime + used.ru_stime
        costs = {**vars(cost), "driver_cpu_seconds": driver}
        print(json.dumps({**report, "cost": costs}))
    else:
        _print(report, cost)
    if ended:
        return 128 + ended
    return 1 if report["differences"] else 0


def main(words: Sequence[str] | None = None) -> int:
    """Runs a campaign, and returns the exit code."""
    asked = _arguments(words)
    try:
        return _campaign(asked)
    except (CampaignError, StoreError) as error:
        print(f"kvtwin.campaign: {error}", file=sys.stderr)
        return 2
