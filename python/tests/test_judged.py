"""Answers that say what was not run, and that nothing was judged."""

import dataclasses

import numpy as np
import pytest

import kvtwin
import toys

PUT = "append 0 1 0 | commit 0 1 0"
POOL = "kvp1 block=2 blocks=2 most=4 dtype=f32 | open 0 0 0"


def test_a_run_lists_the_operations_that_are_not_declared():
    result = kvtwin.run(
        toys.Legal,
        "kvt1 legal=1 | put 0*2 | put 0*2:-1 | find 0:1,2 | commit 0:0 | pin 0 "
        "| causal 0 | misuse 7 | drop 0:0-1",
    )
    shown = str(result)
    for operation, ability in (
        ("put 0*2:-1", "'draft'"),
        ("find 0:1,2", "'find_prefix'"),
        ("commit 0:0", "'draft'"),
        ("pin 0", "'pin'"),
        ("misuse 7", "'refuse_misuse'"),
    ):
        assert f"not run {operation}: it does not declare {ability}" in shown
    assert "not run causal 0: it has no set_causal" in shown
    assert "drop 0:0-1: it runs as a removal up to the end, because it does not " in shown
    assert result and len(result.not_run) == 7 and "no difference" in shown
    assert not kvtwin.run(toys.Right, "kvt1 | put 0*2 | drop 0:0-1").not_run


def test_a_finding_lists_them_too():
    history = "kvt1 | put 0*2 | pin 0 | copy 0>1:2 | put 1*1"
    result = kvtwin.run(toys.CopiesOneTooFew, history)
    assert result.finding and "not run pin 0: it does not declare 'pin'" in str(result)


def test_a_run_that_compares_nothing_is_not_true():
    for history in ("kvt1 | copy 0>1:0", "kvt1 | pin 0", "kvt1 | put 0*1 reserve"):
        result = kvtwin.run(toys.Right, history)
        assert not result and result.finding is None and result.not_judged
        assert "nothing was judged" in str(result) and "no difference" not in str(result)


def test_a_run_of_a_pool_lists_its_calls(pool):
    result = kvtwin.run(pool, f"{POOL} | {PUT}")
    assert result and not result.not_run
    assert result.calls[0].startswith("open") and "commit" in "".join(result.calls)
    assert "open" in str(result) and "no difference" in str(result)


def test_a_run_of_a_pool_that_compares_nothing_is_not_true(pool):
    result = kvtwin.run(pool, POOL)
    assert not result and result.finding is None
    assert "open" in str(result) and "nothing was judged" in str(result)


def test_a_run_of_a_pool_says_what_was_not_run(pool):
    forkless = type("Forkless", (pool,), {"fork": None, "truncate": None})
    result = kvtwin.run(forkless, f"{POOL} | {PUT} | fork 0 0 0 | truncate 0 0 0 | misuse 1 0 0")
    assert result and "not run fork 0 0 0: it does not declare fork" in str(result)
    assert len(result.not_run) == 3


def test_a_run_of_a_pool_names_why_there_is_none(pool):
    described = dataclasses.replace(pool.kvtwin, dtypes={"bf16"})
    brain = type("Brain", (pool,), {"kvtwin": described})
    with pytest.raises(kvtwin.NotSupported, match="rows of f32 .*write dtype=bf16"):
        kvtwin.run(brain, POOL)
    with pytest.raises(kvtwin.NotSupported, match="has groups, and .* declares none"):
        kvtwin.run(pool, "kvp1 most=4 groups=block:2,blocks:2 | open 0 0 0")


def test_a_certificate_of_a_class_that_refuses_every_setup(pool):
    with pytest.raises(kvtwin.NotSupported, match="each __init__ refused: not today"):
        kvtwin.certify(toys.FitsNothing, operations=100, histories=2)

    class Refuses(pool):
        def __init__(self, setup):
            raise kvtwin.NotSupported("never")

    with pytest.raises(kvtwin.NotSupported, match="each __init__ refused: never"):
        kvtwin.certify(Refuses, operations=100, histories=2)


class OnlyHybrids(toys.Right):
    kvtwin = dataclasses.replace(toys.Right.kvtwin, kinds={"causal", "recurrent", "hybrid"})

    def __init__(self, setup):
        if setup.kind != "hybrid":
            raise kvtwin.NotSupported("hybrids only")

    def set_layer_type(self, type):
        raise NotImplementedError


def test_a_profile_of_no_history_is_not_true():
    result = kvtwin.profile(OnlyHybrids, operations=100)
    assert not result and not result.unexplained and result.histories == 0
    assert "it ran no history" in result.summary and "hybrids only" in result.summary
    assert kvtwin.profile(toys.Legal, operations=100)


def test_laws_say_why_no_history_is_judged():
    result = kvtwin.laws(OnlyHybrids, law="renaming", histories=3)
    assert not result
    assert "init refuses the caches of all of 3 histories" in result.laws[0].not_judged


def test_laws_of_pools_name_what_they_need(pool):
    forkless = type("Forkless", (pool,), {"fork": None})
    [law] = kvtwin.laws(forkless, law="a_fork_is_equal", histories=2).laws
    assert law.not_judged == "the law needs fork"
    attend = type("Attend", (pool,), {"views": None, "attend": lambda *_: None})
    [law] = kvtwin.laws(attend, law="keys_keep_apart", histories=2).laws
    assert law.not_judged == "the law compares views, and the pool has no views"


class Finds(toys.Legal):
    """Finds no prompt, and can resume nowhere."""

    kvtwin = dataclasses.replace(toys.Legal.kvtwin, can={"remove_tail", "find_prefix"})

    def find_prefix(self, sequence, tokens):
        return 0

    def can_resume(self, sequence, position):
        return False


