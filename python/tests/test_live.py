"""Random histories on caches in Python."""

import dataclasses
import functools
import math
import os
import pathlib
import subprocess
import sys
import sysconfig

import numpy as np
import pytest
import toys

import kvtwin


def test_a_correct_class():
    result = kvtwin.fuzz(toys.Right, operations=3000)
    assert result, str(result)
    assert result.level == "visibility"
    assert result.operations >= 3000 and result.histories > 5
    assert result.failure == "" and result.history == "" and result.page is None
    assert "right (visibility)" in str(result)


class Strict(toys.Right):
    """Refuses misuse, and has the methods of docs/python.md for a causal cache."""

    kvtwin = dataclasses.replace(
        toys.Right.kvtwin, kinds={"causal"}, can=toys.Right.kvtwin.can | {"refuse_misuse"}
    )


@pytest.mark.parametrize(
    "line",
    [
        "kvt1 cells=2 legal=1 | put 0*2 image=1",
        "kvt1 cells=2 | put 0*1 | misuse 6 | put 0*1",  # An index beyond the batch.
        "kvt1 cells=2 | put 0*1 | misuse 7 | put 0*1",  # A negative index.
    ],
)
def test_a_class_without_encoders_gets_no_images(line):
    result = kvtwin.run(Strict, line)
    assert result, str(result)


@pytest.mark.parametrize("kind", ["encoder", "wrapper"])
def test_a_class_with_encoders_gets_images_and_refuses_wrong_ones(kind):
    seen = []

    class Notes(toys.Ours):
        def start_forward(self, positions, sequences, multimodal=(), **more):
            seen.append(list(multimodal))
            super().start_forward(positions, sequences, multimodal=multimodal, **more)

    spec = "kind=wrapper caches=encoder/causal" if kind == "wrapper" else "kind=encoder"
    result = kvtwin.run(Notes, f"kvt1 {spec} seqs=1 cap=2 | put 0*2 image=1 | misuse 6")
    assert result, str(result)
    assert [1] in seen and seen.count([1]) >= 2  # The image, and the wrong index.


class Transposed(toys.Right):
    """Its masks are arrays in Fortran's order."""

    def get(self, layer):
        key, value, mask = super().get(layer)
        return key, value, np.asfortranarray(mask)


def test_a_mask_in_any_order_of_its_elements():
    result = kvtwin.run(Transposed, "kvt1 cells=16 legal=1 | put 0*16")
    assert result, str(result)
    result = kvtwin.fuzz(Transposed, operations=3000)
    assert result, str(result)


def test_the_old_name_of_a_level():
    assert kvtwin.Description(name="x", level="entitlement").level == "visibility"


def test_our_cache_byte_for_byte():
    result = kvtwin.fuzz(toys.Ours, operations=20000)
    assert result, str(result)
    assert result.level == "identity"


def test_run_says_which_setup_it_would_run():
    with pytest.raises(kvtwin.NotSupported, match="it declares is 'kvt1.* legal=1'"):
        kvtwin.run(toys.Legal, "kvt1 mask=f16 | put 0*1")
    with pytest.raises(kvtwin.NotSupported, match="ANY_ORDER.* legal=1: 'kvt1 legal=1'"):
        kvtwin.run(toys.Legal, "kvt1 | put 0*1")


def test_a_convention_may_be_no_bug():
    hint = "hint    another convention is not a bug: `kvtwin.profile`"
    assert hint in kvtwin.fuzz(toys.SeesTooFew, operations=3000).failure
    assert hint not in kvtwin.fuzz(toys.Raises, operations=3000).failure


WRONG = {
    toys.SeesTooFew: ["swa"],
    toys.CopiesOneTooFew: ["copy "],
    toys.Raises: ["drop ", "KeyError: 'no such key'", "toys.py", "in remove"],
}


@pytest.mark.parametrize("cls", WRONG)
def test_faulty_classes(cls, tmp_path):
    result = kvtwin.fuzz(cls, operations=3000, html=tmp_path / "page.html")
    assert not result
    for text in WRONG[cls]:
        assert text in result.failure
    assert "_live.py" not in result.failure  # Tracebacks show only the user's code.
    assert "\\x0a" not in result.failure  # They have line breaks.
    assert len(result.history.split("|")) <= 4, result.history
    page = result.page.read_text()
    assert result.history in page and "kvtwin.run" in page
    again = kvtwin.fuzz(cls, operations=3000)
    assert (again.history, again.failure) == (result.history, result.failure)


