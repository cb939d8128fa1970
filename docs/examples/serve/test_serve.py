#!/usr/bin/env python3
"""Tests serve with a tiny random model, without a download.

    test_serve.py BUILD             the folder that serve is built in
    test_serve.py BUILD --model M   the same with the model in the folder M, and
                                    tokenizer and logits beside those of the PyPI
                                    packages tokenizers and transformers (torch)
"""

import argparse
import hashlib
import json
import math
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent


class Driver:
    """serve_model_test, one line of JSON at a time."""

    def __init__(self, build, model, weights="f32", rows="f32"):
        self.process = subprocess.Popen(
            [build / "serve_model_test", model, weights, rows],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **line):
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        assert self.process.wait() == 0


# The model in plain Python.


def read_weights(folder):
    data = (folder / "model.safetensors").read_bytes()
    length, = struct.unpack_from("<Q", data)
    weights = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        begin, end = (8 + length + at for at in entry["data_offsets"])
        assert entry["dtype"] == "F32", name
        numbers = struct.unpack(f"<{(end - begin) // 4}f", data[begin:end])
        columns = entry["shape"][-1]
        weights[name.removesuffix(".weight")] = [
            numbers[i:i + columns] for i in range(0, len(numbers), columns)]
    return weights


def product(matrix, vector):
    return [math.sumprod(row, vector) if hasattr(math, "sumprod")
            else sum(map(float.__mul__, row, vector)) for row in matrix]


def normalize(vector, weights, epsilon):
    scale = 1 / math.sqrt(sum(x * x for x in vector) / len(vector) + epsilon)
    return [x * scale * w for x, w in zip(vector, weights[0])]


def rotate(head, position, base):
    half = len(head) // 2
    out = list(head)
    for i in range(half):
        angle = position * base ** (-i / half)
        c, s = math.cos(angle), math.sin(angle)
        out[i] = head[i] * c - head[i + half] * s
        out[i + half] = head[i + half] * c + head[i] * s
    return out


def soft_max(scores):
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def forward(config, weights, tokens):
    """The logits after each token: the definition, one token at a time."""
    heads, kv_heads = (config["num_attention_heads"],
                       config["num_key_value_heads"])
    dim, epsilon = config["head_dim"], config["rms_norm_eps"]
    layers = range(config["num_hidden_layers"])
    past = [([], []) for _ in layers]  # K and V of each token, by head.
    logits = []

    def split(vector):
        return [vector[i:i + dim] for i in range(0, len(vector), dim)]

    for position, token in enumerate(tokens):
        x = weights["model.embed_tokens"][token]
        for layer in layers:
            def at(name):
                return weights[f"model.layers.{layer}.{name}"]
            h = normalize(x, at("input_layernorm"), epsilon)
            q, k, v = (split(product(at(f"self_attn.{name}_proj"), h))
                       for name in "qkv")
            q, k = ([rotate(head, position, config["rope_theta"])
                     for head in part] for part in (q, k))
            keys, values = past[layer]
            keys.append(k)
            values.append(v)
            attended = []
            for head in range(heads):
                kv = head * kv_heads // heads
                soft = soft_max([
                    sum(map(float.__mul__, q[head], key[kv])) / math.sqrt(dim)
                    for key in keys])
                attended += [sum(w * value[kv][i]
                                 for w, value in zip(soft, values))
                             for i in range(dim)]
            x = [a + b for a, b in
                 zip(x, product(at("self_attn.o_proj"), attended))]
            h = normalize(x, at("post_attention_layernorm"), epsilon)
            gate, up = (product(at(f"mlp.{name}_proj"), h)
                        for name in ("gate", "up"))
            inner = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up)]
            x = [a + b for a, b in zip(x, product(at("mlp.down_proj"), inner))]
        x = normalize(x, weights["model.norm"], epsilon)
        logits.append(product(weights["lm_head"], x))
    return logits


def check_logits(label, found, expected, tolerance):
    """The largest difference, in standard deviations of the logits."""
    numbers = [x for row in expected for x in row]
    mean = sum(numbers) / len(numbers)
    spread = math.sqrt(sum((x - mean) ** 2 for x in numbers) / len(numbers))
    worst = max(abs(a - b) for row, right in zip(found, expected)
                for a, b in zip(row, right)) / spread
    assert len(found) == len(expected)
    assert worst < tolerance, f"{label}: {worst:.2g}, expected < {tolerance}"
    print(f"{label}: logits differ by {worst:.2g} of their spread")


