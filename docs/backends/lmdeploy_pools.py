"""LMDeploy's managers of blocks as pools, for kvtwin's oracle: the trie decides
what a prompt finds, the block manager which blocks are taken and given up; the
rows lie here, where its block tables say. lmdeploy.md has the results."""

import os

os.environ.setdefault("LMDEPLOY_LOG_LEVEL", "CRITICAL")

import kvtwin
import lmdeploy_steps
import numpy as np
import page
import torch
from histories import judged
from lmdeploy.pytorch.config import CacheConfig, SchedulerConfig
from lmdeploy.pytorch.messages import SequenceMeta, UpdateTokenMode
from lmdeploy.pytorch.paging import Scheduler
from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy

OPERATIONS = 20_000
HISTORIES = 120
NOTHING = np.empty(0, np.int64)


class Full:
    """Full attention, with prefixes that are found. Appended rows are those of
    tokens that are reserved, as in LMDeploy, until they are committed."""
    kvtwin = kvtwin.PoolDescription(
        name="LMDeploy, full attention", can={"deduplicates"})
    window = -1

    def __init__(self, setup):
        if {setup.dtype, setup.v_dtype} != {"f32"}:
            raise kvtwin.NotSupported
        self.setup, self.size = setup, setup.block_size
        cache = CacheConfig(
            max_batches=64, block_size=self.size, num_cpu_blocks=0,
            num_gpu_blocks=setup.blocks + 1, window_size=self.window,
            enable_prefix_caching=self.window < 0, num_reserved_gpu_blocks=1)
        self.scheduler = Scheduler(
            SchedulerConfig(64, setup.max_seq_len), cache,
            SequenceMeta(self.size, strategy=ARSequenceStrategy()))
        self.manager = self.scheduler.block_manager
        self.trie = self.scheduler.block_trie
        shape = setup.blocks + 1, self.size, setup.kv_heads
        self.rows = [[np.zeros((*shape, dim), np.float32) for dim in
                      (setup.k_head_dim, setup.v_head_dim)]
                     for _ in range(setup.layers)]
        self.sequences, self.appended = {}, {}

    def open(self, prompt, salt, extra):
        number = min(set(range(len(self.sequences) + 1)) - set(self.sequences))
        adapter = repr((salt, extra)) if salt or extra else None
        one = self.scheduler.add_session(number).add_sequence(
            np.array(prompt, np.int64), adapter_name=adapter)
        self.trie.match(one)
        # The tokens that were not found may turn out to be others.
        one.history_cache.resize(one.num_history_ids)
        one._num_token_ids = 0
        self.sequences[number], self.appended[number] = one, {}
        return number

    def seq_len(self, sequence):
        return self.sequences[sequence].num_history_ids

    def append(self, sequence, layer, key, value):
        one = self.sequences[sequence]
        begin, end = self.seq_len(sequence), self.seq_len(sequence) + len(key)
        if end > self.setup.max_seq_len:
            raise kvtwin.CacheFull
        # As Scheduler.schedule_running.
        if self.manager.num_required_blocks(one, len(key)):
            if not self.scheduler.eviction_helper.try_make_capacity_for(
                    one, [], len(key)):
                raise kvtwin.CacheFull
            self.manager.allocate(one, len(key))
            self.trie.allocate(one)
        self.appended[sequence][layer] = end
        table = self.blocks_of(one)
        for p, *rows in zip(range(begin, end), key, value):
            index, slot = divmod(p - one.num_ignored_history, self.size)
            for to, row in zip(self.rows[layer], rows):
                to[table[index], slot] = row

    def commit(self, sequence, tokens):
        one = self.sequences[sequence]
        one.update_token_ids(np.array(tokens, np.int64),
                             mode=UpdateTokenMode.INPUTS)
        one.update_token_ids(NOTHING, mode=UpdateTokenMode.PREFILL)
        self.appended[sequence] = {}
        self.trie.allocate(one)

    def blocks_of(self, one):
        return self.manager.get_block_table(one).tolist()

    def views(self, sequence, layer):
        one = self.sequences[sequence]
        start, out = one.num_ignored_history, []
        end = self.appended[sequence].get(layer, self.seq_len(sequence))
        for block in self.blocks_of(one):
            rows = slice(0, min(self.size, end - start))
            if start >= end:
                break
            out.append((*(x[block, rows] for x in self.rows[layer]),
                        block - 1, start))
            start += self.size
        return out

    def table(self, sequences):
        ones = [self.sequences[s] for s in sequences]
        return [([-1] * (one.num_ignored_history // self.size) +
                 [block - 1 for block in self.blocks_of(one)])[
                     :-(-one.num_history_ids // self.size)] for one in ones]

    def usage(self):
        """Returns the blocks that are free, cached, used and shared."""
        counts = self.manager.allocator._log_mem.ref_count.copy()
        cached = [node.block_id for root in self.trie._roots.values()
                  for node in below(root)]
        counts[cached] -= 1
        used, shared = int((counts > 0).sum()), int((counts > 1).sum())
        free = self.manager.get_num_free_gpu_blocks()
        return free, int((counts[cached] == 0).sum()), used, shared

    def free(self, sequence):
        self.scheduler.end_session(sequence)
        del self.sequences[sequence], self.appended[sequence]


def below(node):
    for child in node.children.values():
        yield child
        yield from below(child)


class Window(Full):
    """A sliding window of three positions before a token. There are no
    prefixes, as in LMDeploy."""
    kvtwin = kvtwin.PoolDescription(name="LMDeploy, sliding window", window=3)
    window = 3

    def append(self, sequence, layer, key, value):
        # LMDeploy reserves blocks once before the tokens of a step are known.
        if self.appended[sequence] and self.manager.num_required_blocks(
                self.sequences[sequence], len(key)):
            raise kvtwin.CacheFull
        super().append(sequence, layer, key, value)

    def commit(self, sequence, tokens):
        super().commit(sequence, tokens)
        # Blocks of tokens that were not committed are taken back.
        one = self.sequences[sequence]
        left = self.seq_len(sequence) - one.num_ignored_history
        self.manager.truncate(one, min(one.num_blocks, -(-left // self.size)))


class Control(Full):
    """A planted bug: tokens are found without their adapter."""
    kvtwin = kvtwin.PoolDescription(
        name="Full with a planted bug, to show what would be seen",
        can={"deduplicates"})

    def __init__(self, setup):
        super().__init__(setup)
        make = self.trie._get_or_create_root
        self.trie._get_or_create_root = lambda name: make(None)


POOLS = [Full, Window, Control]


if __name__ == "__main__":
    torch.set_num_threads(1)
    LINES, WRONG = [], {}
    for pool in POOLS:
        LINES += page.say(f"{pool.__name__}: {pool.kvtwin.name}",
                          page.judged(pool, OPERATIONS))
    for name, setup in lmdeploy_steps.SETUPS.items():
        said = list(judged(lmdeploy_steps, setup, HISTORIES))
        LINES += page.say(f"Engine, {name}", said)
        if len(said) > 1:
            WRONG[name] = setup
    lmdeploy_steps.repair()
    for name, setup in WRONG.items():
        LINES += page.say(f"Engine, {name}, two bugs repaired",
                          judged(lmdeploy_steps, setup, HISTORIES))
    page.compare(LINES, "lmdeploy.md")
