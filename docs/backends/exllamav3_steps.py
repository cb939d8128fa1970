"""ExLlamaV3's generator, step by step: random jobs, and a stand-in for the
model. Generator, jobs, page table, caches and checkpoints of states are
ExLlamaV3's. The row of a token is a hash of the tokens up to it, so that each
row that a step needs is checked."""

import dataclasses
import random
import signal
import types

import exllamav3_stubs  # It comes before exllamav3.
import torch
from exllamav3 import Cache, Generator, Job
from exllamav3.cache.cache import CacheLayer
from exllamav3.cache.recurrent_util import (advance_recurrent_states,
                                            prepare_for_recurrence)
from exllamav3.generator import cpu_cache
from exllamav3.generator.sampler import Sampler
from exllamav3.modules.gated_delta_net import GDNState
from hashes import mix
from histories import Wrong, played

PAGE = exllamav3_stubs.PAGE
LETTERS = 32  # The size of the vocabulary, padded.
END = 3  # The token that ends some answers.
SECONDS = 30  # A history takes a tenth of a second.


@dataclasses.dataclass(frozen=True)
class Setup:
    pages: int = 8
    chunk: int = 2  # The pages of a prompt in a step,
    shared: int = 1  # and beside other jobs that generate.
    cooldown: int = 1  # The steps between such parts.
    running: int = 3
    drafts: int = 0  # The tokens that are drafted in a step,
    drafter: str = ""  # by an n-gram, a model, or a long match.
    states: bool = False  # Whether the model has states,
    checkpoints: int = 3  # and for how many checkpoints there is room.
    every: int = 1  # The pages between checkpoints.
    tier: int = 0  # The pages of the CPU's memory.
    longest: int = 24  # The most tokens of a prompt and its answer.
    aborts: float = 0.06  # How often clients stop a job.
    options: tuple = (0, 1, 2, 3, 4)  # Those of JOBS that are drawn.


#: The options of a job.
JOBS = [{}, {"stop_conditions": [END]}, {"banned_strings": ["ab"]},
        {"banned_strings": ["bba"]}, {"max_rq_tokens": PAGE},
        {"token_healing": True}]


class Truth:
    """A prompt and its answer, which depends on the prompt alone."""

    def __init__(self, tokens=()):
        self.tokens, self.hashes = [], [mix(0)]
        for token in tokens:
            self.add(token)

    def add(self, token):
        self.tokens.append(token)
        self.hashes.append(mix(self.hashes[-1], token))

    def reach(self, length):
        while len(self.tokens) < length:
            self.add(best(self.hashes[-1]))


def best(value):
    return (1, 2, 1, 2, 1, 2, 2, END)[mix(value, 7) % 8]


def second(value):
    return 1 + best(value) % END


class Greedy(Sampler):
    def forward(self, logits, ids=None, rand=None, tokenizer=None,
                logit_mask=None):
        if logit_mask is not None:
            logits = logits + logit_mask
        return logits[:, -1].argmax(-1, keepdim=True)


class Tokenizer:
    """Each token is a letter."""

    @staticmethod
    def get_id_to_piece_list(special):
        return [chr(96 + max(1, i)) for i in range(LETTERS)]

    @staticmethod
    def get_tokens_with_prefix_id(prefix):
        return [int(prefix)]


class Pinned:
    """Stands in for PinnedArena, whose memory is a GPU's."""

    def __init__(self, size, what):
        self.tensor = torch.zeros(size, dtype=torch.uint8)

    def close(self):
        pass


cpu_cache.PinnedArena = Pinned


class OnGpu(torch.Tensor):
    """CPUPageCache takes tensors of GPUs alone."""
    device = property(lambda self: torch.device("cuda", 0))


