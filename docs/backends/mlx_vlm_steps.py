"""mlx-vlm's batches and prefix caches, step by step: random requests, and a model
whose rows are hashes (mlx_vlm_model.py)."""

import dataclasses
import logging
import pathlib
import random
import tempfile

import mlx.core as mx
from histories import Wrong
from mlx_rows import END
from mlx_steps import Limits, Requests
from mlx_vlm import apc
from mlx_vlm.generate import dispatch
from mlx_vlm.generate.ar import BatchGenerator
from mlx_vlm.generate.common import PromptCacheState
from mlx_vlm.utils import StoppingCriteria
from mlx_vlm_model import IMAGE, IMAGES, Mixed, Model, embedded

logging.disable(logging.CRITICAL)


@dataclasses.dataclass(frozen=True)
class Setup(Limits):
    layers: tuple = ("full", "full")
    stream: bool = False  # stream_generate, one request after another.
    chat: bool = False  # prompt_cache_state, for stream_generate.
    store: bool = True  # Whether there is an APCManager.
    room: int = 100  # The blocks or snapshots that are stored.
    window: int = 0
    bound: int = 0  # max_kv_size, for stream_generate.
    wide: int = 1  # How many times wider than a row of K a row of V is.
    quantize: bool = False
    shortest: int = 4  # APC_EXACT_MIN_TOKENS.
    interval: int = 4  # APC_CHECKPOINT_INTERVAL_TOKENS.
    block: int = 4
    whole: int = 0  # APC_LAYER_MAJOR_MEMORY_MIN_TOKENS.
    part: int = 64  # The tokens of a prompt in a step.
    running: int = 3
    together: int = 2  # The prompts that are prefilled together.
    images: bool = False
    disk: bool = False
    longest: int = 30  # The most tokens of a prompt and its answer.

    @property
    def keep(self):
        """The first tokens that max_kv_size keeps."""
        return 4 if self.bound else 0

    @property
    def snapshots(self):
        """Whether the store has snapshots of whole caches."""
        return set(self.layers) != {"full"}


class Detokenizer:
    last_segment = ""

    def reset(self):
        pass

    def add_token(self, token, **kwargs):
        pass

    def finalize(self):
        pass


class Processor:
    """Stands for the tokenizer and the detokenizer."""

    def __init__(self):
        self.stopping_criteria = StoppingCriteria([END], self)
        self.detokenizer = Detokenizer()


