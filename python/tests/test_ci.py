"""The job of a CI, by itself and as the steps of the GitHub Action."""

import os
import pathlib
import subprocess
import sys
from xml.etree import ElementTree

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
    (tmp_path / "corpus.txt").write_text("nonsense\n")
    assert job(tmp_path, "Right") == 0
    assert "not run: nonsense: " in capsys.readouterr().err


def test_a_library(tmp_path, capsys):
    library, source = tmp_path / "mine.so", ROOT / "docs/examples/c_cache.c"
    words = ["-DBUG", "-shared", "-fPIC", f"-I{ROOT}/include", source, "-o", library]
    subprocess.run(["cc", *map(str, words)], check=True)
    words = [str(library), "--seconds", "1", "--pages", str(tmp_path / "pages")]
    corpus = ["--corpus", str(tmp_path / "corpus.txt")]
    assert kvtwin.ci.main([*words, *corpus]) == 1
    assert "row 0 misses the token" in capsys.readouterr().out
    assert (tmp_path / "pages" / "found.html").exists()
    # Again, as numeric: the earlier history fails there, too.
    assert kvtwin.ci.main([*words, *corpus, "--", "--level", "numeric"]) == 1
    assert "1 earlier histories, 1 of them fail" in capsys.readouterr().out


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
        (f"{TOYS}:Right", ["--", "--profile", "mlx"], "a class has no options"),
        ("no/such/library.so", [], "kvtwin exited with 2"),
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


@pytest.mark.parametrize("words", [["--seconds", "0"], ["--seed", "-1"]])
def test_wrong_options(words, capsys):
    with pytest.raises(SystemExit):
        kvtwin.ci.main(["x.so", *words])
    assert f"{words[0]} is {words[1]}".rstrip("0") in capsys.readouterr().err


def test_the_steps_of_the_action(tmp_path):
    """Runs the shell step of the Action as GitHub would, with its environment."""
    path = ROOT / ".github/actions/check/action.yml"
    action = yaml.safe_load(path.read_text())
    given = {name: i.get("default", "") for name, i in action["inputs"].items()}
    given |= {"backend": f"{TOYS}:SeesTooFew", "seconds": "0.5", "seed": "1"}
    (step,) = [s for s in action["runs"]["steps"] if "kvtwin.ci" in s.get("run", "")]
    env = dict(os.environ, GITHUB_ACTIONS="true")
    env["GITHUB_STEP_SUMMARY"] = str(tmp_path / "summary.md")
    env["PATH"] = f"{pathlib.Path(sys.executable).parent}:{env['PATH']}"
    for name, value in step["env"].items():
        key = value.removeprefix("${{ inputs.").removesuffix(" }}")
        env[name] = given[key]
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", step["run"]],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )
    assert done.returncode == 1, done.stderr
    (annotation,) = [x for x in done.stdout.splitlines() if x.startswith("::error")]
    assert annotation.startswith("::error title=kvtwin::") and "%0Akvt1" in annotation
    assert "kvt1" in (tmp_path / "summary.md").read_text()
    (upload,) = [s for s in action["runs"]["steps"] if "artifact" in s.get("uses", "")]
    pages = tmp_path / upload["with"]["path"]
    assert (pages / "found.html").exists()
    (cache,) = [s for s in action["runs"]["steps"] if "cache" in s.get("uses", "")]
    assert (tmp_path / cache["with"]["path"]).read_text().startswith("kvt1")
