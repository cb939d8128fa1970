"""hostile_test.py KVTWIN SCRATCH [EVERY]: runs every subcommand that reads
recordings on recordings with one wrong field each, and also tries states that
SaveState wrote, histories and explorations. Each run must exit with 0, 1 or 2,
print something, and never crash; `show` and `check` must agree. Only every
EVERYth input is run: 1 takes minutes.

With the asan preset, AddressSanitizer checks the same runs.
"""

import copy
import json
import os
import pathlib
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parents[2]
RECORDINGS = HERE / "recordings"

HUGE = 2**31
# Wrong values for most keys.
VALUES = [
    None, True, "text", "", 0, -1, HUGE - 1, HUGE, -HUGE, 2**53, 2**63, 1e308,
    0.5, [], [0], [[]], {}, {"a": 1}, "nan\x00", "\ud800",
]
# JSON text that json.dumps cannot write, valid or not.
RAW = ["NaN", "-Infinity", "1e999", "9" * 400, "01", "[" * 100000, "{" * 5000,
       '"\\u0000"', "tru", ""]
MARK = "@@raw@@"


def short_cache():
    """A cache of two tokens, with every operation that recordings have."""
    rows = {"shape": [2, 1, 2], "data": [1, 2, 3, 4]}
    values = {"shape": [1, 1, 2], "data": [5, 6]}
    view = {"shape": [2, 1, 4], "data": [1, 2, 3, 4, 0, 0, 0, 0]}
    shown = {"shape": [1, 1, 4], "data": [5, 6, 0, 0]}
    header = {
        "kvtrace": 1, "producer": "hostile", "placement": "contiguous",
        "cache": {"type": "causal", "shift": "tag_add"},
        "config": {"cache_padding": 4, "mask_batch_padding": 1,
                   "permuted_v": False, "mask_dtype": "f32"},
        "init": {"dtype": "f32", "max_sequences": 1, "capacity": 4,
                 "max_batch": 2},
        "model": {"layers": 1, "k_head_dim": 2, "kv_heads": 1,
                  "v_head_dim": 1}}
    return [
        header,
        {"op": "start_forward", "positions": [0, 1], "sequences": [0, 0],
         "multimodal": [0], "reserve": False, "result": "ok",
         "cells": [0, 1]},
        {"op": "put", "layer": 0, "key": rows, "value": values},
        {"op": "get", "layer": 0, "first_cell": 0, "key": view,
         "value": shown, "mask": {"shape": [4, 2], "rows": ["1000", "1100"]}},
        {"op": "set_causal", "except": [0]},
        {"op": "copy_prefix", "src": 0, "dst": 1, "len": 1},
        {"op": "can_resume", "seq": 0, "pos": 1, "result": True},
        {"op": "remove", "seq": 1, "begin": 0, "end": HUGE - 1,
         "result": "ok"},
        {"op": "start_forward", "positions": [2], "sequences": [0],
         "reserve": True, "result": "ok"},
        {"op": "reserved_mask", "shape": [4, 1], "first_cell": 0},
    ]


def wrapper():
    lines = short_cache()
    causal = lines[0]["cache"]
    lines[0]["cache"] = {"type": "wrapper", "caches": [
        {"type": "swa", "window": 1, "shift": "rope",
         "rope": {"pairing": "halves", "base": 10000, "scale": 1, "dims": 2}},
        causal, {"type": "swa_mem", "window": 1, "memory": 3, "shift": "none"},
        {"type": "chunked", "chunk": 2, "shift": "add"}]}
    lines.insert(1, {"op": "set_layer_type", "type": 1})
    return lines


def recordings():
    """Returns valid recordings (lists of lines): accepted or rejected ones."""
    sources = [
        RECORDINGS / "reject/ollama-0.12.9-defrag/contiguous-0016.jsonl",
        *sorted(RECORDINGS.glob("pools/*.jsonl")),
        *[sorted(folder.glob("*.jsonl"))[0]
          for folder in sorted((RECORDINGS / "accept").iterdir())]]
    texts = [path.read_text().splitlines() for path in sources]
    found = [[json.loads(line) for line in lines[:60]] for lines in texts]
    other = short_cache()
    other[0]["placement"] = "other"
    return [short_cache(), wrapper(), other, *found]


