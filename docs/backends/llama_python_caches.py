"""llama-cpp-python's class Llama under random histories of requests
(llama_python_steps.py): as it is, with each of its bugs alone, with none, and with
each of some faults. llama_python.md has the results."""

import argparse
import collections
from unittest import mock

import llama_python_steps
import page
from histories import judged, repaired, results
from llama_python_repairs import FAULTS, REPAIRS, changed

HISTORIES = 40
TRIED = 400  # The histories that are tried for a fault.
#: The setups in which bugs are shown alone, and how many histories are tried.
ALONE = [("window", "WindowShort", 40), ("window", "WindowRAM", 60),
         ("scores", "Draft", 20), ("states", "StatesDraft", 20),
         ("states", "HybridDraft", 20), ("batch", "DraftLong", 40),
         ("shown", "DraftCalls", 40), ("rest", "DraftLogits", 100),
         ("sampler", "Plain", 40),
         ("bias", "Bias", 20), ("row", "Calls", 20), ("penalty", "Penalties", 20),
         ("sent", "Sent", 100), ("embed", "Embedding", 40),
         ("model", "DiskOthers", 40), ("model", "DiskLarger", 40),
         ("failed model", "DiskKinds", 100), ("room", "RAM", 40),
         ("echo", "Logits", 40), ("odd", "OddLogits", 40)]


def faults():
    """Says what is seen of each fault, with all bugs repaired."""
    lines = []
    for name, setup, owner, function, old, new in FAULTS:
        fault = changed(owner, function, old, new)
        with mock.patch.object(owner, function, fault), repaired(REPAIRS):
            lines += page.say(f"{setup}, a fault: {name}", judged(
                llama_python_steps, llama_python_steps.SETUPS[setup], TRIED))
    return lines


def hunt(histories, first):
    """Says how the histories of further seeds go, with all bugs repaired."""
    for name, setup in llama_python_steps.SETUPS.items():
        with repaired(REPAIRS):
            said = collections.Counter(
                llama_python_steps.judge(*llama_python_steps.draw(seed, setup))
                for seed in range(first, first + histories))
        page.say(name, (f"{count} histories: {what or 'right'}"
                        for what, count in said.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hunt", type=int, metavar="HISTORIES",
                        help="only search: this many histories of each setup")
    parser.add_argument("--seed", type=int, default=1000,
                        help="the first seed of --hunt")
    parser.add_argument("--write", action="store_true",
                        help="write the results to the page")
    arguments = parser.parse_args()
    if arguments.hunt:
        hunt(arguments.hunt, arguments.seed)
    else:
        page.compare(results(llama_python_steps, REPAIRS, ALONE, HISTORIES) +
                     faults(), "llama_python.md")
