"""Tiny models of random weights for mistral.rs, and the same models without a
cache, in NumPy: mistralrs_caches.py. A token is a character."""

import json
import math

import numpy as np
import tokenizers
from safetensors.numpy import save_file

VOCAB, EMBD, HEADS, DIM, LAYERS = 64, 64, 2, 32, 2
FIRST = ord("0")  # The character of token 0.


def text(tokens):
    return "".join(chr(FIRST + token) for token in tokens)


def tokens_of(string):
    return [ord(character) - FIRST for character in string]


class Llama:
    """A model without a cache."""

    arch = "Llama"
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": EMBD,
        "intermediate_size": EMBD, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": 1,
        "head_dim": DIM, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1,
        "torch_dtype": "float32", "max_position_embeddings": 2048,
        "tie_word_embeddings": False}
    #: The names of a layer's parts.
    attention_norm, after_attention = "input_layernorm", None
    feed_norm, after_feed = "post_attention_layernorm", None
    out, gate, up, down = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
                           "mlp.down_proj")
    last_norm = "model.norm"
    scale = 1  # Of the embeddings.
    norm_plus = 0  # What a norm adds to its weights.
    multimodal = False
    dim, embd = DIM, EMBD

    def window(self, layer):
        return 2048

    def __init__(self):
        self.rng = np.random.default_rng(1)
        self.weights = {}
        self.draw("model.embed_tokens", VOCAB, self.embd, scale=1 / self.scale)
        self.draw_norm(self.last_norm, self.embd)
        self.draw("lm_head", VOCAB, self.embd)
        for layer in range(LAYERS):
            before = f"model.layers.{layer}."
            for norm in (self.attention_norm, self.feed_norm,
                         self.after_attention, self.after_feed):
                if norm:
                    self.draw_norm(before + norm, self.embd)
            self.draw_mixer(layer, before)
            self.draw_feed(before)

    def draw(self, name, *shape, scale=0.3):
        self.weights[f"{name}.weight"] = (
            self.rng.standard_normal(shape) * scale).astype(np.float32)

    def draw_norm(self, name, size):
        self.weights[f"{name}.weight"] = np.full(
            size, 1 - self.norm_plus, np.float32)

    def draw_mixer(self, layer, before):
        for part, heads in ("q_proj", HEADS), ("k_proj", 1), ("v_proj", 1):
            self.draw(f"{before}self_attn.{part}", heads * self.dim, self.embd)
        self.draw(before + self.out, self.embd, HEADS * self.dim)

    def draw_feed(self, before):
        for part in (self.gate, self.up, self.down):
            self.draw(before + part, self.embd, self.embd)

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * (
            self.weights[f"{name}.weight"] + self.norm_plus)

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    def sees(self, layer, positions):
        """Returns which token (column) each query (row) of a layer sees."""
        behind = positions[:, None] - positions
        return (behind >= 0) & (behind < self.window(layer))

    def turns(self, layer, count):
        """Returns the turns of RoPE, for each of `count` positions."""
        return np.exp(1j * np.arange(count)[:, None] * self.base(layer) **
                      (-np.arange(0, self.dim, 2) / self.dim))

    def base(self, layer):
        return 10000.0

    def projected(self, x, name):
        return self.linear(x, name)

    def heads(self, x, name, layer=None):
        """Returns rows of heads, turned if there is a layer."""
        rows = self.projected(x, name).reshape(len(x), -1, self.dim)
        if layer is not None:
            turns = self.turns(layer, len(x))[:, None]
            rows = self.normed_heads(rows, name)
            real, imag = np.split(rows, 2, -1)
            half = (real + 1j * imag) * turns
            rows = np.concatenate([half.real, half.imag], -1)
        return rows.repeat(HEADS // rows.shape[1], 1)

    def normed_heads(self, rows, name):
        return rows

    def capped(self, scores):
        return scores

    def mix(self, x, layer, before):
        """Returns the attention of a layer."""
        positions = np.arange(len(x))
        query, key = (self.heads(x, f"{before}self_attn.{name}", layer)
                      for name in ("q_proj", "k_proj"))
        value = self.heads(x, f"{before}self_attn.v_proj")
        scores = self.capped(
            np.einsum("qhd,khd->hqk", query, key) / math.sqrt(self.dim))
        scores = self.softmax(
            np.where(self.sees(layer, positions), scores, -np.inf))
        out = np.einsum("hqk,khd->qhd", scores, value)
        return self.linear(out.reshape(len(x), -1), before + self.out)

    def softmax(self, scores):
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        return scores / scores.sum(-1, keepdims=True)

    def activated(self, x):
        return x / (1 + np.exp(-x))

    def feed(self, x, before):
        return self.linear(self.activated(self.linear(x, before + self.gate)) *
                           self.linear(x, before + self.up),
                           before + self.down)

    def logits(self, tokens):
        """Returns the logits after each token."""
        x = self.weights["model.embed_tokens.weight"][tokens].astype(float)
        x *= self.scale
        for layer in range(LAYERS):
            before = f"model.layers.{layer}."
            out = self.mix(self.norm(x, before + self.attention_norm), layer,
                           before)
            if self.after_attention:
                out = self.norm(out, before + self.after_attention)
            x = x + out
            out = self.feed(self.norm(x, before + self.feed_norm), before)
            if self.after_feed:
                out = self.norm(out, before + self.after_feed)
            x = x + out
        return self.linear(self.norm(x, self.last_norm), "lm_head")

    def wrong(self, prompt, made):
        """Returns what is wrong with the first token of `made` that is not the
        best after the tokens before it, or None."""
        rows = self.logits([*prompt, *made[:-1]])[len(prompt) - 1:]
        for i, (row, token) in enumerate(zip(rows, made)):
            if not row.max() - row[token] <= 1e-3:  # NaN is wrong, too.
                return (f"token {len(prompt) + i} is {token}, expected "
                        f"{int(row.argmax())}")
        return None

    def save(self, folder):
        """Writes the model, its configuration and its tokenizer."""
        folder.mkdir()
        save_file(self.weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({
            **self.config,
            "architectures": [f"{self.arch}ForCausalLM"]}))
        letters = tokenizers.Tokenizer(tokenizers.models.BPE(
            {chr(FIRST + token): token for token in range(VOCAB)}, []))
        letters.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=False)
        letters.decoder = tokenizers.decoders.ByteLevel()
        letters.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({
            "bos_token": text([0]), "eos_token": text([1]),
            "add_bos_token": False, "chat_template":
            "{% for m in messages %}{{ m['content'] }}{% endfor %}",
            "tokenizer_class": "PreTrainedTokenizerFast"}))


