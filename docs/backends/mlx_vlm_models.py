"""Whole models of mlx-vlm, small and of random weights, in the batches of its
server: each answer must be the answer that a prompt gets alone."""

import importlib
import inspect
import logging

import mlx.core as mx
from mlx_numbers import NUMBERS, randomize
from mlx_vlm import apc
from mlx_vlm.generate.ar import BatchGenerator
from mlx_vlm.models import cache
from mlx_vlm.utils import StoppingCriteria
from mlx_vlm_model import embedded

logging.disable(logging.CRITICAL)
MORE = {  # Numbers that a model has of its own.
    "gemma4": {"sliding_window": 8, "num_hidden_layers": 4,
               "layer_types": ["sliding_attention", "full_attention"] * 2,
               "num_kv_shared_layers": 0, "global_head_dim": 16,
               "vocab_size_per_layer_input": 64,
               "hidden_size_per_layer_input": 0},
    "llama4": {"attention_chunk_size": 8, "num_hidden_layers": 4,
               "intermediate_size_mlp": 32, "num_local_experts": 2,
               "use_qk_norm": True, "interleave_moe_layer_step": 2,
               "no_rope_layers": [1, 1, 1, 0], "rope_scaling": None,
               "attn_temperature_tuning": False, "hidden_act": "silu"},
    "qwen2_5_vl": {"rope_scaling": {"type": "mrope",
                                    "mrope_section": [2, 3, 3]}},
}
VISION = {"llama4": {"model_type": "llama4_vision_model"}}
NAMES = ["llama", "qwen2", "qwen3", "afmoe", "deepseek_v3", "glm4_moe_lite",
         "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_next", "gemma4", "llama4",
         "mamba", "mamba2", "jamba", "falcon_h1", "nemotron_h", "lfm2", "rwkv7",
         "recurrent_gemma", "baichuan_m1", "bailing_moe_linear", "zaya1_vl",
         "longcat_flash_ngram", "internlm2", "internlm3"]


class Processor:
    def __init__(self):
        self.stopping_criteria = StoppingCriteria([10 ** 6], self)


def made(name):
    """Makes a model. The weights of its vision tower are never used."""
    module = importlib.import_module(f"mlx_vlm.models.{name}")
    numbers = {**NUMBERS, "model_type": name, **MORE.get(name, {})}
    if hasattr(module, "TextConfig"):
        numbers = {"model_type": name,
                   "text_config": module.TextConfig.from_dict(numbers),
                   "vision_config": module.VisionConfig(
                       **known(module.VisionConfig, VISION.get(name, {})))}
    config = module.ModelConfig(**known(module.ModelConfig, numbers))
    model = module.Model(config)
    randomize(model.language_model)
    return model.eval()


def known(config, numbers):
    """Returns the numbers that a configuration knows, and 1 for those that it
    needs."""
    fields = inspect.signature(config).parameters
    return {name: numbers.get(name, 1) for name, field in fields.items()
            if name in numbers or field.default is field.empty}


def answers(model, prompts, together=4, part=64, manager=None, wait=0):
    """Returns an answer of eight tokens to each prompt. The second and the others
    come after `wait` steps."""
    batch = BatchGenerator(
        model.language_model, Processor(), apc_manager=manager,
        completion_batch_size=8, prefill_batch_size=together,
        prefill_step_size=part, compute_logprobs=False, greedy_sampling=True)
    said, steps = {}, 0
    while len(said) < len(prompts) or batch.has_work:
        if len(said) < len(prompts) and (not said or steps >= wait):
            said[insert(batch, model, prompts[len(said)])] = []
            if wait == 0 and len(said) < len(prompts):
                continue
        for response in batch.next()[1]:
            said[response.uid].append(response.token)
        steps += 1
    return list(said.values())


def insert(batch, model, prompt):
    """Adds a request, as the server does."""
    kwargs = embedded(model, mx.array([prompt]))
    uid, = batch.insert([prompt], [8], [{**kwargs, "_apc_semantic_hash": 0}])
    return uid


def whole(model, prompt, answer):
    """Returns the token after each part of an answer, from one pass over it all."""
    tokens = mx.array([prompt + answer])
    said = model.language_model(
        tokens, cache=cache.make_prompt_cache(model.language_model),
        **embedded(model, tokens))
    return mx.argmax(said.logits[0], -1).tolist()[len(prompt) - 1:-1]


def manager():
    store = apc.APCManager(100, 4, overrides={
        "checkpoint_entries": 50, "checkpoint_interval_tokens": 4,
        "memory_reserve_gb": 0, "memory_max_gb": 1})
    store.exact_cache_min_tokens = 2
    return store


def cases(model):
    """Yields the name of a case, and a function that returns the answers and the
    right answers."""
    prompts = [[3 + (7 * i * i + 5 * i + 11 * s) % 50 for i in range(count)]
               for s, count in enumerate((5, 9, 12, 7))]
    alone = [answers(model, [prompt], 1)[0] for prompt in prompts]
    yield "alone", lambda: (alone, [whole(model, *pair)
                                    for pair in zip(prompts, alone)])
    yield "together", lambda: (answers(model, prompts), alone)
    yield "in parts", lambda: (answers(model, prompts, part=3), alone)
    yield "joining", lambda: (answers(model, prompts, 1, wait=2), alone)
    turns = [prompt + answer[:3] + [5, 6]
             for prompt, answer in zip(prompts, alone)]

    def again(together, part):
        store = manager()
        answers(model, prompts, together, part, store)
        return (answers(model, turns, together, part, store),
                [answers(model, [turn], 1)[0] for turn in turns])

    yield "prefix", lambda: again(1, 64)
    yield "prefixes together", lambda: again(4, 3)


def judged(model):
    """Yields the cases that are wrong, or that all are right."""
    right = True
    for name, case in cases(model):
        try:
            said, expected = case()
            wrong = "another answer" if said != expected else None
        except (ValueError, TypeError, RuntimeError) as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            right = False
            yield f"{name}: {wrong}"
    if right:
        yield "right"
