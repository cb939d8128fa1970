"""Other projects' attention. Each class computes the cases of one library: it
is made in a separate process, `prepare`d for a case, and then `run` on one
layer at a time."""

import ctypes
import math
import os
import pathlib

import numpy as np

from cases import SCALE, empty


class NotSupported(Exception):
    """The library has no such attention."""


class Torch:
    """scaled_dot_product_attention, K and V as transformers has them."""

    def __init__(self):
        import torch
        self.torch = torch
        self.version = torch.__version__

    def threads(self, count):
        self.torch.set_num_threads(count)

    def tensor(self, array):
        torch = self.torch
        if array.dtype.itemsize == 2 and array.dtype != np.float16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def prepare(self, case, numbers):
        if case.dtype == "8-bit":
            raise NotSupported("K and V of 8 bits")
        self.key = self.value = None  # Memory for the next ones.
        self.case = case
        self.key, self.value = (
            [self.tensor(array)[None] for array in numbers.copies(i, case.dtype)]
            for i in range(2))
        self.mask = None
        if case.rows > 1:
            self.mask = self.torch.ones(
                case.rows, case.cells, dtype=self.torch.bool).tril(
                    case.cells - case.rows)

    def queries(self, query):
        """For one row, K and V are copied for every query head."""
        key = self.key[0]
        copied = 2 * key.nbytes * query.shape[1] // self.case.kv_heads
        if type(self) is Torch and copied > 4 << 30:
            raise NotSupported(f"room: copies of {copied >> 30} GiB")
        self.query = self.torch.from_numpy(query).transpose(0, 1)[None].to(
            key.dtype).contiguous()

    def run(self, layer):
        self.out = self.torch.nn.functional.scaled_dot_product_attention(
            self.query, self.key[layer], self.value[layer],
            attn_mask=self.mask, enable_gqa=True)

    def result(self):
        return self.out[0].transpose(0, 1).float().numpy()


class TorchFolded(Torch):
    """The query heads that share a KV head as rows of it. Decode alone."""

    def prepare(self, case, numbers):
        if case.rows > 1:
            raise NotSupported("several rows")
        super().prepare(case, numbers)

    def queries(self, query):
        super().queries(query)
        self.shape = self.query.shape
        self.query = self.query.reshape(
            1, self.case.kv_heads, -1, self.case.dim)

    def run(self, layer):
        self.out = self.torch.nn.functional.scaled_dot_product_attention(
            self.query, self.key[layer], self.value[layer])

    def result(self):
        self.out = self.out.reshape(self.shape)
        return super().result()


class TorchFlex(Torch):
    """FlexAttention, compiled."""

    def __init__(self):
        super().__init__()
        from torch.nn.attention import flex_attention
        self.flex = flex_attention
        self.compiled = self.torch.compile(flex_attention.flex_attention)

    def prepare(self, case, numbers):
        super().prepare(case, numbers)
        past = case.cells - case.rows
        self.mask = case.rows > 1 and self.flex.create_block_mask(
            lambda b, h, row, cell: cell <= row + past, None, None, case.rows,
            case.cells, device="cpu") or None

    def run(self, layer):
        self.out = self.compiled(
            self.query, self.key[layer], self.value[layer],
            block_mask=self.mask, enable_gqa=True)


