"""picture.py HISTORY: draws the calls of a history and the cells of kvtwin's cache.

The pictures of docs/semantics.md are the output of this, for blocks_test.py to compare.
"""

import json
import subprocess
import sys
import tempfile

import kvtwin
import numpy

CALLS = {
    "put": lambda cache, call: cache.put(
        call["layer"], rows(call["key"]), rows(call["value"])),
    "get": lambda cache, call: cache.get(call["layer"]),
    "start_forward": lambda cache, call: cache.start_forward(
        call["positions"], call["sequences"],
        **{name: call[name] for name in ("reserve", "parents") if name in call}),
    "copy_prefix": lambda cache, call: cache.copy_prefix(
        call["src"], call["dst"], call["len"]),
    "remove": lambda cache, call: cache.remove(call["seq"], call["begin"], call["end"]),
    "commit": lambda cache, call: cache.commit(call["seq"], call["path"]),
}


def rows(tensor):
    """Returns the rows of a recording as Python has them, last dimension fastest."""
    return numpy.array(tensor["data"], numpy.float32).reshape(tensor["shape"][::-1])


def main():
    made = subprocess.run(["kvtwin", "gen", sys.argv[1]], capture_output=True,
                          text=True, check=True).stdout
    header, *calls = [json.loads(line) for line in made.splitlines()]
    kind = {name: value for name, value in header["cache"].items()
            if name in ("window", "memory", "chunk", "shift")}
    setup = kvtwin.Setup(kind=header["cache"]["type"], placement=header["placement"],
                         **kind, **header["init"], **header["model"])
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        cache = kvtwin.Recorder(kvtwin.Cache(setup), file, setup,
                                placement=header["placement"])
        for call in calls:
            try:
                CALLS[call["op"]](cache, call)
            except kvtwin.Refusal:
                pass  # The recording has it.
        subprocess.run(["kvtwin", "show", file.name], check=True)


main()
