"""Campaigns: the same report for any number of workers, and after any kill."""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

WHY = "it needs the extra [campaign], some 400 MB: ./dev campaign runs these tests"
pytest.importorskip("ray", reason=WHY)
pytest.importorskip("pyarrow", reason=WHY)

from kvtwin.campaign import _explore, _searches, _shards, _store  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
# ./dev campaign builds both.
COMMAND = str(ROOT / "build/kvtwin")
CANARY = ROOT / "build/kvtwin_canary"
KILLS = int(os.environ.get("KVTWIN_CAMPAIGN_KILLS", "4"))


def start(name, *words):
    given = [sys.executable, "-m", "kvtwin.campaign", name, "--json", "--command", COMMAND]
    return subprocess.Popen(
        [*given, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process):
    """Returns the exit code, the report without its cost, the cost, the errors."""
    out, errors = process.communicate(timeout=600)
    lines = errors.splitlines(keepends=True)
    errors = "".join(one for one in lines if not one.endswith("s of processors\n"))
    whole = json.loads(out) if out else {}
    cost = whole.pop("cost", {})
    return process.returncode, whole, cost, errors


def campaign(name, *words):
    return ended(start(name, *words))


FUZZ = ("fuzz", "--ops", 60_000, "--seed", 5, "--shard-ops", 10_000)


@pytest.fixture(scope="module")
def fuzzed():
    code, report, cost, errors = campaign(*FUZZ, "--workers", 1)
    assert (code, errors) == (0, "")
    assert cost["workers"] == 1 and cost["cpu_seconds"] > 0
    return report


def test_a_report_is_that_of_the_shards(fuzzed):
    """Each shard is a run of the command, with a seed of its own."""
    digests, operations, seeds = [], 0, set()
    for number in range(6):
        seed = _searches.seed_of(5, number)
        seeds.add(seed)
        words = [COMMAND, "fuzz", "--ops", "10000", "--seed", str(seed), "--json"]
        answer = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
        digests.append((f"fuzz-{number}", answer["digest"]))
        operations += answer["operations"]
    assert len(seeds) == 6
    assert fuzzed["operations"] == operations >= 60_000
    assert fuzzed["digest"] == _searches.digest_of(digests)
    assert (fuzzed["shards"], fuzzed["complete"], fuzzed["differences"]) == (6, True, 0)


def test_two_workers_give_the_same_report(fuzzed):
    assert campaign(*FUZZ, "--workers", 2)[:2] == (0, fuzzed)


def test_another_seed_gives_another_report(fuzzed):
    words = ["fuzz", "--ops", 60_000, "--seed", 6, "--shard-ops", 10_000]
    assert campaign(*words)[1]["digest"] != fuzzed["digest"]


def test_a_campaign_continues_from_its_store(fuzzed, tmp_path):
    store = tmp_path / "run"
    assert campaign(*FUZZ, "--store", store)[:2] == (0, fuzzed)
    (store / "fuzz-1.json").unlink()
    damaged = store / "fuzz-3.json"
    damaged.write_bytes(damaged.read_bytes().replace(b'"operations": 1', b'"operations": 2'))
    (store / "fuzz-4.json.0.part").write_text("half")
    code, report, cost, errors = campaign(*FUZZ, "--store", store)
    assert (code, report, cost["reused"]) == (0, fuzzed, 4)
    assert "done again" in errors and "fuzz-3.json" in errors
    # By a URI, and with nothing left to do.
    code, report, cost, errors = campaign(*FUZZ, "--store", f"file://{store}")
    assert (code, report, cost["reused"], errors) == (0, fuzzed, 6, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", 7], "seed is 5 there and 7 here"),
        (["--ops", 70_000], "ops is 60000 there and 70000 here"),
        (["--command", "/bin/true"], "command is"),
        (["--", "--kind", "swa"], "options is [] there and ['--kind', 'swa'] here"),
    ],
)
def test_a_store_of_another_campaign(words, message, tmp_path):
    store = _store.Store(str(tmp_path))
    options = {"command": _shards.hash_of_file(COMMAND), "options": []}
    store.begin(
        {"campaign": "fuzz", "ops": 60_000, "seed": 5, "shard_ops": 10_000, **options}
    )
    code, _, _, errors = campaign(*FUZZ, "--store", tmp_path, *words)
    assert code == 2 and message in errors


