"""The loop between tokenizer and backend: requests of any number of callers share each forward step."""

from __future__ import annotations

import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Backend, Batch
from edgert.errors import ContextFullError, DoesNotFitError, EdgertError, RequestError, SessionError
from edgert.options import Options
from edgert.reply import Chunk, Drafts, FinishReason, Progress, Stats, TokenLogprob
from edgert.sampler import Sampler, logprobs
from edgert.stopping import StopStrings

if TYPE_CHECKING:
    from edgert.speculation import Speculator
    from edgert.speculation.speculator import Request

logger = logging.getLogger(__name__)

Item = Chunk | Progress | NDArray[np.float32] | BaseException
PREFILL_BESIDE_DECODE = 64  # prompt tokens in a step in which others wait for their next token


class Decoder(Protocol):
    """Turns tokens into text, holding back characters that are not complete."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


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


class Task(ABC):
    """A prompt on its way through the engine; results, errors and progress come out of `output`."""

    reuse = True  # whether a cached prefix serves
    want_all = False  # whether the logits after every token are wanted, not only after the last
    most_guesses = 0  # tokens that may be guessed and checked in the next step

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        self.prompt = prompt  # what to evaluate first; after an interruption with the tokens chosen until then
        self.slot: Slot
        self.n_reused = 0  # tokens of the prompt that were cached when it began
        self.begun = False
        self.cancelled = False
        self.done = False
        self.output: SimpleQueue[Item] = SimpleQueue()
        self.wake: Callable[[], None] | None = None
        self.outbox: deque[tuple[Task, Item]] = deque()

    def put(self, item: Item) -> None:
        """Leaves an item for whoever waits; the engine sends it when it has a moment."""
        self.outbox.append((self, item))

    def send(self, item: Item) -> None:
        """Hands an item to whoever waits, in a thread or in an event loop."""
        self.output.put(item)
        if wake := self.wake:
            try:
                wake()
            except RuntimeError:  # the event loop has been closed
                self.cancelled = True

    def fail(self, error: BaseException) -> None:
        """Ends the task with an error."""
        self.done = True
        self.put(error)

    def begin(self) -> None:  # noqa: B027
        """Called when the task has a slot for the first time."""

    @abstractmethod
    def advance(self, logits: NDArray[np.float32]) -> None:
        """Takes the logits that a step gave for this task: float32 (rows, n_vocab), possibly no row."""

    @abstractmethod
    def cancel(self) -> None:
        """Ends the task because its caller wishes so."""


class Generation(Task):
    """A prompt that is continued token by token."""

    def __init__(
        self,
        prompt: NDArray[np.int32],
        options: Options,
        sampler: Sampler,
        decoder: Decoder,
        end_ids: Collection[int],
    ) -> None:
        super().__init__(prompt)
        self.options = options
        self.sampler = sampler
        self._decoder = decoder
        self.end_ids = frozenset(end_ids)
        self.guessing: Request | None = None  # what the speculator knows about it
        self.n_accepted = 0  # guesses that were right in the last step
        self.drafts = Drafts()
        self._stops = StopStrings(options.stop)
        self._n_prompt = len(prompt)
        self._n_read = 0  # tokens of the prompt that are in the cache
        self._n_predicted = 0
        self.whole = False  # nobody wants pieces: all text comes at the end, and nobody wakes before
        self._text = ""  # since the last chunk, as the next two
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._started = self._prompt_end = self._last = perf_counter()

    def begin(self) -> None:
        self._started = self._prompt_end = self._last = perf_counter()
        self._report_progress()

    def advance(self, logits: NDArray[np.float32]) -> None:
        """Chooses a token after each row as long as it is the one that the next row was computed for."""
        self._last = perf_counter()
        if self._n_predicted == 0:
            self._prompt_end = self._last
            self._report_progress()
        if not len(logits):
            return
        if self.options.max_tokens == 0:
            self._finish("length")
            return
        guesses = self.slot.tokens[self.slot.n_tokens : self.slot.n_tokens + len(logits) - 1].tolist()
        self.drafts.try_(len(guesses))
        self.n_accepted = 0
        for row, guess in zip(logits, [*guesses, None], strict=True):
            token = self.sampler.sample(row, self.slot.tokens, self.slot.n_tokens)
            right = token == guess
            if right:
                self.drafts.accepted[self.n_accepted] += 1
                self.n_accepted += 1
            self._take(token, row)
            if self.done or not right:
                break
        self._last = perf_counter()
        if self._text and not self.done and not self.whole:
            self._emit("")

    @property
    def most_guesses(self) -> int:  # type: ignore[override]
        left = self.options.max_tokens
        room = len(self.slot.tokens) - self.slot.n_tokens
        return room if left is None else min(room, left - self._n_predicted - 1)

    def _take(self, token: int, row: NDArray[np.float32]) -> None:
        """Adds a token, chosen from a row of logits, to the reply, or ends it."""
        slot = self.slot
        self._n_predicted += 1
        self._last = perf_counter()
        if token in self.end_ids:
            self._finish("stop")
            return
        self._tokens.append(token)
        if self.options.logprobs:
            self._logprobs.append(TokenLogprob(token, *logprobs(row, token, self.options.top_logprobs)))
        text, stopped = self._stops.push(self._decoder.push(token))
        if stopped:
            self._finish("stop", text, complete=True)
        elif self._n_predicted == self.options.max_tokens or slot.n_tokens == len(slot.tokens):
            self._finish("length", text)
        else:
            slot.tokens[slot.n_tokens] = token
            slot.n_tokens += 1
            self._text += text

    def _emit(self, text: str, reason: FinishReason | None = None, stats: Stats | None = None) -> None:
        chunk = Chunk(self._text + text, self._tokens, reason, stats, self._logprobs)
        self._text, self._tokens, self._logprobs = "", [], []
        self.put(chunk)

    def _finish(self, reason: FinishReason, text: str = "", *, complete: bool = False) -> None:
        if not complete:
            tail, stopped = self._stops.push(self._decoder.flush())
            text += tail if stopped else tail + self._stops.flush()
            reason = "stop" if stopped else reason
        self.done = True
        self._emit(text, reason, self._stats())

    def _stats(self) -> Stats:
        return Stats.of(
            self.n_reused,
            self._n_read - self.n_reused,
            self._prompt_end - self._started,
            self._n_predicted,
            self._last - self._prompt_end,
            self.drafts,
        )

    def _report_progress(self) -> None:
        self._n_read = min(self.slot.n_cached, self._n_prompt)
        elapsed = 1e3 * (perf_counter() - self._started)
        self.put(Progress(self._n_prompt, self.n_reused, self._n_read, elapsed))

    def cancel(self) -> None:
        self._finish("cancelled")


class Scoring(Task):
    """A text whose logits after every token are wanted."""

    reuse = False
    want_all = True

    def __init__(self, prompt: NDArray[np.int32], n_vocab: int) -> None:
        super().__init__(prompt)
        self._logits = np.empty((len(prompt), n_vocab), np.float32)

    def advance(self, logits: NDArray[np.float32]) -> None:
        end = self.slot.n_cached
        self._logits[end - len(logits) : end] = logits
        if end == len(self.prompt):
            self.done = True
            self.put(self._logits)

    def cancel(self) -> None:
        self.fail(EdgertError("The request was cancelled."))


class Engine:
    """Runs tasks on a backend in a thread of its own, all of them a step further at a time.

    speculator:  guesses tokens for them, which the same step checks; None: nobody does
    """

    def __init__(self, backend: Backend, speculator: Speculator | None = None) -> None:
        self.backend = backend
        self.speculator = speculator
        self._slots = [Slot(i, backend.n_ctx) for i in range(backend.n_seq_max)]
        self._waiting: deque[Task] = deque()
        self._outbox: deque[tuple[Task, Item]] = deque()
        self._running: list[Task] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False  # no more work is taken
        self._finished = False  # close() has been called
        self._calls: deque[tuple[Callable[[], object], SimpleQueue[object]]] = deque()
        self._crowded = False  # the cache was full: nobody begins until somebody has ended
        self._clock = itertools.count(1)
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

        def work() -> object:
            best = max(self._slots, key=lambda slot: slot.common(tokens))
            n = self.backend.reachable(best.sequence, best.common(tokens))
            if not n:
                raise SessionError("Nothing of this text is cached, so there is nothing to save.")
            return (n, *self.backend.save(best.sequence, n))

        return self._call(work)

    def restore(self, tokens: NDArray[np.int32], facts: Mapping[str, Any], data: NDArray[np.uint8]) -> None:
        """Takes what `save` gave into a sequence that nobody uses.

        Raises: SessionError for a cache of another kind; DoesNotFitError; EdgertError when all sequences are in use.
        """

        def work() -> None:
            self.backend.check_saved(facts, len(tokens), data.nbytes)
            if int(tokens.min()) < 0 or int(tokens.max()) >= self.backend.n_vocab:
                raise SessionError("The session has tokens outside the vocabulary.")
            free = [slot for slot in self._slots if slot.task is None]
            if not free:
                raise EdgertError("All sequences are in use: load the session when a reply has ended.")
            slot = min(free, key=lambda slot: (slot.n_cached > 0, slot.last_use))
            self.backend.free(slot.sequence)
            slot.n_tokens = slot.n_cached = 0
            while True:
                try:
                    self.backend.restore(slot.sequence, facts, data)
                    break
                except DoesNotFitError:
                    if not self._evict():
                        raise
            slot.tokens[: len(tokens)] = tokens
            slot.n_tokens = slot.n_cached = len(tokens)
            slot.last_use = next(self._clock)

        self._call(work)

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
                    self._place(task)
                except Exception as error:
                    task.fail(error)
                    raise
                self._running.append(task)
                if not task.begun:
                    task.begin()
                    task.begun = True

    def _place(self, task: Task) -> None:
        """Gives the task a slot, with the longest cached beginning of its prompt."""
        prompt = task.prompt
        free = [slot for slot in self._slots if slot.task is None]
        empty = next((slot for slot in free if not slot.n_cached), None)
        best, reused = None, 0
        if task.reuse:
            best = max(self._slots, key=lambda slot: (slot.common(prompt), slot.task is None))
            reused = min(best.common(prompt), len(prompt) - 1)  # the last token's logits are not kept
            reused = self.backend.reachable(best.sequence, reused)
        if best and reused and best.task is None and (empty is None or best.n_cached <= 2 * reused):
            slot = best
        else:  # what the source holds beyond the common part is worth more than an empty slot
            slot = empty or min(free, key=lambda slot: slot.last_use)
        try:
            if slot is best:
                self.backend.truncate(slot.sequence, reused)
            else:
                self.backend.free(slot.sequence)
                if best and reused:
                    self.backend.fork(best.sequence, slot.sequence, reused)
        except DoesNotFitError:  # no memory for the part that two sequences would have to hold apart
            self.backend.free(slot.sequence)
            reused = 0
        slot.tokens[: len(prompt)] = prompt
        slot.n_tokens, slot.n_cached = len(prompt), reused
        slot.task, task.slot = task, slot
        if not task.begun:
            task.n_reused = reused

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
        while True:
            try:
                return self.backend.forward(batch)
            except DoesNotFitError:
                if not self._evict():
                    raise

    def _evict(self) -> bool:
        """Forgets the sequence that has been idle for longest; false if there is none."""
        idle = [slot for slot in self._slots if slot.task is None and slot.n_cached]
        if not idle:
            return False
        slot = min(idle, key=lambda slot: slot.last_use)
        self.backend.free(slot.sequence)
        slot.n_tokens = slot.n_cached = 0
        return True

    def _give_way(self, error: DoesNotFitError) -> None:
        """The newest task waits until another has ended; one that is alone and does not fit fails."""
        newest = self._running[-1]
        if len(self._running) == 1:
            newest.fail(error)
            return
        slot = newest.slot
        newest.prompt = slot.tokens[: slot.n_tokens].copy()
        self._release(slot)
        self._running.pop()
        self._waiting.appendleft(newest)
        self._crowded = True

    def _retire(self) -> None:
        """Frees the slots of tasks that are done; what they have cached stays for the next prompt."""
        for task in [task for task in self._running if task.done]:
            self._running.remove(task)
            if self.speculator and isinstance(task, Generation):
                self.speculator.remember(task.slot, task.n_reused)
            self._release(task.slot)
            self._crowded = False

    def _release(self, slot: Slot) -> None:
        slot.task, slot.n_cached, slot.last_use = None, self._kept(slot), next(self._clock)
        slot.n_tokens = slot.n_cached

    def _kept(self, slot: Slot) -> int:
        """How much of the slot is sound, the backend's word counting as well after a failed step."""
        held = self.backend.length(slot.sequence)
        if held > slot.n_cached:
            self.backend.truncate(slot.sequence, slot.n_cached)
        return min(held, slot.n_cached)
