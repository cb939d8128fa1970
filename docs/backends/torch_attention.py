"""The attention of torch on the CPU: docs/backends/torch.md."""

import attending
import attention
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def tensor(array, dtype):
    """[1, heads, rows, dim]."""
    return torch.from_numpy(array).transpose(0, 1)[None].to(DTYPES[dtype])


class Sdpa:
    """scaled_dot_product_attention with a mask of bool"""
    can = {"rows", "window", "mask"}
    dtypes = ["f32", "f16", "bf16"]
    dims = [1, 8, 64, 96, 128]
    kv_heads = [1, 2]

    @staticmethod
    def input_error(dtype):  # Weights become numbers of the dtype.
        return 0 if dtype == "f32" else 2.0 ** -attention.SIGNIFICANT[dtype]

    def options(self, allowed, dtype):
        return {"attn_mask": torch.from_numpy(allowed)}

    def attend(self, numbers):
        case = numbers.case
        query, key, value = (
            tensor(x[0], case.dtype)
            for x in (numbers.query, numbers.key, numbers.value))
        out = scaled_dot_product_attention(
            query, key, value, enable_gqa=True,
            **self.options(numbers.allowed[0], case.dtype))
        return [out[0].transpose(0, 1).float().numpy()]


class SdpaFloat(Sdpa):
    """scaled_dot_product_attention with a mask of 0 and -inf"""

    def options(self, allowed, dtype):
        return {"attn_mask": torch.from_numpy(
            np.where(allowed, np.float32(0), -np.inf)).to(DTYPES[dtype])}


class SdpaEmpty(Sdpa):
    """scaled_dot_product_attention, rows that see nothing"""
    can = {"rows", "mask", "empty"}


class SdpaEmptyFloat(SdpaFloat):
    """the same with a mask of 0 and -inf"""
    can = {"rows", "mask", "empty"}


class SdpaNan(Sdpa):
    """scaled_dot_product_attention, NaN in what no row sees"""
    can = {"rows", "window", "mask", "nan"}


class SdpaCausal(Sdpa):
    """scaled_dot_product_attention, is_causal=True"""
    can = {"rows"}

    def options(self, allowed, dtype):
        return {"is_causal": True}


class SdpaLowerRight(Sdpa):
    """scaled_dot_product_attention, causal_lower_right(rows, cells)"""
    can = {"rows"}

    def options(self, allowed, dtype):
        from torch.nn.attention import bias
        return {"attn_mask": bias.causal_lower_right(*allowed.shape)}


if __name__ == "__main__":
    torch.set_num_threads(2)
    out = attention.report([Sdpa, SdpaFloat, SdpaEmpty, SdpaEmptyFloat, SdpaNan,
                            SdpaCausal, SdpaLowerRight])
    out += attending.report([Sdpa, SdpaCausal, SdpaLowerRight])
    attention.compare(out, "torch.md")
