"""Tiny random models: as files for llama.cpp, and computed from history."""

import copy
import dataclasses

import gguf
import numpy as np

VOCAB, EMBD, HEADS, KV_HEADS, FF = 64, 64, 4, 2, 96
SEQUENCES = 3
EPS, ROPE_BASE = 1e-5, 500.0


@dataclasses.dataclass(frozen=True)
class Arch:
    """The differences of our models; all have RMSNorm, RoPE, GQA and SwiGLU."""

    name: str  # general.architecture.
    windows: tuple  # By layer: positions that a query sees; 0: all.
    rope: tuple  # By layer: whether Q and K are rotated.
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


def matrix(rng, rows, columns, scale=1.0):
    values = rng.normal(0, scale / np.sqrt(columns), (rows, columns))
    return values.astype(np.float32)


def random_weights(arch, seed=1):
    """Weights by their names in GGUF: f32, rows are outputs."""
    rng = np.random.default_rng(seed)

    def norm():
        return rng.uniform(0.8, 1.2, EMBD).astype(np.float32)

    queries, keys = HEADS * arch.head_dim, KV_HEADS * arch.head_dim
    weights = {
        "token_embd.weight": matrix(rng, VOCAB, EMBD, np.sqrt(EMBD)),
        "output_norm.weight": norm(),
        "output.weight": matrix(rng, VOCAB, EMBD),
    }
    for i in range(len(arch.windows)):
        weights |= {
            f"blk.{i}.attn_norm.weight": norm(),
            # Scores of some spread, so that single tokens count.
            f"blk.{i}.attn_q.weight": matrix(rng, queries, EMBD, 2),
            f"blk.{i}.attn_k.weight": matrix(rng, keys, EMBD),
            f"blk.{i}.attn_v.weight": matrix(rng, keys, EMBD, 2),
            f"blk.{i}.attn_output.weight": matrix(rng, EMBD, queries),
            f"blk.{i}.ffn_norm.weight": norm(),
            f"blk.{i}.ffn_gate.weight": matrix(rng, FF, EMBD),
            f"blk.{i}.ffn_up.weight": matrix(rng, FF, EMBD),
            f"blk.{i}.ffn_down.weight": matrix(rng, EMBD, FF),
        }
        if arch.sinks:
            sinks = rng.normal(0, 1, HEADS).astype(np.float32)
            weights[f"blk.{i}.attn_sinks.weight"] = sinks
    return weights


def write_gguf(path, arch, weights, words=(), begins=False):
    """Writes a model, with a vocabulary of these words if there are any."""
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
    add_words(writer, words, begins)
    if any(arch.windows):
        key = f"{arch.name}.attention.sliding_window"
        writer.add_sliding_window(max(arch.windows))
        writer.add_array(key + "_pattern", [w > 0 for w in arch.windows])
        writer.add_logit_scale(1.0)
    write_tensors(writer, weights)


def add_words(writer, words, begins):
    """The first three words are those for unknown text, the beginning, the end;
    `begins` says whether each text gets the beginning."""
    writer.add_tokenizer_model("llama" if words else "none")
    if words:
        kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2
        kinds += [gguf.TokenType.NORMAL] * (len(words) - 3)
        writer.add_token_list(words)
        writer.add_token_scores([0.0] * len(words))
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(begins)


def write_tensors(writer, weights):
    """Ends a file with its tensors."""
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
    """Returns these rows as a cache of this dtype gives them back."""
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
        """Returns Q, K and V of normed x, before RoPE: [tokens, heads, head_dim] each."""
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


@dataclasses.dataclass
class Token:
    """One decoded token. K is as rotated and rounded when it was decoded."""

    position: int
    sequences: set
    past: int  # Tells apart tokens that have seen different things.
    keys: list  # By layer: [KV_HEADS, head_dim].
    values: list
    turned: int = 0  # K has been rotated by this since,
    pending: int = 0  # and the next decode rotates it by this.
    gone: set = dataclasses.field(default_factory=set)  # For these, it has
    # left the cache of the layers that have a window.


