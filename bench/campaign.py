#!/usr/bin/env python3
"""Measures kvtwin.campaign on 1 and 2 workers; ./dev campaign --bench runs it.

It prints a row for each run, with the share of the processor time that the command
itself used: of all processes of the campaign, Ray's included, without what a campaign
of one operation uses. On a machine with other work the clock says little; the share
says what Ray costs.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import threading
import time

SIZES = ("cells", "sequences", "positions")
TICKS = os.sysconf("SC_CLK_TCK")


class Watch(threading.Thread):
    """Adds up the processor time of all descendants of this process."""

    def __init__(self):
        super().__init__(daemon=True)
        self.used = {}  # Name and seconds, by the process and its start time.
        self.memory = 0  # The largest sum of resident sets.
        self.ends = threading.Event()

    def run(self):
        while not self.ends.wait(0.05):
            self.look()

    def look(self):
        found = {}
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, rest = stat.read_text().rpartition(")")
            except OSError:
                continue
            fields = rest.split()
            found[int(stat.parent.name)] = name.partition("(")[2], fields
        below, memory = {os.getpid()}, 0
        for pid in sorted(found):  # A child has a larger number, nearly always.
            name, fields = found[pid]
            if int(fields[1]) not in below:
                continue
            below.add(pid)
            seconds = (int(fields[11]) + int(fields[12])) / TICKS
            self.used[pid, fields[19]] = name, seconds
            memory += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        self.memory = max(self.memory, memory)

    def seconds(self, is_one):
        return sum(seconds for name, seconds in self.used.values() if is_one(name))


def measured(words):
    watch = Watch()
    watch.start()
    start = time.monotonic()
    done = subprocess.run(words, stdout=subprocess.PIPE, check=False)
    whole = time.monotonic() - start
    watch.ends.set()
    watch.join()
    report = json.loads(done.stdout)
    cost = report.pop("cost")
    cost["whole_seconds"] = whole
    # Short programs are seen too late; the campaign knows their time.
    others = watch.seconds(lambda name: name != "kvtwin")
    cost["other_cpu_seconds"] = others
    cost["memory_mib"] = watch.memory / 2**20
    return report, cost


def alone(words):
    """Runs the explorer in one process. Returns its report and its processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(words, stdout=subprocess.PIPE, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), used


class Bench:
    """Runs campaigns, prints a row for each, and remembers whether reports differ."""

    def __init__(self, command, rounds):
        self.command = command
        self.rounds = rounds
        self.campaign = [sys.executable, "-m", "kvtwin.campaign"]
        self.right = True

    def run(self, name, workers, words):
        own = ["--json", "--command", self.command, "--workers", str(workers)]
        return measured([*self.campaign, name, *own, *words])

    def row(self, name, unit, workers, words, begin):
        """Runs a campaign once. Returns its report, clock, and processor time."""
        report, cost = self.run(name, workers, words)
        others = max(cost["other_cpu_seconds"] - begin, 0)
        share = cost["cpu_seconds"] / (cost["cpu_seconds"] + others)
        print(
            f"{name}, {workers} workers: {report[unit]} {unit}, "
            f"{cost['seconds']:.1f} s ({cost['whole_seconds']:.1f} s with Ray's "
            f"start), {report[unit] / cost['seconds']:.0f} a second; processor time "
            f"{cost['cpu_seconds']:.1f} s of the command, {others:.1f} s of others, share "
            f"of the command {100 * share:.1f} %; memory {cost['memory_mib']:.0f} MiB",
            flush=True,
        )
        return report, cost["seconds"], cost["cpu_seconds"] + others

    def rows(self, name, unit, words, least):
        """Runs a campaign by 1 and 2 workers. Returns the best clock and processor time
        of 2 workers, and the report. The options `least` ask for next to nothing: the
        start and the end of a campaign."""
        clocks, used, reports = {1: [], 2: []}, [], []
        begin = {}
        for workers in clocks:
            begin[workers] = self.run(name, workers, least)[1]["other_cpu_seconds"]
            print(
                f"{name}, {workers} workers: start and end: {begin[workers]:.1f} s of "
                "processor time", flush=True,
            )
        for _ in range(self.rounds):
            for workers in clocks:
                report, seconds, processors = self.row(
                    name, unit, workers, words, begin[workers])
                clocks[workers].append(seconds)
                reports.append(report)
            used.append(processors)
        same = all(report == reports[0] for report in reports)
        self.right = self.right and same
        ratio = min(clocks[1]) / min(clocks[2])
        said = "the same" if same else "DIFFERENT"
        print(f"{name}: 2 workers {ratio:.2f} of 1; reports {said}", flush=True)
        return min(clocks[2]), min(used), reports[0]

    def explorer(self, words):
        """Compares 2 workers with one process."""
        least = ["--cells=2", "--positions=1", "--", "--kind", "causal"]
        seconds, used, report = self.rows("explore", "transitions", words, least)
        words = ["explore", "--threads=1", "--json", *(w for w in words if w != "--")]
        whole, one = alone([self.command, *words])
        same = all(report[key] == whole[key] for key in ("states", "transitions"))
        self.right = self.right and same
        print(
            f"explore: one process {whole['seconds']:.1f} s, {one:.1f} s of processor time: "
            f"2 workers {whole['seconds'] / seconds:.2f} of it, and at most "
            f"{2 * one / used:.2f} by processor time; states and transitions "
            f"{'the same' if same else 'DIFFERENT'}"
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ops", type=int, default=20_000_000)
    parser.add_argument("--cells", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--positions", type=int, default=4)
    parser.add_argument("--command", default="build/kvtwin")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=["fuzz", "explore"])
    parser.add_argument("options", nargs="*", default=["--kind", "causal"],
                        help="of explore, after --; by default --kind causal")
    asked = parser.parse_args()
    bench = Bench(str(pathlib.Path(asked.command).resolve()), asked.rounds)
    if asked.only != "explore":
        bench.rows("fuzz", "operations", ["--ops", str(asked.ops)], ["--ops", "1"])
    if asked.only != "fuzz":
        sizes = [f"--{name}={getattr(asked, name)}" for name in SIZES]
        bench.explorer([*sizes, "--", *asked.options])
    return 0 if bench.right else 1


if __name__ == "__main__":
    sys.exit(main())
