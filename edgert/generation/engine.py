"""Runs tasks in a thread of its own: what callers submit goes in, what they wait for comes out."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import RESTED, Backend
from edgert.errors import DoesNotFitError, EdgertError
from edgert.generation.admission import Admission
from edgert.generation.limits import Limits
from edgert.generation.lockstep import Lockstep
from edgert.generation.metrics import Counters, Snapshot
from edgert.generation.schedule import Queue
from edgert.generation.slots import Slots
from edgert.generation.task import Caller, Outbox, Task

if TYPE_CHECKING:
    from edgert.speculation import Speculator

logger = logging.getLogger(__name__)

_ENGINES: WeakSet[Engine] = WeakSet()


class Engine:
    """Runs tasks on a backend in a thread of its own: what may begin (`Admission`), then a step of all (`Lockstep`).

    speculator:  guesses tokens for them, which the same step checks; None: nobody does
    limits:      bounds; None: as many tasks at once as there are sequences, any number waiting
    """

    def __init__(self, backend: Backend, speculator: Speculator | None = None, limits: Limits | None = None) -> None:
        self.backend = backend
        self.speculator = speculator
        self.limits = limits = limits or Limits()
        self._slots = Slots(backend, limits)
        self._queue = Queue(limits.n_queue)
        self._counters = Counters()
        self._outbox = Outbox()
        self._changed = threading.Condition()
        self._work = Lockstep(backend, speculator, limits, self._queue, self._slots, self._counters, self._outbox.send)
        self._interrupted = speculator.interrupted if speculator else memoryview(bytearray(8)).cast("q")
        self._admission = Admission(
            backend, limits, self._queue, self._slots, self._work, self._counters, self._changed, self._interrupted
        )
        self.n_parallel = self._admission.n_parallel
        self._thread: threading.Thread | None = None
        self._closed = False  # no more work is taken
        self._finished = False  # close() has been called
        self._why = "The model is closed: load it again."
        self._calls: deque[tuple[Callable[[], object], SimpleQueue[object]]] = deque()
        self._next_giving = 0.0  # when memory is to be given back
        _ENGINES.add(self)

    def submit(self, task: Task) -> None:
        """Queues a task; it begins when its turn has come and there is room.

        A server sets `task.user` and maps what is raised here, and what comes out of `task.output` as an item, to
        HTTP: QueueFullError and QueueTimeoutError to 429 or 503 with their `retry_after`, DoesNotFitError and
        ContextFullError to 400.

        Raises: RequestError, ContextFullError, DoesNotFitError for what can never run (`Admission.check`);
        QueueFullError.
        """
        self._admission.check(task)
        with self._changed:
            if self._closed:
                raise EdgertError(self._why)
            task.outbox, task.cancellations = self._outbox, self._admission.cancellations
            task.arrived = perf_counter()
            task.end = task.arrived + task.timeout
            task.queue_end = min(task.end, task.arrived + task.queue_timeout)
            self._admission.add(task)
            self._start()
        if caller := Caller.current.get():
            caller.submits(task)
        if task.cancelled:
            task.cancelled = True  # tells this engine

    def snapshot(self) -> Snapshot:
        """What is going on and what has been, for `/metrics` and `edgert top`; any thread may ask at any time."""
        counters, slots, queue = self._counters, self._slots, self._queue
        tokens, pieces = slots.held
        try:
            kv_bytes = 0 if self._closed else int(self.backend.memory().get("kv", 0))
        except ValueError:  # closed in between
            kv_bytes = 0
        first, token, step = (
            ring.percentiles(50, 99) for ring in (counters.first_token, counters.token, counters.step_time)
        )
        return Snapshot(
            n_waiting=queue.n,
            n_running=len(self._work.tasks),
            n_parallel=self.n_parallel,
            n_queue=self.limits.n_queue,
            prefix_lookups=slots.lookups,
            prefix_hits=slots.hits,
            prefix_evictions=slots.evictions,
            prefix_tokens=tokens,
            prefixes=pieces,
            kv_bytes=kv_bytes,
            kv_bytes_total=slots.kv_total,
            retry_after=queue.retry_after,
            first_token_p50=first[0],
            first_token_p99=first[1],
            token_p50=token[0],
            token_p99=token[1],
            step_p50=step[0],
            step_p99=step[1],
            **counters.totals(),
        )

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="edgert-engine", daemon=True)
            self._thread.start()
        self._interrupted[0] = 1  # a step of several rounds ends, so that what has come is looked at
        self._changed.notify()

    def _call(self, work: Callable[[], object]) -> Any:
        """What `work` returns, done by the engine's thread between two steps. Raises: what it raises."""
        answer: SimpleQueue[object] = SimpleQueue()
        with self._changed:
            if self._closed:
                raise EdgertError(self._why)
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
            self._interrupted[0] = 1
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if first:
            if self.speculator:
                self.speculator.close()
            self.backend.close()

    def _forked(self) -> None:
        """In the child of a fork, which has none of the threads: refuses all that is asked here."""
        self._why = "The model was loaded before this process was forked: load it in the process that uses it."
        self._changed, self._thread = threading.Condition(), None
        self._closed = self._finished = True
        for task in (*self._work.tasks, *self._queue):
            task.output.put(EdgertError(self._why))
        for _, answer in self._calls:
            answer.put(EdgertError(self._why))

    def _run(self) -> None:
        try:
            while self._wait():
                self._turn()
        except BaseException:
            logger.exception("the engine stopped")
            raise
        finally:
            with self._changed:
                self._closed = True
                waiting = list(self._queue)
            for task in (*self._work.tasks, *waiting):
                if not task.done:
                    task.fail(EdgertError("The model was closed while the request ran."))
            for _, answer in self._calls:
                answer.put(EdgertError("The model was closed while the request ran."))
            self._outbox.send()

    def _turn(self) -> None:
        """A step and what belongs to it; what fails in it ends the tasks that it was for, and no others."""
        while self._calls:
            work, answer = self._calls.popleft()
            try:
                answer.put(work())
            except Exception as error:
                answer.put(error)
        try:
            self._admission.turn(perf_counter())
            self._work.step()
        except DoesNotFitError as error:
            self._admission.give_way(error)
        except Exception as error:
            logger.exception("a step failed")
            for task in self._work.tasks:
                if not task.done:
                    task.fail(error)
        self._admission.retire()
        if not self._work.tasks:
            self._outbox.send()
        elif perf_counter() >= self._next_giving:
            self._give_back()

    def _give_back(self) -> float:
        """Gives back memory that has rested; how long until there may be more."""
        wait = self.backend.give_back(RESTED)
        if self.speculator:
            wait = min(wait, self.speculator.give_back(RESTED))
        self._next_giving = perf_counter() + min(max(wait, 0.1), RESTED)
        return wait

    def _wait(self) -> bool:
        """Waits for work; false when there will be none."""
        with self._changed:
            while not (self._closed or self._queue.n or self._work.tasks or self._calls):
                wait = self._give_back()
                self._changed.wait(None if wait == math.inf else max(wait, 0.01))
            if self.limits.window and not self._work.tasks:
                end = perf_counter() + self.limits.window
                while not self._closed and not self._calls and self._queue.n < self.n_parallel:
                    if (left := end - perf_counter()) <= 0:
                        break
                    self._changed.wait(left)
            return not self._closed


def _after_fork() -> None:
    for engine in list(_ENGINES):
        engine._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
