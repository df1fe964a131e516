"""Sessions: the pages of a sequence, and the facts without which they mean nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu.cache import PagedCache
from edgert.backends.sessions import check_facts
from edgert.errors import DoesNotFitError, SessionError
from edgert.quantize.architecture import Architecture
from edgert.quantize.gguf_file import Model

LAYOUT = 1  # of pages; another number where saved pages would no longer mean the same


class Sessions:
    """Saves and restores sequences of a cache.

    n_ctx:      positions that a sequence may have
    model:      the fingerprint of the model
    key_means:  what keys of few bits are held less of
    facts:      what must be equal for one backend to take another's pages
    """

    def __init__(self, cache: PagedCache, n_ctx: int, model: str, key_means: NDArray[np.float32]) -> None:
        self._cache, self._n_ctx = cache, n_ctx
        self.facts: dict[str, Any] = {
            "backend": "cpu",
            "layout": LAYOUT,
            "model": model,
            "type_k": cache.type_k,
            "type_v": cache.type_v,
            "key_means": hashlib.sha256(key_means.tobytes()).hexdigest(),
        }

    def save(self, sequence: int, length: int) -> tuple[dict[str, Any], list[NDArray[np.uint8]]]:
        """The facts of the first `length` positions of a sequence, and their pages."""
        pools, chunks = self._cache.save(sequence, length)
        return self.facts | {"length": length, "pools": pools}, chunks

    def check(self, facts: Mapping[str, Any], n_tokens: int, n_bytes: int) -> None:
        """Raises: SessionError where pages with these facts, of so many bytes, cannot be restored here."""
        check_facts(self.facts, facts, n_tokens, self._n_ctx)
        try:
            sound = self._cache.matches(facts["pools"], n_tokens, n_bytes)
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            raise SessionError("The session's pages are not those of this model's cache.")

    def restore(self, sequence: int, facts: Mapping[str, Any], data: NDArray[np.uint8]) -> None:
        """Puts saved pages into an empty sequence.

        Raises: SessionError as `check`; DoesNotFitError where the cache has no room.
        """
        length = int(facts["length"])
        self.check(facts, length, data.nbytes)
        if self._cache.lengths[sequence]:
            raise ValueError(f"sequence {sequence} is not empty")
        if self._cache.missing({sequence: length}):
            raise DoesNotFitError(f"The cache has no room for the session's {length} positions: end a sequence.")
        self._cache.restore(sequence, facts["pools"], length, data)


def fingerprint(file: Model[Any], a: Architecture) -> str:
    """A hash of the architecture and of the first row of each tensor."""
    digest = hashlib.sha256(repr(a).encode())
    for name in sorted(file.tensors):
        tensor = file.tensor(name)
        digest.update(f"{name} {tensor.shape}".encode())
        digest.update(np.ascontiguousarray(tensor.rows(0, 1), np.float32).tobytes())
    return digest.hexdigest()
