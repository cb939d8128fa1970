"""Laws, certificates and profiles of caches in Python."""

import dataclasses
import json
import pathlib
import re

import pytest
import toys

import kvtwin


def test_certify():
    good = kvtwin.certify(toys.Right, operations=1500, histories=3)
    assert good and good.right and "visibility" in good.text, str(good)
    bad = kvtwin.certify(toys.CopiesOneTooFew, operations=1500, histories=3)
    assert not bad
    finding = json.loads(bad.json)["findings"][0]
    assert "kvtwin.run(CopiesOneTooFew, " in finding["rerun"]
    assert bad.junit.startswith("<?xml") and "<failure" in bad.junit
    again = kvtwin.certify(
        toys.CopiesOneTooFew, operations=1500, histories=3, compare=bad.json
    )
    assert again and not again.right and again.changes == ()
    worse = kvtwin.certify(
        toys.CopiesOneTooFew, operations=1500, histories=3, compare=good.json
    )
    assert not worse and any("level visibility" in line for line in worse.changes)
    with pytest.raises(ValueError, match="not a certificate"):
        kvtwin.certify(toys.Right, operations=10, histories=1, compare="{}")
    for path in ("nosuch.json", pathlib.Path("nosuch.json"), __file__):
        with pytest.raises(ValueError, match=r"Path\('.*'\).read_text\(\), not a path"):
            kvtwin.certify(toys.Right, compare=path)
    with pytest.raises(ValueError, match="operations is 0"):
        kvtwin.certify(toys.Right, operations=0)


def test_laws():
    result = kvtwin.laws(toys.Right, histories=5)
    assert result, str(result)
    laws = {law.name: law for law in result.laws}
    assert laws["frame"].judged > 0 and laws["frame"].rules
    assert "has no snapshot" in laws["snapshot_is_all"].not_judged
    assert "not judged" in str(laws["snapshot_is_all"])
    skipped = sum(bool(law.not_judged) for law in result.laws)
    counts = f"0 broken, {len(laws) - skipped} hold, {skipped} not judged, seed 1"
    assert str(result).endswith("\n" + counts)


def test_laws_name_abilities_as_python_does():
    text = str(kvtwin.laws(toys.Legal, histories=1))
    assert "does not say 'any_order'" in text and "KVTWIN_CAN" not in text


def test_a_broken_law():
    result = kvtwin.laws(toys.CopiesOneTooFew, law="remove_open", histories=50)
    (law,) = result.laws
    assert not result and not law and law.check == "remove_open"
    assert law.history.startswith("kvt1 ") and law.reason
    assert "kvtwin.laws(CopiesOneTooFew, law=" in law.rerun
    again = kvtwin.laws(toys.CopiesOneTooFew, law=law.name, history=law.history)
    assert again.laws[0].reason == law.reason


def test_laws_report_an_exception_once():
    result = kvtwin.laws(toys.Raises, histories=10)
    assert not result
    raised = [law for law in result.laws if law.check == "backend: error"]
    assert len(raised) == 1 and "KeyError" in raised[0].reason
    assert any("as above" in law.not_judged for law in result.laws)


def test_profile():
    found = kvtwin.profile(toys.Right, operations=0)
    assert found, str(found)
    assert found.tried == "17 histories"
    assert found.summary.startswith("like ollama-0.12")
    assert found.rules["copy"] == ["replaces"]

    class Renamed(toys.Right):
        kvtwin = dataclasses.replace(toys.Right.kvtwin, profile=found.summary)

    assert kvtwin.fuzz(Renamed, operations=500)
    wrong = kvtwin.profile(toys.Raises)
    assert not wrong and "drop" in wrong.unexplained[0]
    assert wrong.unexplained[0] in str(wrong)
    assert "KeyError" in wrong.ended[wrong.unexplained[0]] in str(wrong)


def test_profile_tries_random_histories():
    found = kvtwin.profile(toys.Right)
    assert str(found).endswith(found.tried)
    tried = re.fullmatch(r"17 histories and (\d+) operations of random histories", found.tried)
    assert int(tried[1]) >= 30000
    assert kvtwin.profile(toys.ShortRing, operations=0)
    with pytest.raises(ValueError, match="operations is -1"):
        kvtwin.profile(toys.Right, operations=-1)
    wrong = kvtwin.profile(toys.ShortRing)
    assert not wrong and len(wrong.unexplained) == 1, str(wrong)
    assert wrong.summary.startswith("like none: it is wrong under any rules on 1 of ")
    assert "kind=swa" in wrong.unexplained[0]
    assert not kvtwin.run(toys.ShortRing, wrong.unexplained[0])


def test_laws_refuse():
    with pytest.raises(ValueError, match="law is 'fame', not one of frame"):
        kvtwin.laws(toys.Right, law="fame")

    class Mlx(toys.Right):
        kvtwin = dataclasses.replace(toys.Right.kvtwin, profile="mlx")

    with pytest.raises(kvtwin.NotSupported, match="by kvtwin's rules"):
        kvtwin.laws(Mlx)
    with pytest.raises(kvtwin.NotSupported, match="cannot restore a state"):
        kvtwin.explore(toys.Right)


def test_profiles_with_exceptions():
    class Said(toys.Right):
        kvtwin = dataclasses.replace(
            toys.Right.kvtwin,
            profile="like ollama-0.12 except window counts the query (kvt1 | put)",
        )

    assert "kind=swa" in kvtwin.fuzz(Said, operations=5000).history
    Said.kvtwin = dataclasses.replace(Said.kvtwin, profile="mlx except copy flies")
    with pytest.raises(ValueError, match="'copy flies' is not a rule"):
        kvtwin.fuzz(Said)
