"""The cache of onnxruntime-genai, by the logits of a tiny model, under kvtwin's oracle:
docs/backends/genai.md."""

import json
import pathlib
import tempfile

import numpy as np
import onnx
import onnxruntime_genai as genai
import pipe as kvtwin
from onnx import TensorProto, helper, numpy_helper

VOCAB, HEADS = 64, 2
TOKENS = VOCAB - 3  # The first three are special tokens.
REFUSALS = ("exceeds max length", "already at max_length")


def graph(window):
    """A layer of GroupQueryAttention whose queries are 0, so that the logit of a
    token is its share in the attention: 1 / n if n tokens are seen."""
    eye = np.eye(VOCAB, dtype=np.float32)
    numbers = {"eye": eye, "none": np.zeros((VOCAB, HEADS * VOCAB), np.float32),
               "first": np.vstack([eye, np.zeros_like(eye)]),
               "one": np.array([1]), "axis": np.array([1])}
    nodes = [
        ("Gather", ["eye", "input_ids"], ["rows"], {}),
        ("MatMul", ["rows", "none"], ["query"], {}),
        ("ReduceSum", ["attention_mask", "axis"], ["length"], {"keepdims": 1}),
        ("Sub", ["length", "one"], ["last"], {}),
        ("Cast", ["last"], ["seqlens_k"], {"to": TensorProto.INT32}),
        ("Shape", ["attention_mask"], ["shape"], {}),
        ("Gather", ["shape", "axis"], ["columns"], {}),
        ("Cast", ["columns"], ["total"], {"to": TensorProto.INT32}),
        ("GroupQueryAttention",
         ["query", "rows", "rows", "past_key_values.0.key",
          "past_key_values.0.value", "seqlens_k", "total"],
         ["attention", "present.0.key", "present.0.value"],
         {"domain": "com.microsoft", "num_heads": HEADS, "kv_num_heads": 1,
          **({} if window is None else {"local_window_size": window + 1})}),
        ("MatMul", ["attention", "first"], ["logits"], {}),
    ]

    def values(kind, names, *shape):
        return [helper.make_tensor_value_info(name, kind, shape) for name in names]

    def rows(name):
        return values(TensorProto.FLOAT, (f"{name}.0.key", f"{name}.0.value"),
                      "batch", 1, name, VOCAB)

    return helper.make_graph(
        [helper.make_node(op, i, o, **more) for op, i, o, more in nodes], "tiny",
        values(TensorProto.INT64, ["input_ids"], "batch", "length")
        + values(TensorProto.INT64, ["attention_mask"], "batch", "total")
        + rows("past_key_values"),
        values(TensorProto.FLOAT, ["logits"], "batch", "length", VOCAB)
        + rows("present"),
        [numpy_helper.from_array(array, name) for name, array in numbers.items()])


def config(share):
    inputs = {"input_ids": "input_ids", "attention_mask": "attention_mask",
              "past_key_names": "past_key_values.%d.key",
              "past_value_names": "past_key_values.%d.value"}
    outputs = {"logits": "logits", "present_key_names": "present.%d.key",
               "present_value_names": "present.%d.value"}
    return {
        "model": {
            "type": "llama", "vocab_size": VOCAB, "context_length": 64,
            "bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0,
            "decoder": {
                "session_options": {"provider_options": []},
                "filename": "model.onnx", "head_size": VOCAB,
                "hidden_size": HEADS * VOCAB, "num_attention_heads": HEADS,
                "num_key_value_heads": 1, "num_hidden_layers": 1,
                "inputs": inputs, "outputs": outputs}},
        "search": {"max_length": 64, "do_sample": False, "num_beams": 1,
                   "past_present_share_buffer": share}}


def make_model(window, share):
    with tempfile.TemporaryDirectory() as folder:
        made = helper.make_model(graph(window), ir_version=9, opset_imports=[
            helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)])
        onnx.save(made, f"{folder}/model.onnx")
        path = pathlib.Path(folder, "genai_config.json")
        path.write_text(json.dumps(config(share)))
        return genai.Model(folder)


