"""Random histories on pools with groups of layers in Python."""

import pytest

import kvtwin
import toys

#: The replacement that removes the bug from the example of pools with groups.
MENDED_GROUPS = ("self.groups[:1]  # The bug: ", "")


def test_the_example_of_groups(repository, pytester):
    example = (repository / "docs/examples/python_groups.py").read_text()
    assert MENDED_GROUPS[0] in example
    pytester.makepyfile(test_example=example)
    result = pytester.runpytest_subprocess("--kvtwin-ops", "5000", "-rN")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*GroupsPool is wrong*", "*rerun *kvp1 *groups=*open*"]
    )
    pytester.makepyfile(test_example=example.replace(*MENDED_GROUPS))
    pytester.runpytest_subprocess("--kvtwin-ops", "5000").assert_outcomes(passed=1)


def test_a_pool_with_groups():
    result = kvtwin.fuzz(toys.OfKvtwin, operations=5000)
    assert result, str(result)
    assert result.operations >= 5000


def _without_media(self, prompt, salt, extra, media):
    return self.pool.open(prompt, salt, extra)


def _of_the_first(self, sequences, group):
    return self.pool.table(sequences, 0)


def _slots_of_the_first(self, sequence, begin, end, group):
    return self.pool.slots(sequence, begin, end, 0)


def _forgets_all(self, sequence, length):
    self.pool.truncate(sequence, 0)


def _leaves_the_last_out(self, sequence, layer):
    return self.pool.views(sequence, layer)[:-1]


@pytest.mark.parametrize(
    "method, wrong, reason",
    [
        ("open", _without_media, "len is "),
        ("table", _of_the_first, "table: "),
        ("slots", _slots_of_the_first, "slot "),
        ("truncate", _forgets_all, "can continue at"),
        ("views", _leaves_the_last_out, ""),
    ],
)
def test_faults_of_groups(method, wrong, reason):
    class Wrong(toys.OfKvtwin):
        def __init__(self, setup):
            super().__init__(setup)
            setattr(self, method, wrong.__get__(self))

    result = kvtwin.fuzz(Wrong, operations=20000)
    assert not result and reason in result.findings[0].reason
    assert "groups=" in result.history


class OfOneStock(toys.OfKvtwin):
    """The same, with one numbering for the blocks of all groups."""

    kvtwin = kvtwin.PoolDescription(name="stock", can={"groups", "media", "one_stock"})

    def __init__(self, setup):
        super().__init__(setup)
        del self.views

    def first(self, group):
        return sum(part.blocks for part in self.pool.setup.groups[:group])

    def views(self, sequence, layer):
        first = self.first(self.pool.setup.group_of(layer))
        return [
            (key, value, block + first, start)
            for key, value, block, start in self.pool.views(sequence, layer)
        ]

    def table(self, sequences, group):
        first = self.first(group)
        return [[block + first for block in row] for row in super().table(sequences, group)]

    def slots(self, sequence, begin, end, group):
        part = self.pool.setup.groups[group]
        first = self.first(group) * (1 if part.states else part.block_size)
        return [slot + first for slot in super().slots(sequence, begin, end, group)]


def test_groups_of_one_stock():
    result = kvtwin.fuzz(OfOneStock, operations=5000)
    assert result, str(result)

    class Wrong(OfOneStock):
        def first(self, group):
            return 0

    failure = kvtwin.fuzz(Wrong, operations=5000).failure
    assert failure is not None and "in group" in failure


def test_the_setup_of_a_pool_with_groups():
    groups = (kvtwin.PoolSetup(layers=2, window=3), kvtwin.PoolSetup(states=True))
    setup = kvtwin.PoolSetup(max_seq_len=9, groups=groups)
    assert [setup.group_of(layer) for layer in range(3)] == [0, 0, 1]
    assert setup.of_layer(2).states and setup.of_layer(1).window == 3
    with pytest.raises(ValueError, match="layer is 3, the groups have 3 layers"):
        setup.group_of(3)
    assert groups[0].group_of(1) == 0 and groups[0].of_layer(1) is groups[0]
    pool = kvtwin.Pool(setup)
    sequence = pool.open()
    with pytest.raises(kvtwin.NotSupported, match="tables by group"):
        pool.table([sequence])
    assert pool.table([sequence], 1) == [[]]
    with pytest.raises(ValueError, match="group is 2, it must be 0 to 1"):
        pool.table([sequence], 2)
    with pytest.raises(ValueError, match="layer is 3"):
        pool.append(sequence, 3, [[[1.0]]], [[[1.0]]])
    with pytest.raises(ValueError, match="for pools with groups"):
        kvtwin.PoolDescription(name="x", can={"states_in_place"})
    with pytest.raises(ValueError, match="one_stock is for pools with groups"):
        kvtwin.PoolDescription(name="x", can={"one_stock"})

    class Missing:
        kvtwin = kvtwin.PoolDescription(name="missing", can={"media"})
        open = seq_len = append = commit = views = free = lambda self: None

    with pytest.raises(TypeError, match="no method add_media"):
        kvtwin.fuzz(Missing)


def test_laws_of_groups():
    result = kvtwin.laws(toys.OfKvtwin, histories=20)
    assert result, str(result)
    assert not any(law.not_judged for law in result.laws)

    class Wrong(toys.OfKvtwin):
        open = _without_media

    [law] = kvtwin.laws(Wrong, law="keys_keep_apart", histories=200).laws
    assert not law and "under an image" in law.reason
