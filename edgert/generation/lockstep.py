"""The tasks that run, and the step that takes all of them further: what it evaluates of each, what becomes of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Backend, Batch
from edgert.errors import DoesNotFitError, EdgertError
from edgert.generation.limits import Limits
from edgert.generation.metrics import Counters
from edgert.generation.schedule import EVEN, UNMINDED, Pace, Queue, shared_out, wide_part
from edgert.generation.slots import Slots
from edgert.generation.task import Generation, Reading, Task
from edgert.speculation.crowd import Crowd
from edgert.speculation.speculator import BURST

if TYPE_CHECKING:
    from edgert.speculation import Speculator

logger = logging.getLogger(__name__)

STEPS = 32  # steps that are counted together
PIECE = 16  # tokens outside whole windows that are read together between the steps of replies
FEW = 32  # tokens of one reply that the backend is given without the ado of a batch
_NO_LOGITS = np.empty((0, 0), np.float32)


class Piece(NamedTuple):
    """A piece of a task's prompt on its way, which is read between the steps of replies."""

    task: Task
    n_tokens: int
    n_rows: int  # of logits
    go_on: Callable[[float], NDArray[np.float32] | None]
    times: list[float]  # seconds that it has taken so far


class Lockstep:
    """Tasks that have a slot, all of them a step further at a time.

    How much of whose prompt a step reads is the pace's affair (`schedule.Pace`). Where the backend can be interrupted,
    prompts are read piece by piece, a few layers at a time, between the steps of replies; elsewhere beside them, in one
    step.

    tasks:      those that run, in the order in which they began
    meanwhile:  called right before the backend computes, which frees the interpreter for other threads
    """

    def __init__(
        self,
        backend: Backend,
        speculator: Speculator | None,
        limits: Limits,
        queue: Queue,
        slots: Slots,
        counters: Counters,
        meanwhile: Callable[[], None],
    ) -> None:
        self._backend, self._speculator = backend, speculator
        self._crowd = Crowd(speculator) if speculator else None
        self._reads_whole = "encoder" in backend.capabilities
        self._queue, self._slots, self._counters = queue, slots, counters
        self._meanwhile = meanwhile
        self._shared_by_users = limits.prefix_cache != "user"  # so that one's tokens may be guessed for another
        self._comfort = (EVEN if backend.pauses else UNMINDED) if limits.comfort is None else limits.comfort
        self._pace = Pace(backend.n_batch, backend.n_window, limits.stall, self._comfort)
        self._interruptible = backend.pauses and backend.n_batch >= backend.n_window
        self._piece: Piece | None = None
        self._n_pieces = 0  # that have begun
        self.tasks: list[Task] = []
        self._n_readings = 0  # tasks that want states, among them
        self._n_readers = self._n_left = 0  # prompts that are being read, and their tokens
        self._spent = 0.0  # seconds of the latest batch
        self._steps: list[float] = []  # begin and end of those that are not counted yet
        self._n_replies = self._n_single = self._n_wide = self._depth = 0  # of the present step, as Pace counts
        n = backend.n_batch
        self._batch = Batch(np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.bool_))
        self._views: dict[int, Batch] = {}

    def join(self, task: Task) -> None:
        """Takes in a task that has a slot."""
        self._account()
        self.tasks.append(task)
        self._n_readings += isinstance(task, Reading)
        if self._crowd:
            self._crowd.wake()

    def leave(self, task: Task) -> None:
        """Lets a task go, before its slot is released."""
        self._account()
        if self._piece and self._piece.task is task:
            self._piece = None
        self.tasks.remove(task)
        self._n_readings -= isinstance(task, Reading)
        if self._speculator and self._crowd:
            self._crowd.wake()
            self._speculator.rest(task.slot)
        if task.done and isinstance(task, Generation):
            if self._speculator and self._shared_by_users:
                self._speculator.remember(task.slot, task.n_reused)
            self._counters.drafted(task.drafts)

    def step(self) -> None:
        """Evaluates a batch in which each task has its part, and something of a prompt's piece, if one is on its way.

        Raises: DoesNotFitError when the cache is full; whatever the backend raises.
        """
        parts = self._plan()
        if self._n_readings:
            parts = self._observed(parts)
        if parts:
            self._evaluate(parts)
        if self._piece:
            self._read_on()

    def _evaluate(self, parts: list[tuple[Task, int, int]]) -> None:
        """One batch, whose logits are handed out."""
        guessed = self._guess(parts)
        began, logits, row = perf_counter(), _NO_LOGITS, 0
        rounds = guessed[0][0].chosen if guessed else None  # that were one walk of guessing and checking
        if not rounds:
            try:
                logits = self._forward(guessed or parts)
            except DoesNotFitError:
                if not guessed:
                    raise
                guessed, logits = None, self._forward(parts)
        ended = perf_counter()
        if rounds and self._speculator:
            self._steps += self._speculator.checks
            began = self._steps[-2]
        else:
            self._steps += (began, ended)
        self._spent = ended - began
        if self._n_single or self._n_wide or self._piece or len(self._steps) >= 2 * STEPS:
            self._account(parts)
        for task, count, rows in guessed or parts:
            try:
                if rounds:
                    task.slot.n_cached += sum(len(tokens) for _, tokens in rounds)
                    task.take_chosen()
                    if task.done:  # gives back pages that were kept for the next step
                        self._backend.truncate(task.slot.sequence, task.slot.n_cached)
                else:
                    task.slot.n_cached += count
                    task.advance(logits[row : row + rows])
            except Exception as error:  # its own affair, the others go on
                if not isinstance(error, EdgertError):
                    logger.exception("a request failed")
                task.fail(error)
            row += rows
            self._forget_wrong(task)
        if guessed and self._speculator:
            guesser = self._crowd if self._crowd and len(guessed) > 1 else self._speculator
            guesser.learn([task for task, _, _ in guessed], [count - 1 for _, count, _ in guessed])

    def _plan(self) -> list[tuple[Task, int, int]]:
        """The tasks of this step, how many tokens each evaluates, and how many rows of logits it gets."""
        parts = [(task, 1, 1) for task in self.tasks if task.slot.n_tokens - task.slot.n_cached == 1]
        self._n_replies, self._n_single, self._n_wide = len(parts), 0, 0
        if len(parts) < len(self.tasks):
            prompts = [task for task in self.tasks if task.slot.pending > 1]
            self._n_readers, self._n_left = len(prompts), sum(task.slot.pending for task in prompts)
            window, turn = self._backend.n_window, self._counters.n_steps
            if not self._piece and parts:
                self._begin_piece()
            if self._piece:
                prompts = [task for task in prompts if not self._in_pieces(task)]
            if not prompts:
                return parts
            self._depth = max(task.slot.n_cached for task in prompts)
            budget, singles = self._pace.allows(len(parts), self._depth, self._n_readers)
            for task, count in shared_out(prompts, singles if self._piece else budget, singles, window, turn):
                count = min(count, task.most_at_once)
                wide = wide_part(task.slot.n_cached, count, window)
                self._n_wide += wide
                self._n_single += count - wide
                parts.append((task, count, count if task.want_all else int(count == task.slot.pending)))
        return parts

    def _in_pieces(self, task: Task) -> bool:
        """Whether the task's prompt can be read between steps."""
        return self._interruptible and isinstance(task, Generation)

    def _begin_piece(self) -> None:
        """Sets out to read more of a prompt, of another user than before if there is one."""
        window = self._backend.n_window
        tasks = [task for task in self.tasks if task.slot.pending > 1 and not task.done and self._in_pieces(task)]
        if not tasks:
            return
        task, _ = shared_out(tasks, window, window=window, turn=self._n_pieces)[0]
        self._n_pieces += 1
        slot = task.slot
        n = window - slot.n_cached % window
        if n < window or slot.pending < window:
            n = min(n, slot.pending, window if self._pace.crowd(self._n_readers, self._n_left) else PIECE)
        rows = int(slot.pending == n)
        tokens = slot.tokens[slot.n_cached : slot.n_cached + n].tolist()
        batch = Batch.of(tokens, slot.n_cached, slot.sequence, "last" if rows else "none")
        self._piece = Piece(task, n, rows, self._backend.in_parts(batch), [])

    def _read_on(self) -> None:
        """Reads so much of prompts as replies can wait for, or all of a piece where there are none."""
        seconds = math.inf
        if self._n_replies:
            seconds = self._pace.seconds(self._n_replies, self._n_readers, self._spent, self._n_left)
        self._meanwhile()
        began = perf_counter()
        while self._piece and self._go_on(self._piece, seconds - (perf_counter() - began)):
            if self._n_replies and perf_counter() - began < seconds / 2:
                self._begin_piece()

    def _go_on(self, piece: Piece, seconds: float) -> bool:
        """Reads something more of a piece; whether that was the end of it."""
        task = piece.task
        try:
            users, began = [task.user for task in self.tasks], perf_counter()
            logits = self._slots.making_room(lambda: piece.go_on(seconds), users, alone=len(self.tasks) == 1)
            piece.times.append(perf_counter() - began)
            if logits is None:
                return False
            self._piece = None
            self._pace.read(piece.n_tokens, sum(piece.times))
            task.slot.n_cached += piece.n_tokens
            self._counters.prompt_tokens += piece.n_tokens
            task.advance(logits[: piece.n_rows])
        except DoesNotFitError:
            self._piece = None
            raise
        except Exception as error:  # its own affair, the others go on
            self._piece = None
            if not isinstance(error, EdgertError):
                logger.exception("a request failed")
            task.fail(error)
        return True

    def _guess(self, parts: list[tuple[Task, int, int]]) -> list[tuple[Generation, int, int]] | None:
        """The same parts with guesses to check; None unless all wait for their next token and something is tried."""
        if not self._speculator or not self._crowd or (self._crowd if len(parts) > 1 else self._speculator).idle:
            return None
        tasks = [task for task, _, _ in parts if isinstance(task, Generation) and task.slot.pending == 1]
        if len(tasks) < len(parts):
            return None
        room = min(self._backend.n_batch, len(self._speculator.costs)) - len(tasks)
        # Beside a prompt that is read a walk of many rounds would make gaps of all lengths.
        self._speculator.burst = min(BURST, self._comfort) if self._piece else BURST
        began = perf_counter()
        self._meanwhile()  # the guesses' makers compute as well
        if self._crowd and len(tasks) > 1:
            counts = self._crowd.propose(tasks, room, began)
        else:
            counts = self._speculator.propose(tasks, room)
        return [(task, count + 1, count + 1) for task, count in zip(tasks, counts, strict=True)]

    def _observed(self, parts: list[tuple[Task, int, int]]) -> list[tuple[Task, int, int]]:
        """Reads on in the texts whose states are wanted, as many in a step as it takes; returns the parts of others."""
        others, texts, n = [], [], 0
        for part in parts:
            task, count, _ = part
            if not isinstance(task, Reading):
                others.append(part)
                continue
            slot = task.slot
            self._n_replies -= slot.pending == 1  # what this step learns and counts is not of these
            if slot.pending > 1:
                wide = wide_part(slot.n_cached, count, self._backend.n_window)
                self._n_wide -= wide
                self._n_single -= count - wide
            count = slot.pending if self._reads_whole else count
            n += count
            if n <= self._backend.n_batch:  # else it waits for the next step
                texts.append((task, count))
        if texts:
            self._see(texts)
        return others

    def _see(self, texts: list[tuple[Reading, int]]) -> None:
        """One batch of texts, whose states are handed out."""
        batch = self._batch_of([(task, count, count) for task, count in texts])
        try:
            states = self._slots.making_room(
                lambda: self._backend.states(batch), [task.user for task, _ in texts], alone=len(self.tasks) == 1
            )
        except DoesNotFitError:
            raise
        except Exception as error:  # one text's affair, the others go on
            if len(texts) == 1:
                if not isinstance(error, EdgertError):
                    logger.exception("a request failed")
                texts[0][0].fail(error)
                return
            for task, count in texts:
                self._backend.truncate(task.slot.sequence, task.slot.n_cached)
                self._see([(task, count)])
            return
        start = 0
        for task, count in texts:
            task.see(states[start : start + count])
            task.slot.n_cached += count
            self._counters.prompt_tokens += count
            task.advance(_NO_LOGITS)
            start += count

    def _forward(self, parts: Sequence[tuple[Task, int, int]]) -> NDArray[np.float32]:
        backend, (task, count, rows) = self._backend, parts[0]
        if len(parts) == 1 and count == rows < FEW:  # a reply's next token, and guesses at those after it
            slot = task.slot
            tokens = slot.tokens[slot.n_cached : slot.n_cached + count].tolist()

            def evaluate() -> NDArray[np.float32]:
                return backend.extend(tokens, slot.n_cached, slot.sequence)

        else:
            batch = self._batch_of(parts)

            def evaluate() -> NDArray[np.float32]:
                return backend.forward(batch)

        self._meanwhile()  # the callers wake while the backend computes, which frees the interpreter for them
        try:
            return evaluate()
        except DoesNotFitError:
            users, alone = [task.user for task in self.tasks], len(self.tasks) == 1
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

    def _forget_wrong(self, task: Task) -> None:
        """Takes guesses that were not chosen out of the cache."""
        slot = task.slot
        sound = slot.n_tokens - (not task.done)  # the token chosen last is not evaluated yet
        if slot.n_cached > sound:
            self._backend.truncate(slot.sequence, sound)
            slot.n_cached = sound

    def _account(self, parts: Sequence[tuple[Task, int, int]] | None = None) -> None:
        """Counts and learns from the steps since the last time, all of the same replies.

        Between two steps the processor's caches are full of weights, and whatever is touched then is slow.

        parts:  of the latest step, which may have read prompts too
        """
        steps = self._steps
        if not steps:
            return
        counters, running = self._counters, self.tasks
        n_prompt = self._n_single + self._n_wide if parts else 0
        times = list(zip(steps[::2], steps[1::2], strict=True))
        steps.clear()
        disturbed = self._piece is not None  # what a prompt leaves in the processor's caches is not what replies need
        for began, ended in times[:-1] if n_prompt else times:
            if not disturbed:
                self._pace.learn(self._n_replies, 0, 0, 0, ended - began)
            elif self._n_replies:
                self._pace.went_beside(self._n_replies, ended - began)
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
