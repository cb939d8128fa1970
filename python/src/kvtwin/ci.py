"""A job of a CI: random histories on your cache for a given time.

    python -m kvtwin.ci ./libmine.so --seconds 300
    python -m kvtwin.ci mycache.py:MyCache --seconds 300

It first runs the findings of earlier jobs (`--corpus`, a file that the CI keeps), then
new histories by the seed of the day. Each finding is printed, drawn as a page, and on
GitHub shown beside the commit. The exit code is 1 after a finding, and 2 if the cache
or an earlier finding could not be run, or if a file could not be read or written
(docs/ci.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol
from xml.etree import ElementTree

import kvtwin
from kvtwin._command import command_path


@dataclasses.dataclass(frozen=True)
class Found:
    """A finding: the shortest history that shows it, and the error."""

    history: str
    reason: str
    rerun: str


class Target(Protocol):
    """The cache under test."""

    def run(self, history: str, page: pathlib.Path) -> list[Found]:
        """Runs one history."""

    def fuzz(self, seconds: float, seed: int, page: pathlib.Path) -> list[Found]:
        """Runs random histories."""


# The options of `kvtwin fuzz` that also judge one history. The others choose histories.
_RUN_OPTIONS = ("call-seconds", "level", "memory-mib", "profile", "shrink-seconds")


def _options_of_run(options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns those options of `kvtwin fuzz` that `kvtwin run` has, too, and the buckets
    of known findings."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in _RUN_OPTIONS:
        parser.add_argument(f"--{name}")
    parser.add_argument("--known", nargs="*", action="extend", default=[])
    given, _others = parser.parse_known_args(options)
    values = vars(given)
    buckets: list[str] = values.pop("known")
    words = [(f"--{name}", values[name.replace("-", "_")]) for name in _RUN_OPTIONS]
    return [word for pair in words if pair[1] is not None for word in pair], buckets


def _is_known(bucket: str, known: Sequence[str]) -> bool:
    """Returns whether `known` has the bucket, or its part before the first "+"."""
    return bool({bucket, bucket.partition("+")[0]} & {*known} - {""})


class Library:
    """A shared library, driven by the command."""

    def __init__(self, path: str, options: Sequence[str]) -> None:
        self._command = command_path()
        self._options = ["--backend", path, *options]
        run_options, self._known_buckets = _options_of_run(options)
        self._run_options = ["--backend", path, *run_options]

    def _call(self, *words: str) -> dict[str, Any]:
        done = subprocess.run(
            [self._command, *words, "--json"], stdout=subprocess.PIPE, text=True, check=False
        )
        # A history that judges nothing ends with 2, and finds nothing.
        judges_nothing = done.returncode == 2 and '"nothing_judged":true' in done.stdout
        if done.returncode not in (0, 1) and not judges_nothing:
            raise RuntimeError(f"kvtwin exited with {done.returncode}")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def run(self, history: str, page: pathlib.Path) -> list[Found]:
        """Runs a history, and returns what it finds, unless the finding is known."""
        answer = self._call("run", history, *self._run_options, "--html", str(page))
        if not answer["differences"] or _is_known(
            answer.get("bucket", ""), self._known_buckets
        ):
            return []
        rerun = shlex.join([self._command, "run", history, *self._run_options])
        return [Found(history, answer["reason"], rerun)]

    def fuzz(self, seconds: float, seed: int, page: pathlib.Path) -> list[Found]:
        """Runs random histories, and returns what they find."""
        answer = self._call(
            *("fuzz", "--seconds", str(seconds), "--seed", str(seed)),
            *("--html", str(page), *self._options),
        )
        if "findings" in answer:
            findings = answer["findings"]
        else:  # Pools have one level, and at most one finding.
            findings = [answer] if answer["differences"] else []
        if answer.get("vacuity") and not findings:
            raise RuntimeError(f"--marks: {', '.join(answer['vacuity'])}")
        level = answer.get("not_judged", "none")
        if level != "none" and not findings:
            raise RuntimeError(f"not judged: nothing was compared at the level {level}")
        return [Found(one["history"], one["reason"], one["rerun"]) for one in findings]


def _module_of(name: str, folder: pathlib.Path) -> str | None:
    """Returns the path of a module that is loaded, or that could be loaded from another
    folder than `folder`; None if there is no such module."""
    if (loaded := sys.modules.get(name)) is not None:
        return getattr(loaded, "__file__", None) or "a part of Python"
    places = [place for place in sys.path if pathlib.Path(place).resolve() != folder]
    found = importlib.machinery.PathFinder.find_spec(name, places)
    return found.origin if found is not None else None


_CLASS_OPTIONS = "--known, --level, --kind and --shrink-seconds"


class _Options(argparse.ArgumentParser):
    """The options of a class. Its attribute `kvtwin` has the others."""

    def __init__(self) -> None:
        super().__init__("kvtwin.ci", add_help=False, allow_abbrev=False)
        self.add_argument("--known", nargs="*", action="extend", default=[])
        self.add_argument("--level")
        self.add_argument("--kind")
        self.add_argument("--shrink-seconds", type=float)

    def error(self, message: str) -> NoReturn:
        raise ValueError(
            f"{message}; a class has only {_CLASS_OPTIONS}: its attribute kvtwin has the "
            "other settings"
        )


class Class:
    """A class in Python, named `file.py:Name` or `module:Name`."""

    def __init__(self, name: str, options: Sequence[str] = ()) -> None:
        self._options = _Options().parse_args(options)
        place, _, cls = name.rpartition(":")
        try:
            module = self._import(place)
        except SystemExit as error:  # It would end this job, perhaps with 0.
            raise RuntimeError(f"{place} exits when it is imported: {error.code}") from error
        self._cls: type = getattr(module, cls)

    @staticmethod
    def _import(place: str) -> types.ModuleType:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        file = pathlib.Path(place).resolve()
        if not file.is_file():
            raise FileNotFoundError(place)
        stem = file.stem
        if other := _module_of(stem, file.parent):
            if pathlib.Path(other).resolve() != file:
                raise ValueError(f"{place} would hide the module {stem} ({other}): rename it")
        spec = importlib.util.spec_from_file_location(stem, place)
        if spec is None or spec.loader is None:
            raise FileNotFoundError(place)
        module = importlib.util.module_from_spec(spec)
        sys.modules[stem] = module
        spec.loader.exec_module(module)
        return module

    def _found(self, finding: kvtwin.Finding) -> Found:
        # Without a history, each __init__ fails.
        rerun = finding.rerun or f"kvtwin.fuzz({self._cls.__name__})"
        return Found(finding.history, finding.reason, rerun)

    def run(self, history: str, page: pathlib.Path) -> list[Found]:
        """Runs a history, and returns what it finds, unless the finding is known."""
        level = self._options.level
        finding = kvtwin.run(self._cls, history, level=level, html=page).finding
        if finding is None or _is_known(finding.bucket, self._options.known):
            return []
        return [self._found(finding)]

    def fuzz(self, seconds: float, seed: int, page: pathlib.Path) -> list[Found]:
        """Runs random histories, and returns what they find."""
        asked = vars(self._options)
        made = kvtwin.fuzz(self._cls, seconds=seconds, seed=seed, html=page, **asked)
        if made.not_judged and not made.findings:
            raise RuntimeError(str(made))
        return [self._found(finding) for finding in made.findings]


def _annotate(found: Found) -> None:
    """Shows a finding in GitHub's list of checks, and in the summary of the job."""

    def escaped(text: str) -> str:
        return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    text = escaped(f"{found.reason}\n{found.history}\n{found.rerun}")
    print(f"::error title=kvtwin::{text}")
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as out:
            out.write(f"### kvtwin\n\n```text\n{found.reason}\n```\n\n")
            out.write(f"```text\n{found.history}\n{found.rerun}\n```\n\n")


