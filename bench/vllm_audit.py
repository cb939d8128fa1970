"""Measures the cost of the audit of kvtwin.vllm: steps of a model of random weights, of
the sizes of SmolLM2-135M, on vLLM's CPU backend, without the audit, with an audit of 1
of 16 blocks, and of all blocks. The processes take turns. docs/vllm-audit.md has
results.

    build/backends/vllm_manager/bin/python bench/vllm_audit.py [--rounds 3]
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
PROMPT, TOKENS, REQUESTS = 900, 30, 4


def measure(every):
    """Returns the median seconds of a step, and the part that the audit took."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2",
                      VLLM_LOGGING_LEVEL="CRITICAL")
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
    steps, parts = [], []
    step = llm.llm_engine.step

    def stepped():
        spent[0] = 0
        start = time.perf_counter()
        out = step()
        steps.append(time.perf_counter() - start)
        parts.append(spent[0])
        return out

    llm.llm_engine.step = stepped
    params = SamplingParams(max_tokens=TOKENS, temperature=0, detokenize=False,
                            ignore_eos=True)
    llm.generate([{"prompt_token_ids": [(i * (r + 7)) % 4000 + 3
                                        for i in range(PROMPT)]}
                  for r in range(REQUESTS)], params, use_tqdm=False)
    decode = slice(-TOKENS + 5, -2)
    if every:
        assert not kvtwin.vllm.findings
    print(json.dumps([statistics.median(steps[decode]),
                      sum(parts[decode]) / sum(steps[decode]),
                      sum(parts) / sum(steps)]))


def main():
    rounds = int(sys.argv[2]) if sys.argv[1:2] == ["--rounds"] else 3
    results = {0: [], 16: [], 1: []}
    for _ in range(rounds):
        for every, out in results.items():
            ran = subprocess.run([sys.executable, __file__, "--measure", str(every)],
                                 check=True, stdout=subprocess.PIPE, text=True)
            out.append(json.loads(ran.stdout.splitlines()[-1]))
    off = statistics.median(step for step, _, _ in results[0])
    for every, out in results.items():
        step, decode, all_steps = map(statistics.median, zip(*out))
        print(f"every={every}: a decode step takes {step * 1e3:.1f} ms, "
              f"{step / off:.3f} of that without audit; in the audit: "
              f"{decode:.2%} of decode steps, {all_steps:.2%} of all steps")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(int(sys.argv[2]))
    else:
        main()
