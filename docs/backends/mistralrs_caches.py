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

os.environ.update(MISTRALRS_CPU_KV_F32="1", RAYON_NUM_THREADS="1",
                  RUST_LOG="off", RUST_BACKTRACE="0")

import mistralrs
import mistralrs_faults
import numpy as np
import page
from histories import Wrong, judged, prompt_from
from mistralrs_model import MODELS, text, tokens_of

HISTORIES = 40
#: How much shorter than the context the prompt is behind which others wait:
#: with less than 512, one raises an error in models with states (F67).
SPARE = 548
TRIES = 8  # How often requests may come late.


@dataclasses.dataclass(frozen=True)
class Setup:
    model: str
    prefixes: int = 16  # prefix_cache_n
    seqs: int = 8  # max_seqs
    alone: bool = False  # One request at a time.
    choices: int = 1
    leave: float = 0  # How often a client leaves.
    cached: bool = True  # Without a KV cache, each step computes the text.


def draw(seed, setup):
    """Draws a history: calls of Engine."""
    rng = random.Random(seed)
    ops = []
    for _ in range(rng.randint(1, 4)):
        for _ in range(rng.randint(1, 5)):
            ops.append(("ask", rng.randrange(8), rng.choice(
                [0, 0, 99, 99, rng.randrange(1, 40)]), rng.choice(
                [1, 1, 2, 5, rng.randrange(1, 24)]), rng.choice(
                [1, 2, 5, rng.randrange(1, 30)])))
            if rng.random() < setup.leave:
                ops.append(("leave", rng.randrange(6)))
            if setup.alone:
                ops.append(("drain",))
        ops.append(("drain",))
    return setup, ops


class Late(Exception):
    """A request came after the prompt behind which it should wait."""


class Plug:
    """A prompt that keeps the engine busy while others arrive."""

    def __init__(self, engine, first):
        context = engine.model.config["max_position_embeddings"]
        self.stream = engine.send([0, first] + [0] * (context - SPARE), 1)
        self.thread = threading.Thread(target=self.read)
        self.thread.start()
        time.sleep(0.05)  # The engine begins.

    def read(self):
        try:
            list(self.stream)
        finally:
            self.end = time.monotonic()

    def check(self, sent):
        """Raises Late if it ended before `sent`."""
        self.thread.join()
        if self.end < sent + 0.005:
            raise Late


class Engine:
    """A model that is served, and what was asked."""

    def __init__(self, setup):
        self.setup, (self.model, folder) = setup, SAVED[setup.model]
        kind, archs = ((mistralrs.Which.MultimodalPlain,
                        mistralrs.MultimodalArchitecture)
                       if self.model.multimodal else
                       (mistralrs.Which.Plain, mistralrs.Architecture))
        self.runner = mistralrs.Runner(
            which=kind(
                model_id=str(folder), arch=getattr(archs, self.model.arch),
                dtype=mistralrs.ModelDType.F32),
            max_seqs=setup.seqs, prefix_cache_n=setup.prefixes,
            no_kv_cache=not setup.cached, token_source="none")
        self.texts = []  # Of each request, and its answer.
        self.waiting = []  # Requests that are not sent: number, length.
        self.left = {}  # Requests whose clients leave, after how many tokens.
        self.plugs = 0

    def send(self, prompt, length):
        choices = self.setup.choices
        return self.runner.send_chat_completion_request(
            mistralrs.ChatCompletionRequest(
                messages=text(prompt), model="default", max_tokens=length,
                temperature=0.0, ignore_eos=True, stream=choices == 1,
                n_choices=choices))

    def ask(self, source, kept, more, length):
        """Asks for a prompt that begins with `kept` tokens of a request."""
        number = len(self.texts)
        prompt = prompt_from(self.texts, source, kept, more)
        if prompt and length:
            self.texts.append(prompt)
            self.waiting.append((number, length))

    def leave(self, tokens):
        """Closes the stream of the last request after some tokens."""
        if self.waiting:
            self.left[self.waiting[-1][0]] = tokens

    def drain(self):
        """Sends the requests while the engine computes another prompt, so that
        all are there when it is done, and waits for the answers."""
        self.plugs += 1
        plug = len(self.waiting) > 1 and Plug(self, self.plugs)
        streams = [(number, length, self.send(self.texts[number], length))
                   for number, length in self.waiting]
        self.waiting, sent = [], time.monotonic()
        if plug:
            plug.check(sent)
        while streams:
            number, length, stream = streams.pop(0)
            if number in self.left:
                for _ in zip(range(self.left[number]), stream):
                    pass
                del stream
                continue
            answers = self.answers(stream)
            if len(answers) != self.setup.choices:
                raise Wrong(f"request {number} has {len(answers)} answers")
            for made in answers:
                if said := self.model.wrong(self.texts[number], made):
                    raise Wrong(f"request {number}: {said}")
                if len(made) != length:
                    raise Wrong(f"request {number} has {len(made)} tokens")
            self.texts[number] = self.texts[number] + made

    def answers(self, stream):
        if self.setup.choices > 1:
            return [tokens_of(choice.message.content)
                    for choice in stream.choices]
        made = []
        for chunk in stream:
            made += tokens_of(chunk.choices[0].delta.content or "")
        self.usage = chunk.usage
        return [made]


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