def test_a_page_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    made = []

    class Counted(toys.Right):
        def __init__(self, setup):
            made.append(setup)
            super().__init__(setup)

    other = tmp_path / "other.html"
    other.write_text("mine")
    for html, reason in (
        (tmp_path / "none" / "page.html", "cannot be opened"),
        (other, "not a page of kvtwin"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=reason):
            kvtwin.fuzz(Counted, operations=3000, html=html)
        with pytest.raises((ValueError, RuntimeError), match=reason):
            kvtwin.run(Counted, "kvt1 | put 0*1", html=html)
    assert not made and other.read_text() == "mine"
    page = tmp_path / "page.html"
    assert kvtwin.fuzz(toys.CopiesOneTooFew, operations=3000, html=page).page == page
    assert kvtwin.fuzz(toys.Right, operations=300, html=page).page is None
    assert not page.exists()  # The page of an earlier run is removed.


def test_the_command_runs_it_again(tmp_path):
    result = kvtwin.fuzz(toys.CopiesOneTooFew, operations=3000)
    command = result.failure.split("rerun   ")[1].splitlines()[0]
    assert "from toys import CopiesOneTooFew" in command
    assert sys.executable in command
    assert f'print(kvtwin.run(CopiesOneTooFew, {result.history!r}))"' in command
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert result.findings[0].reason in done.stdout


def test_the_command_makes_the_class_again(tmp_path, monkeypatch):
    """A function makes the class; its module is in a folder that was added."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "of_engine.py").write_text("WORD = 'made again'\n")
    (tmp_path / "making.py").write_text(
        "import of_engine, toys\n"
        "def make(less):\n"
        "    class Made(toys.CopiesOneTooFew):\n"
        "        kvtwin_made = f'make({less})'\n"
        "    print(of_engine.WORD, less)\n"
        "    return Made\n"
    )
    programs = sysconfig.get_path("scripts")  # The folder of pytest.
    for folder in (tmp_path, tmp_path / "engine", programs):
        monkeypatch.syspath_prepend(str(folder))
    import making

    result = kvtwin.fuzz(making.make(7), operations=3000)
    command = result.failure.split("rerun   ")[1].splitlines()[0]
    assert "kvtwin.run(make(7)" in command
    assert f"{tmp_path}/engine'" in command and f"{programs}'" not in command
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "made again 7" in done.stdout
    assert result.findings[0].reason in done.stdout


def test_the_command_of_a_script_whose_name_is_no_identifier(tmp_path):
    (tmp_path / "my-cache.py").write_text(
        "import kvtwin, sys\n"
        f"sys.path.append({str(pathlib.Path(toys.__file__).parent)!r})\n"
        "import toys\n"
        "class Mine(toys.CopiesOneTooFew): pass\n"
        "if __name__ == '__main__':\n"
        "    print(kvtwin.fuzz(Mine, operations=3000).findings[0].rerun)\n"
    )
    words = [sys.executable, "my-cache.py"]
    run = {"capture_output": True, "text": True, "check": True}
    command = subprocess.run(words, cwd=tmp_path, **run).stdout.splitlines()[-1]
    assert "importlib.import_module('my-cache')" in command
    assert "CopyPrefix" in subprocess.run(command, shell=True, **run).stdout


def test_run():
    history = "kvt1 | put 0*2 | copy 0>1:2 | put 1*1"
    right = kvtwin.run(toys.Right, history)
    assert right and right.finding is None
    assert right.calls[0].startswith("StartForward")
    assert "no difference" in str(right)
    wrong = kvtwin.run(toys.CopiesOneTooFew, history)
    assert not wrong and "copy 0>1" in wrong.finding.history
    with pytest.raises(ValueError, match="kvt1"):
        kvtwin.run(toys.Right, "nonsense")
    with pytest.raises(kvtwin.NotSupported):
        kvtwin.run(toys.Right, "kvt1 kind=encoder | put 0*1")


@pytest.mark.parametrize(
    "cls, texts",
    [
        (toys.CannotBeMade, ["ZeroDivisionError", "toys.py"]),
        (toys.WrongShape, ["the mask has shape", "expected"]),
        (toys.NotATriple, ["get returns NoneType"]),
    ],
)
def test_garbage(cls, texts):
    result = kvtwin.fuzz(cls, operations=300)
    assert not result
    for text in texts:
        assert text in result.failure


def test_texts_that_utf8_cannot_hold():
    class Raises(toys.Right):
        kvtwin = dataclasses.replace(toys.Right.kvtwin, name="a\udc80")

        def get(self, layer):
            raise KeyError("b\udc80")

    failure = kvtwin.fuzz(Raises, operations=100).failure
    assert "a\\udc80 against" in failure and "KeyError: 'b\\udc80'" in failure


def test_answers_that_are_no_numbers_of_32_bits():
    class Far(toys.Ours):
        def cells(self):
            return [(cell, 2**31, sequence) for cell, _, sequence in super().cells()]

    class View(tuple):
        first_cell = 2**40

    class Farther(toys.Right):
        def get(self, layer):
            return View(super().get(layer))

    failure = kvtwin.fuzz(Far, operations=100).failure
    assert "position is 2147483648, it must be an int of 32 bits" in failure
    failure = kvtwin.fuzz(Farther, operations=100).failure
    assert "first_cell is 1099511627776, it must be an int of 32 bits" in failure


def test_a_class_that_refuses_every_setup():
    with pytest.raises(kvtwin.NotSupported, match="each __init__ refused"):
        kvtwin.fuzz(toys.FitsNothing, operations=100)

    class Undescribed(toys.FitsNothing):
        kvtwin = None

    reason = r"not today \(Undescribed has no attribute `kvtwin` .*asked for causal caches only"
    with pytest.raises(kvtwin.NotSupported, match=reason):
        kvtwin.fuzz(Undescribed, operations=100)


def test_interruptions_end_it():
    with pytest.raises(KeyboardInterrupt):
        kvtwin.fuzz(toys.Interrupts, operations=100)
    assert kvtwin.fuzz(toys.Right, operations=100)  # Nothing is left behind.


def test_not_within_another():
    class Nested(toys.Right):
        def put(self, layer, key, value):
            kvtwin.fuzz(toys.Right, operations=10)

    assert "within another" in kvtwin.fuzz(Nested, operations=100).failure


def test_descriptions():
    with pytest.raises(ValueError, match="can: 'fly' is not one of"):
        kvtwin.Description(name="x", can={"fly"})
    with pytest.raises(ValueError, match="share needs the ability copy_prefix"):
        kvtwin.Description(name="x", can={"share"})

    class NoGet:
        start_forward = put = print

    with pytest.raises(TypeError, match="no method get"):
        kvtwin.fuzz(NoGet)

    class Lies(NoGet):
        get = print
        kvtwin = kvtwin.Description(name="x", can={"copy_prefix"})

    with pytest.raises(TypeError, match="copy_prefix"):
        kvtwin.fuzz(Lies)

    class NoCells(Lies):
        kvtwin = kvtwin.Description(name="x", level="identity")

    with pytest.raises(TypeError, match="no method cells"):
        kvtwin.fuzz(NoCells)
    with pytest.raises(ValueError, match="operations is 0"):
        kvtwin.fuzz(toys.Right, operations=0)
    for field, value in (
        ("name", 5),
        ("profile", None),
        ("max_sequences", 2**40),
        ("max_layers", "x"),
        ("max_padding", 1.5),
        ("max_position", -1),
        ("tolerance", math.nan),
        ("attend_tolerance", "x"),
    ):
        with pytest.raises(ValueError, match=f"{field} is {value!r}, it must be "):
            kvtwin.Description(**{"name": "x", field: value})
    kvtwin.Description(name="x", max_layers=np.int64(3), tolerance=np.float32(0.5))


def test_the_example(repository, pytester):
    example = (repository / "docs/examples/python_cache.py").read_text()
    pytester.makepyfile(test_example=example)
    # Without the summary, which repeats the whole report if $CI is set.
    result = pytester.runpytest_subprocess("--kvtwin-ops", "2000", "-rN")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*PrefixCache is wrong*", "*CopyPrefix(0, 1*", "*rerun *kvtwin.run*"]
    )
    shown = (repository / "docs/python.md").read_text()
    story = [line for line in result.outlines if "-> ok" in line]
    assert len(story) == 10
    for line in story:  # The page is up to date.
        assert line.strip() in shown
    pages = list(pytester.path.parent.glob("**/kvtwin.html"))
    assert pages
    fixed = example.replace("copy.copy(", "copy.deepcopy(")
    pytester.makepyfile(test_example=fixed)
    pytester.runpytest_subprocess("--kvtwin-ops", "2000").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("python_tree", [("TreeCache", "Commit(0, [")]),
        ("python_prefix", [("FindingCache", "FAIL subject: prefix")]),
        (
            "python_states",
            [
                ("StateCache", "Remove(0, "),
                ("DraftingCache", "Commit(0, ["),
                ("HybridCache", "FAIL subject: rows"),
            ],
        ),
    ],
)
def test_examples_of_drafts_and_states(repository, pytester, name, found):
    example = (repository / f"docs/examples/{name}.py").read_text()
    pytester.makepyfile(**{f"test_{name}": example})
    result = pytester.runpytest_subprocess("--kvtwin-ops", "5000", "-rN")
    result.assert_outcomes(failed=len(found))
    for cls, text in found:
        result.stdout.fnmatch_lines([f"*{cls} is wrong*"])
        assert text in result.stdout.str()
    right = example.replace("BUG = True", "BUG = False")
    assert right != example
    pytester.makepyfile(**{f"test_{name}": right})
    result = pytester.runpytest_subprocess("--kvtwin-ops", "5000")
    result.assert_outcomes(passed=len(found))


def test_no_token_is_needed_before_the_first():
    class Resumes(toys.Right):
        """Evicts eagerly, and can resume wherever a row sees all that it should."""

        kvtwin = kvtwin.Description(
            name="resumes", kinds={"swa"}, can={"remove_tail"}, max_sequences=1
        )

        def can_resume(self, sequence, position):
            if self.setup.window is None:
                return True
            held = {token.position for token in self.of(sequence)}
            if not held or position > max(held) + 1:
                return False
            return held >= set(range(self.first_needed(position), position))

        def first_needed(self, position):
            return max(0, position - self.setup.window)

    result = kvtwin.fuzz(Resumes, operations=5000)
    assert result, str(result)

    class NeedsOneLess(Resumes):
        def first_needed(self, position):
            return super().first_needed(position) + 1

    assert "CanResume(" in kvtwin.fuzz(NeedsOneLess, operations=5000).failure


def test_drafts():
    batches = []

    class Drafts(toys.Right):
        """Chains only; rejected drafts are forgotten, the others are tokens."""

        kvtwin = dataclasses.replace(
            toys.Right.kvtwin,
            kinds={"causal"},
            can={"draft", "remove_tail", "copy_prefix", "share", "mix"},
        )

        def start_forward(self, positions, sequences, parents=None, **more):
            super().start_forward(positions, sequences, **more)
            batches.append(parents)
            for token in self.batch:
                token.draft = False
            for token, sequence, parent in zip(self.batch, sequences, parents or []):
                if parent == kvtwin.NOT_A_DRAFT:
                    continue
                # It follows the draft before it.
                assert parent == sum(t.draft for t in self.of(sequence)) - 1
                token.draft = True

        def commit(self, sequence, path):
            drafts = [t for t in self.of(sequence) if t.draft]
            self.leave(sequence, drafts[len(path) :])
            for token in drafts[: len(path)]:
                token.draft = False

        def copied(self, source, length):
            return [t for t in super().copied(source, length) if not t.draft]

        def copy_prefix(self, source, target, length):
            self.commit(target, [])
            super().copy_prefix(source, target, length)

        def remove(self, sequence, begin, end):
            self.commit(sequence, [])
            super().remove(sequence, begin, end)

    assert kvtwin.fuzz(Drafts, operations=3000)
    assert None in batches and [kvtwin.COMMITTED, 0, 1] in batches
    laws = {law.name: law for law in kvtwin.laws(Drafts, histories=10).laws}
    for name in ("reject_is_never", "path_is_tokens", "drafts_are_hidden"):
        assert laws[name] and laws[name].judged > 0, str(laws[name])
    assert "'draft_trees'" in str(laws["tree_is_chains"])

    class Keeps(Drafts):
        """Keeps the first rejected draft."""

        def commit(self, sequence, path):
            super().commit(sequence, [*path, -1])

    # The shortest history has no commit: copy_prefix and remove commit, too.
    assert "(drafts" in kvtwin.fuzz(Keeps, operations=3000).failure

    class NoCommit(toys.Right):
        kvtwin = dataclasses.replace(toys.Right.kvtwin, can={"draft"})

    with pytest.raises(TypeError, match="ability draft, but has no method commit"):
        kvtwin.fuzz(NoCommit)


def test_options_of_the_plugin(pytester):
    pytester.makepyfile(
        """
        class Cache:
            def start_forward(self, positions, sequences): pass
            def put(self, layer, key, value): pass
            def get(self, layer): pass
            def __init__(self, setup): pass

        def test_it(kvtwin_fuzz, request):
            assert request.config.getoption("--kvtwin-seed") == 7
            kvtwin_fuzz(Cache)
        """
    )
    result = pytester.runpytest_subprocess("--kvtwin-seed=7", "--kvtwin-ops=50")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*seed 7: not judged*"])


RUN = functools.partial(kvtwin.run, history="kvt1 | put 0*1")


@pytest.mark.parametrize(
    "function",
    [kvtwin.fuzz, RUN, kvtwin.laws, kvtwin.certify, kvtwin.profile, kvtwin.explore],
)
def test_an_instance_is_refused(function):
    with pytest.raises(TypeError, match="cls is an instance of Right, it must be a class"):
        function(toys.Right(kvtwin.Setup()))


def test_its_own_description():
    class Few(toys.Right):
        asked = []
        kvtwin = dataclasses.replace(
            toys.Right.kvtwin,
            cannot={"copy_to_itself"},
            max_position=3,
            placements={"scatter"},
        )

        def __init__(self, setup):
            assert setup.placement == "scatter" and setup.capacity <= 4
            super().__init__(setup)

        def start_forward(self, positions, sequences, **more):
            assert max(positions) <= 3
            self.asked.append(max(positions))
            return super().start_forward(positions, sequences, **more)

        def copy_prefix(self, source, target, length):
            assert source != target and length <= 4
            return super().copy_prefix(source, target, length)

    result = kvtwin.fuzz(Few, operations=3000)
    assert result, str(result)
    assert max(Few.asked) == 3
    Few.kvtwin = dataclasses.replace(Few.kvtwin, cannot=set())
    assert "source != target" in kvtwin.fuzz(Few, operations=3000).failure
    for wrong in {"cannot": {"fly"}}, {"placements": {"ring"}}:
        with pytest.raises(ValueError, match="is not one of"):
            kvtwin.Description(name="x", **wrong)


def test_known_findings_are_passed_over(pytester):
    found = kvtwin.fuzz(toys.SeesTooFew, operations=1000)
    bucket = found.failure.split("bucket: ")[1].splitlines()[0]
    assert found.passed_over == {}
    result = kvtwin.fuzz(toys.SeesTooFew, operations=3000, known=[bucket, "x"])
    assert result, str(result)
    assert result.passed_over[bucket] > 1 and result.passed_over["x"] == 0
    assert "right (visibility), except for known findings" in str(result)
    assert "known   x: never met" in str(result)
    other = kvtwin.fuzz(toys.SeesTooFew, operations=1000, known=["x"])
    assert not other and other.history == found.history
    pytester.makepyfile(
        f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import toys

        def test_it(kvtwin_fuzz):
            kvtwin_fuzz(toys.SeesTooFew)

        def test_that(kvtwin_fuzz):
            kvtwin_fuzz(toys.SeesTooFew, known=[{bucket!r}])
        """
    )
    options = ["--kvtwin-ops=1000", "-rN"]
    pytester.runpytest_subprocess(*options).assert_outcomes(failed=1, passed=1)
    options += ["--kvtwin-known", bucket]
    pytester.runpytest_subprocess(*options).assert_outcomes(passed=2)