class Mistral(Llama):
    """Each layer has a sliding window."""

    arch = "Mistral"
    config = {**Llama.config, "model_type": "mistral", "sliding_window": 8,
              "max_position_embeddings": 4096}

    def window(self, layer):
        return self.config["sliding_window"]


class Gemma2(Mistral):
    """Every other layer has a sliding window."""

    arch = "Gemma2"
    config = {
        **Mistral.config, "model_type": "gemma2", "attention_bias": False,
        "max_position_embeddings": 2048,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": DIM, "hidden_activation": None,
        "hidden_act": "gelu_pytorch_tanh"}
    after_attention = "post_attention_layernorm"
    feed_norm = "pre_feedforward_layernorm"
    after_feed = "post_feedforward_layernorm"
    scale, norm_plus = math.sqrt(EMBD), 1

    def window(self, layer):
        return 2048 if layer % 2 else 8

    def capped(self, scores):
        return np.tanh(scores / 50) * 50

    def activated(self, x):
        return x / 2 * (1 + np.tanh(
            math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))

    def logits(self, tokens):
        return np.tanh(super().logits(tokens) / 30) * 30


class Gemma3(Gemma2):
    """The heads are normed, and RoPE has two bases."""

    arch, multimodal = "Gemma3", True
    config = {
        **Gemma2.config, "model_type": "gemma3_text", "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0, "sliding_window_pattern": 2,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh"}

    def draw_mixer(self, layer, before):
        super().draw_mixer(layer, before)
        for part in ("q_norm", "k_norm"):
            self.draw_norm(f"{before}self_attn.{part}", DIM)

    def base(self, layer):
        return 1e6 if layer % 2 else 10000.0

    def normed_heads(self, rows, name):
        return self.norm(rows, name.replace("_proj", "_norm"))

    def capped(self, scores):
        return scores

    def logits(self, tokens):
        return Llama.logits(self, tokens)


