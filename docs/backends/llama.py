"""Holds llama.cpp's KV cache to our own forward pass, by logits.

Random histories of decodes, removals, copies and shifts go to llama.cpp and
to a list of tokens that follows the comments of llama.h; after each decode
the logits of all its tokens must agree. See llama.md beside this file.
"""

import argparse
import collections
import os
import pathlib
import random
import signal
import sys
import tempfile

# Tiny matrices gain nothing from threads.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import llama_cpp

import llama_model
from histories import in_child
from llama_model import ARCHS, SEQUENCES
from llama_run import Config, Difference, Run

lib = llama_cpp.llama_cpp


# Behavior of llama.cpp that llama.h does not describe: see llama.md. Without
# one of these, our side follows llama.h there.
QUIRKS = {
    "div": "seq_div turns K the wrong way",
    "nope": "a shift turns K of layers without RoPE",
    "swa-base": "a shift of granite_swa's windowed layers takes base 10000",
    "crash": "a shift of quantized K crashes unless heads are multiples of 64",
    "save": "saved sequences lack shifts and copies that are pending",
    "empty": "loading an empty sequence keeps the tokens that were there",
    "keep": "seq_keep keeps the sequences of other streams",
    "replace": "between streams, seq_cp takes the target's own tokens away",
    "whole": "between streams, seq_cp with p1 = 0 copies all",
    "prepare": "a batch of several ubatches takes from a window what it needs",
    "split": "seq_add moves shared tokens in the cache without window only",
    "forgotten": "seq_pos_max leaves out tokens that some layers still see",
}
# Where to look for them first, of architectures and dtypes.
PLACES = {
    "nope": "smollm3",
    "swa-base": "granite_swa",
    "crash": "q8_0",
    "prepare": "granite_swa",
    "split": "granite_swa",
    "forgotten": "granite_swa",
    "eager": "granite_swa",
    "window-plus-one": "granite_swa",
}
# Faults that no version has. Each must be found.
BREAKS = {
    "copy-replaces": "seq_cp takes the target's own tokens away",
    "no-turn": "seq_add leaves K as it is",
    "window-plus-one": "a window does not count the query",
    "remove-shifts": "seq_rm closes the gap",
    "add-own": "seq_add moves a shared token for one sequence only",
    "eager": "what leaves the window is gone at once",
}


CONFIGS = [
    Config("llama"),
    Config("llama", unified=False),
    Config("llama", flash=True, cells=512, ubatch=24),
    Config("llama", unified=False, flash=True, ubatch=24),
    Config("smollm3"),
    Config("smollm3", unified=False),
    Config("granite_swa"),
    Config("granite_swa", unified=False),
    Config("granite_swa", cells=512, ubatch=24),
    Config("granite_swa", unified=False, cells=512, flash=True),
    Config("llama", dtype="f16"),
    Config("granite_swa", dtype="f16", flash=True),
    Config("llama", dtype="q8_0", flash=True),
    Config("smollm3", dtype="q8_0", flash=True),
]


