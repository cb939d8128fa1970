"""Measures the cost of the audit of kvtwin.vllm: steps of a model of random weights, of
the sizes of SmolLM2-135M, on vLLM's CPU backend, without a connector, with a connector
that does nothing, with an audit of 1 of 16 blocks, and of all blocks. The four processes
take turns of a few decode steps, and their processor time is compared, so that other
work on the machine counts little. Then four new processes do the same, since where a
process got its memory counts as well. docs/vllm-audit.md has results.

    build/backends/vllm_manager/bin/python bench/vllm_audit.py [--turns 16] [--rounds 3]
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import types

MODEL = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=576,
    intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, head_dim=64, vocab_size=4096, hidden_act="silu",
    max_position_embeddings=4096, rms_norm_eps=1e-5, torch_dtype="bfloat16")
PROMPT, REQUESTS, STEPS = 900, 4, 4
LEGS = {
    "none": "no connector",
    "empty": "an empty connector",
    "16": '"every": 16',
    "1": '"every": 1',
}


def empty_connector():
    """Makes a module with the least that vLLM takes as a connector."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    class Nothing(base.KVConnectorMetadata):
        pass

    class Empty(base.KVConnectorBase_V1, base.SupportsHMA):
        requires_kv_delivery = False

        def __init__(self, vllm_config, role, kv_cache_config):
            super().__init__(vllm_config, role, kv_cache_config)

        def get_num_new_matched_tokens(self, *_):
            return 0, False

        def build_connector_meta(self, _):
            return Nothing()

        def request_finished_all_groups(self, *_):
            return False, None

        def nothing(self, *_, **__):
            pass

        update_state_after_alloc = start_load_kv = nothing
        wait_for_layer_load = save_kv_layer = wait_for_save = nothing

    sys.modules["empty_connector"] = types.ModuleType("empty_connector")
    sys.modules["empty_connector"].Empty = Empty


def connector_of(leg):
    """Returns the options of vLLM for a leg."""
    if leg == "none":
        return None
    if leg == "empty":
        empty_connector()
        return dict(kv_connector="Empty", kv_connector_module_path="empty_connector",
                    kv_role="kv_both")
    return dict(kv_connector="KvtwinAudit", kv_connector_module_path="kvtwin.vllm",
                kv_role="kv_both", kv_connector_extra_config={"every": int(leg)})


def measure(leg):
    """Answers each line of the input by the median seconds of a decode step, by the clock
    and of processors."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2",
                      VLLM_LOGGING_LEVEL="CRITICAL",
                      OMP_NUM_THREADS="1")
    from vllm import LLM, SamplingParams

    home = pathlib.Path(tempfile.mkdtemp())
    (home / "config.json").write_text(json.dumps(MODEL))
    llm = LLM(str(home), skip_tokenizer_init=True, load_format="dummy",
              dtype="bfloat16", enforce_eager=True, max_model_len=2048,
              max_num_seqs=REQUESTS, max_num_batched_tokens=2048, block_size=32,
              kv_transfer_config=connector_of(leg))
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=1000, temperature=0, detokenize=False,
                            ignore_eos=True)
    for r in range(REQUESTS):
        tokens = [(i * (r + 7)) % 4000 + 3 for i in range(PROMPT)]
        engine.add_request(str(r), {"prompt_token_ids": tokens}, params)
    for _ in range(8):  # The prompts, and a few steps.
        engine.step()
    for _ in sys.stdin:  # A line for each turn.
        times = []
        for _ in range(STEPS):
            start, used = time.perf_counter(), time.process_time()
            engine.step()
            times.append((time.perf_counter() - start, time.process_time() - used))
        print(json.dumps([statistics.median(part) for part in zip(*times)]), flush=True)
    if leg.isdigit():
        import kvtwin.vllm
        assert not kvtwin.vllm.findings


def take_turns(turns, results):
    """Starts a process for each leg, and adds what a turn of each takes to its list."""
    running = {leg: subprocess.Popen(
        [sys.executable, __file__, "--measure", leg], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE) for leg in LEGS}
    for turn in range(turns + 1):
        for leg, process in running.items():
            process.stdin.write("\n")
            process.stdin.flush()
            line = process.stdout.readline()
            while line and not line.startswith("["):
                line = process.stdout.readline()
            if not line:
                sys.exit("a process failed")
            if turn > 0:  # The first one waited for the start of the others.
                results[leg].append(json.loads(line))
    for process in running.values():
        process.stdin.close()
        if process.wait():
            sys.exit("a process failed")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", choices=LEGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return
    results = {leg: [] for leg in LEGS}
    for _ in range(options.rounds):
        take_turns(options.turns, results)

    def ratio(leg, other, part):
        return statistics.median(
            mine[part] / its[part] for mine, its in zip(results[leg], results[other]))

    print("| | a decode step | of that without | processor time | of that without | "
          "of that with an empty one |")
    print("| --- | --- | --- | --- | --- | --- |")
    for leg, name in LEGS.items():
        clock, used = (1e3 * statistics.median(part) for part in zip(*results[leg]))
        print(f"| {name} | {clock:.1f} ms | {ratio(leg, 'none', 0):.3f} | {used:.1f} ms | "
              f"{ratio(leg, 'none', 1):.3f} | {ratio(leg, 'empty', 1):.3f} |")


if __name__ == "__main__":
    main()