class Lfm2(Llama):
    """The first layer has a convolution of three tokens in place of
    attention."""

    arch = "Lfm2"
    config = {
        **Llama.config, "model_type": "lfm2", "norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "layer_types": ["conv", "full_attention"], "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False, "rope_parameters": {
            "rope_theta": 10000.0, "rope_type": "default"}}
    attention_norm, feed_norm = "operator_norm", "ffn_norm"
    out, gate, up, down = ("self_attn.out_proj", "feed_forward.w1",
                           "feed_forward.w3", "feed_forward.w2")
    last_norm = "model.embedding_norm"

    def draw_mixer(self, layer, before):
        if layer:
            super().draw_mixer(layer, before)
            self.draw_norm(f"{before}self_attn.q_layernorm", DIM)
            self.draw_norm(f"{before}self_attn.k_layernorm", DIM)
        else:
            self.draw(f"{before}conv.in_proj", 3 * EMBD, EMBD, scale=0.15)
            self.draw(f"{before}conv.conv", EMBD, 1, 3)
            self.draw(f"{before}conv.out_proj", EMBD, EMBD)

    def normed_heads(self, rows, name):
        return self.norm(rows, name.replace("_proj", "_layernorm"))

    def mix(self, x, layer, before):
        if layer:
            return super().mix(x, layer, before)
        left, right, x = np.split(
            self.linear(x, f"{before}conv.in_proj"), 3, -1)
        x = np.concatenate([np.zeros((2, EMBD)), left * x])
        taps = self.weights[f"{before}conv.conv.weight"][:, 0]
        x = sum(x[i:len(x) - 2 + i] * taps[:, i] for i in range(3))
        return self.linear(right * x, f"{before}conv.out_proj")


