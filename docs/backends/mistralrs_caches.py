"""mistral.rs on the CPU, by the tokens of tiny models, against the same models
without a cache: mistralrs.md."""

import contextlib
import dataclasses
import os
import pathlib
import random
import re
import sys
import tempfile
import threading
import time

os.environ.update(MISTRALRS_CPU_KV_F32="1", RUST_LOG="off", RUST_BACKTRACE="0")

import mistralrs
import mistralrs_model
import page
from histories import judged
from mistralrs_model import text, tokens_of

HISTORIES = 40
PLUG = 120  # The tokens of the prompt behind which others queue.
FOLDER = pathlib.Path(tempfile.gettempdir())


@dataclasses.dataclass(frozen=True)
class Setup:
    model: str
    prefixes: int = 16  # prefix_cache_n
    seqs: int = 8  # max_seqs
    alone: bool = False  # One request at a time.
    together: int = 5  # The most requests at once.
    choices: int = 1


def draw(seed, setup):
    """Draws a history: calls of Engine."""
    rng = random.Random(seed)
    ops = []
    for _ in range(rng.randint(1, 4)):
        for _ in range(1 if setup.alone else rng.randint(1, setup.together)):
            ops.append(("ask", rng.randrange(8), rng.choice(
                [0, 0, 99, 99, rng.randrange(1, 40)]), rng.choice(
                [1, 1, 2, 5, rng.randrange(1, 24)]), rng.choice(
                [1, 2, 5, rng.randrange(1, 30)]), rng.randint(1, setup.choices)))
        ops.append(("drain",))
    return setup, ops


class Wrong(Exception):
    pass


class Engine:
    """A model that is served, and what was asked."""

    def __init__(self, setup):
        self.setup, self.alone = setup, ALONE[setup.model]
        self.runner = mistralrs.Runner(
            which=mistralrs.Which.Plain(
                model_id=str(FOLDER / setup.model),
                arch=getattr(mistralrs.Architecture, setup.model),
                dtype=mistralrs.ModelDType.F32),
            max_seqs=setup.seqs, prefix_cache_n=setup.prefixes,
            token_source="none")
        self.known, self.waiting, self.plugs = [], [], 0

    def send(self, prompt, length, choices=1):
        return self.runner.send_chat_completion_request(
            mistralrs.ChatCompletionRequest(
                messages=text(prompt), model="default", max_tokens=length,
                temperature=0.0, ignore_eos=True, stream=True,
                n_choices=choices))

    def ask(self, source, kept, more, length, choices):
        number = len(self.known)
        prompt = (self.known[source] if source < number else [])[:kept] + [
            2 + (number * 7 + i * i) % 62 for i in range(more)]
        if prompt:
            self.known.append(prompt)
            self.waiting.append((number, length, choices))
        if self.setup.alone:
            self.drain()

    def drain(self):
        """Sends the requests while the engine computes another prompt, so that
        all are there when it is done, and waits for the answers."""
        plug = None
        if len(self.waiting) > 1:
            self.plugs += 1
            plug = threading.Thread(
                target=list, args=[self.send([0, self.plugs] + [0] * PLUG, 1)])
            plug.start()
            time.sleep(0.01)
        streams = [self.send(self.known[number], length, choices)
                   for number, length, choices in self.waiting]
        if plug and not plug.is_alive():
            print("too late", file=sys.stderr)
        for (number, length, choices), stream in zip(self.waiting, streams):
            self.read(number, length, choices, stream)
        self.waiting = []
        if plug:
            plug.join()

    def read(self, number, length, choices, stream):
        made = [[] for _ in range(choices)]
        for chunk in stream:
            for choice in chunk.choices:
                made[choice.index] += tokens_of(choice.delta.content or "")
        prompt = self.known[number]
        for answer in made:
            if said := self.alone.wrong(prompt, answer):
                raise Wrong(f"request {number}: {said}")
            if len(answer) != length:
                raise Wrong(f"request {number} has {len(answer)} tokens")
        self.known[number] = prompt + made[0]


@contextlib.contextmanager
def caught():
    """Catches what is written to the standard error, by Rust too."""
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def judge(setup, ops):
    """Runs a history, and returns what was wrong, or None."""
    with caught() as log:
        try:
            engine = Engine(setup)
            for name, *numbers in ops:
                getattr(engine, name)(*numbers)
            engine.drain()
        except Wrong as wrong:
            return str(wrong)
        except ValueError as error:
            log.seek(0)
            panic = re.search(r"panicked at (\S+?):.*\n(.*)", log.read())
            if panic:
                return f"panic in {panic[1]}: {panic[2]}"
            return f"error: {error}".splitlines()[0]


ROOM = "seqs"  # The size that a history shows.
SETUPS = {
    "Llama": Setup("Llama"),
    "Llama, no prefix caching": Setup("Llama", prefixes=0),
    "Llama, two sequences at once": Setup("Llama", seqs=2),
    "Llama, choices": Setup("Llama", choices=3),
    "Mistral": Setup("Mistral"),
    "Mistral, one at a time": Setup("Mistral", alone=True),
    "Mistral, no prefix caching": Setup("Mistral", prefixes=0),
    "Mistral, no prefix caching, one at a time": Setup(
        "Mistral", prefixes=0, alone=True),
    "Gemma2": Setup("Gemma2"),
    "Gemma2, one at a time": Setup("Gemma2", alone=True),
    "Gemma2, no prefix caching": Setup("Gemma2", prefixes=0),
    "Gemma2, no prefix caching, one at a time": Setup(
        "Gemma2", prefixes=0, alone=True),
}
ALONE = {}


if __name__ == "__main__":
    lines = []
    with tempfile.TemporaryDirectory() as made:
        FOLDER = pathlib.Path(made)
        for name in mistralrs_model.CONFIGS:
            mistralrs_model.save(FOLDER / name, name)
            ALONE[name] = mistralrs_model.Alone(name)
        for name, setup in SETUPS.items():
            began = time.time()
            lines += page.say(name, judged(sys.modules[__name__], setup,
                                           HISTORIES))
            print(time.time() - began, file=sys.stderr)
    page.compare(lines, "mistralrs.md")