def hostile(tmp_path, name):
    if name == "a file":
        path = tmp_path / "file"
        path.write_text("")
        return path, "--store"
    if name == "a scheme":
        return "nonsense://place/run", "--store nonsense://place/run"
    if name == "other files":
        (tmp_path / "thesis.tex").write_text("")
        return tmp_path, "it has other files, such as thesis.tex"
    if name == "cut":
        _store.Store(str(tmp_path)).begin({"campaign": "fuzz"})
        path = tmp_path / "run.json"
        path.write_bytes(path.read_bytes()[:-1])
        return tmp_path, "run.json: it was changed or cut short"
    _store.Store(str(tmp_path)).write_bytes("run.json", b"[1, 2]")
    return tmp_path, "run.json: it is not an object"


@pytest.mark.parametrize("name", ["a file", "a scheme", "other files", "cut", "a list"])
def test_a_hostile_store(name, tmp_path):
    place, message = hostile(tmp_path, name)
    code, _, _, errors = campaign(*FUZZ, "--store", place)
    assert code == 2 and message in errors and "Traceback" not in errors


def test_a_stored_result_without_its_keys_is_done_again(fuzzed, tmp_path):
    assert campaign(*FUZZ, "--store", tmp_path)[1] == fuzzed
    store = _store.Store(str(tmp_path))
    store.write("fuzz-0.json", {"code": 0})
    store.write("fuzz-2.json", {"code": 0, "answer": {}, "cpu_seconds": 1.0})
    store.write_bytes("fuzz-5.json", b"null")
    code, report, cost, errors = campaign(*FUZZ, "--store", tmp_path)
    assert (code, report, cost["reused"]) == (0, fuzzed, 3)
    assert errors.count("done again") == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fuzz"], "--ops"),
        (["fuzz", "--ops", "0"], "it is 0, it must be 1 or more"),
        (["fuzz", "--ops", "9", "--seed", "-1"], "it is -1"),
        (["fuzz", "--ops", "9", "--workers", "none"], "--workers"),
        (["fuzz", "--ops", "9", "--address", "auto"], "--address needs --store"),
        (["fuzz", "--ops", "9", "--command", "/no/such"], "/no/such: No such file"),
        (["fuzz", "--ops", "9", "--", "--no-such-option"], "unknown option"),
        (["fuzz", "--ops", "9", "--", "--backend", "/no/such.so"], "/no/such.so: No such"),
        (["fuzz", "--ops", "9", "--command", "/bin/true"], "/bin/true printed no operations"),
        (["laws", "--command", "/no/such"], "/no/such: No such file"),
        (["explore", "--command", "/no/such"], "/no/such: No such file"),
        (["explore", "--command", "/bin/true"], "/bin/true exited with 0"),
        (["museum", "--patches", "/no/such"], "it has no patches"),
        (["backends", "mlx", "--repository", "/no/such"], "it has no ./dev"),
        (["explore", "--cells", "99"], "--cells"),
    ],
)
def test_wrong_options(words, message):
    code, _, _, errors = campaign(*words)
    assert code == 2 and message in errors and "Traceback" not in errors


# Findings.


@pytest.fixture(scope="module")
def bug(tmp_path_factory):
    """A backend with a planted bug."""
    library = tmp_path_factory.mktemp("bug") / "mine.so"
    source = ROOT / "docs/examples/c_cache.c"
    words = ["-DBUG", "-shared", "-fPIC", f"-I{ROOT}/include", source, "-o", library]
    subprocess.run(["cc", *map(str, words)], check=True)
    return library


def test_the_library_is_a_parameter(tmp_path):
    library = tmp_path / "mine.so"
    library.write_text("1")
    found = _shards.hash_of_file(library)
    for options in (["--backend", str(library)], [f"--backend={library}"]):
        assert _shards.parameters_of(COMMAND, options)["backend"] == found
    for options in ([], ["--backend"], ["--backends", str(library)]):
        assert "backend" not in _shards.parameters_of(COMMAND, options)


def test_a_planted_bug_is_found_once_and_shrunk_once(bug, tmp_path):
    words = ["fuzz", "--ops", 8000, "--shard-ops", 2000]
    backend = ["--", "--backend", bug, "--level", "visibility"]
    reports = []
    for workers in (1, 2):
        store = tmp_path / str(workers)
        code, report, _, errors = campaign(
            *words, "--workers", workers, "--store", store, *backend
        )
        assert (code, errors) == (1, "")
        reports.append(report)
        assert len(list(store.glob("fuzz-*.json"))) == 4
        assert [path.name for path in store.glob("shrunk-*")] == ["shrunk-fuzz-0.json"]
    assert reports[0] == reports[1]
    (found,) = reports[0]["findings"]
    assert found["shrunk_to"] <= 3 and found["shard"] == "fuzz-0"
    assert found["bucket"] and str(bug) in found["rerun"]


