"""What ExLlamaV3 needs to be imported without a GPU: stand-ins for the
functions of its extension that its generator calls, and pages of four tokens.
Import this before exllamav3."""

import sys
import types

import numpy as np
import torch

PAGE = 4


class Matcher:
    """Stands in for BC_SAM: finds the longest suffix that occurs before."""

    def __init__(self):
        self.length = 0

    def accept_tensor(self, tokens):
        """Returns where the earlier occurrence begins and ends, or (-1, -1)."""
        tokens = tokens.view(-1).tolist()
        before, self.length = self.length, len(tokens)
        if before == len(tokens):
            return -1, -1
        for length in range(len(tokens) - 1, 0, -1):
            for end in range(length, len(tokens)):
                if tokens[end - length:end] == tokens[-length:]:
                    return end - length, end
        return -1, -1


class Extension(types.ModuleType):
    """Stands in for exllamav3_ext. Other functions run on GPUs alone."""
    BC_SAM = Matcher

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    @staticmethod
    def count_match_tensor(first, second, most):
        pairs = zip(first.view(-1).tolist()[:most], second.view(-1).tolist())
        count = 0
        for one, other in pairs:
            if one != other:
                break
            count += 1
        return count

    @staticmethod
    def partial_strings_match(text, offsets, strings):
        """Returns where a string begins, -2 if one may begin, or -1."""
        text = bytes(text).decode("utf-32-le")
        strings = bytes(strings).decode("utf-32-le")
        ends = np.frombuffer(bytes(offsets), np.int32) // 4
        full = partial = len(text) + 1
        for begin, end in zip(ends, ends[1:]):
            string = strings[begin:end]
            at = text.find(string)
            full = min(full, at if at >= 0 else full)
            for at in range(len(text)):
                if string.startswith(text[at:]):
                    partial = min(partial, at)
                    break
        if partial < full:
            return -2
        return full if full <= len(text) else -1

    @staticmethod
    def generator_stage_decode(arena, width, tables, positions, rope, ids,
                               sequences, pages, offsets):
        count = len(tables)
        arena[:count * width] = 0
        for i, table in enumerate(tables):
            row = table.view(-1)[:width]
            arena[i * width:i * width + len(row)] = row
            arena[count * width + i] = positions[i]
        for i, (sequence, page) in enumerate(zip(sequences, pages)):
            ids[i] = page[0, offsets[i]] = sequence[0, positions[i]]

    @staticmethod
    def cache_rotate(rows, order, buffer):
        order = order.tolist()
        for to, source in zip(order[::2], order[1::2]):
            (rows[to] if to >= 0 else buffer).copy_(
                rows[source] if source >= 0 else buffer)


def on_cpu(function):
    """Makes a function of torch that ignores pin_memory, which needs a GPU."""
    return lambda *args, pin_memory=False, **named: function(*args, **named)


def stand_in(name, **values):
    sys.modules[f"exllamav3.{name}"] = module = types.ModuleType(name)
    vars(module).update(values)


stand_in("ext", exllamav3_ext=Extension("exllamav3_ext"))
stand_in("constants", PAGE_SIZE=PAGE, MAX_MLP_INTERMEDIATE=55296)
torch.empty, torch.zeros = on_cpu(torch.empty), on_cpu(torch.zeros)
torch.cuda.synchronize = lambda device=None: None