def played(setup, ops):
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
            panic = re.search(r"panicked at (\S+?):.*\n.*value: (.*)",
                              log.read())
            if panic:
                return f"panic in {panic[1]}: {panic[2]}"
            return f"error: {error}".splitlines()[0]


def in_time(run, *arguments):
    """Returns run(*arguments), which runs again if a request came late."""
    for _ in range(TRIES):
        with contextlib.suppress(Late):
            return run(*arguments)
    raise RuntimeError(f"{TRIES} times, requests came after the end of a prompt"
                       f" that is {SPARE} tokens shorter than the context")


def judge(setup, ops):
    return in_time(played, setup, ops)


ROOM = "seqs"  # The size that a history shows.
SETUPS = {
    "Llama": Setup("Llama"),
    "Llama, no prefix caching": Setup("Llama", prefixes=0),
    "Llama, two sequences at once": Setup("Llama", seqs=2),
    "Llama, clients leave": Setup("Llama", leave=0.4),
    "Llama, three choices, one at a time": Setup(
        "Llama", choices=3, alone=True),
    "Mistral, one at a time": Setup("Mistral", alone=True),
    "Mistral, one at a time, no prefix caching": Setup(
        "Mistral", prefixes=0, alone=True),
    "Mistral, no prefix caching, a sequence at a time": Setup(
        "Mistral", prefixes=0, seqs=1),
    "Mistral, texts within the window": Setup("Wide"),
    "Gemma2, one at a time": Setup("Gemma2", alone=True),
    "Gemma2, one at a time, no prefix caching": Setup(
        "Gemma2", prefixes=0, alone=True),
    "Gemma3, one at a time": Setup("Gemma3", alone=True),
    "Gemma3, one at a time, no prefix caching": Setup(
        "Gemma3", prefixes=0, alone=True),
    "Lfm2, one at a time": Setup("Lfm2", alone=True),
    "Lfm2, one at a time, no prefix caching": Setup(
        "Lfm2", prefixes=0, alone=True),
    "Phi3, one at a time, no prefix caching": Setup(
        "Phi3", prefixes=0, alone=True),
    "Phi3, one at a time, no KV cache": Setup(
        "Phi3", cached=False, alone=True),
    "Granite, one at a time": Setup("Granite", alone=True),
    "Granite, a sequence at a time, clients leave": Setup(
        "Granite", seqs=1, leave=0.4),
}
TWO = [("ask", 0, 0, 4, 20), ("ask", 0, 0, 12, 5)]
#: Histories that were aimed at what the source does.
AIMED = {
    "Mistral, two requests reach the same length": (
        Setup("Mistral", prefixes=0), TWO),
    "Mistral, the same after another request": (
        Setup("Mistral", prefixes=0), [("ask", 0, 0, 4, 9), ("drain",), *TWO]),
    "Mistral, the same with a window of 512": (
        Setup("Wide", prefixes=0),
        [("ask", 0, 0, 505, 20), ("ask", 0, 0, 513, 9)]),
    "Gemma2, two requests reach the same length": (
        Setup("Gemma2", prefixes=0), TWO),
    "Gemma3, two requests reach the same length": (
        Setup("Gemma3", prefixes=0), TWO),
    "Llama, two prompts that continue a text of 521 and one of 31 tokens": (
        Setup("Llama"), [
            ("ask", 0, 0, 520, 1), ("drain",), ("ask", 9, 0, 30, 1), ("drain",),
            ("ask", 0, 20, 3, 2), ("ask", 1, 20, 3, 2)]),
    "Lfm2, two requests of the same length": (
        Setup("Lfm2", prefixes=0), [("ask", 0, 0, 1, 2)] * 2),
    "Granite, two requests of the same length": (
        Setup("Granite", prefixes=0), [("ask", 0, 0, 1, 1)] * 2),
    "Phi3, a prompt that begins like a longer text": (
        Setup("Phi3"),
        [("ask", 0, 0, 25, 1), ("drain",), ("ask", 0, 8, 3, 3)]),
    "Llama with a context of 600 tokens, a text of 513": (
        Setup("Short"), [("ask", 0, 0, 510, 4)]),
    "the same, a prompt of 513": (Setup("Short"), [("ask", 0, 0, 513, 1)]),
    "Granite with a context of 2048 tokens, a prompt of 1600": (
        Setup("Granite"), [("ask", 0, 0, 1600, 2)]),
}


