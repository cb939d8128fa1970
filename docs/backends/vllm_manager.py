"""vLLM's KVCacheManager as a pool of blocks, for kvtwin's oracle: the manager
decides what a prompt finds, which blocks are taken and which are given up; the
rows lie here, where its block tables say. vllm-manager.md has the results."""

import os
import types

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import kvtwin
import numpy as np
import page
import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (FullAttentionSpec, KVCacheConfig,
                                        KVCacheGroupSpec, SlidingWindowSpec)
from vllm.v1.request import Request

kv_cache_utils.init_none_hash(sha256)
OPERATIONS = 40_000


class Full:
    """Full attention, in one group. A request is known to the manager by the
    tokens that were found and then committed; appended rows are those of draft
    tokens until then."""
    kvtwin = kvtwin.PoolDescription(name="vLLM, full attention")
    eagle = False
    lookahead = 0

    def __init__(self, setup):
        if {setup.dtype, setup.v_dtype} != {"f32"}:
            raise kvtwin.NotSupported
        self.setup = setup
        size = setup.block_size
        group = KVCacheGroupSpec(["layer"], self.spec(
            block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32))
        self.hasher = kv_cache_utils.get_request_block_hasher(size, sha256)
        self.manager = KVCacheManager(  # Its block 0 is never given out.
            KVCacheConfig(setup.blocks + 1, [], [group]), setup.max_seq_len + 1,
            size, size, use_eagle=self.eagle)
        shape = setup.layers, setup.blocks + 1, size, setup.kv_heads
        self.keys = np.zeros((*shape, setup.k_head_dim), np.float32)
        self.values = np.zeros((*shape, setup.v_head_dim), np.float32)
        self.sequences = {}

    def spec(self, **common):
        return FullAttentionSpec(**common)

    def request(self, number, tokens, salt, extra):
        adapter = extra[0] if len(extra) == 1 else repr(extra)
        return Request(
            str(number), list(tokens), SamplingParams(max_tokens=1), None,
            cache_salt=salt or None, block_hasher=self.hasher,
            lora_request=LoRARequest(adapter or "-", 1, adapter or "-")
            if extra else None)

    def open(self, prompt, salt, extra):
        number = min(set(range(len(self.sequences) + 1)) - set(self.sequences))
        # With `first`, the token after the last row that can be found is known.
        asked = (self.first + prompt)[:len(prompt)]
        found, blocks = 0, None
        if asked:
            blocks, found, _ = self.manager.get_computed_blocks(
                self.request(number, asked, salt, extra))
        request = self.request(
            number, asked[:found + len(self.first)], salt, extra)
        if found and self.manager.allocate_slots(
                request, 0, found, blocks) is None:
            found, request = 0, self.request(number, self.first, salt, extra)
        request.num_computed_tokens = found
        self.sequences[number] = types.SimpleNamespace(
            request=request, pending={})
        return number

    first = []  # Tokens before a prompt.

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
        table = self.table_of(sequence)
        for i, *rows in zip(range(begin, begin + len(key)), key, value):
            block, slot = table[i // self.setup.block_size], (
                i % self.setup.block_size)
            self.keys[layer, block, slot] = rows[0]
            self.values[layer, block, slot] = rows[1]

    def commit(self, sequence, tokens):
        one = self.sequences[sequence]
        one.request.append_output_token_ids(list(tokens))
        one.request.num_computed_tokens += len(tokens)
        one.pending = {}
        self.manager.cache_blocks(one.request, self.seq_len(sequence))

    def views(self, sequence, layer):
        size = self.setup.block_size
        end = self.seq_len(sequence) + (
            self.sequences[sequence].pending.get(layer, 0))
        out = []
        for i, block in enumerate(self.table_of(sequence)[:-(-end // size)]):
            if block:  # Blocks that a window has left are block 0.
                rows = slice(0, min(size, end - i * size))
                out.append((self.keys[layer, block, rows],
                            self.values[layer, block, rows], block - 1,
                            i * size))
            elif out:
                raise AssertionError(f"block {i} is gone, an earlier is not")
        return out

    def table_of(self, sequence):
        return self.manager.get_block_ids(str(sequence))[0]

    def table(self, sequences):
        size = self.setup.block_size
        return [[block - 1 for block in
                 self.table_of(s)[:-(-self.seq_len(s) // size)]]
                for s in sequences]

    def usage(self):
        """Free, found by prompts alone, used, shared."""
        blocks = self.manager.block_pool.blocks[1:]
        used = [b.ref_cnt for b in blocks if b.ref_cnt]
        cached = sum(b.block_hash is not None for b in blocks if not b.ref_cnt)
        return (len(blocks) - len(used) - cached, cached, len(used),
                sum(count > 1 for count in used))

    def free(self, sequence):
        self.manager.free(self.sequences.pop(sequence).request)


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
    """The same rows, without the option that drops the last block."""
    kvtwin = kvtwin.PoolDescription(name="vLLM, EAGLE without use_eagle")
    eagle = False


class Window(Full):
    kvtwin = kvtwin.PoolDescription(name="vLLM, sliding window", window=3)

    def spec(self, **common):
        return SlidingWindowSpec(
            **common, sliding_window=self.kvtwin.window + 1)


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


POOLS = [Full, Lookahead, Dropped, Eagle, NotEagle, Window, WindowOfOne,
         WindowDropped, WindowEagle]


def judged(cls):
    result = kvtwin.fuzz(cls, operations=OPERATIONS)
    if result:
        yield f"{result.histories} histories: right"
    for finding in result.findings:
        yield finding.history
        yield finding.reason


if __name__ == "__main__":
    LINES = []
    for pool in POOLS:
        LINES += page.say(f"{pool.__name__}: {pool.kvtwin.name}", judged(pool))
    page.compare(LINES, "vllm-manager.md")
