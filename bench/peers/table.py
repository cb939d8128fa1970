"""The peers by their names."""

from paged import OpenVino, Sglang, Vllm
from peers import Ggml, OnnxRuntime, Torch, TorchFlex, TorchFolded

PEERS = {
    "torch, sdpa": Torch,
    "torch, sdpa, heads as rows": TorchFolded,
    "torch, flex_attention": TorchFlex,
    "onnxruntime, GroupQueryAttention": OnnxRuntime,
    "openvino, PagedAttention": OpenVino,
    "vllm, cpu_attention": Vllm,
    "vllm, SGLang's kernels": Sglang,
    "ggml, flash_attn_ext": Ggml,
}
