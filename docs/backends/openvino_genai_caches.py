"""OpenVINO GenAI's continuous batching, by the tokens of a tiny model, against the same
model without a cache: docs/backends/openvino_genai.md."""

import json
import pathlib
import random
import sys
import tempfile

import numpy as np
import openvino
import openvino_genai as genai
import openvino_tokenizers
import tokenizers
import transformers
from histories import prompt_from
from openvino import opset6, opset13
from openvino.op import Parameter
from page import compare, say

VOCAB, EMBD, HEADS, DIM, LAYERS, LONGEST = 64, 64, 2, 32, 2, 256
BLOCK = 32  # The tokens of a block on CPUs.
EXACT = {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}


def constant(number, of=np.int64):
    return opset13.constant(np.array(number, of))


def heads(rows):
    return opset13.transpose(opset13.reshape(
        rows, constant([0, 0, HEADS, DIM]), True), constant([0, 2, 1, 3]))


def remembered(new, name, batch, beam, sinks):
    """Returns the earlier rows and the new rows, kept in a variable of the model."""
    shape = openvino.PartialShape([-1, HEADS, -1, DIM])
    empty = opset13.broadcast(constant(0, np.float32), opset13.concat(
        [batch, constant([HEADS]), constant([0]), constant([DIM])], 0))
    before = opset6.read_value(empty, name, openvino.Type.f32, shape)
    rows = opset13.concat([opset13.gather(before, beam, constant(0)), new], 2)
    sinks.append(opset6.assign(rows, name))
    return rows


def model():
    """A decoder of random weights with learned positions."""
    rng = np.random.default_rng(1)

    def weights(rows, columns, scale=0.3):
        return opset13.constant(
            (rng.standard_normal((rows, columns)) * scale).astype(np.float32))

    def parameter(name, of, shape):
        made = Parameter(of, openvino.PartialShape(shape))
        made.output(0).get_tensor().set_names({name})
        made.set_friendly_name(name)
        return made

    def length(of, axis):
        return opset13.gather(opset13.shape_of(of), constant(axis), constant(0))

    ids, mask, positions = (parameter(name, openvino.Type.i64, [-1, -1]) for name
                            in ("input_ids", "attention_mask", "position_ids"))
    beam = parameter("beam_idx", openvino.Type.i32, [-1])
    x = opset13.add(*(
        opset13.gather(weights(count, EMBD, 1), opset13.convert(index, "i32"),
                       constant(0))
        for count, index in ((VOCAB, ids), (LONGEST, positions))))
    total = length(mask, 1)
    first = opset13.subtract(total, length(ids, 1))
    seen = opset13.less_equal(
        opset13.unsqueeze(opset13.range(constant(0), total, constant(1), "i64"),
                          constant(0)),
        opset13.unsqueeze(opset13.range(first, total, constant(1), "i64"),
                          constant(1)))
    bias = opset13.select(opset13.unsqueeze(seen, constant([0, 1])),
                          constant(0, np.float32), constant(-1e9, np.float32))
    sinks = []
    for layer in range(LAYERS):
        query, key, value = (
            heads(opset13.matmul(x, weights(EMBD, HEADS * DIM), False, False))
            for _ in range(3))
        key, value = (
            remembered(new, f"past_key_values.{layer}.{name}present.{layer}.{name}",
                       length(ids, [0]), beam, sinks)
            for name, new in (("key", key), ("value", value)))
        out = opset13.scaled_dot_product_attention(query, key, value, bias)
        out = opset13.reshape(opset13.transpose(out, constant([0, 2, 1, 3])),
                              constant([0, 0, HEADS * DIM]), True)
        x = opset13.add(x, opset13.matmul(out, weights(HEADS * DIM, EMBD), False,
                                          False))
    logits = opset13.result(opset13.matmul(x, weights(EMBD, VOCAB), False, False))
    logits.output(0).get_tensor().set_names({"logits"})
    return openvino.Model([logits], sinks, [ids, mask, positions, beam], "tiny")


def save(folder):
    openvino.save_model(model(), folder / "openvino_model.xml",
                        compress_to_fp16=False)
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": EMBD,
        "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(
        {f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    made = openvino_tokenizers.convert_tokenizer(
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, unk_token="t0", eos_token="t1"),
        with_detokenizer=True)
    for name, part in zip(("tokenizer", "detokenizer"), made):
        openvino.save_model(part, folder / f"openvino_{name}.xml")