def test_abilities_that_never_come_true_are_noted():
    result = kvtwin.fuzz(Finds, operations=3000)
    assert any("find_prefix found nothing in " in note for note in result.notes)
    assert "note    can_resume was never true in " in str(result)
    assert not kvtwin.fuzz(toys.Right, operations=300).notes


def test_prompts_that_no_pool_finds_are_noted(pool):
    result = kvtwin.fuzz(pool, operations=1000)
    assert result and "note    open found nothing in " in str(result)

    class Ours:
        """kvtwin's own pool, which finds prompts."""

        kvtwin = kvtwin.PoolDescription(name="ours")

        def __new__(cls, setup):
            return kvtwin.Pool(setup)

    for name in ("open", "seq_len", "append", "commit", "views", "free"):
        setattr(Ours, name, getattr(kvtwin.Pool, name))
    assert not kvtwin.fuzz(Ours, operations=1000).notes


@pytest.mark.parametrize("call", [kvtwin.fuzz, kvtwin.laws, kvtwin.certify])
def test_numbers_are_checked(call):
    with pytest.raises(TypeError, match="seed is '1', it must be an int"):
        call(toys.Legal, seed="1")
    with pytest.raises(ValueError, match=r"seed is .*, it must be 0 to 2\*\*63 - 1"):
        call(toys.Legal, seed=2**70)


def test_too_many_operations_are_refused():
    with pytest.raises(ValueError, match=r"operations is .*, it must be 1 to 2\*\*63 - 1"):
        kvtwin.fuzz(toys.Legal, operations=2**70)


def test_a_class_that_exits_is_a_finding(pool):
    class Exits(toys.Legal):
        def put(self, layer, key, value):
            raise SystemExit(3)

    result = kvtwin.fuzz(Exits, operations=100)
    assert not result and "SystemExit: 3" in result.failure

    class PoolExits(pool):
        def views(self, sequence, layer):
            raise SystemExit(3)

    assert "SystemExit: 3" in kvtwin.fuzz(PoolExits, operations=100).failure


def test_a_mask_of_the_lowest_number_gets_advice():
    class Lowest(toys.Legal):
        def get(self, layer):
            key, value, mask = super().get(layer)
            return key, value, np.where(mask, 0, np.finfo(np.float32).min)

    assert "pass mask == 0, an array of bool" in kvtwin.fuzz(Lowest, operations=300).failure


class ClosesBadly(toys.Legal):
    def close(self):
        raise ValueError("the file is gone")


class Panics(toys.Legal):
    def get(self, layer):
        raise BaseException("a panic of Rust")  # noqa: TRY002


class SaysNothing(toys.Legal):
    def get(self, layer):
        class Mute(Exception):
            def __str__(self):
                raise RuntimeError("no text")

        raise Mute


@pytest.mark.parametrize(
    "cls, text",
    [
        (ClosesBadly, "close fails: exception: ValueError: the file is gone"),
        (Panics, "exception: BaseException: a panic of Rust"),
        (SaysNothing, "Mute"),
    ],
)
def test_what_a_method_raises_is_a_finding(cls, text):
    result = kvtwin.fuzz(cls, operations=300)
    assert not result and text in result.findings[0].reason
    assert "test_judged.py" in result.findings[0].reason
    assert kvtwin.run(cls, result.history).finding


def test_a_pool_that_closes_badly_is_a_finding(pool):
    class Wrong(pool):
        def close(self):
            raise ValueError("the file is gone")

    result = kvtwin.fuzz(Wrong, operations=300)
    assert not result and "the file is gone" in result.findings[0].reason


class SkipsTests(toys.Legal):
    def get(self, layer):
        pytest.skip("no such view")


class Interrupts(toys.Legal):
    def close(self):
        raise KeyboardInterrupt


def test_what_ends_the_run():
    with pytest.raises(pytest.skip.Exception, match="no such view"):
        kvtwin.fuzz(SkipsTests, operations=300)
    with pytest.raises(KeyboardInterrupt):
        kvtwin.fuzz(Interrupts, operations=3000)


def test_a_description_counts_a_name_once():
    twice = kvtwin.Description(name="x", can=["remove_tail", "remove_tail"], kinds=iter(["causal"]))
    assert twice.can == {"remove_tail"} and twice.kinds == {"causal"}
    assert isinstance(twice.can, frozenset)
    assert kvtwin.Description(name="x", can="remove_tail").can == {"remove_tail"}


def test_a_pool_that_cannot_be_described_leaves_others_alone(pool, monkeypatch):
    class Undescribed(pool):
        pass

    monkeypatch.setattr("kvtwin._pool.PoolBackend.describe", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kvtwin.fuzz(Undescribed, operations=100)
    monkeypatch.undo()
    assert kvtwin.fuzz(pool, operations=300)


def test_a_pool_answers_ints(pool):
    class Floats(pool):
        def seq_len(self, sequence):
            return float(super().seq_len(sequence))

    result = kvtwin.fuzz(Floats, operations=300)
    assert not result and "must be an int" in result.findings[0].reason


def test_a_function_is_no_class():
    with pytest.raises(TypeError, match="cls is an instance of function, it must be a class"):
        kvtwin.fuzz(lambda setup: toys.Legal(setup))


def test_the_fixture_takes_one_known_bucket(kvtwin_fuzz):
    wrong = toys.CopiesOneTooFew
    bucket = kvtwin.fuzz(wrong, operations=3000).failure.split("bucket: ")[1].split()[0]
    assert kvtwin.fuzz(wrong, operations=3000, known=bucket)
    assert kvtwin_fuzz(wrong, operations=3000, known=bucket)