def test_two_planted_bugs_are_two_findings():
    """The command of this test has two planted bugs, in windows and in copies."""
    words = ["fuzz", "--ops", 60_000, "--shard-ops", 10_000, "--command", CANARY]
    code, report, _, _ = campaign(*words, "--workers", 2)
    assert code == 1
    buckets = [found["bucket"] for found in report["findings"]]
    assert len(set(buckets)) == len(buckets) >= 2
    assert campaign(*words, "--workers", 1)[1] == report


def finding(bucket, level=None):
    return {"level": level, "bucket": bucket}


def test_buckets():
    """A finding is known by the operations of a shortest history that it contains."""
    buckets = _searches.Buckets()
    raw = finding("toy-rows+swa+put+drop+copy+put")
    buckets.add("fuzz-0", [raw], [finding("toy-rows+put+copy")])
    assert buckets.is_known(raw)
    assert buckets.is_known(finding("toy-rows+put+get+copy"))
    assert not buckets.is_known(finding("toy-rows+copy+put"))
    assert not buckets.is_known(finding("toy-mask+put+copy"))
    assert not buckets.is_known(finding("toy-rows+put+copy", "numeric"))
    # The same bug by another comparison is one finding, of the lower shard.
    other = finding("toy-mask+copy+put+copy")
    buckets.add("fuzz-1", [other], [finding("toy-rows+put+copy")])
    assert buckets.is_known(other)
    (kept,) = buckets.kept.values()
    assert kept["shard"] == "fuzz-0"


# Programs that end in other ways.


def program(tmp_path, text):
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return _shards.Shard("one", (str(path),), "operations")


def test_a_killed_program_runs_again(tmp_path):
    again = f'[ -e {tmp_path}/was ] || {{ touch {tmp_path}/was; kill -9 $$; }}'
    again += """; echo '{"operations": 0}'"""
    result = _shards.run_program(program(tmp_path, again))
    assert (result["answer"], result["code"]) == ({"operations": 0}, 0)
    with pytest.raises(_shards.CampaignError, match="killed 5 times"):
        _shards.run_program(program(tmp_path, "kill -9 $$"))


def test_a_crash_is_a_finding(tmp_path):
    result = _shards.run_program(program(tmp_path, "echo rerun this >&2; kill -SEGV $$"))
    (found,) = _searches.findings_in(result["answer"])
    assert found["bucket"] == "crash-11" and "rerun this" in found["reason"]


@pytest.mark.parametrize("printed", ["", "nonsense", "{}", "[1]", '"operations"', r"\377"])
def test_a_program_that_prints_something_else(printed, tmp_path):
    with pytest.raises(_shards.CampaignError, match="one: .* printed no operations"):
        _shards.run_program(program(tmp_path, f"printf '{printed}'"))


def test_an_error_names_the_shard(tmp_path):
    with pytest.raises(_shards.CampaignError, match="one: .* exited with 2: wrong"):
        _shards.run_program(program(tmp_path, "echo wrong >&2; exit 2"))


# The other searches.


def test_laws(tmp_path):
    words = ["laws", "--runs", 40, "--shard-runs", 20, "--seed", 3]
    options = ["--", "--twin", "optimized"]
    code, report, _, errors = campaign(*words, "--workers", 2, *options)
    assert (code, errors, report["complete"]) == (0, "", True)
    laws = {one["law"]: one for one in report["laws"]}
    assert len(laws) > 20 and report["shards"] == 2 * len(laws)
    assert laws["frame"]["holds"] is True and laws["frame"]["histories"] == 40
    assert campaign(*words, "--workers", 1, *options)[1] == report


def test_a_broken_law(bug):
    words = ["laws", "--runs", 20, "--shard-runs", 10, "--workers", 2]
    code, report, _, _ = campaign(*words, "--", "--backend", bug)
    assert code == 1 and report["differences"] == len(report["findings"]) > 0
    assert all("kvtwin laws" in found["rerun"] for found in report["findings"])


