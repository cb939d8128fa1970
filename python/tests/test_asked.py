"""Random histories at one level, of one kind, and shrunk for a limited time."""

import numpy as np
import pytest

import kvtwin
import toys


def operations(result):
    return result.history.count("|")


def test_a_level():
    result = kvtwin.fuzz(toys.Right, operations=300, level="numeric")
    assert result and result.level == "numeric"
    # The class claims visibility, and holds identity.
    result = kvtwin.fuzz(toys.Ours, operations=300, level="visibility")
    assert result and result.level == "visibility"


def test_a_finding_at_a_level_runs_again_there():
    result = kvtwin.fuzz(toys.CopiesOneTooFew, operations=3000, level="numeric")
    assert not result and {one.level for one in result.findings} == {"numeric"}
    assert "', level='numeric')" in result.failure
    again = kvtwin.run(toys.CopiesOneTooFew, result.history, level="numeric")
    assert again.finding.level == "numeric"
    assert kvtwin.run(toys.CopiesOneTooFew, result.history).finding.level == "visibility"


def run(cls, level):
    return kvtwin.run(cls, "kvt1 | put 0*2", level=level)


@pytest.mark.parametrize("call", [kvtwin.fuzz, run])
def test_levels_that_the_class_does_not_have(call):
    with pytest.raises(ValueError, match="level is 'identity', .*compared at visibility, numeric"):
        call(toys.Right, level="identity")
    with pytest.raises(ValueError, match="level is 'numeric', .*compared at attention"):
        call(toys.Attends, level="numeric")


def test_levels_of_pools(pool):
    looks = 0

    class Attends(pool):
        def views(self, sequence, layer):
            nonlocal looks
            looks += 1
            return super().views(sequence, layer)

        def attend(self, layer, sequences, query_rows, query):
            return query[:, :, :0]  # Another shape.

    result = kvtwin.fuzz(Attends, operations=300, level="attention")
    assert not result and looks == 0
    assert result.findings[0].level == "attention"
    assert "', level='attention')" in result.failure
    again = kvtwin.run(Attends, result.history, level="attention")
    assert again.finding.level == "attention" and looks == 0
    assert kvtwin.run(Attends, result.history).finding.level == "visibility"
    with pytest.raises(ValueError, match="level is 'identity', .*compared at visibility"):
        kvtwin.fuzz(pool, level="identity")


def test_a_kind(pool):
    made = set()

    class Notes(toys.Right):
        def __init__(self, setup):
            made.add(setup.kind)
            super().__init__(setup)

    assert kvtwin.fuzz(Notes, operations=500, kind="swa")
    assert made == {"swa"}
    with pytest.raises(ValueError, match="kind is 'hybrid', .*declares only causal, swa, chunked"):
        kvtwin.fuzz(Notes, kind="hybrid")
    with pytest.raises(ValueError, match="kind is for caches, not for pools"):
        kvtwin.fuzz(pool, kind="causal")


def test_the_time_of_shrinking(pool):
    class LosesForks(pool):
        def fork(self, sequence, length):
            return super().fork(sequence, max(length - 1, 0))

    for cls in (toys.CopiesOneTooFew, LosesForks):
        shortest = kvtwin.fuzz(cls, operations=3000)
        longer = kvtwin.fuzz(cls, operations=3000, shrink_seconds=1e-9)
        assert operations(longer) > operations(shortest)
        same = kvtwin.fuzz(cls, operations=3000, shrink_seconds=1e6)
        assert same.history == shortest.history
    with pytest.raises(ValueError, match="shrink_seconds is 0, it must be above 0"):
        kvtwin.fuzz(pool, shrink_seconds=0)


class Rows:
    """The sequences of a cache without windows, as lists of rows by layer."""

    kvtwin = kvtwin.Description(name="rows", can={"remove_tail", "refuse_full"})
    keeps_refused = False

    def __init__(self, setup):
        self.setup = setup
        self.rows = {layer: [] for layer in range(setup.layers)}
        self.length = 0

    def start_forward(self, positions, sequences):
        end = self.length + len(positions)
        full = end > self.setup.capacity
        if not full or self.keeps_refused:
            self.begin, self.end = self.length, end
            self.length = end
        if full:
            raise kvtwin.CacheFull(f"{end} tokens")

    def put(self, layer, key, value):
        self.rows[layer][self.begin :] = zip(key, value)

    def get(self, layer):
        rows, heads = self.rows[layer], self.setup.kv_heads
        key = np.array([k for k, _ in rows]).reshape(-1, heads, self.setup.k_head_dim)
        value = np.array([v for _, v in rows]).reshape(-1, heads, self.setup.v_head_dim)
        mask = np.arange(len(rows)) <= np.arange(self.begin, self.end)[:, None]
        return key, value, mask

    def remove(self, sequence, begin, end):
        self.length = min(self.length, begin)
        for rows in self.rows.values():
            del rows[begin:]


class KeepsRefused(Rows):
    keeps_refused = True


def test_batches_that_do_not_fit():
    assert kvtwin.fuzz(Rows, operations=20_000)
    result = kvtwin.fuzz(KeepsRefused, operations=20_000)
    assert result.history == "kvt1 cells=1 batch=2 legal=1 | put 0*1 overfull | put 0*1"
    assert not kvtwin.run(KeepsRefused, result.history)


def test_the_fixture_passes_on_what_is_asked(kvtwin_fuzz):
    result = kvtwin_fuzz(toys.Right, operations=300, level="numeric")
    assert result.level == "numeric"
    for asked, message in [
        ({"kind": "hybrid"}, "kind is 'hybrid'"),
        ({"seconds": -1}, "^seconds is -1"),
        ({"shrink_seconds": -1}, "shrink_seconds is -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            kvtwin_fuzz(toys.Right, **asked)
