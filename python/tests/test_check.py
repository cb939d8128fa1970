"""Tests of `check` and `Recorder`."""

import copy
import dataclasses
import io
import json
import os
import re
import signal
import threading

import numpy as np
import pytest

import kvtwin
import toys

LINE = 12  # The first wrong line of that recording.
SETUP = kvtwin.Setup(
    capacity=8,
    max_sequences=2,
    max_batch=4,
    kv_heads=2,
    k_head_dim=2,
    v_head_dim=3,
    shift="add",
)


def test_accepts(recordings):
    paths = sorted((recordings / "accept").glob("*/*.jsonl"))[::40]
    assert paths
    for path in paths:
        verdict = kvtwin.check(path)
        assert verdict and verdict.accepted and verdict.line == 0
        assert verdict.level == "identity"
        assert str(verdict) == f"accept (identity): {path}"


def test_rejects(recordings, tmp_path):
    path = recordings / "reject/ollama-0.12.9-defrag/contiguous-0016.jsonl"
    verdict = kvtwin.check(str(path))
    assert not verdict
    assert (verdict.verdict, verdict.line) == ("reject", LINE)
    assert "the row of" in verdict.reason
    assert verdict.reason in str(verdict) and f"line {LINE}" in str(verdict)
    page = verdict.html(tmp_path / "page.html").read_text()
    assert "<html" in page and "contiguous-0016.jsonl" in page
    for one in (path.read_bytes(), path.read_text().splitlines(), path.open()):
        again = kvtwin.check(one, twin="reference")
        assert (again.verdict, again.line, again.name) == ("reject", LINE, "-")
    objects = [json.loads(line) for line in path.open()]
    page = kvtwin.check(objects).html(tmp_path / "other.html")
    assert "other.jsonl" in page.read_text()
    assert kvtwin.check(tmp_path / "other.jsonl").line == LINE


DTYPES = ["f32", "f16", "bf16", "f8_e4m3", "q8_0", "q4_0"]


