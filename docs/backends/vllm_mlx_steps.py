"""vLLM-MLX's scheduler, step by step: random requests, and a model whose rows
are hashes (vllm_mlx_model.py). Scheduler and prefix caches are vLLM-MLX's,
batches and caches of layers are mlx-lm's."""

import dataclasses
import logging
import pathlib
import random
import tempfile

import mlx.core as mx
from hashes import mix
from histories import Wrong
from mlx_rows import DIMS, END
from mlx_steps import Limits, Requests
from vllm_mlx.request import Request, SamplingParams
from vllm_mlx.scheduler import Scheduler, SchedulerConfig
from vllm_mlx.ssd_cache import SSDCacheTier
from vllm_mlx_model import Model

logging.disable(logging.CRITICAL)


@dataclasses.dataclass(frozen=True)
class Setup(Limits):
    layers: tuple = ("full", "full")
    store: str = "memory"  # Or "entries", or "blocks".
    room: int = 100  # The rows, entries or blocks that are stored.
    window: int = 0
    bound: int = 0  # --max-kv-size.
    quantize: bool = False
    shortest: int = 1  # min_prefix_tokens.
    refresh: int = 4  # SNAPSHOT_REFRESH_TOKENS.
    block: int = 4
    part: int = 64  # The tokens of a prompt in a step.
    running: int = 3
    disk: bool = False  # --ssd-cache-dir.
    restarts: bool = False  # Whether the store is saved, and loaded again.
    longest: int = 30  # The most tokens of a prompt and its answer.


class Name(str):
    """The name of a request. Sets of names have the same order each time."""

    def __hash__(self):
        return mix(str(self))


class Tokenizer:
    eos_token_id, clean_up_tokenization_spaces = END, False

    @staticmethod
    def encode(text):
        raise NotImplementedError

    @staticmethod
    def decode(tokens):
        return "".join(chr(97 + token) for token in tokens)


class Engine(Requests):
    def __init__(self, setup):
        super().__init__(setup)
        self.folder = tempfile.TemporaryDirectory(prefix="vllm_mlx")
        self.start()

    def start(self):
        setup = self.setup
        self.model = Model(setup)
        config = SchedulerConfig(
            max_num_seqs=setup.running, prefill_batch_size=setup.running,
            completion_batch_size=setup.running, prefill_step_size=setup.part,
            prefix_cache_size=setup.room,
            use_memory_aware_cache=setup.store == "memory",
            cache_memory_mb=100, kv_cache_quantization=setup.quantize,
            kv_cache_min_quantize_tokens=0,
            use_paged_cache=setup.store == "blocks",
            paged_cache_block_size=setup.block, max_cache_blocks=setup.room,
            ssd_cache_dir=str(self.path("ssd")) if setup.disk else None,
            max_kv_size=setup.bound)
        self.scheduler = Scheduler(self.model, Tokenizer(), config)
        self.scheduler.SNAPSHOT_REFRESH_TOKENS = setup.refresh
        cache = self.scheduler.memory_aware_cache
        if cache is not None:
            cache._config = dataclasses.replace(
                cache._config, min_prefix_tokens=setup.shortest)
            cache._max_memory = setup.room * 4 * DIMS * 2 * len(setup.layers)

    def path(self, name):
        return pathlib.Path(self.folder.name) / name

    def ask(self, tokens, more, limit):
        """Asks a prompt, and more tokens that the bits of `more` give."""
        truth = self.truth(tokens, more, limit)
        name = Name(truth.name)
        self.running[name] = truth
        self.scheduler.add_request(Request(
            name, list(truth.prompt), SamplingParams(
                max_tokens=truth.limit, temperature=0.0)))

    def abort(self, which):
        if self.running:
            name = list(self.running)[which % len(self.running)]
            del self.running[name]
            self.scheduler.abort_request(name)

    def restart(self):
        """Stops the server after all requests, and starts it again with its
        entries, or with the entries of its disk tier."""
        self.drain()
        saved = not self.setup.disk and self.scheduler.save_cache_to_disk(
            str(self.path("saved")))
        self.scheduler.close_ssd_tier()
        self.start()
        if saved:
            self.scheduler.load_cache_from_disk(str(self.path("saved")))

    def step(self):
        said = self.scheduler.step()
        self.write()
        if self.model.wrong:
            raise Wrong(self.model.wrong[0])
        for output in said.outputs:
            if output.finish_reason == "error":
                raise Wrong(f"{output.request_id} ends with an error")
            if output.finished and output.request_id in self.running:
                self.compare(self.running.pop(output.request_id),
                             output.output_token_ids, True)

    def write(self):
        """Does the work of the thread that writes to the disk."""
        tier = self.scheduler._ssd_tier
        if tier:
            tier._spill_queue.put(None)
            tier._writer_loop()

    def drain(self):
        """Runs until all requests are answered."""
        for _ in range(40 * (1 + len(self.running))):
            if not self.scheduler.has_requests():
                break
            self.step()
        if self.running:
            raise Wrong(f"no answer: {next(iter(self.running))}")

    def close(self):
        self.scheduler.close_ssd_tier()
        self.folder.cleanup()

    def finish(self):
        """The store counts the memory of its entries when all are done."""
        self.drain()
        cache = self.scheduler.memory_aware_cache
        if cache is not None and cache._current_memory != sum(
                entry.memory_bytes for entry in cache._entries.values()):
            raise Wrong("the store counts other memory than that of its "
                        "entries")


