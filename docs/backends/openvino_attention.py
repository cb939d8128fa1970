"""PagedAttentionExtension of OpenVINO on the CPU: docs/backends/openvino.md."""

import functools

import attending
import attention
import numpy as np
import openvino
from openvino_model import BLOCK, give, model

CORE = openvino.Core()


@functools.cache
def request_of(heads, kv_heads, dim, window, sinks, inference, cache):
    compiled = CORE.compile_model(
        model(heads, kv_heads, dim, window,
              sinks and np.array(sinks, np.float32)), "CPU",
        {"INFERENCE_PRECISION_HINT": inference, "KV_CACHE_PRECISION": cache,
         "INFERENCE_NUM_THREADS": 2})
    return compiled, compiled.create_infer_request()


class Paged:
    """PagedAttentionExtension"""
    can = {"batch", "rows", "window", "sinks"}
    dtypes = ["f32"]
    dims = [32, 64, 128]
    kv_heads = [1, 2]
    cases = 80
    inference = "f32"
    cache = "f32"
    poison = 0  # In cells without a token.

    @staticmethod
    def input_error(dtype):
        return 0

    def attend(self, numbers):
        case = numbers.case
        window = 0 if case.window is None else case.window + 1
        sinks = tuple(map(float, numbers.sinks)) if case.sinks else None
        compiled, request = request_of(
            case.heads, case.kv_heads, case.dim, window, sinks,
            self.inference, self.cache)
        counts = [-(-n // BLOCK) for n in case.lengths]
        total = sum(counts) + 2
        caches = []
        for name in ("key_cache", "value_cache"):
            port = compiled.input(name)
            shape = [total] + [n.get_length()
                               for n in list(port.partial_shape)[1:]]
            made = openvino.Tensor(port.element_type, openvino.Shape(shape))
            made.data[...] = self.poison
            caches.append(made)
        order = list(map(int, np.random.Generator(
            np.random.PCG64(case.seed)).permutation(total)))
        tables = [order[sum(counts[:i]):sum(counts[:i + 1])]
                  for i in range(len(counts))]
        past = [n - rows for n, rows in zip(case.lengths, case.rows)]

        def run(queries, begins, ends, chosen):
            def rows(arrays):
                return np.concatenate([arrays[i][begins[i]:ends[i]].reshape(
                    ends[i] - begins[i], -1) for i in chosen])
            give(request, np.concatenate(
                [queries[i].reshape(len(queries[i]), -1) for i in chosen]),
                rows(numbers.key), rows(numbers.value), *caches,
                [begins[i] for i in chosen],
                [ends[i] - begins[i] for i in chosen],
                # The blocks of the tokens so far, as its scheduler does.
                [tables[i][:-(-ends[i] // BLOCK)] for i in chosen])
            request.infer()
            return np.array(request.get_output_tensor(0).data, np.float32)

        first = [i for i, n in enumerate(past) if n]
        if first:
            run([np.zeros((n, case.heads, case.dim), np.float32)
                 for n in past], [0] * len(past), past, first)
        out = run(numbers.query, past, case.lengths, range(len(past)))
        return np.split(out.reshape(-1, case.heads, case.dim),
                        np.cumsum(case.rows)[:-1])


class PagedF16(Paged):
    """the same, K and V of f16"""
    dtypes = ["f16"]
    cache = "f16"


class PagedBf16(Paged):
    """the same in bf16"""
    dtypes = ["bf16"]
    inference = cache = "bf16"

    @staticmethod
    def input_error(dtype):
        return 2.0 ** -8


class PagedU8(Paged):
    """the same, K and V of u8: 1 and -1, which it can hold"""
    cache = "u8"

    @staticmethod
    def input_error(dtype):
        return 2.0 ** -12

    @staticmethod
    def stored(array):
        return np.where(array < 0, np.float32(-1), np.float32(1))


class PagedSpare(Paged):
    """the same, NaN in cells of the last block that have no token"""
    poison = np.nan


class PagedNan(Paged):
    """the same, NaN in what no row sees"""
    can = {"batch", "rows", "window", "nan"}


if __name__ == "__main__":
    out = attention.report(
        [Paged, PagedF16, PagedBf16, PagedU8, PagedSpare, PagedNan])
    out += attending.report([Paged])
    attention.compare(out, "openvino.md")
