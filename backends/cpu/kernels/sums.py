"""Sums of products of a block's codes and a few tokens' activations: how depends on the instructions at hand.

Each way takes the code vectors of a block one by one, as they are unpacked, and gives for each token int32 vectors
(lanes,), one for each chain: the quads before and from the fourth on, or all of them together. The sums are exact.
"""

from __future__ import annotations

from typing import Any

from edgert.backends.cpu.layouts import BLOCK
from edgert.backends.cpu.simd import Emitter, Value

QUADS = BLOCK // 4


class Dots:
    """Products of four bytes are added to the sums at once.

    most:    the largest magnitude of a code; unsigned codes are at most 127 where the processor sums signed bytes
    x:       address of the tokens' bytes, `stride` bytes from one token to the next
    block:   number of the block along the row
    """

    def __init__(
        self, e: Emitter, n_tokens: int, chains: int, signed: bool, most: int, x: Value, stride: Value, block: Value
    ) -> None:
        assert signed or most <= 127 or e.isa.dot in ("vnni", "scalar")
        self.e, self.n_tokens, self.chains, self.signed, self.most = e, n_tokens, chains, signed, most
        self.x = self._addresses(x, stride, block)
        self.sums = [[e.zero(e.vi) for _ in range(chains)] for _ in range(n_tokens)]

    def _addresses(self, x: Value, stride: Value, block: Value) -> list[Value]:
        first = self.e.add(x, self.e.mul(block, BLOCK))
        return [self.e.add(first, self.e.mul(stride, t)) for t in range(self.n_tokens)]

    def add(self, quad: int, codes: Value) -> None:
        """codes: bytes of weights 4 * quad.. of each row, as `Emitter.dot` takes them."""
        e, chain = self.e, self._chain(quad)
        for t in range(self.n_tokens):
            x = e.broadcast_quad(self.x[t], quad)
            self.sums[t][chain] = e.dot(self.sums[t][chain], codes, x, self.signed)

    def results(self) -> list[list[Value]]:
        """[token][chain]"""
        return self.sums

    def _chain(self, quad: int) -> int:
        return quad * self.chains // QUADS


class PartialDots(Dots):
    """Where products come as 16 bits, as many of them are added as those hold, before they become 32."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._room = self.e.products_held(self.most, self.signed)
        self._parts: list[list[Value | None]] = [[None] * self.chains for _ in range(self.n_tokens)]
        self._held = [0] * self.chains

    def add(self, quad: int, codes: Value) -> None:
        if self._room < 2:
            super().add(quad, codes)
            return
        e, chain = self.e, self._chain(quad)
        for t, parts in enumerate(self._parts):
            products = e.partial_products(codes, e.broadcast_quad(self.x[t], quad))
            before = parts[chain]
            parts[chain] = products if before is None else e.b.add(before, products)
        self._held[chain] += 1
        if self._held[chain] == self._room:
            self._join(chain)

    def _join(self, chain: int) -> None:
        for sums, parts in zip(self.sums, self._parts, strict=True):
            if parts[chain] is not None:
                sums[chain] = self.e.b.add(sums[chain], self.e.join_products(parts[chain]))
                parts[chain] = None
        self._held[chain] = 0

    def results(self) -> list[list[Value]]:
        for chain in range(self.chains):
            self._join(chain)
        return self.sums


class MatrixDots(Dots):
    """Two rows times two tokens, eight bytes of each, at once; the tokens' bytes lie in pairs (see `rows.py`)."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._waiting: dict[int, Value] = {}
        zeros = [self.e.zero(self.e.vi)] * 2  # of rows 0, 1 and of rows 2, 3: [row][token]
        self._squares = [[list(zeros) for _ in range(self.chains)] for _ in self.x]

    def _addresses(self, x: Value, stride: Value, block: Value) -> list[Value]:
        first = self.e.add(x, self.e.mul(block, 2 * BLOCK))
        return [self.e.add(first, self.e.mul(stride, t)) for t in range(0, self.n_tokens, 2)]

    def add(self, quad: int, codes: Value) -> None:
        e = self.e
        words = e.b.bitcast(codes, e.vi)
        other = self._waiting.pop(quad ^ 1, None)
        if other is None:
            self._waiting[quad] = words
            return
        eights = (other, words) if quad % 2 else (words, other)
        rows = [e.b.bitcast(e.shuffle(*eights, [i, i + 4, i + 1, i + 5]), e.vb) for i in (0, 2)]
        for address, squares in zip(self.x, self._squares, strict=True):
            x = e.load(e.vb, address, quad // 2 * 16)
            held = squares[self._chain(quad)]
            held[:] = [e.multiply_squares(before, two, x) for before, two in zip(held, rows, strict=True)]

    def results(self) -> list[list[Value]]:
        return [[self._column(square, t % 2) for square in self._squares[t // 2]] for t in range(self.n_tokens)]

    def _column(self, square: list[Value], token: int) -> Value:
        return self.e.shuffle(square[0], square[1], [token, token + 2, token + 4, token + 6])
