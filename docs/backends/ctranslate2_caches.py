"""CTranslate2 on the CPU, by the logits of tiny models, against the same models
without a cache: ctranslate2.md."""

import dataclasses
import os
import pathlib
import random
import sys
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"

import ctranslate2
import ctranslate2_faults
import numpy as np
import page
from ctranslate2_model import MODELS, T5, save, text
from histories import (Wrong, in_child, judged, kind, log_softmax,
                       played, prompt_from)
from mistralrs_model import FIRST

HISTORIES = 40
EOS = 1
#: Answers have as many tokens as were asked for.
ENDLESS = {"suppress_sequences": [[text([EOS])]]}
#: How much logits may differ, in texts of up to 200 tokens and in longer texts:
#: ctranslate2.md.
BOUND, LONG_BOUND = 1e-3, 1e-2


@dataclasses.dataclass(frozen=True)
class Setup:
    model: str
    prompt: int = 24  # The longest part of a prompt that is new.
    kept: int = 99  # The longest part of a prompt that is an earlier text.
    system: int = 0  # The longest static prompt.
    whole: bool = False  # Whole texts, without a cache.
    least: int = 2  # The shortest prompt.
    choices: bool = False  # Answers that begin with different tokens.


def draw(seed, setup):
    """Draws a history: calls of Engine."""
    rng = random.Random(seed)
    ops = []
    for _ in range(rng.randint(1, 5)):
        for _ in range(rng.choice([1, 1, 2, 3])):
            ops.append(("ask", rng.randrange(4), min(setup.kept, rng.choice(
                [0, 0, 99, rng.randrange(20)])), min(setup.prompt, rng.choice(
                [1, 2, rng.randint(1, setup.prompt)]))))
        if setup.system and rng.random() < 0.6:
            ops.append(("system", rng.randint(1, setup.system),
                        rng.randrange(2)))
        count = rng.choice([1, 2, 5, rng.randint(1, 20)])
        ops.append(rng.choice([
            ("answer", count), ("answer", count), ("include", count),
            ("choices" if setup.choices and rng.random() < 0.7 else "beams",
             count, rng.randint(2, 3))]) if
            not setup.whole or rng.random() < 0.5 else
            rng.choice([("forward",), ("score",)]))
    return setup, ops


def bound(tokens):
    return BOUND if len(tokens) <= 200 else LONG_BOUND


def strings(tokens):
    return [text([token]) for token in tokens]


def numbers(strings):
    return [ord(character) - FIRST for character in strings]


