"""`import kvtwin` is fast: each public name imports its module when it is first used."""

import ast
import pathlib
import subprocess
import sys

import pytest

import kvtwin

ROOT = pathlib.Path(__file__).resolve().parents[2]


def printed(code):
    """Returns what a new interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout


def imported_by(statement):
    """Returns the names of the modules that a statement imports."""
    lines = ["import sys", "before = set(sys.modules)", statement]
    return printed("\n".join([*lines, "print(*(sys.modules.keys() - before))"])).split()


def test_the_import_alone_imports_nothing_else():
    assert imported_by("import kvtwin") == ["kvtwin"]


def test_a_cache_without_rows_needs_no_numpy():
    made = "import kvtwin; kvtwin.Cache(kvtwin.Setup(max_sequences=2)).start_forward([0], [1])"
    found = imported_by(made)
    assert "kvtwin._kvtwin" in found and "numpy" not in found
    assert "numpy" in imported_by("from kvtwin import Attention")


def typed_names():
    """Returns the module of each name that a type checker sees."""
    tree = ast.parse(pathlib.Path(kvtwin.__file__).read_text(encoding="utf-8"))
    return {
        name.name: node.module.removeprefix("kvtwin.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("kvtwin.")
        for name in node.names
    }


def test_type_checkers_and_python_see_the_same_names():
    assert typed_names() == kvtwin._HOME_OF
    assert sorted(typed_names()) == sorted(kvtwin.__all__)


@pytest.mark.parametrize("name", [*kvtwin.__all__, "__version__"])
def test_each_name_can_be_imported(name):
    scope = {}
    exec(f"from kvtwin import {name}", scope)
    assert scope[name] is getattr(kvtwin, name)
    assert name in vars(kvtwin)  # Later uses are as fast as those of any module.


def test_dir_and_star():
    code = "import kvtwin; from kvtwin import *; print(*dir(kvtwin)); print(fuzz.__name__)"
    names, fuzz = printed(code).splitlines()
    assert {*kvtwin.__all__, "__version__"} <= set(names.split())
    assert fuzz == "fuzz"


def test_other_names():
    with pytest.raises(AttributeError, match="'kvtwin' has no attribute 'fuz'"):
        kvtwin.fuz
    with pytest.raises(ImportError, match="cannot import name 'fuz'"):
        from kvtwin import fuz  # noqa: F401


def test_mypy_knows_the_names(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import kvtwin\nreveal_type(kvtwin.fuzz)\nkvtwin.fuz\n")
    words = ["--strict", "--cache-dir", str(ROOT / "build/python/mypy"), str(program)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words], capture_output=True, text=True, check=False
    )
    shown, error, *_ = done.stdout.splitlines()
    assert "FuzzResult" in shown
    assert 'Module has no attribute "fuz"' in error