def draw(rng, run):
    """A call that fits what the sequences hold."""
    sequence = rng.randrange(SEQUENCES)
    end = run.ours.end(sequence)
    if rng.random() < (0.9 if end < 0 else 0.45):
        count = rng.choice([1, 1, 1, 2, 3, 5, 8, 13, 20, 40, 60])
        chosen = rng.sample(range(SEQUENCES), rng.choice([1, 1, 1, 2, 3]))
        if rng.random() < 0.1:
            runs = [(tuple(chosen), count)]
        else:
            equal = rng.random() < 0.5
            share = max(1, count // len(chosen))
            runs = [
                ((s,), share if equal else rng.randint(1, share))
                for s in chosen
            ]
        runs = tuple(
            (s, tuple(rng.randrange(llama_model.VOCAB) for _ in range(n)))
            for s, n in runs
        )
        repeats = ()
        if rng.random() < 0.1:
            repeats = tuple(i for i in range(1, 64) if rng.random() < 0.3)
        start = rng.choice([0, 0, 0, 3])
        return ("decode", runs, start, rng.random() < 0.5, repeats)
    other = rng.randrange(SEQUENCES)
    low = rng.randint(0, max(0, end))
    high = rng.randint(low, low if end < 0 else end + 1)
    kind = rng.choices(
        [
            "tail",
            "middle",
            "all",
            "any",
            "copy",
            "prefix",
            "some",
            "shift",
            "add",
            "div",
            "keep",
            "load",
            "reload",
            "gap",
            "clear",
        ],
        [6, 4, 4, 1, 6, 4, 2, 6, 4, 2, 1, 4, 1, 1, 0.3],
    )[0]
    if kind == "tail":
        return ("rm", sequence, max(low, end - rng.randint(0, 20)), -1)
    if kind == "middle":
        return ("rm", sequence, low, high)
    if kind == "all":
        return ("rm", sequence, -1, -1)
    if kind == "any":
        return ("rm", -1, low, rng.choice([high, -1]))
    if kind in ("copy", "prefix", "some"):
        begin, end = {
            "copy": (-1, -1),
            "prefix": (0, high),
            "some": (low, high),
        }[kind]
        return ("cp", sequence, other, begin, end)
    if kind == "shift":
        # As servers do it: two calls, see choose().
        return ("shift", sequence, low, high)
    if kind == "add":
        delta = rng.choice([-low - 1, -low, -2, -1, 1, 2, 7, 50])
        return ("add", sequence, low, rng.choice([high, -1]), delta)
    if kind == "div":
        return ("div", sequence, low, rng.choice([high, -1]), 2)
    if kind == "load":
        return ("load", sequence, other)
    if kind == "gap":
        return ("gap", sequence, rng.choice([0, 2]))
    return (kind, sequence) if kind == "keep" else (kind,)


def choose(rng, run):
    call = draw(rng, run)
    if call[0] != "shift":
        return [call]
    _, sequence, low, high = call
    return [
        ("rm", sequence, low, high),
        ("add", sequence, high, -1, low - high),
    ]


def replay(models, config, rules, calls, send=lambda message: None):
    """The first difference."""
    run = Run(models, config, rules, send)
    try:
        for call in calls:
            difference = run.step(call)
            if difference:
                return difference
        return None
    finally:
        run.theirs.close()


def replay_apart(models, config, rules, calls, send=lambda message: None):
    """The same; it is a difference if llama.cpp dies."""
    messages, number = in_child(
        lambda out: out(replay(models, config, rules, calls, out))
    )
    for line in messages if number else messages[:-1]:
        send(line)
    if number:
        text = f"llama.cpp dies: {signal.strsignal(number)}"
        return Difference("crash", text)
    return messages[-1]


def shrink(models, config, rules, calls, kind):
    """A shorter history with a difference of the same kind."""
    attempt = replay_apart if kind == "crash" else replay

    def fails(candidate):
        difference = attempt(models, config, rules, candidate)
        return difference is not None and difference.kind == kind

    def simpler(call):
        """Calls that are simpler than this one, simplest first."""
        name, *rest = call
        if name in ("rm", "cp", "add", "div"):
            begin = 2 if name == "cp" else 1
            if rest[begin] > 0:
                yield call[: begin + 1] + (0,) + call[begin + 2 :]
            if rest[begin + 1] >= 0:
                yield call[: begin + 2] + (-1,) + call[begin + 3 :]
        if name == "div":
            yield ("add", *rest[:3], -1)
        if name == "add" and abs(rest[3]) > 1:
            yield call[:4] + (1 if rest[3] > 0 else -1,)
        if name != "decode":
            return
        runs, start, mixed, repeats = rest
        if len(runs) > 1:
            for i in range(len(runs)):
                yield (name, runs[:i] + runs[i + 1 :], start, mixed, repeats)
        if repeats:
            yield (name, runs, start, mixed, ())
        if start or mixed:
            yield (name, runs, 0, False, repeats)
        for i, (sequences, ids) in enumerate(runs):
            for count in sorted({1, len(ids) // 2, len(ids) - 1}):
                if 0 < count < len(ids):
                    fewer = ((sequences, ids[:count]),)
                    yield (
                        name,
                        runs[:i] + fewer + runs[i + 1 :],
                        start,
                        mixed,
                        repeats,
                    )

    def joined(one, two):
        """One decode for two of the same sequences, if they are that."""
        runs = [call[1] if call[0] == "decode" else () for call in (one, two)]
        if [len(r) for r in runs] != [1, 1] or runs[0][0][0] != runs[1][0][0]:
            return None
        ids = runs[0][0][1] + runs[1][0][1]
        return ("decode", ((runs[0][0][0], ids),)) + one[2:4] + ((),)

    size = max(1, len(calls) // 2)
    while True:
        changed = False
        at = len(calls) - size
        while at > -size:
            cut = calls[: max(at, 0)] + calls[at + size :]
            if len(cut) < len(calls) and fails(cut):
                calls, changed = cut, True
            at -= size
        if size > 1:
            size //= 2
            continue
        for at in range(len(calls) - 1):
            both = joined(*calls[at : at + 2])
            if both and fails(calls[:at] + [both] + calls[at + 2 :]):
                calls, changed = calls[:at] + [both] + calls[at + 2 :], True
                break
        for at in range(len(calls)):
            for call in simpler(calls[at]):
                candidate = calls[:at] + [call] + calls[at + 1 :]
                if fails(candidate):
                    calls, changed = candidate, True
                    break
        if not changed:
            return calls


def search(models, config, rules, seed, operations):
    """Random histories until one differs.

    Answers (calls, kind) or None, what was done, the largest difference of
    logits that was let pass."""

    def work(send):
        counts, worst, number = collections.Counter(), 0.0, 0
        while counts["calls"] < operations:
            rng = random.Random(f"{seed} {config} {number}")
            number += 1
            run, difference = Run(models, config, rules), None
            left = rng.choice([10, 40, 100])
            send("new")
            while left > 0 and not difference:
                for call in choose(rng, run):
                    left -= 1
                    send(call)
                    difference = difference or run.step(call)
            run.theirs.close()
            counts += run.counts
            if difference:
                send(difference)
                break
            worst = max(worst, run.worst)
        send((counts, worst))

    messages, number = in_child(work)
    counts, worst = collections.Counter(), 0.0
    if not number:
        counts, worst = messages.pop()
    calls, found = [], None
    for message in messages:
        if message == "new":
            calls = []
        elif isinstance(message, Difference):
            found = calls, message.kind
        else:
            calls.append(message)
    return (calls, "crash") if number else found, counts, worst


def report(models, config, rules, found, say):
    if found[1] == "crash":
        calls = shrink(models, config, rules, *found)
    else:
        messages, number = in_child(
            lambda send: send(shrink(models, config, rules, *found))
        )
        calls = found[0] if number else messages[0]
    difference = replay_apart(
        models, config, rules, calls, lambda line: say(f"      {line}")
    )
    say(f"      -> {difference.text}")


def load_models(folder):
    models = {}
    for name, arch in ARCHS.items():
        weights = llama_model.random_weights(arch)
        path = f"{folder}/{name}.gguf"
        llama_model.write_gguf(path, arch, weights)
        theirs = lib.llama_model_load_from_file(
            path.encode(), lib.llama_model_default_params()
        )
        if not theirs:
            sys.exit(f"llama.cpp does not load {path}")
        models[name] = theirs, llama_model.Model(arch, weights)
    return models


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--hunt",
        type=int,
        metavar="CALLS",
        help="only search: this many calls of each configuration",
    )
    parser.add_argument(
        "--break", dest="broken", choices=BREAKS, help="only this wrong rule"
    )
    parser.add_argument(
        "--write", action="store_true", help="write what is said to the page"
    )
    arguments = parser.parse_args()
    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        models = load_models(folder)
    said = []

    def say(line):
        print(line, flush=True)
        said.append(line)

    def first(rules, place, calls=2000):
        """Says the first difference under these rules, if there is one."""
        for config in CONFIGS:
            if place not in (None, config.arch, config.dtype):
                continue
            found, *_ = search(models, config, rules, arguments.seed, calls)
            if found:
                say(f"    {config}")
                report(models, config, rules, found, say)
                return
        say("    not found")

    today = frozenset(QUIRKS)
    if arguments.broken:
        first(today | {arguments.broken}, PLACES.get(arguments.broken))
        return
    say(f"llama_cpp {llama_cpp.__version__}")
    for config in CONFIGS:
        found, counts, worst = search(
            models, config, today, arguments.seed, arguments.hunt or 500
        )
        say(
            f"{config}: {counts['calls']} calls, {counts['tokens']} tokens, "
            + ("but" if found else f"right within {config.tolerance():g}")
        )
        if arguments.hunt:
            print(f"  {worst:.1g}, {dict(counts)}")
        if found:
            report(models, config, today, found, say)
    if arguments.hunt:
        return
    say("What it does today, and llama.h does not say")
    for name, text in QUIRKS.items():
        say(f"  {text}")
        first(today - {name}, PLACES.get(name))
    say("Wrong rules on our side")
    for name, text in BREAKS.items():
        say(f"  {text}")
        first(today | {name}, PLACES.get(name))
    if arguments.seed != parser.get_default("seed"):
        return
    path = pathlib.Path(__file__).with_name("llama.md")
    before, _, rest = path.read_text().partition("```text\n")
    page, _, after = rest.partition("```\n")
    if arguments.write:
        page = "\n".join(said) + "\n"
        path.write_text(f"{before}```text\n{page}```\n{after}")
    if page.splitlines() != said:
        sys.exit(f"{path} says something else")


if __name__ == "__main__":
    main()
