"""The job of a CI, by itself and as the steps of the GitHub Action."""

import os
import pathlib
import subprocess
import sys
import types
from xml.etree import ElementTree

import ci_jobs
import pytest
import toys
import yaml

import kvtwin.ci

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOYS = toys.__file__


def job(tmp_path, name, *words):
    """Runs the job on a toy class, with corpus and pages in `tmp_path`."""
    return kvtwin.ci.main(
        [
            *(f"{TOYS}:{name}", "--seconds", "0.5", "--seed", "1"),
            *("--corpus", str(tmp_path / "corpus.txt")),
            *("--pages", str(tmp_path / "pages"), *words),
        ]
    )


def test_a_right_class_passes(tmp_path, capsys):
    assert job(tmp_path, "Right", "--junit", str(tmp_path / "out.xml")) == 0
    assert "kvtwin: 0 findings" in capsys.readouterr().out
    assert (tmp_path / "corpus.txt").read_text() == ""
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("1", "0")
    assert not list((tmp_path / "pages").iterdir())


def test_a_finding_is_kept_and_tried_first(tmp_path, capsys):
    assert job(tmp_path, "SeesTooFew", "--junit", str(tmp_path / "out.xml")) == 1
    out = capsys.readouterr().out
    history = (tmp_path / "corpus.txt").read_text().strip()
    assert history.startswith("kvt1 ") and history in out
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert suite.get("failures") == "1"
    assert [case.get("name") for case in suite] == [history]
    assert (tmp_path / "pages" / "found.html").exists()
    # The next job: the earlier history fails first, and is kept once.
    assert job(tmp_path, "SeesTooFew") == 1
    assert "1 earlier histories, 1 of them fail" in capsys.readouterr().out
    assert (tmp_path / "corpus.txt").read_text().split("\n").count(history) == 1
    assert (tmp_path / "pages" / "corpus-0.html").exists()
    # The cache is mended: the earlier history passes.
    assert job(tmp_path, "Right") == 0
    assert "1 earlier histories, 0 of them fail" in capsys.readouterr().out


def test_a_damaged_corpus(tmp_path, capsys):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("nonsense\n")
    assert job(tmp_path, "Right") == 2
    error = capsys.readouterr().err
    assert "not run: nonsense: " in error
    assert f"1 of the histories in {corpus} could not be run" in error
    assert job(tmp_path, "SeesTooFew") == 1
    assert corpus.read_text().startswith("nonsense\nkvt1 ")


@pytest.mark.parametrize(
    ("name", "text"),
    [("bytes", "which is not UTF-8"), ("a folder", "Is a directory"), ("--junit", "Is a di")],
)
def test_files_that_cannot_be_read_or_written(name, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kvtwin.ci.Class, "fuzz", lambda *_: 1 / 0)  # It is not run.
    corpus, junit = tmp_path / "corpus.txt", tmp_path / "out.xml"
    if name == "bytes":
        corpus.write_bytes(b"\xff\n")
    else:
        (junit if name == "--junit" else corpus).mkdir()
    assert job(tmp_path, "Right", "--junit", str(junit)) == 2
    error = capsys.readouterr().err
    assert text in error and str(junit if name == "--junit" else corpus) in error


def test_a_corpus_that_cannot_be_written_stays(tmp_path, capsys):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("kvt1 | put 0*1\n")
    (tmp_path / "corpus.txt.new").mkdir()
    assert job(tmp_path, "SeesTooFew") == 2
    assert "corpus.txt.new" in capsys.readouterr().err
    assert corpus.read_text() == "kvt1 | put 0*1\n"


def compiled(tmp_path, example):
    """Returns the path of an example of docs/examples with its bug, as a library."""
    library, source = tmp_path / "mine.so", ROOT / "docs/examples" / example
    words = ["-DBUG", "-DPOOL_BUG", "-shared", "-fPIC", f"-I{ROOT}/include", source]
    subprocess.run(["cc", *map(str, [*words, "-o", library])], check=True)
    return str(library)


def test_a_library(tmp_path, capsys):
    library = compiled(tmp_path, "c_cache.c")
    words = [library, "--seconds", "1", "--pages", str(tmp_path / "pages")]
    corpus = ["--corpus", str(tmp_path / "corpus.txt")]
    assert kvtwin.ci.main([*words, *corpus]) == 1
    assert "row 0 misses the token" in capsys.readouterr().out
    assert (tmp_path / "pages" / "found.html").exists()
    # Again, as numeric: the earlier history fails there, too.
    assert kvtwin.ci.main([*words, *corpus, "--", "--level", "numeric"]) == 1
    assert "1 earlier histories, 1 of them fail" in capsys.readouterr().out