def test_logits(build, model):
    draw = random.Random(1)
    config = json.loads((model / "config.json").read_text())
    tokens = [draw.randrange(config["vocab_size"]) for _ in range(40)]
    expected = forward(config, read_weights(model), tokens)
    for weights, rows, tolerance in (
            ("f32", "f32", 1e-5), ("f32", "f16", 3e-3), ("f32", "q8_0", 0.06),
            ("bf16", "f32", 0.1)):
        driver = Driver(build, model, weights, rows)
        for chunks in ([40], [1] * 40, [7, 1, 1, 31]):
            answer = driver.ask(tokens=tokens, chunks=chunks)
            check_logits(f"weights {weights}, rows {rows}, {len(chunks)} passes",
                         answer["logits"], expected, tolerance)
        driver.close()


# The tokenizer.


def texts(count):
    """Texts of words, digits, blanks, signs, emoji and other scripts."""
    draw = random.Random(2)
    parts = ["the", " the", "The time", "user", "'s", "'ll", "'S", "don't", " ",
             "  ", "   ", "\n", "\n\n", "\t", "\r\n", "1", "12", " 3", "2024",
             "\u00bd", "\u2167", "\u0661", "\u00e9", "e\u0301", "\u00fc", "!",
             "...", " --", "(", "_", "a_b", "<|im_end|>", "<|im_start|>",
             "<|endoftext|>", "<|im_", "\U0001f600", " \U0001f469\u200d\U0001f680",
             "\U0001f1e9\U0001f1ea", "\u4f60\u597d", "\u3000", "\u00a0",
             "\u0085", "\u2028", "\u200b", "\u0645\u0631\u062d\u0628\u0627",
             "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0440\u0443\u0441",
             "\ud55c\uad6d", "x\u0000y", "\u001c", "\ufeff", "$", "\u20ac", "ing"]
    yield from ("", *parts)
    for _ in range(count):
        yield "".join(draw.choices(parts, k=draw.randrange(1, 20)))


# Of the tokens of these texts, for the tiny model, by tokenizers 0.23.3.
TINY_TOKENS = (
    "f43fcfcf8ecffaf60fe6776a550d872284408bfe639573286d772b015a9f558d")


def expected_tokens(model):
    """Encodes by the package tokenizers; None if it is not installed."""
    try:
        import tokenizers
    except ImportError:
        return None
    peer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: peer.encode(text, add_special_tokens=False).ids


def test_tokenizer(build, model):
    driver = Driver(build, model)
    peer = expected_tokens(model)
    special = json.loads((model / "tokenizer.json").read_text())["added_tokens"]
    names = {token["content"]: token["id"] for token in special}
    number, digest = 0, hashlib.sha256()
    for text in texts(1000):
        number += 1
        plain = driver.ask(text=text, special=False)
        assert bytes.fromhex(plain["bytes"]).decode() == text, repr(text)
        assert not set(plain["tokens"]) & set(names.values()), repr(text)
        found = driver.ask(text=text, special=True)
        without = text
        for name in names:
            without = without.replace(name, "")
        assert bytes.fromhex(found["bytes"]).decode() == without, repr(text)
        digest.update(json.dumps(found["tokens"]).encode())
        if peer:
            assert found["tokens"] == peer(text), (
                f"{text!r}: {found['tokens']}, expected {peer(text)}")
    driver.close()
    assert model.name != "tiny" or digest.hexdigest() == TINY_TOKENS, (
        digest.hexdigest())
    print(f"tokenizer: {number} texts" + (
        ", the same tokens as the package tokenizers" if peer else
        "; not compared with the package tokenizers, which is missing"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--model", type=pathlib.Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tiny = pathlib.Path(scratch) / "tiny"
        subprocess.run([sys.executable, HERE / "convert.py", "--tiny", tiny],
                       check=True)
        build = arguments.build.resolve()
        test_logits(build, tiny)
        test_tokenizer(build, tiny)
        if arguments.model:
            test_tokenizer(build, arguments.model)


if __name__ == "__main__":
    main()
