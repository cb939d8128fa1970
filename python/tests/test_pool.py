"""Random histories on pools of blocks in Python."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

import kvtwin
import toys
from conftest import MENDED


@pytest.fixture
def example(repository):
    return (repository / "docs/examples/python_pool.py").read_text()


def test_the_example(repository, example, pytester):
    pytester.makepyfile(test_example=example)
    result = pytester.runpytest_subprocess("--kvtwin-ops", "3000", "-rN")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*BlockPool is wrong*", "*rerun *kvp1 *fork*"])
    shown = (repository / "docs/python.md").read_text()
    [line] = [line for line in result.outlines if line.strip().startswith("rerun")]
    # The page is up to date.
    assert f"\n{line[line.index('kvp1') :].split(chr(39))[0]}\n" in shown
    [reason] = [line for line in result.outlines if line.startswith("  views: ")]
    assert reason.strip() in shown.splitlines()
    pytester.makepyfile(test_example=example.replace(*MENDED))
    pytester.runpytest_subprocess("--kvtwin-ops", "3000").assert_outcomes(passed=1)


def test_explore(repository, example, pool):
    result = kvtwin.explore(pool, depth=2)
    assert result and result.histories == 19**2
    space = {"__name__": "python_pool"}
    exec(compile(example, repository / "docs/examples/python_pool.py", "exec"), space)
    found = kvtwin.explore(space["BlockPool"], depth=3)
    assert not found and "fork" in found.history
    with pytest.raises(ValueError, match="depth is 0"):
        kvtwin.explore(pool, depth=0)
    with pytest.raises(kvtwin.NotSupported, match="not for pools"):
        kvtwin.profile(pool)


def test_known_findings_are_passed_over(repository, example, pytester):
    space = {"__name__": "python_pool"}
    exec(compile(example, repository / "docs/examples/python_pool.py", "exec"), space)
    cls = space["BlockPool"]
    found = kvtwin.fuzz(cls, operations=1000)
    assert not found and found.passed_over == {}
    bucket = found.failure.split("bucket: ")[1].splitlines()[0]
    result = kvtwin.fuzz(cls, operations=3000, known=[bucket, "x"])
    assert result, str(result)
    assert result.passed_over["x"] == 0 and result.passed_over[bucket] > 1
    pytester.makepyfile(test_example=example)
    options = ["--kvtwin-ops=1000", "-rN", "--kvtwin-known", bucket]
    pytester.runpytest_subprocess(*options).assert_outcomes(passed=1)


def test_a_correct_class(pool):
    result = kvtwin.fuzz(pool, operations=3000)
    assert result, str(result)
    assert result.level == "visibility" and result.operations >= 3000


def test_a_pool_that_refuses_each_append_is_not_judged(pool):
    class Full(pool):
        def append(self, *arguments):
            raise kvtwin.CacheFull

    result = kvtwin.fuzz(Full, operations=1000)
    assert not result and result.not_judged and not result.findings
    assert "not judged: no append to all layers succeeded" in str(result)
    assert str(result)[0].isdigit()


def test_a_pool_that_takes_only_the_first_layer_is_not_judged(pool):
    class First(pool):
        def __init__(self, setup):
            if setup.layers == 1:
                raise kvtwin.NotSupported
            super().__init__(setup)

        def append(self, sequence, layer, *rows):
            if layer > 0:
                raise kvtwin.CacheFull
            super().append(sequence, layer, *rows)

    result = kvtwin.fuzz(First, operations=1000)
    assert not result and result.not_judged and not result.findings


def test_each_position_has_a_slot(pool):
    class Short(pool):
        def slots(self, sequence, begin, end):
            return []

    result = kvtwin.fuzz(Short, operations=1000)
    assert "slots: 0 slots for 1 token from position 0 on, of sequence 0" in result.failure


def test_the_command_runs_it_again(repository, tmp_path):
    (tmp_path / "pools.py").write_text(
        (repository / "docs/examples/python_pool.py").read_text()
    )
    code = "import kvtwin, pools; print(kvtwin.fuzz(pools.BlockPool, operations=3000))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    command = done.stdout.split("rerun   ")[1].splitlines()[0]
    again = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert again.stdout.split("\n\n")[1] == done.stdout.split("\n\n")[1]


def test_run(pool):
    # Without most=4, the append is refused, and nothing is judged.
    history = "kvp1 block=2 blocks=4 most=4 dtype=f32 | open 0 0 0 | append 0 2 1"
    assert kvtwin.run(pool, history)
    with pytest.raises(ValueError, match="kvp1"):
        kvtwin.run(pool, "kvt1 | put 0*1")
    with pytest.raises(kvtwin.NotSupported, match="refuses such a pool.*f32 only"):
        kvtwin.run(pool, "kvp1 block=2 blocks=4 dtype=f16 | open 0 0 0")


@pytest.mark.parametrize(
    "method, texts",
    [
        ("seq_len", ["ZeroDivisionError", "test_pool.py"]),
        ("views", ["a view is (key, value)"]),
        ("slots", ["ZeroDivisionError"]),
        ("usage", ["ZeroDivisionError"]),
        ("table", ["ZeroDivisionError"]),
        ("commit_unknown", ["ZeroDivisionError"]),
    ],
)
def test_exceptions_are_reported(pool, method, texts):
    class Wrong(pool):
        pass

    def fails(self, *arguments):
        return [None] if method == "views" else 1 // 0

    setattr(Wrong, method, fails)
    result = kvtwin.fuzz(Wrong, operations=2000)
    assert not result
    for text in texts:
        assert text in result.failure
    # The last line of the history is the call that failed.
    last = result.failure.split("   <- then")[0].splitlines()[-1].split()[1]
    assert last == method.removesuffix("_unknown")
    assert "answers internal: exception" in result.failure
    assert "\\x0a" not in result.failure


def test_views_that_are_split_in_other_ways_each_time(pool):
    class Splits(pool):
        calls = 0

        def views(self, sequence, layer):
            Splits.calls += 1
            for key, value, _block in super().views(sequence, layer):
                first = 1 if Splits.calls % 2 else len(key)
                for part in (slice(None, first), slice(first, None)):
                    if len(key[part]):
                        yield key[part], value[part]

    result = kvtwin.fuzz(Splits, operations=2000)
    assert result, str(result)
    assert Splits.calls > 100


def test_answers_that_are_no_numbers_of_32_bits(pool):
    class Far(pool):
        kvtwin = dataclasses.replace(pool.kvtwin, name="a\udc80")

        def seq_len(self, sequence):
            return 2**40

    failure = kvtwin.fuzz(Far, operations=500).failure
    assert "seq_len is 1099511627776, it must be an int of 32 bits" in failure
    assert "a\\udc80" in failure


def test_a_class_that_cannot_be_made(pool):
    class Fails(pool):
        def __init__(self, setup):
            raise KeyError("no such key")

    result = kvtwin.fuzz(Fails, operations=500)
    assert "KeyError" in result.failure and "test_pool.py" in result.failure

    class Refuses(pool):
        def __init__(self, setup):
            raise kvtwin.NotSupported("never")

    with pytest.raises(kvtwin.NotSupported, match="never"):
        kvtwin.fuzz(Refuses, operations=500)


def test_interruptions_end_it(pool):
    class Interrupts(pool):
        def views(self, sequence, layer):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvtwin.fuzz(Interrupts, operations=500)
    assert kvtwin.fuzz(pool, operations=500)  # Nothing is left behind.


def test_descriptions(pool):
    class NoViews:
        kvtwin = kvtwin.PoolDescription(name="x")
        open = seq_len = append = commit = free = print

    with pytest.raises(TypeError, match="neither views nor attend"):
        kvtwin.fuzz(NoViews)
    with pytest.raises(TypeError, match="cls is an instance of NoViews"):
        kvtwin.fuzz(NoViews())
    with pytest.raises(ValueError, match="window is 1.5, it must be an int from 0"):
        kvtwin.PoolDescription(name="x", window=1.5)
    with pytest.raises(ValueError, match="name is 5, it must be a str"):
        kvtwin.PoolDescription(name=5)


def with_rules(pool, **rules):
    class Ruled(pool):
        kvtwin = kvtwin.PoolDescription(name="ruled", **rules)

    return Ruled


def test_deduplicating_pools_may_swap_blocks(pool):
    class Swaps(pool):
        """Has whole blocks of the same tokens in a sequence only once."""

        def __init__(self, setup):
            super().__init__(setup)
            self.known = {}  # The tokens of each sequence.

        def open(self, prompt, salt, extra):
            sequence = super().open(prompt, salt, extra)
            self.known[sequence] = [(salt, *extra)]
            return sequence

        def fork(self, sequence, length):
            made = super().fork(sequence, length)
            self.known[made] = self.known[sequence][: 1 + length]
            return made

        def truncate(self, sequence, length):
            super().truncate(sequence, length)
            del self.known[sequence][1 + length :]

        def commit(self, sequence, tokens):
            super().commit(sequence, tokens)
            self.known[sequence] += tokens
            size, mine = self.setup.block_size, self.known[sequence]
            for other, known in self.known.items():
                if other == sequence or other not in self.tables:
                    continue
                common = 0
                while known[: 2 + common] == mine[: 2 + common] and 1 + common < min(
                    len(known), len(mine)
                ):
                    common += 1
                for i in range(common // size):
                    theirs, blocks = self.tables[other][0], self.tables[sequence][0]
                    self.owners[blocks[i]] -= 1
                    blocks[i] = theirs[i]
                    self.owners[blocks[i]] += 1

    # Rows of the same tokens differ, so another rule does not allow the swap.
    found = kvtwin.fuzz(with_rules(Swaps, can={"recomputes_last"}), operations=8000)
    assert not found and "views" in found.failure
    result = kvtwin.fuzz(with_rules(Swaps, can={"deduplicates"}), operations=8000)
    assert result, str(result)


def test_pools_without_reserve(pool):
    class Counts(pool):
        def usage(self):
            used = [count for count in self.owners if count > 0]
            shared = sum(count > 1 for count in used)
            return self.owners.count(0), 0, len(used), shared

    class Loses(Counts):
        """Releases no block before its sequence ends."""

        def __init__(self, setup):
            super().__init__(setup)
            self.lost = {}

        def _keep(self, sequence, blocks, length):
            kept = -(-length // self.setup.block_size)
            self.lost.setdefault(sequence, []).extend(blocks[kept:])
            super()._keep(sequence, blocks[:kept], length)

        def free(self, sequence):
            super().free(sequence)
            for block in self.lost.pop(sequence):
                self.owners[block] -= 1

    # Without the ability, the blocks may be in reserve.
    for right in (with_rules(Loses), with_rules(Counts, can={"no_reserve"})):
        result = kvtwin.fuzz(right, operations=4000)
        assert result, str(result)
    found = kvtwin.fuzz(with_rules(Loses, can={"no_reserve"}), operations=8000)
    assert not found and "the pool keeps none in reserve" in found.failure
    assert kvtwin.laws(Counts, law="room_comes_back", histories=20)
    [law] = kvtwin.laws(Loses, law="room_comes_back", histories=20).laws
    assert not law and "the next time the pool is full" in law.reason


def test_pools_with_many_sequences(pool):
    most = 0

    class Counts(pool):
        def append(self, sequence, layer, key, value):
            nonlocal most
            most = max(most, len(self.tables))
            super().append(sequence, layer, key, value)

    class CountsToEight(Counts):
        """Takes a block from its owners too early, if it has more than eight."""

        def fork(self, sequence, length):
            made = super().fork(sequence, length)
            self.owners = [min(count, 8) for count in self.owners]
            return made

    for cls, sequences in ((CountsToEight, 0), (Counts, 2), (Counts, 16)):
        most = 0
        result = kvtwin.fuzz(with_rules(cls, max_sequences=sequences), operations=20000)
        assert result, str(result)
        assert most == (sequences or 6)
    assert not kvtwin.fuzz(with_rules(CountsToEight, max_sequences=16), operations=20000)
    with pytest.raises(ValueError, match="max_sequences is -1, it must be an int from 0"):
        kvtwin.PoolDescription(name="x", max_sequences=-1)


def test_pools_with_a_window_may_drop_rows_before_it(pool):
    class Slides(pool):
        """Shows the rows that the next token sees in a window of two positions."""

        def views(self, sequence, layer):
            first, start = max(0, self.seq_len(sequence) - 2), 0
            views = []
            for key, value, block in super().views(sequence, layer):
                skip = min(max(first - start, 0), len(key))
                if skip < len(key):
                    views.append((key[skip:], value[skip:], block, start + skip))
                start += len(key)
            return views

    found = kvtwin.fuzz(with_rules(Slides), operations=5000)
    assert not found and "views" in found.failure
    assert not kvtwin.fuzz(with_rules(Slides, window=3), operations=5000)
    for window in (0, 1, 2):
        result = kvtwin.fuzz(with_rules(Slides, window=window), operations=5000)
        assert result, str(result)


def test_pools_may_recompute_the_last_token(pool):
    class Finds(pool):
        """Finds the prompt of the first sequence, down to its last token."""

        def __init__(self, setup):
            super().__init__(setup)
            self.kept = None  # Key, tokens, blocks.
            self.keys_of = {}
            self.again = set()  # Sequences that recompute their last token.

        def open(self, prompt, salt, extra):
            if self.kept and self.kept[:2] == ((salt, *extra), prompt):
                sequence = self._add(self.kept[2], len(prompt) - 1)
                self.again.add(sequence)
            else:
                sequence = super().open(prompt, salt, extra)
            self.keys_of[sequence] = (salt, *extra)
            return sequence

        def fork(self, sequence, length):
            made = super().fork(sequence, length)
            self.keys_of[made] = self.keys_of[sequence]
            return made

        def _keep(self, sequence, blocks, length):
            super()._keep(sequence, blocks, length)
            self.again.discard(sequence)

        def commit(self, sequence, tokens):
            begin = self.seq_len(sequence)
            super().commit(sequence, tokens)
            blocks, length, _ = self.tables[sequence]
            if self.kept or begin or not length or length % self.setup.block_size:
                return
            self.kept = (self.keys_of[sequence], tokens, list(blocks))
            for block in blocks:
                self.owners[block] += 1  # They stay until the pool is full.

        def append(self, sequence, layer, key, value):
            try:
                self.store(sequence, layer, key, value)
            except kvtwin.CacheFull:
                if not self.kept:
                    raise
                for block in self.kept[2]:
                    self.owners[block] -= 1
                self.kept = None
                self.store(sequence, layer, key, value)

        def store(self, sequence, layer, key, value):
            if sequence not in self.again:
                return super().append(sequence, layer, key, value)
            blocks = list(self.tables[sequence][0])
            owners = list(self.owners)
            for block in blocks:  # The token is written in place.
                self.owners[block] = 1
            try:
                super().append(sequence, layer, key, value)
            finally:
                for block in blocks:
                    self.owners[block] = owners[block]

    found = kvtwin.fuzz(with_rules(Finds), operations=8000)
    assert not found, str(found)
    result = kvtwin.fuzz(with_rules(Finds, can={"recomputes_last"}), operations=8000)
    assert result, str(result)


def attending(cls, first=lambda position: 0):
    """Returns the class with an `attend` whose rows see the positions from
    `first(position)` on, with a soft cap and sinks if the class declares them."""

    class Attends(cls):
        def attend(
            self, layer, sequences, query_rows, query, soft_cap=0, sinks=None
        ):
            heads = query.shape[1] // self.setup.kv_heads
            outputs = []
            for sequence, rows in zip(sequences, query_rows):
                views = cls.views(self, sequence, layer)
                # [heads, tokens, head_dim]
                key, value = (
                    np.concatenate([view[i] for view in views])
                    .repeat(heads, axis=1)
                    .transpose(1, 0, 2)
                    for i in (0, 1)
                )
                end = key.shape[1]
                for position in range(end - rows, end):
                    seen = slice(first(position), position + 1)
                    scores = (key[:, seen] @ query[len(outputs)][:, :, None])[..., 0]
                    scores = scores / np.sqrt(key.shape[2])  # float64
                    if soft_cap:
                        scores = soft_cap * np.tanh(scores / soft_cap)
                    weights = np.exp(scores)
                    sums = weights.sum(axis=1, keepdims=True)
                    weights /= sums if sinks is None else sums + np.exp(sinks)[:, None]
                    outputs.append((weights[:, None] @ value[:, seen])[:, 0])
            return np.stack(outputs)

    return Attends


def test_pools_that_attend(pool):
    result = kvtwin.fuzz(attending(pool), operations=2000)
    assert result and result.level == "visibility", str(result)
    # A pool that attends need not show its rows.
    description = dataclasses.replace(pool.kvtwin, attend_dtype="bf16", max_query_heads=2)
    without = {"views": None, "kvtwin": description}
    hidden = type("Hidden", (attending(pool),), without)
    result = kvtwin.fuzz(hidden, operations=2000)
    assert result and result.level == "attention", str(result)
    for shows in ({}, without):
        wrong = attending(pool, first=lambda position: min(position, 1))
        found = kvtwin.fuzz(type("Wrong", (wrong,), shows), operations=1000)
        assert not found
        [finding] = found.findings
        assert finding.level == ("attention" if shows else "visibility")
        assert "as if position 0 were missing" in finding.reason
        assert "P19" in str(found)
    with pytest.raises(TypeError, match="neither views nor attend"):
        kvtwin.fuzz(type("Nothing", (pool,), {"views": None}))
    narrow = attending(pool)
    narrow.attend = lambda *given: np.zeros((1, 1))
    found = kvtwin.fuzz(narrow, operations=100)
    assert not found and "the output has shape (1, 1), expected" in str(found)
    with pytest.raises(ValueError, match="attend_dtype"):
        dataclasses.replace(description, attend_dtype="f8_e4m3")
    with pytest.raises(ValueError, match="max_query_heads is -1"):
        dataclasses.replace(description, max_query_heads=-1)


def test_pools_with_soft_cap_and_sinks(pool):
    both = {"soft_cap", "sinks"}

    class Weighs(attending(pool)):
        kvtwin = dataclasses.replace(pool.kvtwin, can=both)

    assert (result := kvtwin.fuzz(Weighs, operations=2000)), str(result)
    for ignored in both:

        class Ignores(Weighs):
            def attend(self, *given, **options):
                assert options.keys() == both
                if ignored == "sinks" and options["sinks"] is not None:
                    assert options["sinks"].shape == given[3].shape[1:2]
                return super().attend(*given, **{**options, ignored: None})

        found = kvtwin.fuzz(Ignores, operations=4000)
        assert not found
        name = ignored.replace("_", " ")
        assert f"the {name} were absent" in str(found), str(found)
        Ignores.kvtwin = dataclasses.replace(pool.kvtwin, can=set())
        Ignores.attend = lambda self, *given: Weighs.attend(self, *given)
        assert kvtwin.fuzz(Ignores, operations=2000)
    with pytest.raises(TypeError, match="but has no method attend"):
        kvtwin.fuzz(type("None", (pool,), {"kvtwin": Weighs.kvtwin}))


def test_invalid_rules(pool):
    with pytest.raises(ValueError, match="can: 'fly' is not one of deduplicates"):
        kvtwin.PoolDescription(name="x", can={"fly"})
    with pytest.raises(ValueError, match="window is -1"):
        kvtwin.PoolDescription(name="x", window=-1)

    class Wrong(pool):
        def views(self, sequence, layer):
            return [(*view, 0, 0) for view in super().views(sequence, layer)]

    failure = kvtwin.fuzz(Wrong, operations=500).failure
    assert "block, start)" in failure


def test_laws_of_pools(pool, repository, example):
    result = kvtwin.laws(pool, histories=20)
    assert result and {law.name for law in result.laws} >= {"a_fork_is_equal"}
    # No prompt finds a block in this pool.
    never = [law.name for law in result.laws if not law.not_judged and not law.judged]
    assert never == ["a_hit_is_whole"]
    assert [law.name for law in result.laws if law.not_judged] == ["tables_are_views"]
    space = {"__name__": "python_pool"}
    exec(compile(example, repository / "docs/examples/python_pool.py", "exec"), space)
    broken = kvtwin.laws(space["BlockPool"], law="given_up_pass", histories=100)
    [law] = broken.laws
    assert not law and "given_up_pass" in law.reason and "fork" in law.history
    assert "kvtwin.laws(BlockPool, law='given_up_pass'" in law.rerun.replace('"', "")
    again = kvtwin.laws(space["BlockPool"], law="given_up_pass", history=law.history)
    assert again.laws[0].reason == law.reason
    with pytest.raises(ValueError, match="law is 'state_is_a_fold'"):
        kvtwin.laws(pool, law="state_is_a_fold")


def test_certificates_of_pools(pool, repository, example):
    right = kvtwin.certify(toys.OfKvtwin, operations=400, histories=3)
    assert right, str(right)
    assert "keys_keep_apart" in right.text and "P18" in right.text
    again = kvtwin.certify(toys.OfKvtwin, operations=400, histories=3, compare=right.json)
    assert again and not again.changes
    space = {"__name__": "python_pool"}
    exec(compile(example, repository / "docs/examples/python_pool.py", "exec"), space)
    wrong = kvtwin.certify(space["BlockPool"], operations=1000, histories=3)
    assert not wrong and "broken" in wrong.text and "kvtwin.run(BlockPool" in wrong.text
    worse = kvtwin.certify(
        space["BlockPool"], operations=1000, histories=3, compare=right.json
    )
    assert worse.worse and worse.changes


def test_a_damaged_certificate_is_refused_before_the_run():
    made = []

    class Counted(toys.OfKvtwin):
        def __init__(self, setup):
            made.append(setup)
            super().__init__(setup)

    with pytest.raises(ValueError, match="not a certificate"):
        kvtwin.certify(Counted, operations=10, histories=1, compare="{}")
    assert not made


def test_long_appends_are_shrunk_in_few_runs(pool):
    runs = 0

    class LosesLong(pool):
        """After a commit of more than 128 tokens, the last row is lost."""

        def __init__(self, setup):
            nonlocal runs
            runs += 1
            super().__init__(setup)

        def commit(self, sequence, tokens):
            super().commit(sequence, tokens)
            if len(tokens) > 128:
                self.keys[self.tables[sequence][0][0]] = 0

    result = kvtwin.fuzz(LosesLong, operations=20_000)
    assert "blocks=129 " in result.history and result.history.count("|") == 3
    assert runs < 2000
