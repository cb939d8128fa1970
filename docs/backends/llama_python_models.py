"""Tiny random models with a vocabulary of letters, as files for llama-cpp-python:
those of llama_model.py, and two with states."""

import string

import gguf
import llama_model
import numpy as np
from llama_model import EMBD, EPS, FF, HEADS, KV_HEADS, VOCAB, matrix

#: Each letter is a token, so that a text has the tokens of its letters.
WORDS = ["<unk>", "<s>", "</s>", "\u2581", *string.ascii_letters, *"01234567"]
INNER, STATE, KERNEL, RANK = 2 * EMBD, 8, 4, 4  # The sizes of Mamba.
LAYERS = 3
HEAD_DIM = EMBD // HEADS


def write(path, name, seed, begins):
    """Writes the model of this name; its weights follow from the seed, and `begins`
    says whether each text gets <s> as its first token."""
    if name in llama_model.ARCHS:
        arch = llama_model.ARCHS[name]
        weights = llama_model.random_weights(arch, seed)
        llama_model.write_gguf(path, arch, weights, WORDS, begins)
        return
    writer = gguf.GGUFWriter(path, name)
    llama_model.add_words(writer, WORDS, begins)
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(1 << 15)
    writer.add_embedding_length(EMBD)
    writer.add_block_count(LAYERS)
    writer.add_layer_norm_rms_eps(EPS)
    {"mamba": add_mamba, "lfm2": add_lfm2}[name](writer)
    make = {"mamba": mamba_weights, "lfm2": lfm2_weights}[name]
    llama_model.write_tensors(writer, make(np.random.default_rng(seed)))


def around(rng, low, high, *shape):
    return rng.uniform(low, high, shape).astype(np.float32)


def add_mamba(writer):
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(RANK)


def mamba_weights(rng):
    """Layers with a convolution and a state, and no attention."""
    weights = {
        "token_embd.weight": matrix(rng, VOCAB, EMBD, np.sqrt(EMBD)),
        "output_norm.weight": around(rng, 0.8, 1.2, EMBD),
        "output.weight": matrix(rng, VOCAB, EMBD),
    }
    for i in range(LAYERS):
        layer = {
            "attn_norm.weight": around(rng, 0.8, 1.2, EMBD),
            "ssm_in.weight": matrix(rng, 2 * INNER, EMBD, 2),
            "ssm_conv1d.weight": matrix(rng, INNER, KERNEL),
            "ssm_conv1d.bias": around(rng, -0.1, 0.1, INNER),
            "ssm_x.weight": matrix(rng, RANK + 2 * STATE, INNER, 3),
            "ssm_dt.weight": matrix(rng, INNER, RANK),
            "ssm_dt.bias": around(rng, -3, -1, INNER),
            # The state keeps some of each token for dozens of tokens.
            "ssm_a": -around(rng, 0.1, 1, INNER, STATE),
            "ssm_d": around(rng, 0.5, 1, INNER),
            "ssm_out.weight": matrix(rng, EMBD, INNER, 2),
        }
        weights |= {f"blk.{i}.{name}": values for name, values in layer.items()}
    return weights


def add_lfm2(writer):
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    # Layers without heads have a convolution.
    writer.add_head_count_kv([0, KV_HEADS, 0])
    writer.add_rope_freq_base(llama_model.ROPE_BASE)
    writer.add_shortconv_l_cache(KERNEL)


def lfm2_weights(rng):
    """Layers with a convolution, and one with attention between them."""
    weights = {
        "token_embd.weight": matrix(rng, VOCAB, EMBD, np.sqrt(EMBD)),
        "token_embd_norm.weight": around(rng, 0.8, 1.2, EMBD),
        "output.weight": matrix(rng, VOCAB, EMBD),
    }
    for i in range(LAYERS):
        layer = {
            "attn_norm.weight": around(rng, 0.8, 1.2, EMBD),
            "ffn_norm.weight": around(rng, 0.8, 1.2, EMBD),
            "ffn_gate.weight": matrix(rng, FF, EMBD),
            "ffn_up.weight": matrix(rng, FF, EMBD),
            "ffn_down.weight": matrix(rng, EMBD, FF),
        }
        if i == 1:
            layer |= {
                "attn_q_norm.weight": around(rng, 1, 2, HEAD_DIM),
                "attn_k_norm.weight": around(rng, 1, 2, HEAD_DIM),
                "attn_q.weight": matrix(rng, EMBD, EMBD),
                "attn_k.weight": matrix(rng, KV_HEADS * HEAD_DIM, EMBD),
                "attn_v.weight": matrix(rng, KV_HEADS * HEAD_DIM, EMBD, 2),
                "attn_output.weight": matrix(rng, EMBD, EMBD),
            }
        else:
            layer |= {
                "shortconv.conv.weight": matrix(rng, EMBD, KERNEL),
                "shortconv.in_proj.weight": matrix(rng, 3 * EMBD, EMBD, 2),
                "shortconv.out_proj.weight": matrix(rng, EMBD, EMBD),
            }
        weights |= {f"blk.{i}.{name}": values for name, values in layer.items()}
    return weights