def _for_xml(text: str) -> str:
    """Replaces the characters that XML does not have."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def _write_junit(path: pathlib.Path, found: Sequence[Found]) -> None:
    """Writes a failed test case for each finding, or a passed test case."""
    suite = ElementTree.Element(
        "testsuite",
        name="kvtwin",
        tests=str(max(1, len(found))),
        failures=str(len(found)),
    )
    for one in found:
        case = ElementTree.SubElement(suite, "testcase", name=_for_xml(one.history) or "histories")
        failure = ElementTree.SubElement(case, "failure", message=_for_xml(one.reason))
        failure.text = _for_xml(one.rerun)
    if not found:
        ElementTree.SubElement(suite, "testcase", name="histories")
    ElementTree.ElementTree(suite).write(path, "utf-8", xml_declaration=True)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m kvtwin.ci", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("backend", help="a shared library, or file.py:Class")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, help="by default the date: 20261126")
    parser.add_argument("--corpus", type=pathlib.Path, help="a file with one history per line")
    parser.add_argument("--pages", type=pathlib.Path, default=pathlib.Path("kvtwin-pages"))
    parser.add_argument("--junit", type=pathlib.Path, help="a file for JUnit XML")
    parser.epilog = "Options after -- are those of kvtwin fuzz: -- --profile mlx. A class has "
    parser.epilog += f"only {_CLASS_OPTIONS}."
    given = list(sys.argv[1:] if words is None else words)
    end = given.index("--") if "--" in given else len(given)
    made = parser.parse_args(given[:end])
    made.options = given[end + 1 :]
    if not made.seconds > 0:
        parser.error(f"--seconds is {made.seconds}, it must be more than 0")
    if made.seed is not None and made.seed < 0:
        parser.error(f"--seed is {made.seed}, it must be 0 or more")
    return made


def _target(backend: str, options: Sequence[str]) -> Target:
    if ":" not in backend:
        if backend.endswith(".py"):
            raise ValueError(f"the backend is {backend}: name its class, as {backend}:MyCache")
        return Library(backend, options)
    return Class(backend, options)


def _read_corpus(path: pathlib.Path) -> list[str]:
    """Reads the histories of the file. Returns an empty list if the file does not exist."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except UnicodeDecodeError as error:
        raise ValueError(f"--corpus is {path}, which is not UTF-8: {error.reason}") from error
    return [line for line in lines if line.strip()]


