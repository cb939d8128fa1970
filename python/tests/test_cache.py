"""The library's caches from Python."""

import gc
import weakref

import numpy as np
import pytest

import kvtwin

DTYPES = ["f32", "f16", "bf16", "f8_e4m3", "q8_0", "q4_0"]
TWINS = ["optimized", "reference"]


def rows(tokens, heads=2, dim=32, first=0):
    count = tokens * heads * dim
    numbers = np.arange(first, first + count, dtype=np.float32) % 16
    return numbers.reshape(tokens, heads, dim)


def filled(twin="optimized", **fields):
    """Returns a cache of three tokens of sequence 0, with rows in layer 0."""
    fields = {"capacity": 16, "max_sequences": 2, "max_batch": 4, **fields}
    cache = kvtwin.Cache(kvtwin.Setup(**fields), twin)
    cache.start_forward([0, 1, 2], [0, 0, 0])
    cache.put(0, rows(3), rows(3, first=7))
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v_layout", ["plain", "permuted", "tiled"])
def test_twins_agree_in_every_byte(dtype, v_layout):
    if dtype in ("q8_0", "q4_0") and v_layout != "plain":
        with pytest.raises(ValueError, match="permuted|tiled"):
            filled(dtype=dtype, v_layout=v_layout, cache_padding=32)
        return
    seen = []
    for twin in TWINS:
        cache = filled(
            twin, dtype=dtype, v_layout=v_layout, cache_padding=32, shift="add"
        )
        cache.copy_prefix(0, 1, 2)
        cache.start_forward([3, 2], [0, 1])
        cache.put(0, rows(2, first=3), rows(2, first=4))
        view = cache.get(0)
        seen.append([t.numpy().tobytes() for t in (view.key, view.value, view.mask)])
        seen[-1] += [cache.cells(), cache.batch_cells(), cache.snapshot()]
        expected = {
            "plain": (32, 2, 32),
            "permuted": (2, 32, 32),
            "tiled": (1, 2, 32, 32),
        }
        assert view.value.shape == expected[v_layout]
    assert seen[0] == seen[1]


def test_shapes_and_values_are_numpys():
    cache = filled()
    view = cache.get(0)
    assert view.key.shape == (3, 2, 32)
    assert view.mask.shape == (3, 3)
    assert view.first_cell == 0
    assert (view.key.numpy() == rows(3)).all()
    assert (view.value.numpy() == rows(3, first=7)).all()
    inf = np.inf
    assert view.mask.numpy().tolist() == [[0, -inf, -inf], [0, 0, -inf], [0, 0, 0]]
    key, value, mask = view
    assert (np.asarray(key) == rows(3)).all()
    assert mask.shape == view.mask.shape and value.dtype_name == "f32"


def test_rows_come_back_in_raw_types():
    raw = {"f32": "f4", "f16": "f2", "bf16": "u2", "f8_e4m3": "u1", "q8_0": "u1"}
    for dtype, expected in raw.items():
        key = filled(dtype=dtype).get(0).key
        assert key.dtype_name == dtype
        assert key.numpy().dtype == np.dtype(expected)
        assert key.shape == (3, 2, 32)
        assert np.allclose(key.float32(), rows(3), atol=0.1)
    assert filled(dtype="q8_0").get(0).key.numpy().shape == (3, 2, 34)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v_dtype", DTYPES)
def test_raw_rows_go_in_as_they_came_out(dtype, v_dtype):
    cache = filled(dtype=dtype, v_dtype=v_dtype)
    view = cache.get(0)
    key, value = view.key.numpy().copy(), view.value.numpy().copy()
    cache.start_forward([3, 4, 5], [0, 0, 0])
    cache.put(0, key, value)
    view = cache.get(0)
    assert (view.key.numpy()[3:] == key).all()
    assert (view.value.numpy()[3:] == value).all()