class Phi3(Llama):
    """LongRoPE: texts that are longer than `switch` have other turns. The
    projections are in one piece."""

    arch, switch = "Phi3", 16
    factors = np.ones(DIM // 2), np.arange(1, DIM // 2 + 1.0)
    config = {
        **Llama.config, "model_type": "phi3",
        "original_max_position_embeddings": switch, "rope_scaling": {
            "type": "longrope", "short_factor": list(factors[0]),
            "long_factor": list(factors[1])}}
    long = False

    def draw_mixer(self, layer, before):
        self.draw(f"{before}self_attn.qkv_proj", (HEADS + 2) * DIM, EMBD)
        self.draw(before + self.out, EMBD, HEADS * DIM)

    def draw_feed(self, before):
        self.draw(f"{before}mlp.gate_up_proj", 2 * EMBD, EMBD)
        self.draw(before + self.down, EMBD, EMBD)

    def feed(self, x, before):
        gate, up = np.split(
            self.linear(x, f"{before}mlp.gate_up_proj"), 2, -1)
        return self.linear(self.activated(gate) * up, before + self.down)

    def projected(self, x, name):
        layer, part = name.rsplit(".", 1)
        return np.split(
            self.linear(x, f"{layer}.qkv_proj"),
            [HEADS * DIM, (HEADS + 1) * DIM],
            -1)[["q_proj", "k_proj", "v_proj"].index(part)]

    def is_long(self, count):
        """Whether a text of `count` tokens has the long factors. mistral.rs
        takes them a token early."""
        return count + 1 > self.switch

    def divided(self, count):
        """Returns the factors of each of `count` positions."""
        return self.factors[self.long]

    def turns(self, layer, count):
        scale = math.sqrt(1 + math.log(2048 / self.switch) /
                          math.log(self.switch))
        angles = 10000.0 ** (-np.arange(0, DIM, 2) / DIM) / self.divided(count)
        return scale * np.exp(1j * np.arange(count)[:, None] * angles)

    def logits(self, tokens):
        both = []
        for self.long in False, True:
            both.append(super().logits(tokens))
        return np.where(self.is_long(np.arange(1, len(tokens) + 1))[:, None],
                        both[1], both[0])


class Granite(Llama):
    """The first layer is Mamba2 in place of attention."""

    arch, size, states, groups = "GraniteMoeHybrid", 2 * EMBD, 16, 4
    config = {
        **Llama.config, "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention"], "mamba_n_heads": groups,
        "mamba_d_state": states, "mamba_d_conv": 4, "mamba_n_groups": 1,
        "attention_multiplier": 1 / math.sqrt(DIM)}

    def draw_mixer(self, layer, before):
        if layer:
            return super().draw_mixer(layer, before)
        rows = self.size + 2 * self.states
        self.draw(f"{before}mamba.in_proj", self.size + rows + self.groups,
                  EMBD, scale=0.15)
        self.draw(f"{before}mamba.conv1d", rows, 1, 4)
        self.draw(f"{before}mamba.out_proj", EMBD, self.size)
        self.draw_norm(f"{before}mamba.norm", self.size)
        for name, count in (("conv1d.bias", rows), ("dt_bias", self.groups),
                            ("A_log", self.groups), ("D", self.groups)):
            self.weights[f"{before}mamba.{name}"] = self.rng.standard_normal(
                count).astype(np.float32) - (name == "dt_bias")

    def draw_feed(self, before):
        self.draw(f"{before}shared_mlp.input_linear", 2 * EMBD, EMBD)
        self.draw(f"{before}shared_mlp.output_linear", EMBD, EMBD)

    def feed(self, x, before):
        gate, up = np.split(
            self.linear(x, f"{before}shared_mlp.input_linear"), 2, -1)
        return self.linear(self.activated(gate) * up,
                           f"{before}shared_mlp.output_linear")

    def mix(self, x, layer, before):
        if layer:
            return super().mix(x, layer, before)
        count, before = len(x), f"{before}mamba."
        taps, bias, steps_bias, decay, skip = (
            self.weights[before + name] for name in
            ("conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D"))
        gate, rows, steps = np.split(
            self.linear(x, f"{before}in_proj"),
            [self.size, 2 * self.size + 2 * self.states], -1)
        rows = np.concatenate([np.zeros((3, rows.shape[1])), rows])
        rows = self.activated(bias + sum(
            rows[i:count + i] * taps[:, 0, i] for i in range(4)))
        value, key, query = np.split(
            rows, [self.size, self.size + self.states], -1)
        value = value.reshape(count, self.groups, -1)
        steps = np.log1p(np.exp(steps + steps_bias))
        state, out = 0, []
        for step, v, k, q in zip(steps, value, key, query):
            state = state * np.exp(-step * np.exp(decay))[:, None, None] + (
                step[:, None] * v)[..., None] * k
            out.append(state @ q + v * skip[:, None])
        out = np.array(out).reshape(count, -1) * self.activated(gate)
        return self.linear(self.norm(out, f"{before}norm"),
                           f"{before}out_proj")


class Short(Llama):
    """The size of the context is not a multiple of 512."""

    config = {**Llama.config, "max_position_embeddings": 600}


class Wide(Mistral):
    """A window that the texts do not leave."""

    config = {**Mistral.config, "sliding_window": 512}


MODELS = {cls.__name__: cls
          for cls in (Llama, Mistral, Gemma2, Gemma3, Lfm2, Phi3, Granite,
                      Short, Wide)}
