"""Pools of blocks in Python, by random histories."""

import importlib.util
import subprocess
import sys

import pytest

import kvtwin


#: What takes the bug out of the example.
MENDED = ("False  # The bug: ", "")


@pytest.fixture
def example(repository):
    return (repository / "docs/examples/python_pool.py").read_text()


@pytest.fixture
def pool(repository):
    """The class of the example, without its bug."""
    path = repository / "docs/examples/python_pool.py"
    spec = importlib.util.spec_from_file_location("python_pool", path)
    module = importlib.util.module_from_spec(spec)
    source = path.read_text()
    exec(compile(source.replace(*MENDED), path, "exec"), vars(module))
    return module.BlockPool


def test_the_example(repository, example, pytester):
    pytester.makepyfile(test_example=example)
    result = pytester.runpytest_subprocess("--kvtwin-ops", "3000", "-rN")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*BlockPool is wrong*", "*rerun *kvp1 *fork*"])
    shown = (repository / "docs/python.md").read_text()
    [line] = [line for line in result.outlines if line.strip().startswith("rerun")]
    # The page is up to date.
    assert f"\n    {line[line.index('kvp1') :].split(chr(39))[0]}\n" in shown
    [reason] = [line for line in result.outlines if line.startswith("  views: ")]
    assert f"\n  {reason}\n" in shown
    pytester.makepyfile(test_example=example.replace(*MENDED))
    pytester.runpytest_subprocess("--kvtwin-ops", "3000").assert_outcomes(passed=1)


def test_a_right_one(pool):
    result = kvtwin.fuzz(pool, operations=3000)
    assert result, str(result)
    assert result.level == "entitlement" and result.operations >= 3000


def test_the_command_runs_it_again(repository, tmp_path):
    (tmp_path / "pools.py").write_text(
        (repository / "docs/examples/python_pool.py").read_text()
    )
    code = "import kvtwin, pools; print(kvtwin.fuzz(pools.BlockPool, operations=3000))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    command = done.stdout.split("rerun   ")[1].splitlines()[0]
    again = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert again.stdout.split("\n\n")[1] == done.stdout.split("\n\n")[1]


def test_run(pool):
    history = "kvp1 block=2 blocks=4 dtype=f32 | open 0 0 0 | append 0 2 1"
    assert kvtwin.run(pool, history)
    with pytest.raises(ValueError, match="kvp1"):
        kvtwin.run(pool, "kvt1 | put 0*1")
    with pytest.raises(kvtwin.NotSupported, match="no such pool"):
        kvtwin.run(pool, "kvp1 block=2 blocks=4 dtype=f16 | open 0 0 0")


@pytest.mark.parametrize(
    "method, texts",
    [
        ("seq_len", ["ZeroDivisionError", "test_pool.py"]),
        ("views", ["a view is (key, value)"]),
        ("slots", ["ZeroDivisionError"]),
        ("usage", ["ZeroDivisionError"]),
        ("table", ["ZeroDivisionError"]),
        ("commit_unknown", ["ZeroDivisionError"]),
    ],
)
def test_what_is_raised_is_told(pool, method, texts):
    class Wrong(pool):
        pass

    def fails(self, *arguments):
        return [None] if method == "views" else 1 // 0

    setattr(Wrong, method, fails)
    result = kvtwin.fuzz(Wrong, operations=2000)
    assert not result
    for text in texts:
        assert text in result.failure


def test_one_that_cannot_be_made(pool):
    class Fails(pool):
        def __init__(self, setup):
            raise KeyError("no such key")

    result = kvtwin.fuzz(Fails, operations=500)
    assert "KeyError" in result.failure and "test_pool.py" in result.failure

    class Refuses(pool):
        def __init__(self, setup):
            raise kvtwin.NotSupported("never")

    with pytest.raises(kvtwin.NotSupported, match="never"):
        kvtwin.fuzz(Refuses, operations=500)


def test_interruptions_end_it(pool):
    class Interrupts(pool):
        def views(self, sequence, layer):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvtwin.fuzz(Interrupts, operations=500)
    assert kvtwin.fuzz(pool, operations=500)  # Nothing is left behind.


def test_descriptions(pool):
    class NoViews:
        kvtwin = kvtwin.PoolDescription(name="x")
        open = seq_len = append = commit = free = print

    with pytest.raises(TypeError, match="no method views"):
        kvtwin.fuzz(NoViews)
    with pytest.raises(ValueError, match="nothing can be known"):
        kvtwin.fuzz(pool, known=["x"])
