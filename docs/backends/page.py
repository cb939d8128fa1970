"""The block of results of a page, and how a script compares itself with it."""

import difflib
import pathlib
import re
import sys
import textwrap


def say(name, verdicts):
    """Prints a name and its verdicts, and returns the lines."""
    lines = [name]
    for line in verdicts:
        lines += textwrap.wrap(line, 108, initial_indent="    ",
                               subsequent_indent="      ",
                               break_on_hyphens=False)
    print("\n".join(lines), flush=True)
    return lines


def judged(cls, operations):
    """Tries a class, and yields its verdicts."""
    import kvtwin  # Scripts that use the command alone do not have it.

    result = kvtwin.fuzz(cls, operations=operations)
    if result:
        yield f"{result.histories} histories: right"
    for finding in result.findings:
        yield finding.history
        yield finding.reason


def without(lines, names):
    """Returns the lines of a block without the parts whose title begins with one of
    some names."""
    kept, leave = [], False
    for line in lines:
        if not line.startswith(" "):
            leave = line.startswith(tuple(names))
        if not leave:
            kept.append(line)
    return kept


def uncounted(lines):
    """Returns the lines without the numbers of right histories, which depend on the
    histories that kvtwin draws, and not on the engine."""
    return [re.sub(r"^    \d+ (histories: right)$", r"    \1", line) for line in lines]


def compare(lines, page, begin="```text\n", end="```\n", left_out=()):
    """Ends with an error if the page does not have these lines between `begin` and
    `end`, where parts whose title begins with a name in `left_out` do not count, nor do
    numbers of right histories.
    --write writes the lines."""
    if left_out and "--write" in sys.argv:
        sys.exit("--write needs the results of " +
                 ", ".join(name.rstrip(", ") for name in left_out))
    path = pathlib.Path(__file__).parent / page
    before, _, rest = path.read_text().partition(begin)
    said, _, after = rest.partition(end)
    if "--write" in sys.argv:
        said = "\n".join(lines) + "\n"
        path.write_text(f"{before}{begin}{said}{end}{after}")
    differs = list(difflib.unified_diff(
        uncounted(without(said.splitlines(), left_out)), uncounted(lines),
        path.name, "what it says now", lineterm=""))
    if differs:
        sys.exit("\n".join(differs))
