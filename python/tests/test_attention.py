"""Attention from Python, against the formula in float64."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvtwin

DTYPES = ["f32", "f16", "bf16", "f8_e4m3", "q8_0", "q4_0"]
TWINS = ["optimized", "reference"]
ROUNDOFF = 2.0**-24


def gamma(n):
    return n * ROUNDOFF / (1 - n * ROUNDOFF)


def attend(query, key, value, seen, scale=1.0, soft_cap=0.0, sinks=None, splits=0):
    """Returns out and log_sum_exp in float64, and the largest errors that float32 may
    make of them, which docs/attention.md derives, whatever the splits. (The terms for
    numbers below 2^-126 are left out: there are none here.)"""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    rows, heads, dim = query.shape
    cells, kv_heads, v_dim = value.shape
    sinks = np.full(heads, -np.inf) if sinks is None else np.asarray(sinks, float)
    out, out_bound = np.zeros((2, rows, heads, v_dim))
    sums, sums_bound = np.zeros((2, rows, heads))
    for row, head in itertools.product(range(rows), range(heads)):
        cut = np.flatnonzero(seen[row])
        k = key[cut, head // (heads // kv_heads)]
        v = value[cut, head // (heads // kv_heads)]
        products = scale * query[row, head] * k
        scores = products.sum(1)
        error = gamma(dim + 4) * np.abs(products).sum(1)
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
            error += 20 * ROUNDOFF * np.abs(scores)
        all_scores = np.append(scores, sinks[head])
        largest = all_scores.max()
        if largest == -np.inf:
            sums[row, head] = largest
            continue
        weights = np.exp(all_scores - largest)
        total = weights.sum()
        weights = weights[:-1]
        exact = weights @ v / total
        sums[row, head] = largest + np.log(total)
        out[row, head] = exact
        size = np.abs(scores - largest) + 4 * np.abs(scores) + 4 * abs(largest)
        relative = np.expm1(error + ROUNDOFF * size) + 4 * ROUNDOFF
        order = gamma(8 * len(cut) + 8)
        wrong = weights * ((1 + relative) * (1 + order) - 1)
        all_wrong = wrong.sum() + total * order
        out_bound[row, head] = (
            wrong @ np.abs(v) + np.abs(exact) * all_wrong
        ) / (total - all_wrong) + 8 * ROUNDOFF * np.abs(exact)
        sums_bound[row, head] = -np.log1p(-all_wrong / total) + 8 * ROUNDOFF * (
            abs(largest) + abs(sums[row, head])
        )
    return out, sums, out_bound, sums_bound


def expect(got, exact):
    out, sums, out_bound, sums_bound = exact
    assert got.out.dtype == got.log_sum_exp.dtype == np.float32
    assert got.out.shape == out.shape
    assert (np.abs(got.out - out) <= out_bound).all()
    finite = np.isfinite(sums)
    assert (got.log_sum_exp[~finite] == sums[~finite]).all()
    error = np.abs(got.log_sum_exp[finite] - sums[finite])
    assert (error <= sums_bound[finite]).all()


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def filled(**fields):
    """Returns a cache of two sequences, and the number of rows of its last batch:
    5 tokens of sequence 0 and 1 of sequence 1, in layer 1."""
    fields = {"capacity": 48, "max_sequences": 2, "max_batch": 16, **fields}
    cache = kvtwin.Cache(kvtwin.Setup(cache_padding=32, shift="identity", **fields))
    for first, tokens, other in ((0, 15, 1), (15, 10, 6), (25, 5, 1)):
        positions = [*range(first, first + tokens), *range(first, first + other)]
        cache.start_forward(positions, [0] * tokens + [1] * other)
        count = tokens + other
        cache.put(1, normal(count, 2, 32), normal(count, 2, 64, seed=first))
    return cache, count


VIEWS = [
    {"dtype": dtype, "v_dtype": v_dtype}
    for dtype, v_dtype in itertools.product(DTYPES, DTYPES)
] + [
    {"v_layout": "permuted", "v_dtype": "bf16", "mask_dtype": "bits"},
    {"v_layout": "tiled", "v_dtype": "f16", "mask_dtype": "f16"},
    {"kind": "swa", "window": 3, "mask_dtype": "bf16"},
    {"kind": "swa", "window": 0, "dtype": "f16", "mask_batch_padding": 4},
    {"kind": "chunked", "chunk": 7, "placement": "scatter"},
]
OPTIONS = [
    {"scale": 32**-0.5},
    {"scale": 0.5, "soft_cap": 2.0, "splits": 3},
    {"scale": -0.25, "sinks": [0.5, -np.inf, 3, -4], "splits": 1},
    {"scale": 1.0, "soft_cap": 5.0, "sinks": np.arange(4)},
]


def test_products_may_be_of_bf16():
    key, value = normal(2, 70, 2, 32, seed=1)
    query = normal(40, 4, 32, seed=2)
    for twin in TWINS:
        attention = kvtwin.Attention(twin)
        attention.plan(np.ones((40, 70), bool))
        exact = attention.attend(query, (key, value), scale=0.1)
        found = attention.attend(query, (key, value), scale=0.1, bf16_products=True)
        np.testing.assert_allclose(found.out, exact.out, atol=2**-6)
        cpu = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
        # On Intel without AMX, products of f32 are faster (docs/attention.md).
        faster = "amx_bf16" in cpu or "GenuineIntel" not in cpu
        rounds = twin == "optimized" and "avx512_bf16" in cpu and faster
        assert (found.out != exact.out).any() == rounds


@pytest.mark.parametrize("fields", VIEWS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("twin", TWINS)
def test_views_of_caches_agree_with_float64(fields, options, twin):
    cache, rows = filled(**fields)
    view = cache.get(1)
    query = normal(rows, 4, 32, seed=3)
    attention = kvtwin.Attention(twin)
    attention.plan(view.mask, rows)
    value = view.value.float32()
    if view.v_layout == "permuted":
        value = value.transpose(2, 0, 1)
    if view.v_layout == "tiled":
        value = value.transpose(0, 3, 1, 2).reshape(-1, 2, 64)
    seen = view.mask.float32()[:rows] == 0
    kv = (view.key.float32(), value)
    exact = attend(query, *kv, seen, **options)
    expect(attention.attend(query, view, **options), exact)
    # The bound is narrow: without the first of the tokens that it sees, the last row of
    # sequence 0 is far outside.
    row = rows - 2
    assert seen[row].any()
    seen[row, np.flatnonzero(seen[row])[0]] = False
    other = attend(query[[row]], *kv, seen[[row]], **options)[0]
    assert np.abs(other[0] - exact[0][row]).max() > 100 * exact[2][row].max()


# Sequences of 7, 1 and 12 tokens in blocks of 4; the blocks 0, 4 and 8 are unused.
LENGTHS = [7, 1, 12]
TABLE = [[3, 1], [7], [5, 2, 6]]


@pytest.mark.parametrize("layout", ["token_major", "head_major"])
@pytest.mark.parametrize("window", [None, 0, 2, 5])
@pytest.mark.parametrize("query_rows", [None, [7, 1, 5], [0, 1, 12]])
@pytest.mark.parametrize("twin", TWINS)
def test_blocks_of_a_pool_agree_with_float64(layout, window, query_rows, twin):
    key, value = normal(9, 4, 2, 20, seed=5), normal(9, 4, 2, 12, seed=6)
    key[[0, 4, 8]] = value[[0, 4, 8]] = np.nan  # No row sees them.
    counts = query_rows or [1, 1, 1]
    query = normal(sum(counts), 6, 20, seed=7)
    attention = kvtwin.Attention(twin)
    attention.plan_table(TABLE, LENGTHS, query_rows, block_size=4, window=window)
    blocks = (key, value)
    if layout == "head_major":
        blocks = tuple(np.ascontiguousarray(a.swapaxes(1, 2)) for a in blocks)
    got = attention.attend_blocks(query, blocks, layout=layout, scale=0.25)
    done = 0
    for table, length, count in zip(TABLE, LENGTHS, counts, strict=True):
        k, v = (a[table].reshape(-1, *a.shape[2:])[:length] for a in (key, value))
        positions = np.arange(length)
        own = positions[length - count :, None]
        seen = (positions <= own) & (window is None or positions >= own - (window or 0))
        part = slice(done, done + count)
        exact = attend(query[part], k, v, seen, scale=0.25)
        expect(kvtwin.Attended(*(a[part] for a in got)), exact)
        done += count
    assert done == len(query)


@pytest.mark.parametrize("layout", ["token_major", "head_major"])
@pytest.mark.parametrize("twin", TWINS)
def test_a_shared_prompt_is_attended_once(layout, twin):
    """Three sequences share the blocks 3 and 1, and have a block each after them."""
    key, value = normal(9, 4, 2, 20, seed=5), normal(9, 4, 2, 12, seed=6)
    query, lengths = normal(3, 6, 20, seed=7), [9, 12, 10]
    blocks = (key, value)
    if layout == "head_major":
        blocks = tuple(np.ascontiguousarray(a.swapaxes(1, 2)) for a in blocks)

    def attended(*table, **options):
        attention = kvtwin.Attention(twin)
        attention.plan_table(*table, block_size=4, **options)
        return attention.attend_blocks(query, blocks, layout=layout, scale=0.25)

    prompt = attended([[3, 1]], [8], [3], sees_all=True)
    rest = attended([[7], [5], [6]], [length - 8 for length in lengths])
    merged = kvtwin.Attention.merge([prompt, rest])
    for i, (last, length) in enumerate(zip([7, 5, 6], lengths, strict=True)):
        k, v = (a[[3, 1, last]].reshape(-1, *a.shape[2:]) for a in (key, value))
        seen = np.arange(12)[None] < length
        exact = attend(query[i : i + 1], k, v, seen, scale=0.25)
        # Each of the parts, and the merged result, is rounded to float32 once more.
        row = kvtwin.Attended(*(a[i : i + 1] for a in merged))
        expect(row, (*exact[:2], 2 * exact[2], 2 * exact[3]))
        alone = attend(query[i : i + 1], k, v, seen & (np.arange(12) < 8), scale=0.25)
        expect(kvtwin.Attended(*(a[i : i + 1] for a in prompt)), alone)
    with pytest.raises(ValueError, match="window is 2, rows that see all have none"):
        attended([[3, 1]], [8], [3], sees_all=True, window=2)


def rounded(numbers, dtype):
    """Returns the numbers as rows of this dtype hold them."""
    count = len(numbers)
    cache = kvtwin.Cache(kvtwin.Setup(capacity=count, max_batch=count, dtype=dtype))
    cache.start_forward([*range(count)], [0] * count)
    cache.put(0, numbers, numbers)
    return cache.get(0).key.float32()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["token_major", "head_major"])
@pytest.mark.parametrize("twin", TWINS)
def test_pools_agree_with_float64(dtype, layout, twin):
    setup = kvtwin.PoolSetup(
        block_size=4,
        blocks=12,
        max_seq_len=16,
        layers=2,
        kv_heads=2,
        k_head_dim=32,
        v_head_dim=64,
        dtype=dtype,
        v_dtype="f16",
        layout=layout,
    )
    pool = kvtwin.Pool(setup, twin)
    sequences = [pool.open(), pool.open(), pool.open()]
    key, value = normal(2, 3, 14, 2, 32), normal(2, 3, 14, 2, 64, seed=2)
    attention = kvtwin.Attention(twin)
    committed = [0, 0, 0]
    for counts in ([9, 2, 0], [1, 1, 11], [4, 1, 3]):  # The tokens of each pass.
        for layer in range(2):
            for sequence in sequences:
                first, count = committed[sequence], counts[sequence]
                if count > 0:
                    new = (layer, sequence, slice(first, first + count))
                    rows = key[new], value[new]
                    assert pool.append(sequence, layer, *rows) == first
            table, lengths = pool.layer_table(sequences, layer)
            assert lengths == [a + b for a, b in zip(committed, counts, strict=True)]
            for row, sequence in zip(table, sequences, strict=True):
                blocks = [block for _, _, block, _ in pool.views(sequence, layer)]
                assert row == blocks + [-1] * (len(row) - len(blocks))
            attention.plan_table(table, lengths, counts, block_size=4)
            query = normal(sum(counts), 4, 32, seed=layer)
            got = attention.attend_blocks(
                query,
                pool.blocks(layer),
                scale=0.2,
                layout=layout,
                dtype=dtype,
                v_dtype="f16",
            )
            done = 0
            for sequence in sequences:
                length, count = lengths[sequence], counts[sequence]
                if count == 0:
                    continue
                k = rounded(key[layer, sequence, :length], dtype)
                v = value[layer, sequence, :length].astype(np.float16)
                seen = np.tri(length, dtype=bool)[length - count :]
                part = slice(done, done + count)
                exact = attend(query[part], k, v, seen, scale=0.2)
                expect(kvtwin.Attended(*(a[part] for a in got)), exact)
                done += count
        for sequence, count in zip(sequences, counts, strict=True):
            pool.commit(sequence, [*range(count)])
        committed = lengths
        assert pool.layer_table(sequences, 1) == (table, lengths)


def test_masks_are_bools_or_numbers():
    key, value, query = normal(5, 1, 8), normal(5, 1, 4, seed=2), normal(3, 2, 8)
    seen = np.array([[1, 0, 1, 1, 0], [0] * 5, [0, 1, 1, 0, 1]], bool)
    attention = kvtwin.Attention()
    found = []
    for mask in (
        seen,
        seen.tolist(),
        np.where(seen, 0, -np.inf).astype(np.float32),
        np.where(seen, 0, -np.inf).astype(np.float16),
        np.where(seen, -0.0, -np.inf).astype(np.float32),
        np.where(seen, -0.0, -np.inf).astype(np.float16),
        np.asfortranarray(np.where(seen, 0, -np.inf).astype(np.float32)),
        np.where(seen, 0, -np.inf).astype(np.float16)[:, ::-1][:, ::-1],
    ):
        attention.plan(mask)
        found.append(attention.attend(query, (key, value)))
        assert (found[-1].out == found[0].out).all()
        assert (found[-1].log_sum_exp == found[0].log_sum_exp).all()
    expect(found[0], attend(query, key, value, seen))
    assert (found[0].out[1] == 0).all()
    assert (found[0].log_sum_exp[1] == -np.inf).all()
    # Rows of the mask from the third on.
    attention.plan(seen, first_row=2)
    assert (attention.attend(query[2:], (key, value)).out == found[0].out[2:]).all()
    attention.plan(seen, 1, 2)
    assert (attention.attend(query[2:], (key, value)).out == found[0].out[2:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_are_what_their_tensors_are(dtype):
    cache, rows = filled(dtype=dtype)
    view = cache.get(1)
    attention = kvtwin.Attention()
    attention.plan(view.mask.numpy(), rows)
    query = normal(rows, 2, 32)
    expected = attention.attend(query, view)
    for arrays in (
        (view.key.numpy(), view.value.numpy()),
        (np.array(view.key.numpy()), view.value, "more"),
    ):
        got = attention.attend(query, arrays, dtype=dtype)
        assert (got.out == expected.out).all()
    raw = query.view(np.uint32)
    words = (raw >> 16).astype(np.uint16)  # bf16
    rounded = (raw & 0xFFFF0000).view(np.float32)
    got = attention.attend(words, view)
    assert (got.out == attention.attend(rounded, view).out).all()
    half = query.astype(np.float16)
    got = attention.attend(half, view)
    assert (got.out == attention.attend(half.astype(np.float64), view).out).all()


def test_parts_are_merged():
    key, value, query = normal(40, 2, 16), normal(40, 2, 8), normal(3, 4, 16, seed=4)
    seen = np.random.default_rng(2).random((3, 40)) < 0.8
    seen[2, 10:] = False
    attention = kvtwin.Attention()
    parts = []
    for begin, end, sinks in ((0, 10, None), (10, 30, [1, 2, 3, 4]), (30, 40, None)):
        attention.plan(seen[:, begin:end])
        kv = (key[begin:end], value[begin:end])
        parts.append(attention.attend(query, kv, sinks=sinks))
    merged = kvtwin.Attention.merge(parts)
    exact = attend(query, key, value, seen, sinks=[1, 2, 3, 4])
    # Each of the parts, and the merged result, is rounded to float32 once more.
    expect(merged, (*exact[:2], 2 * exact[2], 2 * exact[3]))
    alone = kvtwin.Attention.merge(parts[:1])
    assert (alone.out == parts[0].out).all()
    for wrong, message in (
        ([], "shapes"),
        ([parts[0], (parts[1].out[:2], parts[1].log_sum_exp[:2])], "shapes"),
        ([(parts[0].out, parts[0].log_sum_exp[:2])], r"log_sum_exp \(2, 4\)"),
        ([(parts[0].out[0], parts[0].log_sum_exp)], r"out has shape \(4, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            kvtwin.Attention.merge(wrong)


def test_results_go_to_an_array():
    key, value, query = normal(5, 1, 8), normal(5, 1, 4), normal(5, 2, 8)
    attention = kvtwin.Attention()
    attention.plan(np.tri(5, dtype=bool))
    expected = attention.attend(query, (key, value))
    out = np.full((5, 2, 4), 7, np.float32)
    assert attention.attend(query, (key, value), out=out).out is out
    assert (out == expected.out).all()
    read_only = np.full((5, 2, 4), 7, np.float32)
    read_only.flags.writeable = False
    for wrong in (
        np.full((5, 2, 3), 7, np.float32),
        np.full((2, 5, 4), 7, np.float32),
        np.full((5, 2, 4), 7, np.float64),
        np.full((5, 2, 8), 7, np.float32)[:, :, ::2],
        read_only,
        [7.0],
    ):
        with pytest.raises(ValueError, match=r"out must be .* float32, \(5, 2, 4\)"):
            attention.attend(query, (key, value), out=wrong)
        assert (np.asarray(wrong) == 7).all()
    out[:] = 7
    with pytest.raises(ValueError, match="scale is 0"):
        attention.attend(query, (key, value), scale=0, out=out)
    assert (out == 7).all()


def test_errors():
    key, value, query = normal(5, 2, 8), normal(5, 2, 4), normal(5, 4, 8)
    kv = (key, value)
    attention = kvtwin.Attention()
    with pytest.raises(RuntimeError, match="no mask is planned"):
        attention.attend(query, kv)
    with pytest.raises(RuntimeError, match="no table is planned"):
        attention.attend_blocks(query, (key[None], value[None]))
    mask = np.tri(5, dtype=bool)
    attention.plan(mask)
    for call, message in (
        (lambda: attention.plan(None), "mask has no data"),
        (lambda: attention.plan(mask, 6), "rows is 6, it must be 1 to 5"),
        (lambda: attention.plan(mask, 2, 4), "first_row is 4, it must be 0 to 3"),
        (lambda: attention.plan(mask, first_row=5), "rows is 0"),
        (lambda: attention.plan(mask.astype(np.uint8)), "mask is of uint8, it must be of b"),
        (lambda: attention.plan(np.tri(5)), "mask is 1 in column 0 of row 0, it must be 0 or"),
        (lambda: attention.plan(np.full((1, 9), np.nan)), "mask is nan in column 0 of row 0"),
        (lambda: attention.attend(query[:3], kv), r"query has shape \[8, 4, 3\]"),
        (lambda: attention.attend(query[:, :3], kv), "3 heads, which 2 KV heads"),
        (lambda: attention.attend(query, (key[:4], value)), "key has shape"),
        (lambda: attention.attend(query, (key, None)), "value has no data"),
        (lambda: attention.attend(query, (key,)), "not enough values"),
        (lambda: attention.attend(query, kv, soft_cap=-1), "soft_cap is -1"),
        (lambda: attention.attend(query, kv, sinks=[1, 2]), "sinks are 2, there are 4"),
        (lambda: attention.attend(query, kv, splits=-1), "splits is -1"),
        (lambda: attention.attend(query, kv, v_layout="x"), "v_layout is 'x'"),
        (lambda: attention.attend(query, kv, dtype="f64"), "dtype is 'f64'"),
        (lambda: kvtwin.Attention("cuda"), "twin"),
    ):
        with pytest.raises((ValueError, kvtwin.NotSupported), match=message):
            call()
    plan = attention.plan_table
    for call, message in (
        (lambda: plan([[0, -1]], [3], block_size=2), r"blocks\[1\] is -1"),
        (lambda: plan([[0], [1, 2]], [3, 1], block_size=2), r"blocks\[1\] is -1"),
        (lambda: plan([[0]], [3], block_size=2), r"lengths\[0\] is 3"),
        (lambda: plan([[0]], [1, 1], block_size=2), "blocks has 1 entries"),
        (lambda: plan([[0]], [1], [2], block_size=2), r"query_rows\[0\] is 2"),
        (lambda: plan([[0]], [1], block_size=0), "block_size is 0"),
        (lambda: plan([[0]], [1], block_size=2, window=-1), "window is -1"),
        (lambda: plan([], [], block_size=2), "sequences is 0"),
        # A row of the table is as long as the longest: 4.8 GB.
        (
            lambda: plan([[0] * 20000] + [[]] * 60000, [1] * 60001, block_size=2),
            "blocks has 60001 rows, and the longest has 20000 blocks",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    # None of these calls has changed the plan.
    assert np.isfinite(attention.attend(query, kv).out).all()
    attention.plan_table(np.array([[0, 1]]), np.array([3]), block_size=2)
    with pytest.raises(ValueError, match="layout is 'plain'"):
        attention.attend_blocks(query[:1], kv, layout="plain")
    with pytest.raises(ValueError, match="key has 1 blocks, the table uses block 1"):
        attention.attend_blocks(query[:1], (key[None, :2], value[None, :2]))


def test_the_example(repository):
    path = repository / "docs/examples/python_attention.py"
    shown = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(shown) == 6
    assert shown[0] == "position 0, layer 0: (12, 8, 64)"
    assert shown[-1] == "position 13, layer 1: (1, 8, 64)"


def test_views_that_ended_are_not_read():
    cache, rows = filled()
    view = cache.get(1)
    attention = kvtwin.Attention()
    attention.plan(view.mask, rows)
    cache.start_forward([30], [0])
    with pytest.raises(kvtwin.StaleViewError):
        attention.attend(normal(rows, 2, 32), view)
    with pytest.raises(kvtwin.StaleViewError):
        attention.plan(view.mask)


def test_a_mask_in_any_order_of_its_elements():
    query, key = np.ones((40, 1, 4), np.float32), np.ones((40, 1, 4), np.float32)
    mask = np.tri(40, dtype=bool)
    attention = kvtwin.Attention()
    found = []
    for order in (mask, np.asfortranarray(mask)):
        attention.plan(order)
        found.append(attention.attend(query, (key, np.cumsum(key, 0)))[0])
    assert np.array_equal(*found) and not np.array_equal(found[0][0], found[0][39])


def test_an_argument_that_closes_the_cache():
    # Enough memory that it goes back to the system.
    tokens, head_dim = 4000, 256
    setup = kvtwin.Setup(
        capacity=tokens, max_batch=tokens, k_head_dim=head_dim, v_head_dim=head_dim
    )
    cache = kvtwin.Cache(setup)
    rows = np.ones((tokens, 1, head_dim), np.float32)
    cache.start_forward(range(tokens), [0] * tokens)
    cache.put(0, rows, rows)
    view = cache.get(0)
    attention = kvtwin.Attention()
    attention.plan(view.mask, rows=1)

    class Closes:
        def __array__(self, dtype=None, copy=None):
            cache.close()
            return rows[:1]

    with pytest.raises(kvtwin.StaleViewError):
        attention.attend(Closes(), view)


def test_an_output_whose_memory_belongs_to_its_capsule():
    rows, dim = 4096, 2048

    class Output:
        shape = (rows, 1, dim)

        def __dlpack__(self, **more):
            return np.empty(self.shape, np.float32).__dlpack__(**more)

        def __dlpack_device__(self):
            return (1, 0)

    attention = kvtwin.Attention()
    attention.plan(np.ones((rows, 1), bool))
    one = np.ones((1, 1, dim), np.float32)
    query = np.ones((rows, 1, dim), np.float32)
    assert attention.attend(query, (one, one), out=Output()).log_sum_exp.shape == (rows, 1)


def test_a_query_that_is_one_number():
    attention = kvtwin.Attention()
    attention.plan(np.ones((2, 3), bool))
    key = np.arange(12, dtype=np.float32).reshape(3, 1, 4)
    query = np.broadcast_to(np.float32(0.5), (2, 1, 4))
    out = attention.attend(query, (key, key)).out
    np.testing.assert_array_equal(out, attention.attend(query.copy(), (key, key)).out)
