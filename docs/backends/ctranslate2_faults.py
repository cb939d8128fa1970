"""Models with the faults that CTranslate2 has: ctranslate2_caches.py. `prompt` is
how many tokens of a text are computed at once."""

import numpy as np
from ctranslate2_model import T5, Gemma3, Gemma4, LongRope, Mistral


class Pieces(Mistral):
    """A prompt is computed in pieces as long as the window; a piece sees all of
    the piece before it."""

    prompt = 0

    def sees(self, layer, positions):
        seen = super().sees(layer, positions)
        query, key = positions[:, None], positions
        size = self.config["sliding_window"]
        piece = query // size
        begins = size * np.maximum(piece - 1, 0)
        if self.window(layer) > size:
            # The first 2 * window columns, as if they were those pieces.
            begins, query = 0, query - begins
        at_once = (begins <= key) & (key <= query)
        return np.where(positions[:, None] < self.prompt, at_once, seen)


class PiecesOfGemma3(Pieces, Gemma3):
    pass


class NoWindow(Gemma4):
    """A prompt sees all tokens before it."""

    prompt = 0

    def sees(self, layer, positions):
        query, key = positions[:, None], positions
        return np.where(query < self.prompt, key <= query,
                        super().sees(layer, positions))


class LongTurns(LongRope):
    """Each text has the long factors."""

    def is_long(self, count):
        return count > 0


class FarPrompt(T5):
    """Each token of a prompt has distances that are `prompt` - 1 too large."""

    prompt = 0

    def distances(self, count, causal):
        distances = super().distances(count, causal)
        rows = np.arange(count)[:, None]
        last = np.arange(count) - (rows + self.prompt - 1)
        return np.where(causal & (rows < self.prompt), last, distances)