@pytest.mark.parametrize("v_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("placement", ["contiguous", "scatter", "other"])
def test_rows_of_each_dtype(placement, dtype, v_dtype):
    own = "contiguous" if placement == "other" else placement
    setup = kvtwin.Setup(
        capacity=8, k_head_dim=32, v_head_dim=64, placement=own, dtype=dtype, v_dtype=v_dtype
    )
    out = io.StringIO()
    random = np.random.default_rng(1)
    recorder = kvtwin.Recorder(kvtwin.Cache(setup), out, setup, placement=placement)
    for begin in (0, 3):
        recorder.start_forward(list(range(begin, begin + 3)), [0] * 3)
        key, value = (random.normal(size=(3, 1, n)).astype(np.float32) for n in (32, 64))
        recorder.put(0, key, value)
        recorder.get(0)
    recorder.start_forward([6], [0], reserve=True)
    recorder.close()
    lines = out.getvalue().splitlines()
    level = "visibility" if placement == "other" else "identity"
    verdict = kvtwin.check(lines)
    assert verdict and verdict.level == level, verdict
    # The last view has K of the first token as the second token's.
    wrong = json.loads(lines[6])
    data = wrong["key"]["data"]
    wrong["key"]["data"] = data[:32] + data[:32] + data[64:]
    verdict = kvtwin.check(lines[:6] + [json.dumps(wrong)])
    assert (verdict.verdict, verdict.line) == ("reject", 7)
    assert "sequence 0, position 0 (put on line 3)" in verdict.reason


def test_bad_input(tmp_path):
    verdict = kvtwin.check([])
    assert not verdict and verdict.verdict == "bad_input"
    assert kvtwin.check(b"{}").reason
    with pytest.raises(RuntimeError, match="no failure to draw"):
        verdict.html(tmp_path / "page.html")
    with pytest.raises(FileNotFoundError):
        kvtwin.check(tmp_path / "not there")
    with pytest.raises(ValueError, match="twin"):
        kvtwin.check([], twin="cuda")


def test_a_pool(recordings):
    assert kvtwin.check(recordings / "pools/f32.jsonl").accepted


def history(cache):
    rng = np.random.default_rng(1)

    def forward(positions, sequences):
        cache.start_forward(positions, sequences)
        n = len(positions)
        cache.put(0, rng.normal(size=(n, 2, 2)), rng.normal(size=(n, 2, 3)))
        return cache.get(0)

    forward([0, 1, 2], [0, 0, 0])
    cache.copy_prefix(0, 1, 2)
    forward([2, 3], [1, 0])
    cache.remove(0, 3)
    assert cache.can_resume(0, 3) is True
    with pytest.raises(kvtwin.SharedCells):
        cache.remove(0, 0, 1)
    cache.remove(1, 0)
    cache.remove(0, 0, 1)
    forward([2], [0])
    cache.start_forward([5], [0], reserve=True)
    cache.put(0, np.zeros((1, 2, 2)), np.zeros((1, 2, 3)))
    cache.get(0)
    for i in range(3):
        forward([10 + i] * 4, [1] * 4)
    with pytest.raises(kvtwin.CacheFull):
        cache.start_forward([20] * 4, [1] * 4)


@pytest.mark.parametrize("placement", ["contiguous", "other"])
def test_records_our_own(placement, tmp_path):
    path = tmp_path / "ours.jsonl"
    with kvtwin.Recorder(
        kvtwin.Cache(SETUP), path, SETUP, placement=placement
    ) as recorder:
        history(recorder)
        assert recorder.cell_count() == 16  # Another method of the cache.
    lines = [json.loads(line) for line in path.open()]
    assert lines[0]["producer"] == "Cache"
    assert ("cells" in lines[1]) == (placement == "contiguous")
    results = [line["result"] for line in lines if "result" in line]
    assert {"ok", "shared_cells", "cache_full", True} <= set(results)
    assert {"reserved_mask", "copy_prefix", "can_resume"} <= {
        line.get("op") for line in lines
    }
    verdict = kvtwin.check(path)
    assert verdict.accepted, verdict
    assert verdict.level == ("identity" if placement == "contiguous" else "visibility")


class Toy:
    """One sequence, as two tensors and a list."""

    def __init__(self, wrong=""):
        self.wrong = wrong
        self.positions = []
        self.rows = {}

    def start_forward(self, positions, sequences):
        if len(self.positions) + len(positions) > 8:
            raise kvtwin.CacheFull("full")
        self.batch = positions
        self.positions += positions

    def put(self, layer, key, value):
        k, v = self.rows.get(layer, (key[:0], value[:0]))
        if self.wrong == "row" and len(k) > 3:
            key = key[::-1]
        self.rows[layer] = (np.concatenate([k, key]), np.concatenate([v, value]))

    def get(self, layer):
        k, v = self.rows[layer]
        mask = np.subtract.outer(self.batch, self.positions) >= 0
        if self.wrong == "mask":
            mask = np.subtract.outer(self.batch, self.positions) > 0
        if self.wrong == "nan":
            k = np.where(np.arange(len(k))[:, None, None] == 1, np.nan, k)
        if self.wrong == "hidden nan":
            k, v = (np.concatenate([r, r[:1] * np.nan]) for r in (k, v))
            mask = np.pad(mask, ((0, 0), (0, 1)))
        return k, v, mask

    def remove(self, sequence, begin, end):
        raise kvtwin.NotSupported("no")


def record(toy, setup=SETUP):
    out = io.StringIO()
    recorder = kvtwin.Recorder(toy, out, setup)
    rng = np.random.default_rng(1)
    for begin in range(0, 8, 2):
        recorder.start_forward([begin, begin + 1], [0, 0])
        recorder.put(0, rng.normal(size=(2, 2, 2)), rng.normal(size=(2, 2, 3)))
        recorder.get(0)
    with pytest.raises(kvtwin.CacheFull):
        recorder.start_forward([8], [0])
    return kvtwin.check(out.getvalue().encode())


def test_toys():
    assert record(Toy()).level == "visibility"
    verdict = record(Toy("row"))
    assert verdict.verdict == "reject" and verdict.line == 10
    assert "position 4" in verdict.reason
    assert record(Toy("mask")).line == 4
    assert record(Toy("hidden nan")).accepted
    with pytest.raises(ValueError, match="not finite in column 1, which row 1"):
        record(Toy("nan"))


class Raw(kvtwin.Cache):
    """Takes and shows rows as arrays of the stored dtype."""

    def __init__(self, setup, odd=False):
        super().__init__(setup)
        self.odd = odd

    def put(self, layer, key, value):
        if self.odd:  # K loses its last bit.
            key = key & ~key.dtype.type(1)
        super().put(layer, key, value)

    def get(self, layer):
        view = super().get(layer)
        return view.key.numpy(), view.value.numpy(), view.mask.float32()


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize(
    ("dtype", "v_dtype"), [("bf16", "q8_0"), ("f8_e4m3", "bf16"), ("q8_0", "q4_0")]
)
def test_rows_of_bits(dtype, v_dtype, odd):
    """bf16 is uint16, f8 and blocks are uint8, as arguments and as results."""
    setup = kvtwin.Setup(
        capacity=2, k_head_dim=32, v_head_dim=32, dtype=dtype, v_dtype=v_dtype
    )
    numbers = np.random.default_rng(1).normal(size=(2, 1, 32)).astype(np.float32)
    stored = kvtwin.Cache(setup)
    stored.start_forward([0, 1], [0, 0])
    stored.put(0, numbers, numbers)
    view = stored.get(0)
    out = io.StringIO()
    recorder = kvtwin.Recorder(Raw(setup, odd), out, setup)
    recorder.start_forward([0, 1], [0, 0])
    recorder.put(0, view.key.numpy(), view.value.numpy())
    recorder.get(0)
    assert kvtwin.check(out.getvalue().encode()).accepted != odd
    put, shown = (json.loads(line) for line in out.getvalue().splitlines()[2:4])
    for name, tensor in (("key", view.key), ("value", view.value)):
        assert put[name]["shape"] == [32, 1, 2]
        assert put[name]["data"] == tensor.float32().ravel().tolist()
    assert (shown["key"]["data"] == put["key"]["data"]) != odd
    # Numbers are accepted as well.
    recorder = kvtwin.Recorder(Raw(setup), io.StringIO(), setup)
    recorder.start_forward([0, 1], [0, 0])
    recorder.put(0, numbers, numbers)


def test_blocks_of_a_wrong_width_are_refused():
    setup = kvtwin.Setup(k_head_dim=32, v_head_dim=32, dtype="q8_0")
    recorder = kvtwin.Recorder(Raw(setup), io.StringIO(), setup)
    rows = np.zeros((1, 1, 32), np.uint8)
    with pytest.raises(ValueError, match="key has rows of 32 bytes, which are not 34"):
        recorder.put(0, rows, rows)


class Layouts:
    """Two tokens of a sequence in the first of 32 cells, which have as many heads. V is
    `wild` in the cells from `cell` on."""

    def __init__(self, v_layout, wild, cell):
        self.v_layout, self.wild, self.cell = v_layout, wild, cell

    def start_forward(self, positions, sequences):
        pass

    def put(self, layer, key, value):
        self.key, self.value = (
            np.concatenate([one, np.full((30, 32, 2), np.nan, np.float32)])
            for one in (key, value)
        )
        self.value[self.cell :, 1, 1] = self.wild

    def get(self, layer):
        value = self.value
        if self.v_layout == "permuted":
            value = value.transpose(1, 2, 0)
        if self.v_layout == "tiled":
            value = value.transpose(1, 2, 0)[None]
        return self.key, value, np.tri(2, 32, dtype=bool)


def recorded(layouts, rows=None):
    """Records a pass of two tokens, and returns the recorder and its file."""
    setup = kvtwin.Setup(
        capacity=2, kv_heads=32, k_head_dim=2, v_head_dim=2, v_layout=layouts.v_layout,
        cache_padding=32, max_batch=2,
    )
    rows = np.ones((2, 32, 2), np.float32) if rows is None else rows
    out = io.StringIO()
    recorder = kvtwin.Recorder(layouts, out, setup)
    recorder.start_forward([0, 1], [0, 0])
    recorder.put(0, rows, rows)
    return recorder, out


@pytest.mark.parametrize("wild", [np.nan, -np.inf])
@pytest.mark.parametrize("v_layout", ["plain", "permuted", "tiled"])
def test_hidden_cells_may_hold_anything(v_layout, wild):
    rows = np.random.default_rng(1).normal(size=(2, 32, 2)).astype(np.float32)

    def verdict(cell):
        recorder, out = recorded(Layouts(v_layout, wild, cell), rows)
        recorder.get(0)
        return kvtwin.check(out.getvalue().encode())

    assert verdict(2).accepted, verdict(2)
    with pytest.raises(ValueError, match="V has a number that is not finite in column 1, "):
        verdict(1)


@pytest.mark.parametrize(
    ("v_layout", "empty"),
    [("plain", (0, 32, 2)), ("permuted", (32, 2, 0)), ("tiled", (0, 32, 2, 32))],
)
def test_a_view_may_have_no_rows(v_layout, empty):
    class Emptied(Layouts):
        def remove(self, sequence, begin, end):
            pass

        def get(self, layer):
            return np.zeros((0, 32, 2)), np.zeros(empty), np.zeros((2, 0), bool)

    recorder, out = recorded(Emptied(v_layout, 0, 2))
    recorder.remove(0, 0, kvtwin.OPEN_END)
    recorder.get(0)
    lines = out.getvalue().splitlines()
    assert kvtwin.check(lines).accepted
    assert kvtwin.check(lines[:3] + lines[4:]).line == 4  # The tokens are missing.


@pytest.mark.parametrize(
    ("v_layout", "name", "shape", "reason"),
    [
        ("plain", "key", (32, 2), "mask has 32 columns, key has 1"),
        ("plain", "value", (32, 2), "value has 1 columns, key has 32"),
        ("permuted", "value", (32,), "shape of value is [32, 1, 1]"),
        ("tiled", "value", (32,), "shape of value is [32, 1, 1]"),
    ],
)
def test_rows_of_a_wrong_rank_are_named(v_layout, name, shape, reason):
    class Flat(Layouts):
        def get(self, layer):
            key, value, mask = super().get(layer)
            flat = np.zeros(shape)
            return (flat, value, mask) if name == "key" else (key, flat, mask)

    recorder, out = recorded(Flat(v_layout, 0, 2))
    recorder.get(0)
    verdict = kvtwin.check(out.getvalue().encode())
    assert verdict.line == 4 and reason in verdict.reason, verdict


@pytest.mark.filterwarnings("error")
def test_rows_beyond_f32_are_named():
    recorder = kvtwin.Recorder(Toy(), io.StringIO(), SETUP)
    recorder.start_forward([0], [0])
    with pytest.raises(ValueError, match="put of layer 0: key has a number that is not"):
        recorder.put(0, np.full((1, 2, 2), 1e300), np.zeros((1, 2, 3)))


def test_rows_without_a_shape_have_no_columns():
    class Scalar(Toy):
        def get(self, layer):
            key, value, mask = super().get(layer)
            return np.float64(key.sum()), value, mask

    with pytest.raises(ValueError, match=r"shape \(2, 2\), expected \(tokens, 0\)"):
        record(Scalar())


class AttendingToy(Toy):
    """It does not show its rows."""

    def attend(self, layer, query):
        k, v, mask = super().get(layer)
        if self.wrong == "seen":
            mask = mask | (np.arange(len(self.positions)) == 7)
        group = query.shape[1] // k.shape[1]
        k, v = (np.repeat(rows, group, axis=1) for rows in (k, v))
        scores = np.einsum("qhd,khd->hqk", query, k) / np.sqrt(k.shape[2])
        if self.wrong != "no cap":
            scores = 2 * np.tanh(scores / 2)
        weights = np.where(mask, np.exp(scores), 0)
        sums = weights.sum(axis=2, keepdims=True)
        if self.wrong != "no sinks":
            sums = sums + np.exp(np.float32([0.5, -1, 0, 1]))[:, None, None]
        return np.einsum("hqk,khd->qhd", weights / sums, v)


@pytest.mark.parametrize(
    "wrong, text",
    [
        ("", ""),
        ("seen", "row 0 .sequence 0, position 6.*as if position 7 were seen"),
        ("no cap", "as if the soft cap were absent"),
        ("no sinks", "as if the sinks were absent"),
    ],
)
def test_attention_is_judged(wrong, text):
    setup = dataclasses.replace(SETUP, soft_cap=2, sinks=(0.5, -1, 0, 1))
    out = io.StringIO()
    recorder = kvtwin.Recorder(AttendingToy(wrong), out, setup)
    rng = np.random.default_rng(1)
    for begin in range(0, 8, 2):
        recorder.start_forward([begin, begin + 1], [0, 0])
        recorder.put(0, rng.normal(size=(2, 2, 2)), rng.normal(size=(2, 2, 3)))
        recorder.attend(0, np.float32(3 * rng.normal(size=(2, 4, 2))))
    verdict = kvtwin.check(out.getvalue().encode())
    if not wrong:
        assert verdict.accepted and verdict.level == "attention", verdict
    else:
        assert verdict.verdict == "reject" and re.search(text, verdict.reason), verdict


def test_refusals_are_judged():
    out = io.StringIO()
    recorder = kvtwin.Recorder(Toy(), out, SETUP, placement="contiguous")
    recorder.start_forward([0], [0])
    with pytest.raises(kvtwin.NotSupported):
        recorder.remove(0, 0)
    verdict = kvtwin.check(out.getvalue().encode())
    assert verdict.line == 3 and "remove" in verdict.reason


def test_misuse_is_not_recorded():
    out = io.StringIO()
    recorder = kvtwin.Recorder(kvtwin.Cache(SETUP), out, SETUP)
    with pytest.raises(ValueError):
        recorder.start_forward([], [])
    assert len(out.getvalue().splitlines()) == 1
    with pytest.raises(ValueError, match="expected"):
        recorder.put(0, np.zeros((2, 2)), np.zeros((2, 2)))


def test_numbers_that_are_not_finite_are_refused_before_the_call():
    out = io.StringIO()
    recorder = kvtwin.Recorder(kvtwin.Cache(SETUP), out, SETUP)
    recorder.start_forward([0], [0])
    before = out.getvalue()
    key, value = np.ones((1, 2, 2)), np.ones((1, 2, 3))
    for name, number in (("key", np.nan), ("value", -np.inf)):
        rows = {"key": key, "value": value}
        rows[name] = np.full_like(rows[name], number)
        text = f"put of layer 0: {name} has a number that is not finite, {number}"
        with pytest.raises(ValueError, match=text):
            recorder.put(0, rows["key"], rows["value"])
    with pytest.raises(RuntimeError):
        recorder.get(0)  # No rows were put.
    assert out.getvalue() == before


@pytest.mark.parametrize(
    "mask, error, text",
    [
        (np.zeros((2, 2), np.int64), TypeError, "int64"),
        (np.ones((2, 2)), ValueError, "neither 0 nor -inf"),
        (np.zeros((2, 5), bool), ValueError, r"expected \(tokens, 2\)"),
    ],
)
def test_invalid_masks(mask, error, text):
    toy = Toy()
    toy.get = lambda layer: (np.zeros((2, 2, 2)), np.zeros((2, 2, 3)), mask)
    with pytest.raises(error, match=text):
        record(toy)


@pytest.mark.parametrize("kind", ["swa", "chunked", "encoder", "wrapper"])
def test_headers_of_all_kinds(kind):
    setup = kvtwin.Setup(
        kind=kind,
        window=2 if kind == "swa" else None,
        chunk=2,
        shift="rope",
        rope=kvtwin.Rope(halves=True, base=500.0),
        caches=(kvtwin.Setup(kind="swa_mem", window=1, memory=2), kvtwin.Setup()),
        capacity=8,
        dtype="f16",
        k_head_dim=2,
    )
    out = io.StringIO()
    recorder = kvtwin.Recorder(
        kvtwin.Cache(setup), out, setup, placement="contiguous"
    )
    more = {"multimodal": [1]} if kind == "encoder" else {}
    recorder.start_forward([0, 1], [0, 0], **more)
    for layer_type in range(2 if kind == "wrapper" else 1):
        if kind == "wrapper":
            recorder.set_layer_type(layer_type)
        recorder.put(0, np.ones((2, 1, 2)), np.ones((2, 1, 1)))
        recorder.get(0)
    if kind == "encoder":
        assert recorder.encoder_cached()
    else:
        recorder.set_causal([0])
        recorder.get(0)
    header = json.loads(out.getvalue().splitlines()[0])
    rope = {"pairing": "halves", "base": 500.0, "scale": 1.0, "dims": 0}
    assert header["cache"]["rope"] == rope
    verdict = kvtwin.check(out.getvalue().encode())
    assert verdict.accepted, verdict
    assert verdict.level == "identity"


def test_recorded_drafts():
    for path, ok in ([1], True), ([0], False):
        out = io.StringIO()
        recorder = kvtwin.Recorder(kvtwin.Cache(SETUP), out, SETUP)
        root = kvtwin.COMMITTED
        key = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
        value = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
        recorder.start_forward([0, 0], [0, 0], parents=[root, root])
        recorder.put(0, key, value)
        recorder.get(0)
        recorder.commit(0, [1])
        recorder.start_forward([1], [0])
        recorder.put(0, key[:1] + 70, value[:1] + 70)
        recorder.get(0)
        text = out.getvalue()
        assert json.loads(text.splitlines()[0])["kvtrace"] == 3
        text = text.replace('"path": [1]', f'"path": {path}')
        assert bool(kvtwin.check(text.encode())) is ok


def test_a_page_replaces_no_other_file(recordings, tmp_path):
    path = recordings / "reject/ollama-0.12.9-defrag/contiguous-0016.jsonl"
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="is not a page of kvtwin"):
        kvtwin.check(copy).html(copy)
    assert copy.read_bytes() == path.read_bytes()
    verdict = kvtwin.check(path.read_bytes())
    (tmp_path / "mine.jsonl").write_text("mine")
    with pytest.raises(FileExistsError, match="is another recording"):
        verdict.html(tmp_path / "mine.html")
    assert (tmp_path / "mine.jsonl").read_text() == "mine"
    assert verdict.html(tmp_path / "copy.html").exists()
    assert verdict.html(tmp_path / "copy.html").exists()  # It replaces the page.


