"""Runs tasks together: each forward step evaluates something of all of them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Backend, Batch
from edgert.errors import ContextFullError, DoesNotFitError, EdgertError, RequestError
from edgert.generation.slots import Slots
from edgert.generation.task import Generation, Item, Task

if TYPE_CHECKING:
    from edgert.speculation import Speculator

logger = logging.getLogger(__name__)

PREFILL_BESIDE_DECODE = 64  # prompt tokens in a step in which others wait for their next token


class Engine:
    """Runs tasks on a backend in a thread of its own, all of them a step further at a time.

    speculator:  guesses tokens for them, which the same step checks; None: nobody does
    """

    def __init__(self, backend: Backend, speculator: Speculator | None = None) -> None:
        self.backend = backend
        self.speculator = speculator
        self._slots = Slots(backend)
        self._waiting: deque[Task] = deque()
        self._outbox: deque[tuple[Task, Item]] = deque()
        self._running: list[Task] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False  # no more work is taken
        self._finished = False  # close() has been called
        self._calls: deque[tuple[Callable[[], object], SimpleQueue[object]]] = deque()
        self._crowded = False  # the cache was full: nobody begins until somebody has ended
        n = backend.n_batch
        self._batch = Batch(np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.bool_))
        self._views: dict[int, Batch] = {}

    def submit(self, task: Task) -> None:
        """Queues a task; it starts as soon as a sequence is free.

        Raises: RequestError for an empty prompt or ids outside the vocabulary; ContextFullError.
        """
        prompt, backend = task.prompt, self.backend
        if not len(prompt):
            raise RequestError("prompt", "is empty: give at least one token")
        if prompt.min() < 0 or prompt.max() >= backend.n_vocab:
            raise RequestError("prompt", f"has token ids outside the vocabulary of {backend.n_vocab}")
        if len(prompt) > backend.n_ctx:
            raise ContextFullError(len(prompt), backend.n_ctx)
        with self._changed:
            if self._closed:
                raise EdgertError("The model is closed: load it again.")
            task.outbox = self._outbox
            self._waiting.append(task)
            self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="edgert-engine", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _call(self, work: Callable[[], object]) -> Any:
        """What `work` returns, done by the engine's thread between two steps. Raises: what it raises."""
        answer: SimpleQueue[object] = SimpleQueue()
        with self._changed:
            if self._closed:
                raise EdgertError("The model is closed: load it again.")
            self._calls.append((work, answer))
            self._start()
        result = answer.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def save(self, tokens: NDArray[np.int32]) -> tuple[int, dict[str, Any], list[NDArray[np.uint8]]]:
        """How many of the first tokens are cached somewhere, and that as `Backend.save` gives it."""

        return self._call(lambda: self._slots.save(tokens))

    def restore(self, tokens: NDArray[np.int32], facts: Mapping[str, Any], data: NDArray[np.uint8]) -> None:
        """Takes what `save` gave into a sequence that nobody uses.

        Raises: SessionError for a cache of another kind; DoesNotFitError; EdgertError when all sequences are in use.
        """

        self._call(lambda: self._slots.restore(tokens, facts, data))

    def close(self) -> None:
        """Ends all tasks with an error, the thread, and the backend; a second call does nothing."""
        with self._changed:
            first, self._finished = not self._finished, True
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if first:
            if self.speculator:
                self.speculator.close()
            self.backend.close()

    def _run(self) -> None:
        try:
            while self._wait():
                while self._calls:
                    work, answer = self._calls.popleft()
                    try:
                        answer.put(work())
                    except Exception as error:
                        answer.put(error)
                try:
                    self.step()
                except DoesNotFitError as error:
                    self._give_way(error)
                except Exception as error:
                    logger.exception("a step failed")
                    for task in self._running:
                        task.fail(error)
                self._retire()
                if not self._running:
                    self._send()
        except BaseException:
            logger.exception("the engine stopped")
            raise
        finally:
            with self._changed:
                self._closed = True
            for task in (*self._running, *self._waiting):
                if not task.done:
                    task.fail(EdgertError("The model was closed while the request ran."))
            for _, answer in self._calls:
                answer.put(EdgertError("The model was closed while the request ran."))
            self._send()

    def _wait(self) -> bool:
        """Waits for work; false when there will be none."""
        with self._changed:
            while not (self._closed or self._waiting or self._running or self._calls):
                self._changed.wait()
            return not self._closed

    def _send(self) -> None:
        """Hands out what the tasks have left: it wakes their callers."""
        while self._outbox:
            task, item = self._outbox.popleft()
            task.send(item)

    def step(self) -> None:
        """Admits what waits, evaluates one batch and hands out its logits."""
        if self._waiting or [task for task in self._running if task.cancelled]:
            self._admit()
        parts = self._plan()
        if not parts:
            return
        guessed = self._guess(parts) if self.speculator else None
        try:
            logits, row = self._forward(guessed or parts), 0
        except DoesNotFitError:
            if not guessed:
                raise
            guessed, (logits, row) = None, (self._forward(parts), 0)
        for task, count, rows in guessed or parts:
            task.slot.n_cached += count
            try:
                task.advance(logits[row : row + rows])
            except Exception as error:  # its own affair, the others go on
                if not isinstance(error, EdgertError):
                    logger.exception("a request failed")
                task.fail(error)
            row += rows
            self._forget_wrong(task)
        if guessed and self.speculator:
            self.speculator.learn([task for task, _, _ in guessed], [count - 1 for _, count, _ in guessed])

    def _guess(self, parts: list[tuple[Task, int, int]]) -> list[tuple[Generation, int, int]] | None:
        """The same parts with guesses to check; None unless all wait for their next token."""
        tasks = [task for task, _, _ in parts if isinstance(task, Generation) and task.slot.pending == 1]
        if len(tasks) < len(parts) or not self.speculator:
            return None
        room = min(self.backend.n_batch, len(self.speculator.costs)) - len(tasks)
        counts = self.speculator.propose(tasks, room)
        return [(task, count + 1, count + 1) for task, count in zip(tasks, counts, strict=True)]

    def _forget_wrong(self, task: Task) -> None:
        """Takes guesses that were not chosen out of the cache."""
        slot = task.slot
        sound = slot.n_tokens - (not task.done)  # the token chosen last is not evaluated yet
        if slot.n_cached > sound:
            self.backend.truncate(slot.sequence, sound)
            slot.n_cached = sound

    def _admit(self) -> None:
        for task in (*self._running, *self._waiting):
            if task.cancelled and not task.done:
                task.cancel()
        self._retire()
        while self._waiting and len(self._running) < len(self._slots) and not self._crowded:
            task = self._waiting.popleft()
            if not task.done:
                try:
                    self._slots.place(task)
                except Exception as error:
                    task.fail(error)
                    raise
                self._running.append(task)
                if not task.begun:
                    task.begin()
                    task.begun = True

    def _plan(self) -> list[tuple[Task, int, int]]:
        """The tasks of this step, how many tokens each evaluates, and how many rows of logits it gets."""
        tasks = self._running
        budget = self.backend.n_batch
        if len(tasks) > 1:
            tasks = sorted(tasks, key=lambda task: task.slot.pending > 1)  # prompts after next tokens
            if tasks[0].slot.pending == 1 < tasks[-1].slot.pending:
                decodes = sum(task.slot.pending == 1 for task in tasks)
                budget = min(budget, decodes + PREFILL_BESIDE_DECODE)
        parts = []
        for task in tasks:
            count = min(task.slot.pending, budget)
            if count:
                rows = count if task.want_all else int(count == task.slot.pending)
                parts.append((task, count, rows))
                budget -= count
        return parts

    def _forward(self, parts: Sequence[tuple[Task, int, int]]) -> NDArray[np.float32]:
        all_ = self._batch
        start = 0
        for task, count, rows in parts:
            slot, end = task.slot, start + count
            first = slot.n_cached
            if count == 1:  # of the usual step, where slices would take longer than all else here
                all_.tokens[start], all_.sequences[start] = slot.tokens[first], slot.sequence
                all_.positions[start], all_.wanted[start] = first, rows == 1
            else:
                all_.tokens[start:end] = slot.tokens[first : first + count]
                all_.sequences[start:end] = slot.sequence
                all_.positions[start:end] = np.arange(first, first + count)
                all_.wanted[start:end] = False
                all_.wanted[end - rows : end] = True
            start = end
        batch = self._views.get(start)
        if batch is None:
            batch = self._views[start] = Batch(
                all_.tokens[:start], all_.sequences[:start], all_.positions[:start], all_.wanted[:start]
            )
        self._send()  # the callers wake while the backend computes, which frees the interpreter for them
        return self._slots.making_room(lambda: self.backend.forward(batch))

    def _give_way(self, error: DoesNotFitError) -> None:
        """The newest task waits until another has ended; one that is alone and does not fit fails."""
        newest = self._running[-1]
        if len(self._running) == 1:
            newest.fail(error)
            return
        slot = newest.slot
        newest.prompt = slot.tokens[: slot.n_tokens].copy()
        self._slots.release(slot)
        self._running.pop()
        self._waiting.appendleft(newest)
        self._crowded = True

    def _retire(self) -> None:
        """Frees the slots of tasks that are done; what they have cached stays for the next prompt."""
        for task in [task for task in self._running if task.done]:
            self._running.remove(task)
            if self.speculator and isinstance(task, Generation):
                self.speculator.remember(task.slot, task.n_reused)
            self._slots.release(task.slot)
            self._crowded = False
