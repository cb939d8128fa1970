import pathlib

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def repository() -> pathlib.Path:
    return pathlib.Path(__file__).parents[2]


@pytest.fixture
def recordings(repository: pathlib.Path) -> pathlib.Path:
    return repository / "props" / "recordings"
