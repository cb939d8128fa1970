"""Tiny models of random weights for CTranslate2, and the same models without a
cache, in NumPy: ctranslate2_caches.py. They are saved as the loaders of
ctranslate2/converters/transformers.py save real models."""

import math

import mistralrs_model
import numpy as np
from ctranslate2.specs import (TransformerDecoderModelSpec, TransformerSpec,
                               attention_spec, common_spec)
from mistralrs_model import (DIM, EMBD, HEADS, LAYERS, VOCAB, Gemma3, Mistral,
                             Phi3, text)

FAR = 1 << 20  # Farther than any token.


class Llama(mistralrs_model.Llama):
    def window(self, layer):
        return FAR


class Mpt(Llama):
    """Positions are biases of the scores (ALiBi)."""

    def heads(self, x, name, layer=None):
        return super().heads(x, name)

    def mix(self, x, layer, before):
        behind = np.arange(len(x))[:, None] - np.arange(len(x))
        slopes = 2.0 ** (-8 / HEADS * np.arange(1, HEADS + 1))
        self.biases = -slopes[:, None, None] * behind
        return super().mix(x, layer, before)

    def capped(self, scores):
        return scores + self.biases


class Gemma4(Gemma3):
    """The decoder has no window, its first layer has one."""


class LongRope(Phi3):
    """Texts that are longer than `switch` have other turns."""

    switch = 4096

    def window(self, layer):
        return FAR

    def is_long(self, count):
        return count > self.switch

    def turns(self, layer, count):
        angles = 10000.0 ** (-np.arange(0, DIM, 2) / DIM) / self.divided(count)
        return np.exp(1j * np.arange(count)[:, None] * angles)