class Appended:
    """Appends all tokens by append_tokens. Subclasses decode as well. The
    engine refuses a batch that does not fit."""
    kvtwin = kvtwin.Description(
        name="append_tokens, rewind_to", kinds={"causal", "swa_mem"},
        can={"remove_tail", "refuse_full"})
    share = True  # past_present_share_buffer.

    def __init__(self, setup):
        kvtwin.check_memory(setup)
        if setup.capacity >= TOKENS:  # All tokens of a sequence differ.
            raise kvtwin.NotSupported
        self.setup = setup
        self.model = make_model(setup.window, self.share)
        parameters = genai.GeneratorParams(self.model)
        parameters.set_search_options(max_length=setup.capacity)
        self.generator = genai.Generator(self.model, parameters)
        self.tokens, self.rows, self.made = [], [], 0
        self.rewound = False

    def start_forward(self, positions, sequences):
        if self.generator.token_count() != positions[0]:
            raise ValueError(f"{self.generator.token_count()} tokens are "
                             f"reported, expected {positions[0]}")
        unused = [token for token in (3 + (self.made + i) % TOKENS
                                      for i in range(TOKENS))
                  if token not in self.tokens]
        batch = [unused[i % len(unused)] for i in range(len(positions))]
        try:
            self.feed(batch)
        except RuntimeError as error:
            if (positions[-1] < self.setup.capacity
                    or not any(text in str(error) for text in REFUSALS)):
                raise
            raise kvtwin.CacheFull from error
        self.made += len(batch)
        self.rewound = False
        self.tokens += batch
        self.rows += [{} for _ in batch]
        self.batch = len(batch)

    def feed(self, batch):
        self.generator.append_tokens(np.array(batch, np.int32))

    def put(self, layer, key, value):
        for rows, *pair in zip(self.rows[-self.batch:], key, value):
            rows[layer] = pair

    def get(self, layer):
        key, value = (np.array(x) for x in zip(*(r[layer] for r in self.rows)))
        count = len(self.tokens)
        mask = np.tri(self.batch, count, count - self.batch, dtype=bool)
        if self.setup.window is not None:
            mask &= ~np.tri(self.batch, count,
                            count - self.batch - self.setup.window - 1, dtype=bool)
        # get_logits shows only the last token of a batch.
        logits = self.generator.get_logits()[0, -1]
        mask[-1] = logits[self.tokens] > 0
        lost = 1 - logits[self.tokens].sum()
        if abs(lost) > 1e-5:
            raise ValueError(f"{lost:.2f} of the attention of the last token is "
                             "not on tokens of the sequence")
        return key, value, mask

    def remove(self, sequence, begin, end):
        self.generator.rewind_to(begin)
        self.rewound = True
        del self.tokens[begin:], self.rows[begin:]

    def can_resume(self, sequence, position):
        return position <= len(self.tokens)

    def generate(self, token):
        """A step of generate_next_token that chooses this token."""
        logits = np.zeros((1, 1, VOCAB), np.float32)
        logits[..., token] = 1
        self.generator.get_logits()
        self.generator.set_logits(logits)
        self.generator.generate_next_token()


class Generated(Appended):
    kvtwin = kvtwin.Description(
        name="a token alone by generate_next_token", kinds={"causal", "swa_mem"},
        can={"remove_tail", "refuse_full"})

    def feed(self, batch):
        if self.tokens and len(batch) == 1 and not self.rewound:
            self.generate(batch[0])
        else:
            super().feed(batch)


class Rewound(Generated):
    kvtwin = kvtwin.Description(
        name="the same, with get_logits right after rewind_to",
        kinds={"causal", "swa_mem"}, can={"remove_tail"})

    def remove(self, sequence, begin, end):
        super().remove(sequence, begin, end)
        self.rewound = False


class Turns(Appended):
    kvtwin = kvtwin.Description(
        name="the first token of a batch by generate_next_token, the others by "
             "append_tokens", kinds={"causal", "swa_mem"}, can={"remove_tail"})

    def feed(self, batch):
        if self.tokens and not self.rewound:
            self.generate(batch[0])
            batch = batch[1:]
        if batch:
            super().feed(batch)


class TurnsAsked(Turns):
    """As Turns, with get_logits before append_tokens, which computes the first token."""
    kvtwin = kvtwin.Description(
        name="the same, with get_logits before append_tokens",
        kinds={"causal", "swa_mem"}, can={"remove_tail"})

    def generate(self, token):
        super().generate(token)
        self.generator.get_logits()


class AppendedAlone(Appended):
    kvtwin = kvtwin.Description(
        name="append_tokens, rewind_to, past_present_share_buffer=false",
        kinds={"causal", "swa_mem"}, can={"remove_tail", "refuse_full"})
    share = False


class GeneratedAlone(Generated):
    kvtwin = kvtwin.Description(
        name="a token alone by generate_next_token, "
             "past_present_share_buffer=false", kinds={"causal", "swa_mem"},
        can={"remove_tail", "refuse_full"})
    share = False


if __name__ == "__main__":
    kvtwin.main([Appended, Generated, Rewound, Turns, TurnsAsked, AppendedAlone,
                 GeneratedAlone], list, "genai.md")
