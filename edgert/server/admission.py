"""How many requests may be inside at once; who comes when all places are taken is told so at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from edgert.server.errors import BusyError


class Admission:
    """A bounded number of answers in work and waiting.

    parallel:  answers that the engine works on at once
    queue:     answers that may wait besides
    share:     the part of all places that one user may take while others are here
    """

    def __init__(self, parallel: int, queue: int, share: float = 0.75) -> None:
        self.parallel, self.queue = parallel, queue
        self._most_of_one = max(parallel, int(share * (parallel + queue)))
        self.inside = 0
        self.refused = 0
        self._users: Counter[str] = Counter()
        self._took = 1.0  # seconds that an answer takes, of late

    @property
    def waiting(self) -> int:
        """Answers beyond those that the engine works on."""
        return max(0, self.inside - self.parallel)

    @contextmanager
    def enter(self, user: str, answers: int = 1) -> Iterator[None]:
        """Takes places until the block ends. Raises: BusyError when there are too few."""
        if self.inside and self.inside + answers > self.parallel + self.queue:
            self.refused += 1
            raise BusyError(
                f"All {self.parallel + self.queue} places are taken: try again in a moment.", retry_after=self._wait()
            )
        others = self.inside - self._users[user]
        if others and self._users[user] + answers > self._most_of_one:
            self.refused += 1
            raise BusyError(
                "You have as many requests here as one user may while others wait: try again when some have ended.",
                status=429,
                retry_after=self._wait(),
            )
        began = time.monotonic()
        self.inside += answers
        self._users[user] += answers
        try:
            yield
        finally:
            self.inside -= answers
            self._users[user] -= answers
            if not self._users[user]:
                del self._users[user]
            self._took += 0.1 * (time.monotonic() - began - self._took)

    def _wait(self) -> int:
        """Seconds after which a place will be free, as things go."""
        return min(60, 1 + int(self._took * self.inside / max(1, self.parallel) / 2))
