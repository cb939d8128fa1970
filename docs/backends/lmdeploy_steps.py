"""LMDeploy's engine of PyTorch, step by step: random requests, and a worker
that stands in for the model's. The scheduler, the maker of inputs, the loop of
the engine and the batch of the worker are LMDeploy's. A row of the worker is a
hash of the tokens up to it, so that each row that a step needs is checked."""

import asyncio
import collections
import dataclasses
import itertools
import os
import random
import types

os.environ.setdefault("LMDEPLOY_LOG_LEVEL", "CRITICAL")

import torch
from hashes import mix
from histories import Wrong, played
from lmdeploy.pytorch.config import CacheConfig, SchedulerConfig
from lmdeploy.pytorch.disagg.config import EngineRole
from lmdeploy.pytorch.engine.engine_loop import EngineLoop, EngineLoopConfig
from lmdeploy.pytorch.engine.inputs_maker import (InputsMakerAsync,
                                                  InputsMakerConfig)
from lmdeploy.pytorch.engine.logits_process import SamplingInputsDelta
from lmdeploy.pytorch.engine.model_agent import BatchedOutputs
from lmdeploy.pytorch.messages import (MessageStatus, SamplingParam,
                                       SequenceMeta)
from lmdeploy.pytorch.paging import Scheduler
from lmdeploy.pytorch.paging.block_manager import base_block_manager
from lmdeploy.pytorch.paging.block_trie import checkpoint_lifecycle
from lmdeploy.pytorch.paging.prefill_scheduler import _PrefillAdmissionAttempt
from lmdeploy.pytorch.strategies.ar import ARStrategyFactory
from lmdeploy.pytorch.strategies.ar_spec import ARSpecStrategyFactory

# Times of access are whole seconds: here, an access is a second after the last.
for module in (base_block_manager, checkpoint_lifecycle):
    module.time = types.SimpleNamespace(
        perf_counter=itertools.count(1).__next__)


@dataclasses.dataclass(frozen=True)
class Setup:
    block: int = 4  # The tokens of a block.
    blocks: int = 8
    window: int = -1
    found: bool = True  # Whether prefixes are found.
    interval: int = 1  # LMDeploy's prefill_interval: the tokens of a reserve.
    running: int = 3
    budget: int = 64  # The most tokens of a prompt in a step.
    states: int = -1  # Checkpoints of states; -1: the model has no states.
    every: int = 0  # The tokens between checkpoints of answers.
    drafts: int = 0  # The tokens that are drafted in a step.
    mtp: bool = False  # Whether rows of an MTP model are compared, too.
    longest: int = 24  # The most tokens of a prompt and its answer.


class Truth:
    """A prompt and its answer, which depends on prompt and adapter alone."""

    def __init__(self, prompt, adapter):
        self.tokens, self.hashes = [], [mix(adapter or "")]
        for token in prompt:
            self.add(token)

    def add(self, token):
        self.tokens.append(token)
        self.hashes.append(mix(self.hashes[-1], token))

    def reach(self, length):
        while len(self.tokens) < length:
            self.add(1 + mix(self.hashes[-1], 7) % 2)


def private(attempt):
    """Whether a sequence has blocks that are not in the tree."""
    cursor = attempt.seq.prefix_cache.trie_cursor
    known = cursor.prefix_len if cursor else 0
    return attempt.seq.num_blocks > known // attempt.seq.block_size


def preempt(scheduler, sequences, rule=Scheduler.preempt_seqs):
    """Releases a preempted sequence's state, which may be a token ahead."""
    sequences = list(sequences)
    rule(scheduler, sequences)
    for one in sequences if scheduler.is_ssm else ():
        if one.status == MessageStatus.WAITING:
            one.state.release_paging_resources()


def repair():
    """Repairs F51 and F52 of lmdeploy.md, so that other bugs would show."""
    _PrefillAdmissionAttempt._has_private_local_tail = private
    Scheduler.preempt_seqs = preempt


