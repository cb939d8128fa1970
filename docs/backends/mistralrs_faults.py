"""The models of mistralrs_model.py with the faults that mistral.rs has in its
source: a wrong answer is that of the model with the fault."""

import numpy as np
from mistralrs_model import (HEADS, Gemma2, Gemma3, Lfm2, Llama, Mistral,
                             Phi3)


class FirstColumns:
    """The part of a prompt that begins at `past` has a mask with a column for
    each token; the rows begin `window` tokens before the part."""

    def sees(self, layer, positions):
        seen, window = super().sees(layer, positions), self.window(layer)
        kept = min(self.past, window)
        for query in range(self.past, self.past + self.part):
            row = seen[query].copy()
            seen[query] = False
            for column in range(kept + self.part):
                token = self.past - kept + column
                if token < len(positions):
                    seen[query, token] = row[column]
        return seen


class FirstColumnsMistral(FirstColumns, Mistral):
    pass


class FirstColumnsGemma2(FirstColumns, Gemma2):
    pass


class FirstColumnsGemma3(FirstColumns, Gemma3):
    pass


class Restarted(Lfm2):
    """The convolution begins again at `past`."""

    def mix(self, x, layer, before):
        if layer:
            return super().mix(x, layer, before)
        return np.concatenate([super(Restarted, self).mix(part, layer, before)
                               for part in np.split(x, [self.past])])


class KeptTurns(Phi3):
    """Each token is turned by the factors of the step that computes it. After
    `past` tokens, a step has `part` tokens; all others have one."""

    def divided(self, count):
        ends = np.arange(1, count + 1)
        ends = np.where(ends <= self.past, ends, np.maximum(
            ends, self.past + self.part))
        return np.where(self.is_long(ends)[:, None], *self.factors[::-1])

    def logits(self, tokens):
        return Llama.logits(self, tokens)


class FirstPlace(Mistral):
    """The rows of a prompt of 12 tokens, the last 8 of which are in cells 0 to
    7, are read and written as if those of token t were in cell t."""

    def sees(self, layer, positions):
        seen = super().sees(layer, positions)
        cells = np.where(positions < 12, positions - 4, positions)
        for later in positions[12:]:
            seen[later] = (cells > later - 8) & (positions <= later)
        return seen

    def softmax(self, scores):
        """As many cells of zeros as a query reads have scores of 0, too."""
        later = np.arange(scores.shape[-1])
        empty = (later >= 12) * np.maximum(0, 12 - np.maximum(8, later - 7))
        with np.errstate(divide="ignore"):
            zeros = np.broadcast_to(np.log(empty)[:, None],
                                    (HEADS, len(empty), 1))
        return super().softmax(np.concatenate([scores, zeros], -1))[..., :-1]
