"""ggml_flash_attn_ext of ggml on the CPU: docs/backends/ggml.md."""

import functools
import pathlib
import sys

import attending
import attention
import numpy as np

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]
                    / "bench/peers"))
import peers  # noqa: E402

BLOCK = np.dtype([("scale", np.float16), ("elements", np.int8, 32)])


@functools.cache
def ggml():
    library = peers.Ggml()
    library.threads(2)
    return library


class Flash:
    """flash_attn_ext"""
    can = {"rows", "window", "mask", "soft_cap", "sinks"}
    dtypes = ["f32", "bf16"]
    dims = [32, 64, 80, 128]
    kv_heads = [1, 2]
    cases = 200

    @staticmethod
    def input_error(dtype):  # Queries become numbers of K's dtype.
        return 0 if dtype == "f32" else 2.0 ** -attention.SIGNIFICANT[dtype]

    def held(self, array):
        """[length, kv_heads, dim] in memory, and its type."""
        dtype = self.case.dtype
        out = peers.empty(array.shape, {"f32": np.float32, "f16": np.float16,
                                        "bf16": np.uint16}[dtype])
        out[...] = (array.view(np.uint32) >> 16 if dtype == "bf16"
                    else array)
        return out, dtype

    def attend(self, numbers):
        case = self.case = numbers.case
        lib = ggml()
        mask = peers.empty(numbers.allowed[0].shape, np.float16)
        mask[...] = np.where(numbers.allowed[0], 0, -np.inf)
        held = [self.held(x[0]) for x in (numbers.key, numbers.value)]
        sinks = None
        if case.sinks:
            sinks = peers.empty((case.heads,), np.float32)
            sinks[...] = numbers.sinks
        query = peers.empty((case.heads, case.rows[0], case.dim), np.float32)
        query[...] = numbers.query[0].transpose(1, 0, 2)
        out = peers.empty((case.rows[0], case.heads, case.dim), np.float32)
        lib.begin()
        lib.compute(lib.graph(query, held, out, mask, case.soft_cap, sinks))
        return [out]


class FlashF16(Flash):
    """flash_attn_ext, f16, whose sums of V are of f16 for few rows"""
    dtypes = ["f16"]
    sum_bits = 11


class FlashQ8(Flash):
    """flash_attn_ext, q8_0, to which it rounds the queries"""
    dtypes = ["f32"]
    dims = [32, 64, 128]

    @staticmethod
    def input_error(dtype):
        return 2.0 ** -7

    @staticmethod
    def stored(array):
        return (np.round(array * 64) / 64).astype(np.float32)

    def held(self, array):
        out = peers.empty((*array.shape[:2], array.shape[2] // 32), BLOCK)
        out["scale"] = 1 / 64
        out["elements"] = np.nan_to_num(array * 64).reshape(*out.shape, 32)
        return out, "q8_0"


class FlashNan(Flash):
    """flash_attn_ext, NaN in what no row sees"""
    can = {"rows", "window", "nan"}


class FlashEmpty(Flash):
    """flash_attn_ext, rows that see nothing"""
    can = {"rows", "mask", "empty"}


if __name__ == "__main__":
    out = attention.report([Flash, FlashF16, FlashQ8, FlashNan, FlashEmpty])
    out += attending.report([Flash], operations=3_000)
    attention.compare(out, "ggml.md")
