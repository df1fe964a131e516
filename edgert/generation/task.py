"""What callers ask of the engine: a prompt continued token by token, or a text scored."""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from itertools import repeat
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeVar
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from edgert.errors import EdgertError
from edgert.options import Options
from edgert.reply import Chunk, Drafts, FinishReason, Progress, Stats, TokenLogprob
from edgert.sampler import Sampler, logprobs
from edgert.stopping import StopStrings

if TYPE_CHECKING:
    from edgert.constraint import Constraint
    from edgert.generation.slots import Slot
    from edgert.speculation.speculator import Request

logger = logging.getLogger(__name__)

Outcome = Literal["finished", "cancelled", "timed out", "failed"]
Result = TypeVar("Result")
Item = Chunk | Progress | NDArray[np.float32] | list[TokenLogprob] | BaseException | None


class Outbox(deque[tuple["Task", Item]]):
    """What tasks have left for those who wait for them."""

    def send(self) -> None:
        """Hands it out, then wakes them: all of one event loop together, as each call there may stop this thread."""
        tasks: dict[Task, None] = {}
        while self:
            task, item = self.popleft()
            task.output.put(item)
            tasks[task] = None
        rings: dict[Callable[[], object], list[Task]] = {}
        for task in tasks:
            if task.wake and (ring := _called(task.wake, [task])):
                rings.setdefault(ring, []).append(task)
        for ring, woken in rings.items():
            _called(ring, woken)


def _called(call: Callable[[], Result], tasks: Sequence[Task]) -> Result | None:
    """What `call` returns; if it raises, nobody waits for these tasks any more."""
    try:
        return call()
    except RuntimeError:  # the event loop has been closed
        pass
    except Exception:  # the callers of other tasks must not suffer
        logger.exception("a request's caller cannot be woken")
    for task in tasks:
        task.cancelled = True
    return None


class Caller:
    """Who waits for what a call submits, where a call is made in a thread for somebody who may leave.

    The thread finds it in the context that it was started with.
    """

    current: ClassVar[ContextVar[Caller | None]] = ContextVar("caller", default=None)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: WeakSet[Task] = WeakSet()
        self._left = False

    def submits(self, task: Task) -> None:
        """Takes in a task that has been queued."""
        with self._lock:
            self._tasks.add(task)
            if self._left:
                task.cancelled = True

    def leave(self) -> None:
        """Ends all tasks, and those that are submitted yet."""
        with self._lock:
            self._left = True
            for task in self._tasks:
                task.cancelled = True


