"""The backend's sequences: who has which, and what of earlier prompts they still hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Backend
from edgert.errors import DoesNotFitError, EdgertError, SessionError

if TYPE_CHECKING:
    from edgert.generation.task import Task

Result = TypeVar("Result")


class Slot:
    """One sequence of the backend and what is known about it.

    tokens:    int32 (n_ctx,)
    n_tokens:  how many of them are known; the first `n_cached` have been evaluated by the backend
    """

    def __init__(self, sequence: int, n_ctx: int) -> None:
        self.sequence = sequence
        self.tokens = np.empty(n_ctx, np.int32)
        self.n_tokens = 0
        self.n_cached = 0
        self.task: Task | None = None
        self.last_use = 0

    def common(self, prompt: NDArray[np.int32]) -> int:
        """How many first tokens of the prompt the backend has already evaluated here."""
        n = min(self.n_cached, len(prompt))
        different = np.flatnonzero(self.tokens[:n] != prompt[:n])
        return int(different[0]) if len(different) else n

    @property
    def pending(self) -> int:
        return self.n_tokens - self.n_cached


class Slots:
    """All sequences of a backend; what a task leaves in one serves the next prompt that begins alike."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._slots = [Slot(i, backend.n_ctx) for i in range(backend.n_seq_max)]
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        return len(self._slots)

    def _free(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.task is None]

    def place(self, task: Task) -> None:
        """Gives the task a slot, with the longest cached beginning of its prompt; one must be free."""
        prompt, backend = task.prompt, self._backend
        free = self._free()
        empty = next((slot for slot in free if not slot.n_cached), None)
        best, reused = None, 0
        if task.reuse:
            best = max(self._slots, key=lambda slot: (slot.common(prompt), slot.task is None))
            reused = min(best.common(prompt), len(prompt) - 1)  # the last token's logits are not kept
            reused = backend.reachable(best.sequence, reused)
        if best and reused and best.task is None and (empty is None or best.n_cached <= 2 * reused):
            slot = best
        else:  # what the source holds beyond the common part is worth more than an empty slot
            slot = empty or min(free, key=lambda slot: slot.last_use)
        try:
            if slot is best:
                backend.truncate(slot.sequence, reused)
            else:
                backend.free(slot.sequence)
                if best and reused:
                    backend.fork(best.sequence, slot.sequence, reused)
        except DoesNotFitError:  # no memory for the part that two sequences would have to hold apart
            backend.free(slot.sequence)
            reused = 0
        slot.tokens[: len(prompt)] = prompt
        slot.n_tokens, slot.n_cached = len(prompt), reused
        slot.task, task.slot = task, slot
        if not task.begun:
            task.n_reused = reused

    def release(self, slot: Slot) -> None:
        """Takes the slot from its task; what is cached stays for the next prompt."""
        slot.task, slot.n_cached, slot.last_use = None, self._kept(slot), next(self._clock)
        slot.n_tokens = slot.n_cached

    def _kept(self, slot: Slot) -> int:
        """How much of the slot is sound, the backend's word counting as well after a failed step."""
        held = self._backend.length(slot.sequence)
        if held > slot.n_cached:
            self._backend.truncate(slot.sequence, slot.n_cached)
        return min(held, slot.n_cached)

    def making_room(self, work: Callable[[], Result]) -> Result:
        """What `work` returns, tried again as long as forgetting an idle sequence may help.

        Raises: DoesNotFitError when nothing is left to forget.
        """
        while True:
            try:
                return work()
            except DoesNotFitError:
                if not self._evict():
                    raise

    def _evict(self) -> bool:
        """Forgets the sequence that has been idle for longest; false if there is none."""
        idle = [slot for slot in self._free() if slot.n_cached]
        if not idle:
            return False
        self._clear(min(idle, key=lambda slot: slot.last_use))
        return True

    def _clear(self, slot: Slot) -> None:
        self._backend.free(slot.sequence)
        slot.n_tokens = slot.n_cached = 0

    def save(self, tokens: NDArray[np.int32]) -> tuple[int, dict[str, Any], list[NDArray[np.uint8]]]:
        """How many of the first tokens are cached somewhere, and that as `Backend.save` gives it.

        Raises: SessionError when none is.
        """
        best = max(self._slots, key=lambda slot: slot.common(tokens))
        n = self._backend.reachable(best.sequence, best.common(tokens))
        if not n:
            raise SessionError("Nothing of this text is cached, so there is nothing to save.")
        return (n, *self._backend.save(best.sequence, n))

    def restore(self, tokens: NDArray[np.int32], facts: Mapping[str, Any], data: NDArray[np.uint8]) -> None:
        """Takes what `save` gave into a sequence that nobody uses.

        Raises: SessionError for a cache of another kind; DoesNotFitError; EdgertError when all sequences are in use.
        """
        backend = self._backend
        backend.check_saved(facts, len(tokens), data.nbytes)
        if int(tokens.min()) < 0 or int(tokens.max()) >= backend.n_vocab:
            raise SessionError("The session has tokens outside the vocabulary.")
        free = self._free()
        if not free:
            raise EdgertError("All sequences are in use: load the session when a reply has ended.")
        slot = min(free, key=lambda slot: (slot.n_cached > 0, slot.last_use))
        self._clear(slot)
        self.making_room(lambda: backend.restore(slot.sequence, facts, data))
        slot.tokens[: len(tokens)] = tokens
        slot.n_tokens = slot.n_cached = len(tokens)
        slot.last_use = next(self._clock)