class T5:
    """An encoder and a decoder, whose scores have a bias for each distance."""

    buckets, farthest = 8, 20

    def __init__(self):
        self.rng = np.random.default_rng(1)
        self.embeddings, self.out = self.draw(), self.draw()
        self.stacks = [[{name: self.draw() for name in names}
                        for _ in range(LAYERS)] for names in (
            ("q", "k", "v", "o", "in", "back"),
            ("q", "k", "v", "o", "in", "back", "mem_q", "mem_k", "mem_v",
             "mem_o"))]
        self.biases = [
            self.rng.standard_normal((self.buckets, HEADS)).astype(np.float32)
            for _ in self.stacks]
        for stack in self.stacks:
            for layer in stack:
                for name in "q", "mem_q":
                    if name in layer:  # The scores are not scaled.
                        layer[name] /= np.float32(math.sqrt(DIM))

    def draw(self):
        return (self.rng.standard_normal((EMBD, EMBD)) * 0.3).astype(np.float32)

    def norm(self, x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    def bucket(self, distance, causal):
        """Returns the index of the bias of each distance."""
        count = self.buckets if causal else self.buckets // 2
        ahead = 0 if causal else count * (distance > 0)
        distance = np.maximum(-distance, 0) if causal else np.abs(distance)
        exact = count // 2
        far = exact + (np.log(np.maximum(distance, 1) / exact) /
                       math.log(self.farthest / exact) *
                       (count - exact)).astype(int)
        return ahead + np.where(distance < exact, distance,
                                np.minimum(far, count - 1))

    def distances(self, count, causal):
        return np.arange(count) - np.arange(count)[:, None]

    def attend(self, x, rows, layer, before, biases, causal):
        query, key, value = (
            (x @ layer[before + name].T).reshape(len(x), HEADS, DIM)
            for x, name in ((x, "q"), (rows, "k"), (rows, "v")))
        scores = np.einsum("qhd,khd->hqk", query, key) + biases
        if causal:
            scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", scores, value)
        return out.reshape(len(x), -1) @ layer[before + "o"].T

    def hidden(self, which, tokens, memory=None):
        x, causal = self.embeddings[tokens].astype(float), memory is not None
        biases = self.biases[which][self.bucket(
            self.distances(len(tokens), causal), causal)].transpose(2, 0, 1)
        for layer in self.stacks[which]:
            rows = self.norm(x)
            x = x + self.attend(rows, rows, layer, "", biases, causal)
            if causal:
                x = x + self.attend(self.norm(x), memory, layer, "mem_", 0,
                                    False)
            x = x + np.maximum(
                self.norm(x) @ layer["in"].T, 0) @ layer["back"].T
        return self.norm(x)

    def logits(self, source, target):
        """Returns the logits after each token of a target."""
        return self.hidden(1, target, self.hidden(0, source)) @ self.out.T


MODELS = {cls.__name__: cls
          for cls in (Llama, Mistral, Gemma3, Gemma4, Mpt, LongRope, T5)}


def linear(spec, *weights):
    spec.weight = np.concatenate(weights)


def named(config, register):
    """Gives a specification its tokens, of which each is a character."""
    for each in register:
        each([text([token]) for token in range(VOCAB)])
    config.bos_token, config.eos_token = text([0]), text([1])
    config.unk_token, config.layer_norm_epsilon = text([2]), 1e-5


def t5_spec(model):
    spec = TransformerSpec.from_config(
        (LAYERS, LAYERS), HEADS, pre_norm=True, rms_norm=True,
        activation=common_spec.Activation.RELU, relative_attention_bias=True)
    ones = np.ones(EMBD, np.float32)
    for which, stack in enumerate((spec.encoder, spec.decoder)):
        stack.scale_embeddings, stack.layer_norm.gamma = False, ones
        embeddings = stack.embeddings if which else stack.embeddings[0]
        embeddings.weight = model.embeddings
        for layer, weights in zip(stack.layer, model.stacks[which]):
            own = layer.self_attention
            linear(own.linear[0], *(weights[name] for name in "qkv"))
            linear(own.linear[1], weights["o"])
            own.relative_attention_bias = model.biases[which]
            own.relative_attention_max_distance = np.int32(model.farthest)
            parts = [own, layer.ffn]
            if which:
                linear(layer.attention.linear[0], weights["mem_q"])
                linear(layer.attention.linear[1], weights["mem_k"],
                       weights["mem_v"])
                linear(layer.attention.linear[2], weights["mem_o"])
                parts.append(layer.attention)
                layer.attention.queries_scale = 1.0
            own.queries_scale = 1.0
            for part in parts:
                part.layer_norm.gamma = ones
            linear(layer.ffn.linear_0, weights["in"])
            linear(layer.ffn.linear_1, weights["back"])
    linear(spec.decoder.projection, model.out)
    named(spec.config, (spec.register_source_vocabulary,
                        spec.register_target_vocabulary))
    spec.config.decoder_start_token = text([0])
    return spec


def decoder_spec(model):
    gemma = isinstance(model, Gemma3)
    long = isinstance(model, Phi3)
    windows = [model.window(layer) if isinstance(model, Mistral) else 0
               for layer in range(LAYERS)]
    windows = [window if window < 1000 else 0 for window in windows]
    spec = TransformerDecoderModelSpec.from_config(
        LAYERS, HEADS, pre_norm=True, ffn_glu=True, rms_norm=True,
        activation=(common_spec.Activation.GELUTanh if gemma
                    else common_spec.Activation.SWISH),
        alibi=isinstance(model, Mpt),
        rotary_dim=None if isinstance(model, Mpt) else 0,
        rotary_interleave=False,
        rotary_scaling_type=(
            attention_spec.RotaryScalingType.Su if long else None),
        original_max_position_embeddings=model.switch if long else 0,
        num_heads_kv=1, head_dim=DIM, sliding_window=max(windows),
        pre_post_layer_norm=gemma, qk_norm=gemma)
    if isinstance(model, Gemma4):
        spec.decoder.sliding_window = np.int32(0)

    def weight(name):
        return model.weights[f"{name}.weight"]

    def norm(spec, name):
        spec.gamma = weight(name) + np.float32(model.norm_plus)

    decoder = spec.decoder
    decoder.scale_embeddings = gemma
    decoder.embeddings.weight = weight("model.embed_tokens")
    norm(decoder.layer_norm, model.last_norm)
    linear(decoder.projection, weight("lm_head"))
    for i, layer in enumerate(decoder.layer):
        before = f"model.layers.{i}."
        attention, feed = layer.self_attention, layer.ffn
        if gemma:
            norm(layer.input_layer_norm, before + model.attention_norm)
            norm(layer.post_attention_layer_norm,
                 before + model.after_attention)
            norm(layer.pre_feedforward_layer_norm, before + model.feed_norm)
            norm(layer.post_feedforward_layer_norm, before + model.after_feed)
            norm(attention.q_norm, f"{before}self_attn.q_norm")
            norm(attention.k_norm, f"{before}self_attn.k_norm")
            attention.rotary_base = np.float32(model.base(i))
        else:
            norm(attention.layer_norm, before + model.attention_norm)
            norm(feed.layer_norm, before + model.feed_norm)
        attention.sliding_window = np.int32(windows[i])
        if long:
            attention.rotary_scaling_short_factor = np.float32(
                model.factors[0])
            attention.rotary_scaling_long_factor = np.float32(model.factors[1])
            linear(attention.linear[0], weight(f"{before}self_attn.qkv_proj"))
            gate, up = np.split(weight(f"{before}mlp.gate_up_proj"), 2)
        else:
            linear(attention.linear[0], *(
                weight(f"{before}self_attn.{name}_proj") for name in "qkv"))
            gate, up = weight(before + model.gate), weight(before + model.up)
        linear(attention.linear[1], weight(before + model.out))
        linear(feed.linear_0, gate)
        linear(feed.linear_0_noact, up)
        linear(feed.linear_1, weight(before + model.down))
    named(spec.config, [spec.register_vocabulary])
    return spec


def save(model, folder):
    """Writes a model as a folder that CTranslate2 reads."""
    spec = (t5_spec if isinstance(model, T5) else decoder_spec)(model)
    spec.validate()
    folder.mkdir()
    spec.save(folder)
