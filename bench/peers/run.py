"""Attention of other projects and of kvtwin, one beside the other: `./dev bench
--peers`.

Every peer is a process, which computes each case once, is checked, and then is
timed in turns with the others and with the limits of the machine."""

import argparse
import json
import math
import multiprocessing.connection
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

import numpy as np

from cases import TOLERANCES, Case, Numbers

HOME = pathlib.Path(__file__).resolve().parents[2]
SLOW = 4.0  # Seconds that a run may take.


def serve(address, name):
    """A peer's process."""
    from peers import NotSupported
    from table import PEERS
    pipe = multiprocessing.connection.Client(address)
    try:
        peer = PEERS[name]()
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send({"version": peer.version})
    layers = 1
    while True:
        name, argument = pipe.recv()
        answer = None
        try:
            if name == "prepare":
                layers = argument.layers()
                peer.prepare(argument, Numbers(argument))
            elif name == "queries":
                peer.queries(argument)
            elif name == "result":
                answer = []
                for layer in sorted({0, layers - 1}):
                    peer.run(layer)
                    answer.append(np.array(peer.result()))
            elif name == "time":
                peer.threads(argument)
                begin = time.perf_counter_ns()
                for layer in range(layers):
                    peer.run(layer)
                answer = (time.perf_counter_ns() - begin) / layers
        except NotSupported as error:
            answer = f"not supported: {error}"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pipe.send(answer)


class Peer:
    """What runs a peer."""

    def __init__(self, name, python, listener):
        self.name = name
        environment = dict(os.environ, PYTHONPATH=str(HOME / "bench/peers"))
        self.process = subprocess.Popen(
            [python, __file__, "--serve", listener.address, name],
            env=environment)
        self.pipe = listener.accept()
        self.version = self.pipe.recv()
        self.broken = None
        if isinstance(self.version, str):
            self.broken = self.version
        else:
            self.version = self.version["version"]

    def ask(self, name, argument=None):
        """The answer; of a peer that fails, None, until `broken` is reset."""
        if self.broken:
            return None
        try:
            self.pipe.send((name, argument))
            answer = self.pipe.recv()
        except (EOFError, OSError):
            answer = f"its process ended with {self.process.wait()}"
        if isinstance(answer, str):
            self.broken = answer
            return None
        return answer

    def alive(self):
        return self.process.poll() is None


class Limits:
    """Of the machine: bytes read and multiplications, in a second."""

    def __init__(self):
        self.process = subprocess.Popen(
            [HOME / "build/kvtwin-bench", "--limits"], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def measure(self, threads):
        self.process.stdin.write(f"{threads}\n")
        self.process.stdin.flush()
        return [float(x) for x in self.process.stdout.readline().split()]


def checked(peer, case, query, expected):
    """Says whether the peer computes the case."""
    if peer.ask("queries", query) is None and peer.broken:
        return None
    results = peer.ask("result")
    if results is None:
        return None
    error = max(np.max(np.abs(result[case.checked_rows()] - expected))
                for result in results)
    if not error <= TOLERANCES[case.dtype]:
        peer.broken = f"wrong by {error:.2g}"
        return None
    return float(error)


def measure(peers, limits, case, heads, threads, rounds, errors):
    """The best time of each, in turns."""
    best = {peer.name: math.inf for peer in peers}
    read, multiply = 0, 0
    for turn in range(rounds):
        for values in [limits.measure(threads)]:
            read, multiply = max(read, values[0]), max(multiply, values[1])
        for peer in peers:
            slow = best[peer.name] * case.layers() > SLOW * 1e9 / rounds
            if peer.broken or turn and slow and math.isfinite(
                    best[peer.name]):
                continue
            took = peer.ask("time", threads)
            if took is not None:
                best[peer.name] = min(best[peer.name], took)
            time.sleep(0.01)  # Until its threads have stopped waiting.
    width = {"f32": 4, "f16": 2, "bf16": 2, "8-bit": 1}[case.dtype]
    size = 2 * case.cells * case.kv_heads * case.dim * width
    work = 4 * heads * case.dim * case.visible()
    for peer in peers:
        row = dict(peer=peer.name, dtype=case.dtype, cells=case.cells,
                   rows=case.rows, heads=heads, threads=threads)
        if math.isfinite(best[peer.name]):
            row.update(
                ns=best[peer.name], error=errors[peer.name],
                gigabytes=size / best[peer.name],
                read_share=size / best[peer.name] / read,
                gigaflops=work / best[peer.name],
                multiply_share=work / best[peer.name] / multiply)
        else:
            row.update(reason=peer.broken)
        row.update(limit_gigabytes=read, limit_gigaflops=multiply)
        yield row


def run_case(peers, limits, case, options):
    began = time.time()
    numbers = Numbers(case)
    for peer in peers:
        if peer.alive() and peer.version:
            peer.broken = None
    for peer in peers:
        peer.ask("prepare", case)
    rows = []
    for heads in options.heads if case.rows == 1 else options.heads[:1]:
        query = numbers.query(heads)
        expected = numbers.expected(query)
        errors = {peer.name: checked(peer, case, query, expected)
                  for peer in peers}
        for threads in options.threads:
            rows += measure(peers, limits, case, heads, threads,
                            options.rounds, errors)
            for row in rows[-len(peers):]:
                show(row)
    print(f"{time.time() - began:.0f} s", flush=True)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", nargs=2)
    parser.add_argument("--only", default="", help="peers with this in a name")
    parser.add_argument("--dtypes", default="f32,f16,bf16,8-bit")
    parser.add_argument("--cells", default="1024,4096,32768,262144")
    parser.add_argument("--prefill", default="512x4096,512x32768,2048x4096")
    parser.add_argument("--heads", default="32,64")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", default=str(HOME / "build/peers.json"))
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    from table import PEERS
    for name in ("heads", "threads"):
        setattr(options, name, [int(x) for x in getattr(options, name).split(",")])
    with tempfile.TemporaryDirectory() as folder:
        listener = multiprocessing.connection.Listener(f"{folder}/socket")
        peers = [Peer(name, sys.executable, listener) for name in PEERS
                 if options.only in name]
    limits = Limits()
    dtypes = options.dtypes.split(",")
    cases = [Case(dtype, int(cells)) for cells in options.cells.split(",") if cells
             for dtype in dtypes]
    cases += [Case(dtype, int(text.split("x")[1]), rows=int(text.split("x")[0]))
              for text in options.prefill.split(",") if text for dtype in dtypes]
    rows = []
    for case in cases:
        rows += run_case(peers, limits, case, options)
    pathlib.Path(options.save).write_text(json.dumps({
        "processor": platform.processor(), "rows": rows,
        "versions": {peer.name: peer.version for peer in peers}}, indent=1))
    for peer in peers:
        peer.process.kill()


if __name__ == "__main__":
    main()
