"""The requests of a history, for engines on mlx whose model is mlx_rows.py's."""

from histories import Wrong, played
from mlx_rows import Truth


class Limits:
    """The layers of a setup, if the engine bounds the rows of each request."""

    @property
    def kinds(self):
        """The layers, after the bound."""
        return tuple("window" if kind == "full" and self.bound else kind
                     for kind in self.layers)

    @property
    def seen(self):
        return self.bound or self.window


class Requests:
    """Asks prompts that begin like earlier prompts, and checks their answers. A
    subclass has `ask`, and the calls that an engine has."""

    def __init__(self, setup):
        self.setup, self.asked, self.running = setup, [], {}

    def play(self, ops):
        """Makes the calls of a history, and returns what was wrong, or None."""
        try:
            return played(self, ops)
        finally:
            self.close()

    def add(self, like, cut, more, *rest):
        """Asks a prompt that begins like an earlier one and its answer."""
        values = []
        if self.asked:
            truth = self.asked[like % len(self.asked)]
            values = truth.reach(self.setup.longest)[:cut]
        self.ask(values, more, *rest)

    def again(self, which, limit):
        """Asks an earlier prompt again."""
        if self.asked:
            prompt = self.asked[which % len(self.asked)].prompt
            self.ask(prompt, 0, limit=limit)

    def turn(self, which, more, limit):
        """Continues an earlier answer."""
        if self.asked:
            truth = self.asked[which % len(self.asked)]
            self.ask(truth.prompt + truth.right(), more, limit=limit)

    def truth(self, values, more, limit):
        """Returns a new request for a prompt and more tokens that the bits of
        `more` give."""
        longest = self.setup.longest
        values = values + [3 + (more >> i) % 2 for i in range(more % 7)]
        values = values[:longest - 1] or [3]
        truth = Truth(self.setup, values, f"request {len(self.asked)}",
                      min(max(1, limit), longest - len(values)))
        self.asked.append(truth)
        return truth

    @staticmethod
    def compare(truth, said, finished):
        """Checks the tokens of an answer, and how many there are at its end."""
        right = truth.right()
        for i, (token, expected) in enumerate(zip(said, right)):
            if token != expected:
                raise Wrong(f"{truth.name}: token {i} of its answer is another")
        if finished and len(said) != len(right):
            raise Wrong(f"{truth.name}: an answer of {len(said)} tokens, not "
                        f"{len(right)}")
