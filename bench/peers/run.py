"""Attention of other projects and of kvtwin, one beside the other: `./dev bench
--peers`, docs/performance.md.

The peers are processes. Each computes a case once and is checked, and is then
timed in turns with the others and with the limits of the machine."""

import argparse
import collections
import json
import math
import multiprocessing.connection
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

from cases import TOLERANCES, Case, Numbers

HOME = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(HOME / "docs/backends"))  # openvino_model
SECONDS = 0.8  # For the turns of a peer, after the first one.
SLOW = 3.0  # Seconds. A case that would take longer is left out.
WIDTHS = {"f32": 4, "f16": 2, "bf16": 2, "8-bit": 1}


class Server:
    """A process of peers that share a library, and so K and V."""

    def __init__(self, classes):
        self.classes = classes
        self.peers = {}
        self.layers = 1
        self.warm = None

    def open(self, peer, _):
        self.peers[peer] = self.classes[peer]()
        return {"version": self.peers[peer].version}

    def prepare(self, peer, case):
        if getattr(self, "numbers", None) is None or self.numbers.case != case:
            self.numbers = Numbers(case)
        self.layers = case.layers()
        self.peers[peer].prepare(case, self.numbers)

    def queries(self, peer, query):
        self.peers[peer].queries(query)
        self.warm = None

    def results(self, peer, _):
        """Returns the results of the first and the last layer, and the nanoseconds of
        one layer."""
        out, layers = [], sorted({0, self.layers - 1})
        begin = time.perf_counter_ns()
        for layer in layers:
            self.peers[peer].run(layer)
            out.append(np.array(self.peers[peer].result()))
        return out, (time.perf_counter_ns() - begin) / len(layers)

    def time(self, peer, threads):
        of = self.peers[peer]
        of.threads(threads)
        if self.warm != (peer, threads):  # FlexAttention compiles now.
            of.run(0)
            self.warm = peer, threads
        begin = time.perf_counter_ns()
        for layer in range(self.layers):
            of.run(layer)
        return (time.perf_counter_ns() - begin) / self.layers


def serve(address, group):
    from peers import NotSupported
    from table import PROCESSES
    pipe = multiprocessing.connection.Client(address)
    server = Server(PROCESSES[int(group)])
    while True:
        peer, name, argument = pipe.recv()
        try:
            answer = getattr(server, name)(peer, argument)
        except NotSupported as error:
            answer = f"does not have {error}"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pipe.send(answer)


class Process:
    def __init__(self, group, listener):
        self.child = subprocess.Popen(
            [sys.executable, __file__, "--serve", listener.address,
             str(group)])
        self.pipe = listener.accept()


class Peer:
    """A peer, as seen from this process."""

    def __init__(self, name, process):
        self.name = name
        self.process = process
        self.broken = None  # Why it does not compute the case.
        self.speed = {}  # Multiplications and additions in a nanosecond.
        opened = self.ask("open")
        self.version = opened and opened["version"]

    def ask(self, name, argument=None):
        """The answer; None if the peer fails, which `broken` then says."""
        if self.broken:
            return None
        try:
            self.process.pipe.send((self.name, name, argument))
            answer = self.process.pipe.recv()
        except (EOFError, OSError):
            answer = f"its process ended with {self.process.child.wait()}"
        if isinstance(answer, str):
            self.broken = answer
            return None
        return answer

    def take(self, case, heads):
        """Leaves out what would take too long."""
        work = 4 * heads * case.dim * case.visible()
        speed = self.speed.get((case.dtype, case.rows > 1))
        if not self.broken and speed and work / speed > SLOW * 1e9:
            self.broken = f"left out: {work / speed / 1e9:.0f} s"


