"""Shards, the parts of a campaign, and their runs on Ray."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import resource
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvtwin.campaign._store import DamagedError, Store

_WINDOW = 4  # Shards of each worker that are handed to Ray at a time.
KILLED_MOST = 5  # A program that is killed this often is an error.
KILLS = (-9, -15)  # Exit codes of a program that was killed from outside.
_LOG_SECONDS = 30.0
WORKER = "{worker}"  # In the words of a program: a name of the worker.
_KEYS = {"answer": dict, "code": int, "cpu_seconds": float}


class CampaignError(Exception):
    """A campaign cannot continue. The text is for users."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """A program to run, whose result is stored under a name."""

    name: str
    words: tuple[str, ...]
    # A key of the object that the program prints as JSON; "list" if it prints a
    # list; "printed" if it prints text.
    key: str

    @property
    def file(self) -> str:
        return f"{self.name}.json"


@dataclasses.dataclass
class Cost:
    """What a campaign took. It differs from run to run, unlike the report."""

    workers: int = 1
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    worker_cpu_seconds: float = 0.0
    reused: int = 0  # Shards that were stored already.


def cpu_seconds(who: int = resource.RUSAGE_SELF) -> float:
    """Returns the processor time that this process, or its children, used."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def crash(code: int, errors: str) -> dict[str, Any]:
    """Returns the keys of an answer of a program that a signal ended."""
    lines = errors.strip().splitlines() or ["it printed nothing"]
    return {"crash": -code, "reason": f"ended by signal {-code}: {lines[-1]}"}


def _parsed(shard: Shard, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Returns the object that a program printed. A list is put into an object."""
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = None
    if isinstance(answer, list):
        answer = {"list": answer}
    if not isinstance(answer, dict) or shard.key not in answer:
        raise CampaignError(f"{shard.name}: {shard.words[0]} printed no {shard.key}: {_said(done)}")
    return answer


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip() or done.stdout.strip())[-500:]


def run_program(shard: Shard) -> dict[str, Any]:
    """Runs the program of a shard, and returns the result that is stored."""
    before = cpu_seconds(resource.RUSAGE_CHILDREN)
    # Machines that share a folder have workers of the same process id.
    worker = f"worker-{socket.gethostname()}-{os.getpid()}"
    words = [word.replace(WORKER, worker) for word in shard.words]
    for _ in range(KILLED_MOST):
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, errors="replace", check=False
            )
        except OSError as error:
            raise CampaignError(f"{shard.name}: {words[0]}: {error.strerror}") from error
        if done.returncode not in KILLS:
            break
    else:
        raise CampaignError(f"{shard.name}: its program was killed {KILLED_MOST} times")
    if done.returncode < 0:
        answer = crash(done.returncode, done.stderr)
        answer |= {"operations": 0, "rerun": shlex.join(shard.words)}
    elif done.returncode > 1 and not (shard.key == "laws" and done.stdout):
        # `kvtwin laws` exits with 2 if a backend cannot be judged by the law.
        raise CampaignError(
            f"{shard.name}: {shard.words[0]} exited with {done.returncode}: {_said(done)}"
        )
    elif shard.key != "printed":
        answer = _parsed(shard, done)
    else:
        answer = {"printed": done.stdout[-10000:], "code": done.returncode}
    cpu = cpu_seconds(resource.RUSAGE_CHILDREN) - before
    return {"answer": answer, "code": done.returncode, "cpu_seconds": cpu}


def _run_shard(uri: str, shard: Shard) -> dict[str, Any]:
    """Runs a shard in a worker, which stores the result itself."""
    before = cpu_seconds()
    result = run_program(shard)
    Store(uri).write(shard.file, result)
    return {**result, "worker_cpu_seconds": cpu_seconds() - before}


def read_result(store: Store, shard: Shard) -> dict[str, Any]:
    """Reads the stored result of a shard. Raises DamagedError if the file has none."""
    result = store.read(shard.file)
    for key, kind in _KEYS.items():
        if not isinstance(result.get(key), kind):
            raise DamagedError(f"{shard.file}: it has no {key}")
    if not {shard.key, "crash"} & result["answer"].keys():
        raise DamagedError(f"{shard.file}: its answer has no {shard.key}")
    return result


class Progress:
    """Prints how far a campaign is: a line on a terminal, else lines of a log."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._said = time.monotonic()

    def show(self, text: str) -> None:
        now = time.monotonic()
        if self._terminal and now - self._said > 0.2:
            print(f"\r{text:<79}", end="", file=sys.stderr, flush=True)
        elif not self._terminal and now - self._said > _LOG_SECONDS:
            print(f"kvtwin.campaign: {text}", file=sys.stderr, flush=True)
        else:
            return
        self._said = now

    def end(self) -> None:
        if self._terminal:
            print(f"\r{'':79}\r", end="", file=sys.stderr, flush=True)


def start_ray(workers: int, address: str | None) -> Any:
    """Starts Ray on this machine, or joins a cluster. Returns the module."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise CampaignError(f"{error}: pip install 'kvtwin[campaign]'") from error
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is None:
            ray.init(num_cpus=workers, include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except Exception as error:  # Ray raises an Exception if it starts too slowly.
        where = "Ray does not start" if address is None else f"--address {address}"
        raise CampaignError(f"{where}: {error}") from error
    return ray


def run_shards(
    ray: Any,
    store: Store,
    shards: Iterable[Shard],
    cost: Cost,
) -> Iterator[tuple[Shard, dict[str, Any]]]:
    """Yields the result of each shard, in any order. A stored result is not made again.

    A worker that dies is replaced, and its shard runs again.
    """
    task = ray.remote(num_cpus=1, max_retries=1000)(_run_shard)
    stored = store.names()
    running: dict[Any, Shard] = {}

    def wait() -> Iterator[tuple[Shard, dict[str, Any]]]:
        done, _ = ray.wait(list(running), num_returns=1)
        for ref in done:
            result = ray.get(ref)
            cost.cpu_seconds += result["cpu_seconds"]
            cost.worker_cpu_seconds += result.pop("worker_cpu_seconds")
            yield running.pop(ref), result

    for shard in shards:
        if shard.file in stored:
            try:
                result = read_result(store, shard)
            except DamagedError as error:
                print(f"kvtwin.campaign: done again: {error}", file=sys.stderr)
            else:
                cost.reused += 1
                yield shard, result
                continue
        running[task.remote(store.uri, shard)] = shard
        if len(running) >= _WINDOW * cost.workers:
            yield from wait()
    while running:
        yield from wait()


def hash_of_file(path: str | pathlib.Path) -> str:
    """Returns the first 16 digits of the SHA-256 of a file."""
    try:
        return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise CampaignError(f"{path}: {error.strerror}") from error


def parameters_of(command: str, options: Sequence[str]) -> dict[str, Any]:
    """Returns the parameters that every campaign with the command has."""
    parameters: dict[str, Any] = {
        "command": hash_of_file(command),
        "options": list(options),
    }
    for number, option in enumerate(options, 1):
        name, equals, library = option.partition("=")
        if name == "--backend" and (equals or number < len(options)):
            parameters["backend"] = hash_of_file(library if equals else options[number])
    return parameters