class Rows(CacheLayer):
    """The rows of a layer: hashes."""

    def __init__(self, config, attention, number, tokens, tier=False):
        super().__init__(config, attention, number, tokens)
        self.rows = torch.zeros(tokens // PAGE, PAGE, dtype=torch.long)
        self.shown = self.rows.as_subclass(OnGpu) if tier else self.rows

    def copy_page(self, source, from_page, to_page, num_tokens):
        self.rows[to_page, :num_tokens] = source.rows[from_page, :num_tokens]

    def get_tensors(self):
        return [self.shown]

    def storage_size(self):
        return self.rows.nbytes

    alloc = free = get_kv = update_kv = update_kv_direct = None
    overhead_size = tp_export = None


class State:
    """The state of a layer for each slot: a hash. A pass with drafts can go
    back to each of its tokens."""

    def __init__(self, layer, slots, history, number):
        self.values, self.passes = [0] * slots, [()] * slots

    def clear(self, slot):
        self.values[slot] = mix(0)

    def stash(self, slot, position):
        return torch.tensor([self.values[slot]])

    def unstash(self, slot, stashed, position):
        self.values[slot] = int(stashed[0])

    def rewind(self, slot, last, count):
        self.values[slot] = self.passes[slot][last - count]

    @staticmethod
    def get_checkpoint_size():
        return 1


class Model:
    """Stands in for a model. Its tokens are those of Truth, and it checks each
    row that a pass reads."""
    loaded_tp, output_device = False, "cpu"
    draft_verifier_params = {}
    recurrent_state_cls = GDNState

    def __init__(self, setup, states=False, drafts=False):
        self.config = types.SimpleNamespace(
            vocab_size=LETTERS, infer_params=None)
        self.states, self.drafts = states, drafts
        self.caps = {"default_recurrent_checkpoint_interval":
                     PAGE * setup.every}
        if states:
            self.caps["recurrent_states"] = True
        self.layer = types.SimpleNamespace(
            layer_idx=0, cache_layers=[], recurrent_layers=[], device=None,
            layer_state_cls=State)
        self.cache_weakrefs = {}
        self.cache = Cache(
            self, setup.pages * PAGE, Rows, setup.running, setup.drafts,
            tier=setup.tier > 0)
        self.cache.initialized = True
        self.rows = self.cache.layers[0, 0].rows

    def get_cache_layers(self):
        return [self.layer]

    def get_recurrent_layers(self):
        return [self.layer] if self.states else []

    @staticmethod
    def get_layer_instances(number):
        return [(number, 0)]

    def prefetch_tokens(self, tokens):
        pass

    def prefill(self, input_ids, params):
        self.forward(input_ids, params)

    def jobs(self, params):
        """Returns the jobs whose rows a pass has."""
        active = self.generator.active_jobs
        table = params["block_table"]
        for job in active:
            if job.sequences[0].block_index_tensor is table:
                return [job]
        return [job for job in active if job.is_prefill_done()]

    def forward(self, input_ids, params):
        if self.states:
            prepare_for_recurrence(input_ids, params, self)
        jobs, fed = self.jobs(params), input_ids.tolist()
        starts = params["cache_seqlens"].tolist()
        tables = params["block_table"].tolist()
        passes = [self.one(job, start, tokens, table) for
                  job, start, tokens, table in zip(jobs, starts, fed, tables)]
        # In a layer, all rows of a step are written before they are read.
        for job, start, tokens, table, truth in passes:
            for p in range(start, start + len(tokens)):
                self.rows[table[p // PAGE], p % PAGE] = truth.hashes[p + 1]
        for job, start, tokens, table, truth in passes:
            for p in range(start + len(tokens)):
                page = table[p // PAGE]
                if int(self.rows[page, p % PAGE]) != truth.hashes[p + 1]:
                    kind = " draft" if self.drafts else ""
                    raise Wrong(f"{job.identifier}: position {p}: page {page} "
                                f"has another{kind} row")
        if self.states:
            self.fold(passes, params)
            advance_recurrent_states(input_ids, params, self)
        return torch.cat([self.logits(*one) for one in passes])

    def one(self, job, start, tokens, table):
        known = job.sequences[0].sequence_ids.torch()[0].tolist()
        if self.drafts:  # They continue what is known by tokens of their own.
            if start < len(known):
                job.drafted = known[:start]
            job.drafted = job.drafted[:start] + tokens
            known = job.drafted
        right = known[start:start + len(tokens)]
        if tokens[:len(right)] != right or not right:
            raise Wrong(f"{job.identifier}: position {start} gets another "
                        "token")
        return job, start, tokens, table, Truth(known[:start] + tokens)

    def logits(self, job, start, tokens, table, truth):
        out = torch.zeros(1, len(tokens), LETTERS)
        for i, value in enumerate(truth.hashes[start + 1:]):
            first, other = best(value), second(value)
            if self.drafts and mix(value, 9) % 4 == 0:
                first, other = other, first
            out[0, i, first], out[0, i, other] = 2, 1
        return out

    def fold(self, passes, params):
        layer = self.cache.recurrent_layers[0, 0]
        for state, (job, start, tokens, _, truth) in zip(
                params["recurrent_states"], passes):
            if state.position != start:
                raise Wrong(f"{job.identifier}: a state at {state.position} is "
                            f"used at {start}")
            if layer.values[state.slot] != truth.hashes[start]:
                raise Wrong(f"{job.identifier}: the state is not the one after "
                            f"{start} tokens")
            after = truth.hashes[start + 1:]
            layer.passes[state.slot] = after
            if not params.get("recurrent_history"):
                layer.values[state.slot] = after[-1]


class Engine:
    """ExLlamaV3's generator over a model that checks its rows."""

    def __init__(self, setup):
        self.setup = setup
        self.model = Model(setup, setup.states)
        drafter = None
        if setup.drafter == "model":
            drafter = Model(setup, drafts=True)
        ngram = setup.drafter == "ngram"
        self.generator = Generator(
            self.model, self.model.cache, Tokenizer(),
            max_batch_size=setup.running, max_chunk_size=setup.chunk * PAGE,
            shared_chunk_size=setup.shared * PAGE,
            prefill_cooldown=setup.cooldown, draft_model=drafter,
            draft_cache=drafter and drafter.cache,
            num_draft_tokens=setup.drafts, ngram_match_min=2 if ngram else 0,
            hybrid_draft_tokens=setup.drafts if setup.drafter == "long" else 0,
            enable_defrag=not setup.tier,
            cpu_cache_size=setup.tier * 4096 * (2 if drafter else 1),
            recurrent_cache_size=setup.checkpoints,
            recurrent_checkpoint_interval_pp=PAGE * setup.every)
        for model in (self.model, drafter):
            if model:
                model.generator = self.generator
        self.asked, self.running = [], []

    def add(self, like, cut, more, option, limit):
        """Asks a prompt that begins like an earlier one and its answer."""
        tokens = []
        if self.asked:
            truth = self.asked[like % len(self.asked)]
            truth.reach(self.setup.longest)
            tokens = truth.tokens[:cut]
        tokens = tokens + [1 + (more >> i) % 2 for i in range(more % 7)]
        self.ask(tokens or [1], option, limit)

    def again(self, which, option, limit):
        """Asks a prompt that begins like a page."""
        pages = [page for page in self.generator.pagetable.all_pages
                 if page.kv_position]
        if pages:
            page = pages[which % len(pages)]
            tokens = page.sequence[0, :page.kv_position].tolist()
            self.ask(tokens + [1], option, limit)

    def ask(self, tokens, option, limit):
        setup = self.setup
        tokens = tokens[:setup.longest - 1]
        limit = min(max(1, limit), setup.longest - len(tokens))
        job = Job(torch.tensor([tokens]), limit, sampler=Greedy(),
                  identifier=f"job {len(self.asked)}",
                  **JOBS[setup.options[option % len(setup.options)]])
        job.prompt = tokens
        self.asked.append(Truth(tokens))
        try:
            self.generator.enqueue(job)
        except AssertionError as error:
            if "cannot be enqueued" not in str(error).replace("\n", ""):
                raise
        else:
            job.limit = job.max_new_tokens  # No more than the pages have.
            self.running.append(job)

    def abort(self, which):
        if self.running:
            self.generator.cancel(self.running.pop(which % len(self.running)))

    def step(self):
        for said in self.generator.iterate():
            if said["stage"] == "error":
                raise said["error"]
            if said["eos"]:
                self.running.remove(said["job"])
                self.check_answer(said["job"])

    def check_answer(self, job):
        """Checks the tokens of an answer, and how many there are."""
        tokens = job.sequences[0].sequence_ids.torch()[0].tolist()
        truth, count = Truth(), len(job.prompt)
        for i, token in enumerate(tokens):
            value = truth.hashes[-1]
            expected = {job.prompt[i] if i < count else best(value)}
            if i >= count and job.banned_strings:
                expected.add(second(value))
            if token not in expected:
                raise Wrong(f"{job.identifier}: its answer has another token")
            truth.add(token)
        if len(tokens) - count != job.limit and not (
                tokens[-1] == END and END in job.stop_tokens):
            raise Wrong(f"{job.identifier}: an answer of {len(tokens) - count} "
                        f"tokens, not {job.limit}")

    def drain(self):
        """Runs until all jobs are done."""
        for _ in range(40 * (1 + len(self.running))):
            if not self.generator.num_remaining_jobs():
                break
            self.step()
        else:
            raise Wrong(f"no end: {self.running[0].identifier}")
        if self.running:
            raise Wrong(f"no answer: {self.running[0].identifier}")

    def finish(self):
        """All pages are free when all jobs are done."""
        self.drain()
        table = self.generator.pagetable
        free = {page.page_index for page in table.unreferenced_pages.values()}
        if free != set(range(self.setup.pages)):
            raise Wrong("pages are lost")
        cache = self.model.cache
        if len(set(cache.free_list)) != cache.num_slots:
            raise Wrong("states are lost")


def draw(seed, setup):
    """Draws a history: calls of Engine."""
    rng = random.Random(seed)
    setup = dataclasses.replace(setup, pages=setup.pages + rng.randrange(4))
    ops = []
    for _ in range(rng.randrange(4, 60)):
        kind = rng.random()
        if kind < 0.3:
            ops.append(("add", rng.randrange(6),
                        rng.choice([0, 99, rng.randrange(1, 20)]),
                        rng.choice([0, rng.randrange(64)]),
                        rng.randrange(len(setup.options)),
                        rng.choice([1, 24, rng.randrange(1, 16)])))
        elif kind < 1 - setup.aborts:
            ops.append(("step",))
        else:
            ops.append(("abort", rng.randrange(6)))
    for _ in range(4):
        ops += [("drain",), ("again", rng.randrange(8), 0, 1)]
    return setup, ops


def too_long(number, frame):
    raise Wrong(f"no end in {frame.f_code.co_name}")


def judge(setup, ops):
    """Runs a history, and returns what was wrong, or None."""
    signal.signal(signal.SIGVTALRM, too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        return played(Engine(setup), ops)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


ROOM = "pages"  # The size that a history draws and shows.
SETUPS = {
    "Plain": Setup(options=(0, 1)),
    "Small": Setup(pages=4, options=(0, 1)),
    "Banned": Setup(options=(0, 2, 3)),
    "Requeued": Setup(options=(0, 4)),
    "SmallRequeued": Setup(pages=4, options=(0, 4)),
    "Healed": Setup(options=(0, 5)),
    "Tier": Setup(pages=5, tier=4),
    "Ngram": Setup(drafts=3, drafter="ngram"),
    "NgramTier": Setup(pages=7, drafts=3, drafter="ngram", tier=4),
    "LongMatch": Setup(drafts=4, drafter="long"),
    "Drafter": Setup(drafts=2, drafter="model"),
    "States": Setup(states=True),
    "StatesAlone": Setup(states=True, cooldown=0),
    "StatesTier": Setup(pages=6, states=True, tier=3),
    "StatesNgram": Setup(states=True, drafts=3, drafter="ngram"),
}
