"""Saved states, read by the third-party package `safetensors`."""

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import kvtwin

NAMES = {
    "f32": "F32",
    "f16": "F16",
    "bf16": "BF16",
    "f8_e4m3": "F8_E4M3",
    "q8_0": "U8",
    "q4_0": "U8",
}
ROW_BYTES = {"f32": 128, "f16": 64, "bf16": 64, "f8_e4m3": 32, "q8_0": 34, "q4_0": 18}


def rows(tokens, first=0):
    numbers = np.arange(first, first + tokens * 2 * 32, dtype=np.float32) % 16
    return numbers.reshape(tokens, 2, 32)


def saved(twin="optimized", **fields):
    """Saves three tokens: the first one leaves, and sequence 1 shares the next."""
    setup = kvtwin.Setup(
        capacity=16, max_sequences=2, max_batch=4, shift="identity", **fields
    )
    cache = kvtwin.Cache(setup, twin)
    cache.start_forward([0, 1, 2], [0, 0, 0])
    cache.put(0, rows(3), rows(3, first=7))
    cache.put(5, rows(3, first=3), rows(3, first=4))
    cache.remove(0, 0, 1)
    cache.copy_prefix(0, 1, 1)
    return cache.snapshot()


@pytest.mark.parametrize("twin", ["optimized", "reference"])
@pytest.mark.parametrize("dtype", NAMES)
def test_tensors_have_their_names_types_and_shapes(twin, dtype):
    tensors = dict(safetensors.deserialize(saved(twin, dtype=dtype)))
    cells = tensors.pop("cells")
    assert (cells["dtype"], cells["shape"]) == ("I32", [3, 3])
    assert set(tensors) == {
        f"layers.{layer}.{name}" for layer in (0, 5) for name in ("key", "value")
    }
    for tensor in tensors.values():
        row = ROW_BYTES[dtype]
        assert tensor["dtype"] == NAMES[dtype]
        assert tensor["shape"][:3] == [1, 2, 2]
        assert tensor["shape"][3] == (row if dtype in ("q8_0", "q4_0") else 32)
        assert len(tensor["data"]) == 2 * 2 * row


@pytest.mark.parametrize("twin", ["optimized", "reference"])
@pytest.mark.parametrize("v_layout", ["plain", "permuted", "tiled"])
def test_numbers_are_those_that_were_put(twin, v_layout):
    arrays = safetensors.numpy.load(saved(twin, v_layout=v_layout, cache_padding=32))
    # Cell, position, sequence.
    assert arrays["cells"].tolist() == [[1, 0, 0], [1, 0, 1], [2, 1, 0]]
    assert (arrays["layers.0.key"] == rows(3)[1:]).all()
    assert (arrays["layers.0.value"] == rows(3, first=7)[1:]).all()
    assert (arrays["layers.5.key"] == rows(3, first=3)[1:]).all()


def test_metadata(tmp_path):
    (tmp_path / "state").write_bytes(saved())
    with safetensors.safe_open(tmp_path / "state", framework="np") as file:
        metadata = file.metadata()
    assert metadata["kvtwin_state"] == "2"
    assert metadata["model"] == ""
    assert metadata["encoder"] == "0 0 0"
    assert len(metadata["xxh3"]) == 16
