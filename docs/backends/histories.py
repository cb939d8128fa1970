"""Histories of engines that run step by step: lists of calls, each a name and
numbers."""

import contextlib
import os
import pickle
import re
import signal
import sys
import traceback
from unittest import mock

import numpy as np
import page


class Wrong(Exception):
    """A row that a step needs is wrong, or a token of an answer."""


def raised(error):
    """Returns the type of an error, the function that raised it, and its text."""
    frame = error.__traceback__
    while frame.tb_next:
        frame = frame.tb_next
    return (f"{type(error).__name__} in {frame.tb_frame.f_code.co_name}: "
            f"{error}").removesuffix(": ")


def prompt_from(texts, source, kept, more, first=2):
    """Returns a prompt: the first `kept` tokens of a text, if there is a text
    `source`, and `more` tokens from `first` to 63."""
    number = len(texts)
    return (texts[source] if source < number else [])[:kept] + [
        first + (number * 7 + i * i) % (64 - first) for i in range(more)]


def played(engine, ops):
    """Makes the calls of a history, and returns what was wrong, or None."""
    try:
        for name, *numbers in ops:
            getattr(engine, name)(*numbers)
        engine.finish()
    except Wrong as wrong:
        return str(wrong)
    except (AssertionError, ValueError, IndexError, KeyError, MemoryError,
            RuntimeError, AttributeError, TypeError) as error:
        return raised(error)


def in_child(work, seconds=0):
    """Returns all that work(send) sends from a process of its own, and the signal
    that ended it, or 0: a crash is a finding. A child that takes longer than
    `seconds` is ended, unless they are 0."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(seconds)
            os.close(reader)
            with os.fdopen(writer, "wb") as out:
                work(lambda message: (pickle.dump(message, out), out.flush()))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    messages = []
    with os.fdopen(reader, "rb") as received:
        while True:
            try:
                messages.append(pickle.load(received))
            except EOFError:
                break
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit("the child failed")
    return messages, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def kind(said):
    """Returns what was wrong, without its numbers."""
    return said and re.sub(r"\d+", "N", said)


def shrink(ops, wrong):
    """Leaves out calls and makes numbers smaller, as long as wrong(ops)."""
    again = True
    while again:
        again = False
        for size in (8, 4, 2, 1):
            at = 0
            while at < len(ops):
                less = ops[:at] + ops[at + size:]
                if wrong(less):
                    ops, again = less, True
                else:
                    at += size
        for i in range(len(ops)):
            for j in range(1, len(ops[i])):
                for less in smaller(ops, i, j):
                    if wrong(less):
                        ops, again = less, True
                        break
    return ops


def smaller(ops, i, j):
    """Yields the history with number j of call i made smaller."""
    call = ops[i]
    if isinstance(call[j], list):
        return
    for less in (0, 1, call[j] // 2, call[j] - 1):
        if 0 <= less < call[j]:
            yield [*ops[:i], (*call[:j], less, *call[j + 1:]), *ops[i + 1:]]


def judged(steps, setup, histories):
    """Yields the shortest history of the module `steps` that goes wrong and what
    is wrong, or how many are right."""
    for seed in range(histories):
        drawn, ops = steps.draw(seed, setup)
        said = kind(steps.judge(drawn, ops))
        if said:
            ops = shrink(
                ops, lambda ops: kind(steps.judge(drawn, ops)) == said)
            yield f"{steps.ROOM}={getattr(drawn, steps.ROOM)} " + " | ".join(
                " ".join(str(part) for part in op) for op in ops)
            yield steps.judge(drawn, ops)
            return
    yield f"{histories} histories: right"


@contextlib.contextmanager
def repaired(repairs, but=""):
    """Applies the repairs of all bugs except those that `but` names, separated by
    blanks. Repairs are functions that make a method of an owner anew."""
    with contextlib.ExitStack() as stack:
        for bug, methods in repairs.items():
            if bug in but.split():
                continue
            for owner, name, repair in methods:
                stack.enter_context(mock.patch.object(
                    owner, name, repair(getattr(owner, name))))
        yield


def results(steps, repairs, alone, histories):
    """Says the results of each setup of the module `steps` as it is, with each bug
    alone (its name, a setup, the histories to try), and with none."""
    lines = []
    for name, setup in steps.SETUPS.items():
        lines += page.say(name, judged(steps, setup, histories))
    for bug, name, tried in alone:
        with repaired(repairs, but=bug):
            lines += page.say(f"{name}, all repaired but {bug}",
                              judged(steps, steps.SETUPS[name], tried))
    for name, setup in steps.SETUPS.items():
        with repaired(repairs):
            lines += page.say(f"{name}, all repaired",
                              judged(steps, setup, histories))
    return lines