class Engine(Requests):
    def __init__(self, setup):
        super().__init__(setup)
        self.model = (Mixed if setup.snapshots else Model)(setup)
        self.processor = Processor()
        self.batch, self.manager = None, None
        self.folder = tempfile.TemporaryDirectory(prefix="mlx_vlm")
        self.chat = PromptCacheState() if setup.chat else None
        self.start()

    def start(self):
        """Makes the store, as the server does when it loads a model."""
        setup = self.setup
        if not setup.store:
            return
        disk = None
        if setup.disk:
            disk = apc.DiskBlockStore(
                pathlib.Path(self.folder.name), max_bytes=setup.room << 12,
                overrides={"disk_queue_max_gb": 0, "disk_shard_max_blocks": 2})
        self.manager = apc.APCManager(
            setup.room, setup.block, disk,
            overrides={"checkpoint_entries": setup.room,
                       "checkpoint_interval_tokens": setup.interval,
                       "memory_reserve_gb": 0, "memory_max_gb": 1})
        self.manager.exact_cache_min_tokens = setup.shortest
        self.manager._layer_major_memory_min_tokens = setup.whole

    def look(self, which, image, limit):
        """Asks an earlier prompt again, with another image and another end."""
        if self.asked:
            values = self.asked[which % len(self.asked)].prompt
            self.ask([IMAGE + IMAGES * image if value > IMAGES else value
                      for value in values] + [3], 0, limit=limit)

    def ask(self, values, more, image=0, limit=1):
        """Asks a prompt, with an image, and more tokens that the bits of `more`
        give."""
        if image and self.setup.images:
            values = values + [IMAGE + IMAGES * image] * 3
        truth = self.truth(values, more, limit)
        truth.said = []
        tokens = mx.array([[value % IMAGES for value in truth.prompt]])
        images = [value // IMAGES for value in truth.prompt if value >= IMAGES]
        pixels = mx.array(images) if images else None
        if self.setup.stream:
            self.stream(truth, tokens, pixels)
        else:
            self.insert(truth, tokens, pixels)

    def insert(self, truth, tokens, pixels):
        """Adds a request, as the thread of the server does."""
        if self.batch is not None and not self.batch.has_work:
            self.batch.close()
            self.batch = None
        if self.batch is None:
            self.batch = BatchGenerator(
                self.model, self.processor, apc_manager=self.manager,
                completion_batch_size=self.setup.running,
                prefill_batch_size=self.setup.together,
                prefill_step_size=self.setup.part, compute_logprobs=False,
                kv_bits=8 if self.setup.quantize else None,
                greedy_sampling=True)
        kwargs = embedded(self.model, tokens, pixels)
        kwargs["_apc_semantic_hash"] = apc.semantic_extra_hash(
            image_hash=apc.hash_image_payload(pixel_values=pixels))
        uid, = self.batch.insert(tokens.tolist(), [truth.limit], [kwargs])
        self.running[uid] = truth

    def stream(self, truth, tokens, pixels):
        """Starts an answer of stream_generate, and ends the one before."""
        self.abort(0)
        options = ({"kv_bits": 8, "quantized_kv_start": 8}
                   if self.setup.quantize else {})
        self.running[0] = truth
        self.answer = dispatch.stream_generate(
            self.model, self.processor, "", input_ids=tokens,
            pixel_values=pixels, max_tokens=truth.limit, temperature=0,
            max_kv_size=self.setup.bound or None,
            prefill_step_size=self.setup.part, apc_manager=self.manager,
            prompt_cache_state=self.chat, **options)

    def abort(self, which):
        if self.running:
            uid = list(self.running)[which % len(self.running)]
            del self.running[uid]
            if self.setup.stream:
                self.answer.close()
            else:
                self.batch.remove(uid)

    def reset(self):
        """POST /v1/cache/reset."""
        if self.manager:
            self.manager.clear()

    def restart(self):
        """Stops the server after all requests, and starts it again."""
        self.drain()
        if self.setup.disk:
            self.manager.close()
            self.batch = None
            self.start()

    def step(self):
        if not self.running:
            return
        if self.setup.stream:
            self.next()
        else:
            for said in self.batch.next()[1]:
                self.check(said.uid, said.token, said.finish_reason)
        if self.model.wrong:
            raise Wrong(self.model.wrong[0])

    def next(self):
        """Takes a token of stream_generate. Its last result has no new token."""
        said = next(self.answer)
        if not said.finish_reason:
            return self.check(0, said.token, None)
        for _ in self.answer:
            pass
        for token in said.token_ids[len(self.running[0].said):]:
            self.running[0].said.append(token)
        self.check(0, None, said.finish_reason)

    def check(self, uid, token, finished):
        """Checks a token of an answer, and the number of tokens."""
        if self.model.wrong:
            raise Wrong(self.model.wrong[0])
        truth = self.running[uid]
        truth.said += [token] if token is not None else []
        if finished:
            del self.running[uid]
        self.compare(truth, truth.said, finished)

    def drain(self):
        """Runs until all requests are answered."""
        for _ in range(60 * (1 + len(self.running))):
            self.step()
        if self.running:
            raise Wrong(f"no answer: {next(iter(self.running.values())).name}")

    def close(self):
        if self.manager:
            self.manager.close()
        self.folder.cleanup()

    def finish(self):
        """No request holds a block when all are done."""
        self.drain()
        if self.manager:
            held = sum(block.ref_cnt > 0 for block in self.manager.pool)
            if held:
                raise Wrong(f"{held} blocks are held by no request")
            free, block = 0, self.manager._free_head
            while block is not None and free <= len(self.manager.pool):
                free, block = free + 1, block.next
            if free != len(self.manager.pool):
                raise Wrong("the list of free blocks has another length")


def draw(seed, setup):
    """Draws a history: calls of Engine."""
    rng = random.Random(seed)
    few = rng.random() < 0.5
    room = rng.randrange(1, 5) if setup.snapshots else 4 + rng.randrange(8)
    setup = dataclasses.replace(setup, room=room if few else 100)
    ops = []
    for _ in range(rng.randrange(4, 40)):
        kind = rng.random()
        if kind < 0.2:
            ops.append(("add", rng.randrange(6),
                        rng.choice([0, 99, rng.randrange(1, 24)]),
                        rng.choice([0, rng.randrange(64)]),
                        rng.choice([0, 0, 1, 2]),
                        rng.choice([1, 24, rng.randrange(1, 12)])))
        elif kind < 0.28 and setup.images and rng.random() < 0.5:
            ops.append(("look", rng.randrange(6), rng.randrange(1, 3),
                        rng.randrange(1, 12)))
        elif kind < 0.28:
            ops.append(("again", rng.randrange(6), rng.randrange(1, 12)))
        elif kind < 0.35:
            ops.append(("turn", rng.randrange(6),
                        rng.choice([0, rng.randrange(64)]),
                        rng.randrange(1, 12)))
        elif kind < 0.42:
            ops.append(("drain",))
        elif kind < (0.84 if setup.disk else 0.94):
            ops.append(("step",))
        elif kind < 0.94:
            ops.append(("restart",))
        elif kind < 0.96:
            ops.append(("reset",))
        else:
            ops.append(("abort", rng.randrange(6)))
    return setup, ops


def judge(setup, ops):
    """Runs a history, and returns what was wrong, or None."""
    return Engine(setup).play(ops)


mx.set_default_device(mx.cpu)
ROOM = "room"  # The size that a history draws and shows.
WINDOW = {"layers": ("full", "window"), "window": 12}
STATES = {"layers": ("full", "state")}
LIST = {"layers": ("list", "list")}
QUANTIZED = {"layers": ("full",) * 3, "quantize": True}
STREAM = {"stream": True, "part": 5}
CHAT = {"stream": True, "chat": True, "store": False}
SETUPS = {
    "Plain": Setup(store=False),
    "PlainWindow": Setup(store=False, **WINDOW),
    "PlainStates": Setup(store=False, **STATES),
    "Full": Setup(),
    "Parts": Setup(part=5),
    "Wide": Setup(wide=2),
    "Images": Setup(images=True, part=5),
    "Whole": Setup(whole=8),
    "Quantized": Setup(**QUANTIZED),
    "Window": Setup(**WINDOW),
    "WindowParts": Setup(part=5, **WINDOW),
    "States": Setup(**STATES),
    "StatesImages": Setup(part=5, images=True, **STATES),
    "StatesFirst": Setup(layers=("state", "full")),
    "StatesAlone": Setup(layers=("state",)),
    "StatesWindow": Setup(layers=("full", "state", "window"), window=12, part=5),
    "StatesQuantized": Setup(layers=("full", "state", "full"), quantize=True),
    "List": Setup(**LIST),
    "Disk": Setup(disk=True),
    "WholeDisk": Setup(disk=True, part=5, whole=12),
    "WideDisk": Setup(disk=True, wide=2),
    "QuantizedDisk": Setup(disk=True, **QUANTIZED),
    "WindowDisk": Setup(disk=True, **WINDOW),
    "StatesDisk": Setup(disk=True, **STATES),
    "ListDisk": Setup(disk=True, **LIST),
    "Stream": Setup(images=True, **STREAM),
    "StreamQuantized": Setup(**STREAM, **QUANTIZED),
    "StreamWindow": Setup(**STREAM, **WINDOW),
    "StreamStates": Setup(images=True, **STREAM, **STATES),
    "StreamList": Setup(**STREAM, **LIST),
    "StreamBound": Setup(bound=12, **STREAM),
    "StreamDisk": Setup(disk=True, **STREAM),
    "StreamStatesDisk": Setup(disk=True, **STREAM, **STATES),
    "Chat": Setup(**CHAT),
    "ChatImages": Setup(images=True, **CHAT),
    "ChatQuantized": Setup(**CHAT, **QUANTIZED),
    "ChatWindow": Setup(**CHAT, **WINDOW),
    "ChatBound": Setup(bound=12, **CHAT),
    "ChatStates": Setup(**CHAT, **STATES),
    "ChatStatesAlone": Setup(layers=("state",), **CHAT),
    "ChatList": Setup(**CHAT, **LIST),
}