class Sampling:
    """Stands in for SamplingInputs, and knows the sequence of each row."""
    stop_words = None

    def __init__(self, running):
        self.running = list(running)

    def update_delta(self, delta):
        pass

    def get_delta(self):
        zeros = torch.zeros(len(self.running), dtype=torch.long)
        return SamplingInputsDelta(num_ignore_eos=zeros, random_offsets=zeros,
                                   all_ids=None)


class Worker:
    """Stands in for the executor and its model. Steps run in the order in which
    they are sent, before the engine learns the tokens of the step before."""
    device_type = "cpu"

    def __init__(self, setup, agent, batch, arrive):
        self.setup, self.agent, self.batch = setup, agent, batch
        self.arrive = arrive
        #: By block and slot, and by slot. The rows of an MTP model depend on
        #: the next token, too.
        self.rows, self.draft_rows, self.states = {}, {}, {}
        self.outputs = collections.deque()

    async def forward_async(self, payload):
        self.outputs.append(self.run(payload))

    async def get_output_async(self):
        self.arrive()  # Requests arrive while the worker computes.
        return self.outputs.popleft()

    def run(self, payload):
        """As ModelAgent._async_step."""
        inputs, delta = payload["inputs"], payload["delta"]
        sampling = payload["sampling_inputs"]
        stopping, extra = payload["stopping_criteria"], payload["extra_inputs"]
        if delta is not None:
            delta.fill_tensors()
            self.batch.reindex(delta)
        decodes = inputs is None
        if decodes:
            inputs = self.batch.model_inputs
            stopping = self.batch.stopping_criteria
            extra = self.batch.extra_inputs
        self.copy(payload["cache_inputs"], "restore")
        plans = self.compute(inputs, sampling.running)
        self.copy(payload["cache_inputs"], "save")
        tokens = torch.tensor([plan.next() for plan in plans])
        answers = tokens
        if self.setup.drafts:
            extra = self.draft(inputs, extra, plans, tokens)
            answers = extra.output_token_ids
        stopped, stop, stopping = stopping.step(
            tokens, None, inputs=inputs, extra_inputs=extra)
        more = self.agent.make_extra_outputs(extra)
        output = BatchedOutputs(next_token_ids=answers, stopped=stopped,
                                stop_pos=stop, extra_outputs=more)
        after = (inputs, extra, stopping, sampling.get_delta(), tokens, None,
                 more)
        if decodes:
            self.batch.step_decode(*after)
        elif not inputs.is_chunk or inputs.is_last_chunk:
            self.batch.merge_prefill(*after)
        return output

    def copy(self, plan, when):
        if plan is None:
            return
        pairs = getattr(plan, f"kv_{when}_plan")
        for source, target in [] if pairs is None else pairs.T.tolist():
            self.rows.update({(target, i): self.rows.get((source, i))
                              for i in range(self.setup.block)})
        pairs = getattr(plan, f"state_{when}_plan")
        for source, target in zip(*(pairs or ((), ()))):
            self.states[target] = self.states.get(source)

    def compute(self, inputs, running):
        """Computes the rows of a step, and checks those that it reads."""
        if len(running) != len(inputs.seq_length):
            raise Wrong(f"{len(running)} requests, "
                        f"{len(inputs.seq_length)} rows")
        plans, fed = [], inputs.input_ids[0].tolist()
        for i, one in enumerate(running):
            count = int(inputs.seq_length[i])
            plans.append(Plan(one, int(inputs.history_lengths[i]), fed[:count],
                              inputs.block_offsets[i].tolist(),
                              int(inputs.num_ignored_history[i]),
                              inputs.is_decoding and self.setup.drafts))
            fed = fed[count:]
        # In a layer, all rows of a step are written before they are read.
        for plan in plans:
            for p, row in enumerate(plan.rows(), plan.done):
                self.rows[self.place(plan, p)] = row
        window = self.setup.window
        for plan in plans:
            first = max(0, plan.done - window) if window > 0 else 0
            self.read(plan, range(first, plan.end), self.rows, 1)
        if inputs.state_offsets is not None:
            self.fold(plans, inputs.state_offsets.tolist())
        return plans

    def place(self, plan, position):
        index, slot = divmod(position - plan.gone, self.setup.block)
        if not 0 <= index < len(plan.table) or plan.table[index] == 0:
            raise Wrong(f"{plan.one.name}: position {position} has no block")
        return plan.table[index], slot

    def read(self, plan, positions, rows, ahead):
        for p in positions:
            place = self.place(plan, p)
            if rows.get(place) != plan.one.truth.hashes[p + ahead]:
                raise Wrong(f"{plan.one.name}: position {p}: block {place[0]} "
                            f"has another {'draft ' * (ahead - 1)}row")

    def fold(self, plans, slots):
        for plan, slot in zip(plans, slots):
            hashes = plan.one.truth.hashes
            if plan.done and self.states.get(slot) != hashes[plan.done]:
                raise Wrong(f"{plan.one.name}: the state in slot {slot} is not "
                            f"the one after {plan.done} tokens")
            self.states[slot] = hashes[plan.end]

    def draft(self, inputs, extra, plans, tokens):
        """As SpecModelAgent: its rows follow the model's by a token, across the
        parts of a prompt, too."""
        part = inputs.is_chunk and not inputs.is_last_chunk
        for plan in plans if self.setup.mtp else ():
            first = plan.done - (inputs.is_chunk and not inputs.is_first_chunk)
            last = plan.end - part
            for p in range(first, last):
                self.draft_rows[self.place(plan, p)] = (
                    plan.one.truth.hashes[p + 2])
            self.read(plan, range(last), self.draft_rows, 2)
        if part:
            answers = torch.zeros(1, 1, dtype=torch.long)
        else:
            answers = torch.tensor([
                plan.tokens[1:1 + plan.accepted] + [plan.next()] +
                [-1] * (plan.drafts - plan.accepted) for plan in plans])
        return extra.clone(
            next_token_ids=tokens, output_token_ids=answers,
            num_rejected_tokens=torch.tensor(
                [plan.drafts - plan.accepted for plan in plans]),
            output_draft_token_ids=torch.tensor(
                [plan.guess(self.setup.drafts) for plan in plans]))