def _write_corpus(path: pathlib.Path, histories: Iterable[str]) -> None:
    """Replaces the file as a whole, so that a full disk leaves the old file."""
    path = path.resolve()  # A link stays.
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{line}\n" for line in histories)
    if path.exists() and not path.is_file():  # Such as /dev/null.
        path.write_text(text, encoding="utf-8")
        return
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError:
        if new.is_file():
            new.unlink()
        raise


def _run(asked: argparse.Namespace) -> int:
    seed = asked.seed
    if seed is None:
        seed = int(f"{datetime.datetime.now(datetime.timezone.utc):%Y%m%d}")
    earlier = [] if asked.corpus is None else _read_corpus(asked.corpus)
    asked.pages.mkdir(parents=True, exist_ok=True)
    if asked.junit is not None:  # Raises before the run if it cannot be written.
        asked.junit.parent.mkdir(parents=True, exist_ok=True)
        is_new = not asked.junit.exists()
        asked.junit.open("ab").close()
        if is_new:
            asked.junit.unlink()
    target = _target(asked.backend, asked.options)
    found: list[Found] = []
    not_run = 0
    for number, history in enumerate(earlier):
        page = asked.pages / f"corpus-{number}.html"
        try:
            found += target.run(history, page)
        except Exception as error:  # A damaged line, or a kind that is gone.
            not_run += 1
            print(f"kvtwin.ci: not run: {history}: {error}", file=sys.stderr)
    print(f"kvtwin: {len(earlier)} earlier histories, {len(found)} of them fail")
    print(f"kvtwin: {asked.seconds:g} s of new histories, seed {seed}", flush=True)
    try:
        new = target.fuzz(asked.seconds, seed, asked.pages / "found.html")
    except Exception as error:
        if not found:
            raise
        new = []  # The earlier findings are reported all the same.
        _print_error(error)
    failed = {one.history for one in found}
    found += [one for one in new if one.history not in failed]
    for one in found:
        print("\n  ".join(line for line in (one.reason, one.history, one.rerun) if line))
        if os.environ.get("GITHUB_ACTIONS"):
            _annotate(one)
    if asked.corpus is not None:
        kept = dict.fromkeys([*earlier, *(one.history for one in new if one.history)])
        _write_corpus(asked.corpus, kept)
    if asked.junit is not None:
        _write_junit(asked.junit, found)
    print(f"kvtwin: {len(found)} finding{'' if len(found) == 1 else 's'}")
    if not_run:
        print(
            f"kvtwin.ci: {not_run} of the histories in {asked.corpus} could not be run: "
            "mend these lines, or delete them",
            file=sys.stderr,
        )
    return 1 if found else 2 if not_run else 0


def _print_error(error: Exception) -> None:
    print(f"kvtwin.ci: {type(error).__name__}: {error}", file=sys.stderr)


def main(words: Sequence[str] | None = None) -> int:
    """Runs the job, and returns the exit code."""
    asked = _arguments(words)
    try:
        return _run(asked)
    except Exception as error:
        _print_error(error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
