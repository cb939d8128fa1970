"""certify_test.py KVTWIN GOOD BAD: makes certificates, compares them, reads JUnit.

BAD is GOOD with a bug.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

kvtwin, good, bad = sys.argv[1:]
folder = pathlib.Path(tempfile.mkdtemp())


def certify(library, code, *more):
    """Returns what certify prints, after it ended with `code`."""
    done = subprocess.run(
        [kvtwin, "certify", "--backend", library, "--ops", "2000", "--runs", "5", *more],
        capture_output=True, text=True, timeout=200)
    if done.returncode != code:
        sys.exit(f"{more} on {library}: {done.returncode}, not {code}\n"
                 f"{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def expect(text, part):
    if part not in text:
        sys.exit(f"'{part}' is not in\n{text}")


def written(name, text):
    path = folder / name
    path.write_text(text)
    return str(path)


right = certify(good, 0, "--json")
assert right == certify(good, 0, "--json", "--threads", "2"), "not the same twice"
wrong = certify(bad, 1, "--json", "--junit", str(folder / "bad.xml"))
old_right = written("right.json", right)
old_wrong = written("wrong.json", wrong)
certificate = json.loads(wrong)
assert not certificate["right"] and certificate["findings"][0]["rules"], wrong
probes = json.loads(right)["probes"]
assert probes["window_edge"] > 0, right
# The backend has no drafts, so that no state of drafts is missing.
assert "draft_chain" not in probes and "sequences_65" in probes, right

# It has no wrapper, no encoder, and no shift: nothing tests their rules.
rules = set(json.loads(right)["rules_held_to"])
assert "S16" in rules and not rules & {"S9", "S14", "S19", "S26", "S31", "S32", "S40", "S45"}, rules
expect(certify(good, 0), "visibility  holds (claimed)")
expect(certify(bad, 1), "WRONG: ")
expect(certify(good, 0, "--compare", old_right), "no change")
expect(certify(bad, 1, "--compare", old_right),
       "WORSE    level visibility: holds before, now broken")
expect(certify(bad, 0, "--compare", old_wrong), "no change")
expect(certify(good, 0, "--compare", old_wrong), "changed  finding gone: ")
changes = json.loads(certify(bad, 1, "--compare", old_right, "--json"))["changes"]
assert any(change["worse"] for change in changes), changes

suite = xml.etree.ElementTree.parse(folder / "bad.xml").getroot()
failures = [case.get("name") for case in suite if case.find("failure") is not None]
assert "visibility" in failures, failures
assert len(failures) == int(suite.get("failures")), suite.attrib
assert len(suite) == int(suite.get("tests")), suite.attrib

damaged = written("damaged.json", right.replace('"seed":1', '"seed":2'))
expect(certify(good, 2, "--compare", damaged), "its hash is wrong")
expect(certify(good, 2, "--compare", written("text.json", "hello")),
       "not a certificate")
expect(certify(good, 2, "--compare", str(folder)), "Is a directory")
expect(certify(good, 2, "--compare", "/dev/zero"), "too large for a certificate")
expect(certify(good, 2, "--compare", str(folder / "none")), "No such file")
# The file is tried before the run, and nothing of it remains. What is there stays.
for path, why in [(folder / "none" / "a.xml", "cannot be opened"),
                  (folder, "cannot be written: Is a directory")]:
    said = certify(good, 2, "--junit", str(path))
    expect(said, f"kvtwin: --junit: '{path}' ")
    expect(said, why)
    assert "holds" not in said, said
before = sorted(folder.iterdir())
(folder / "kept.xml").write_text("kept")
certify(str(folder / "none.so"), 2, "--junit", str(folder / "kept.xml"))
certify(str(folder / "none.so"), 2, "--junit", str(folder / "new.xml"))
assert sorted(folder.iterdir()) == sorted([*before, folder / "kept.xml"])
assert (folder / "kept.xml").read_text() == "kept"
print("certificates are as they should be")
