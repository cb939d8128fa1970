"""vLLM's hashes of blocks, for pinned.py: a pool that finds a prompt's blocks by
them. Blocks and rows are kept here."""

import importlib.machinery
import sys
import types
from unittest import mock

import kvtwin
import numpy as np
from pinned import without_init

LIVE = True


class StandIns:
    """Modules of vLLM that the hashes do not use."""

    def find_spec(self, name, path, target=None):
        if name.startswith("vllm.") and not name.endswith(".kv_cache_utils"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return mock.MagicMock()

    def exec_module(self, module):
        pass


def hasher(block_size):
    """vLLM's block hasher, without what needs the rest of vLLM."""
    if "vllm" in sys.modules:
        return sys.modules["vllm.v1.core.kv_cache_utils"].hasher(block_size)
    without_init("vllm", "vllm.v1", "vllm.v1.core")
    sys.meta_path.insert(0, StandIns())
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    utils.NONE_HASH = b"none"
    utils.hasher = lambda size: utils.get_request_block_hasher(
        size, lambda parts: repr(parts).encode())
    return utils.hasher(block_size)


class Pool:
    kvtwin = kvtwin.PoolDescription(name="blocks by vLLM's hashes")
    operations = 60_000

    def __init__(self, setup):
        if {setup.dtype, setup.v_dtype} != {"f32"}:
            raise kvtwin.NotSupported
        self.setup = setup
        self.hashes_of = hasher(setup.block_size)
        self.sequences = {}
        self.owners = [0] * setup.blocks
        self.by_hash = {}
        self.rows = {}  # By block and layer: K, V.

    def request(self, tokens, salt, extra):
        adapter = extra[0] if len(extra) == 1 else repr(extra)
        return types.SimpleNamespace(
            num_tokens=len(tokens), all_token_ids=list(tokens),
            block_hashes=[], cache_salt=salt or None, mm_features=[],
            prompt_embeds=None, prompt_embeds_per_block_hashes={},
            lora_request=types.SimpleNamespace(
                lora_name=adapter, lora_path=adapter) if extra else None)

    def open(self, prompt, salt, extra):
        number = next(i for i in range(1000) if i not in self.sequences)
        one = self.sequences[number] = types.SimpleNamespace(
            key=(salt, tuple(extra)), tokens=[], blocks=[], pending={})
        for block_hash in self.hashes_of(self.request(prompt[:-1], salt, extra)):
            if block_hash not in self.by_hash:
                break
            one.blocks.append(self.by_hash[block_hash])
            self.owners[one.blocks[-1]] += 1
        count = len(one.blocks) * self.setup.block_size
        one.tokens = list(prompt[:count])
        return number

    def seq_len(self, sequence):
        return len(self.sequences[sequence].tokens)

    def append(self, sequence, layer, key, value):
        one, size = self.sequences[sequence], self.setup.block_size
        end = len(one.tokens) + len(key)
        missing = -(-end // size) - len(one.blocks)
        free = [b for b, owners in enumerate(self.owners) if not owners]
        if end > self.setup.max_seq_len or missing > len(free):
            raise kvtwin.CacheFull
        for block in free[:max(0, missing)]:
            self.owners[block] = 1
            self.by_hash = {h: b for h, b in self.by_hash.items() if b != block}
            one.blocks.append(block)
        one.pending[layer] = len(key)
        for i, pair in enumerate(zip(key, value), len(one.tokens)):
            block = one.blocks[i // size], layer
            self.rows.setdefault(block, [None] * size)[i % size] = pair

    def commit(self, sequence, tokens):
        one, size = self.sequences[sequence], self.setup.block_size
        one.tokens += tokens
        one.pending = {}
        while len(one.blocks) > -(-len(one.tokens) // size):
            self.owners[one.blocks.pop()] -= 1
        hashes = self.hashes_of(self.request(one.tokens, *one.key))
        for block, block_hash in zip(one.blocks, hashes):
            self.by_hash.setdefault(block_hash, block)

    def views(self, sequence, layer):
        one, size = self.sequences[sequence], self.setup.block_size
        end = len(one.tokens) + one.pending.get(layer, 0)
        out = []
        for i, block in enumerate(one.blocks[:-(-end // size)]):
            rows = self.rows[block, layer][:end - i * size]
            out.append((*(np.stack(x) for x in zip(*rows)), block, i * size))
        return out

    def free(self, sequence):
        for block in self.sequences.pop(sequence).blocks:
            self.owners[block] -= 1
