"""explore_batches_test.py KVTWIN: `kvtwin explore --batches`.

A toy explorer, which keeps the states itself, has the counts of `kvtwin explore`;
malformed requests are refused with a message.
"""

import json
import os
import struct
import subprocess
import sys

kvtwin = sys.argv[1]
SIZE = ["explore", "--cells", "3", "--positions", "2"]


def explore(ask, case):
    """Returns states, transitions and depth of a case."""
    seen, frontier, checked, depth = {0}, [0], 0, 0
    while frontier:
        found = set()
        for begin in range(0, len(frontier), 7):
            some = frontier[begin:begin + 7]
            request = f"expand {case} {len(some)}\n".encode()
            answer, rows = ask(request + struct.pack(f"<{len(some)}Q", *some))
            assert answer["differences"] == 0 and answer["failed"] is None
            checked += answer["checked"]
            states = [row[0] for row in rows]
            assert states == sorted(set(states))
            assert {row[1] for row in rows} <= set(some)
            found |= set(states)
        frontier = sorted(found - seen)
        seen |= found
        depth += 1 if frontier else 0
    return len(seen), checked, depth


def memory(request):
    """Returns the most bytes of memory that a process with the request had."""
    process = subprocess.Popen(
        [kvtwin, *SIZE, "--batches"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    process.stdin.write(request)
    process.stdin.close()
    _, _, used = os.wait4(process.pid, 0)
    process.returncode = 2  # Popen waits for nothing.
    return used.ru_maxrss * 1024


def main():
    process = subprocess.Popen(
        [kvtwin, *SIZE, "--batches"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(request):
        process.stdin.write(request)
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        count = answer["found"] if isinstance(answer, dict) else 0
        return answer, list(struct.iter_unpack("<3Q", process.stdout.read(24 * count)))

    whole = json.loads(subprocess.run(
        [kvtwin, *SIZE, "--json"], stdout=subprocess.PIPE, check=True).stdout)
    names, _ = ask(b"cases\n")
    assert names == [case["case"] for case in whole["cases"]] and len(names) > 9
    for number, case in enumerate(whole["cases"]):
        counted = explore(ask, number)
        assert counted == (case["states"], case["transitions"], case["depth"]), case
    process.stdin.close()
    assert process.wait() == 0

    for request, message in [
            (b"nonsense\n", "not a request: 'nonsense'"),
            (b"cases 1 2\n", "not a request: 'cases 1 2'"),
            (b"expand 99 0\n", "no such case"),
            (b"expand 0 -1\n", "not a request"),
            (b"expand 0 99999999999\n", "COUNT is 99999999999, it may be at most 16777216"),
            (b"along 0 16777217\n", "COUNT is 16777217, it may be at most 16777216"),
            (b"expand 0 1 1\n", "not a request"),
            (b"expand 0 2\n12345678", "the states end too early"),
            (b"expand 0 2", "the states end too early"),
            (b"expand 0 1\n" + b"\xff" * 8, "no state has the number"),
            (b"along 0 1\n123", "the path ends too early"),
            (b"along 0 1\n" + b"\1" * 24, "not a path"),
            (b"shrink 0 0\n", "not a request: 'shrink 0 0'"),
            (b"\x1b[31m \xff\n", r"not a request: '\x1b[31m \xff'"),
            (b"x" * 1000 + b"\n", "not a request")]:
        done = subprocess.run(
            [kvtwin, *SIZE, "--batches"], input=request, capture_output=True)
        assert done.returncode == 2 and message in done.stderr.decode(), request
    # A request that announces 384 MiB, and ends, takes no such memory.
    small, large = memory(b"along 0 1\n123"), memory(b"along 0 16777216\n123")
    assert large - small < 100 << 20, (small, large)


main()