def test_not_judged_where_each_history_raises():
    class RaisesAlways(toys.Right):
        kvtwin_made = "RaisesAlways"

        def put(self, layer, key, value):
            raise KeyError("no rows")

    result = kvtwin.fuzz(RaisesAlways, operations=1000)
    assert not result and result.not_judged and result.level == "none"
    assert "not judged: every history that compares a view ended" in str(result)
    assert len(result.findings) == 1
    assert not kvtwin.fuzz(toys.Raises, operations=3000).not_judged


def test_an_init_that_fails_for_some_setups():
    class Windowed(toys.Right):
        kvtwin = dataclasses.replace(toys.Right.kvtwin, kinds={"swa"})

        def __init__(self, setup):
            super().__init__(setup)
            self.slots = [0, 0][setup.window]

    failure = kvtwin.fuzz(Windowed, operations=3000).failure
    assert "\n  init fails: exception: IndexError: list index out of range" in failure


@pytest.mark.parametrize("level", ["identity", "visibility"])
@pytest.mark.parametrize("kind", ["encoder", "recurrent"])
def test_refusals_that_the_rules_expect(kind, level):
    """An encoder takes one sequence (S38), and a recurrent cache the next positions only
    (R3). The class does not declare that it refuses misuse."""

    class Refuses(kvtwin.Cache):
        kvtwin = dataclasses.replace(
            toys.Ours.kvtwin,
            level=level,
            kinds={kind},
            can=toys.Ours.kvtwin.can - {"refuse_misuse"},
        )

    result = kvtwin.fuzz(Refuses, operations=3000)
    assert result, str(result)


