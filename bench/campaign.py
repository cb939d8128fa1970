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
import subprocess
import sys
import threading
import time

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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ops", type=int, default=20_000_000)
    parser.add_argument("--cells", type=int, default=5)
    parser.add_argument("--command", default="build/kvtwin")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("options", nargs="*", help="of explore, after --")
    asked = parser.parse_args()
    command = str(pathlib.Path(asked.command).resolve())
    campaign = [sys.executable, "-m", "kvtwin.campaign"]
    words = ["fuzz", "--ops", "1", "--json", "--command", command, "--workers", "2"]
    begin = measured([*campaign, *words])[1]["other_cpu_seconds"]
    print(f"start and end of a campaign: {begin:.1f} s of processor time", flush=True)
    right = True
    for name, words, unit in (
        ("fuzz", ["--ops", str(asked.ops)], "operations"),
        ("explore", ["--cells", str(asked.cells), "--", *asked.options], "transitions"),
    ):
        speeds, reports = {}, []
        for _ in range(asked.rounds):
            for workers in (1, 2):
                own = ["--json", "--command", command, "--workers", str(workers)]
                report, cost = measured([*campaign, name, *own, *words])
                reports.append(report)
                speed = report[unit] / cost["seconds"]
                speeds.setdefault(workers, []).append(speed)
                others = max(cost["other_cpu_seconds"] - begin, 0)
                share = cost["cpu_seconds"] / (cost["cpu_seconds"] + others)
                print(
                    f"{name}, {workers} workers: {report[unit]} {unit}, "
                    f"{cost['seconds']:.1f} s ({cost['whole_seconds']:.1f} s with Ray's "
                    f"start), {speed:.0f} a second; processor time "
                    f"{cost['cpu_seconds']:.1f} s of the command, "
                    f"{others:.1f} s of others, share of the command "
                    f"{100 * share:.1f} %; memory {cost['memory_mib']:.0f} MiB",
                    flush=True,
                )
        if name == "explore":
            words = ["--cells", str(asked.cells), "--threads=1", "--json"]
            done = subprocess.run(
                [command, "explore", *words, *asked.options], stdout=subprocess.PIPE,
                check=False,
            )
            alone = json.loads(done.stdout)
            print(
                f"explore, one process: {alone['transitions'] / alone['seconds']:.0f} "
                f"{unit} a second; 2 workers "
                f"{max(speeds[2]) / (alone['transitions'] / alone['seconds']):.2f} of it"
            )
            reports.append({**reports[0], **{key: alone[key] for key in ("states", "transitions")}})
        same = all(report == reports[0] for report in reports)
        right = right and same
        print(
            f"{name}: 2 workers {max(speeds[2]) / max(speeds[1]):.2f} of 1; reports "
            f"{'the same' if same else 'DIFFERENT'}"
        )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
