"""fastllm on the CPU, by the logits of tiny models, against the same models
without a cache: ftllm.md."""

import ctypes
import dataclasses
import os
import pathlib
import random
import re
import sys
import tempfile
import time

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import page
from ftllm_model import MODELS
from histories import Wrong, in_child, judged, played, prompt_from
from mistralrs_model import HEADS, VOCAB

HISTORIES = 40
EOS = 1
#: A penalty that changes nothing. Without one, batches have no logits.
NEARLY_ONE = 1.000001


@dataclasses.dataclass(frozen=True)
class Setup:
    model: str
    saved: bool = False  # set_save_history, for models without pages.
    page: int = 8  # The tokens of a page.
    room: int = 4000  # The tokens of all pages.
    chunk: int = 16  # Longer prompts are computed in pieces.
    stops: bool = False  # Answers end by a stop token, not by their length.
    together: int = 3  # How many prompts are asked at once.
    prompt: int = 24  # The longest part of a prompt that is new.
    bound: float = 1e-3  # How much logits may differ.
    dim: int = 128  # Of the heads.


def draw(seed, setup):
    """Draws a history: calls of Engine."""
    rng = random.Random(seed)
    ops = []
    for _ in range(rng.randint(1, 8)):
        for _ in range(rng.randint(1, setup.together)):
            ops.append(("ask", rng.randrange(8), rng.choice(
                [0, 99, 99, rng.randrange(40)]), rng.choice(
                [1, 2, rng.randint(1, setup.prompt)])))
        ops.append(("answer", rng.choice([1, 2, 5, rng.randint(1, 20)])))
    return setup, ops


def spread():
    """Keeps the other threads from the processor to which fastllm binds one,
    because they wait in loops."""
    tasks = {int(task): os.sched_getaffinity(int(task))
             for task in os.listdir("/proc/self/task")}
    bound = set().union(*(each for each in tasks.values() if len(each) == 1))
    for task, each in tasks.items():
        if len(each) > 1 and each - bound:
            os.sched_setaffinity(task, each - bound)


class Served:
    """A model that is loaded by fastllm."""

    def __init__(self, setup, folder):
        # Importing it begins threads, which a child of this process would not
        # have.
        from ftllm import llm

        self.lib = llm.fastllm_lib
        llm.set_cpu_threads(1)
        llm.set_page_size(setup.page)
        llm.set_max_tokens(setup.room)
        self.model = llm.model(str(folder), dtype="float32",
                               tokenizer_type="fastllm")
        self.model.set_save_history(setup.saved)
        self.model.set_chunked_prefill_size(setup.chunk)
        self.model.warmup()
        spread()

    def send(self, prompt, length, stops=()):
        """Returns the number of a request whose answer has `length` tokens, or
        ends before one of `stops`."""
        return self.lib.launch_response_llm_model(
            self.model.model, len(prompt),
            (ctypes.c_int * len(prompt))(*prompt),
            length, 0 if stops else length, False, 1, 1, 1, NEARLY_ONE, True,
            len(stops), (ctypes.c_int * len(stops))(*stops))

    def receive(self, request):
        """Yields tokens with their logits."""
        logits, number = (ctypes.c_float * VOCAB)(), self.model.model
        while True:
            while not self.lib.can_fetch_response_llm_model(number, request):
                time.sleep(0.001)
            token = self.lib.fetch_response_logits_llm_model(
                number, request, logits)
            if token < 0:
                return
            yield token, np.array(logits)


def made(setup):
    """Returns the model of a setup."""
    class Model(MODELS[setup.model]):
        dim, embd = setup.dim, HEADS * setup.dim
        config = {**MODELS[setup.model].config, "hidden_size": embd,
                  "head_dim": dim, "intermediate_size": embd}

    return Model()