def test_options_that_choose_histories(tmp_path, capsys):
    """Earlier histories are judged with those options that `kvtwin run` has."""
    words = [compiled(tmp_path, "c_cache.c"), "--seconds", "0.3", "--seed", "1"]
    words += ["--pages", str(tmp_path / "pages"), "--corpus", str(tmp_path / "corpus.txt")]
    for earlier, options in (
        ("0 earlier histories, 0", ["--dtypes"]),
        ("1 earlier histories, 1", ["--dtypes", "--known", "another-bucket", "--kind=swa"]),
    ):
        assert kvtwin.ci.main([*words, "--", *options]) == 1
        out, error = capsys.readouterr()
        assert f"kvtwin: {earlier} of them fail" in out
        assert out.endswith("kvtwin: 1 finding\n") and "not run" not in error
    # The finding is known: it is passed over in both ways, also by its check alone.
    for known in ("c_cache-subject-rows+swa+put", "c_cache-subject-rows"):
        assert kvtwin.ci.main([*words, "--", "--known", "x", known]) == 0
        assert "1 earlier histories, 0 of them fail" in capsys.readouterr().out


def test_a_new_finding_that_passed_as_an_earlier_one(tmp_path, capsys, monkeypatch):
    (tmp_path / "corpus.txt").write_text("kvt1 | put 0*1\n")
    found = kvtwin.ci.Found("kvt1 | put 0*1", "wrong", "rerun")
    monkeypatch.setattr(kvtwin.ci.Class, "fuzz", lambda *_: [found])
    assert job(tmp_path, "Right") == 1
    assert "kvtwin: 1 finding" in capsys.readouterr().out


def test_an_earlier_finding_is_reported_if_new_histories_cannot_run(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "corpus.txt").write_text("kvt1 | put 0*1\n")
    found = kvtwin.ci.Found("kvt1 | put 0*1", "wrong", "rerun")
    monkeypatch.setattr(kvtwin.ci.Class, "run", lambda *_: [found])
    monkeypatch.setattr(kvtwin.ci.Class, "fuzz", lambda *_: 1 / 0)
    assert job(tmp_path, "Right", "--junit", str(tmp_path / "out.xml")) == 1
    out, error = capsys.readouterr()
    assert "wrong\n  kvt1 | put 0*1\n  rerun\nkvtwin: 1 finding\n" in out
    assert error == "kvtwin.ci: ZeroDivisionError: division by zero\n"
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert [case.get("name") for case in suite] == ["kvt1 | put 0*1"]
    assert (tmp_path / "corpus.txt").read_text() == "kvt1 | put 0*1\n"


def test_a_library_of_pools(tmp_path, capsys):
    words = [compiled(tmp_path, "c_pool.c"), "--seconds", "0.3", "--seed", "1"]
    words += ["--pages", str(tmp_path / "pages"), "--corpus", str(tmp_path / "corpus.txt")]
    for earlier in ("0 earlier histories, 0 of them", "1 earlier histories, 1 of them"):
        assert kvtwin.ci.main(words) == 1
        out = capsys.readouterr().out
        assert earlier in out and "kvtwin: 1 finding" in out
    # The pool has no groups; the earlier finding still counts.
    words += ["--", "--kind", "groups"]
    assert kvtwin.ci.main(words) == 1
    out, error = capsys.readouterr()
    assert "kvtwin: 1 finding" in out and "kvtwin exited with 2" in error
    (tmp_path / "corpus.txt").unlink()
    assert kvtwin.ci.main(words) == 2


def test_the_seed_of_the_day(tmp_path, capsys):
    words = [f"{TOYS}:Right", "--seconds", "0.1", "--pages", str(tmp_path)]
    assert kvtwin.ci.main(words) == 0
    seed = capsys.readouterr().out.partition("seed ")[2].split()[0]
    assert len(seed) == 8 and seed.startswith("20")


@pytest.mark.parametrize(
    ("backend", "words", "message"),
    [
        ("no/such.py:Cache", [], "FileNotFoundError"),
        (f"{TOYS}:NoSuchClass", [], "no attribute 'NoSuchClass'"),
        (f"{TOYS}:Right", ["--", "--profile", "mlx"], "--profile mlx; a class has only --known"),
        (f"{TOYS}:Right", ["--", "--level", "numbers"], "numbers"),
        ("no/such/library.so", [], "kvtwin exited with 2"),
        ("my_cache.py", [], "name its class, as my_cache.py:MyCache"),
    ],
)
def test_what_cannot_be_run(tmp_path, capsys, backend, words, message):
    pages = ["--pages", str(tmp_path / "pages")]
    assert kvtwin.ci.main([backend, *pages, *words]) == 2
    assert message in capsys.readouterr().err


