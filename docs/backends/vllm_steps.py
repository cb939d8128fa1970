"""vLLM's Scheduler and KVCacheManager, step by step: random requests, and a worker
that stands in for the model's. A row of the worker is a hash of its tokens and of what
else it depends on, so that each row that a step needs can be checked. kvtwin.vllm, the
audit of a live vLLM, runs beside it."""

import copy
import dataclasses
import json
import math
import os
import pathlib
import random
import tempfile
import types

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

import kvtwin.vllm
import torch
from hashes import mix
from histories import Wrong, raised
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (FullAttentionSpec, KVCacheConfig,
                                        KVCacheGroupSpec, MambaSpec,
                                        SlidingWindowSpec)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

MODEL = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=32,
    intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, head_dim=32, vocab_size=64, rms_norm_eps=1e-5,
    max_position_embeddings=64, hidden_act="silu", torch_dtype="float32")


@dataclasses.dataclass(frozen=True)
class Setup:
    """Groups of layers as "all:4", "window:4:6", "state:4" or "states:4", which is
    Mamba in the mode align or all: the kind, the tokens of a block, and the window."""
    groups: tuple
    blocks: int = 12
    budget: int = 8  # The most tokens of a step.
    running: int = 4
    hash_block: int = 0  # 0: vLLM chooses.
    drafts: int = 0
    policy: str = "fcfs"
    chunk: int = 0  # The most tokens of a prompt in a step. 0: unlimited.
    longest: int = 40  # The most tokens of a prompt and its answer.


def spec_of(text):
    kind, size, *window = text.split(":")
    size = int(size)
    if kind in ("state", "states"):
        return MambaSpec(block_size=size, shapes=((2,),), dtypes=(torch.int64,),
                         mamba_cache_mode="align" if kind == "state" else "all")
    common = dict(block_size=size, num_kv_heads=1, head_size=1,
                  dtype=torch.float32)
    if kind == "window":
        return SlidingWindowSpec(**common, sliding_window=int(window[0]))
    return FullAttentionSpec(**common)


CONFIGS = {}


