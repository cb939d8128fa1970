"""kvtwin itself, for bench/peers."""

import ctypes
import math

import numpy as np

from peers import NotSupported


class Kvtwin:
    """The optimized twin, over arrays as a cache has them. Its 8 bits are
    q8_0."""

    BYTES = "q8_0"
    PRODUCTS = False  # Products are of f32, or of bf16.

    def __init__(self):
        import kvtwin
        self.version = kvtwin.__version__
        self.attention = kvtwin.Attention()
        self.openmp = ctypes.CDLL("libgomp.so.1")

    def threads(self, count):
        self.openmp.omp_set_num_threads(count)

    def prepare(self, case, numbers):
        self.case = case
        dtype = self.BYTES if case.dtype == "8-bit" else case.dtype
        arrays = [numbers.copies(i, dtype, token_major=True) for i in range(2)]
        if case.dtype in ("bf16", "8-bit"):  # Bits of bf16, or bytes.
            of = np.uint16 if case.dtype == "bf16" else np.uint8
            arrays = [[x.reshape(case.cells, case.kv_heads, -1).view(of)
                       for x in copies] for copies in arrays]
        self.layers = list(zip(*arrays))
        self.attention.plan(np.tri(
            case.rows, case.cells, case.cells - case.rows, dtype=bool))

    def queries(self, query):
        self.query = query
        self.out = np.zeros_like(query)

    def run(self, layer):
        self.attention.attend(
            self.query, self.layers[layer], dtype=self.BYTES,
            scale=1 / math.sqrt(self.case.dim), out=self.out,
            bf16_products=self.PRODUCTS)

    def result(self):
        return self.out


class KvtwinF8(Kvtwin):
    """The same with f8_e4m3."""

    BYTES = "f8_e4m3"

    def prepare(self, case, numbers):
        if case.dtype != "8-bit":
            raise NotSupported("other dtypes than the one above")
        super().prepare(case, numbers)


class KvtwinBf16(Kvtwin):
    """The same with products of bf16."""

    PRODUCTS = True

    def prepare(self, case, numbers):
        if case.dtype not in ("bf16", "8-bit"):
            raise NotSupported("products of bf16 with f32 or f16")
        super().prepare(case, numbers)


class KvtwinF8Bf16(KvtwinF8):
    """f8_e4m3 with products of bf16."""

    PRODUCTS = True
