#!/usr/bin/env python3
"""Makes the folder of a model for serve: model.safetensors and serve.json; and
config.json and tokenizer.json, for tests with the packages transformers and
tokenizers.

    convert.py MODEL.gguf FOLDER         needs the PyPI packages gguf and numpy
    convert.py --tiny FOLDER             a random model of 60 thousand weights
    options: --dtype f32 or bf16 (default bf16; --tiny: f32)
"""

import argparse
import json
import math
import pathlib
import random
import re
import struct
import sys

# Names in model.safetensors, and in a GGUF. Rows of several tensors are joined.
LAYER = {
    "input_layernorm": ["attn_norm"],
    "self_attn.qkv_proj": ["attn_q", "attn_k", "attn_v"],
    "self_attn.o_proj": ["attn_output"],
    "post_attention_layernorm": ["ffn_norm"],
    "mlp.gate_up_proj": ["ffn_gate", "ffn_up"],
    "mlp.down_proj": ["ffn_down"],
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm",
         "lm_head": "output"}
# Names in serve.json, and in config.json.
NUMBERS = {
    "hidden": "hidden_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim", "inner": "intermediate_size",
    "vocab": "vocab_size", "context": "max_position_embeddings",
    "end": "eos_token_id", "epsilon": "rms_norm_eps", "rope_base": "rope_theta",
    "tied": "tie_word_embeddings",
}


def byte_characters():
    """The printable character that stands for each byte, as in GPT-2."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain}
    table.update((byte, chr(256 + i)) for i, byte in enumerate(others))
    return table


# The expression of GPT-2, but a digit stands alone, and blanks before a digit
# stay together. White space is spelled out: \s of PCRE2 differs from that of
# Unicode.
WHITE = (r"\t-\r\x20\x85\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}"
         r"\x{202f}\x{205f}\x{3000}")
PIECES = (r"\p{N}|'(?:s|t|re|ve|m|ll|d)|\x20?\p{L}+|\x20?[^_\p{L}\p{N}]+|"
          r"[_]+(?![^_\p{N}])|[_]+").replace("_", WHITE)


def bpe_json(tokens, merges, special):
    """What serve reads: tokens by their numbers, and expressions of PCRE2."""
    numbers = {token: i for i, token in enumerate(tokens)}
    pairs = [merge.split(" ") for merge in merges]
    names = {tokens[i]: i for i in special}
    reached = {*byte_characters().values(), *names, *map("".join, pairs)}
    unknown = [token for token in tokens if token not in reached]
    if unknown:
        print(f"tokens that no text has: {unknown}", file=sys.stderr)
    # The longest of two that begin at one place wins.
    return {
        "byte_tokens": [numbers.get(character, -1) for _, character in
                        sorted(byte_characters().items())],
        "merges": [[numbers[left], numbers[right], numbers[left + right]]
                   for left, right in pairs],
        "special": names, "pieces": PIECES,
        "specials": "|".join(map(re.escape, sorted(names, reverse=True)))}


def tokenizer_json(tokens, merges, special):
    """A file that the package tokenizers reads, too."""
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": i, "content": tokens[i], "single_word": False,
             "lstrip": False, "rstrip": False, "normalized": False,
             "special": True} for i in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False,
             "trim_offsets": True, "use_regex": True}]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True,
                    "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False,
                  "byte_fallback": False,
                  "vocab": {token: i for i, token in enumerate(tokens)},
                  "merges": merges},
    }


def write(folder, config, tokens, merges, special, tensors):
    """tensors: (name, shape, dtype, bytes)."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "serve.json").write_text(json.dumps({
        "model": {ours: config[name] for ours, name in NUMBERS.items()},
        "tokenizer": bpe_json(tokens, merges, special)}))
    (folder / "tokenizer.json").write_text(
        json.dumps(tokenizer_json(tokens, merges, special)))
    header, offset = {}, 0
    for name, shape, dtype, data in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape),
                        "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            file.write(tensor[3])


def config_json(**numbers):
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
            "pad_token_id": 2, **numbers}