def places(value, path=()):
    """Yields the paths of all values, and of the first two elements of lists."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for i in range(min(len(value), 2)):
            yield from places(value[i], (*path, i))


def parent(value, path):
    for key in path[:-1]:
        value = value[key]
    return value


def changed(line, path):
    """Yields the line as text, once for each way to damage the value at path."""
    now = parent(line, path)[path[-1]]
    values = list(VALUES)
    if isinstance(now, list):
        values += [now[:-1], now + now[-1:], now * 3]
    if isinstance(now, int) and not isinstance(now, bool):
        values += [now + 1, now - 1, 1 << 20]
    for value in values:
        wrong = copy.deepcopy(line)
        parent(wrong, path)[path[-1]] = value
        yield json.dumps(wrong)
    wrong = copy.deepcopy(line)
    del parent(wrong, path)[path[-1]]
    yield json.dumps(wrong)
    marked = copy.deepcopy(line)
    parent(marked, path)[path[-1]] = MARK
    for raw in RAW:
        yield json.dumps(marked).replace(f'"{MARK}"', raw)
    if isinstance(path[-1], str):  # The same key twice.
        wrong = copy.deepcopy(line)
        parent(wrong, path)[MARK] = 1
        yield json.dumps(wrong).replace(MARK, path[-1])


def corpus(every):
    """Yields wrong recordings as bytes: two fixed ones, then every `every`th of
    all others."""
    for sequences in [], [0]:  # Fewer sequences than positions.
        lines = short_cache()
        lines[1]["sequences"] = sequences
        yield "\n".join(map(json.dumps, lines)).encode()
    count = 0
    for lines in recordings():
        texts = [json.dumps(line) for line in lines]
        seen = set()  # Values that an earlier line has tried.
        for i, line in enumerate(lines):
            shapes = [(line.get("op"), path) for path in places(line)]
            wrongs = [text for op, path in shapes
                      if (op, path) not in seen and not seen.add((op, path))
                      for text in changed(line, path)]
            wrongs += [texts[i][: len(texts[i]) // 2], texts[i] + "\0x",
                       texts[i] + texts[i], "\0" + texts[i]]
            for wrong in wrongs:
                count += 1
                if count % every == 0:
                    yield "\n".join(
                        [*texts[:i], wrong, *texts[i + 1:]]).encode(
                            "utf-8", "surrogatepass")


class Tester:
    def __init__(self, kvtwin, scratch, every):
        self.kvtwin = kvtwin
        self.scratch = pathlib.Path(scratch)
        self.every = every
        self.failures = []
        self.runs = 0
        self.codes = {0: 0, 1: 0, 2: 0}

    def run(self, *arguments, stdin=b""):
        command = [self.kvtwin, *map(str, arguments)]
        self.runs += 1
        try:
            ran = subprocess.run(command, input=stdin, capture_output=True,
                                 timeout=60, check=False)
        except subprocess.TimeoutExpired:
            self.fail(command, "did not end in 60 seconds")
            return 2
        if ran.returncode not in self.codes:
            self.fail(command, f"ended with {ran.returncode}: "
                      f"{ran.stderr[-1500:].decode(errors='replace')}")
        elif not ran.stdout and not ran.stderr:
            self.fail(command, "said nothing")
        else:
            self.codes[ran.returncode] += 1
        return ran.returncode

    def fail(self, command, what):
        self.failures.append(f"{' '.join(command)[:300]}: {what}")

    def recording(self, numbered):
        number, data = numbered
        path = self.scratch / f"{number}.jsonl"
        path.write_bytes(data)
        page = self.scratch / f"{number}.html"
        code = self.run("check", path)
        # One of the others in turn: all must give the same exit code.
        ways = [
            lambda: self.run("show", path),
            lambda: self.run("show", "--json", path),
            lambda: self.run("check", "--json", path),
            lambda: self.run("check", "--html", page, path),
            lambda: self.run("show", "--twin", "reference", path),
            lambda: self.run("check", "-", stdin=data),
        ]
        chosen = ways if self.every == 1 else [ways[0], ways[number % 5 + 1]]
        for way in chosen:
            again = way()
            if again != code and code in self.codes and again in self.codes:
                self.fail([str(path)], f"check ends with {code}, "
                          f"another subcommand with {again}")
                return
        all_of_it = self.run("show", "--all", path)
        if all_of_it != code:
            self.fail([str(path)], f"show --all ends with {all_of_it}")
        if not self.failures:
            path.unlink()

    def state(self, numbered):
        number, data = numbered
        path = self.scratch / f"{number}.safetensors"
        path.write_bytes(data)
        self.run("state", path)

    def history(self, numbered):
        _, text = numbered
        self.run("run", text)
        self.run("gen", text)
        self.run("laws", "--law", "frame", "--history", text)


def states(every):
    data = (RECORDINGS / "state.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    count = 0
    for path in places(header):
        for text in changed(header, path):
            count += 1
            if count % every == 0:
                wrong = text.encode("utf-8", "surrogatepass")
                yield len(wrong).to_bytes(8, "little") + wrong + data[8 + size:]
    for end in range(0, len(data), max(len(data) // 7, 97 // every)):
        yield data[:end]
    yield (2**63).to_bytes(8, "little") + data[8:]
    yield (2**64 - 1).to_bytes(8, "little") + data[8:]


def histories(every):
    texts = [
        "kvt1 kind=swa window=2 shift=rope cells=4 batch=2 seqs=2 layers=2 "
        "dims=2,1,2 | put 0*2 | copy 0>1:2 | drop 1:0-1 | get | except 0",
        "kvp1 block=2 blocks=4 most=8 dtype=f16 | open 0 2 0 | append 0 3 1 | "
        "commit 0 1 0 | fork 0 2 0 | truncate 0 1 0 | free 0 0 0"]
    words = ["", "-1", "2147483648", "9" * 40, "1e308", "nan", "0x10", "*", "|",
             "\u00e9", "1" * 5000, "put " * 400]
    count = 0
    for text in texts:
        parts = text.split(" ")
        for i, part in enumerate(parts):
            begin = part.partition("=")[0] + "=" if "=" in part else ""
            for word in words:
                count += 1
                if count % every == 0:
                    yield " ".join([*parts[:i], begin + word, *parts[i + 1:]])


def explorations(tester):
    """Tries the files of `explore --state`, with one wrong number each."""
    folder = tester.scratch / "explored"
    folder.mkdir()
    explore = ["explore", "--cells", "2", "--positions", "2", "--kind",
               "chunked", "--state", folder]
    tester.run(*explore)
    files = sorted(folder.iterdir())
    assert files, "explore --state keeps nothing"
    text = files[0].read_text()
    words = text.split()
    for i in range(0, min(len(words), 40), 1 if tester.every == 1 else 10):
        for wrong in ("-1", str(2**63), "x", ""):
            files[0].write_text(" ".join([*words[:i], wrong, *words[i + 1:]]))
            tester.run(*explore)
    for end in (0, 1, len(text) // 2):
        files[0].write_text(text[:end])
        tester.run(*explore)


def main(kvtwin, scratch, every="1"):
    every = int(every)
    shutil.rmtree(scratch, ignore_errors=True)
    os.makedirs(scratch)
    tester = Tester(kvtwin, scratch, every)
    for i, lines in enumerate(recordings()):
        path = tester.scratch / f"whole-{i}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if tester.run("check", path) == 2:
            tester.fail([str(path)], "the recording to start from is bad")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(tester.recording, enumerate(corpus(every))))
        list(pool.map(tester.state, enumerate(states(every))))
        list(pool.map(tester.history, enumerate(histories(max(every // 8, 1)))))
    explorations(tester)
    for failure in tester.failures[:40]:
        print(failure)
    print(f"{tester.runs} runs, {len(tester.failures)} wrong; exit codes "
          f"{tester.codes}")
    # Every exit code must occur: a corpus without valid input tests little.
    if tester.failures or min(tester.codes.values()) == 0:
        sys.exit(1)
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main(*sys.argv[1:])