class Plan:
    """What a step computes of a request."""

    def __init__(self, one, done, tokens, table, gone, drafts):
        self.one, self.done, self.tokens = one, done, tokens
        self.table, self.gone, self.drafts = table, gone, int(drafts)
        truth = one.truth
        truth.reach(done + len(tokens) + 9)
        right = 0
        while tokens[right:] and tokens[right] == truth.tokens[done + right]:
            right += 1
        if right < len(tokens) - self.drafts:
            raise Wrong(f"{one.name}: position {done + right} gets another "
                        "token")
        self.end = done + right
        self.accepted = right - 1 if self.drafts else 0

    def rows(self):
        """The rows of the tokens, and of drafts that are rejected."""
        out = self.one.truth.hashes[self.done + 1:self.end + 1]
        for token in self.tokens[len(out):]:
            out.append(mix(out[-1], token))
        return out

    def next(self):
        return self.one.truth.tokens[self.end]

    def guess(self, count):
        """Some drafts are right."""
        right = mix(self.end, self.one.name) % (count + 1)
        truth = self.one.truth.tokens[self.end + 1:self.end + 1 + count]
        return truth[:right] + [3 - token for token in truth[right:]]


class Engine:
    """LMDeploy's engine over a worker with rows."""

    def __init__(self, setup):
        self.setup = setup
        states = setup.states >= 0
        schedule = SchedulerConfig(
            max_batches=setup.running, max_session_len=setup.longest,
            prefill_interval=setup.interval)
        self.cache = CacheConfig(
            max_batches=setup.running, block_size=setup.block, num_cpu_blocks=0,
            num_gpu_blocks=setup.blocks + 1, window_size=setup.window,
            max_prefill_token_num=setup.budget,
            enable_prefix_caching=setup.found,
            num_state_caches=setup.running + 2 + max(0, setup.states)
            if states else None,
            prefix_cache_state_budget=max(0, setup.states),
            prefix_cache_decode_state_interval=setup.every,
            states_shapes=[((1,), torch.float32)] if states else [],
            num_reserved_gpu_blocks=1)
        model = types.SimpleNamespace(bos_token_id=0)
        make = ARSpecStrategyFactory(model, types.SimpleNamespace(
            num_speculative_tokens=setup.drafts, method="deepseek_mtp")) if (
                setup.drafts) else ARStrategyFactory(model)
        strategy = make.build_sequence_strategy()
        agent = make.build_model_agent_strategy()
        sampling = types.SimpleNamespace(make_sampling_inputs=Sampling,
                                         on_session_end=lambda session: None)
        self.scheduler = Scheduler(schedule, self.cache, SequenceMeta(
            setup.block, strategy=strategy, sampling_strategy=sampling))
        self.worker = Worker(setup, agent, make.build_step_inputs(),
                             self.arrive)
        maker = InputsMakerAsync(
            self.worker, self.scheduler, self.scheduler.state_checkpoints,
            types.SimpleNamespace(num_adapters=lambda: 1),
            make.build_engine_strategy(self.cache, schedule), sampling, agent,
            InputsMakerConfig(
                max_batches=setup.running, max_prefill_token_num=setup.budget,
                role=EngineRole.Hybrid, block_size=setup.block,
                kernel_block_size=setup.block, window_size=setup.window,
                enable_prefix_caching=self.cache.enable_prefix_caching,
                prefix_cache_decode_state_interval=setup.every, is_ssm=states,
                prefill_interval=setup.interval,
                spec_decoding=setup.drafts > 0))
        self.loop = EngineLoop(
            None, self.scheduler, self.scheduler.state_checkpoints, self.worker,
            strategy, maker, EngineLoopConfig(
                EngineRole.Hybrid, num_speculative_tokens=setup.drafts or None))
        self.next = None, None
        self.waiting = []  # Calls that reach the engine during the next step.
        self.asked = []
        self.sequences = {}
        self.ending = {}  # Sessions that end soon, by their number.

    def later(self, call, *arguments):
        self.waiting.append((call, arguments))

    def arrive(self):
        """Handles the requests of clients, as Engine._on_add_message does."""
        calls, self.waiting = self.waiting, []
        for call, arguments in calls:
            call(*arguments)
        for number, one in list(self.sequences.items()):
            if one.status == MessageStatus.STOPPED:
                self.ending.setdefault(number, mix(number, "end") % 3)
        for number in list(self.ending):
            self.ending[number] -= 1
            if self.ending[number] < 0:
                self.end(number)

    def end(self, number):
        """The client got the answer."""
        one = self.sequences.pop(number)
        del self.ending[number]
        self.check_answer(one)
        self.scheduler.end_session(number)

    def check_answer(self, one):
        tokens = one.valid_ids.tolist()
        one.truth.reach(len(tokens))
        if tokens != one.truth.tokens[:len(tokens)]:
            raise Wrong(f"{one.name}: its answer has another token")

    def add(self, like, cut, more, adapter, limit):
        """Asks a prompt that begins like an earlier one and its answer."""
        tokens = []
        if self.asked:
            truth = self.asked[like % len(self.asked)]
            truth.reach(self.setup.longest)
            tokens = truth.tokens[:cut]
        tokens = tokens + [1 + (more >> i) % 2 for i in range(more % 7)]
        self.later(self.ask, tokens or [1], [None, "a"][adapter % 2], limit)

    def ask(self, tokens, adapter, limit):
        # No more tokens than fit, with those that are reserved.
        setup = self.setup
        most = min(setup.longest, (setup.blocks - 1) * setup.block -
                   setup.interval * (1 + setup.drafts))
        tokens = tokens[:most - 1]
        number = len(self.asked)
        session = self.scheduler.add_session(number)
        one = session.add_sequence(tokens, SamplingParam(
            max_new_tokens=min(max(1, limit), most - len(tokens))), adapter)
        one.resp = types.SimpleNamespace(_input_logprobs=None, data=None)
        one.name, one.truth = f"request {number}", Truth(tokens, adapter)
        self.asked.append(Truth(tokens, adapter))
        self.sequences[number] = one

    def abort(self, which):
        self.later(self.stop, which)

    def stop(self, which):
        running = [number for number in self.sequences
                   if number not in self.ending]
        if running:
            number = running[which % len(running)]
            self.scheduler.stop_session(number)
            self.ending[number] = which % 3

    def step(self):
        """One turn of EngineLoop.main_loop."""
        asyncio.run(self.turn())

    async def turn(self):
        loop, (inputs, running) = self.loop, self.next
        if running is None:
            self.arrive()
            inputs, running = await loop.inputs_maker.send_next_inputs()
            if running is None:
                self.next = None, None
                return
        self.scheduler.activate_seqs(running)
        self.next = await loop._main_loop_get_outputs(running, inputs)
        loop.inputs_maker.preempt_invalid_decode_seqs()
        if not loop.resp_queue.empty():
            loop.resp_queue.get_nowait()

    def finish(self):
        """Runs until all requests are answered. All memory is free then."""
        for _ in range(40 * (1 + len(self.sequences))):
            if not self.sequences and not self.waiting and self.next[1] is None:
                break
            self.step()
        else:
            names = ", ".join(one.name for one in self.sequences.values())
            raise Wrong(f"no end: {names}")
        trie, blocks = self.scheduler.block_trie, self.scheduler.block_manager
        trie.evict(1 << 20)
        if blocks.get_num_free_gpu_blocks() != self.setup.blocks:
            raise Wrong("blocks are lost")
        states = self.scheduler.state_manager
        if self.setup.states >= 0 and (
                states.get_num_free() != states.allocator.num_states):
            raise Wrong("states are lost")