def from_gguf(path, dtype, folder):
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(path)

    def field(name):
        return reader.fields[name].contents()

    if field("general.architecture") != "llama":
        sys.exit(f"{path}: not a model of the type llama")
    if field("tokenizer.ggml.pre") != "smollm":
        sys.exit(f"{path}: another tokenizer than that of SmolLM")
    if any("rope.scaling" in name for name in reader.fields):
        sys.exit(f"{path}: rope scaling is not supported")
    heads = field("llama.attention.head_count")
    kv_heads = field("llama.attention.head_count_kv")
    hidden = field("llama.embedding_length")
    layers = field("llama.block_count")
    found = {tensor.name.removesuffix(".weight"): tensor
             for tensor in reader.tensors}
    tensors = []

    def read(name):
        tensor = found.pop(name)
        rows = gguf.dequantize(tensor.data, tensor.tensor_type)
        # A GGUF pairs the elements (2p, 2p + 1) for RoPE, transformers
        # (p, p + half).
        if name.endswith((".attn_q", ".attn_k")):
            count = heads if name.endswith("q") else kv_heads
            rows = rows.reshape(count, -1, 2, hidden).swapaxes(1, 2)
            rows = rows.reshape(-1, hidden)
        return rows

    def add(name, parts):
        rows = np.ascontiguousarray(np.concatenate([read(p) for p in parts]),
                                    dtype=np.float32)
        if dtype == "bf16" and rows.ndim == 2:
            bits = rows.view(np.uint32)
            data = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
            tensors.append((name + ".weight", rows.shape, "BF16",
                            data.tobytes()))
        else:
            tensors.append((name + ".weight", rows.shape, "F32",
                            rows.tobytes()))

    tied = WHOLE["lm_head"] not in found
    for name, part in WHOLE.items():
        if part in found:
            add(name, [part])
    for layer in range(layers):
        for name, parts in LAYER.items():
            add(f"model.layers.{layer}.{name}",
                [f"blk.{layer}.{part}" for part in parts])
    if found:
        sys.exit(f"{path}: tensors that a Llama does not have: {[*found]}")
    tokens = field("tokenizer.ggml.tokens")
    kinds = field("tokenizer.ggml.token_type")
    config = config_json(
        hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=field("llama.feed_forward_length"),
        vocab_size=len(tokens),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=field("llama.rope.freq_base"),
        tie_word_embeddings=tied, torch_dtype="float32")
    special = [i for i, kind in enumerate(kinds) if kind == 3]
    write(folder, config, tokens, field("tokenizer.ggml.merges"), special,
          tensors)


def tiny_tokenizer():
    """256 bytes, 3 special tokens, and the merges of a few words."""
    characters = byte_characters()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [characters[byte] for byte in range(256)]
    merges = []
    for word in ("\u0120the", "\u0120a", "ing", "\u0120\u0120", "\u010a\u010a",
                 "user", "system", "assistant", "\u0120time", "\u00c3\u00a9"):
        left = word[0]
        for right in word[1:]:
            merge = f"{left} {right}"
            left += right
            if merge not in merges:
                merges.append(merge)
                tokens.append(left)
    return tokens, merges


def tiny(dtype, folder):
    draw = random.Random(22)
    hidden, heads, kv_heads, head_dim, inner, layers = 64, 4, 2, 32, 96, 2
    tokens, merges = tiny_tokenizer()
    config = config_json(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim,
        intermediate_size=inner, vocab_size=len(tokens),
        max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=False, torch_dtype="float32")
    tensors = []

    def add(name, *shape):
        spread = 1.5 / math.sqrt(shape[-1])
        middle = 1 if len(shape) == 1 else 0
        numbers = [draw.uniform(middle - spread, middle + spread)
                   for _ in range(math.prod(shape))]
        data = struct.pack(f"<{len(numbers)}f", *numbers)
        if dtype == "bf16" and len(shape) == 2:  # Rounded down, not to nearest.
            data = b"".join(data[i + 2:i + 4] for i in range(0, len(data), 4))
        tensors.append((name + ".weight", shape,
                        "BF16" if len(data) < 4 * len(numbers) else "F32", data))

    add("model.embed_tokens", len(tokens), hidden)
    for layer in range(layers):
        shapes = [(hidden,), ((heads + 2 * kv_heads) * head_dim, hidden),
                  (hidden, heads * head_dim), (hidden,), (2 * inner, hidden),
                  (hidden, inner)]
        for name, shape in zip(LAYER, shapes):
            add(f"model.layers.{layer}.{name}", *shape)
    add("model.norm", hidden)
    add("lm_head", len(tokens), hidden)
    write(folder, config, tokens, merges, range(3), tensors)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("gguf", nargs="?")
    parser.add_argument("folder")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--dtype", choices=("f32", "bf16"))
    arguments = parser.parse_args()
    if arguments.tiny:
        tiny(arguments.dtype or "f32", arguments.folder)
    elif arguments.gguf:
        from_gguf(arguments.gguf, arguments.dtype or "bf16", arguments.folder)
    else:
        parser.error("name a GGUF file, or give --tiny")


if __name__ == "__main__":
    main()