def test_museum(tmp_path):
    for name in ("X01", "A05"):
        text = (ROOT / f"props/museum/{name}.patch").read_text()
        (tmp_path / f"{name}.patch").write_text(text)
    words = ["museum", "--patches", tmp_path, "--seeds", 1, "--workers", 2]
    code, report, _, errors = campaign(*words)
    assert (code, errors) == (0, "")
    assert [(one["id"], one["found"]) for one in report["bugs"]] == [
        ("A05", True),
        ("X01", True),
    ]


def test_patches_are_parameters_of_the_museum(tmp_path):
    def parameters():
        asked = argparse.Namespace(patches=tmp_path, seeds=1, command=COMMAND, options=[])
        return _searches.SEARCHES["museum"](asked).parameters()

    patch = tmp_path / "X01.patch"
    patch.write_text("twin: optimized\n---\n+a\n")
    before = parameters()
    assert parameters() == before
    patch.write_text("twin: optimized\n---\n+b\n")
    assert parameters() != before


def make_clone(folder):
    subprocess.run(["git", "init", "-q", folder], check=True)


def test_mutants(tmp_path):
    make_clone(tmp_path)
    script = tmp_path / "props/repo/mutants.py"
    script.parent.mkdir(parents=True)
    script.write_text(
        """
import json, pathlib, sys
part, work = sys.argv[sys.argv.index("--part") + 1], sys.argv[sys.argv.index("--work") + 1]
assert "worker-" in work
alive = [{"key": "k", "file": "a.cc", "line": 3, "after": "b"}] if part == "1/3" else []
print(json.dumps({"counts": {"killed": 2, "survived": len(alive)}, "survived": alive}))
sys.exit(len(alive))
"""
    )
    words = ["mutants", "--parts", 3, "--repository", tmp_path, "--python", sys.executable]
    code, report, _, _ = campaign(*words, "--workers", 2)
    assert code == 1 and report["counts"] == {"killed": 6, "survived": 1}
    (found,) = report["findings"]
    assert found["reason"] == "survived: a.cc:3: b" and found["shard"] == "mutants-1"


def make_dev(folder):
    make_clone(folder)
    dev = folder / "dev"
    dev.write_text('#!/bin/sh\ndate +%N\necho "judged $2"\n[ "$2" = right ]\n')
    dev.chmod(0o755)


def test_backends(tmp_path):
    make_dev(tmp_path)
    words = ["backends", "right", "wrong", "--repository", tmp_path]
    code, report, _, _ = campaign(*words)
    (found,) = report["findings"]
    assert (code, report["shards"], found["shard"]) == (1, 2, "backend-wrong")
    assert found["reason"] == "judged wrong"
    assert campaign(*words)[1] == report  # Whatever was printed as well.


def test_results_of_other_sources_are_not_used(tmp_path):
    make_dev(tmp_path)
    (tmp_path / ".gitignore").write_text("/build/\n")
    words = ["backends", "right", "--repository", tmp_path, "--store", tmp_path / "runs"]
    code, report, _, _ = campaign(*words)
    assert code == 0
    (tmp_path / "build").mkdir()
    (tmp_path / "build/made.o").write_text("ignored")
    code, same, cost, _ = campaign(*words)  # The store is in the clone, too.
    assert (code, same, cost["reused"]) == (0, report, 1)
    (tmp_path / "page.md").write_text("new")
    code, _, _, errors = campaign(*words)
    assert code == 2 and "sources is " in errors
    other = tmp_path / "other"
    other.mkdir()
    asked = argparse.Namespace(
        names=["right"], repository=str(other), store=None, command=COMMAND, options=[]
    )
    (other / "dev").write_text("")
    shutil.rmtree(tmp_path / ".git")
    with pytest.raises(_shards.CampaignError, match="not a git repository"):
        _searches.Backends(asked).parameters()


def test_the_bucket_of_a_crash_names_what_ran():
    def bucket(reason, *what):
        return _searches.crash_of({"crash": 6, "reason": reason}, *what)["bucket"]

    assert bucket("rerun kvtwin run 'kvt1 cells=2 | put 0*1'") == "crash-6-causal"
    assert bucket("rerun kvtwin run 'kvt1 kind=swa cells=2 | put'") == "crash-6-swa"
    assert bucket("rerun kvtwin run 'kvp1 blocks=2 | kind=1'") == "crash-6-paged"
    assert bucket("it printed nothing") == "crash-6"
    assert bucket("anything", "museum-X01") == "crash-6-museum-X01"


# The explorer.