class Engine:
    """A model that answers, and what was asked."""

    def __init__(self, setup, truth=None):
        self.setup, (model, folder) = setup, SAVED[setup.model]
        self.truth = truth or model
        self.generator = (
            ctranslate2.Translator if isinstance(model, T5)
            else ctranslate2.Generator)(
                str(folder), compute_type="float32", intra_threads=1)
        self.texts = []  # The prompt and the first answer of each request.
        self.waiting = []  # Prompts.
        self.prompt = {}  # The arguments for a static prompt.

    def ask(self, source, kept, more):
        """Asks for a prompt that begins with `kept` tokens of a text."""
        number = len(self.texts)
        prompt = prompt_from(self.texts, source, kept, more)
        if len(prompt) >= self.setup.least:
            self.texts.append(prompt)
            self.waiting.append((number, prompt))

    def system(self, count, cached):
        """Sets the static prompt of the next call."""
        self.prompt = count and {
            "static_prompt": strings([3 + i * i % 60 for i in range(count)]),
            "cache_static_prompt": bool(cached)} or {}

    def taken(self):
        """Returns what waits, and the static prompt with its arguments."""
        waiting, prompt = self.waiting, self.prompt
        self.waiting, self.prompt = [], {}
        return waiting, numbers(prompt.get("static_prompt", [])), prompt

    def logits(self, number, tokens, begin):
        """Returns the expected logits after each token from `begin` on."""
        if isinstance(self.truth, T5):
            return self.truth.logits(self.sources[number], tokens)[begin:]
        return self.truth.logits(tokens)[begin:]

    def answer(self, count):
        self.generate(count, include_prompt_in_result=False)

    def include(self, count):
        """The same, where the prompt is generated, too."""
        self.generate(count, include_prompt_in_result=True)

    def generate(self, count, include_prompt_in_result):
        waiting, static, prompt = self.taken()
        if not waiting or not count:
            return
        given = 0
        if include_prompt_in_result:
            # Limits include the prompt: only prompts of one length wait.
            waiting = [each for each in waiting
                       if len(each[1]) == len(waiting[0][1])]
            given = len(waiting[0][1]) - 1
        answers = self.generator.generate_batch(
            [strings(tokens) for _, tokens in waiting],
            max_length=count + given, return_logits_vocab=True,
            include_prompt_in_result=include_prompt_in_result, **prompt,
            **ENDLESS)
        for (number, tokens), answer in zip(waiting, answers):
            made = answer.sequences_ids[0]
            if include_prompt_in_result:
                # The first token of a prompt is left out if it is the begin
                # token.
                made = made[len(made) - count:]
            self.check(number, static, tokens, made, count, answer.logits[0])

    def check(self, number, static, tokens, made, count, logits):
        """Compares the logits of an answer."""
        if len(made) != count:
            raise Wrong(f"request {number} has {len(made)} tokens")
        full = static + tokens + made
        expected = self.logits(number, full[:-1], len(full) - 1 - len(logits))
        for i, (row, right) in enumerate(zip(logits, expected)):
            row = np.array(row)
            if not np.abs(np.delete(row - right, EOS)).max() < bound(full):
                raise Wrong(f"request {number}: the logits of token "
                            f"{len(full) - len(logits) + i} are wrong")
        self.texts[number] = tokens + made

    def beams(self, count, width):
        self.scored(count, beam_size=width, num_hypotheses=width)

    def choices(self, count, width):
        """Answers that begin with different tokens."""
        self.scored(count, num_hypotheses=width, return_alternatives=True)

    def scored(self, count, **options):
        """Compares the scores of answers: the sums of logarithms."""
        waiting, static, prompt = self.taken()
        if not waiting or not count:
            return
        answers = self.generator.generate_batch(
            [strings(tokens) for _, tokens in waiting], max_length=count,
            return_scores=True, length_penalty=0,
            include_prompt_in_result=False, **options, **prompt, **ENDLESS)
        for (number, tokens), answer in zip(waiting, answers):
            for made, score in zip(answer.sequences_ids, answer.scores):
                self.compare(number, static + tokens, made, score, count)
            self.texts[number] = tokens + answer.sequences_ids[0]

    def compare(self, number, tokens, made, score, count):
        if len(made) != count:
            raise Wrong(f"request {number} has {len(made)} tokens")
        expected = self.logits(number, (tokens + made)[:-1], len(tokens) - 1)
        expected[:, EOS] = -np.inf
        expected = log_softmax(expected)[np.arange(count), made].sum()
        if not abs(score - expected) < count * bound(tokens):
            raise Wrong(f"request {number}: a score is wrong")

    def forward(self):
        """The logits of whole prompts."""
        waiting, _, _ = self.taken()
        if not waiting:
            return
        out = np.array(self.generator.forward_batch(
            [strings(tokens) for _, tokens in waiting]))
        for (number, tokens), rows in zip(waiting, out):
            right = self.logits(number, tokens, 0)
            for i in range(len(tokens)):
                if not np.abs(rows[i] - right[i]).max() < bound(tokens):
                    raise Wrong(f"request {number}: the logits after token "
                                f"{i} are wrong")

    def score(self):
        """The scores of the tokens of whole prompts."""
        waiting, _, _ = self.taken()
        waiting = [each for each in waiting if len(each[1]) > 1]
        if not waiting:
            return
        answers = self.generator.score_batch(
            [strings(tokens) for _, tokens in waiting])
        for (number, tokens), answer in zip(waiting, answers):
            right = log_softmax(self.logits(number, tokens, 0))[
                np.arange(len(tokens) - 1), tokens[1:]]
            if not np.abs(answer.log_probs - right).max() < bound(tokens):
                raise Wrong(f"request {number}: the score of a token is wrong")

    def finish(self):
        pass