class Alone:
    """The model without a cache."""

    def __init__(self):
        compiled = openvino.Core().compile_model(
            model(), "CPU", EXACT)
        self.request = compiled.create_infer_request()
        self.known = {}

    def next_of(self, tokens):
        """Returns the next token, and how far its logit is above the second best."""
        key = tuple(tokens)
        if key not in self.known:
            self.request.reset_state()
            n = len(tokens)
            logits = self.request.infer({
                "input_ids": np.array([tokens]), "attention_mask": np.ones(
                    (1, n), np.int64), "position_ids": np.arange(n)[None],
                "beam_idx": np.zeros(1, np.int32)})[0][0, -1]
            second, best = np.argsort(logits)[-2:]
            self.known[key] = int(best), float(logits[best] - logits[second])
        return self.known[key]

    def wrong(self, prompt, made):
        """Returns what is wrong with the first token of `made` that is not the best, or
        None."""
        tokens = list(prompt)
        for i, token in enumerate(made):
            best, ahead = self.next_of(tokens)
            if token != best and ahead > 1e-3:
                return f"token {len(prompt) + i} is {token}, expected {best}"
            tokens.append(token)
        return None


def draw(rng):
    """Draws requests. Each has the request whose tokens it continues, how many of these
    tokens, how many more, the length of its answer, and the steps before the next
    request."""
    return [(rng.randrange(i + 1), rng.choice([0, 20, 31, 32, 33, 64, 70, 100]),
             rng.choice([1, 1, 2, 5, 32, 40]), rng.choice([1, 3, 10, 40]),
             rng.choice([0, 1, 2, 5, 200])) for i in range(rng.randint(2, 7))]


def played(folder, alone, requests, **options):
    """Serves these requests. Returns what is wrong, or None."""
    scheduler = genai.SchedulerConfig()
    for name, value in options.items():
        setattr(scheduler, name, value)
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", EXACT)
    handles, known = [], []

    def read():
        for number, (prompt, handle) in enumerate(handles):
            if handle.can_read():
                for output in handle.read().values():
                    known[number] += output.generated_ids

    for number, (source, kept, more, answer, steps) in enumerate(requests):
        prompt = prompt_from(known, source, kept, more, 3)
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = answer, True
        handles.append((prompt, pipeline.add_request(
            number, openvino.Tensor(np.array([prompt])), config)))
        known.append(list(prompt))
        for _ in range(steps):
            if pipeline.has_non_finished_requests():
                pipeline.step()
                read()
    for _ in range(2000):
        if not pipeline.has_non_finished_requests():
            break
        pipeline.step()
        read()
    else:
        return "2000 steps do not finish the requests"
    room = scheduler.num_kv_blocks * BLOCK
    fit = all(len(prompt) + request[3] <= room
              for (prompt, _), request in zip(handles, requests))
    for number, (prompt, handle) in enumerate(handles):
        made = known[number][len(prompt):]
        if reason := alone.wrong(prompt, made):
            return f"request {number}: {reason}"
        status, answer = handle.get_status(), requests[number][3]
        if status == genai.GenerationStatus.FINISHED:
            if len(made) != answer:
                return f"request {number} has {len(made)} tokens"
        elif fit:
            return f"all requests fit, and request {number} is {status.name}"
    return None


def judge(folder, alone, histories=60, **options):
    rng = random.Random(1)
    for _ in range(histories):
        requests = draw(rng)
        if not (reason := played(folder, alone, requests, **options)):
            continue
        i = 0
        while i < len(requests):
            less = requests[:i] + [
                (s - (s > i), *rest) for s, *rest in requests[i + 1:]]
            if again := less and played(folder, alone, less, **options):
                requests, reason, i = less, again, 0
            else:
                i += 1
        return [str(requests), reason]
    return ["right"]


CASES = {
    "no prefix caching": dict(enable_prefix_caching=False, num_kv_blocks=64),
    "prefix caching": dict(enable_prefix_caching=True, num_kv_blocks=64),
    "prefix caching, memory for 8 blocks": dict(
        enable_prefix_caching=True, num_kv_blocks=8),
    "no prefix caching, memory for 8 blocks": dict(
        enable_prefix_caching=False, num_kv_blocks=8),
    "no prefix caching, memory for 3 blocks, which some requests exceed": dict(
        enable_prefix_caching=False, num_kv_blocks=3),
    "prefix caching, prompts in pieces of 16 tokens": dict(
        enable_prefix_caching=True, num_kv_blocks=24, max_num_batched_tokens=16,
        dynamic_split_fuse=True),
    "prefix caching, whole prompts, two sequences at once": dict(
        enable_prefix_caching=True, num_kv_blocks=16, max_num_seqs=2,
        max_num_batched_tokens=256, dynamic_split_fuse=False),
}


if __name__ == "__main__":
    lines = []
    with tempfile.TemporaryDirectory() as made:
        save(pathlib.Path(made))
        shared = Alone()
        for name, options in CASES.items():
            lines += say(name, judge(made, shared, **options))
    compare(lines, "openvino_genai.md")
