"""The library's pool of blocks from Python."""

import gc

import numpy as np
import pytest

import kvtwin

DTYPES = ["f32", "f16", "bf16", "f8_e4m3", "q8_0", "q4_0"]
TWINS = ["optimized", "reference"]


def setup(**fields):
    defaults = {
        "block_size": 4,
        "blocks": 6,
        "max_seq_len": 16,
        "layers": 2,
        "kv_heads": 2,
        "k_head_dim": 32,
        "v_head_dim": 64,
        "dtype": "f32",
        "v_dtype": "f32",
        "layout": "token_major",
    }
    return kvtwin.PoolSetup(**{**defaults, **fields})


def rows(tokens, dim, first=0):
    count = tokens * 2 * dim
    numbers = np.arange(first, first + count, dtype=np.float32) % 16
    return numbers.reshape(tokens, 2, dim)


def filled(twin="optimized", **fields):
    """Returns a pool with 6 committed tokens of sequence 0, and a fork of 5 of them
    with 2 more tokens, which took a copy of a block."""
    pool = kvtwin.Pool(setup(**fields), twin)
    assert pool.open([1, 2]) == 0
    for layer in range(2):
        assert pool.append(0, layer, rows(6, 32, layer), rows(6, 64, layer)) == 0
    pool.commit(0, [1, 2, 3, 4, 5, 6])
    assert pool.fork(0, 5) == 1
    for layer in range(2):
        assert pool.append(1, layer, rows(2, 32, 9), rows(2, 64, 9)) == 5
    pool.commit_unknown(1, 2)
    return pool


@pytest.mark.parametrize("twin", TWINS)
def test_images_are_part_of_the_key(twin):
    pool = kvtwin.Pool(setup(block_size=2), twin)
    tokens = list(range(8))
    image = [(3, "a")]
    assert pool.open(tokens, salt="s", media=image) == 0
    pool.add_media(0, 6, "b")
    for layer in range(2):
        pool.append(0, layer, rows(8, 32), rows(8, 64))
    pool.commit(0, tokens)
    assert pool.find([*tokens, 8], salt="s", media=[(3, "a"), (6, "b")]) == 8
    assert pool.find([*tokens, 8], salt="s", media=image) == 6
    assert pool.find([*tokens, 8], salt="s", media=[(3, "b")]) == 2
    assert pool.find([*tokens, 8], media=image) == 0
    assert pool.seq_len(pool.open(tokens, salt="s", media=image)) == 6
    with pytest.raises(ValueError, match="position of media is 7"):
        pool.add_media(0, 7, "late")


class Ours(kvtwin.Pool):
    """A pool of kvtwin as a backend of the harness."""

    kvtwin = kvtwin.PoolDescription(name="ours")


def test_the_harness_finds_nothing():
    result = kvtwin.fuzz(Ours, operations=3000)
    assert result, result
    assert result.operations >= 3000


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["token_major", "head_major"])
def test_twins_agree_in_every_byte(dtype, layout):
    seen = []
    for twin in TWINS:
        pool = filled(twin, dtype=dtype, v_dtype="bf16", layout=layout)
        seen.append([pool.table([0, 1]), pool.usage(), pool.slots(1, 1, 7)])
        for sequence in (0, 1):
            for key, value, block, start in pool.views(sequence, 1):
                seen[-1] += [key.tobytes(), value.tobytes(), block, start]
        # The unused blocks are not compared.
        seen[-1] += [a[:3].tobytes() for a in pool.blocks(1)]
    assert seen[0] == seen[1]
    assert seen[0][:3] == [[[0, 1], [0, 2]], (3, 0, 3, 1), [1, 2, 3, 8, 9, 10]]


@pytest.mark.parametrize("layout", ["token_major", "head_major"])
@pytest.mark.parametrize("twin", TWINS)
def test_views_lie_in_the_blocks(layout, twin):
    pool = filled(twin, v_dtype="q8_0", layout=layout)
    assert pool.setup.layout == layout
    for layer in range(2):
        blocks = pool.blocks(layer)
        assert [a.shape[-1] for a in blocks] == [32, 68]
        for sequence, length in ((0, 6), (1, 7)):
            found = []
            for *views, block, start in pool.views(sequence, layer):
                assert start == len(found) * 4
                found.append(len(views[0]))
                for view, all_blocks in zip(views, blocks, strict=True):
                    held = all_blocks[block]
                    if layout == "head_major":
                        held = held.swapaxes(0, 1)
                    assert held.shape == (4, *view.shape[1:])
                    assert (held[: len(view)] == view).all()
                    assert np.shares_memory(held, view)
            assert sum(found) == length
        assert (pool.views(0, layer)[0][0] == rows(6, 32, layer)[:4]).all()


def test_prompts_find_blocks():
    pool = filled()
    assert pool.open([1, 2, 3, 4, 9], "", []) == 2
    assert pool.seq_len(2) == 4
    assert pool.table([2]) == [[0]]
    assert pool.open([1, 2, 3, 4, 9], salt="other") == 3
    assert pool.open([1, 2, 3, 4, 9], extra=["image"]) == 4
    assert (pool.seq_len(3), pool.seq_len(4)) == (0, 0)
    pool.truncate(0, 3)
    pool.free(1)
    assert pool.usage() == (5, 0, 1, 1)
    assert pool.usage(0) == pool.usage()
    with pytest.raises(ValueError, match="group is 7, it must be 0 to 0"):
        pool.usage(7)


def test_arrays_outlive_the_pool():
    pool = filled()
    key = pool.views(0, 0)[0][0]
    blocks = pool.blocks(0)[1]
    for array in (key, blocks):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    del pool
    gc.collect()
    assert (key == rows(6, 32)[:4]).all()
    assert (blocks[0] == rows(6, 64)[:4]).all()


def test_errors():
    pool = filled()
    with pytest.raises(kvtwin.CacheFull, match="max_seq_len"):
        pool.append(0, 0, rows(11, 32), rows(11, 64))
    for call, message in (
        (lambda: pool.append(0, 2, rows(1, 32), rows(1, 64)), "layer is 2"),
        (lambda: pool.append(0, 0, rows(1, 64), rows(1, 64)), "key"),
        (lambda: pool.append(0, 0, None, rows(1, 64)), "key has no data"),
        (lambda: pool.open([-1]), "-1"),
        (lambda: pool.fork(0, 7), "7"),
        (lambda: pool.seq_len(2), "sequence"),
        (lambda: pool.views(2, 0), "sequence"),
        (lambda: pool.truncate(0, 7), "7"),
        (lambda: pool.free(2), "sequence"),
        (lambda: pool.table([0, 2]), "sequence"),
        (lambda: pool.slots(0, 2, 1), "2 to 1"),
        (lambda: pool.blocks(2), "layer is 2"),
        (lambda: kvtwin.Pool(setup(blocks=0)), "blocks is 0"),
        (lambda: kvtwin.Pool(setup(dtype="bits")), "dtype is|bits"),
        (lambda: kvtwin.Pool(setup(layout="x")), "layout is 'x'"),
        (lambda: kvtwin.Pool(setup(), "cuda"), "twin|cuda"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(RuntimeError, match="new_tokens is 1"):
        pool.commit(0, [1])
    with pytest.raises(RuntimeError, match="new_tokens is 1"):
        pool.commit_unknown(0, 1)
    assert pool.usage() == (3, 0, 3, 1)