class Translating(Engine):
    """A model with an encoder. A prompt is what an answer has to begin with."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sources = []

    def ask(self, source, kept, more):
        super().ask(source, kept, more)
        self.sources += [[2 + (number * 5 + i * i) % 62
                          for i in range(1 + (number * 3 + kept) % 9)]
                         for number in range(len(self.sources),
                                             len(self.texts))]

    def translated(self, count, **options):
        """Yields requests with their answers."""
        waiting, _, _ = self.taken()
        if not waiting or not count:
            return
        # Limits include the prompt.
        longest = max(len(tokens) for _, tokens in waiting)
        waiting = [each for each in waiting if len(each[1]) == longest]
        answers = self.generator.translate_batch(
            [strings(self.sources[number]) for number, _ in waiting],
            target_prefix=[strings(tokens) for _, tokens in waiting],
            max_decoding_length=longest + count, length_penalty=0,
            return_scores=True, max_input_length=0, **options, **ENDLESS)
        for (number, tokens), answer in zip(waiting, answers):
            self.texts[number] = numbers(answer.hypotheses[0])
            for hypothesis, score in zip(answer.hypotheses, answer.scores):
                made = numbers(hypothesis)
                if made[:len(tokens)] != tokens:
                    raise Wrong(f"request {number} begins in another way")
                yield number, tokens, made[len(tokens):], score

    def generate(self, count, include_prompt_in_result):
        for number, tokens, made, score in self.translated(count, beam_size=1):
            self.compare(number, [0, *tokens], made, score, count)

    def scored(self, count, **options):
        for number, tokens, made, score in self.translated(
                count, **{"beam_size": 1, **options}):
            self.compare(number, [0, *tokens], made, score, count)

    def score(self):
        waiting, _, _ = self.taken()
        if not waiting:
            return
        answers = self.generator.score_batch(
            [strings(self.sources[number]) for number, _ in waiting],
            [strings(tokens) for _, tokens in waiting])
        for (number, tokens), answer in zip(waiting, answers):
            right = log_softmax(self.logits(number, [0, *tokens], 0))[
                np.arange(len(tokens)), tokens]
            if not np.abs(answer.log_probs[:len(tokens)] -
                          right).max() < bound(tokens):
                raise Wrong(f"request {number}: the score of a token is wrong")

    forward = score


def play(setup, ops, truth=None):
    """Runs a history, and returns what was wrong, or None."""
    engine = (Translating if setup.model == "T5" else Engine)(setup, truth)
    return played(engine, ops)


def apart(run, *arguments):
    """Returns run(*arguments) of a process of its own, whose memory may be
    damaged."""
    messages, _ = in_child(lambda send: send(run(*arguments)), 60)
    return messages[0] if messages else "dies or hangs"


def judge(setup, ops):
    return apart(play, setup, ops)


def predicted(name, faulty, lengths, ops):
    """Returns how many answers equal those of the model `faulty`."""
    right = as_faulty = 0
    for length in lengths:
        faulty.prompt = length - (name != "T5")
        history = [("ask", 0, 0, length), *ops]
        as_faulty += not apart(play, Setup(name), history, faulty)
        right += not apart(play, Setup(name), history)
    return [f"{as_faulty} of {len(lengths)} as predicted, {right} of "
            f"{len(lengths)} right"]


def after(first, truth=None):
    """Answers a request of five tokens after one of `first` tokens."""
    def run():
        engine = Engine(Setup("LongRope"), truth)
        if first:
            engine.generator.generate_batch(
                [strings([3] * first)], max_length=1,
                include_prompt_in_result=False)
        try:
            engine.ask(0, 0, 5)
            engine.answer(3)
        except Wrong as wrong:
            return str(wrong)
    return [apart(run) or "right"]


ROOM = "model"  # What a history shows of its setup.
SETUPS = {
    "Llama": Setup("Llama", system=12),
    "Llama, whole texts": Setup("Llama", whole=True),
    "MPT": Setup("Mpt", system=12, whole=True),
    "Phi-3": Setup("LongRope", system=12, whole=True),
    "Llama, choices": Setup("Llama", choices=True),
    "Llama, prompts of a token": Setup("Llama", prompt=3, kept=0, least=1),
    "Mistral, prompts within the window": Setup("Mistral", prompt=8, kept=0),
    "Mistral": Setup("Mistral"),
    "Mistral, static prompts": Setup("Mistral", prompt=4, kept=0, system=12),
    "Mistral, whole texts": Setup("Mistral", prompt=8, kept=0, whole=True),
    "Gemma 3, prompts within the window": Setup("Gemma3", prompt=8, kept=0),
    "Gemma 3": Setup("Gemma3"),
    "Gemma 3, static prompts": Setup("Gemma3", prompt=4, kept=0, system=12),
    "Gemma 3, whole texts": Setup("Gemma3", prompt=8, kept=0, whole=True),
    "Gemma 4, prompts within the window": Setup("Gemma4", prompt=8, kept=0),
    "Gemma 4": Setup("Gemma4"),
    "Gemma 4, static prompts": Setup("Gemma4", prompt=4, kept=0, system=12),
    "Gemma 4, whole texts": Setup("Gemma4", whole=True),
    "T5": Setup("T5", least=1, whole=True),
    "T5, choices, prompts of a token": Setup(
        "T5", prompt=1, kept=0, least=1, choices=True),
    "T5, choices": Setup("T5", least=1, choices=True),
}
#: Histories that were aimed at what the source does.
AIMED = {
    "Mistral, a whole text of 8 tokens": (
        Setup("Mistral"), [("ask", 0, 0, 8), ("forward",)]),
    "Mistral, a whole text of 9 tokens": (
        Setup("Mistral"), [("ask", 0, 0, 9), ("forward",)]),
    "Mistral, a static prompt of 5000 tokens": (
        Setup("Mistral"), [("ask", 0, 0, 4), ("system", 5000, 1),
                           ("answer", 2)]),
    "Llama, the same": (
        Setup("Llama"), [("ask", 0, 0, 4), ("system", 5000, 1), ("answer", 2)]),
    "MPT, a prompt of 2049 tokens": (
        Setup("Mpt"), [("ask", 0, 0, 2049), ("answer", 2)]),
    "MPT, a prompt of 2050 tokens": (
        Setup("Mpt"), [("ask", 0, 0, 2050), ("answer", 2)]),
    "MPT, a whole text of 2049 tokens": (
        Setup("Mpt"), [("ask", 0, 0, 2049), ("forward",)]),
    "MPT, the same after a text of 2048": (
        Setup("Mpt"), [("ask", 0, 0, 2048), ("answer", 2),
                       ("ask", 0, 0, 2049), ("forward",)]),
    "Phi-3, a prompt of 2048 tokens": (
        Setup("LongRope"), [("ask", 0, 0, 2048), ("answer", 1)]),
    "Phi-3, a prompt of 2050 tokens": (
        Setup("LongRope"), [("ask", 0, 0, 2050), ("answer", 1)]),
}


def results():
    for name, setup in SETUPS.items():
        yield from page.say(name, judged(sys.modules[__name__], setup,
                                         HISTORIES))
    for name, (setup, ops) in AIMED.items():
        # What is read beyond the end of an array has other numbers each time.
        yield from page.say(name, [kind(judge(setup, ops)) or "right"])
    for first in 0, 2048, 2050:
        yield from page.say(f"Phi-3, five tokens after {first}", after(first))
    faulty = ctranslate2_faults
    yield from page.say("Phi-3, five tokens after 2050: LongTurns",
                        after(2050, faulty.LongTurns()))
    for name, fault in (("Mistral", "Pieces"), ("Gemma3", "PiecesOfGemma3"),
                        ("Gemma4", "NoWindow")):
        yield from page.say(f"{name}, prompts of 3 to 42 tokens: {fault}",
                            predicted(name, getattr(faulty, fault)(),
                                      range(3, 43), [("answer", 10)]))
    yield from page.say("T5, prompts of 1 to 20 tokens, choices: FarPrompt",
                        predicted("T5", faulty.FarPrompt(), range(1, 21),
                                  [("choices", 5, 2)]))


if __name__ == "__main__":
    SAVED = {}  # Models and their folders, by name.
    with tempfile.TemporaryDirectory() as made:
        for name, cls in MODELS.items():
            SAVED[name] = cls(), pathlib.Path(made) / name
            save(*SAVED[name])
        lines = list(results())
    page.compare(lines, "ctranslate2.md")
