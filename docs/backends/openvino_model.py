"""A model of OpenVINO that is one PagedAttentionExtension."""

import math

import numpy as np
import openvino
from openvino import opset13
from openvino.op import Parameter, _PagedAttentionExtension

BLOCK = 32  # Tokens of a block, on CPUs.
# The inputs of a pass, by name, beside query, key and value.
INPUTS = ["key_cache", "value_cache", "past_lens", "subsequence_begins",
          "block_indices", "block_indices_begins"]


def model(heads, kv_heads, dim, window=0, sinks=None):
    """`window` counts the query; 0: none."""
    types = openvino.Type
    inputs = []

    def parameter(name, of, shape):
        made = Parameter(of, openvino.PartialShape(shape))
        made.output(0).get_tensor().set_names({name})
        inputs.append(made)
        return made

    def scalar(number, of=np.int32):
        return opset13.constant(np.array(number, of))

    def none(of=np.int32):
        return opset13.constant(np.zeros(0, of))

    f32 = np.float32
    node = _PagedAttentionExtension([x.output(0) for x in [
        parameter("query", types.f32, [-1, heads * dim]),
        parameter("key", types.f32, [-1, kv_heads * dim]),
        parameter("value", types.f32, [-1, kv_heads * dim]),
        *(parameter(name, types.dynamic, [-1] * 4) for name in INPUTS[:2]),
        *(parameter(name, types.i32, [-1]) for name in INPUTS[2:]),
        scalar(1 / math.sqrt(dim), f32), scalar(window),
        none(f32),  # alibi_slopes
        parameter("max_context_len", types.i32, []),
        none(),  # score_aggregation_window
        none(), none(), none(f32),  # Rotation.
        none(f32), scalar(0), scalar(0),  # xattention
        none(f32) if sinks is None else opset13.constant(
            sinks.reshape(1, -1, 1, 1)),
        scalar(0), none(), none(), none(),  # adaptive_rkv
        none(), none(np.uint8), none()]])
    for name, number in (("k_head_size", dim), ("v_head_size", dim),
                         ("num_k_heads", kv_heads), ("num_v_heads", kv_heads)):
        node.get_rt_info()[name] = number
    return openvino.Model([opset13.result(node.output(0))], inputs, "paged")


def tensor(array, of=np.int32):
    return openvino.Tensor(np.array(array, of, order="C"))


def give(request, query, key, value, key_cache, value_cache, past, rows,
         blocks):
    """Sets the inputs of a pass: for each sequence its tokens so far, its new
    ones, and a list of blocks. Rows are [tokens, heads * dim]."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        request.set_tensor(name, tensor(array, np.float32))
    request.set_tensor("key_cache", key_cache)
    request.set_tensor("value_cache", value_cache)
    for name, array in (
            ("past_lens", past),
            ("subsequence_begins", np.cumsum([0, *rows])),
            ("block_indices", [b for table in blocks for b in table]),
            ("block_indices_begins", np.cumsum([0, *map(len, blocks)])),
            ("max_context_len", max(a + b for a, b in zip(past, rows)))):
        request.set_tensor(name, tensor(array))