@pytest.mark.parametrize("cls", [toys.Ours, toys.Right])
@pytest.mark.parametrize("method", ["__init__", "start_forward", "get"])
def test_value_errors_that_no_rule_expects(cls, method):
    class Broken(cls):
        kvtwin = dataclasses.replace(
            cls.kvtwin, can=cls.kvtwin.can - {"refuse_misuse"}
        )

    def fails(self, *arguments, **more):
        if arguments[0] == [0, 1, 2] or getattr(arguments[0], "capacity", 8) > 16:
            int("3 cells")
        return getattr(super(Broken, self), method)(*arguments, **more)

    setattr(Broken, method, fails)
    if method == "get":
        Broken.get = lambda self, layer: int("3 cells")
    failure = kvtwin.fuzz(Broken, operations=3000).failure
    assert "exception: ValueError: invalid literal for int()" in failure, failure
    assert 'test_live.py:' in failure and 'int("3 cells")' in failure
    starts = {"__init__": "init fails: ", "get": "get answers internal: "}
    assert starts.get(method, "is invalid_argument") in failure or (
        "invalid_argument by ours: " in failure
    )


def test_bits_are_not_put_as_rows_of_f8():
    """numpy has no bits; as bytes, they would be right rows."""
    shapes = []

    class Takes(toys.Ours):
        def put(self, layer, key, value):
            shapes.append(None if key is None else (key.dtype.name, key.shape))
            super().put(layer, key, value)

    history = "kvt1 seqs=1 cap=4 dtype=f8_e4m3 dims=8,1,8 | put 0*1 | misuse 36"
    result = kvtwin.run(Takes, history)
    assert result, str(result)
    assert shapes[-1] is None
    result = kvtwin.run(Takes, history.replace("cap=4", "cap=1 kind=encoder legal=1"))
    assert result, str(result)


class Halves(toys.Right):
    """Stores f16, as which numpy casts numbers above 65504 to infinities."""

    kvtwin = dataclasses.replace(
        toys.Right.kvtwin, dtypes={"f16"}, shifts={"none", "identity"}
    )

    def put(self, layer, key, value):
        super().put(layer, key.astype(np.float16), value.astype(np.float16))


class ShowsFloats(toys.Right):
    """Its rows are cast to f16 when they are compared."""

    kvtwin = Halves.kvtwin


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("cls", [Halves, ShowsFloats])
@pytest.mark.parametrize(
    "judge",
    [
        functools.partial(kvtwin.fuzz, operations=1500),
        functools.partial(kvtwin.laws, law="replay", histories=20),
        functools.partial(kvtwin.certify, operations=500, histories=2),
        functools.partial(kvtwin.run, history="kvt1 dtype=f16 dims=1,2,3 | put 0*7"),
    ],
    ids=["fuzz", "laws", "certify", "run"],
)
def test_rows_that_are_too_large_for_f16_do_not_warn(judge, cls):
    result = judge(cls)
    assert result, str(result)
