"""Whole models of mlx-lm in batches, as generate.BatchGenerator has them, under kvtwin's
oracle: docs/backends/mlx.md."""

import mlx.core as mx
import numpy
import pipe as kvtwin
from mlx_caches import Batch
from mlx_lm.utils import _get_classes
from mlx_numbers import NUMBERS, randomize


def model_of(numbers):
    """A small model of random weights."""
    model_class, arguments = _get_classes(numbers)
    model = model_class(arguments.from_dict(numbers))
    randomize(model)
    return model.eval()


class Model(Batch):
    """The model does not show what a token sees, so the logits of each sequence are
    computed again without the other sequences, and must be the same."""
    histories = 10
    made, known = {}, {}  # The models, and the logits of their sequences.

    def __init__(self, setup):
        super().__init__(setup)
        if type(self) not in Model.made:
            Model.made[type(self)] = model_of(self.numbers)
        self.model = Model.made[type(self)]
        self.held = {}  # The number of tokens of each sequence.
        self.stored = {}  # The rows, by layer, sequence and position.

    def single(self):
        return self.model.make_cache()

    def length(self, sequence):
        return self.held.get(sequence, 0)

    def starts(self):
        return [self.length(sequence) for sequence in self.order]

    def before_mask(self):
        """Runs the model, and compares its logits."""
        tokens = numpy.zeros((len(self.order), self.queries), int)
        for row, i in self.where:
            tokens[row, i] = self.token(self.order[row], self.starts()[row] + i)
        self.fresh = [(self.order[row], self.starts()[row] + i) for row, i in self.where]
        logits = numpy.array(self.model(mx.array(tokens), cache=self.passing))
        counts = [sum(r == row for r, _ in self.where) for row in range(len(tokens))]
        for row, (sequence, count) in enumerate(zip(self.order, counts)):
            past = self.length(sequence)
            self.held[sequence] = past + count
            alone = self.alone(sequence, past + count)[past:]
            if not numpy.allclose(logits[row, :count], alone, rtol=1e-3, atol=1e-3):
                raise ValueError(f"{count} tokens of sequence {sequence}, after {past},"
                                 " have other logits than without the other sequences")

    def alone(self, sequence, length):
        """The logits of a sequence without the others."""
        known = Model.known.get((type(self), sequence), ())
        if len(known) < length:
            tokens = [self.token(sequence, i) for i in range(max(length, 12))]
            known = numpy.array(self.model(mx.array([tokens]), cache=self.single()))[0]
            Model.known[type(self), sequence] = known
        return known[:length]

    def token(self, sequence, position):
        return 3 + (7 * position * position + 5 * position + 11 * sequence) % 61

    def mask_of_pass(self):
        pass

    def put(self, layer, key, value):
        for place, *rows in zip(self.fresh, key, value):
            self.stored[layer, *place] = rows

    def get(self, layer):
        columns = [(sequence, position) for sequence in self.order
                   for position in range(self.length(sequence))]
        key, value = zip(*(self.stored[layer, *place] for place in columns))
        mask = numpy.array([[s == sequence and p <= position for s, p in columns]
                            for sequence, position in self.fresh])
        return numpy.array(key), numpy.array(value), mask

    def remove(self, sequence, begin, end):
        if begin:
            raise kvtwin.NotSupported
        self.finish()
        self.leave({sequence})
        self.held.pop(sequence, None)

    def can_resume(self, sequence, position):
        return position in (0, self.length(sequence))


def models_of(model_type, together=False, **more):
    """Makes a class for a type of model. Sequences come and continue at any time, or all
    together, after prompts of different lengths."""
    return type(model_type + "_together" * together, (Model,), {
        "kvtwin": kvtwin.Description(
            name=f"{model_type} in batches" + ", all together" * together,
            kinds={"causal"}, can=set() if together else {"mix"}, max_sequences=2),
        "numbers": {"model_type": model_type, **NUMBERS, **more},
        **({"lockstep": True, "histories": 20} if together else {})})


CLASSES = [
    models_of("mamba"), models_of("jamba"), models_of("rwkv7"),
    models_of("recurrent_gemma"), models_of("recurrent_gemma", together=True),
    models_of("baichuan_m1"), models_of("bailing_moe_linear"), models_of("nemotron_h"),
    models_of("olmo_hybrid"), models_of("longcat_flash_ngram"),
    models_of("longcat_flash_ngram", together=True),
    models_of("afm7", num_layers=2), models_of("mamba2"), models_of("falcon_h1"),
    models_of("lfm2"), models_of("qwen3_next"),
]
