"""The model of serve in plain Python, for test_serve.py."""

import json
import math
import struct


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


class Plain:
    """The definition, one token at a time."""

    def __init__(self, model):
        self.config = json.loads((model / "config.json").read_text())
        self.weights = read_weights(model)
        # K and V of each token, by head, for each layer.
        self.past = [([], []) for _ in range(self.config["num_hidden_layers"])]

    def step(self, token):
        """The logits after the next token."""
        config, weights = self.config, self.weights
        heads, kv_heads = (config["num_attention_heads"],
                           config["num_key_value_heads"])
        dim, epsilon = config["head_dim"], config["rms_norm_eps"]

        def split(vector):
            return [vector[i:i + dim] for i in range(0, len(vector), dim)]

        x = weights["model.embed_tokens"][token]
        for layer, (keys, values) in enumerate(self.past):
            def at(name):
                return weights[f"model.layers.{layer}.{name}"]
            h = normalize(x, at("input_layernorm"), epsilon)
            qkv = split(product(at("self_attn.qkv_proj"), h))
            q, k, v = (qkv[:heads], qkv[heads:heads + kv_heads],
                       qkv[heads + kv_heads:])
            q, k = ([rotate(head, len(keys), config["rope_theta"])
                     for head in part] for part in (q, k))
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
            gate_up = product(at("mlp.gate_up_proj"), h)
            half = len(gate_up) // 2
            gate, up = gate_up[:half], gate_up[half:]
            inner = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up)]
            x = [a + b for a, b in zip(x, product(at("mlp.down_proj"), inner))]
        return product(weights["lm_head"],
                       normalize(x, weights["model.norm"], epsilon))

    def greedy(self, prompt, count, context=math.inf, keep=0):
        """The answer. In a full context the first `keep` tokens stay, and the
        older half of the others goes."""
        answer = []
        for token in (token for part in (prompt, answer) for token in part):
            if len(self.past[0][0]) == context:
                gone = (context - keep) // 2
                for keys, values in self.past:
                    del keys[keep:keep + gone], values[keep:keep + gone]
                    keys[keep:] = [[rotate(head, -gone, self.config["rope_theta"])
                                    for head in key] for key in keys[keep:]]
            logits = self.step(token)
            if len(self.past[0][0]) >= len(prompt) or answer:
                answer.append(logits.index(max(logits)))
            if len(answer) == count:
                return answer
