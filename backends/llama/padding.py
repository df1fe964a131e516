"""Steps of a GPU are given as many rows as those before them.

CUDA keeps the launches of a step as a graph, which serves steps of its size alone. On an H200 a step of SmolLM2 takes
1.04 ms for one token and 1.5 for four where those before had as many, and 2.9 and 3.5 where they had not.
"""

from __future__ import annotations

SIZES = (1, 4, 8, 16)
PATIENCE = 8  # steps for which a smaller size would have done, before it is taken: what they lose makes up for a change
AT_PACE = 3  # steps of a size from which on its graph is there


def suitable(n: int) -> int:
    """The size for n tokens."""
    return next((size for size in SIZES if size >= n), n)


class Padding:
    """How many rows the next step of one sequence gets.

    settled:  whether the latest step had the size that suits it, as those before it had
    """

    def __init__(self) -> None:
        self.settled = False
        self._size, self._since, self._spare = SIZES[0], 0, 0

    def rows(self, n: int) -> int:
        """Of a step with n tokens."""
        suits = suitable(n)
        self._spare = self._spare + 1 if suits < self._size else 0
        if suits > self._size or self._spare > PATIENCE:
            self._size, self._since, self._spare = suits, 0, 0
        self._since += 1
        self.settled = suits == self._size and self._since >= AT_PACE
        return self._size

    def interrupt(self) -> None:
        """There was another step."""
        self._since = 0


SETTLING = PATIENCE + AT_PACE  # steps of one size, after others, until one is settled
