"""Tokens that are cut out of a text before words are merged."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence


class Specials:
    """Finds tokens that are cut out of a text before words are merged.

    names:  text of the token -> (id, whether it is a control token: then only markup may contain it)
    """

    def __init__(self, names: dict[str, tuple[int, bool]]) -> None:
        self.names = names
        self._all = Finder(names)
        self._plain = Finder([text for text, (_, control) in names.items() if not control])

    def find(self, text: str, borders: Sequence[int], control: bool) -> Iterable[tuple[int, int, int]]:
        """(begin, end, id) from left to right, the longest at each place; control tokens cross no border."""
        finder = self._all if control else self._plain
        if finder.pattern is None:
            return
        end = 0
        for match in finder.pattern.finditer(text):
            begin = match.start()
            if begin < end:
                continue
            for length in finder.lengths(text, begin):
                found = self.names.get(text[begin : begin + length])
                if found is None or (found[1] and _crosses(borders, begin, begin + length)):
                    continue
                if found[1] and not control:
                    continue
                end = begin + length
                yield begin, end, found[0]
                break


class Finder:
    """Where one of many texts may begin, and how long it may be."""

    def __init__(self, texts: Iterable[str]) -> None:
        lengths: dict[str, set[int]] = {}
        for text in texts:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        firsts = {start[0] for start in lengths}
        self.pattern = re.compile(f"[{re.escape(''.join(sorted(firsts)))}]") if firsts else None

    def lengths(self, text: str, begin: int) -> Sequence[int]:
        start = text[begin : begin + 2]
        return (*self._lengths.get(start, ()), *(self._lengths.get(start[0], ()) if len(start) == 2 else ()))


def _crosses(borders: Sequence[int], begin: int, end: int) -> bool:
    at = bisect_right(borders, begin)
    return at < len(borders) and borders[at] < end
