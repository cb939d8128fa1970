"""What calls answer when they are not done."""


class Refusal(Exception):
    """An outcome that a correct caller meets and handles; nothing has changed.

    A full `start_forward` keeps the eviction and the defrag that came before
    it. Misuse is no refusal: it is a ValueError (an argument is wrong in
    itself) or a RuntimeError (the call comes at the wrong time).
    """


class CacheFull(Refusal):
    """No cells for the batch."""


class NotSupported(Refusal):
    """This kind of cache cannot do that."""


class SharedCells(Refusal):
    """A token that would move belongs to other sequences, too."""


class StaleViewError(RuntimeError):
    """A view was used after the call that ended its life."""
