"""An audit of a live vLLM, as a KV connector that loads and saves nothing:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvtwinAudit",
        "kv_connector_module_path": "kvtwin.vllm", "kv_role": "kv_both"}'

At each step it compares the blocks that the scheduled requests are about to read with
what was written to them. docs/vllm-audit.md describes it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

try:
    import xxhash
except ImportError:  # It makes the audit faster on CPUs.
    xxhash = None  # type: ignore[assignment]

#: The findings of this process, the oldest first.
findings: list[str] = []

_logger = logging.getLogger("vllm.kvtwin")
_CHUNK = 1 << 23  # The words that are hashed at once.


class AuditError(AssertionError):
    """A finding, with the option `"action": "raise"`."""


class _Reporter:
    """Reports each finding once, as the options say."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.action = options.get("action", "log")
        self.path = options.get("report")
        self.said: set[str] = set()
        if self.action not in ("log", "raise"):
            raise ValueError(f"action is {self.action!r}, it must be log or raise")

    def say(self, step: int, text: str) -> None:
        if text in self.said:
            return
        self.said.add(text)
        text = f"step {step}: {text}"
        findings.append(text)
        _logger.error("kvtwin: %s", text)
        if self.path:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"finding": text}) + "\n")
        if self.action == "raise":
            raise AuditError(text)


