"""What may begin and when, what is set aside for it, and what leaves: the tasks between the queue and the step."""

from __future__ import annotations

import logging
from collections import Counter, deque
from threading import Condition
from typing import TYPE_CHECKING

from edgert.backends.base import Backend
from edgert.errors import ContextFullError, DoesNotFitError, EdgertError, QueueFullError, RequestError
from edgert.generation.limits import Limits
from edgert.generation.metrics import Counters
from edgert.generation.schedule import Queue
from edgert.generation.slots import Slots
from edgert.generation.task import Generation, Task

if TYPE_CHECKING:
    from edgert.generation.lockstep import Lockstep

logger = logging.getLogger(__name__)

REPLY = 128  # tokens that a reply is thought to have, before any has ended
LOOK = 0.1  # seconds between two looks at whether a user gets nothing


class Cancellations(deque[Task]):
    """Tasks that nobody wants any more.

    interrupted:  a word that is set to 1 when one comes, so that the engine soon looks
    """

    def __init__(self, interrupted: memoryview[int]) -> None:
        super().__init__()
        self._interrupted = interrupted

    def append(self, task: Task) -> None:
        super().append(task)
        self._interrupted[0] = 1


class Admission:
    """Lets tasks begin whose turn it is and for which there is room, and takes away what has ended.

    Whose turn it is, is the queue's affair (`schedule.Queue`), and which cached beginning serves whom the slots'
    (`slots.Slots`). A task begins when a place is free and the cache will hold what it and those that run are expected
    to have; should replies become longer than that, one of them is set aside and goes on later, and loses nothing.

    work:  the tasks that run; lock: of the queue, which callers fill and the engine's thread empties
    """

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        queue: Queue,
        slots: Slots,
        work: Lockstep,
        counters: Counters,
        lock: Condition,
        interrupted: memoryview[int],
    ) -> None:
        self._backend, self._limits = backend, limits
        self._queue, self._slots, self._work = queue, slots, work
        self._counters, self._lock = counters, lock
        self.n_parallel = min(limits.n_parallel or backend.n_seq_max, backend.n_seq_max, backend.n_batch)
        self.cancellations = Cancellations(interrupted)
        self._reply = float(REPLY)  # tokens of a reply, of late
        self._next_look = 0.0
        self._crowded = False  # the cache was full: nobody begins until somebody has ended

    def check(self, task: Task) -> None:
        """Whether a task can ever run.

        Raises: RequestError for an empty prompt or ids outside the vocabulary; ContextFullError for a prompt longer
        than the context, DoesNotFitError for one that the cache can never hold with its reply.
        """
        prompt, backend = task.prompt, self._backend
        if not len(prompt):
            raise RequestError("prompt", "is empty: give at least one token")
        if prompt.min() < 0 or prompt.max() >= backend.n_vocab:
            raise RequestError("prompt", f"has token ids outside the vocabulary of {backend.n_vocab}")
        if len(prompt) > backend.n_ctx:
            raise ContextFullError(len(prompt), backend.n_ctx)
        needed, capacity = self._whole(task, 0), self._slots.capacity
        if needed > capacity:
            raise DoesNotFitError(
                f"The request needs {needed} positions of the cache ({len(prompt)} of the prompt, the rest for "
                f"max_tokens) and all of it has {capacity}: ask for less, or load the model with a larger n_cached."
            )

    def add(self, task: Task) -> None:
        """Puts a task in the queue; the caller holds the lock. Raises: QueueFullError."""
        try:
            self._queue.add(task, self.n_parallel - len(self._work.tasks))
        except QueueFullError:
            self._counters.refused += 1
            raise

    def turn(self, now: float) -> None:
        """Ends what shall end, and begins what can."""
        if self.cancellations:
            self._cancel()
        if self._queue.n:
            self._admit(now)
        for task in self._work.tasks:
            if task.end <= now and not task.done:
                task.expire()
        self.retire()

    def _whole(self, task: Task, expected: float) -> int:
        """Tokens that a task may have in the end, if a reply without a limit has so many as expected."""
        most = expected if task.most_tokens is None else task.most_tokens
        return int(min(len(task.prompt) + most, self._backend.n_ctx))

    def _cancel(self) -> None:
        """Ends what nobody wants any more, in the queue too: there it never begins."""
        while self.cancellations:
            task = self.cancellations.popleft()
            if not task.done and (task.waiting or task in self._work.tasks):
                task.cancel()
                if task.waiting:
                    self._drop(task)

    def _drop(self, task: Task) -> None:
        with self._lock:
            self._queue.drop(task)
        self._counters.ended(task)

    def _admit(self, now: float) -> None:
        """Begins what can begin, ends what has waited too long."""
        with self._lock:
            late = self._queue.overdue(now)
        for task in late:
            if task.begun:
                task.expire()
            else:
                task.fail(self._queue.too_late(task, now))
                task.outcome = "timed out"
            self._counters.ended(task)
        if now >= self._next_look and len(self._work.tasks) == self.n_parallel > 1:
            self._next_look = now + LOOK
            self._share_places(now)
        held: list[Task] = []
        while len(self._work.tasks) < self.n_parallel and not self._crowded:
            with self._lock:
                following = self._queue.take(now)
            if following is None:
                break
            task = following
            try:
                if self._awaits(task):
                    held.append(task)
                elif self._work.tasks and not self._fits(task):
                    held.append(task)
                    self._crowded = True
                else:
                    self._slots.place(task)
                    self._begin(task, now)
            except Exception as error:  # its own affair, the others go on
                if not isinstance(error, EdgertError):
                    logger.exception("a request cannot begin")
                task.fail(error)
                if task not in self._work.tasks:
                    with self._lock:
                        self._queue.ended(task)
                    self._counters.ended(task)
        if held:
            with self._lock:
                for task in held:
                    self._queue.put_back(task)

    def _fits(self, task: Task) -> bool:
        """Whether the cache will hold the task beside those that run, as far as can be told."""
        return self._slots.fits(task, self._whole(task, 2 * self._reply), self._committed())

    def _begin(self, task: Task, now: float) -> None:
        """Lets a task that has a slot run."""
        self._work.join(task)
        self._queue.started(task, len(task.prompt) - task.slot.n_cached, now)
        if not task.begun:
            self._counters.started += 1
            self._counters.cached_tokens += task.n_reused
            task.begin()
            task.begun = True

    def _awaits(self, task: Task) -> bool:
        """Whether the task does better to wait until another, which begins alike, has read what they share."""
        if not self._work.tasks:
            return False
        if task.awaits is not None:
            slot, reader, enough = task.awaits
            if slot.task is reader and slot.pending > 1 and slot.n_cached < enough:
                return True
        found = self._slots.reader(task)
        task.awaits = None
        if found is not None and found[0].task is not None:
            task.awaits = found[0], found[0].task, found[1]
        return found is not None

    def _committed(self) -> int:
        """Positions by which those that run are expected to grow yet."""
        return sum(max(0, self._whole(task, 2 * self._reply) - task.slot.n_cached) for task in self._work.tasks)

    def _share_places(self, now: float) -> None:
        """Sets aside a task of a user who has several, if another user waits and has none."""
        users = Counter(task.user for task in self._work.tasks)
        with self._lock:
            waiting = self._queue.waiting_users()
        hungry = [user for user, since in waiting if not users[user] and now - since > self._limits.patience]
        user, most = users.most_common(1)[0]
        if hungry and most > 1 and not self._crowded:
            self.set_aside(next(task for task in reversed(self._work.tasks) if task.user == user))

    def set_aside(self, task: Task) -> None:
        """Lets a task wait; what it has stays cached while there is room, and it goes on from there."""
        self._work.leave(task)
        slot = task.slot
        task.prompt = slot.tokens[: slot.n_tokens].copy()
        self._slots.release(slot)
        self._counters.preempted += 1
        with self._lock:
            self._queue.put_back(task)

    def give_way(self, error: DoesNotFitError) -> None:
        """The newest task of who holds most waits until another has ended; one that is alone has to end."""
        if len(self._work.tasks) == 1:
            self._work.tasks[0].give_up(error)
            return
        user = max({task.user for task in self._work.tasks}, key=self._slots.holding)
        self.set_aside(next(task for task in reversed(self._work.tasks) if task.user == user))
        self._crowded = True

    def retire(self) -> None:
        """Frees the slots of tasks that are done; what they have cached stays for the next prompt."""
        for task in [task for task in self._work.tasks if task.done]:
            self._work.leave(task)
            if isinstance(task, Generation) and task.outcome == "finished":
                self._reply += 0.1 * (task.n_predicted - self._reply)
            self._slots.release(task.slot)
            self._crowded = False
            with self._lock:
                self._queue.ended(task)
            self._counters.ended(task)