def found_again():
    """Returns how many of six texts are found again if prefix_cache_n is 2."""
    engine, found = Engine(Setup("Llama", prefixes=2)), 0
    for last in [[], [5]]:
        for first in range(6):
            engine.answers(engine.send([2 + first, 3, 4, *last], 1))
            details = engine.usage.prompt_tokens_details
            found += bool(last and details and details.cached_tokens > 1)
    return found


def continued(name, faulty):
    """Asks for prompts that continue an answer, and yields them and their
    answers, which are empty after an error."""
    rng, engine = random.Random(1), Engine(Setup(name))
    for number in range(30):
        prompt = [2 + number] + [rng.randrange(2, 64)
                                 for _ in range(rng.randrange(3, 8))]
        prompt += engine.answers(engine.send(prompt, rng.randrange(5, 9)))[0]
        faulty.past, faulty.part = len(prompt) - 1, rng.randrange(2, 6)
        prompt += [rng.randrange(2, 64) for _ in range(faulty.part - 1)]
        with caught():
            try:
                made = engine.answers(engine.send(prompt, 6))[0]
            except ValueError:
                made = []
        yield prompt, made


def two(name, faulty):
    """The same for the second of two requests that reach the same length."""
    rng = random.Random(1)
    for _ in range(12):
        prompts = [[rng.randrange(2, 64) for _ in range(n)] for n in (4, 12)]
        yield prompts[1], in_time(second, name, prompts)


def second(name, prompts):
    """Returns the answer to the second of two prompts that arrive together
    after another."""
    engine = Engine(Setup(name, prefixes=0))
    engine.answers(engine.send([5, 6, 7, 8], 9))
    plug = Plug(engine, 1)
    streams = [engine.send(prompt, length)
               for prompt, length in zip(prompts, (40, 20))]
    plug.check(time.monotonic())
    return [engine.answers(stream)[0] for stream in streams][1]


def predicted(name, faulty, asked):
    """Returns how many prompts that were asked have the answer of the model
    that is `faulty`, or an error where it has no number."""
    right, as_faulty, count = 0, 0, 0
    for prompt, made in asked(name, faulty):
        with np.errstate(all="ignore"):
            bad = np.isnan(faulty.logits(prompt)[-1]).any()
            as_faulty += bad == (not made) and not faulty.wrong(prompt, made)
        right += bool(made) and not SAVED[name][0].wrong(prompt, made)
        count += 1
    return [f"{as_faulty} of {count} as predicted, {right} of {count} right"]


def results():
    for name, setup in SETUPS.items():
        yield from page.say(name, judged(sys.modules[__name__], setup,
                                         HISTORIES))
    for name, (setup, ops) in AIMED.items():
        yield from page.say(name, [judge(setup, ops) or "right"])
    yield from page.say("Llama with prefix_cache_n=2, six texts", [
        f"{found_again()} are found again"])
    for name, fault in (("Mistral", "FirstColumnsMistral"),
                        ("Gemma2", "FirstColumnsGemma2"),
                        ("Gemma3", "FirstColumnsGemma3"),
                        ("Lfm2", "Restarted"), ("Phi3", "KeptTurns")):
        yield from page.say(
            f"{name}, prompts that continue a text: {fault}",
            predicted(name, getattr(mistralrs_faults, fault)(), continued))
    yield from page.say(
        "Mistral, two requests: FirstPlace",
        predicted("Mistral", mistralrs_faults.FirstPlace(), two))


if __name__ == "__main__":
    SAVED = {}  # Models and their folders, by name.
    with tempfile.TemporaryDirectory() as made:
        for name, cls in MODELS.items():
            SAVED[name] = cls(), pathlib.Path(made) / name
            SAVED[name][0].save(SAVED[name][1])
        lines = list(results())
    page.compare(lines, "mistralrs.md")
