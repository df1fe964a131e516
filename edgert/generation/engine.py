"""Runs tasks together: each forward step evaluates something of all of them."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Backend, Batch
from edgert.errors import ContextFullError, DoesNotFitError, EdgertError, QueueFullError, RequestError
from edgert.generation.limits import Limits
from edgert.generation.metrics import Counters, Snapshot
from edgert.generation.schedule import Pace, Queue, shared_out, wide_part
from edgert.generation.slots import Slots
from edgert.generation.task import Generation, Item, Reading, Task

if TYPE_CHECKING:
    from edgert.speculation import Speculator

logger = logging.getLogger(__name__)

_ENGINES: WeakSet[Engine] = WeakSet()
STEPS = 32  # steps that are counted together
FEW = 32  # tokens of one reply that the backend is given without the ado of a batch
REPLY = 128  # tokens that a reply is thought to have, before any has ended
_NO_LOGITS = np.empty((0, 0), np.float32)


class Engine:
    """Runs tasks on a backend in a thread of its own, all of them a step further at a time.

    Which task begins is the queue's affair (`schedule.Queue`), how much of whose prompt a step reads the pace's
    (`schedule.Pace`), and which cached beginning serves whom the slots' (`slots.Slots`). A task begins when a place is
    free and the cache will hold what it and those that run are expected to have; should replies become longer than
    that, one of them is set aside and goes on later, and loses nothing.

    speculator:  guesses tokens for them, which the same step checks; None: nobody does
    limits:      bounds; None: as many tasks at once as there are sequences, any number waiting
    """

    def __init__(self, backend: Backend, speculator: Speculator | None = None, limits: Limits | None = None) -> None:
        self.backend = backend
        self.speculator = speculator
        self.limits = limits = limits or Limits()
        self.n_parallel = min(limits.n_parallel or backend.n_seq_max, backend.n_seq_max, backend.n_batch)
        self._slots = Slots(backend, limits)
        self._queue = Queue(limits.n_queue)
        self._pace = Pace(backend.n_batch, backend.n_window, limits.stall, limits.comfort)
        self._counters = Counters()
        self._cancellations: deque[Task] = deque()
        self._reply = float(REPLY)  # tokens of a reply, of late
        self._steps: list[float] = []  # begin and end of those that are not counted yet
        self._n_readings = 0  # tasks that observe, among those that run
        self._next_look = 0.0  # when it is time to see whether a user gets nothing
        self._n_replies = self._n_single = self._n_wide = self._depth = 0  # of the present step, as Pace counts
        self._outbox: deque[tuple[Task, Item]] = deque()
        self._running: list[Task] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False  # no more work is taken
        self._finished = False  # close() has been called
        self._why = "The model is closed: load it again."
        self._calls: deque[tuple[Callable[[], object], SimpleQueue[object]]] = deque()
        self._crowded = False  # the cache was full: nobody begins until somebody has ended
        n = backend.n_batch
        self._batch = Batch(np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.bool_))
        self._views: dict[int, Batch] = {}
        _ENGINES.add(self)

    def submit(self, task: Task) -> None:
        """Queues a task; it begins when its turn has come and there is room.

        A server sets `task.user` and maps what is raised here, and what comes out of `task.output` as an item, to
        HTTP: QueueFullError and QueueTimeoutError to 429 or 503 with their `retry_after`, DoesNotFitError and
        ContextFullError to 400.

        Raises: RequestError for an empty prompt or ids outside the vocabulary; ContextFullError for a prompt longer
        than the context, DoesNotFitError for one that the cache can never hold with its reply; QueueFullError.
        """
        prompt, backend = task.prompt, self.backend
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
        with self._changed:
            if self._closed:
                raise EdgertError(self._why)
            task.outbox, task.cancellations = self._outbox, self._cancellations
            task.arrived = perf_counter()
            task.end = task.arrived + task.timeout
            task.queue_end = min(task.end, task.arrived + task.queue_timeout)
            try:
                self._queue.add(task, self.n_parallel - len(self._running))
            except QueueFullError:
                self._counters.refused += 1
                raise
            self._start()
        if task.cancelled:
            task.cancelled = True  # tells this engine

    def _whole(self, task: Task, expected: float) -> int:
        """Tokens that a task may have in the end, if a reply without a limit has so many as expected."""
        most = expected if task.most_tokens is None else task.most_tokens
        return int(min(len(task.prompt) + most, self.backend.n_ctx))

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
            n_running=len(self._running),
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
        for task in (*self._running, *self._queue):
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
            for task in (*self._running, *waiting):
                if not task.done:
                    task.fail(EdgertError("The model was closed while the request ran."))
            for _, answer in self._calls:
                answer.put(EdgertError("The model was closed while the request ran."))
            self._send()

    def _turn(self) -> None:
        """A step and what belongs to it; what fails in it ends the tasks that it was for, and no others."""
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
                if not task.done:
                    task.fail(error)
        self._retire()
        if not self._running:
            self._send()

    def _wait(self) -> bool:
        """Waits for work; false when there will be none."""
        with self._changed:
            while not (self._closed or self._queue.n or self._running or self._calls):
                self._changed.wait()
            if self.limits.window and not self._running:
                end = perf_counter() + self.limits.window
                while not self._closed and not self._calls and self._queue.n < self.n_parallel:
                    if (left := end - perf_counter()) <= 0:
                        break
                    self._changed.wait(left)
            return not self._closed

    def _send(self) -> None:
        """Hands out what the tasks have left: it wakes their callers."""
        while self._outbox:
            task, item = self._outbox.popleft()
            task.send(item)

    def step(self) -> None:
        """Ends what shall end, begins what can, evaluates one batch and hands out its logits."""
        now = perf_counter()
        if self._cancellations:
            self._cancel()
        if self._queue.n:
            self._admit(now)
        for task in self._running:
            if task.end <= now and not task.done:
                task.expire()
        self._retire()
        parts = self._plan()
        if self._n_readings:
            parts = self._observed(parts)
        if not parts:
            return
        guessed = self._guess(parts) if self.speculator else None
        began = perf_counter()
        try:
            logits, row = self._forward(guessed or parts), 0
        except DoesNotFitError:
            if not guessed:
                raise
            guessed, (logits, row) = None, (self._forward(parts), 0)
        self._steps += (began, perf_counter())
        if self._n_single or self._n_wide or len(self._steps) >= 2 * STEPS:
            self._account(parts)
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

    def _account(self, parts: Sequence[tuple[Task, int, int]] | None = None) -> None:
        """Counts and learns from the steps since the last time, all of the same replies.

        Between two steps the processor's caches are full of weights, and whatever is touched then is slow.

        parts:  of the latest step, which may have read prompts too
        """
        steps = self._steps
        if not steps:
            return
        counters, running = self._counters, self._running
        n_prompt = self._n_single + self._n_wide if parts else 0
        times = list(zip(steps[::2], steps[1::2], strict=True))
        steps.clear()
        for began, ended in times[:-1] if n_prompt else times:
            self._pace.learn(len(running), 0, 0, 0, ended - began)
        if n_prompt:
            seconds = times[-1][1] - times[-1][0]
            self._pace.learn(self._n_replies, self._n_single, self._n_wide, self._depth, seconds)
        counters.steps(times, len(running), self._n_replies + n_prompt)
        gave = {task for task, _, rows in parts if rows} if parts else set(running)
        for task in running:
            if task.want_all:
                continue
            if made := task.n_predicted - task.n_counted:
                task.n_counted = task.n_predicted
                counters.predicted_tokens += made
                self._queue.charge(task, made)
            if task in gave:
                counters.tokens(task, [ended for _, ended in times])
        counters.prompt_tokens += n_prompt

    def _observed(self, parts: list[tuple[Task, int, int]]) -> list[tuple[Task, int, int]]:
        """Runs the parts of tasks that observe, each in a step of its own; returns the others."""
        others = []
        for task, count, rows in parts:
            if not isinstance(task, Reading):
                others.append((task, count, rows))
                continue
            slot, see = task.slot, task.see
            tokens = slot.tokens[slot.n_cached : slot.n_cached + count].tolist()
            batch = Batch.of(tokens, slot.n_cached, slot.sequence, wanted="all")
            try:
                self._slots.making_room(
                    lambda batch=batch, see=see: self.backend.observe(batch, see),  # type: ignore[misc]
                    [task.user],
                    alone=len(self._running) == 1,
                )
                slot.n_cached += count
                task.advance(_NO_LOGITS)
            except DoesNotFitError:
                raise
            except Exception as error:  # its own affair, the others go on
                if not isinstance(error, EdgertError):
                    logger.exception("a request failed")
                task.fail(error)
        return others

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

    def _cancel(self) -> None:
        """Ends what nobody wants any more, in the queue too: there it never begins."""
        while self._cancellations:
            task = self._cancellations.popleft()
            if not task.done and (task.waiting or task in self._running):
                task.cancel()
                if task.waiting:
                    self._drop(task)

    def _drop(self, task: Task) -> None:
        with self._changed:
            self._queue.drop(task)
        self._counters.ended(task)

    def _admit(self, now: float) -> None:
        """Begins what can begin, ends what has waited too long."""
        with self._changed:
            late = self._queue.overdue(now)
        for task in late:
            if task.begun:
                task.expire()
            else:
                task.fail(self._queue.too_late(task, now))
                task.outcome = "timed out"
            self._counters.ended(task)
        if now >= self._next_look and len(self._running) == self.n_parallel > 1:
            self._next_look = now + 0.1
            self._share_places(now)
        held: list[Task] = []
        while len(self._running) < self.n_parallel and not self._crowded:
            with self._changed:
                following = self._queue.take(now)
            if following is None:
                break
            task = following
            try:
                if self._awaits(task):
                    held.append(task)
                elif self._running and not self._fits(task):
                    held.append(task)
                    self._crowded = True
                else:
                    self._slots.place(task)
                    self._begin(task, now)
            except Exception as error:  # its own affair, the others go on
                if not isinstance(error, EdgertError):
                    logger.exception("a request cannot begin")
                task.fail(error)
                if task not in self._running:
                    with self._changed:
                        self._queue.ended(task)
                    self._counters.ended(task)
        if held:
            with self._changed:
                for task in held:
                    self._queue.put_back(task)

    def _fits(self, task: Task) -> bool:
        """Whether the cache will hold the task beside those that run, as far as can be told."""
        return self._slots.fits(task, self._whole(task, 2 * self._reply), self._committed())

    def _begin(self, task: Task, now: float) -> None:
        """Lets a task that has a slot run."""
        self._account()
        self._running.append(task)
        self._n_readings += isinstance(task, Reading)
        self._queue.started(task, len(task.prompt) - task.slot.n_cached, now)
        if not task.begun:
            self._counters.started += 1
            self._counters.cached_tokens += task.n_reused
            task.begin()
            task.begun = True

    def _awaits(self, task: Task) -> bool:
        """Whether the task does better to wait until another, which begins alike, has read what they share."""
        if not self._running:
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
        return sum(max(0, self._whole(task, 2 * self._reply) - task.slot.n_cached) for task in self._running)

    def _share_places(self, now: float) -> None:
        """Sets aside a task of a user who has several, if another user waits and has none."""
        users = Counter(task.user for task in self._running)
        with self._changed:
            waiting = self._queue.waiting_users()
        hungry = [user for user, since in waiting if not users[user] and now - since > self.limits.patience]
        user, most = users.most_common(1)[0]
        if hungry and most > 1 and not self._crowded:
            self._set_aside(next(task for task in reversed(self._running) if task.user == user))

    def _set_aside(self, task: Task) -> None:
        """Lets a task wait; what it has stays cached while there is room, and it goes on from there."""
        self._account()
        slot = task.slot
        task.prompt = slot.tokens[: slot.n_tokens].copy()
        self._slots.release(slot)
        self._running.remove(task)
        self._n_readings -= isinstance(task, Reading)
        self._counters.preempted += 1
        with self._changed:
            self._queue.put_back(task)

    def _plan(self) -> list[tuple[Task, int, int]]:
        """The tasks of this step, how many tokens each evaluates, and how many rows of logits it gets."""
        parts = [(task, 1, 1) for task in self._running if task.slot.n_tokens - task.slot.n_cached == 1]
        self._n_replies, self._n_single, self._n_wide = len(parts), 0, 0
        if len(parts) < len(self._running):
            prompts = [task for task in self._running if task.slot.pending > 1]
            window, turn = self.backend.n_window, self._counters.n_steps
            self._depth = max(task.slot.n_cached for task in prompts)
            budget, singles = self._pace.allows(len(parts), self._depth)
            for task, count in shared_out(prompts, budget, singles, window, turn):
                wide = wide_part(task.slot.n_cached, count, window)
                self._n_wide += wide
                self._n_single += count - wide
                parts.append((task, count, count if task.want_all else int(count == task.slot.pending)))
        return parts

    def _forward(self, parts: Sequence[tuple[Task, int, int]]) -> NDArray[np.float32]:
        backend, (task, count, rows) = self.backend, parts[0]
        if len(parts) == 1 and count == rows < FEW:  # a reply's next token, and guesses at those after it
            slot = task.slot
            tokens = slot.tokens[slot.n_cached : slot.n_cached + count].tolist()

            def evaluate() -> NDArray[np.float32]:
                return backend.extend(tokens, slot.n_cached, slot.sequence)

        else:
            batch = self._batch_of(parts)

            def evaluate() -> NDArray[np.float32]:
                return backend.forward(batch)

        self._send()  # the callers wake while the backend computes, which frees the interpreter for them
        try:
            return evaluate()
        except DoesNotFitError:
            users, alone = [task.user for task in self._running], len(self._running) == 1
            return self._slots.making_room(evaluate, users, alone=alone)

    def _batch_of(self, parts: Sequence[tuple[Task, int, int]]) -> Batch:
        """What the tasks evaluate in this step."""
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
        return batch

    def _give_way(self, error: DoesNotFitError) -> None:
        """The newest task of who holds most waits until another has ended; one that is alone has to end."""
        if len(self._running) == 1:
            self._running[0].give_up(error)
            return
        user = max({task.user for task in self._running}, key=self._slots.holding)
        self._set_aside(next(task for task in reversed(self._running) if task.user == user))
        self._crowded = True

    def _retire(self) -> None:
        """Frees the slots of tasks that are done; what they have cached stays for the next prompt."""
        ended = [task for task in self._running if task.done]
        if ended:
            self._account()
        for task in ended:
            self._running.remove(task)
            self._n_readings -= isinstance(task, Reading)
            if isinstance(task, Generation):
                if self.speculator and self.limits.prefix_cache != "user":
                    self.speculator.remember(task.slot, task.n_reused)
                self._counters.drafted(task.drafts)
                if task.outcome == "finished":
                    self._reply += 0.1 * (task.n_predicted - self._reply)
            self._slots.release(task.slot)
            self._crowded = False
            with self._changed:
                self._queue.ended(task)
            self._counters.ended(task)


def _after_fork() -> None:
    for engine in list(_ENGINES):
        engine._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