class History:
    """Our side: what was decoded, as a list of tokens for each stream."""

    def __init__(self, model, config, rules):
        self.model, self.config, self.rules = model, config, rules
        self.streams = [[] for _ in range(1 if config.unified else SEQUENCES)]
        self.copied = set()  # Streams that the next decode copies, from or to.
        self.window = max(model.arch.windows)

    def stream(self, sequence):
        return self.streams[0 if self.config.unified else sequence]

    def tokens(self, sequence):
        return [t for t in self.stream(sequence) if sequence in t.sequences]

    def end(self, sequence):
        return max((t.position for t in self.tokens(sequence)), default=-1)

    def room(self, sequence):
        return self.config.cells - len(self.stream(sequence))

    def settle(self):
        """Does the shifts and copies, as the beginning of a decode does."""
        for token in sum(self.streams, []):
            token.turned += token.pending
            token.pending = 0
        self.copied.clear()

    def decode(self, batch):
        """The logits of a batch of (id, position, sequences)."""
        self.settle()
        ids, positions, sequences = zip(*batch)
        firsts = [s[0] for s in sequences]
        x = self.model.embed(np.array(ids))
        pasts = {
            s: hash(tuple(t.past for t in self.tokens(s))) for s in set(firsts)
        }
        new = []
        for i, (ident, position, owners) in enumerate(batch):
            past = hash((pasts[owners[0]], position, ident))
            pasts[owners[0]] = past
            new.append(Token(position, set(owners), past, [], []))
        for stream in {
            id(self.stream(s)): self.stream(s) for s in firsts
        }.values():
            stream += [
                t for t, s in zip(new, firsts) if self.stream(s) is stream
            ]
        for layer, (window, rope) in enumerate(
            zip(self.model.arch.windows, self.model.arch.rope)
        ):
            q, k, v = self.model.qkv(layer, x)
            if rope:
                q = rotate(q, positions)
                k = rotate(k, positions)
            k = rounded(k, self.config.dtype)
            v = rounded(v, self.config.dtype)
            for i, token in enumerate(new):
                token.keys.append(k[i])
                token.values.append(v[i])
            x = self._attend(layer, window, rope, x, q, firsts, positions)
        if "eager" in self.rules and self.window:
            for sequence in range(SEQUENCES):
                bound = self.end(sequence) - self.window
                for token in self.tokens(sequence):
                    if token.position <= bound:
                        token.gone.add(sequence)
        return self.model.logits(x)

    def _attend(self, layer, window, rope, x, q, firsts, positions):
        streams = {id(self.stream(s)): self.stream(s) for s in firsts}
        seen = sum(streams.values(), [])
        of = np.concatenate([np.full(len(t), i) for i, t in streams.items()])
        keys = np.stack([t.keys[layer] for t in seen])
        values = np.stack([t.values[layer] for t in seen])
        turned = np.array([t.turned for t in seen])
        if "no-turn" not in self.rules and turned.any():
            base = ROPE_BASE
            if window and "swa-base" in self.rules:
                base = 10000.0
            if rope or "nope" in self.rules:
                keys = rotate(keys, turned, base)
        at = np.array([t.position for t in seen])
        visible = np.empty((len(firsts), len(seen)), bool)
        for i, (sequence, position) in enumerate(zip(firsts, positions)):
            mine = np.array([sequence in t.sequences for t in seen])
            mine &= (of == id(self.stream(sequence))) & (at <= position)
            if window:
                window_here = window + ("window-plus-one" in self.rules)
                mine &= position - at < window_here
                mine &= ~np.array([sequence in t.gone for t in seen])
            visible[i] = mine
        return self.model.after_attention(layer, x, q, keys, values, visible)

    def remove(self, sequence, begin, end):
        """Removes tokens of one sequence or, if it is -1, of all."""
        for stream in self.streams:
            for token in stream:
                if begin <= token.position < end:
                    token.sequences -= (
                        set(token.sequences) if sequence < 0 else {sequence}
                    )
        self._drop()
        if "remove-shifts" in self.rules and sequence >= 0 and end < 1 << 30:
            self.add(sequence, end, 1 << 31, begin - end)

    def copy(self, source, target, begin, end):
        if source == target:
            return
        if "copy-replaces" in self.rules:
            self.remove(target, 0, 1 << 31)
        if self.config.unified:
            for token in self.tokens(source):
                if begin <= token.position < end:
                    if source not in token.gone:
                        token.gone.discard(target)
                    elif target not in token.sequences:
                        token.gone.add(target)
                    token.sequences.add(target)
            return
        tokens = self.tokens(source)
        if "whole" not in self.rules:
            tokens = [t for t in tokens if begin <= t.position < end]
        self._take(source, target, tokens, "replace" in self.rules)
        self.copied |= {source, target}

    def _take(self, source, target, tokens, replace):
        tokens = [
            dataclasses.replace(
                t,
                sequences={target},
                gone={target} if source in t.gone else set(),
            )
            for t in tokens
        ]
        if replace:
            self.remove(target, 0, 1 << 31)
        self.stream(target).extend(tokens)

    def keep(self, sequence):
        for stream in self.streams:
            if "keep" in self.rules and stream is not self.stream(sequence):
                continue
            for token in stream:
                token.sequences &= {sequence}
        self._drop()

    def add(self, sequence, begin, end, delta):
        for token in self.tokens(sequence):
            if not begin <= token.position < end:
                continue
            if "add-own" in self.rules and len(token.sequences) > 1:
                token.sequences.remove(sequence)
                token = copy.copy(token)
                token.sequences = {sequence}
                self.stream(sequence).append(token)
            token.position += delta
            token.pending += delta
            if token.position < 0:
                token.sequences.clear()
        self._drop()

    def divide(self, sequence, begin, end, by):
        for token in self.tokens(sequence):
            if begin <= token.position < end:
                delta = token.position // by - token.position
                token.position += delta
                token.pending += -delta if "div" in self.rules else delta

    def load(self, source, target):
        """Copies a sequence, as saving it and loading it as another sequence does."""
        tokens = self.tokens(source)
        if not tokens and "empty" in self.rules:
            return
        if "save" in self.rules:
            tokens = [dataclasses.replace(t, pending=0) for t in tokens]
        self._take(source, target, tokens, True)

    def reload(self):
        """Drops pending shifts, as saving all and loading it again does."""
        if "save" in self.rules:
            for token in sum(self.streams, []):
                token.pending = 0

    def clear(self):
        for stream in self.streams:
            stream.clear()

    def _drop(self):
        for stream in self.streams:
            stream[:] = [t for t in stream if t.sequences]