class Engine:
    """A model that answers, and what was asked."""

    def __init__(self, setup, other=False):
        self.setup, self.truth = setup, made(setup)
        if other:  # Other tokens have these rows.
            weights = self.truth.weights
            weights["model.embed_tokens.weight"] = weights[
                "model.embed_tokens.weight"][::-1].copy()
        with tempfile.TemporaryDirectory() as folder:
            self.truth.save(pathlib.Path(folder) / setup.model)
            self.served = Served(setup, pathlib.Path(folder) / setup.model)
        self.texts = []  # The prompt and the answer of each request.
        self.waiting = []  # Requests that are not sent.

    def ask(self, source, kept, more):
        """Asks for a prompt that begins with `kept` tokens of a text."""
        number = len(self.texts)
        prompt = prompt_from(self.texts, source, kept, more)
        if prompt:
            self.texts.append(prompt)
            self.waiting.append(number)

    def answer(self, length):
        """Answers all that waits."""
        waiting, self.waiting = self.waiting, []
        if not length:
            return
        sent = []
        for number in waiting:
            stops = self.stops(self.texts[number], length)
            sent.append((number, stops, self.served.send(
                self.texts[number], 1000 if stops else length, stops)))
        for number, stops, request in sent:
            self.check(number, stops, length,
                       list(self.served.receive(request)))

    def stops(self, prompt, length):
        """Returns the token before which an answer shall end."""
        if not self.setup.stops:
            return []
        text = list(prompt)
        for _ in range(length):
            text.append(int(self.truth.logits(text)[-1].argmax()))
        return text[-1:]

    def check(self, number, stops, length, made):
        """Compares the logits of an answer."""
        prompt = self.texts[number]
        self.texts[number] = text = prompt + [token for token, _ in made]
        expected = self.truth.logits(text)[len(prompt) - 1:]
        for i, (_, row) in enumerate(made):
            if not np.abs(np.delete(row - expected[i], EOS)
                          ).max() < self.setup.bound:
                raise Wrong(f"request {number}: the logits of token "
                            f"{len(prompt) + i} are wrong")
        ended = (expected[-1].max() - expected[-1][[EOS, *stops]].max() <
                 self.setup.bound)
        if not (ended if stops else len(made) == length):
            raise Wrong(f"request {number} has {len(made)} tokens")

    def finish(self):
        pass


def apart(run, *arguments):
    """Returns run(*arguments) of a process of its own."""
    with tempfile.TemporaryFile() as printed:
        def work(send):
            os.dup2(printed.fileno(), 1)
            with open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)  # An error waits for a key.
            send(run(*arguments))

        messages, signal = in_child(work, 60)
        printed.seek(0)
        error = re.search(b"FastLLM Error: (.*)", printed.read())
    if messages:
        return messages[0]
    return (f"the process ends: {error.group(1).decode()}" if error
            else f"dies or hangs: signal {signal}")


def judge(setup, ops):
    return apart(lambda: played(Engine(setup), ops))


ROOM = "model"  # What a history shows of its setup.
PAGES = {"bound": 0.1, "dim": 32}
SETUPS = {
    "Llama": Setup("Llama"),
    "Llama, heads of 64": Setup("Llama", dim=64),
    "Llama, heads of 64, one at a time": Setup("Llama", dim=64, together=1),
    "Llama, saved": Setup("Llama", saved=True),
    "Llama, saved, stop tokens": Setup("Llama", saved=True, stops=True),
    "Qwen2": Setup("Qwen2", **PAGES),
    "Qwen3": Setup("Qwen3", **PAGES),
    "Qwen3, stop tokens": Setup("Qwen3", stops=True, **PAGES),
    "Qwen3, little room": Setup("Qwen3", room=128, **PAGES),
}


def two_models(name, setup):
    """Asks two models of one shape in one process the same."""
    def run():
        first, second = Engine(setup), Engine(setup, True)
        for engine in first, second:
            engine.ask(0, 0, 40)
            said = played(engine, [("answer", 2)])
            if said:
                return said
        return "right"
    return page.say(name, [apart(run)])


def results():
    for name, setup in SETUPS.items():
        yield from page.say(name, judged(sys.modules[__name__], setup,
                                         HISTORIES))
    for name in "Llama", "Qwen3":
        yield from two_models(f"{name}, two models", Setup(name, **PAGES))


if __name__ == "__main__":
    page.compare(list(results()), "ftllm.md")
