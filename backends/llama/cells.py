"""How many cells of a cache are taken where sequences share those of a common beginning."""

from __future__ import annotations

import itertools
from collections.abc import Iterator


class Cells:
    """What sequences hold, as runs: the first so many cells of blocks, a block being what one sequence added to."""

    def __init__(self, n_sequences: int) -> None:
        self._runs: list[list[tuple[int, int]]] = [[] for _ in range(n_sequences)]  # (block, cells)
        self._names = itertools.count()

    @property
    def used(self) -> int:
        """Cells that are held, each once."""
        most: dict[int, int] = {}
        for block, n in self._all():
            most[block] = max(n, most.get(block, 0))
        return sum(most.values())

    def resize(self, sequence: int, length: int) -> None:
        """Lets a sequence have so many cells, new ones of its own where it had fewer."""
        runs = self._runs[sequence]
        held = sum(n for _, n in runs)
        while held > length:
            block, n = runs.pop()
            held -= n
            if held < length:
                runs.append((block, length - held))
                held = length
        if held == length:
            return
        if runs:
            block, n = runs[-1]
            if n == max(other for name, other in self._all() if name == block):  # nobody has what would follow
                runs[-1] = block, n + length - held
                return
        runs.append((next(self._names), length - held))

    def fork(self, source: int, target: int, length: int) -> None:
        """Lets an empty sequence share the first cells of another."""
        left = length
        for block, n in self._runs[source]:
            if left > 0:
                self._runs[target].append((block, min(n, left)))
                left -= n

    def _all(self) -> Iterator[tuple[int, int]]:
        return itertools.chain.from_iterable(self._runs)
