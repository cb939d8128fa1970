#!/usr/bin/env python3
"""Mutation score of the library and of its judges; see docs/mutants.md.

universalmutator makes the mutants. A copy of the tree under build/mutants is
built once; for each mutant only the objects that see it are compiled again and
linked before the others. Programs then try to tell the mutant from the
original, the cheapest first. The results are kept in
build/mutants/results.jsonl, so that a run continues where the last one stopped;
survivors are tried again.
"""

import argparse
import collections
import json
import pathlib
import queue
import sys
import threading
import time

from mutant_bench import Bench
from mutant_list import (
    ROOT,
    argued_equivalent,
    check_arguments,
    one_line,
    sample)

WORK = ROOT / "build" / "mutants"


def print_score(counts, killers, seconds):
    total = counts["killed"] + counts["survived"]
    print(f"not compiling {counts['not compiling']}, identical objects "
          f"{counts['identical']}, argued equivalent {counts['equivalent']}, "
          f"killed {counts['killed']}, survived {counts['survived']}, "
          f"not yet tried {counts['left']}")
    print("killed by: " + ", ".join(
        f"{name} {count}" for name, count in killers.most_common()))
    if total:
        print(f"score {100 * counts['killed'] / total:.1f} % of {total} "
              f"mutants, in {seconds:.0f} s")


def part(text):
    """Parses "3/16"."""
    number, _, count = text.partition("/")
    made = int(number), int(count)
    if not 0 <= made[0] < made[1]:
        raise ValueError(text)
    return made


def main():
    parser = argparse.ArgumentParser(prog="./dev mutants")
    parser.add_argument("--sample", type=int, default=900)
    parser.add_argument("--only", action="append", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--part", type=part, default=(0, 1), metavar="I/N",
                        help="every Nth mutant of the sample, from the Ith on")
    parser.add_argument("--work", type=pathlib.Path, default=WORK,
                        help="the folder of the copies and of the results")
    parser.add_argument("--json", action="store_true",
                        help="print one JSON object")
    parser.add_argument("--arguments", action="store_true",
                        help="only see whether docs/mutants.md fits")
    options = parser.parse_args()
    equivalent = argued_equivalent()
    check_arguments(equivalent)
    if options.arguments:
        print(f"{len(equivalent)} mutants are argued equivalent")
        return 0
    start = time.monotonic()

    generated, kept, chosen = sample(options.sample, options.only)
    chosen = chosen[options.part[0]::options.part[1]]
    if options.json:
        sys.stdout = sys.stderr
    print(f"generated {generated}, not noise {kept}, sampled {len(chosen)}",
          flush=True)

    def is_argued(mutant):
        return (mutant.file, one_line(mutant.before),
                one_line(mutant.after)) in equivalent

    options.work.mkdir(parents=True, exist_ok=True)
    results_path = options.work / "results.jsonl"
    results = {}
    if results_path.exists():
        for line in results_path.read_text().splitlines():
            entry = json.loads(line)
            results[entry["key"]] = entry

    def is_done(mutant):
        known = results.get(mutant.key)
        return known is not None and known["outcome"] != "survived"

    lock = threading.Lock()

    def work(bench, todo, how):
        while time.monotonic() - start < options.seconds:
            try:
                mutant = todo.get_nowait()
            except queue.Empty:
                return
            begin = time.monotonic()
            outcome, by = bench.try_out(mutant, how)
            entry = {"key": mutant.key, "file": mutant.file,
                     "line": mutant.line, "before": one_line(mutant.before),
                     "after": one_line(mutant.after), "outcome": outcome,
                     "by": by, "seconds": round(time.monotonic() - begin, 1)}
            with lock:
                results[mutant.key] = entry
                with open(results_path, "a", encoding="ascii") as stream:
                    stream.write(json.dumps(entry) + "\n")
                if outcome == "survived" and how is Bench.outcome:
                    print(f"survived: {mutant.file}:{mutant.line}\n"
                          f"  {entry['before']}\n  {entry['after']}",
                          flush=True)

    benches = [Bench(options.work / f"tree{job}") for job in range(options.jobs)]
    def try_all(mutants, how):
        todo = queue.SimpleQueue()
        for mutant in mutants:
            todo.put(mutant)
        threads = [threading.Thread(target=work, args=[bench, todo, how])
                   for bench in benches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    open_ones = [mutant for mutant in chosen
                 if not is_done(mutant) and not is_argued(mutant)]
    if open_ones and options.seconds > 0:
        for bench in benches:
            bench.prepare()
    # Earlier survivors come first: there may be a new test.
    try_all(sorted(open_ones, key=lambda m: m.key not in results),
            Bench.outcome)
    try_all([mutant for mutant in open_ones if not is_done(mutant) and
             mutant.key in results], Bench.last_outcome)

    counts = collections.Counter()
    killers = collections.Counter()
    for mutant in chosen:
        known = results.get(mutant.key)
        if is_argued(mutant):
            counts["equivalent"] += 1
        elif known is None:
            counts["left"] += 1
        else:
            counts[known["outcome"]] += 1
            if known["outcome"] == "killed":
                killers[known["by"].rsplit(" ", 1)[0]] += 1
    print_score(counts, killers, time.monotonic() - start)
    if options.json:
        survived = [results[mutant.key] for mutant in chosen
                    if mutant.key in results and not is_argued(mutant)
                    and results[mutant.key]["outcome"] == "survived"]
        print(json.dumps({"counts": counts, "survived": survived}),
              file=sys.__stdout__)
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
