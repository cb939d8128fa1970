"""GroupQueryAttention of onnxruntime on the CPU: docs/backends/onnxruntime.md."""

import functools

import attending
import attention
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

TYPES = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16}
SCALE = np.float32(0.01)
OF = {"f32": np.float32, "f16": np.float16}


@functools.cache
def session(type_name, heads, kv_heads, attributes, extra, cache):
    of = TYPES[type_name]
    held = {None: of, 8: TensorProto.INT8, 4: TensorProto.UINT8}[cache]
    inputs = [("query", of, 3), ("key", of, 3), ("value", of, 3),
              ("past_key", held, 4), ("past_value", held, 4),
              ("seqlens_k", TensorProto.INT32, 1),
              ("total_sequence_length", TensorProto.INT32, 0)]
    optional = ["cos_cache", "sin_cache", "position_ids", "attention_bias",
                "head_sink", "k_scale", "v_scale", "q_norm_weight",
                "k_norm_weight", "query_seqlens"]
    ranks = {"attention_bias": (of, 4), "head_sink": (of, 1),
             "k_scale": (TensorProto.FLOAT, 1),
             "v_scale": (TensorProto.FLOAT, 1),
             "query_seqlens": (TensorProto.INT32, 1)}
    names = [name for name, _, _ in inputs] + [
        name if name in extra else "" for name in optional]
    while not names[-1]:  # Older releases know fewer inputs.
        names.pop()
    inputs += [(name, *ranks[name]) for name in optional if name in extra]
    outputs = [("output", of, 3), ("present_key", held, 4),
               ("present_value", held, 4)]
    node = helper.make_node(
        "GroupQueryAttention", names, [name for name, _, _ in outputs],
        domain="com.microsoft", num_heads=heads, kv_num_heads=kv_heads,
        **dict(attributes))
    infos = [[helper.make_tensor_value_info(
        name, of, [f"{name}{i}" for i in range(rank)])
        for name, of, rank in these] for these in (inputs, outputs)]
    model = helper.make_model(
        helper.make_graph([node], "attention", *infos), ir_version=10,
        opset_imports=[helper.make_opsetid("", 21),
                       helper.make_opsetid("com.microsoft", 1)])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, ["CPUExecutionProvider"])


class Gqa:
    """GroupQueryAttention, the past in a buffer that is longer than it"""
    can = {"batch", "equal_rows", "rows", "window", "soft_cap"}
    dtypes = ["f32", "f16"]
    dims = [8, 64, 128]
    kv_heads = [1, 2]
    bits = None
    spare = 3

    @staticmethod
    def input_error(dtype):
        return 0 if dtype == "f32" else 2.0 ** -11

    def attributes(self, case):
        found = {"softcap": float(case.soft_cap)} if case.soft_cap else {}
        if case.window is not None:  # Theirs counts the query's own token.
            found["local_window_size"] = case.window + 1
        return found

    def extra(self, numbers):
        case = numbers.case
        if case.sinks:
            return {"head_sink": numbers.sinks.astype(OF[case.dtype])}
        return {}

    def past(self, arrays, rows, longest, of):
        """[sequences, kv_heads, cells, dim], NaN where nothing was stored."""
        case = self.case
        out = np.full((len(arrays), case.kv_heads, longest, case.dim),
                      np.nan, of)
        for to, array, count in zip(out, arrays, rows):
            past = len(array) - count
            to[:, :past] = array[:past].transpose(1, 0, 2)
        return out

    def attend(self, numbers):
        """Rows are padded on the right to the most rows of a sequence."""
        case = self.case = numbers.case
        of = OF[case.dtype]
        rows = max(case.rows)
        longest = max(case.lengths) + self.spare
        if "query_seqlens" in self.extra(numbers):
            longest += rows  # It wants room for the padding.
        elif rows > 1 and len(case.rows) > 1 and max(case.lengths) > rows:
            raise attention.NotSupported  # It says so.

        def batch(arrays):
            out = np.full((len(arrays), rows, *arrays[0].shape[1:]), np.nan, of)
            for to, array in zip(out, arrays):
                to[:len(array)] = array
            return out.reshape(len(out), rows, -1)

        inputs = {
            "query": batch(numbers.query),
            "seqlens_k": np.array(case.lengths, np.int32) - 1,
            "total_sequence_length": np.array(max(case.lengths), np.int32)}
        for name, arrays in (("key", numbers.key), ("value", numbers.value)):
            inputs[name] = batch([x[len(x) - n:]
                                  for x, n in zip(arrays, case.rows)])
            inputs[f"past_{name}"] = self.past(
                arrays, case.rows, longest, of)
        extra = self.extra(numbers)
        inputs.update(extra)
        ran = session(case.dtype, case.heads, case.kv_heads,
                      tuple(self.attributes(case).items()), tuple(extra),
                      self.bits)
        binding = ran.io_binding()
        binding.bind_output("output")
        for name, array in inputs.items():
            if not name.startswith("past"):
                binding.bind_cpu_input(name, array)
        for name in ("key", "value"):  # Past and present are one buffer.
            held = onnxruntime.OrtValue.ortvalue_from_numpy(
                inputs[f"past_{name}"])
            binding.bind_ortvalue_input(f"past_{name}", held)
            binding.bind_ortvalue_output(f"present_{name}", held)
        ran.run_with_iobinding(binding)
        out = binding.get_outputs()[0].numpy().astype(np.float32)
        out = out.reshape(len(out), rows, case.heads, case.dim)
        return [x[:n] for x, n in zip(out, case.rows)]


