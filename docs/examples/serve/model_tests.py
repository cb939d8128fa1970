"""Tests of serve's model, tokenizer and files, for test_serve.py."""

import hashlib
import json
import math
import random
import re
import struct
import subprocess

from plain_model import Plain


# oneDNN has products of bf16 with it.
HAS_AVX512 = "avx512" in open("/proc/cpuinfo").read()


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
    plain = Plain(model)
    tokens = [draw.randrange(plain.config["vocab_size"]) for _ in range(40)]
    expected = [plain.step(token) for token in tokens]
    for weights, rows, tolerance in (
            ("f32", "f32", 1e-5), ("f32", "f16", 3e-3), ("f32", "q8_0", 0.06),
            ("bf16", "f32", 0.1)):
        if weights == "bf16" and not HAS_AVX512:
            continue
        driver = Driver(build, model, weights, rows)
        for chunks in ([40], [1] * 40, [7, 1, 1, 31]):
            answer = driver.ask(tokens=tokens, chunks=chunks)
            check_logits(f"weights {weights}, rows {rows}, {len(chunks)} passes",
                         answer["logits"], expected, tolerance)
        driver.close()


def divided_weights(model, config):
    """The weights with the names that transformers has for a Llama."""
    import safetensors.torch

    weights = {}
    kv = config.num_key_value_heads * config.head_dim
    file = safetensors.torch.load_file(model / "model.safetensors")
    for name, rows in file.items():
        if "qkv" in name:
            q = rows.shape[0] - 2 * kv
            for letter, part in zip("qkv", rows.split([q, kv, kv])):
                weights[name.replace("qkv", letter)] = part
        elif "gate_up" in name:
            for word, part in zip(("gate", "up"), rows.chunk(2)):
                weights[name.replace("gate_up", word)] = part
        else:
            weights[name] = rows
    return weights


def test_transformers(build, model):
    try:
        import torch
        import transformers
    except ImportError:
        print("transformers: the package is missing")
        return
    driver = Driver(build, model)
    tokens = driver.ask(text="The capital of France is Paris. What is the "
                        "capital of Italy, and since 1871?", special=False)
    driver.close()
    tokens = tokens["tokens"]
    peer = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(model), dtype=torch.float32)
    peer.load_state_dict(divided_weights(model, peer.config), strict=False)
    with torch.no_grad():
        expected = peer(torch.tensor([tokens])).logits[0].tolist()
    for weights, rows, tolerance in (("f32", "f32", 1e-4), ("f32", "f16", 0.02),
                                     ("bf16", "f16", 0.1)):
        if weights == "bf16" and not HAS_AVX512:
            continue
        driver = Driver(build, model, weights, rows)
        answer = driver.ask(tokens=tokens, chunks=[len(tokens) - 2, 1, 1])
        check_logits(f"transformers {transformers.__version__}, weights "
                     f"{weights}, rows {rows}", answer["logits"], expected,
                     tolerance)
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


# The hash of the tokens that tokenizers 0.23.3 finds in these texts, for the tiny model.
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


# A hostile model.


def test_hostile_files(build, model, scratch):
    """A file that is wrong gives a message, whatever is in it."""
    whole = (model / "model.safetensors").read_bytes()
    length, = struct.unpack_from("<Q", whole)
    header = whole[8:8 + length]
    draw = random.Random(3)

    def with_header(text):
        return struct.pack("<Q", len(text)) + text + whole[8 + length:]

    wrong = {
        "empty": b"", "short": whole[:5], "cut": whole[:-1],
        "long header": struct.pack("<Q", 1 << 60) + whole[8:],
        "no JSON": with_header(b"[" * 100000),
        "a list": with_header(b"[1]"),
        "offsets": with_header(header.replace(b'"data_offsets": [0,',
                                              b'"data_offsets": [99999999,')),
        "few data": with_header(re.sub(rb"\[0, \d+\]", b"[0, 4]", header)),
        "negative": with_header(header.replace(b'[0,', b'[-4,')),
        "shape": with_header(header.replace(b'"shape": [64, 96]',
                                            b'"shape": [96, 64]')),
        "huge shape": with_header(header.replace(
            b'"shape": [64, 96]', b'"shape": [4294967296, 4294967296]')),
        "name": with_header(header.replace(b"lm_head", b"head_lm")),
        "dtype": with_header(header.replace(b'"F32"', b'"I64"')),
        "deep": with_header(header.replace(
            b'"shape": [64, 96]', b'"shape": ' + b"[" * 500000 + b"]" * 500000)),
    }
    def with_offsets(change):
        found = json.loads(header)
        norm = found["model.norm.weight"]
        norm["data_offsets"] = [change(x) for x in norm["data_offsets"]]
        return with_header(json.dumps(found).encode())

    end = json.loads(header)["model.norm.weight"]["data_offsets"][1]
    norm = {
        "before": with_offsets(lambda x: x - end - 5),
        "half": with_offsets(lambda x: x + 0.5),
        "wraps": with_offsets(lambda x: x - end + (1 << 64) - 5),
        "deep": with_offsets(lambda x: [x]),
    }
    noise = []
    for _ in range(20):
        bytes_ = bytearray(header)
        for _ in range(3):
            bytes_[draw.randrange(len(bytes_))] = draw.randrange(256)
        noise.append(with_header(bytes(bytes_)))

    folder = scratch / "hostile"
    folder.mkdir()
    (folder / "serve.json").write_bytes((model / "serve.json").read_bytes())

    def load():
        return subprocess.run([build / "serve_model_test", folder, "f32", "f32"],
                              stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, errors="replace")

    for name, data in wrong.items():
        (folder / "model.safetensors").write_bytes(data)
        result = load()
        assert result.returncode == 1, f"{name}: {result}"
        assert f"{folder}: " in result.stderr, f"{name}: {result}"
    for name, data in norm.items():
        (folder / "model.safetensors").write_bytes(data)
        result = load()
        assert result.returncode == 1, f"{name}: {result}"
        assert "model.norm is not in the file as [64]" in result.stderr, result
    for data in noise:
        (folder / "model.safetensors").write_bytes(data)
        assert load().returncode in (0, 1)
    (folder / "model.safetensors").write_bytes(whole)
    text = (model / "serve.json").read_text()
    changes = (
        ('"head_dim": 32', '"head_dim": 31'), ('"head_dim": 32', '"head_dim": 524288'),
        ('"vocab": ', '"vocab": -'),
        ('"kv_heads": 2', '"kv_heads": 3'), ('"layers": 2', '"layers": "2"'),
        ('"rope_base": 1', '"rope_base": 0.000001'), ("{", ""),
        ('"special"', '"others"'), (", 256", ", 999999"), ("256,", "-2,"),
        ('"merges": [', '"merges": [[1, 2], '),
        ('"merges": [', '"merges": [' + "[70, 70, 70], " * 100),
        ('"pieces": "', '"pieces": "('), ("}}", "}"))
    for old, new in changes:
        assert old in text, old
        (folder / "serve.json").write_text(text.replace(old, new, 1))
        result = load()
        assert result.returncode == 1 and f"{folder}: " in result.stderr, (
            f"{new}: {result}")
    (folder / "serve.json").write_text(text)
    assert load().returncode == 0
    print(f"hostile files: {len(wrong) + len(noise) + len(changes)} refused or "
          "harmless")
