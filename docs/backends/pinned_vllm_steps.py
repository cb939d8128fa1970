"""vLLM's KVCacheManager, step by step, for pinned.py: blocks with the state of a
Mamba layer, in the mode "all". The manager plans a step; then its states are computed
here, all of them from states of earlier steps."""

import functools
import importlib
import random
import sys
import time
import types
from unittest import mock

from pinned import without_init
from pinned_vllm import StandIns

REAL = ("vllm.v1.core", "vllm.v1.kv_cache_interface", "vllm.utils.math_utils",
        "vllm.v1.kv_cache_spec_registry")
SIZE, BLOCKS = 2, 12
HISTORIES = 400


class Rest(StandIns):
    """All modules of vLLM but those under test."""

    def find_spec(self, name, path, target=None):
        if not name.startswith(REAL):
            return super().find_spec(name, path, target)


@functools.cache
def load():
    without_init("vllm", "vllm.v1", "vllm.utils")
    sys.meta_path.insert(0, Rest())
    sys.modules["vllm.utils.torch_utils"] = mock.MagicMock()
    names = "kv_cache_utils", "kv_cache_manager"
    utils, manager = (importlib.import_module(f"vllm.v1.core.{name}")
                      for name in names)
    utils.NONE_HASH = b"none"
    return utils, manager, importlib.import_module("vllm.v1.kv_cache_interface")


def chain(tokens, end):
    return hash(tuple(tokens[:end]))


class Engine:
    def __init__(self):
        utils, manager, interface = load()
        spec = interface.MambaSpec(block_size=SIZE, shapes=((1,),),
                                   dtypes=(None,), mamba_cache_mode="all")
        group = interface.KVCacheGroupSpec(["layer"], spec)
        self.manager = manager.KVCacheManager(
            interface.KVCacheConfig(BLOCKS, [], [group]), max_model_len=64,
            hash_block_size=SIZE)
        self.hasher = utils.get_request_block_hasher(
            SIZE, lambda parts: repr(parts).encode())
        self.waiting, self.running = [], []
        self.states = {}  # By block.
        self.made = 0

    def ask(self, *tokens):
        self.made += 1
        request = types.SimpleNamespace(
            request_id=str(self.made), all_token_ids=list(tokens),
            num_tokens=len(tokens), num_prompt_tokens=len(tokens),
            block_hashes=[], cache_salt=None, mm_features=[], lora_request=None,
            prompt_embeds=None, num_computed_tokens=0, num_preemptions=0,
            skip_reading_prefix_cache=False)
        request.block_hashes = self.hasher(request)
        self.waiting.append(request)

    def end(self):
        """Ends the oldest request."""
        if self.running:
            self.manager.free(self.running.pop(0))

    def step(self):
        """Computes all waiting prompts. Returns what is wrong, or None."""
        if hasattr(self.manager, "new_step_starts"):
            self.manager.new_step_starts()
        planned = []
        while self.waiting:
            request = self.waiting[0]
            blocks, found = self.manager.get_computed_blocks(request)[:2]
            if self.manager.allocate_slots(
                    request, request.num_tokens - found, found, blocks) is None:
                break
            planned.append((self.waiting.pop(0), found))
        tables = [self.manager.get_block_ids(request.request_id)[0]
                  for request, _ in planned]
        for (request, found), table in zip(planned, tables):
            expected = chain(request.all_token_ids, found)
            if found and self.states.get(table[found // SIZE - 1]) != expected:
                return (f"request {request.request_id} continues from a state "
                        f"after {found} tokens that is not there")
        for (request, found), table in zip(planned, tables):
            for i in range(found // SIZE, len(table)):
                end = min((i + 1) * SIZE, request.num_tokens)
                self.states[table[i]] = chain(request.all_token_ids, end)
            request.num_computed_tokens = request.num_tokens
            self.running.append(request)


def run(history):
    engine = Engine()
    for call in history:
        wrong = getattr(engine, call[0])(*call[1:])
        if wrong:
            return wrong


def draw(rng):
    history = []
    for _ in range(rng.randrange(2, 16)):
        name = rng.choice(["ask", "ask", "step", "end"])
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        history.append((name, *(tokens if name == "ask" else ())))
    return [*history, ("step",)]


def shorter(history):
    for i, call in enumerate(history):
        yield history[:i] + history[i + 1:]
        if len(call) > 2:
            yield [*history[:i], call[:-1], *history[i + 1:]]
        for j, token in enumerate(call[1:], 1):
            if token:
                yield [*history[:i], (*call[:j], 0, *call[j + 1:]),
                       *history[i + 1:]]


def judge(line):
    """As pinned.judge_caches; with a history, returns what is wrong with it."""
    if line:
        calls = [call.split() for call in line.split(" | ")]
        return {"reason": run([(name, *map(int, rest))
                               for name, *rest in calls])}
    load()
    rng, start = random.Random(1), time.time()
    for count in range(1, HISTORIES + 1):
        history = draw(rng)
        if not run(history):
            continue
        while less := next(filter(run, shorter(history)), None):
            history = less
        return {"histories": count, "seconds": round(time.time() - start, 2),
                "history": " | ".join(" ".join(map(str, call))
                                      for call in history),
                "reason": run(history)}
    return {"histories": HISTORIES, "seconds": round(time.time() - start, 2)}