def test_lists_and_other_numbers_become_float32():
    cache = filled()
    cache.start_forward(np.array([3]), np.array([0]))
    cache.put(0, rows(1).tolist(), rows(1).astype(np.float64))
    assert (cache.get(0).key.numpy()[3] == rows(1)[0]).all()
    with pytest.raises((ValueError, TypeError)):
        cache.put(0, "text", rows(1))
    for raw in (np.uint8, np.uint16):  # Bytes and words stand for f8 and bf16.
        with pytest.raises(ValueError, match="f8|bf16"):
            cache.put(0, rows(1).astype(raw), rows(1))
    with pytest.raises(ValueError, match="key"):
        cache.put(0, None, rows(1))


def test_rows_with_gaps():
    cache = filled()
    cache.start_forward([3, 4], [0, 0])
    wide = rows(4, dim=64)[::2, :, ::2]
    cache.put(0, wide, wide[:, ::-1])
    assert (cache.get(0).key.numpy()[3:] == wide).all()
    assert (cache.get(0).value.numpy()[3:] == wide[:, ::-1]).all()


@pytest.mark.parametrize("mask_dtype", ["f32", "f16", "bf16", "bits"])
def test_masks_of_all_types_say_the_same(mask_dtype):
    mask = filled(mask_dtype=mask_dtype).get(0).mask
    assert mask.dtype_name == mask_dtype
    assert (mask.float32() == 0).tolist() == np.tri(3, dtype=bool).tolist()


def test_views_are_read_only_and_not_copies():
    cache = filled()
    view = cache.get(0)
    for tensor in (view.key, view.value, view.mask):
        array = tensor.numpy()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert np.shares_memory(view.key.numpy(), cache.get(0).key.numpy())
    assert not np.from_dlpack(view.key).flags.writeable
    assert np.shares_memory(np.from_dlpack(view.value), view.value.numpy())
    cache.put(0, rows(3) + 1, rows(3))
    assert (view.key.numpy() == rows(3) + 1).all()
    assert not np.shares_memory(np.array(view.key), view.key.numpy())


ENDS = {
    "start_forward": lambda c: c.start_forward([3], [0]),
    "cache_full": lambda c: pytest.raises(
        kvtwin.CacheFull, c.start_forward, [100] * 4, [1] * 4
    ),
    "reserve": lambda c: c.start_forward([0], [0], reserve=True),
    "set_causal": lambda c: c.set_causal([0]),
    "set_causal of none": lambda c: c.set_causal([]),
    "restore": lambda c: c.restore(c.snapshot()),
    "close": lambda c: c.close(),
}


@pytest.mark.parametrize("call", ENDS)
@pytest.mark.parametrize("twin", TWINS)
def test_views_end(call, twin):
    cache = filled(twin, max_sequences=1, capacity=4)
    view = cache.get(0)
    key = view.key
    array = key.numpy()
    ENDS[call](cache)
    for use in (
        lambda: view.first_cell,
        lambda: view.mask.shape,
        lambda: key.shape,
        lambda: key.dtype_name,
        key.numpy,
        key.float32,
        lambda: np.asarray(key),
        lambda: np.from_dlpack(key),
        view.mask.numpy,
        lambda: repr(key),
    ):
        with pytest.raises(kvtwin.StaleViewError, match="get it again"):
            use()
    assert (array == rows(3)).all()


LASTING = {
    "remove": lambda c: c.remove(0, 2),
    "copy_prefix": lambda c: c.copy_prefix(0, 1, 1),
    "can_resume": lambda c: c.can_resume(0, 3),
    "put": lambda c: c.put(0, rows(3), rows(3)),
    "get": lambda c: c.get(0),
    "misuse": lambda c: pytest.raises(ValueError, c.start_forward, [], []),
    "bad indices": lambda c: pytest.raises(ValueError, c.set_causal, [7]),
}


@pytest.mark.parametrize("call", LASTING)
def test_views_last(call):
    cache = filled()
    view = cache.get(0)
    LASTING[call](cache)
    assert view.key.shape == (3, 2, 32)
    assert view.mask.numpy().shape == (3, 3)


