"""The backend's sequences: who has which, and what of earlier prompts they still hold."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Backend
from edgert.errors import DoesNotFitError, EdgertError, SessionError
from edgert.generation.limits import Limits
from edgert.generation.prefix import BLOCK, PrefixIndex

if TYPE_CHECKING:
    from edgert.generation.task import Task

Result = TypeVar("Result")
SHARED = "\0shared"  # owner of what several users have used


class Slot:
    """One sequence of the backend and what is known about it.

    tokens:    int32 (n_ctx,)
    n_tokens:  how many of them are known; the first `n_cached` have been evaluated by the backend
    n_whole:   tokens of its prompt that fill windows of the backend
    owner:     the user whose quota it counts against
    root:      key of its index, keys: of the beginnings that it is found by
    """

    def __init__(self, sequence: int, n_ctx: int) -> None:
        self.sequence = sequence
        self.tokens = np.empty(n_ctx, np.int32)
        self.n_tokens = 0
        self.n_cached = 0
        self.n_whole = 0
        self.task: Task | None = None
        self.last_use = 0
        self.owner = ""
        self.root = b""
        self.keys: list[bytes] = []

    def common(self, prompt: NDArray[np.int32]) -> int:
        """How many first tokens of the prompt the backend has already evaluated here."""
        return _common(self.tokens[: self.n_cached], prompt)

    @property
    def pending(self) -> int:
        return self.n_tokens - self.n_cached


def _common(tokens: NDArray[np.int32], prompt: NDArray[np.int32]) -> int:
    n = min(len(tokens), len(prompt))
    different = np.flatnonzero(tokens[:n] != prompt[:n])
    return int(different[0]) if len(different) else n


class Slots:
    """All sequences of a backend; what a task leaves in one serves later prompts that begin alike.

    Who needs room beyond his quota displaces what users hold beyond theirs, the one furthest beyond it first, and
    waits where there is none; within it, whatever has been idle for longest. So nobody loses his beginnings to the
    crowd of another, and room that nobody claims is used by all.
    """

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self._backend = backend
        self._n_parallel = min(limits.n_parallel or backend.n_seq_max, backend.n_seq_max)
        n_slots = backend.n_seq_max if backend.shares_pages else self._n_parallel
        self._slots = [Slot(i, backend.n_ctx) for i in range(n_slots)]
        self._clock = itertools.count(1)
        self._keep = limits.prefix_cache != "off"
        self._index = PrefixIndex(backend.fingerprint, by_user=limits.prefix_cache == "user")
        self.capacity = backend.free_positions()
        self._quota = self.capacity // 4 if limits.prefix_quota is None else limits.prefix_quota
        self._quota_slots = max(1, (n_slots - self._n_parallel) * self._quota // self.capacity)
        self.kv_total = backend.n_cached * backend.memory().get("kv_per_token", 0)
        self.lookups = self.hits = self.evictions = 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def held(self) -> tuple[int, int]:
        """Tokens kept for later prompts, and in how many slots."""
        kept = [slot.n_cached for slot in self._slots if slot.task is None and slot.n_cached]
        return sum(kept), len(kept)

    def _free(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.task is None]

    def find(self, task: Task) -> tuple[Slot | None, int]:
        """The slot that holds most of the beginning of the task's prompt, and how much the task can take from it."""
        if not (task.reuse and self._keep):
            return None, 0
        for slot in self._slots:
            if slot.task is not None:
                self._index.note(slot)
        prompt, most = task.prompt, len(task.prompt) - 1  # the last token's logits are not kept
        best, reused = None, 0
        for slots in self._index.levels(prompt, task.user):
            for slot in slots:
                n = self._backend.reachable(slot.sequence, self._untorn(slot, prompt, min(slot.common(prompt), most)))
                if n > reused or (best is not None and n == reused and best.task is not None and slot.task is None):
                    best, reused = slot, n
            if reused:  # who agrees in fewer blocks holds less
                break
        return best, reused

    def _untorn(self, slot: Slot, prompt: NDArray[np.int32], n: int) -> int:
        """How much of n common tokens to take, so that a prompt which parts from another's is computed as it is alone.

        What goes on where the other ended, as a conversation does, takes all of it.
        """
        window = self._backend.n_window
        if not self._backend.rounds_windows or (slot.task is None and n == slot.n_cached):
            return n
        whole = n - n % window
        alike = whole + window > len(prompt) and whole >= slot.n_whole  # neither reads the rest by a whole window
        return n if alike else whole

    def reader(self, task: Task) -> tuple[Slot, int] | None:
        """A slot whose task now reads a beginning that this one's prompt shares by a block more than is cached yet.

        With it, how much of it must be cached to be worth a start.
        """
        if not (task.reuse and self._keep):
            return None
        reading = [slot for slot in self._slots if slot.task is not None and slot.pending > 1]
        if not reading:
            return None
        root = self._index.root(task.user)
        most, best = BLOCK - 1, None
        for slot in reading:
            if slot.root == root and slot.task is not None and slot.task.reuse:
                n = min(_common(slot.tokens[: slot.n_tokens], task.prompt), len(task.prompt) - 1)
                if n > most:
                    most, best = n, slot
        if best is None or most - self.find(task)[1] < BLOCK:
            return None
        return best, most - BLOCK + 1

    def place(self, task: Task) -> None:
        """Gives the task a slot, with the longest cached beginning of its prompt; one must be free."""
        prompt, backend = task.prompt, self._backend
        source, reused = self.find(task)
        slot = self._slot_for(task, source, reused)
        try:
            if slot is source:
                backend.truncate(slot.sequence, reused)
            else:
                self._clear(slot)
                if source is not None and reused:
                    backend.fork(source.sequence, slot.sequence, reused)
        except DoesNotFitError:  # no memory for the part that two sequences would have to hold apart
            backend.free(slot.sequence)
            reused = 0
        except Exception:
            self._clear(slot)
            raise
        if source is not None and reused:
            source.last_use = next(self._clock)
            if source.owner != task.user:
                source.owner = SHARED
        slot.tokens[: len(prompt)] = prompt
        slot.n_tokens, slot.n_cached = len(prompt), reused
        slot.n_whole = len(prompt) - len(prompt) % backend.n_window
        slot.owner = task.user
        slot.root = self._index.root(task.user)
        self._index.note(slot)
        slot.task, task.slot = task, slot
        if not task.begun:
            task.n_reused = reused
            self.lookups += task.reuse and self._keep
            self.hits += reused > 0

    def _slot_for(self, task: Task, source: Slot | None, reused: int) -> Slot:
        free = self._free()
        empty = next((slot for slot in free if not slot.n_cached), None)
        if source is not None and source.task is None:
            if source.n_cached == reused:  # nothing of it is lost
                return source
            # what the source holds beyond the common part is worth more than an empty slot
            if source.owner == task.user and (empty is None or source.n_cached <= 2 * reused):
                return source
        if empty is not None:
            return empty
        others = [slot for slot in free if slot is not source]
        if not others:
            return free[0]
        slot = self._victim(task.user, others) or min(others, key=lambda slot: slot.last_use)
        self.evictions += 1
        return slot

    def release(self, slot: Slot) -> None:
        """Takes the slot from its task; what is cached stays for the next prompt."""
        keep = self._keep and slot.task is not None
        slot.task, slot.n_cached, slot.last_use = None, self._kept(slot), next(self._clock)
        slot.n_tokens = slot.n_cached
        if not keep:
            self._clear(slot)
            return
        self._index.note(slot)
        self._backend.rest(slot.sequence)
        if self._exceeds():
            self._backend.give_back()
        while self._exceeds():
            self._evict(slot.owner, desperate=True)

    def _exceeds(self) -> bool:
        """Whether more is held than was planned for: layers with a window have pages for each sequence."""
        crowded = self.kv_total and self.held[1] > self._n_parallel
        return bool(crowded) and self._backend.memory()["kv"] > self.kv_total

    def _kept(self, slot: Slot) -> int:
        """How much of the slot is sound, the backend's word counting as well after a failed step."""
        held = self._backend.length(slot.sequence)
        if held > slot.n_cached:
            self._backend.truncate(slot.sequence, slot.n_cached)
        return min(held, slot.n_cached)

    def making_room(self, work: Callable[[], Result], users: Iterable[str], *, alone: bool) -> Result:
        """What `work` returns, tried again as long as forgetting an idle sequence may help.

        users:  for whom room is made
        alone:  nobody's end can be waited for, so that what others hold within their quota goes as well

        Raises: DoesNotFitError when nothing is left to forget.
        """
        while True:
            try:
                return work()
            except DoesNotFitError:
                if not any(self._evict(user, desperate=alone) for user in dict.fromkeys(users)):
                    raise

    def _evict(self, user: str, *, desperate: bool = False) -> bool:
        """Forgets one idle sequence for a user; false if there is none that may go."""
        idle = [slot for slot in self._free() if slot.n_cached]
        slot = self._victim(user, idle)
        if slot is None and desperate and idle:
            slot = min(idle, key=lambda slot: slot.last_use)
        if slot is None:
            return False
        self._clear(slot)
        self.evictions += 1
        return True

    def _excess(self) -> dict[str, float]:
        """How many times its quota each owner holds, in tokens or in slots."""
        tokens: Counter[str] = Counter()
        slots: Counter[str] = Counter()
        for slot in self._slots:
            if slot.task is not None or slot.n_cached:
                tokens[slot.owner] += slot.n_tokens
                slots[slot.owner] += slot.task is None
        return {o: max(n / max(self._quota, 0.5), slots[o] / self._quota_slots) for o, n in tokens.items()}

    def _victim(self, user: str, idle: list[Slot]) -> Slot | None:
        """Which of some idle sequences a user may displace, if any."""
        if not idle:
            return None
        excess = self._excess()
        worst = max({slot.owner for slot in idle}, key=lambda owner: excess[owner])
        if excess[worst] > 1:
            idle = [slot for slot in idle if slot.owner == worst]
        elif excess.get(user, 0) > 1:
            return None
        return min(idle, key=lambda slot: slot.last_use)

    def fits(self, task: Task, n_tokens: int, committed: int) -> bool:
        """Whether a task that will have so many tokens can begin beside those that run.

        committed:  positions by which these may still grow
        """
        _, reused = self.find(task)
        room = self._backend.free_positions()
        needed = n_tokens - reused + committed
        if needed <= room:
            return True
        excess = self._excess()
        within = excess.get(task.user, 0) <= 1
        idle = [slot for slot in self._free() if slot.n_cached and (within or excess[slot.owner] > 1)]
        return needed <= room + sum(slot.n_cached for slot in idle)

    def holding(self, user: str) -> int:
        """Tokens in all slots of a user."""
        return sum(slot.n_tokens for slot in self._slots if slot.owner == user)

    def _clear(self, slot: Slot) -> None:
        self._backend.free(slot.sequence)
        slot.n_tokens = slot.n_cached = 0
        self._index.note(slot)

    def save(self, tokens: NDArray[np.int32]) -> tuple[int, dict[str, Any], list[NDArray[np.uint8]]]:
        """How many of the first tokens are cached somewhere, and that as `Backend.save` gives it.

        Raises: SessionError when none is.
        """
        best = max(self._slots, key=lambda slot: slot.common(tokens))
        n = self._backend.reachable(best.sequence, best.common(tokens))
        if not n:
            raise SessionError("Nothing of this text is cached, so there is nothing to save.")
        return (n, *self._backend.save(best.sequence, n))

    def restore(
        self, tokens: NDArray[np.int32], facts: Mapping[str, Any], data: NDArray[np.uint8], user: str = ""
    ) -> None:
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
        self.making_room(lambda: backend.restore(slot.sequence, facts, data), [user], alone=len(free) == len(self))
        slot.tokens[: len(tokens)] = tokens
        slot.n_tokens = slot.n_cached = len(tokens)
        slot.last_use = next(self._clock)
        slot.owner, slot.root = user, self._index.root(user)
        self._index.note(slot)
        backend.rest(slot.sequence)
