"""The scripted backend with the cpu backend's pages: what is shared counts once, and memory ends."""

from __future__ import annotations

from typing import Any

from fake import FakeBackend, hashed

from edgert.backends.base import Batch
from edgert.backends.cpu.cache import PAGE, Kept, PagedCache
from edgert.errors import DoesNotFitError


class PagedFake(FakeBackend):
    """Its sequences have together room for `n_cached` positions, and a page each.

    parts:  calls that a step takes which may be interrupted, by whole windows of 16; 0: none may
    """

    def __init__(
        self, rule: Any = hashed, *, n_cached: int = 0, window: int = 0, parts: int = 0, **options: Any
    ) -> None:
        super().__init__(rule, **options)
        self.n_cached = n_cached or self.n_ctx * self.n_seq_max
        pages = -(-self.n_cached // PAGE) + self.n_seq_max
        windows = [0, window] if window else [0]
        self._parts = parts
        if parts:
            self.pauses, self.n_window = True, PAGE
        self.cache = PagedCache(
            [Kept(window, 1, 16) for window in windows], self.n_seq_max, self.n_ctx, pages, self.n_batch
        )

    def forward(self, batch: Batch) -> Any:
        growth: dict[int, int] = {}
        for sequence, position in zip(batch.sequences.tolist(), batch.positions.tolist(), strict=True):
            assert position == growth.get(sequence, self.cache.lengths[sequence])
            growth[sequence] = position + 1
        if self.cache.missing(growth):
            raise DoesNotFitError("The cache is full.")
        for sequence, length in growth.items():
            self.cache.grow(sequence, length)
        try:
            return super().forward(batch)
        except BaseException:
            for sequence in growth:  # as if nothing of the step had been computed
                self.cache.truncate(sequence, len(self.cells[sequence]))
            raise

    def in_parts(self, batch: Batch) -> Any:
        done: list[Any] = []

        def go_on(seconds: float) -> Any:
            done.append(done[0] if done else self.forward(batch).copy())
            return done[0] if len(done) >= self._parts or seconds > 1e6 else None

        return go_on

    def fork(self, source: int, target: int, length: int) -> None:
        assert length == self.reachable(source, length)
        try:
            self.cache.fork(source, target, length)
        except DoesNotFitError:
            self.cells[target] = self.cells[source][:length]
            raise
        super().fork(source, target, length)

    def truncate(self, sequence: int, length: int) -> None:
        super().truncate(sequence, length)
        self.cache.truncate(sequence, min(length, self.cache.lengths[sequence]))

    def reachable(self, sequence: int, length: int) -> int:
        return self.cache.reachable(sequence, length)

    def free_positions(self) -> int:
        return self.cache.free_positions

    def memory(self) -> dict[str, int]:
        return {"kv": self.cache.used_bytes, "kv_per_token": self.cache.token_bytes}

    @property
    def n_pages(self) -> int:
        """Pages in use."""
        return sum(pool.used for pool in self.cache.pools.values())