def draw(seed, setup):
    """Draws a history: calls of Engine."""
    rng = random.Random(seed)
    setup = dataclasses.replace(setup, blocks=setup.blocks + rng.randrange(4))
    ops = []
    for _ in range(rng.randrange(4, 50)):
        kind = rng.random()
        if kind < 0.3:
            ops.append(("add", rng.randrange(6),
                        rng.choice([0, 99, rng.randrange(1, 20)]),
                        rng.choice([0, rng.randrange(64)]),
                        rng.choice([0, 0, 0, 1]), rng.randrange(1, 16)))
        elif kind < 0.94:
            ops.append(("step",))
        else:
            ops.append(("abort", rng.randrange(6)))
    return setup, ops


def judge(setup, ops):
    """Runs a history, and returns what was wrong, or None."""
    return played(Engine(setup), ops)


ROOM = "blocks"  # The size that a history draws and shows.
SETUPS = {
    "Full": Setup(),
    "NotFound": Setup(found=False),
    "Default": Setup(block=8, blocks=8, interval=2, longest=40),
    "Reserve": Setup(interval=4),
    "LongReserve": Setup(block=2, interval=4),
    "Parts": Setup(budget=6),
    "PartsNotFound": Setup(budget=6, found=False),
    "Window": Setup(window=6, found=False),
    "WindowShort": Setup(block=2, window=3, found=False, interval=2),
    "WindowParts": Setup(window=6, budget=6, found=False),
    "Drafts": Setup(drafts=2, blocks=10),
    "DraftsParts": Setup(drafts=2, blocks=10, budget=6),
    "Mtp": Setup(drafts=2, mtp=True, blocks=10),
    "MtpParts": Setup(drafts=2, mtp=True, blocks=10, budget=6),
    "DraftsNotFound": Setup(drafts=2, blocks=10, found=False),
    "DraftsWindow": Setup(drafts=2, block=8, interval=2, blocks=10, window=10,
                          found=False, longest=50),
    "DraftsWindowShort": Setup(drafts=2, blocks=10, window=6, found=False),
    "States": Setup(states=0, found=False),
    "StatesParts": Setup(states=0, found=False, budget=6),
    "StatesFound": Setup(states=3),
    "StatesFoundParts": Setup(states=3, budget=6),
    "StatesFoundEvery": Setup(states=3, every=4),
}