def config_of(setup, specs, audit):
    """vLLM's configuration; its model is never loaded."""
    state = next((spec.mamba_cache_mode for spec in specs
                  if isinstance(spec, MambaSpec)), None)
    key = setup.budget, setup.running, setup.drafts, setup.policy, state
    if key not in CONFIGS:
        home = pathlib.Path(tempfile.mkdtemp())
        (home / "config.json").write_text(json.dumps(MODEL))
        CONFIGS[key] = EngineArgs(
            model=str(home), skip_tokenizer_init=True, dtype="float32",
            max_model_len=64, max_num_seqs=setup.running,
            max_num_batched_tokens=max(setup.budget, setup.running),
            enable_prefix_caching=True, async_scheduling=False,
            scheduling_policy=setup.policy,
            speculative_config=dict(
                method="ngram", num_speculative_tokens=setup.drafts,
                prompt_lookup_max=2, prompt_lookup_min=1)
            if setup.drafts else None,
            kv_transfer_config=dict(
                kv_connector="KvtwinAudit", kv_role="kv_both",
                kv_connector_module_path="kvtwin.vllm",
                kv_connector_extra_config={"every": 1}),
        ).create_engine_config()
    config = copy.copy(CONFIGS[key])
    if not audit:
        config.kv_transfer_config = None
    config.cache_config = copy.copy(config.cache_config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.max_num_scheduled_tokens = setup.budget
    config.scheduler_config.long_prefill_token_threshold = setup.chunk
    config.cache_config.num_gpu_blocks = setup.blocks + 1
    config.cache_config.block_size = math.lcm(*(spec.block_size for spec in specs))
    if state:
        config.cache_config.mamba_cache_mode = state
    return config


def chain(request, drafts=()):
    """Returns hashes of the prefixes of a request, by length from 0 on."""
    lora = request.lora_request
    out = [mix(request.cache_salt or "", lora.lora_name if lora else "")]
    for token in [*request.all_token_ids, *drafts]:
        out.append(mix(out[-1], token))
    return out


class Engine:
    """A scheduler and a worker with rows."""

    def __init__(self, setup, audit=True):
        self.setup = setup
        specs = [spec_of(group) for group in setup.groups]
        groups = [KVCacheGroupSpec([f"{g}.layer"], spec)
                  for g, spec in enumerate(specs)]
        self.kv = KVCacheConfig(setup.blocks + 1, [], groups)
        config = config_of(setup, specs, audit)
        block, unit = kv_cache_utils.resolve_kv_cache_block_sizes(
            self.kv, config)
        unit = setup.hash_block or unit
        self.hasher = kv_cache_utils.get_request_block_hasher(unit, sha256)
        kv_cache_utils.init_none_hash(sha256)
        config.cache_config.hash_block_size = unit
        self.scheduler = Scheduler(config, self.kv, types.SimpleNamespace(
                                       accept_tokens=lambda *_: True,
                                       validate_tokens=lambda _, t: t),
                                   block_size=block, hash_block_size=unit)
        self.specs = specs
        #: By group: rows, or states of blocks. The last number marks the position.
        self.rows = [
            torch.zeros((setup.blocks + 1, 2), dtype=torch.int64)
            if isinstance(spec, MambaSpec) else
            torch.zeros((setup.blocks + 1, spec.block_size, 2),
                        dtype=torch.int64) for spec in specs]
        self.tables = {}  # By request: a list of blocks for each group.
        self.made = 0
        self.asked = []  # The prompts of all requests.
        self.audit = None
        if audit:
            kvtwin.vllm.findings.clear()
            self.audit = kvtwin.vllm.KvtwinAudit(
                config, KVConnectorRole.WORKER, self.kv)
            self.audit.register_kv_caches(
                {f"{g}.layer": rows for g, rows in enumerate(self.rows)})

    def add(self, like, cut, more, key, priority, limit):
        """Adds a request that begins like an earlier request."""
        tokens = self.asked[like % len(self.asked)][:cut] if self.asked else []
        tokens = (tokens + [1 + (more >> i) % 2 for i in range(1 + more % 7)])[
            :self.setup.longest - limit]
        self.ask(tokens, key, priority, limit)

    def ask(self, tokens, key=0, priority=0, limit=4):
        """Adds a request with these tokens."""
        self.asked.append(tokens)
        self.made += 1
        self.scheduler.add_request(Request(
            str(self.made), tokens,
            SamplingParams(max_tokens=max(1, limit), ignore_eos=True), None,
            arrival_time=self.made, priority=priority,
            cache_salt=[None, "a", None][key % 3],
            lora_request=LoRARequest("a", 1, "a") if key % 3 == 2 else None,
            block_hasher=self.hasher))

    def abort(self, which):
        names = list(self.scheduler.requests)
        if names:
            self.scheduler.finish_requests(
                names[which % len(names)], RequestStatus.FINISHED_ABORTED)

    def reset(self):
        self.scheduler.reset_prefix_cache()

    def step(self):
        out = self.scheduler.schedule()
        if self.audit:
            self.audit.handle_preemptions(out.kv_connector_metadata)
        self.follow(out)
        if self.audit:
            self.audit.bind_connector_metadata(out.kv_connector_metadata)
        sampled = self.run(out)
        if self.audit:
            self.audit.wait_for_save()
            self.audit.clear_connector_metadata()
        names = list(out.num_scheduled_tokens)
        self.scheduler.update_from_output(out, ModelRunnerOutput(
            names, {name: i for i, name in enumerate(names)}, sampled))
        if self.setup.drafts:
            self.draft()

    def draft(self):
        names, drafts = [], []
        for name, request in self.scheduler.requests.items():
            if request.status == RequestStatus.RUNNING:
                names.append(name)
                drafts.append([mix(len(request.all_token_ids), name, i) % 3
                               for i in range(self.setup.drafts)])
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def follow(self, out):
        """Block tables, and copies of blocks, as in vLLM's model runners."""
        for new in out.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = out.scheduled_cached_reqs
        for name, ids in zip(cached.req_ids, cached.new_block_ids):
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(group) for group in ids]
            elif ids is not None:
                for table, more in zip(self.tables[name], ids):
                    table.extend(more)
        for pair in out.kv_cache_block_copies or ():
            for rows in self.rows:
                rows[pair.dst_block_id] = rows[pair.src_block_id]

    def run(self, out):
        """Computes the rows of a step, and checks those that it reads."""
        plans = []
        for name, count in out.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            drafts = out.scheduled_spec_decode_tokens.get(name, [])
            done = request.num_computed_tokens - count
            plans.append((request, done, count, drafts, chain(request, drafts)))
        for g, spec in enumerate(self.specs):
            if isinstance(spec, MambaSpec):
                self.run_states(g, spec, plans)
            else:
                self.run_rows(g, spec, plans)
        return [self.sample(*plan[:4]) for plan in plans]

    def run_states(self, g, spec, plans):
        size = spec.block_size
        # A step reads the states of all requests before it writes any state.
        for request, done, _, _, expected in plans:
            if done:
                self.read(request, g, done - 1, (done - 1) // size, None, expected)
        for request, done, count, _, expected in plans:
            last = (done + count - 1) // size
            first = done // size if spec.mamba_cache_mode == "all" else last
            for i in range(first, last + 1):
                end = min(done + count, (i + 1) * size)
                self.rows[g][self.block(request, g, i)] = torch.tensor(
                    [expected[end], end - 1])

    def run_rows(self, g, spec, plans):
        # In a layer, all rows of a step are written before they are read.
        for request, done, count, _, expected in plans:
            for p in range(done, done + count):
                block = self.block(request, g, p // spec.block_size)
                self.rows[g][block, p % spec.block_size] = torch.tensor(
                    [expected[p + 1], p])
        window = getattr(spec, "sliding_window", None)
        for request, done, count, _, expected in plans:
            first = max(0, done - window + 1) if window else 0
            for p in range(first, done + count):
                self.read(request, g, p, p // spec.block_size,
                          p % spec.block_size, expected)

    def block(self, request, g, index):
        table = self.tables[request.request_id][g]
        if index >= len(table) or table[index] == 0:
            raise Wrong(f"request {request.request_id} has no block {index} in "
                        f"group {g}")
        return table[index]

    def read(self, request, g, position, index, slot, expected):
        block = self.block(request, g, index)
        row = self.rows[g][block] if slot is None else self.rows[g][block, slot]
        if row.tolist() != [expected[position + 1], position]:
            raise Wrong(f"request {request.request_id}, group {g}, position "
                        f"{position}: block {block} has another row")

    def sample(self, request, done, count, drafts):
        if done + count - len(drafts) < len(request.all_token_ids):
            return []  # A part of a prompt.
        right = mix(done, request.request_id) % (len(drafts) + 1)
        seed = mix(len(request.all_token_ids), request.request_id, 7)
        return drafts[:right] + [1 + seed % 2]


def add_of(rng):
    return ("add", rng.randrange(8), rng.randrange(1, 30), rng.randrange(64),
            rng.choice([0, 0, 0, 0, 1, 2]), rng.randrange(3),
            rng.randrange(1, 12))


def draw(seed, setup):
    """Draws a history: calls of Engine."""
    rng = random.Random(seed)
    if setup.chunk:
        return draw_long(rng, setup)
    ops = []
    for _ in range(rng.randrange(4, 40)):
        kind = rng.random()
        if kind < 0.35:
            ops.append(add_of(rng))
        elif kind < 0.9:
            ops.append(("step",))
        elif kind < 0.97:
            ops.append(("abort", rng.randrange(4)))
        else:
            ops.append(("reset",))
    return setup, ops + [("step",)] * 12


def draw_long(rng, setup):
    """Draws a history with long prompts of lower priority, whose parts leave room for
    short prompts, in little memory."""
    setup = dataclasses.replace(setup, blocks=setup.blocks + rng.randrange(5))
    ops = []
    for _ in range(rng.randrange(1, 4)):
        first, count = rng.randrange(1, 40), rng.randrange(8, 18)
        ops.append(("ask", list(range(first, first + count)), 0, 1, 2))
        for _ in range(rng.randrange(1, 4)):
            ops.append(("step",))
            if rng.random() < 0.6:
                ops.append(("add", 99, 0, rng.randrange(64), 0, 0,
                            rng.randrange(1, 8)))
    return setup, ops + [("step",)] * 15


def judge(setup, ops, audit=True):
    """Runs a history. Returns the errors of the worker and of the audit."""
    engine = Engine(setup, audit)
    said = None
    try:
        for name, *numbers in ops:
            getattr(engine, name)(*numbers)
    except Wrong as wrong:
        said = str(wrong)
    except (AssertionError, ValueError, IndexError, KeyError) as error:
        said = raised(error)
    return said, list(kvtwin.vllm.findings) if audit else []


SETUPS = {
    "Full": Setup(("all:4",)),
    "Window": Setup(("window:4:6",)),
    "FullWindow": Setup(("all:4", "window:4:6"), blocks=20),
    "FullWindows": Setup(("all:4", "window:2:5"), blocks=24),
    "FullState": Setup(("all:4", "state:4"), blocks=20),
    "FullStateFine": Setup(("all:4", "state:4"), blocks=20, hash_block=2),
    "Drafts": Setup(("all:4",), drafts=3),
    "DraftsWindow": Setup(("all:4", "window:4:6"), blocks=20, drafts=3),
    "Short": Setup(("all:2",), blocks=8, longest=14),
    "ShortWindow": Setup(("all:2", "window:2:3"), blocks=14, longest=12),
    "ShortState": Setup(("all:2", "state:2"), blocks=12, longest=14),
    "ShortFine": Setup(("all:4", "state:4"), blocks=9, longest=14,
                       hash_block=2),
    "ShortDrafts": Setup(("all:2",), blocks=10, longest=14, drafts=2),
    "Priority": Setup(("all:2",), blocks=8, longest=14, policy="priority"),
    "PriorityWindow": Setup(("all:2", "window:2:3"), blocks=14, longest=12,
                            policy="priority"),
    "PriorityChunk": Setup(("all:2",), blocks=8, longest=14, chunk=4,
                           policy="priority"),
    "PriorityState": Setup(("all:2", "state:2"), blocks=12, longest=14,
                           policy="priority"),
    "PriorityChunkState": Setup(("all:2", "state:2"), blocks=10, longest=14,
                                chunk=4, policy="priority"),
    "ChunkState": Setup(("all:2", "state:2"), blocks=10, longest=14, chunk=4),
    "FullStates": Setup(("all:4", "states:4"), blocks=24),
    "ShortStates": Setup(("all:2", "states:2"), blocks=14, longest=14),
    "PriorityStates": Setup(("all:2", "states:2"), blocks=14, longest=14,
                            policy="priority"),
    "ChunkStates": Setup(("all:2", "states:2"), blocks=16, longest=14, chunk=4),
}

# A request that is scheduled, and then preempted in the same step.
PREEMPTED = (
    Setup(("all:2",), blocks=10, chunk=4, policy="priority"),
    [("ask", list(range(1, 17)), 0, 1, 2), ("step",),
     ("ask", [20, 21, 22, 23], 0, 0, 2), *[("step",)] * 4])