class OnnxRuntime:
    """com.microsoft.GroupQueryAttention. The past is in the buffers of the
    present, whose last rows each run writes."""

    def __init__(self):
        import onnx
        import onnxruntime
        self.onnx = onnx
        self.ort = onnxruntime
        self.version = onnxruntime.__version__
        self.count = 1

    def threads(self, count):
        self.count = count

    def model(self, heads, case, quantized):
        helper, types = self.onnx.helper, self.onnx.TensorProto
        of = self.type
        cache = types.INT8 if quantized else of
        inputs = [("query", of, 3), ("key", of, 3), ("value", of, 3),
                  ("past_key", cache, 4), ("past_value", cache, 4),
                  ("seqlens_k", types.INT32, 1),
                  ("total_sequence_length", types.INT32, 0)]
        outputs = [("output", of, 3), ("present_key", cache, 4),
                   ("present_value", cache, 4)]
        names = [name for name, _, _ in inputs]
        options = {}
        if quantized:
            inputs += [("k_scale", types.FLOAT, 1),
                       ("v_scale", types.FLOAT, 1)]
            names += [""] * 5 + ["k_scale", "v_scale"]
            options = dict(k_quant_type="PER_TENSOR", kv_cache_bit_width=8,
                           v_quant_type="PER_TENSOR")
        node = helper.make_node(
            "GroupQueryAttention", names, [name for name, _, _ in outputs],
            domain="com.microsoft", num_heads=heads,
            kv_num_heads=case.kv_heads, **options)
        infos = [[helper.make_tensor_value_info(
            name, of, [f"{name}{i}" for i in range(rank)])
            for name, of, rank in these] for these in (inputs, outputs)]
        return helper.make_model(
            helper.make_graph([node], "attention", *infos), ir_version=10,
            opset_imports=[helper.make_opsetid("", 21),
                           helper.make_opsetid("com.microsoft", 1)])

    def session(self, model, threads):
        options = self.ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.force_spinning_stop", "1")
        return self.ort.InferenceSession(
            model.SerializeToString(), options, ["CPUExecutionProvider"])

    def prepare(self, case, numbers):
        types = self.onnx.TensorProto
        self.case = case
        self.quantized = case.dtype == "8-bit"
        self.type = {"f32": types.FLOAT, "f16": types.FLOAT16,
                     "bf16": types.BFLOAT16, "8-bit": types.FLOAT}[case.dtype]
        dtype = "int8" if self.quantized else case.dtype
        self.key, self.value = (numbers.copies(i, dtype) for i in range(2))

    def queries(self, query):
        case = self.case
        rows, heads, dim = query.shape
        of = np.float32 if self.quantized else self.key[0].dtype
        query = np.ascontiguousarray(query.reshape(1, rows, -1).astype(of))
        scale = SCALE if self.quantized else 1
        key, value = (
            np.ascontiguousarray(
                x[:, -rows:].transpose(1, 0, 2).reshape(1, rows, -1).astype(
                    np.float32) * scale).astype(of)
            for x in (self.key[0], self.value[0]))
        self.arrays = {
            "query": query, "key": key, "value": value,
            "seqlens_k": np.array([case.cells - 1], np.int32),
            "total_sequence_length": np.array(case.cells, np.int32)}
        if self.quantized:
            self.arrays.update(k_scale=np.array([SCALE], np.float32),
                               v_scale=np.array([SCALE], np.float32))
        self.out = np.zeros(query.shape, of)
        model = self.model(heads, case, self.quantized)
        self.sessions = {}
        for threads in (1, 2):
            session = self.session(model, threads)
            self.sessions[threads] = session, [
                self.binding(session, layer) for layer in range(case.layers())]

    def binding(self, session, layer):
        binding = session.io_binding()
        types = {np.dtype(np.float32): 1, np.dtype(np.int32): 6,
                 np.dtype(np.int8): 3}

        def bind(to, name, array):
            to(name, "cpu", 0, types.get(array.dtype, self.type),
               list(array.shape), array.ctypes.data)

        for name, array in self.arrays.items():
            bind(binding.bind_input, name, array)
        for name, array in (("key", self.key[layer][None]),
                            ("value", self.value[layer][None])):
            bind(binding.bind_input, f"past_{name}", array)
            bind(binding.bind_output, f"present_{name}", array)
        bind(binding.bind_output, "output", self.out)
        return binding

    def run(self, layer):
        session, bindings = self.sessions[self.count]
        session.run_with_iobinding(bindings[layer])

    def result(self):
        return self.out.astype(np.float32).reshape(
            self.case.rows, -1, self.case.dim)


