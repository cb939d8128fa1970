"""Tiny models of random weights for fastllm, and the same models without a
cache, in NumPy: ftllm_caches.py."""

import numpy as np
from mistralrs_model import Llama


class Qwen3(Llama):
    """The heads are normed. The rows are in pages."""

    arch = "Qwen3"
    config = {**Llama.config, "model_type": "qwen3", "attention_bias": False}

    def draw_mixer(self, layer, before):
        super().draw_mixer(layer, before)
        for part in ("q_norm", "k_norm"):
            self.draw_norm(f"{before}self_attn.{part}", self.dim)

    def normed_heads(self, rows, name):
        return self.norm(rows, name.replace("_proj", "_norm"))


class Qwen2(Llama):
    """The projections have biases. The rows are in pages."""

    arch = "Qwen2"
    config = {**Llama.config, "model_type": "qwen2"}

    def draw_mixer(self, layer, before):
        super().draw_mixer(layer, before)
        for part in "q_proj", "k_proj", "v_proj":
            weight = self.weights[f"{before}self_attn.{part}.weight"]
            self.weights[f"{before}self_attn.{part}.bias"] = (
                self.rng.standard_normal(len(weight)) * 0.3).astype(np.float32)

    def linear(self, x, name):
        return super().linear(x, name) + self.weights.get(f"{name}.bias", 0)


MODELS = {cls.__name__: cls for cls in (Llama, Qwen2, Qwen3)}
