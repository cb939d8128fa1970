"""Tiny random models: as GGUF files for llama.cpp, and computed by numpy."""

import dataclasses

import gguf
import numpy as np

VOCAB, EMBD, HEADS, KV_HEADS, FF = 64, 64, 4, 2, 96
EPS, ROPE_BASE = 1e-5, 500.0


@dataclasses.dataclass(frozen=True)
class Arch:
    """What tells our models apart; all are RMSNorm, RoPE, GQA and SwiGLU."""

    name: str  # general.architecture.
    windows: tuple  # Of each layer: positions that a query sees, 0: all.
    rope: tuple  # Of each layer: whether Q and K are rotated.
    head_dim: int = 32
    sinks: bool = False  # One more logit per head in each softmax.


ARCHS = {
    # Heads of a multiple of 64 are turned by a Hadamard matrix before they are
    # quantized; those of 32 are not.
    "llama": Arch("llama", (0, 0), (1, 1), head_dim=64),
    # Every fourth layer is without RoPE.
    "smollm3": Arch("smollm3", (0, 0, 0, 0), (1, 1, 1, 0)),
    # A window in the first layer: llama.cpp has two caches for it.
    "granite_swa": Arch("granite_swa", (12, 0), (1, 1), sinks=True),
}


def random_weights(arch, seed=1):
    """Weights by their names in GGUF: f32, rows are outputs."""
    rng = np.random.default_rng(seed)

    def matrix(rows, columns, scale=1.0):
        values = rng.normal(0, scale / np.sqrt(columns), (rows, columns))
        return values.astype(np.float32)

    def norm():
        return rng.uniform(0.8, 1.2, EMBD).astype(np.float32)

    queries, keys = HEADS * arch.head_dim, KV_HEADS * arch.head_dim
    weights = {
        "token_embd.weight": matrix(VOCAB, EMBD, np.sqrt(EMBD)),
        "output_norm.weight": norm(),
        "output.weight": matrix(VOCAB, EMBD),
    }
    for i in range(len(arch.windows)):
        weights |= {
            f"blk.{i}.attn_norm.weight": norm(),
            # Scores of some spread, so that single tokens count.
            f"blk.{i}.attn_q.weight": matrix(queries, EMBD, 2),
            f"blk.{i}.attn_k.weight": matrix(keys, EMBD),
            f"blk.{i}.attn_v.weight": matrix(keys, EMBD, 2),
            f"blk.{i}.attn_output.weight": matrix(EMBD, queries),
            f"blk.{i}.ffn_norm.weight": norm(),
            f"blk.{i}.ffn_gate.weight": matrix(FF, EMBD),
            f"blk.{i}.ffn_up.weight": matrix(FF, EMBD),
            f"blk.{i}.ffn_down.weight": matrix(EMBD, FF),
        }
        if arch.sinks:
            sinks = rng.normal(0, 1, HEADS).astype(np.float32)
            weights[f"blk.{i}.attn_sinks.weight"] = sinks
    return weights


def write_gguf(path, arch, weights):
    writer = gguf.GGUFWriter(path, arch.name)
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(1 << 15)
    writer.add_embedding_length(EMBD)
    writer.add_block_count(len(arch.windows))
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(arch.head_dim)
    writer.add_value_length(arch.head_dim)
    writer.add_rope_dimension_count(arch.head_dim)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_tokenizer_model("none")
    if any(arch.windows):
        key = f"{arch.name}.attention.sliding_window"
        writer.add_sliding_window(max(arch.windows))
        writer.add_array(key + "_pattern", [w > 0 for w in arch.windows])
        writer.add_logit_scale(1.0)
    for name, values in weights.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rotate(rows, positions, base=ROPE_BASE):
    """RoPE of [tokens, heads, head_dim], in pairs of neighbours."""
    pairs = rows.shape[-1] // 2
    steps = np.arange(pairs) / -pairs
    angles = np.asarray(positions, np.float64)[:, None] * base**steps
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    even, odd = rows[..., 0::2], rows[..., 1::2]
    turned = np.empty_like(rows)
    turned[..., 0::2] = even * cos - odd * sin
    turned[..., 1::2] = even * sin + odd * cos
    return turned


def rounded(rows, dtype):
    """What a cache of this dtype gives back for these rows."""
    if dtype == "f32":
        return rows.astype(np.float32).astype(np.float64)
    if dtype == "f16":
        return rows.astype(np.float16).astype(np.float64)
    turn = hadamard(64) if rows.shape[-1] % 64 == 0 else np.eye(32)  # q8_0.
    blocks = (rows.reshape(-1, len(turn)) @ turn).reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / 127
    whole = np.rint(blocks / np.where(scale > 0, scale, 1))
    blocks = (whole * scale.astype(np.float16)).reshape(-1, len(turn))
    return (blocks @ turn).reshape(rows.shape)


def hadamard(size):
    """Symmetric and its own inverse."""
    turn = np.ones((1, 1))
    while len(turn) < size:
        turn = np.block([[turn, turn], [turn, -turn]]) / np.sqrt(2)
    return turn


class Model:
    def __init__(self, arch, weights):
        self.arch = arch
        self.weights = {k: v.astype(np.float64) for k, v in weights.items()}

    def embed(self, ids):
        return self.weights["token_embd.weight"][ids]

    def qkv(self, layer, x):
        """Of normed x, before RoPE: [tokens, heads, head_dim] each."""
        x = self._norm(x, f"blk.{layer}.attn_norm.weight")

        def heads(name):
            flat = x @ self.weights[f"blk.{layer}.attn_{name}.weight"].T
            return flat.reshape(len(x), -1, self.arch.head_dim)

        return heads("q"), heads("k"), heads("v")

    def after_attention(self, layer, x, q, k, v, visible):
        """The layer's output; visible is [tokens of q, tokens of k]."""
        share = HEADS // KV_HEADS
        k, v = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(self.arch.head_dim)
        scores = np.where(visible[None], scores, -np.inf)
        if self.arch.sinks:
            sinks = self.weights[f"blk.{layer}.attn_sinks.weight"]
            sinks = np.broadcast_to(sinks[:, None, None], (HEADS, len(x), 1))
            scores = np.concatenate([scores, sinks], axis=2)
        scores = np.exp(scores - scores.max(axis=2, keepdims=True))
        scores /= scores.sum(axis=2, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", scores[:, :, : len(k)], v)
        output = self.weights[f"blk.{layer}.attn_output.weight"]
        x = x + mixed.reshape(len(x), -1) @ output.T
        y = self._norm(x, f"blk.{layer}.ffn_norm.weight")
        gate = y @ self.weights[f"blk.{layer}.ffn_gate.weight"].T
        up = y @ self.weights[f"blk.{layer}.ffn_up.weight"].T
        down = self.weights[f"blk.{layer}.ffn_down.weight"]
        return x + (gate / (1 + np.exp(-gate)) * up) @ down.T

    def logits(self, x):
        x = self._norm(x, "output_norm.weight")
        return x @ self.weights["output.weight"].T

    def _norm(self, x, name):
        mean = np.mean(x * x, axis=1, keepdims=True)
        return x / np.sqrt(mean + EPS) * self.weights[name]
