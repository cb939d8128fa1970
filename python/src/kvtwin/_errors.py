"""The exceptions of refused calls."""


class Refusal(Exception):
    """An outcome that a correct caller meets and handles; nothing has changed.

    A full `start_forward` keeps the eviction and the defrag that came before
    it. Misuse is not a refusal: it raises ValueError (an argument is wrong by
    itself) or RuntimeError (the call comes at the wrong time).
    """


class CacheFull(Refusal):
    """There are not enough cells for the batch."""


class NotSupported(Refusal):
    """This kind of cache cannot do that."""


class SharedCells(Refusal):
    """A token that would move belongs to another sequence, too."""


class StaleViewError(RuntimeError):
    """A view was used after the call that ended its life."""