def draw(seed, setup):
    """Draws a history: calls of Engine."""
    rng = random.Random(seed)
    if rng.random() < 0.5 or setup.disk:
        few = {"memory": 60, "entries": 3, "blocks": 20}[setup.store]
        few = 24 if setup.disk else few
        setup = dataclasses.replace(setup, room=few + rng.randrange(few))
    else:
        setup = dataclasses.replace(setup, room=1000)
    ops = []
    for _ in range(rng.randrange(4, 40)):
        kind = rng.random()
        if kind < 0.2:
            ops.append(("add", rng.randrange(6),
                        rng.choice([0, 99, rng.randrange(1, 24)]),
                        rng.choice([0, rng.randrange(64)]),
                        rng.choice([1, 24, rng.randrange(1, 12)])))
        elif kind < 0.28:
            ops.append(("again", rng.randrange(6), rng.randrange(1, 12)))
        elif kind < 0.35:
            ops.append(("turn", rng.randrange(6),
                        rng.choice([0, rng.randrange(64)]),
                        rng.randrange(1, 12)))
        elif kind < 0.42:
            ops.append(("drain",))
        elif kind < (0.84 if setup.restarts else 0.94):
            ops.append(("step",))
        elif kind < 0.97 and setup.restarts:
            ops.append(("restart",))
        else:
            ops.append(("abort", rng.randrange(6)))
    return setup, ops


def judge(setup, ops):
    """Runs a history, and returns what was wrong, or None."""
    return Engine(setup).play(ops)


mx.set_default_device(mx.cpu)
SSDCacheTier.start_writer = lambda tier: None  # Engine.write does its work.
ROOM = "room"  # The size that a history draws and shows.
WINDOW = {"layers": ("full", "window"), "window": 12}
STATES = {"layers": ("full", "state")}
LIST = {"layers": ("list", "list")}
DISK = {"disk": True, "restarts": True, "shortest": 6}
SETUPS = {
    "Full": Setup(),
    "Parts": Setup(part=5),
    "Quantized": Setup(quantize=True),
    "Window": Setup(**WINDOW),
    "Bound": Setup(bound=12),
    "States": Setup(**STATES),
    "StatesFirst": Setup(layers=("state", "full")),
    "StatesAlone": Setup(layers=("state",)),
    "StatesWindow": Setup(layers=("full", "state", "window"), window=12),
    "List": Setup(**LIST),
    "Restarts": Setup(restarts=True),
    "QuantizedRestarts": Setup(restarts=True, quantize=True),
    "WindowRestarts": Setup(restarts=True, **WINDOW),
    "StatesRestarts": Setup(restarts=True, **STATES),
    "Disk": Setup(**DISK),
    "QuantizedDisk": Setup(quantize=True, **DISK),
    "WindowDisk": Setup(**WINDOW, **DISK),
    "StatesDisk": Setup(**STATES, **DISK),
    "ListDisk": Setup(**LIST, **DISK),
    "Entries": Setup(store="entries"),
    "EntriesWindow": Setup(store="entries", **WINDOW),
    "EntriesStates": Setup(store="entries", **STATES),
    "Blocks": Setup(store="blocks"),
    "BlocksWindow": Setup(store="blocks", **WINDOW),
    "BlocksList": Setup(store="blocks", **LIST),
}
