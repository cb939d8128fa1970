import importlib.util
import pathlib

import pytest

pytest_plugins = ["pytester"]

#: The replacement that removes the bug from the example.
MENDED = ("False  # The bug: ", "")


@pytest.fixture
def repository() -> pathlib.Path:
    return pathlib.Path(__file__).parents[2]


@pytest.fixture
def recordings(repository: pathlib.Path) -> pathlib.Path:
    return repository / "props" / "recordings"


@pytest.fixture
def pool(repository):
    """The class of the example, without its bug."""
    path = repository / "docs/examples/python_pool.py"
    spec = importlib.util.spec_from_file_location("python_pool", path)
    module = importlib.util.module_from_spec(spec)
    source = path.read_text()
    exec(compile(source.replace(*MENDED), path, "exec"), vars(module))
    return module.BlockPool
