"""vLLM's KVCacheManager as a pool of blocks, for kvtwin's oracle: the manager
decides what a prompt finds, which blocks are taken and which are given up; the
rows lie here, where its block tables say. vllm-manager.md has the results."""

import math
import os
import pathlib
import subprocess
import sys
import types

ENVIRONMENT = dict(os.environ)  # vLLM changes it: OpenMP's threads would spin.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import kvtwin
import numpy as np
import page
import torch
import vllm_kernels
import vllm_offload
import vllm_steps
from histories import shrink
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (FullAttentionSpec, KVCacheConfig,
                                        KVCacheGroupSpec, SlidingWindowSpec)
from vllm.v1.request import Request

kv_cache_utils.init_none_hash(sha256)
OPERATIONS = 20_000
HISTORIES = 80


class Full:
    """Full attention, in one group. A request is known to the manager by the
    tokens that were found and then committed; appended rows are those of draft
    tokens until then."""
    kvtwin = kvtwin.PoolDescription(name="vLLM, full attention")
    operations = OPERATIONS
    eagle = False
    lookahead = 0

    def __init__(self, setup):
        parts = setup.groups or (setup,)
        dtypes = {x for part in parts for x in (part.dtype, part.v_dtype)}
        if dtypes != {self.kvtwin.attend_dtype}:
            raise kvtwin.NotSupported
        self.setup, self.parts = setup, parts
        sizes = [part.block_size for part in parts]
        total = sum(part.blocks for part in parts)  # Groups share one pool.
        groups = [KVCacheGroupSpec([str(g)], self.spec(
            part, block_size=part.block_size, num_kv_heads=1, head_size=1,
            dtype=torch.float32)) for g, part in enumerate(parts)]
        self.hasher = kv_cache_utils.get_request_block_hasher(
            math.gcd(*sizes), sha256)
        self.manager = KVCacheManager(  # Block 0 is never allocated.
            KVCacheConfig(total + 1, [], groups), setup.max_seq_len + 1,
            math.lcm(*sizes), math.gcd(*sizes), use_eagle=self.eagle)
        self.rows = [self.memory_of(part, total + 1)
                     for part in parts for _ in range(part.layers)]
        self.sequences = {}

    def memory_of(self, part, blocks):
        """Returns the memory of a layer: K, V."""
        shape = blocks, part.block_size, part.kv_heads
        return [np.zeros((*shape, dim), np.float32)
                for dim in (part.k_head_dim, part.v_head_dim)]

    def window_of(self, part):
        """Returns vLLM's window, which counts the query, or None."""
        window = self.kvtwin.window if part.window is None else part.window
        return None if window is None else window + 1

    def spec(self, part, **common):
        window = self.window_of(part)
        if window is None:
            return FullAttentionSpec(**common)
        return SlidingWindowSpec(**common, sliding_window=window)

    def request(self, number, tokens, salt, extra, media):
        adapter = extra[0] if len(extra) == 1 else repr(extra)
        return Request(
            str(number), list(tokens), SamplingParams(max_tokens=1), None,
            cache_salt=salt or None, block_hasher=self.hasher,
            mm_features=[image(*one) for one in media],
            lora_request=LoRARequest(adapter or "-", 1, adapter or "-")
            if extra else None)

    def open(self, prompt, salt, extra, media=()):
        number = min(set(range(len(self.sequences) + 1)) - set(self.sequences))
        # With `first`, the token after the last row that can be found is known.
        asked = (self.first + prompt)[:len(prompt)]
        found, blocks = 0, None
        if asked:
            blocks, found, _ = self.manager.get_computed_blocks(
                self.request(number, asked, salt, extra, media))
        request = self.request(
            number, asked[:found + len(self.first)], salt, extra, media)
        if found and self.manager.allocate_slots(
                request, 0, found, blocks) is None:
            found = 0
            request = self.request(number, self.first, salt, extra, media)
        request.num_computed_tokens = found
        request.num_prompt_tokens = found + 1  # vLLM refuses empty prompts.
        self.sequences[number] = types.SimpleNamespace(
            request=request, pending={})
        return number

    first = []  # Tokens before a prompt.

    def add_media(self, sequence, position, hash):
        request = self.sequences[sequence].request
        request.mm_features.append(image(position, hash))
        # vLLM has media in the order of their positions.
        request.mm_features.sort(key=lambda one: one.mm_position.offset)

    def seq_len(self, sequence):
        return self.sequences[sequence].request.num_computed_tokens

    def append(self, sequence, layer, key, value):
        one = self.sequences[sequence]
        begin = one.request.num_computed_tokens
        if begin + len(key) > self.setup.max_seq_len:
            raise kvtwin.CacheFull
        if self.manager.allocate_slots(
                one.request, len(key),
                num_lookahead_tokens=self.lookahead) is None:
            raise kvtwin.CacheFull
        one.pending[layer] = len(key)
        self.write(sequence, layer, begin, key, value)

    def write(self, sequence, layer, begin, key, value):
        table = self.table_of(sequence, self.setup.group_of(layer))
        size = self.setup.of_layer(layer).block_size
        for i, *rows in zip(range(begin, begin + len(key)), key, value):
            for to, row in zip(self.rows[layer], rows):
                to[table[i // size], i % size] = row

    def commit(self, sequence, tokens):
        one = self.sequences[sequence]
        one.request.append_output_token_ids(list(tokens))
        one.request.num_computed_tokens += len(tokens)
        one.pending = {}
        self.manager.cache_blocks(one.request, self.seq_len(sequence))

    def views(self, sequence, layer):
        size = self.setup.of_layer(layer).block_size
        end = self.seq_len(sequence) + (
            self.sequences[sequence].pending.get(layer, 0))
        table = self.table_of(sequence, self.setup.group_of(layer))
        out = []
        for i, block in enumerate(table[:-(-end // size)]):
            if block:  # Blocks that a window has left are block 0.
                rows = slice(0, min(size, end - i * size))
                out.append((*(x[block, rows] for x in self.rows[layer]),
                            block - 1, i * size))
            elif out:
                raise AssertionError(f"block {i} is gone, an earlier block is not")
        return out

    def table_of(self, sequence, group=0):
        return self.manager.get_block_ids(str(sequence))[group]

    def table(self, sequences, group=0):
        size = self.parts[group].block_size
        return [[block - 1 for block in
                 self.table_of(s, group)[:-(-self.seq_len(s) // size)]]
                for s in sequences]

    def usage(self):
        """Returns the blocks that are free, cached, used and shared."""
        blocks = self.manager.block_pool.blocks[1:]
        used = [b.ref_cnt for b in blocks if b.ref_cnt]
        cached = sum(b.block_hash is not None for b in blocks if not b.ref_cnt)
        return (len(blocks) - len(used) - cached, cached, len(used),
                sum(count > 1 for count in used))

    def free(self, sequence):
        self.manager.free(self.sequences.pop(sequence).request)


def image(position, name):
    return MultiModalFeatureSpec(None, "image", name,
                                 PlaceholderRange(position, 1))


class Lookahead(Full):
    """Slots for tokens that a draft model computes are taken as well."""
    kvtwin = kvtwin.PoolDescription(name="vLLM, lookahead of 3 tokens")
    lookahead = 3


class Dropped(Full):
    """The option that drops the last block that is found, for EAGLE; rows are those
    of the model's own layers."""
    kvtwin = kvtwin.PoolDescription(name="vLLM, use_eagle")
    eagle = True
    lookahead = 3


class Eagle(Full):
    """Rows of a draft model of EAGLE: the row at a position depends on the token
    after it, too. So a sequence has a token more than it has rows."""
    kvtwin = kvtwin.PoolDescription(name="vLLM, EAGLE")
    eagle = True
    lookahead = 1
    first = [7]


class NotEagle(Eagle):
    """The rows of Eagle, without the option that drops the last block."""
    kvtwin = kvtwin.PoolDescription(name="vLLM, EAGLE without use_eagle")
    eagle = False


class Window(Full):
    kvtwin = kvtwin.PoolDescription(name="vLLM, sliding window", window=3)


class WindowDropped(Window):
    kvtwin = kvtwin.PoolDescription(
        name="vLLM, sliding window, use_eagle", window=3)
    eagle = True
    lookahead = 3


class WindowEagle(Window):
    kvtwin = kvtwin.PoolDescription(
        name="vLLM, sliding window, EAGLE", window=3)
    eagle = True
    lookahead = 1
    first = [7]


class WindowOfOne(Window):
    kvtwin = kvtwin.PoolDescription(
        name="vLLM, sliding window of one token", window=0)


class Groups(Full):
    """Groups of full attention and of windows, with blocks of different sizes, and
    images in prompts. States are those of vllm_steps.py."""
    kvtwin = kvtwin.PoolDescription(
        name="vLLM, groups", can={"groups", "media", "one_stock"})
    operations = 4 * OPERATIONS  # Two of three pools of groups have states.

    def __init__(self, setup):
        if any(part.states for part in setup.groups):
            raise kvtwin.NotSupported
        super().__init__(setup)


class GroupsDropped(Groups):
    kvtwin = kvtwin.PoolDescription(
        name="vLLM, groups, use_eagle", can={"groups", "media", "one_stock"})
    eagle = True
    lookahead = 3


POOLS = [Full, Lookahead, Dropped, Eagle, NotEagle, Window, WindowOfOne,
         WindowDropped, WindowEagle, Groups, GroupsDropped]


def stepped(setup):
    """Histories of the scheduler and a worker (vllm_steps.py)."""
    for seed in range(HISTORIES):
        drawn, ops = vllm_steps.draw(seed, setup)
        said, findings = vllm_steps.judge(drawn, ops)
        if said is None and findings:
            raise AssertionError(f"the audit's alone: {findings}")
        if said:
            ops = shrink(ops, lambda ops: vllm_steps.judge(
                drawn, ops, audit=False)[0] is not None)
            yield f"blocks={drawn.blocks} " + " | ".join(
                " ".join(str(part) for part in op) for op in ops)
            said, findings = vllm_steps.judge(drawn, ops)
            yield from (said, f"the audit: {findings[0]}")
            return
    yield f"{HISTORIES} histories: right"


def engine():
    """Runs vllm_engine.py with each library of kernels that this processor can
    run, of which a process can load one, and returns the lines."""
    lines = []
    script = pathlib.Path(__file__).with_name("vllm_engine.py")
    for library in vllm_kernels.usable():
        said = subprocess.run(
            [sys.executable, script, library], text=True, env=ENVIRONMENT,
            stdout=subprocess.PIPE, check=True).stdout
        print(said, end="", flush=True)
        lines += said.splitlines()
    return lines


if __name__ == "__main__":
    LINES = []
    for pool in POOLS:
        LINES += page.say(f"{pool.__name__}: {pool.kvtwin.name}",
                          page.judged(pool, pool.operations))
    for name, setup in vllm_steps.SETUPS.items():
        LINES += page.say(f"Scheduler, {name}: {' '.join(setup.groups)}",
                          stepped(setup))
    LINES += vllm_offload.lines(page.say)
    LINES += engine()
    page.compare(LINES, "vllm-manager.md", left_out=vllm_kernels.left_out())
