"""Attention of older versions of onnxruntime, for pinned.py."""

import functools

import attending
import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime_attention import Gqa

LIVE = True


@functools.cache
def session(version, inputs, attributes):
    """A model of one Attention; inputs are pairs of a name and a rank."""
    types = {"attn_mask": TensorProto.BOOL,
             "nonpad_kv_seqlen": TensorProto.INT64}
    node = helper.make_node("Attention", [name for name, _ in inputs], ["Y"],
                            **dict(attributes))
    infos = [[helper.make_tensor_value_info(
        name, types.get(name, TensorProto.FLOAT),
        [f"{name}{i}" for i in range(rank)])
        for name, rank in these if name] for these in (inputs, [("Y", 4)])]
    model = helper.make_model(
        helper.make_graph([node], "attention", *infos), ir_version=11,
        opset_imports=[helper.make_opsetid("", version)])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, ["CPUExecutionProvider"])


class OnnxAttention:
    """The operator Attention of ONNX, with a mask."""
    can = {"rows", "mask", "soft_cap"}
    dtypes = ["f32"]
    dims = [8]
    version = 23

    def tensors(self, numbers):
        """Q, K and V as [1, heads, rows, dim]."""
        return {name: array[0].transpose(1, 0, 2)[None].astype(np.float32)
                for name, array in (("Q", numbers.query), ("K", numbers.key),
                                    ("V", numbers.value))}

    def attend(self, numbers):
        inputs = self.tensors(numbers)
        inputs["attn_mask"] = numbers.allowed[0]
        attributes = (("softcap", float(numbers.case.soft_cap)),)
        return self.run(inputs, (("Q", 4), ("K", 4), ("V", 4),
                                 ("attn_mask", 2)), attributes)

    def run(self, inputs, order, attributes):
        ran = session(self.version, order, attributes)
        return [ran.run(["Y"], inputs)[0][0].transpose(1, 0, 2)]


class ExternalAttention(OnnxAttention):
    """The same, causal, over a buffer that is longer than its tokens."""
    can = {"rows"}
    version = 24

    def attend(self, numbers):
        inputs = self.tensors(numbers)
        for name in "KV":
            inputs[name] = np.pad(inputs[name],
                                  ((0, 0), (0, 0), (0, 3), (0, 0)))
        inputs["nonpad_kv_seqlen"] = np.array(numbers.case.lengths, np.int64)
        return self.run(inputs, (("Q", 4), ("K", 4), ("V", 4), ("", 0), ("", 0),
                                 ("", 0), ("nonpad_kv_seqlen", 1)),
                        (("is_causal", 1),))


Window = attending.backend(Gqa, "f32")
Masked = attending.backend(OnnxAttention, "f32")
External = attending.backend(ExternalAttention, "f32")
