"""Sums of products of a block's codes and a few tokens' activations: how depends on the instructions at hand.

Each way takes the code vectors of a block one by one, as they are unpacked, and gives for each token int32 vectors
(lanes,), one for each chain: the quads before and from the fourth on, or all of them together. The sums are exact.
"""

from __future__ import annotations

from edgert.backends.cpu.layouts import BLOCK
from edgert.backends.cpu.simd import Emitter, Value

QUADS = BLOCK // 4


class Dots:
    """Products of four bytes are added to the sums at once.

    most:  the largest magnitude of a code; unsigned codes are at most 127 where the processor sums signed bytes
    x:     address of the tokens' bytes of this block; `stride` bytes from one token to the next
    """

    def __init__(
        self, e: Emitter, n_tokens: int, chains: int, signed: bool, most: int, x: Value, stride: Value
    ) -> None:
        self.e, self.n_tokens, self.chains, self.signed, self.most = e, n_tokens, chains, signed, most
        self.x = [e.add(x, e.mul(stride, t)) for t in range(n_tokens)]
        self.sums = [[e.zero(e.vi) for _ in range(chains)] for _ in range(n_tokens)]

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


class PairedDots(Dots):
    """AVX2's products come in pairs of 16 bits. Of small codes several are summed so, before the pairs are."""

    def __init__(
        self, e: Emitter, n_tokens: int, chains: int, signed: bool, most: int, x: Value, stride: Value
    ) -> None:
        super().__init__(e, n_tokens, chains, signed, most, x, stride)
        self._room = 32767 // (2 * 127 * most)  # quads that 16 bits hold
        self._pairs: list[list[Value | None]] = [[None] * chains for _ in range(n_tokens)]
        self._held = [0] * chains

    def add(self, quad: int, codes: Value) -> None:
        if self._room < 2:
            super().add(quad, codes)
            return
        e, chain = self.e, self._chain(quad)
        for t, pairs in enumerate(self._pairs):
            products = e.pair_products(codes, e.broadcast_quad(self.x[t], quad))
            before = pairs[chain]
            pairs[chain] = products if before is None else e.b.add(before, products)
        self._held[chain] += 1
        if self._held[chain] == self._room:
            self._join(chain)

    def _join(self, chain: int) -> None:
        for sums, pairs in zip(self.sums, self._pairs, strict=True):
            if pairs[chain] is not None:
                sums[chain] = self.e.b.add(sums[chain], self.e.join_pairs(pairs[chain]))
                pairs[chain] = None
        self._held[chain] = 0

    def results(self) -> list[list[Value]]:
        for chain in range(self.chains):
            self._join(chain)
        return self.sums
