"""A fixture that runs random histories on a cache, or a pool, written in Python.

    def test_my_cache(kvtwin_fuzz):
        kvtwin_fuzz(MyCache)
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Protocol

import pytest

import kvtwin
from kvtwin._live import bucket_list


class Fuzzer(Protocol):
    """The type of the fixture."""

    def __call__(
        self,
        cls: type,
        *,
        operations: int | None = None,
        seed: int | None = None,
        known: str | Iterable[str] = (),
        seconds: float | None = None,
        level: str | None = None,
        kind: str | None = None,
        shrink_seconds: float | None = None,
    ) -> kvtwin.FuzzResult:
        """Fails the test, with a report, if the class is wrong."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options --kvtwin-ops and --kvtwin-seed."""
    group = parser.getgroup("kvtwin")
    group.addoption(
        "--kvtwin-ops",
        type=int,
        default=100_000,
        metavar="N",
        help="operations that kvtwin_fuzz runs at least (100000)",
    )
    group.addoption(
        "--kvtwin-seed",
        type=int,
        default=1,
        metavar="N",
        help="the seed of kvtwin_fuzz's histories (1)",
    )
    group.addoption(
        "--kvtwin-known",
        action="append",
        default=[],
        metavar="BUCKET",
        help="a finding of kvtwin_fuzz that is known: it is counted, and the run goes "
        "on; may be given several times",
    )


@pytest.fixture
def kvtwin_fuzz(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Fuzzer:
    """Runs random histories on a class of caches or pools: `kvtwin_fuzz(MyCache)`.

    The other arguments are those of `kvtwin.fuzz`, without `html`. A failure shows the
    shortest history and the error; its page is kvtwin.html in the test's tmp_path.
    """

    def fuzzer(
        cls: type,
        *,
        operations: int | None = None,
        seed: int | None = None,
        known: str | Iterable[str] = (),
        seconds: float | None = None,
        level: str | None = None,
        kind: str | None = None,
        shrink_seconds: float | None = None,
    ) -> kvtwin.FuzzResult:
        __tracebackhide__ = True
        option = request.config.getoption
        result = kvtwin.fuzz(
            cls,
            operations=option("--kvtwin-ops") if operations is None else operations,
            seed=option("--kvtwin-seed") if seed is None else seed,
            html=tmp_path / "kvtwin.html",
            known=[*bucket_list(known), *option("--kvtwin-known")],
            seconds=seconds,
            level=level,
            kind=kind,
            shrink_seconds=shrink_seconds,
        )
        if not result:
            wrong = "is wrong" if result.findings else "is not judged"
            pytest.fail(f"{cls.__qualname__} {wrong}\n\n{result}", pytrace=False)
        return result

    return fuzzer