SMALL = ("explore", "--cells", 3, "--positions", 3)


@pytest.fixture(scope="module")
def explored():
    """The report of one process."""
    words = [COMMAND, "explore", "--cells=3", "--positions=3", "--threads=1", "--json"]
    whole = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
    assert whole["states"] > 1000
    return whole


def same_counts(report, explored):
    keys = ("case", "states", "transitions", "differences", "depth", "fixed_point")
    for one, other in zip(report["cases"], explored["cases"], strict=True):
        assert {key: one[key] for key in keys} == {key: other[key] for key in keys}
    for key in ("states", "transitions", "differences"):
        assert report[key] == explored[key]


def test_the_explorer_counts_as_one_process(explored, tmp_path):
    code, report, cost, errors = campaign(*SMALL, "--workers", 2, "--store", tmp_path)
    assert (code, errors, report["complete"]) == (0, "", True)
    same_counts(report, explored)
    assert cost["reused"] == 0
    # Another number of workers, and of partitions.
    assert campaign(*SMALL, "--workers", 1, "--partitions", 3)[1] == report
    # From what is stored, of which a part is damaged and a part is gone.
    damaged = tmp_path / "case-0-round-2-part-1.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (tmp_path / "case-1-round-1.json").unlink()
    code, again, cost, errors = campaign(*SMALL, "--workers", 2, "--store", tmp_path)
    assert (code, again) == (0, report)
    assert "done again" in errors and "case-0-round-2-part-1.npy" in errors
    assert cost["reused"] > 10


def test_the_explorer_finds_a_planted_bug():
    words = [CANARY, "explore", "--cells=3", "--positions=3", "--kind=swa", "--json"]
    one = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=False).stdout)
    assert one["differences"] > 0
    options = ["--command", CANARY, "--workers", 2, "--", "--kind", "swa"]
    code, report, _, _ = campaign(*SMALL, *options)
    assert code == 1
    same_counts(report, one)
    buckets = {case["bucket"] for case in one["cases"] if "bucket" in case}
    assert {found["bucket"] for found in report["findings"]} == buckets


def test_a_stored_round_that_is_gone_is_an_error(tmp_path):
    partition = _explore.Partition(str(tmp_path), 0)
    partition.load(0)
    partition.absorb(0, 0, [])
    with pytest.raises(_shards.CampaignError, match="case-0-round-1-part-0.npy: it was damaged"):
        partition.absorb(0, 1, [])
    with pytest.raises(_shards.CampaignError, match="case-0-round-1-part-0.npy: it was damaged"):
        partition.absorb(0, 2, ["a reference"])


def test_merged_keeps_the_least_origin():
    seen = np.array([2, 5], np.uint64)
    batches = [
        np.array([[1, 9, 4], [2, 1, 1], [7, 3, 3]], np.uint64),
        np.array([[1, 8, 9], [7, 3, 2]], np.uint64),
        np.zeros((0, 3), np.uint64),
    ]
    assert _explore.merged(seen, iter(batches)).tolist() == [[1, 8, 9], [7, 3, 2]]


def test_a_crash_of_the_explorer(tmp_path):
    """The report does not depend on how the states are divided into batches."""
    crashing = tmp_path / "kvtwin"
    crashing.write_text(
        f"""#!{sys.executable}
import json, os, struct, sys
for line in sys.stdin.buffer:
    words = line.split()
    if words[0] == b"cases":
        print(json.dumps(["toy"]), flush=True)
        continue
    count = int(words[2])
    states = struct.unpack(f"<{{count}}Q", sys.stdin.buffer.read(8 * count))
    if states != (0,):
        print("x" * 200_000, file=sys.stderr, flush=True)
        os.abort()
    rows = b"".join(struct.pack("<3Q", state, 0, 0) for state in range(1, 1000))
    counts = dict.fromkeys(["differences", "cpu_seconds"], 0) | dict(checked=999, found=999)
    counts |= dict.fromkeys(["ended", "not_made"], False) | dict(failed=None)
    sys.stdout.buffer.write(json.dumps(counts).encode() + b"\\n" + rows)
    sys.stdout.flush()
"""
    )
    crashing.chmod(0o755)
    words = ["explore", "--command", crashing]
    code, report, _, _ = campaign(*words, "--workers", 1)
    assert (code, report["complete"], report["differences"]) == (1, False, 1)
    (found,) = report["findings"]
    assert found["bucket"] == "crash-6-toy" and found["reason"].startswith("ended by signal 6")
    assert campaign(*words, "--workers", 2)[1] == report