def test_an_earlier_finding_of_a_library_names_its_backend(tmp_path, monkeypatch):
    command = tmp_path / "kvtwin"
    command.write_text('#!/bin/sh\necho \'{"differences": 1, "reason": "wrong"}\'; exit 1\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    library = kvtwin.ci.Library("./mine.so", ["--profile", "mlx"])
    (found,) = library.run("kvt1 | put 0*1", tmp_path / "page.html")
    assert found.rerun == (
        f"{command} run 'kvt1 | put 0*1' --backend ./mine.so --profile mlx"
    )


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('"vacuity": ["never: full"]', "--marks: never: full"),
        ('"not_judged": "visibility"', "not judged: nothing was compared"),
    ],
)
def test_a_run_that_proves_nothing(answer, message, tmp_path, monkeypatch):
    command = tmp_path / "kvtwin"
    command.write_text(f"""#!/bin/sh
echo '{{"differences": 0, {answer}}}'; exit 1
""")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    library = kvtwin.ci.Library("./pool.so", ["--kind", "paged", "--marks"])
    with pytest.raises(RuntimeError, match=message):
        library.fuzz(1, 1, tmp_path / "page.html")


def test_a_class_that_keeps_no_token(pool, tmp_path, monkeypatch):
    class Full(pool):
        def append(self, *arguments):
            raise kvtwin.CacheFull

    monkeypatch.setitem(sys.modules, "full", types.SimpleNamespace(Full=Full))
    with pytest.raises(RuntimeError, match="not judged: no append"):
        kvtwin.ci.Class("full:Full").fuzz(0.5, 1, tmp_path / "page.html")


@pytest.mark.parametrize("words", [["--seconds", "0"], ["--seed", "-1"]])
def test_wrong_options(words, capsys):
    with pytest.raises(SystemExit):
        kvtwin.ci.main(["x.so", *words])
    assert f"{words[0]} is {words[1]}".rstrip("0") in capsys.readouterr().err


@pytest.fixture(scope="module")
def clean_path(tmp_path_factory):
    """A PATH whose `python3` belongs to an empty virtual environment."""
    home = tmp_path_factory.mktemp("python") / "venv"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    return f"{home}/bin:{os.environ['PATH']}"


@pytest.fixture
def wheel():
    """The wheel that ./dev python has built."""
    found = sorted((ROOT / "build/python/wheel").glob("kvtwin-*.whl"))
    if not found:
        pytest.skip("it needs build/python/wheel, which ./dev python makes")
    return str(found[-1])


def make_project(folder, flags):
    """Makes a project whose `make libmine.so` builds the cache of docs/examples."""
    folder.mkdir()
    source = ROOT / "docs/examples/c_cache.c"
    (folder / "Makefile").write_text(
        f"libmine.so:\n\tcc {flags} -shared -fPIC -I{ROOT}/include {source} -o $@\n"
    )
    return folder


def steps_of_page(wheel):
    """Returns the steps that docs/ci.md has, with a short time and this wheel."""
    page = (ROOT / "docs/ci.md").read_text(encoding="utf-8")
    steps = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    steps[-1]["with"] |= {"seconds": 2, "seed": 1, "kvtwin": wheel}
    return steps


def test_a_job_of_github(tmp_path, wheel, clean_path):
    """Runs the job of docs/ci.md with all steps of the Action: three times, and the
    cache is mended before the last."""
    name = "kvtwin/kvtwin/.github/actions/check"
    actions = {name: ROOT / ".github/actions/check"}
    caches = ci_jobs.Caches(tmp_path / "caches")
    jobs = []
    for number, flags in enumerate(["-DBUG", "-DBUG", ""]):
        work = make_project(tmp_path / f"work-{number}", flags)
        job = ci_jobs.GitHub(work, clean_path, caches, str(number), actions)
        jobs.append(job.run(steps_of_page(wheel)))
    first, second, last = jobs
    assert [job.code for job in jobs] == [1, 1, 0], first.log

    (annotation,) = [x for x in first.log.splitlines() if x.startswith("::error")]
    assert annotation.startswith("::error title=kvtwin::")
    history = "kvt1" + annotation.partition("%0Akvt1")[2].partition("%0A")[0]
    assert history in (first.work / "summary.md").read_text()
    (page,) = first.artifacts["kvtwin-pages"]
    assert page.name == "found.html" and "<html" in page.read_text()[:200]

    assert "1 earlier histories, 1 of them fail" in second.log
    assert len(second.artifacts["kvtwin-pages"]) == 2
    assert "1 earlier histories, 0 of them fail" in last.log
    assert "::error" not in last.log and not last.artifacts
    upload = "actions/upload-artifact@v4"
    assert [upload in job.ran for job in jobs] == [True, True, False]
    assert (last.work / ".kvtwin/corpus.txt").read_text() == f"{history}\n"


