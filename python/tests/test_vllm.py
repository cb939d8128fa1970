"""kvtwin.vllm, the audit of a live vLLM: with vLLM's Scheduler and a worker that stands
in for the model's, and with a model of random weights on the CPU. `./dev backends
vllm_manager` runs these tests. vLLM takes some 6 GB: `./dev python` skips them."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: see above")

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # The engine runs in this process.
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "docs" / "backends"))

import torch
import vllm_steps
from vllm_steps import SETUPS, Engine, Setup, Wrong

import kvtwin.vllm

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def found(*words: str) -> bool:
    """Returns True if a finding has all words."""
    return any(all(word in text for word in words) for text in kvtwin.vllm.findings)


def begun(groups: tuple[str, ...] = ("all:4",), steps: int = 3) -> Engine:
    """An engine with one request, whose prompt is computed."""
    engine = Engine(Setup(groups))
    engine.ask(PROMPT, limit=20)
    for _ in range(steps):
        engine.step()
    assert not kvtwin.vllm.findings
    return engine


def go_on(engine: Engine, steps: int = 2) -> None:
    """Makes more steps, and ignores the errors of the worker."""
    for _ in range(steps):
        try:
            engine.step()
        except Wrong:
            pass


@pytest.mark.parametrize("name", sorted(SETUPS))
def test_a_right_manager_has_no_findings(name: str) -> None:
    for seed in range(15):
        said, findings = vllm_steps.judge(*vllm_steps.draw(seed, SETUPS[name]))
        assert said is None
        assert not findings


@pytest.mark.parametrize("digests", ["xxhash", "sums"])
@pytest.mark.parametrize("groups", [("all:4",), ("window:4:6",), ("all:4", "state:4")])
def test_a_row_that_is_overwritten(groups: tuple[str, ...], digests: str,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """`sums` is the way of other memory than CPUs'."""
    if digests == "sums":
        monkeypatch.setattr(kvtwin.vllm, "xxhash", None)
    else:
        assert kvtwin.vllm.xxhash
    engine = begun(groups)
    g = len(groups) - 1
    block = engine.tables["1"][g][(engine.scheduler.requests["1"].num_computed_tokens
                                   - 1) // 4]
    engine.rows[g][block].view(-1)[0] += 1
    go_on(engine)
    assert found(f"rows of block {block} are not those that were written")
    assert len(kvtwin.vllm.findings) == 1


def test_rows_that_are_lost() -> None:
    engine = begun()
    engine.rows[0].zero_()
    go_on(engine)
    assert found("block 0 of request 1", "are not those that were written")


def test_a_swapped_entry_of_the_managers_table() -> None:
    engine = begun()
    table = engine.scheduler.kv_cache_manager.get_blocks("1").blocks[0]
    table[0], table[1] = table[1], table[0]
    go_on(engine)
    assert found("block 0 of request 1", "has rows of block 1 of request 1")


def test_a_freed_entry_of_a_table() -> None:
    engine = begun()
    manager = engine.scheduler.kv_cache_manager
    block = manager.get_blocks("1").blocks[0][0]
    manager.block_pool.free_blocks([block])
    go_on(engine)
    assert found("block 0 of request 1", f"block {block.block_id} was freed")


def test_an_entry_that_a_window_gave_up_too_early() -> None:
    engine = begun(("window:4:6",))
    manager = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    manager._remove_blocks_in_range("1", 0, 2)
    go_on(engine)
    assert found("block 1 of request 1", "it has no block")


def test_a_hit_on_other_tokens() -> None:
    engine = begun()
    request = engine.scheduler.requests["1"]
    hashes = list(request.block_hashes)
    engine.hasher, right = (lambda _: list(hashes)), engine.hasher
    engine.ask([11, 12, 13, 14, 15, 16, 17, 18, 19], limit=3)
    engine.hasher = right
    go_on(engine)
    assert found("block 0 of request 2", "has rows of block 0 of request 1",
                 "whose tokens or keys are others")


def test_a_hit_under_another_salt() -> None:
    engine = begun()
    hashes = list(engine.scheduler.requests["1"].block_hashes)
    engine.hasher = lambda _: list(hashes)
    engine.ask(PROMPT, key=1, limit=3)
    go_on(engine)
    assert found("block 0 of request 2", "whose tokens or keys are others")


def test_a_block_that_two_requests_write_to() -> None:
    engine = begun(steps=2)
    manager = engine.scheduler.kv_cache_manager
    engine.ask([11, 12], limit=20)
    engine.step()
    one, other = (manager.get_blocks(name).blocks[0] for name in "12")
    other[0] = one[len(one) - 1]
    go_on(engine, steps=1)
    assert found("of request 2", "written in this step, too") or found(
        "of request 2", "writes to block")


def test_a_state_of_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard of vllm-project/vllm#29387."""
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    monkeypatch.setattr(MambaManager, "cache_blocks", _without_guard(MambaManager))
    engine = Engine(Setup(("all:4", "state:4"), budget=16))
    engine.ask(PROMPT, limit=3)
    engine.ask([*PROMPT[:8], 20], limit=3)
    go_on(engine)
    assert found("of request 2", "gets its state in this step, from block")


def _without_guard(cls: Any) -> Any:
    cache_blocks = cls.cache_blocks

    def unguarded(self: Any, *args: Any, **kwargs: Any) -> None:
        cache_blocks(self, *args, **kwargs)
        self.cached_blocks_this_step.clear()

    return unguarded


def test_the_table_of_a_worker() -> None:
    engine = begun()
    table = engine.tables["1"][0]
    length = engine.scheduler.requests["1"].num_computed_tokens + 1
    assert engine.audit

    def attend(blocks: list[int]) -> None:
        engine.audit.bind_connector_metadata(
            engine.scheduler.schedule().kv_connector_metadata)
        engine.audit.save_kv_layer("0.layer", None, Metadata(blocks, length))

    attend(table)
    assert not kvtwin.vllm.findings
    engine.audit.save_kv_layer("0.layer", None, Metadata([9, *table[1:]], length))
    assert found("0.layer", "block table of row 0", "is not the scheduler's")


class Metadata:
    """The metadata of an attention backend, for a request with one new token."""

    def __init__(self, blocks: list[int], length: int) -> None:
        self.block_table = torch.tensor([[*blocks, 0, 0]])
        self.query_start_loc = torch.tensor([0, 1])
        self.seq_lens = torch.tensor([length])


def test_a_request_that_is_preempted_where_it_was_scheduled() -> None:
    """F31 of docs/found.md: its blocks are found, and have no rows."""
    said, findings = vllm_steps.judge(*vllm_steps.PREEMPTED)
    assert said and "has another row" in said
    assert "was never written" in findings[0]


def test_options(tmp_path: pathlib.Path) -> None:
    reporter = kvtwin.vllm._Reporter
    with pytest.raises(ValueError, match="action is 'shout'"):
        reporter({"action": "shout"})
    path = tmp_path / "report"
    reporter({"report": str(path)}).say(3, "wrong")
    assert json.loads(path.read_text()) == {"finding": "step 3: wrong"}
    with pytest.raises(kvtwin.vllm.AuditError, match="step 4: worse"):
        reporter({"action": "raise"}).say(4, "worse")


@pytest.mark.parametrize("shape", [(8, 4, 3), (16, 2, 3), (2, 8, 4, 3)])
def test_blocks_of_all_layouts_are_hashed(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.float16, torch.uint8):
        cache = torch.zeros(shape, dtype=dtype)
        pieces = kvtwin.vllm._pieces("layer", cache, 8)
        words = [kvtwin.vllm._words(piece, 8) for _, piece in pieces]
        assert words and all(word is not None and len(word) == 8 for word in words)
        view = cache.view(shape[0], -1) if shape[0] != 2 else cache[1]
        view[-1].fill_(1)  # The last block.
        assert words[-1] is not None
        assert words[-1][7].any() and not words[-1][:7].any()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A model of random weights that runs on the CPU, audited."""
    from vllm import LLM

    home = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128,
             "num_attention_heads": 2, "num_key_value_heads": 1,
             "max_position_embeddings": 512}
    (home / "config.json").write_text(json.dumps({**vllm_steps.MODEL, **sizes}))
    yield LLM(
        str(home), skip_tokenizer_init=True, load_format="dummy", dtype="float32",
        enforce_eager=True, max_model_len=256, max_num_seqs=4, block_size=32,
        kv_transfer_config={
            "kv_connector": "KvtwinAudit", "kv_connector_module_path": "kvtwin.vllm",
            "kv_role": "kv_both", "kv_connector_extra_config": {"every": 1}})


def generate(llm: Any, prompts: list[list[int]], tokens: int = 12) -> None:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params,
                 use_tqdm=False)


def test_a_model_is_audited(llm: Any) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    kvtwin.vllm.findings.clear()
    shared = [3 + i % 100 for i in range(70)]
    generate(llm, [shared, shared[:40]])
    generate(llm, [[*shared, i] for i in range(5)])
    assert not kvtwin.vllm.findings
    worker = get_kv_transfer_group()._worker
    assert worker.compared > 50
    assert sum(len(stack.names) for stack in worker.stacks[0]) == 2


def test_a_row_of_a_model_that_is_overwritten(llm: Any) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    kvtwin.vllm.findings.clear()
    worker = get_kv_transfer_group()._worker
    planted = []

    def after(step: Any) -> None:
        type(worker).after(worker, step)
        if step.written[0] and not planted:
            planted.append(step.written[0][0])
            worker.stacks[0][0].words[1, planted[0], 5] += 1

    worker.after = after
    generate(llm, [[7, 8, 9]])
    del worker.after
    assert found(f"rows of block {planted[0]} are not those that were written",
                 "in layer model.layers.1")


def test_a_table_of_a_model_with_a_wrong_entry(llm: Any) -> None:
    kvtwin.vllm.findings.clear()
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    prepare = type(runner)._prepare_inputs

    def swapped(*args: Any, **kwargs: Any) -> Any:
        table = runner.input_batch.block_table[0]
        table.block_table.np[0, 0] = 77
        return prepare(runner, *args, **kwargs)

    runner._prepare_inputs = swapped
    generate(llm, [[17, 18, 19]])
    del runner._prepare_inputs
    assert found("block table of row 0", "is not the scheduler's")