def test_paths_and_bytes(recordings, tmp_path):
    path = next(iter(sorted((recordings / "accept").glob("*/*.jsonl"))))
    content = path.read_bytes()
    odd = tmp_path / "odd\udcff.jsonl"
    odd.write_bytes(content)
    for given in (odd, str(odd), content, bytearray(content), memoryview(content)):
        assert kvtwin.check(given).verdict == "accept"
    assert kvtwin.check(content.splitlines()).verdict == "accept"
    with kvtwin.Cache(kvtwin.Setup()) as cache:
        cache.save_sequence(0, tmp_path / "s.safetensors")
        cache.load_sequence(0, tmp_path / "s.safetensors")


def test_an_accepted_recording_says_that_nothing_was_judged(tmp_path):
    kvtwin.Recorder(toys.Legal(kvtwin.Setup()), tmp_path / "r.jsonl", kvtwin.Setup()).close()
    assert "nothing was judged" in str(kvtwin.check(tmp_path / "r.jsonl"))


def test_a_recorder_refuses_what_no_recording_has(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text("an earlier recording")

    def refuses(text, setup=kvtwin.Setup(), **more):
        with pytest.raises(ValueError, match=text):
            kvtwin.Recorder(toys.Legal(setup), path, setup, **more)
        assert path.read_text() == "an earlier recording"

    refuses("zz", placement="zz")
    refuses("capacity", kvtwin.Setup(capacity=-1))
    refuses("sinks is", kvtwin.Setup(sinks=(-np.inf,)))
    parts = (kvtwin.Setup(placement="contiguous"), kvtwin.Setup(placement="scatter"))
    wrapper = kvtwin.Setup(kind="wrapper", caches=parts)
    refuses(r"caches\[1\].placement is 'scatter'", wrapper, placement="contiguous")
    setup = kvtwin.Setup(capacity=np.int64(5), dtype="f16")
    recorder = kvtwin.Recorder(toys.Legal(setup), path, setup)
    copy.copy(recorder)
    recorder.start_forward([0], [0])
    rows = np.full((1, 1, 1), 70000, np.float32)
    with pytest.raises(ValueError, match="K|key has a number that is too large for f16"):
        recorder.put(0, rows, rows)
    recorder.close()
    assert kvtwin.check(path).verdict == "accept"


def test_an_interrupt_ends_the_judging(recordings, tmp_path):
    """The recording is a pipe, which its writer keeps open for ten seconds."""
    path = recordings / "reject/ollama-0.12.9-defrag/contiguous-0016.jsonl"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    ended = threading.Event()
    late = threading.Event()

    def write():
        with pipe.open("wb", buffering=0) as out:
            out.write(path.read_bytes().splitlines(keepends=True)[0])
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                if ended.wait(0.01):
                    return
                out.write(b"\n" * 10_000)
            late.set()

    writer = threading.Thread(target=write)
    # A job in the background of a shell ignores SIGINT.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        writer.start()
        with pytest.raises(KeyboardInterrupt):
            kvtwin._kvtwin.judge_file(str(pipe), ["reference"])
    finally:
        ended.set()
        writer.join()
        signal.signal(signal.SIGINT, handler)
    assert not late.is_set()
