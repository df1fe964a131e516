"""Guesses from what was already said: a hashed memory of n-grams."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ORDERS = (5, 3, 2)  # tokens that must agree, the longest first
LONGEST = 32  # tokens back to which an agreement is followed
_FACTOR = 0x9E3779B1


class NgramMemory:
    """A text, and where in it each run of a few tokens was last seen.

    The tables keep one place for a hash; a stale or foreign one is found out by comparing the tokens.

    capacity:  most tokens of the text
    """

    def __init__(self, capacity: int) -> None:
        self.tokens = np.zeros(capacity, np.int32)
        self.n = 0
        bits = max(10, min(17, (2 * capacity - 1).bit_length()))
        self._shift = 32 - bits
        self._tables = [np.zeros(1 << bits, np.int32) for _ in ORDERS]

    def sync(self, tokens: NDArray[np.int32], n: int, *, grown: bool = False) -> None:
        """Makes the text equal to the first n tokens; what it begins with in common is kept.

        grown:  the tokens are those of the call before and more
        """
        known = min(self.n, n)
        if not grown and not np.array_equal(tokens[:known], self.tokens[:known]):
            known = int((tokens[:known] != self.tokens[:known]).argmax())
        self.tokens[known:n] = tokens[known:n]
        self.n = n
        self._index(known, n)

    def append(self, tokens: NDArray[np.int32]) -> None:
        """Adds a text of its own; where the room ends, the oldest is written over."""
        tokens = tokens[-len(self.tokens) :]
        start = self.n if self.n + len(tokens) <= len(self.tokens) else 0
        self.n = start + len(tokens)
        self.tokens[start : self.n] = tokens
        self._index(start, self.n)

    def _index(self, start: int, end: int) -> None:
        """Notes the runs before each place from start to end."""
        for order, table in zip(ORDERS, self._tables, strict=True):
            first = max(start, order)
            if end - first < 16:
                run = self.tokens[max(0, first - order) : end].tolist()
                for place in range(first, end):
                    at = place - first
                    table[self._hash(run[at : at + order])] = place
            else:
                keys = np.zeros(end - first, np.uint32)
                for i in range(order):
                    part = self.tokens[first - order + i : end - order + i].astype(np.uint32)
                    keys = keys * np.uint32(_FACTOR) + part + np.uint32(1)
                table[keys >> np.uint32(self._shift)] = np.arange(first, end, dtype=np.int32)

    def _hash(self, run: list[int]) -> int:
        key = 0
        for token in run:
            key = (key * _FACTOR + token + 1) & 0xFFFFFFFF
        return key >> self._shift

    def find(self, context: NDArray[np.int32], n: int, limit: int) -> tuple[list[int], int]:
        """What followed when the end of `context[:n]` was seen last, and how many tokens agreed; [] and 0: never.

        When the context is as long as this text, it is this text: a guess that reaches its end repeats itself.
        """
        for order, table in zip(ORDERS, self._tables, strict=True):
            if n < order:
                continue
            place = int(table[self._hash(context[n - order : n].tolist())])
            if not order <= place < self.n:
                continue
            length = min(LONGEST, place, n)
            different = np.flatnonzero(self.tokens[place - length : place] != context[n - length : n])
            agreed = length - 1 - int(different[-1]) if len(different) else length
            if agreed < order:
                continue
            guess = self.tokens[place : min(place + limit, self.n)].tolist()
            while len(guess) < limit and self.n == n:
                guess += guess[: limit - len(guess)]
            return guess, agreed
        return [], 0