class GqaSinks(Gqa):
    """GroupQueryAttention with head_sink"""
    can = {"batch", "equal_rows", "rows", "window", "sinks"}


class GqaNan(Gqa):
    """GroupQueryAttention, NaN in what no row sees"""
    can = {"batch", "equal_rows", "rows", "window", "nan"}


class GqaBias(Gqa):
    """GroupQueryAttention with attention_bias, a mask of 0 and -inf"""
    can = {"rows", "mask"}
    spare = 0

    @staticmethod
    def restrict(numbers):
        length, rows = numbers.case.lengths[0], numbers.case.rows[0]
        last = length - rows + np.arange(rows)[:, None]
        numbers.allowed[0] &= np.arange(length) <= last

    def extra(self, numbers):
        bias = np.where(numbers.allowed[0], np.float32(0), -np.inf)
        return {"attention_bias": bias[None, None].astype(
            OF[numbers.case.dtype])}


class GqaBiasEmpty(GqaBias):
    """the same, rows that see nothing"""
    can = {"rows", "mask", "empty"}


class GqaInt8(Gqa):
    """GroupQueryAttention, K and V of int8 with one scale"""
    can = {"batch", "equal_rows", "rows", "window", "soft_cap"}
    dtypes = ["f32"]
    dims = [8, 64, 128]
    bits = 8

    @staticmethod
    def stored(array):
        return (np.round(array * 100) * SCALE).astype(np.float32)

    def attributes(self, case):
        return {**super().attributes(case), "k_quant_type": "PER_TENSOR",
                "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": self.bits}

    def extra(self, numbers):
        scale = np.array([SCALE], np.float32)
        return {"k_scale": scale, "v_scale": scale}

    def past(self, arrays, rows, longest, of):
        past = super().past(arrays, rows, longest, of)
        return np.nan_to_num(np.round(past / SCALE), nan=100).astype(np.int8)


class GqaRagged(Gqa):
    """GroupQueryAttention with query_seqlens, rows padded on the right"""
    can = {"batch", "rows", "window", "soft_cap"}

    def extra(self, numbers):
        return {"query_seqlens": np.array(numbers.case.rows, np.int32)}


if __name__ == "__main__":
    out = attention.report([Gqa, GqaRagged, GqaInt8, GqaSinks, GqaNan, GqaBias,
                            GqaBiasEmpty])
    out += attending.report([Gqa, GqaSinks])
    attention.compare(out, "onnxruntime.md")