def test_views_of_an_encoder_end_with_its_layer():
    cache = kvtwin.Cache(kvtwin.Setup(kind="encoder", capacity=4))
    cache.start_forward([0], [0], multimodal=[0])
    for layer in (0, 1):
        cache.put(layer, rows(2), rows(2))
    views = [cache.get(layer) for layer in (0, 1)]
    assert views[0].mask is None
    array = views[0].key.numpy()
    assert cache.encoder_cached()
    cache.put(0, rows(5), rows(5))
    with pytest.raises(kvtwin.StaleViewError):
        views[0].key.shape  # noqa: B018
    assert views[1].key.shape == (2, 2, 32)
    assert (array == rows(2)).all()


@pytest.mark.parametrize("twin", TWINS)
def test_arrays_outlive_the_cache(twin):
    cache = filled(twin)
    key, mask = cache.get(0).key.numpy(), cache.get(0).mask.numpy()
    shared = np.from_dlpack(cache.get(0).value)
    cache.close()
    del cache
    gc.collect()
    assert (key == rows(3)).all()
    assert (shared == rows(3, first=7)).all()
    assert mask.shape == (3, 3)


@pytest.mark.parametrize("twin", TWINS)
def test_masks_outlive_their_pass(twin):
    cache = filled(twin, capacity=4096, max_batch=4096)
    mask = cache.get(0).mask.numpy()
    before = mask.copy()
    cache.start_forward(list(range(3, 3000)), [0] * 2997)
    assert mask.tobytes() == before.tobytes()


def test_no_cycles():
    cache = filled()
    view = cache.get(0)
    array = view.key.numpy()
    with pytest.raises(TypeError):
        weakref.ref(cache)
    del cache
    assert view.key.shape == array.shape


def test_errors():
    cache = filled(capacity=4, max_sequences=1)
    assert issubclass(kvtwin.CacheFull, kvtwin.Refusal)
    with pytest.raises(kvtwin.CacheFull, match="1 of 4 cells are free"):
        cache.start_forward([3, 4], [0, 0])
    with pytest.raises(RuntimeError, match="failed_precondition"):
        cache.get(0)
    with pytest.raises(RuntimeError, match="failed_precondition"):
        cache.put(0, np.float32(1), rows(1))  # A scalar is not an array either.
    with pytest.raises(kvtwin.NotSupported):
        cache.remove(0, 0, 1)
    with pytest.raises(ValueError, match="-1"):
        cache.start_forward([-1], [0])
    with pytest.raises(ValueError, match="capacity is 'x'"):
        kvtwin.Cache(kvtwin.Setup(capacity="x"))
    with pytest.raises(ValueError, match="twin"):
        kvtwin.Cache(kvtwin.Setup(), twin="cuda")
    cache.close()
    with pytest.raises(RuntimeError, match="closed"):
        cache.can_resume(0, 0)
    cache.close()


@pytest.mark.parametrize(
    "field",
    ["kind", "placement", "shift", "v_layout", "mask_dtype", "dtype", "v_dtype"],
)
def test_a_setup_refuses_an_unknown_name(field):
    with pytest.raises(ValueError, match=f"{field}: 'swaa' is not one of "):
        kvtwin.Setup(**{field: "swaa"})


# A recursion into the setups would overflow the stack.
def test_a_setup_within_many_others():
    setup, pool_setup = kvtwin.Setup(), kvtwin.PoolSetup()
    for _ in range(100_000):
        setup = kvtwin.Setup(kind="wrapper", caches=(setup,))
        pool_setup = kvtwin.PoolSetup(groups=(pool_setup,))
    with pytest.raises(ValueError, match="caches: a wrapper holds another wrapper"):
        kvtwin.Cache(setup)
    with pytest.raises(ValueError, match="groups: a group has groups"):
        kvtwin.Pool(pool_setup)


class Unshown:
    def __repr__(self):
        raise ValueError


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: kvtwin.Setup(rope=kvtwin.Rope(base="x")), "base is 'x', it must be a num"),
        (lambda: kvtwin.Setup(rope=kvtwin.Rope(scale=None)), "scale is None, it must be a"),
        (lambda: kvtwin.Setup(rope=kvtwin.Rope(halves="x")), "halves is 'x', it must be Tr"),
        (lambda: kvtwin.Setup(capacity="\ud800"), r"capacity is '\\ud800', it must be an"),
        (lambda: kvtwin.Setup(capacity=Unshown()), "capacity is of the type .*Unshown, it must"),
        (lambda: kvtwin.PoolSetup(states="x"), "states is 'x', it must be True or False"),
        (lambda: kvtwin.PoolSetup(dtype="\ud800"), r"dtype is '\\ud800', it must be one"),
    ],
)
def test_wrong_fields_of_setups(make, text):
    setup = make()
    cls = kvtwin.Cache if isinstance(setup, kvtwin.Setup) else kvtwin.Pool
    with pytest.raises(ValueError, match=text):
        cls(setup)


