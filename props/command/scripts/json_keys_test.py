"""json_keys_test.py KVTWIN CACHE POOL BUILD: docs/json.md has all --json keys.

CACHE and POOL are backends with a bug; BUILD is for the museum.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
kvtwin, cache, pool, build = sys.argv[1:]

BUG = "kvt1 kind=swa window=0 cells=1 legal=1 | put 0*1"
CERTIFY = ["certify", "--backend", cache, "--ops", "2000", "--runs", "2"]
folder = tempfile.TemporaryDirectory()
certificate = pathlib.Path(folder.name, "certificate.json")
with certificate.open("w") as out:
    subprocess.run([kvtwin, *CERTIFY, "--seed", "2", "--json"], stdout=out, timeout=120)
# A repository whose last commit brings the bug.
git = ["git", "-C", folder.name, "-c", "user.name=test", "-c", "user.email=test@x"]
subprocess.run([*git, "init", "-q"], check=True)
for library in (pathlib.Path(cache).with_name("c_cache.so"), cache):
    pathlib.Path(folder.name, "name").write_text(str(library))
    subprocess.run([*git, "add", "name"], check=True)
    subprocess.run([*git, "commit", "-qm", "a commit"], check=True)
BISECT = ["--build", "cp $(cat name) mine.so", "--backend", "./mine.so"]
RUNS = [
    ["check", f"{ROOT}/props/recordings/reject", f"{ROOT}/props/recordings/pools"],
    ["fuzz", "--ops", "2000", "--known", "x", "--marks"],
    ["fuzz", "--ops", "2000", "--backend", cache, "--known", "x"],
    ["fuzz", "--kind", "paged", "--ops", "2000", "--marks"],
    ["fuzz", "--kind", "paged", "--ops", "2000", "--backend", pool, "--known", "x"],
    ["run", "kvt1 | put 0*2"],
    ["run", BUG, "--backend", cache, "--level", "visibility"],
    ["run", "kvp1 | open 0 0 0"],
    ["laws", "--law", "replay", "--runs", "2"],
    ["laws", "--runs", "2", "--backend", cache],
    ["explore", "--cells", "2", "--positions", "2", "--sequences", "1"],
    ["explore", "--kind", "paged", "--depth", "1"],
    ["profile", "--backend", cache],
    [*CERTIFY, "--compare", str(certificate)],
    ["state", f"{ROOT}/props/recordings/state.safetensors", __file__],
    ["bisect", BUG, *BISECT, "--good", "HEAD~1"],
    ["museum", "--build", build, "--only", "H01", "--seeds", "1", "--seconds", "1"],
    *(
        ["show", str(path)]
        for path in sorted((ROOT / "props/recordings/reject").rglob("*.jsonl"))
    ),
]
# Objects whose keys are names of counted things, not documented keys.
COUNTED = {"passed_over", "probes"}
CODES = (0, 1, 2)  # 2: one of several files is not a state.


def keys(value):
    """Yields all keys of objects in a JSON value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            if key not in COUNTED or "probes" in inner:
                yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


def printed(arguments):
    """Returns the keys that a command prints."""
    done = subprocess.run(
        [kvtwin, *arguments, "--json"],
        capture_output=True,
        cwd=folder.name if arguments[0] == "bisect" else None,
        text=True,
        timeout=120,
    )
    if done.returncode not in CODES or not done.stdout:
        sys.exit(f"{arguments} ends with {done.returncode}: {done.stderr}")
    try:
        return set(keys(json.loads(done.stdout)))
    except json.JSONDecodeError:
        return set(keys([json.loads(line) for line in done.stdout.splitlines()]))


page = (ROOT / "docs/json.md").read_text()
# The first column of each table, and the keys of `judged`.
rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
documented = set(re.findall(r"`(\w+)`", page))
named = set(re.findall(r"`(\w+)`", "".join(rows)))
found = set()
for run in RUNS:
    found |= printed(run)
if missing := found - documented:
    sys.exit(f"docs/json.md does not have {sorted(missing)}")
if vain := named - found:
    sys.exit(f"docs/json.md has keys that no command printed: {sorted(vain)}")
print(f"{len(found)} keys")