def test_ray_that_does_not_start(monkeypatch):
    def init(**_):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(_shards.CampaignError, match="Ray does not start: .* timed out"):
        _shards.start_ray(1, None)


# Kills.


def descendants(pid):
    """Returns the processes below a process, and the command line of each."""
    listed = subprocess.run(
        ["ps", "-wweo", "pid=,ppid=,args="], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    children = {}
    for line in listed.splitlines():
        child, parent, args = line.split(None, 2)
        children.setdefault(int(parent), []).append((int(child), args))
    found, open_ = [], [pid]
    while open_:
        for child, args in children.get(open_.pop(), []):
            found.append((child, args))
            open_.append(child)
    return found


def kill_one(process, is_one, draw):
    """Kills a process below another. Returns whether it found one."""
    ones = [pid for pid, args in descendants(process.pid) if is_one(args)]
    if not ones:
        return False
    try:
        os.kill(draw.choice(ones), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def is_worker(args):
    """Whether a process runs tasks or is an actor."""
    return args.startswith("ray::") and "Agent" not in args


def count_of(store, pattern):
    return len(list(store.glob(pattern))) if store.exists() else 0


def with_kills(words, pattern, tmp_path, draw):
    """Runs campaigns until KILLS workers and KILLS drivers were killed.

    Yields the end of each campaign, and the number of files that were stored when its
    last driver began.
    """
    left = {"worker": KILLS, "driver": KILLS}
    number = 0
    while sum(left.values()) > 0:
        number += 1
        store = tmp_path / str(number)
        process = start(words[0], "--store", store, *words[1:])
        stored = have = 0
        while process.poll() is None:
            if count_of(store, pattern) <= have or sum(left.values()) == 0:
                time.sleep(0.02)
                continue
            time.sleep(draw.random() * 0.3)
            have = count_of(store, pattern)
            whom = draw.choice([name for name in left if left[name] > 0])
            if whom == "worker":
                left["worker"] -= kill_one(process, is_worker, draw)
            elif process.poll() is None:
                process.kill()
                process.communicate()
                left["driver"] -= 1
                stored = have
                process = start(words[0], "--store", store, *words[1:])
        yield (*ended(process), stored)


LONGER = ("fuzz", "--ops", 1_000_000, "--shard-ops", 25_000, "--workers", 2)


@pytest.fixture(scope="module")
def undisturbed():
    code, report, _, _ = campaign(*LONGER)
    assert (code, report["shards"]) == (0, 40)
    return report


def test_kills_of_fuzz(undisturbed, tmp_path):
    for code, report, cost, errors, stored in with_kills(
        LONGER, "fuzz-*.json", tmp_path, random.Random(1)
    ):
        assert (code, report) == (0, undisturbed), errors
        assert "done again" not in errors
        assert cost["reused"] >= stored  # Nothing that was stored ran again.


def test_kills_of_the_explorer(tmp_path):
    words = ["explore", "--cells", 4, "--positions", 3, "--workers", 2]
    words += ["--", "--kind", "swa"]
    code, undisturbed, _, _ = campaign(*words)
    assert code == 0
    for code, report, cost, errors, stored in with_kills(
        words, "case-*-round-*.json", tmp_path, random.Random(2)
    ):
        assert (code, report) == (0, undisturbed), errors
        assert "done again" not in errors
        # The last round may have lost a partition.
        assert cost["reused"] >= stored - 1


def test_an_interrupt_keeps_what_was_found(tmp_path):
    words = ["fuzz", "--ops", 100_000_000, "--shard-ops", 25_000, "--workers", 2]
    process = start(*words, "--store", tmp_path)
    while count_of(tmp_path, "fuzz-*.json") < 3 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    code, report, _, errors = ended(process)
    assert (code, errors) == (130, "")
    assert not report["complete"] and report["operations"] >= 25_000
    assert report["shards"] < 4000


def test_ray_itself_dies(undisturbed, tmp_path):
    process = start(*LONGER[:-1], 1, "--store", tmp_path)
    while count_of(tmp_path, "fuzz-*.json") < 2 and process.poll() is None:
        time.sleep(0.02)
    assert kill_one(process, lambda args: "/raylet " in args, random.Random(3))
    code, report, _, errors = ended(process)
    assert (code, report) == (0, undisturbed) and "Ray starts again" in errors