def test_shared_cells():
    cache = filled(shift="identity")
    cache.copy_prefix(0, 1, 3)
    with pytest.raises(kvtwin.SharedCells, match="sequence 0"):
        cache.remove(0, 0, 1)
    cache.remove(1, 0)
    cache.remove(0, 0, 1)
    assert cache.cells() == [(1, 0, 0), (2, 1, 0)]


def test_snapshots():
    cache = filled()
    state = cache.snapshot()
    other = kvtwin.Cache(
        kvtwin.Setup(capacity=16, max_sequences=2, max_batch=4), "reference"
    )
    other.restore(state)
    assert other.snapshot() == state
    with pytest.raises(ValueError):
        other.restore(state[:-1])
    assert other.snapshot() == state


def test_wrapper_and_with():
    setup = kvtwin.Setup(
        kind="wrapper",
        caches=(kvtwin.Setup(kind="swa", window=1), kvtwin.Setup()),
        capacity=8,
        max_batch=4,
    )
    with kvtwin.Cache(setup) as cache:
        cache.start_forward([0, 1, 2], [0, 0, 0])
        seen = []
        for kind in (0, 1):
            cache.set_layer_type(kind)
            cache.put(0, rows(3), rows(3))
            seen.append((cache.get(0).mask.float32() == 0).sum())
        assert seen == [5, 6]
    with pytest.raises(RuntimeError):
        cache.cells()


@pytest.mark.parametrize("twin", ["reference", "optimized"])
def test_drafts(twin):
    cache = kvtwin.Cache(kvtwin.Setup(capacity=8, max_batch=8), twin=twin)

    def batch(positions, parents=()):
        cache.start_forward(positions, [0] * len(positions), parents=parents)
        rows = np.arange(len(positions), dtype=np.float32).reshape(-1, 1, 1)
        cache.put(0, rows, rows)
        return np.asarray(cache.get(0).mask) == 0

    batch([0, 1])
    root = kvtwin.COMMITTED
    seen = batch([2, 2, 3], [root, root, 1])
    assert seen.tolist() == [
        [True, True, True, False, False],
        [True, True, False, True, False],
        [True, True, False, True, True],
    ]
    with pytest.raises(RuntimeError, match="commit first"):
        batch([4])
    with pytest.raises(ValueError, match="the path has draft 2 of sequence 0 after"):
        cache.commit(0, [0, 2])
    with pytest.raises(ValueError, match="3 parents"):
        batch([4, 4], [root, root, root])
    cache.commit(0, [1, 2])
    assert [cell[1] for cell in cache.cells()] == [0, 1, 2, 3]
    # The cell of the rejected draft is free.
    assert batch([4]).all()


def test_pinned_states_stay():
    setup = kvtwin.Setup(kind="recurrent", capacity=16, max_batch=4, pins=1)
    cache = kvtwin.Cache(setup)
    for first in (0, 2, 4):
        cache.start_forward([first, first + 1], [0, 0])
        if first == 0:
            cache.checkpoint(0)
    assert cache.can_resume(0, 2)
    assert cache.resume_before(0, 3) == 2
    with pytest.raises(kvtwin.NotSupported):
        filled().checkpoint(0)


def test_rows_whose_conversion_puts_to_another_layer():
    cache = filled(layers=2)

    class Rows:
        def __array__(self, dtype=None, copy=None):
            cache.put(1, rows(3, first=50), rows(3, first=60))
            return rows(3, first=90)

    cache.put(0, Rows(), Rows())
    for layer, first in ((0, 90), (1, 50)):
        key = cache.get(layer).key.float32()
        assert (key[:3] == rows(3, first=first)).all(), layer