class Ggml:
    """ggml_flash_attn_ext of the ggml of llama-cpp-python, with K and V as
    llama.cpp has them."""

    TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "i32": 26, "bf16": 30}

    class Params(ctypes.Structure):
        _fields_ = [("mem_size", ctypes.c_size_t),
                    ("mem_buffer", ctypes.c_void_p),
                    ("no_alloc", ctypes.c_bool)]

    def __init__(self):
        import importlib.metadata
        import importlib.util
        self.version = importlib.metadata.version("llama-cpp-python")
        home = pathlib.Path(importlib.util.find_spec("llama_cpp").origin)
        for name in ("base", "cpu"):
            lib = ctypes.CDLL(str(home.parent / "lib" / f"libggml-{name}.so"),
                              ctypes.RTLD_GLOBAL)
            setattr(self, name, lib)
        pointer, number = ctypes.c_void_p, ctypes.c_int64

        def declare(lib, name, result, *arguments):
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)

        base, cpu, integer = self.base, self.cpu, ctypes.c_int
        declare(base, "ggml_init", pointer, self.Params)
        declare(base, "ggml_free", None, pointer)
        declare(base, "ggml_new_tensor_4d", pointer, pointer, integer, number,
                number, number, number)
        declare(base, "ggml_permute", pointer, pointer, pointer, integer,
                integer, integer, integer)
        declare(base, "ggml_flash_attn_ext", pointer, pointer, pointer,
                pointer, pointer, pointer, ctypes.c_float, ctypes.c_float,
                ctypes.c_float)
        declare(base, "ggml_flash_attn_ext_set_prec", None, pointer, integer)
        declare(base, "ggml_flash_attn_ext_add_sinks", None, pointer, pointer)
        declare(base, "ggml_backend_view_init", integer, pointer)
        declare(base, "ggml_new_graph", pointer, pointer)
        declare(base, "ggml_build_forward_expand", None, pointer, pointer)
        declare(base, "ggml_backend_cpu_buffer_from_ptr", pointer, pointer,
                ctypes.c_size_t)
        declare(base, "ggml_backend_tensor_alloc", integer, pointer, pointer,
                pointer)
        declare(base, "ggml_backend_buffer_free", None, pointer)
        declare(base, "ggml_backend_graph_compute", integer, pointer, pointer)
        declare(cpu, "ggml_backend_cpu_init", pointer)
        declare(cpu, "ggml_backend_cpu_set_n_threads", None, pointer, integer)
        self.backend = self.backend_cpu_init()
        self.context = None
        self.buffers = []

    def threads(self, count):
        self.backend_cpu_set_n_threads(self.backend, count)

    def tensor(self, array, of, *shape):
        """A tensor that lies in the array."""
        shape = (*shape, 1, 1, 1)[:4]
        tensor = self.new_tensor_4d(self.context, self.TYPES[of], *shape)
        self.give(tensor, array)
        return tensor

    def give(self, tensor, array):
        address = array.ctypes.data
        buffer = self.backend_cpu_buffer_from_ptr(address, array.nbytes)
        self.buffers.append(buffer)
        if self.backend_tensor_alloc(buffer, tensor, address) != 0:
            raise RuntimeError("ggml_backend_tensor_alloc")

    def prepare(self, case, numbers):
        self.case = case
        self.type = "q8_0" if case.dtype == "8-bit" else case.dtype
        self.key, self.value = (
            numbers.copies(i, self.type, token_major=True) for i in range(2))
        self.mask = None
        if case.rows > 1:
            self.mask = empty((case.rows, case.cells), np.float16)
            self.mask[...] = np.triu(
                np.full((case.rows, case.cells), -np.inf, np.float32),
                case.cells - case.rows + 1)

    def release(self):
        for buffer in self.buffers:
            self.backend_buffer_free(buffer)
        self.buffers = []
        if self.context:
            self.free(self.context)

    def begin(self):
        """Drops the graphs so far."""
        self.release()
        self.context = self.init(self.Params(64 << 20, None, True))

    def graph(self, query, held, out, mask=None, soft_cap=0, sinks=None):
        """The graph of one layer: query [heads, rows, dim], out [rows, heads,
        dim], K and V [cells, kv_heads, dim] with their types, mask [rows,
        cells], sinks [heads]."""
        heads, rows, dim = query.shape
        q = self.tensor(query, "f32", dim, rows, heads)
        views = []
        for array, of in held:
            cells, kv_heads = array.shape[:2]
            whole = self.tensor(array, of, dim, kv_heads, cells)
            views.append(self.permute(self.context, whole, 0, 2, 1, 3))
            self.backend_view_init(views[-1])
        if mask is not None:
            mask = self.tensor(mask, "f16", mask.shape[1], rows)
        made = self.flash_attn_ext(self.context, q, *views, mask,
                                   1 / math.sqrt(dim), 0, soft_cap)
        self.flash_attn_ext_set_prec(made, 10)  # As in llama.cpp.
        if sinks is not None:
            self.flash_attn_ext_add_sinks(
                made, self.tensor(sinks, "f32", heads))
        self.give(made, out)
        graph = self.new_graph(self.context)
        self.build_forward_expand(graph, made)
        return graph

    def compute(self, graph):
        if self.backend_graph_compute(self.backend, graph) != 0:
            raise RuntimeError("ggml_backend_graph_compute")

    def queries(self, query):
        self.begin()
        self.query = empty(np.array(query.shape)[[1, 0, 2]], np.float32)
        self.query[...] = query.transpose(1, 0, 2)
        self.out = empty(query.shape, np.float32)
        self.graphs = [
            self.graph(self.query, [(x, self.type) for x in arrays], self.out,
                       self.mask) for arrays in zip(self.key, self.value)]

    def run(self, layer):
        self.compute(self.graphs[layer])

    def result(self):
        return self.out
