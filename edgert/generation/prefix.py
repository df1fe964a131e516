"""Which sequences hold which beginnings: an index of hashed blocks over the backend's pages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from edgert.generation.slots import Slot

BLOCK = 64  # tokens that share a key


class PrefixIndex:
    """Finds the sequences that begin like a prompt, without comparing it with each of them.

    A beginning of i blocks has the key SHA-256(key of i - 1 blocks, the block's tokens as int32). The key of none is
    the hash of the model and its settings, and of the user where users are kept apart: what one of them asked then
    has no key that another's prompt can lead to.

    identity:  what must be equal for one sequence to serve another
    by_user:   whether users are kept apart
    """

    def __init__(self, identity: str, *, by_user: bool = False) -> None:
        self._identity = hashlib.sha256(identity.encode()).digest()
        self._by_user = by_user
        self._holders: dict[bytes, dict[Slot, None]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def root(self, user: str) -> bytes:
        """The key of no block, for a user."""
        return hashlib.sha256(self._identity + (user.encode("utf-8", "replace") if self._by_user else b"")).digest()

    def note(self, slot: Slot) -> None:
        """Brings a slot's keys up to date with the tokens that it has cached."""
        keys = slot.keys
        n = 1 + slot.n_cached // BLOCK if slot.n_cached else 0
        while len(keys) > n:
            key = keys.pop()
            holders = self._holders[key]
            del holders[slot]
            if not holders:
                del self._holders[key]
        while len(keys) < n:
            start = (len(keys) - 1) * BLOCK
            key = _after(keys[-1], slot.tokens[start : start + BLOCK]) if keys else slot.root
            self._holders.setdefault(key, {})[slot] = None
            keys.append(key)

    def levels(self, prompt: NDArray[np.int32], user: str) -> Iterable[list[Slot]]:
        """Slots that begin like the prompt, those that agree in most blocks first; a slot comes again with fewer."""
        key = self.root(user)
        found: list[dict[Slot, None]] = []
        start = 0
        while holders := self._holders.get(key):
            found.append(holders)
            if start + BLOCK > len(prompt):
                break
            key = _after(key, prompt[start : start + BLOCK])
            start += BLOCK
        return (list(holders) for holders in reversed(found))


def _after(key: bytes, block: NDArray[np.int32]) -> bytes:
    return hashlib.sha256(key + block.tobytes()).digest()