def test_a_job_of_github_with_a_class(tmp_path, wheel, clean_path):
    """The other inputs: a class, and options, which a class does not have."""
    def run(**inputs):
        work = tmp_path / inputs["backend"].partition(":")[2]
        work.mkdir(exist_ok=True)
        caches = ci_jobs.Caches(tmp_path / "caches")
        actions = {"check": ROOT / ".github/actions/check"}
        job = ci_jobs.GitHub(work, clean_path, caches, "1", actions)
        given = {"seconds": "0.5", "kvtwin": wheel, **inputs}
        return job.run([{"uses": "check@main", "with": given}])

    assert run(backend=f"{TOYS}:SeesTooFew").code == 1
    assert run(backend=f"{TOYS}:Right").code == 0
    failed = run(backend=f"{TOYS}:Right", options="--profile mlx")
    assert failed.code == 2 and "a class has only --known" in failed.log
    with pytest.raises(ValueError, match="no input {'second'}"):
        run(backend=f"{TOYS}:Right", second="1")


def test_a_job_of_gitlab(tmp_path, wheel, clean_path):
    template = yaml.safe_load((ROOT / "docs/install/gitlab.yml").read_text())
    ends = []
    for number, name in enumerate(["SeesTooFew", "SeesTooFew", "Right"]):
        work = tmp_path / f"work-{number}"
        work.mkdir()
        variables = {
            "KVTWIN_BACKEND": f"{TOYS}:{name}", "KVTWIN_PACKAGE": wheel,
            "KVTWIN_SECONDS": "0.5",
        }
        job = template[".kvtwin"]
        ends.append(
            ci_jobs.run_gitlab(job, variables, work, clean_path, tmp_path / "cache")
        )
    assert [code for code, _, _ in ends] == [1, 1, 0], ends
    assert "1 earlier histories, 1 of them fail" in ends[1][1]
    assert "1 earlier histories, 0 of them fail" in ends[2][1]
    pages, junit = ends[0][2]
    assert (pages / "found.html").exists()
    assert ElementTree.parse(junit).getroot().get("failures") == "1"


def test_a_module_that_exits(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("exits_now.py").write_text("import sys\nsys.exit(0)\n")
    assert kvtwin.ci.main(["exits_now.py:X", "--seconds", "1"]) == 2
    assert "exits_now.py exits when it is imported: 0" in capsys.readouterr().err


def test_a_known_finding_of_a_class(tmp_path, capsys):
    assert job(tmp_path, "SeesTooFew") == 1
    out = capsys.readouterr().out
    # The command of the finding runs as it is printed.
    (rerun,) = [line for line in out.splitlines() if "kvtwin.run(SeesTooFew" in line]
    again = subprocess.run(rerun, shell=True, stdout=subprocess.PIPE, text=True, check=True)
    assert (tmp_path / "corpus.txt").read_text().strip() in again.stdout
    bucket = kvtwin.fuzz(toys.SeesTooFew, operations=2000).findings[0].bucket
    assert "+" in bucket
    for known in (bucket, bucket.partition("+")[0]):
        words = ["--", "--known", "x", known, "--level", "visibility"]
        assert job(tmp_path, "SeesTooFew", *words) == 0
        assert "1 earlier histories, 0 of them fail" in capsys.readouterr().out
    assert job(tmp_path, "SeesTooFew", "--", "--known", "x") == 1


def test_a_file_that_hides_a_module(tmp_path):
    for name in ("numpy", "sys", "colorsys"):
        (tmp_path / f"{name}.py").write_text("class Mine: pass\n")
    (tmp_path / "empty").mkdir()
    for name in ("numpy", "sys", "colorsys"):  # Not all of them are loaded.
        words = [sys.executable, "-m", "kvtwin.ci", f"../{name}.py:Mine", "--seconds", "1"]
        done = subprocess.run(words, cwd=tmp_path / "empty", stderr=subprocess.PIPE, text=True)
        assert done.returncode == 2
        assert f"{name}.py would hide the module {name} (" in done.stderr


def test_a_class_that_cannot_be_made(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("unmade.py").write_text(
        "import kvtwin, toys\n"
        "class Unmade(toys.Legal):\n"
        "    def __init__(self, setup):\n"
        "        raise OSError('\\x1b[31mno disk\\x1b[0m')\n"
    )
    files = ["--junit", "j.xml", "--corpus", "c.txt"]
    assert kvtwin.ci.main(["unmade.py:Unmade", "--seconds", "1", *files]) in (1, 2)
    assert "no disk" in "".join(capsys.readouterr())
    if pathlib.Path("c.txt").exists():
        assert pathlib.Path("c.txt").read_text() == ""
        ElementTree.parse("j.xml")
