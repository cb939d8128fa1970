"""Answers that a class may always give, although they make an ability worthless."""

from __future__ import annotations


class Answers:
    """Counts answers, and names those that never came."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, str], int] = {}
        self._came: set[str] = set()

    def count(self, never: str, of: str, came: bool) -> None:
        """Counts a call, and notes whether the answer came; `never` says that it did not
        come in any of the `of`."""
        self._asked[never, of] = self._asked.get((never, of), 0) + 1
        if came:
            self._came.add(never)

    def notes(self) -> tuple[str, ...]:
        """Returns a note for each answer that never came: "find_prefix found nothing in
        12 prompts"."""
        return tuple(
            f"{never} in {count} {of}"
            for (never, of), count in self._asked.items()
            if never not in self._came
        )
