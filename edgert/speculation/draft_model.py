"""Guesses from a small model of the same vocabulary."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Backend, Batch
from edgert.errors import DoesNotFitError

REACH = 512  # tokens back that are read when it has fallen behind by more


class DraftModel:
    """A backend that follows the target's sequences, each from some token on.

    What it has read of a long text may begin anywhere: it only has to guess what comes next.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._read = [np.zeros(backend.n_ctx, np.int32) for _ in range(backend.n_seq_max)]
        self._starts = [0] * backend.n_seq_max

    def follow(self, sequence: int, tokens: NDArray[np.int32], n: int) -> NDArray[np.float32]:
        """Reads what it has not read of the first n tokens: float32 (n_vocab,), the logits after the last one."""
        backend, read, start = self.backend, self._read[sequence], self._starts[sequence]
        same = max(0, min(backend.length(sequence), n - 1 - start))
        if same and not np.array_equal(read[:same], tokens[start : start + same]):
            same = int((read[:same] != tokens[start : start + same]).argmax())
        reach = min(REACH, backend.n_ctx // 2)
        if not same or n - start - same > reach or n - start >= backend.n_ctx:
            start = self._starts[sequence] = 0 if n <= reach else n - reach
            same = 0
        if same < backend.length(sequence):
            backend.truncate(sequence, same)
        if n - start - same == 1:
            return self.step(sequence, int(tokens[n - 1]))
        read[same : n - start] = tokens[start + same : n]
        while start + same < n:
            count = min(backend.n_batch, n - start - same)
            last = start + same + count == n
            part = tokens[start + same : start + same + count]
            batch = Batch.of(part.tolist(), same, sequence, "last" if last else "none")
            try:
                logits = backend.forward(batch)
            except DoesNotFitError:
                others = [i for i in range(backend.n_seq_max) if i != sequence and backend.length(i)]
                if not others:
                    raise
                for other in others:  # they are read again when they are needed
                    backend.free(other)
                continue
            same += count
        row: NDArray[np.float32] = logits[0]
        return row

    def step(self, sequence: int, token: int) -> NDArray[np.float32]:
        """Reads one token more: float32 (n_vocab,)."""
        self._read[sequence][self.backend.length(sequence)] = token
        return self.backend.step(token, sequence)

    def room(self, sequence: int, n: int) -> int:
        """How many tokens after the first n it can read on."""
        return self.backend.n_ctx - (n - self._starts[sequence])