class Decoder(Protocol):
    """Turns tokens into text, holding back characters that are not complete."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class Task(ABC):
    """A prompt on its way through the engine; results, errors and progress come out of `output`."""

    reuse = True  # whether a cached prefix serves
    want_all = False  # whether the logits after every token are wanted, not only after the last
    most_at_once = 1 << 30  # tokens of the prompt that one step may evaluate
    most_guesses = 0  # tokens that may be guessed and checked in the next step
    n_accepted = 0  # guesses that were right in the last step
    takes_chosen = False  # whether it goes on by tokens alone, without their logits
    # Of the present step, where guesses were checked where they were made: of each round how many, and what was chosen.
    chosen: list[tuple[int, list[int]]] | None = None
    n_predicted = 0  # tokens chosen, and of them those that the engine has counted:
    n_counted = 0
    most_tokens: int | None = None  # that may be added to the prompt; None: as many as the context holds

    def __init__(self, prompt: NDArray[np.int32], user: str = "", priority: int = 0) -> None:
        self.prompt = prompt  # what to evaluate first; after an interruption with the tokens chosen until then
        self.user, self.priority = user, priority
        self.slot: Slot
        self.n_reused = 0  # tokens of the prompt that were cached when it began
        self.begun = False
        self.waiting = False  # in the queue
        self.done = False
        self.outcome: Outcome = "finished"
        self.order = 0  # among all that came
        self.arrived = 0.0  # this and the next as perf_counter counts
        self.timeout = self.queue_timeout = math.inf  # seconds that it may take, and of them wait
        self.queue_end = self.end = math.inf  # when it must have begun, and be done
        self.last_token = 0.0  # when the logits of its latest token were there; 0: none yet
        self.awaits: tuple[Slot, Task, int] | None = None  # a prompt in work that this one will share so much of
        self._cancelled = False
        self.cancellations: deque[Task] = deque()  # the engine's
        self.output: SimpleQueue[Item] = SimpleQueue()
        self.wake: Callable[[], Callable[[], object]] | None = None  # notes who waits, and returns what wakes them
        self.outbox = Outbox()

    def put(self, item: Item) -> None:
        """Leaves an item for whoever waits; the engine sends it when it has a moment."""
        self.outbox.append((self, item))

    @property
    def cancelled(self) -> bool:
        """Whether its caller has lost interest; may be set by any thread, and the next step knows."""
        return self._cancelled

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        self._cancelled = value
        if value and not self.done:
            self.cancellations.append(self)

    def fail(self, error: BaseException) -> None:
        """Ends the task with an error."""
        self.done, self.outcome = True, "failed"
        self.put(error)

    def begin(self) -> None:  # noqa: B027
        """Called when the task has a slot for the first time."""

    @abstractmethod
    def advance(self, logits: NDArray[np.float32]) -> None:
        """Takes the logits that a step gave for this task: float32 (rows, n_vocab), possibly no row."""

    def take_chosen(self) -> None:
        """`advance`, where guesses have been checked and tokens `chosen` already."""
        raise NotImplementedError

    @abstractmethod
    def cancel(self) -> None:
        """Ends the task because its caller wishes so."""

    def expire(self) -> None:
        """Ends the task because its time is used up."""
        self.cancel()
        self.outcome = "timed out"

    def give_up(self, error: EdgertError) -> None:
        """Ends the task because the cache has no room for its next token."""
        self.fail(error)


class Generation(Task):
    """A prompt that is continued token by token."""

    def __init__(
        self,
        prompt: NDArray[np.int32],
        options: Options,
        sampler: Sampler,
        decoder: Decoder,
        end_ids: Collection[int],
        constraint: Constraint | None = None,
    ) -> None:
        super().__init__(prompt, options.user, options.priority)
        self.reuse = options.cache_prompt
        self.most_tokens = options.max_tokens
        self.timeout = math.inf if options.timeout is None else options.timeout
        self.queue_timeout = math.inf if options.queue_timeout is None else options.queue_timeout
        self.options = options
        self.sampler = sampler
        self._decoder = decoder
        self.end_ids = frozenset(end_ids)
        self._constraint = constraint
        self.takes_chosen = constraint is None and not options.logprobs
        self.guessing: Request | None = None  # what the speculator knows about it
        self.drafts = Drafts()
        self._stops = StopStrings(options.stop)
        self._n_prompt = len(prompt)
        self._n_read = 0  # tokens of the prompt that are in the cache
        self.n_predicted = 0
        self._n_first = 1  # of them, those that came with the prompt's logits: more where guesses were checked with it
        self.whole = False  # nobody wants pieces: all text comes at the end, and nobody wakes before
        self._text = ""  # since the last chunk, as the next two
        self._tokens: list[int] = []
        self._scores: deque[tuple[int, int, TokenLogprob]] = deque()  # not told yet, with where their text is
        self._decoded = self._shown = 0  # characters, with and without what a stop string holds back
        self._started = self._prompt_end = self._last = perf_counter()

    def begin(self) -> None:
        self._started = self._prompt_end = self._last = perf_counter()
        self._report_progress()

    def advance(self, logits: NDArray[np.float32]) -> None:
        """Chooses a token after each row as long as it is the one that the next row was computed for."""
        self._note_reading()
        if not len(logits):
            return
        if self.options.max_tokens == 0:
            self._finish("length")
            return
        slot, n = self.slot, len(logits) - 1
        guesses = slot.tokens[slot.n_tokens : slot.n_tokens + n].tolist()
        self._go_on(guesses, self._choices(logits), logits)
        self._pass_on()

    def take_chosen(self) -> None:
        self._note_reading()
        rounds, self.chosen = self.chosen or [], None
        tokens = [token for _, chosen in rounds for token in chosen]
        if self._go_on_without_end(tokens):
            for n_guesses, chosen in rounds:
                self.drafts.count(n_guesses, len(chosen) - 1)
        else:
            for n_guesses, chosen in rounds:
                right = chosen[:-1]
                self._go_on([*right, *[-1] * (n_guesses - len(right))], chosen, repeat(None))
                if self.done:
                    return
        self._pass_on()

    def _go_on_without_end(self, tokens: list[int]) -> bool:
        """Takes tokens of which none ends the reply, with little ado; whether they are such."""
        slot, most = self.slot, self.options.max_tokens
        n, start = self.n_predicted + len(tokens), slot.n_tokens
        if (
            self.options.stop
            or not self.n_predicted
            or (most is not None and n >= most)
            or start + len(tokens) > len(slot.tokens)
            or not self.end_ids.isdisjoint(tokens)
        ):
            return False
        self.n_predicted = n
        self._tokens += tokens
        self._text += "".join(map(self._decoder.push, tokens))
        slot.n_tokens = start + len(tokens)
        slot.tokens[start : slot.n_tokens] = tokens
        return True

    def _note_reading(self) -> None:
        """Tells how much of the prompt has been read, as long as it is read."""
        self._last = perf_counter()
        if self.n_predicted == 0:
            self._prompt_end = self._last
            self._report_progress()

    def _go_on(self, guesses: Sequence[int], tokens: Iterable[int], rows: Iterable[NDArray[np.float32] | None]) -> None:
        """Takes the chosen tokens, each as long as the one before it is what was guessed there."""
        first = self.n_predicted == 0
        self.drafts.try_(len(guesses))
        self.n_accepted = 0
        for row, guess, token in zip(rows, [*guesses, None], tokens, strict=False):
            right = token == guess
            if right:
                self.drafts.accepted[self.n_accepted] += 1
                self.n_accepted += 1
            if first:
                self._n_first = self.n_accepted + (not right)
            self._take(token, row)
            if self.done or not right:
                break

    def _pass_on(self) -> None:
        """Leaves the text of a step for whoever waits."""
        self._last = perf_counter()
        if self._text and not self.done and not self.whole:
            self._emit("")

    def _choices(self, logits: NDArray[np.float32]) -> Iterable[int]:
        """The tokens after the rows, each as long as the one before it is what its row was computed for."""
        slot, constraint = self.slot, self._constraint
        if constraint is None:
            return self.sampler.follow(logits, slot.tokens, slot.n_tokens)

        def one_by_one() -> Iterator[int]:
            for row in logits:
                token = self.sampler.sample(constraint.masked(row), slot.tokens, slot.n_tokens)
                constraint.take(token)
                yield token

        return one_by_one()

    @property
    def most_guesses(self) -> int:  # type: ignore[override]
        left = self.options.max_tokens
        room = len(self.slot.tokens) - self.slot.n_tokens
        return room if left is None else min(room, left - self.n_predicted - 1)

    def _take(self, token: int, row: NDArray[np.float32] | None) -> None:
        """Adds a token, chosen from a row of logits, to the reply, or ends it."""
        slot = self.slot
        self.n_predicted += 1
        self._last = perf_counter()
        if token in self.end_ids:
            self._finish("stop")
            return
        self._tokens.append(token)
        piece = self._decoder.push(token)
        if self.options.logprobs and row is not None:
            score = TokenLogprob(token, *logprobs(row, token, self.options.top_logprobs))
            self._scores.append((self._decoded, self._decoded + max(1, len(piece)), score))
        self._decoded += len(piece)
        text, stopped = self._stops.push(piece)
        if stopped:
            self._finish("stop", text, complete=True)
        elif self._constraint and self._constraint.complete:
            self._finish("stop", text)
        elif self.n_predicted == self.options.max_tokens or slot.n_tokens == len(slot.tokens):
            self._finish("length", text)
        else:
            slot.tokens[slot.n_tokens] = token
            slot.n_tokens += 1
            self._text += text

    def _emit(
        self, text: str, reason: FinishReason | None = None, stats: Stats | None = None, *, cut: bool = False
    ) -> None:
        """Leaves the text so far.

        cut:  a stop string has ended it, and what stands behind is not part of the reply
        """
        text = self._text + text
        self._shown += len(text)
        chunk = Chunk(text, self._tokens, reason, stats, self._told(reason is not None, cut))
        self._text, self._tokens = "", []
        self.put(chunk)

    def _told(self, ended: bool, cut: bool) -> list[TokenLogprob]:
        """The scores of tokens whose text is shown: with logprobs a reply is spelled, no more and no less."""
        found: list[TokenLogprob] = []
        while self._scores:
            begin, end, score = self._scores[0]
            if end > self._shown and not (begin < self._shown if cut else ended):
                break
            self._scores.popleft()
            found.append(score)
        return found

    def _finish(self, reason: FinishReason, text: str = "", *, complete: bool = False) -> None:
        if not complete:
            tail, stopped = self._stops.push(self._decoder.flush())
            text += tail if stopped else tail + self._stops.flush()
            complete = stopped
            reason = "stop" if stopped else reason
        self.done = True
        self.outcome = {"cancelled": "cancelled", "timeout": "timed out"}.get(reason, "finished")  # type: ignore[assignment]
        self._emit(text, reason, self._stats(), cut=complete)

    def _stats(self) -> Stats:
        return Stats.of(
            self.n_reused,
            self._n_read - self.n_reused,
            self._prompt_end - self._started,
            self.n_predicted,
            self._last - self._prompt_end,
            self.drafts,
            self._n_first,
        )

    def _report_progress(self) -> None:
        self._n_read = min(self.slot.n_cached, self._n_prompt)
        elapsed = 1e3 * (perf_counter() - self._started)
        self.put(Progress(self._n_prompt, self.n_reused, self._n_read, elapsed))

    def cancel(self) -> None:
        self._finish("cancelled")

    def expire(self) -> None:
        self._finish("timeout")

    def give_up(self, error: EdgertError) -> None:
        if self.n_predicted:
            self._finish("length")
        else:
            self.fail(error)


class Scoring(Task):
    """A text whose logits after every token are wanted."""

    reuse = False
    want_all = True
    most_tokens = 0

    def __init__(self, prompt: NDArray[np.int32], n_vocab: int) -> None:
        super().__init__(prompt)
        self._logits = np.empty((len(prompt), n_vocab), np.float32)

    def advance(self, logits: NDArray[np.float32]) -> None:
        end = self.slot.n_cached
        self._take(end - len(logits), logits)
        if end == len(self.prompt):
            self.done = True
            self.put(self._found())

    def _take(self, start: int, logits: NDArray[np.float32]) -> None:
        self._logits[start : start + len(logits)] = logits

    def _found(self) -> Item:
        return self._logits

    def cancel(self) -> None:
        self.fail(EdgertError("The request was cancelled."))
        self.outcome = "cancelled"


class Weighing(Scoring):
    """A text whose own tokens are wanted with their log probabilities, and the `top` likeliest in their places."""

    most_at_once = 64  # so that the logits of a long text never take much memory

    def __init__(self, prompt: NDArray[np.int32], top: int, user: str = "") -> None:
        Task.__init__(self, prompt, user)
        self._top = top
        self._scores: list[TokenLogprob] = []

    def _take(self, start: int, logits: NDArray[np.float32]) -> None:
        for token, row in zip(self.prompt[start + 1 :].tolist(), logits, strict=False):
            self._scores.append(TokenLogprob(token, *logprobs(row, token, self._top)))

    def _found(self) -> Item:
        return self._scores


class Reading(Task):
    """A text whose last hidden states are wanted: what the head of the model reads after each token."""

    reuse = False
    most_tokens = 0

    def __init__(self, prompt: NDArray[np.int32], user: str = "") -> None:
        super().__init__(prompt, user)
        self._states: list[NDArray[np.float32]] = []

    def see(self, states: NDArray[np.float32]) -> None:
        """Those of some tokens more."""
        self._states.append(states)

    def advance(self, logits: NDArray[np.float32]) -> None:
        if self.slot.n_cached == len(self.prompt):
            self.done = True
            self.put(np.concatenate(self._states))

    def cancel(self) -> None:
        self.fail(EdgertError("The request was cancelled."))
        self.outcome = "cancelled"