@dataclasses.dataclass
class _Group:
    """A group of layers: which blocks of a sequence the next token needs."""

    block_size: int
    layers: list[str]
    #: "all", "window", "chunk" or "state"; "" if the group is not followed.
    kind: str
    #: The tokens of a window or of a chunk.
    reach: int = 0
    #: True if a row depends on the token after its own, too.
    lookahead: bool = False

    def needed(self, done: int) -> tuple[int, int]:
        """Returns the range of blocks of which the token at position `done` needs rows
        that are computed already, as its first block and its end."""
        size = self.block_size
        end = -(-done // size)
        first = 0
        if self.kind == "window":
            first = max(0, done - self.reach + 1)
        elif self.kind == "chunk":
            first = done // self.reach * self.reach
        elif self.kind == "state":
            first = max(0, done - 1)
        return min(first // size, end), end


def _group_of(spec: Any, layers: list[str], block_size: int, lookahead: bool) -> _Group:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    group = _Group(block_size, layers, "", 0, lookahead)
    if isinstance(spec, MambaSpec):
        group.kind = "state"
    elif isinstance(spec, SlidingWindowSpec):
        group.kind, group.reach = "window", spec.sliding_window
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        group.kind, group.reach = "chunk", spec.attention_chunk_size
    elif isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec):
        group.kind = "all"
    return group


@dataclasses.dataclass
class _Content:
    """The rows of a block: those of the tokens of a request up to position `end`."""

    request: Any
    group: int
    index: int
    end: int
    step: int
    copied: bool = False  # A copy of a whole block.

    def __str__(self) -> str:
        return f"block {self.index} of {_name(self.request)}"


@dataclasses.dataclass
class _Step(KVConnectorMetadata):
    """The blocks of a step, by group: blocks whose rows are compared before the step,
    and blocks that the step writes to."""

    number: int
    #: By block: its index in the table of a request, and the request's name.
    reads: list[dict[int, tuple[int, str]]]
    written: list[list[int]]
    #: By group: how often each (computed tokens, new tokens, needed blocks) is expected
    #: in the block table. None: not compared in this step.
    tables: list[Counter[tuple[int, ...]]] | None


def _name(request: Any) -> str:
    return f"request {request.request_id}"


def _key(request: Any, end: int) -> tuple[Any, ...]:
    """Returns all keys on which rows before `end` depend, besides tokens."""
    lora = request.lora_request
    return (
        request.cache_salt or None,
        (lora.lora_name, lora.lora_path) if lora else None,
        [
            (media.identifier, media.mm_position.offset)
            for media in request.mm_features
            if media.mm_position.offset < end
        ],
    )


def _alike(one: Any, other: Any, begin: int, end: int) -> bool:
    """Returns True if rows before `end` are the same for both requests. Rows before
    `begin` are known to be the same."""
    a, b = one.prompt_embeds, other.prompt_embeds
    if (a is None) != (b is None) or (
        a is not None and not torch.equal(a[begin:end], b[begin:end])
    ):
        return False
    return bool(
        one.all_token_ids[begin:end] == other.all_token_ids[begin:end]
        and _key(one, end) == _key(other, end)
    )


@dataclasses.dataclass
class _Tracked:
    """The sampled blocks of a running request, by group: index and block."""

    seen: list[int]
    blocks: list[list[tuple[int, int]]]


class _Planner:
    """The part in the scheduler, which knows tokens and block tables."""

    def __init__(self, manager: Any, every: int, reporter: _Reporter,
                 compares_tables: bool) -> None:
        self.manager = manager
        self.every = every
        self.reporter = reporter
        self.step = 0
        managers = manager.coordinator.single_type_managers
        self.groups = [
            _group_of(
                group.kv_cache_spec,
                group.layer_names,
                managers[i].block_size,
                i in manager.coordinator.eagle_group_ids,
            )
            for i, group in enumerate(manager.kv_cache_config.kv_cache_groups)
        ]
        self.requests: dict[str, Any] = {}
        self.tracked: dict[str, _Tracked] = {}
        self.contents: dict[int, _Content] = {}
        self.external: set[int] = set()
        #: By group and block: the requests that read it in this step, and as which.
        self.readers: dict[tuple[int, int], list[tuple[Any, int]]] = {}
        #: By two requests: the end of the rows that this step found to be the same.
        self.shared: dict[tuple[int, int], int] = {}
        self.compares_tables = compares_tables

    def add(self, request: Any, blocks: Any, external: int) -> None:
        """A request was given its first blocks, or came back after a preemption."""
        self.requests[request.request_id] = request
        empty: list[list[tuple[int, int]]] = [[] for _ in self.groups]
        self.tracked[request.request_id] = _Tracked([0] * len(self.groups), empty)
        if external:  # Other connectors write these blocks.
            for group in blocks.blocks:
                self.external.update(block.block_id for block in group)

    def remove(self, request: Any) -> None:
        self.requests.pop(request.request_id, None)
        self.tracked.pop(request.request_id, None)

    def say(self, request: Any, g: int, i: int, text: str) -> None:
        """Reports a finding about a block of a request."""
        self.reporter.say(self.step, f"block {i} of {_name(request)}, group {g}: {text}")

    def plan(self, out: Any) -> _Step:
        self.step += 1
        self.readers.clear()
        self.shared.clear()
        step = _Step(
            self.step,
            [{} for _ in self.groups],
            [[] for _ in self.groups],
            [Counter() for _ in self.groups]
            if self.compares_tables and self.step % self.every == 0
            else None,
        )
        copied = {
            copy.dst_block_id: copy.src_block_id
            for copy in out.kv_cache_block_copies or ()
        }
        for to, source in copied.items():
            if source in self.contents:
                held = self.contents[source]
                if held.step == self.step:
                    self.reporter.say(
                        self.step, f"block {to} is a copy of {held}, of this step"
                    )
                self.contents[to] = dataclasses.replace(
                    held, step=self.step, copied=True
                )
                if to % self.every == 0:
                    step.written[held.group].append(to)
        for number, (name, count) in enumerate(out.num_scheduled_tokens.items()):
            request = self.requests.get(name)
            if request is None:
                continue
            whole = (self.step + number) % self.every == 0
            tables = self.manager.get_blocks(name).blocks
            for g, table in enumerate(tables):
                if self.groups[g].kind:
                    self.plan_group(step, request, g, table, count, whole)
        return step

    def plan_group(self, step: _Step, request: Any, g: int, table: Sequence[Any],
                   count: int, whole: bool) -> None:
        group = self.groups[g]
        done = request.num_computed_tokens
        first, end = group.needed(done)
        if whole:
            for i in range(first, end):
                self.check_entry(request, g, i, table)
        for i, block in self.sampled(request, g, table, first, end):
            held = self.contents.get(block)
            if held is None or held.step < self.step:
                step.reads[g][block] = i, request.request_id
                self.readers.setdefault((g, block), []).append((request, i))
        if step.tables is not None:
            ids = (table[i].block_id for i in range(first, min(end, len(table))))
            step.tables[g][(done, count, *ids)] += 1
        self.write(step, request, g, table, count)

    def sampled(self, request: Any, g: int, table: Sequence[Any], first: int,
                end: int) -> list[tuple[int, int]]:
        """Returns the sampled blocks from `first` to `end`. New blocks are checked."""
        tracked = self.tracked[request.request_id]
        if self.groups[g].kind == "state":  # Each step has a new table.
            tracked.seen[g], tracked.blocks[g] = first, []
        known = tracked.blocks[g]
        for i in range(max(first, tracked.seen[g]), min(end, len(table))):
            if table[i].block_id % self.every == 0 or table[i].is_null:
                self.check_entry(request, g, i, table)
                if not table[i].is_null:
                    known.append((i, table[i].block_id))
        tracked.seen[g] = max(tracked.seen[g], end)
        while known and known[0][0] < first:
            known.pop(0)
        return known

    def check_entry(self, request: Any, g: int, i: int, table: Sequence[Any]) -> None:
        """Compares an entry of a block table whose rows are needed with its block."""
        if i >= len(table) or table[i].is_null:
            self.say(request, g, i, "its rows are needed, and it has no block")
            return
        block = table[i]
        if block.ref_cnt < 1:
            self.say(request, g, i, f"block {block.block_id} was freed")
        if block.block_id % self.every or block.block_id in self.external:
            return
        held = self.contents.get(block.block_id)
        group = self.groups[g]
        end = min(request.num_computed_tokens, (i + 1) * group.block_size)
        if held is None:
            wrong = "was never written"
        elif (held.group, held.index) != (g, i):
            wrong = f"has rows of {held}, group {held.group}"
        elif not self.alike(held.request, request, end + group.lookahead):
            wrong = f"has rows of {held}, whose tokens or keys are others"
        elif held.end < end:
            wrong = f"has rows up to position {held.end} alone, {end} are needed"
        elif group.kind == "state" and held.step == self.step and not held.copied:
            wrong = f"gets its state in this step, from {held}"
        else:
            return
        self.say(request, g, i, f"block {block.block_id} {wrong}")

    def alike(self, one: Any, other: Any, end: int) -> bool:
        """Returns True if rows before `end` are the same for both requests. Blocks are
        asked in order: each token is compared once in a step."""
        pair = id(one), id(other)
        begin = self.shared.get(pair, 0)
        if one is other or end <= begin:
            return True
        if not _alike(one, other, begin, end):
            return False
        self.shared[pair] = end
        return True

    def write(self, step: _Step, request: Any, g: int, table: Sequence[Any],
              count: int) -> None:
        """Notes the blocks that a request writes to in this step."""
        group = self.groups[g]
        done = request.num_computed_tokens
        for i in range(done // group.block_size, len(table)):
            block = table[i].block_id
            if block % self.every or table[i].is_null:
                continue
            end = min(done + count, (i + 1) * group.block_size)
            held = self.contents.get(block)
            if (
                held
                and held.step == self.step
                and held.request is not request
                and not held.copied
            ):
                self.say(
                    request, g, i,
                    f"block {block} is {held}, which is written in this step, too",
                )
            for reader, index in self.readers.get((g, block), ()):
                if reader is not request:
                    self.say(
                        request, g, i,
                        f"writes to block {block}, which is block {index} of "
                        f"{_name(reader)}",
                    )
            self.contents[block] = _Content(request, g, i, end, self.step)
            self.external.discard(block)
            step.written[g].append(block)


@dataclasses.dataclass
class _Stack:
    """Layers whose blocks lie alike: the words of their blocks, as (layers, blocks,
    words), and the hashes that were stored of them, as (layers, blocks)."""

    names: list[str]
    words: torch.Tensor
    hashes: torch.Tensor
    weights: torch.Tensor
    #: The bytes of each layer from its first block on. The list is empty on GPUs, and
    #: without xxhash.
    layers: list[memoryview]

    def hash(self, blocks: list[int]) -> torch.Tensor:
        """Returns the hashes of these blocks: XXH3, which reads them once, or sums of
        products, modulo 2 to the 64."""
        layers, _, words = self.words.shape
        if self.layers:
            unit = self.words.element_size()
            step, size = self.words.stride(1) * unit, words * unit
            starts = [block * step for block in blocks]
            digests = array("Q", [
                xxhash.xxh3_64_intdigest(layer[start : start + size])
                for layer in self.layers
                for start in starts
            ])
            return torch.frombuffer(digests, dtype=torch.int64).view(layers, -1)
        chosen = torch.tensor(blocks, device=self.words.device)
        parts = [
            (self.words.index_select(1, part).to(torch.int64) * self.weights).sum(-1)
            for part in chosen.split(max(1, _CHUNK // (layers * words)))
        ]
        return torch.cat(parts, 1)


def _pieces(name: str, cache: Any, blocks: int) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors of a layer with the blocks in their first dimension."""
    if not isinstance(cache, torch.Tensor):  # A layer may have several states.
        return [piece for part in cache for piece in _pieces(name, part, blocks)]
    if cache.shape[0] % blocks == 0:
        return [(name, cache)]
    if cache.ndim > 1 and cache.shape[1] % blocks == 0:  # K and V.
        return [(name, part) for part in cache]
    return []


def _words(tensor: torch.Tensor, blocks: int) -> torch.Tensor | None:
    """Returns the words of each block, (blocks, words), without a copy, or None if a
    block does not lie in one piece."""
    inner = tensor[0]
    dense = sorted(zip(inner.stride(), inner.shape))
    width = 1
    for stride, size in dense:
        if size > 1 and stride != width:
            return None
        width *= size
    split = tensor.shape[0] // blocks  # Smaller blocks of a kernel.
    if split > 1 and tensor.stride(0) != width:
        return None
    bytes_of = tensor.element_size()
    start = tensor.storage_offset() * bytes_of
    step = tensor.stride(0) * split * bytes_of
    length = width * split * bytes_of
    for dtype, unit in ((torch.int64, 8), (torch.int32, 4), (torch.uint8, 1)):
        if start % unit == step % unit == length % unit == 0:
            view = torch.empty(0, dtype=dtype, device=tensor.device)
            return view.set_(
                tensor.untyped_storage(),
                start // unit,
                (blocks, length // unit),
                (step // unit, 1),
            )
    return None


class _Worker:
    """The part in a worker, which knows rows."""

    def __init__(self, config: Any, reporter: _Reporter) -> None:
        self.blocks = config.num_blocks
        self.groups = [
            _group_of(
                group.kv_cache_spec,
                group.layer_names,
                group.kv_cache_spec.block_size,
                False,
            )
            for group in config.kv_cache_groups
        ]
        self.reporter = reporter
        self.stacks: list[list[_Stack]] = [[] for _ in self.groups]
        self.known = [[False] * self.blocks for _ in self.groups]
        #: The first layer of each group, whose block table is compared.
        self.first_layers = {
            group.layers[0]: g for g, group in enumerate(self.groups) if group.layers
        }
        self.begun = 0  # The number of the step whose rows were compared.
        #: Blocks that were compared.
        self.compared = 0

    def register(self, caches: dict[str, Any]) -> None:
        for g, group in enumerate(self.groups):
            alike: dict[Any, list[tuple[str, torch.Tensor]]] = {}
            for name in group.layers:
                for piece, tensor in _pieces(name, caches.get(name, ()), self.blocks):
                    words = _words(tensor, self.blocks)
                    if words is None:
                        _logger.warning("kvtwin: layer %s is not followed", piece)
                        continue
                    shape = words.shape, words.stride(), words.dtype
                    where = words.untyped_storage().data_ptr()
                    alike.setdefault((shape, where), []).append((piece, words))
            self.stacks[g] = [
                stack for layers in alike.values() for stack in self.stack(layers)
            ]

    def stack(self, layers: list[tuple[str, torch.Tensor]]) -> list[_Stack]:
        """Returns one stack, if the layers lie at equal distances in one storage."""
        layers = sorted(layers, key=lambda layer: layer[1].storage_offset())
        offsets = [words.storage_offset() for _, words in layers]
        gaps = {b - a for a, b in zip(offsets, offsets[1:])}
        if len(gaps) > 1:
            return [stack for layer in layers for stack in self.stack([layer])]
        words = layers[0][1]
        gap = gaps.pop() if gaps else 0
        whole = words.as_strided(
            (len(layers), *words.shape), (gap, *words.stride()), offsets[0]
        )
        made = torch.Generator().manual_seed(1)
        weights = torch.randint(-(2**62), 2**62, words.shape[1:], generator=made)
        storage = words.untyped_storage()
        bytes_of: list[memoryview] = []
        if xxhash and words.device.type == "cpu":
            every = torch.empty(0, dtype=torch.uint8).set_(
                storage, 0, (storage.nbytes(),), (1,)
            )
            bytes_of = [
                memoryview(every.numpy())[offset * words.element_size() :]
                for offset in offsets
            ]
        return [
            _Stack(
                [name for name, _ in layers],
                whole,
                torch.zeros(
                    whole.shape[:2], dtype=torch.int64, device=words.device
                ),
                (weights * 2 + 1).to(words.device),
                bytes_of,
            )
        ]

    def before(self, step: _Step) -> None:
        """Compares the rows that the step reads with the rows that were written."""
        if self.begun == step.number:
            return
        self.begun = step.number
        for g, reads in enumerate(step.reads):
            ids = []
            for block in reads:
                if self.known[g][block]:
                    ids.append(block)
                elif self.stacks[g]:
                    self.known[g][block] = True
                    step.written[g].append(block)  # Another connector wrote it.
            self.compared += len(ids)
            for stack in self.stacks[g] if ids else ():
                differs = stack.hash(ids) != stack.hashes[:, ids]
                if bool(differs.any()):
                    self.tell(step, stack, ids, differs, reads)

    def tell(self, step: _Step, stack: _Stack, ids: list[int], differs: torch.Tensor,
             reads: dict[int, tuple[int, str]]) -> None:
        for at, block in enumerate(ids):
            layers = [
                name for name, wrong in zip(stack.names, differs[:, at]) if bool(wrong)
            ]
            if layers:
                more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
                i, name = reads[block]
                self.reporter.say(
                    step.number,
                    f"block {i} of request {name}: the rows of block {block} are not "
                    f"those that were written, in layer {layers[0]}{more}",
                )

    def check_table(self, step: _Step, layer: str, metadata: Any) -> None:
        """Compares the block table that a layer's attention reads with the plan."""
        at = self.first_layers.get(layer)
        if step.tables is None or at is None:
            return
        if isinstance(metadata, dict):
            metadata = metadata.get(layer)
        table = getattr(metadata, "block_table", None)
        starts = getattr(metadata, "query_start_loc", None)
        lengths = getattr(metadata, "seq_lens", None)
        if table is None or starts is None or lengths is None:
            return
        starts, table = starts.tolist(), table.tolist()
        unseen = Counter(step.tables[at])
        for row, length in enumerate(lengths.tolist()[: len(starts) - 1]):
            count = starts[row + 1] - starts[row]
            first, end = self.groups[at].needed(length - count)
            entry = (length - count, count, *table[row][first:end])
            if unseen[entry] > 0:
                unseen[entry] -= 1
            elif count > 0:
                self.reporter.say(
                    step.number,
                    f"layer {layer}: the block table of row {row}, of {length} tokens, "
                    "is not the scheduler's",
                )

    def after(self, step: _Step) -> None:
        """Stores the hashes of the blocks that were written."""
        for g, written in enumerate(step.written):
            if not written:
                continue
            for stack in self.stacks[g]:
                stack.hashes[:, written] = stack.hash(written)
            for block in written:
                self.known[g][block] = True


class KvtwinAudit(KVConnectorBase_V1, SupportsHMA):
    """The connector. Its options are those of `kv_connector_extra_config`: `every`, 1 of
    how many blocks is compared (16 by default); `action`, log or raise; `report`, the
    path of a file that gets a line of JSON for each finding."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._every = int(options.get("every", 16))
        if self._every < 1:
            raise ValueError(f"every is {self._every}, it must be at least 1")
        self._reporter = _Reporter(options)
        #: With drafts in flight, a worker corrects lengths that the scheduler guessed.
        self._compares_tables = vllm_config.speculative_config is None
        self._planner: _Planner | None = None
        self._worker: _Worker | None = None
        #: In a worker: the step, if it has block tables to compare. Each layer asks.
        self._compared: _Step | None = None
        if role == KVConnectorRole.WORKER:
            self._worker = _Worker(kv_cache_config, self._reporter)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # In the scheduler.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._planner = _Planner(
            kv_cache_manager, self._every, self._reporter, self._compares_tables
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        assert self._planner
        self._planner.add(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        assert self._planner
        return self._planner.plan(scheduler_output)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        assert self._planner
        self._planner.remove(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, None]:
        return self.request_finished(request, block_ids)

    # In a worker. A step calls handle_preemptions, bind_connector_metadata, the layers
    # one by one, and wait_for_save.

    def register_kv_caches(self, kv_caches: Any) -> None:
        assert self._worker
        self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        assert self._worker
        self._worker.before(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert self._worker
        self._compared = connector_metadata if connector_metadata.tables else None
        self._worker.before(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._compared and self._worker:
            self._worker.check_table(self._compared, layer_name, attn_metadata)

    def wait_for_save(self) -> None:
        assert self._worker
        if self.has_connector_metadata():
            self._worker.after(self._get_connector_metadata())
