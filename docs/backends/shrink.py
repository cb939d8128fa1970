"""Shrinks the histories of engines: lists of calls, each a name and numbers."""


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
            for less in smaller(ops, i):
                if wrong(less):
                    ops, again = less, True
                    break
    return ops


def smaller(ops, i):
    """Yields the history with a number of call i made smaller."""
    name, *numbers = ops[i]
    for j, number in enumerate(numbers):
        for less in sorted({0, 1, number // 2, number - 1}):
            if 0 <= less < number:
                yield [*ops[:i], (name, *numbers[:j], less, *numbers[j + 1:]),
                       *ops[i + 1:]]