class Limits:
    """The limits of the machine: how many 10^9 bytes it reads in a second, and how
    many 10^9 floats it multiplies or adds."""

    def __init__(self):
        self.process = subprocess.Popen(
            [HOME / "build/kvtwin-bench", "--limits"], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def measure(self, threads):
        self.process.stdin.write(f"{threads}\n")
        self.process.stdin.flush()
        return [float(x) for x in self.process.stdout.readline().split()]


def check(peer, case, query, expected):
    """Returns how far the results are from the formula, None if the peer does
    not compute the case."""
    peer.take(case, query.shape[1])
    peer.ask("queries", query)
    results, took = peer.ask("results") or (None, None)
    if results is None:
        return None
    error = max(np.max(np.abs(result[case.checked_rows()] - expected))
                for result in results)
    if not error <= TOLERANCES[case.dtype]:
        peer.broken = f"wrong by {error:.2g}"
        return None
    work = 4 * query.shape[1] * case.dim * case.visible()
    peer.speed[case.dtype, case.rows > 1] = work / took
    return float(error)


def measure(peers, limits, case, threads, rounds):
    """The best times, in turns, and the limits."""
    best = {peer.name: math.inf for peer in peers}
    spent = collections.Counter()
    most = [0, 0]
    for _ in range(rounds):
        most = list(map(max, most, limits.measure(threads)))
        for peer in peers:
            if spent[peer.name] > SECONDS * 1e9:
                continue
            took = peer.ask("time", threads)
            if took is None:
                continue
            best[peer.name] = min(best[peer.name], took)
            spent[peer.name] += took * case.layers()
            time.sleep(0.01)  # Until its threads have stopped waiting.
    return best, most


def rows_of(peers, case, heads, threads, best, most, errors):
    size = 2 * case.cells * case.kv_heads * case.dim * WIDTHS[case.dtype]
    work = 4 * heads * case.dim * case.visible()
    for peer in peers:
        row = dict(peer=peer.name, dtype=case.dtype, cells=case.cells,
                   rows=case.rows, heads=heads, threads=threads,
                   limit_gigabytes=most[0], limit_gigaflops=most[1])
        took = best[peer.name]
        if math.isfinite(took):
            row.update(ns=took, error=errors[peer.name],
                       gigabytes=size / took, gigaflops=work / took,
                       read_share=size / took / most[0],
                       multiply_share=work / took / most[1])
        else:
            row.update(reason=peer.broken)
        show(row)
        yield row


def run_case(peers, limits, case, options):
    numbers = Numbers(case)
    for peer in peers:
        if peer.version:
            peer.broken = None
        peer.take(case, options.heads[0])
        peer.ask("prepare", case)
    rows = []
    for heads in options.heads if case.rows == 1 else options.heads[:1]:
        query = numbers.query(heads)
        expected = numbers.expected(query)
        errors = {peer.name: check(peer, case, query, expected)
                  for peer in peers}
        for threads in options.threads:
            best, most = measure(peers, limits, case, threads, options.rounds)
            rows += rows_of(peers, case, heads, threads, best, most, errors)
    return rows


def show(row):
    name = (f"{row['dtype']:6}{row['rows']:5} x {row['cells']:6} "
            f"{row['heads']} heads {row['threads']} threads  "
            f"{row['peer']:34}")
    if "ns" not in row:
        print(name, row["reason"], flush=True)
        return
    print(name, f"{row['ns'] / 1e6:9.3f} ms {row['gigabytes']:6.1f} GB/s "
          f"{row['read_share']:5.0%} {row['gigaflops']:6.1f} GFLOP/s "
          f"{row['multiply_share']:5.0%}  error {row['error']:.1e}", flush=True)


def cases_of(options):
    def numbers(text):
        return [int(x) for x in text.split(",") if x]
    options.heads = numbers(options.heads)
    options.threads = numbers(options.threads)
    dtypes = options.dtypes.split(",")
    shapes = [(1, cells) for cells in numbers(options.cells)]
    shapes += [tuple(map(int, text.split("x")))
               for text in options.prefill.split(",") if text]
    return [Case(dtype, cells, rows) for rows, cells in shapes
            for dtype in dtypes]


def processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return "unknown"


def save(path, rows, peers):
    pathlib.Path(path).write_text(json.dumps({
        "processor": processor(), "rows": rows,
        "versions": {peer.name: peer.version or peer.broken
                     for peer in peers}}, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="peers with this in a name")
    parser.add_argument("--dtypes", default="f32,f16,bf16,8-bit")
    parser.add_argument("--cells", default="1024,4096,32768,262144")
    parser.add_argument("--prefill", default="64x1024,512x4096,2048x4096,512x32768",
                        help="rows x cells; 2048x32768 takes minutes")
    parser.add_argument("--heads", default="32,64")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", default=str(HOME / "build/peers.json"))
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    from table import PROCESSES
    cases = cases_of(options)
    rows, children = [], []
    with tempfile.TemporaryDirectory() as folder, \
            multiprocessing.connection.Listener(f"{folder}/socket") as listener:
        peers = []
        for group, names in enumerate(PROCESSES):
            names = [name for name in names if options.only in name]
            if names:
                process = Process(group, listener)
                children.append(process.child)
                peers += [Peer(name, process) for name in names]
        limits = Limits()
        children.append(limits.process)
        for case in cases:
            began = time.time()
            rows += run_case(peers, limits, case, options)
            print(f"-- {time.time() - began:.0f} s", flush=True)
            save(options.save, rows, peers)
    for child in children:
        child.kill()


if __name__ == "__main__":
    main()
