"""Who is next, and how much of whose prompt a step reads: the scheduler's rules, apart from the engine's loop."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from edgert.errors import QueueFullError, QueueTimeoutError

if TYPE_CHECKING:
    from edgert.generation.task import Task

AGE = 30.0  # seconds of waiting that are worth a step of priority
DECODE_WEIGHT = 4  # a token of a reply costs about as much as so many of a prompt
REMEMBERED_USERS = 4096  # whose consumption is known although nothing of them is here
FIRST = 8  # tokens of a prompt that a step reads beside replies as long as nothing is known
DEARER = 3.0  # a token outside whole windows, as long as nothing is known
LONGEST = 0.5  # seconds of a step in which nobody waits for a token, since a cancellation waits for its end
LEAST = 64  # tokens that it reads all the same: by fewer a prompt would be read as slowly as a reply is written
EVEN = 0.01  # seconds that reading takes between two steps at least: beside less, what holds up a thread stands out
UNMINDED = 0.04  # seconds of a step, where several prompts are read
BURST = 0.5  # seconds for which replies may go at that pace, so that prompts which come together soon reply together
MARGIN = 0.8  # of the time that a step may take, because times scatter


class Queue:
    """Tasks that wait, bounded, fair among users.

    Whose turn it is: the user who has had the fewest tokens; one who comes back counts from just before the least
    served of those present. Of one user the oldest is first. A priority goes before that, and waiting raises it, up to
    the highest that waits. Source: the virtual token counter of Sheng et al., "Fairness in Serving LLMs" (2024).

    All methods but `__len__` are called with the engine's lock held or by its thread alone.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._heaps: dict[str, list[tuple[float, int, Task]]] = {}
        self._timed: list[tuple[float, int, Task]] = []  # those that may not wait forever
        self._served: dict[str, float] = {}
        self._active: Counter[str] = Counter()  # tasks of each user that wait or run
        self.n = 0  # tasks in it; a plain number, because it is looked at in every step
        self._order = 0
        self._interval = 0.0  # seconds from one start to the next, of late
        self._last_start = 0.0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Task]:
        return (task for heap in self._heaps.values() for _, _, task in heap if task.waiting)

    def add(self, task: Task, free: int = 0) -> None:
        """Puts a new task in; so many places are free, for which one need not wait. Raises: QueueFullError."""
        if self.limit is not None and self.n >= self.limit + free:
            raise QueueFullError(self.n, self.retry_after)
        user = task.user
        if not self._active[user]:
            present = [self._served[other] for other, n in self._active.items() if n and other in self._served]
            served = self._served.pop(user, 0.0)
            self._served[user] = max(served, min(present, default=served) - 1)  # less by a token: he is next
        self._active[user] += 1
        self._order += 1
        task.order = self._order
        self._push(task)

    def put_back(self, task: Task) -> None:
        """Lets a task that had begun, or could not, wait in its old place."""
        self._push(task)

    def _push(self, task: Task) -> None:
        task.waiting = True
        heap = self._heaps.setdefault(task.user, [])
        heapq.heappush(heap, (task.arrived - AGE * task.priority, task.order, task))
        end = task.end if task.begun else task.queue_end
        if end < math.inf:
            heapq.heappush(self._timed, (end, task.order, task))
            self._clean()
        self.n += 1

    def drop(self, task: Task) -> None:
        """Forgets a task that waits; what is left of it in the heaps is passed over."""
        if task.waiting:
            task.waiting = False
            self.n -= 1
            self._leave(task)
            self._clean()

    def _clean(self) -> None:
        """Lets go of tasks that wait no more, once they are the greater part of a heap."""
        if len(self._timed) > 2 * self.n + 64:
            self._timed = [entry for entry in self._timed if entry[2].waiting]
            heapq.heapify(self._timed)
        if sum(map(len, self._heaps.values())) > 2 * self.n + 64:
            for user, heap in list(self._heaps.items()):
                if heap := [entry for entry in heap if entry[2].waiting]:
                    heapq.heapify(heap)
                    self._heaps[user] = heap
                else:
                    del self._heaps[user]

    def ended(self, task: Task) -> None:
        """Says that a task which had been taken is done."""
        self._leave(task)

    def _leave(self, task: Task) -> None:
        self._active[task.user] -= 1
        if not self._active[task.user]:
            del self._active[task.user]
            if len(self._served) > REMEMBERED_USERS:
                oldest = next((user for user in self._served if user not in self._active), None)
                if oldest is not None:
                    del self._served[oldest]

    def take(self, now: float) -> Task | None:
        """The task whose turn it is, taken out; None: nobody waits."""
        heads = []
        for user in list(self._heaps):
            heap = self._heaps[user]
            while heap and not heap[0][2].waiting:
                heapq.heappop(heap)
            if heap:
                heads.append(heap[0])
            else:
                del self._heaps[user]
        if not heads:
            return None
        if len(heads) == 1:
            best = heads[0]
        else:
            top = max(task.priority for _, _, task in heads)

            def turn(head: tuple[float, int, Task]) -> tuple[float, float, int]:
                _, order, task = head
                aged = task.priority + int((now - task.arrived) / AGE)
                return -min(top, aged), self._served[task.user], order

            best = min(heads, key=turn)
        task = best[2]
        heapq.heappop(self._heaps[task.user])
        task.waiting = False
        self.n -= 1
        return task

    def overdue(self, now: float) -> list[Task]:
        """Those that have waited too long, dropped."""
        late = []
        while self._timed and (self._timed[0][0] <= now or not self._timed[0][2].waiting):
            _, _, task = heapq.heappop(self._timed)
            if task.waiting and now >= (task.end if task.begun else task.queue_end):
                self.drop(task)
                late.append(task)
        return late

    def too_late(self, task: Task, now: float) -> QueueTimeoutError:
        """What such a task ends with."""
        return QueueTimeoutError(now - task.arrived, self.retry_after)

    def waiting_users(self) -> list[tuple[str, float]]:
        """Each user of whom something waits, and since when his oldest does."""
        since: dict[str, float] = {}
        for task in self:
            since[task.user] = min(task.arrived, since.get(task.user, math.inf))
        return list(since.items())

    def started(self, task: Task, n_tokens: int, now: float) -> None:
        """Charges a user for the part of a prompt that will be read, and measures how fast tasks begin."""
        self._served[task.user] += n_tokens
        if self._last_start and self.n:
            gap = min(now - self._last_start, 60.0)
            self._interval += 0.2 * (gap - self._interval) if self._interval else gap
        self._last_start = now

    def charge(self, task: Task, n_tokens: int) -> None:
        """Charges a user for tokens of a reply."""
        self._served[task.user] += DECODE_WEIGHT * n_tokens

    @property
    def retry_after(self) -> float:
        """Seconds in which all that wait will have begun, as things go; at least one."""
        return float(min(600, max(1, math.ceil(self._interval * self.n))))


class Line:
    """y = a + b x, of the latest points; neither a nor b is negative."""

    def __init__(self, memory: float = 0.95) -> None:
        self._memory = memory
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._slope = 0.0

    @property
    def known(self) -> bool:
        """Whether there was any point."""
        return self._n > 0

    def add(self, x: float, y: float) -> None:
        """Takes in a point; one that lies far above what was expected counts little."""
        if self.known:
            y = min(y, 3 * self(x) + 1e-9)
        m = self._memory
        self._n, self._x, self._y = m * self._n + 1, m * self._x + x, m * self._y + y
        self._xx, self._xy = m * self._xx + x * x, m * self._xy + x * y
        spread = self._xx - self._x * self._x / self._n
        if spread > 100.0 * self._n:  # else the slope stays what it was
            self._slope = max(0.0, (self._xy - self._x * self._y / self._n) / spread)

    def __call__(self, x: float) -> float:
        mean_x, mean_y = self._x / self._n, self._y / self._n
        slope = min(self._slope, mean_y / mean_x) if mean_x else self._slope
        return max(1e-9, mean_y + slope * (x - mean_x))


class Pace:
    """How many tokens of prompts a step may read, from what steps have taken.

    Replies that run may wait up to `stall` times as long as without a prompt, or `comfort`, if that is longer. Tokens
    that fill a window of the backend are computed for a fraction of what single ones take, and as they are alone: so
    they are read by whole windows, unless one takes far more than that time.

    Several short prompts at once are a burst: steps of few replies would go by while each of them is read, and all
    would be done later. So replies wait for them as long as nobody minds, for half a second in all.

    n_batch, window:  tokens of a step at most, and positions that the backend computes best together
    stall, comfort:   a multiple of the usual time, and seconds
    """

    def __init__(self, n_batch: int, window: int, stall: float, comfort: float) -> None:
        self._n_batch, self._window = n_batch, window
        self._stall, self._comfort = stall, comfort
        self._usual: dict[int, float] = {}  # replies in a step without a prompt -> seconds
        self._beside: dict[int, float] = {}  # the same where pieces of prompts are read between steps
        self._piece = 0.0  # seconds of a token in such a piece, of late; 0: none was read
        self._single, self._wide = Line(), Line()  # positions before it -> seconds of a token, alone or in a window

    def usual(self, n_replies: int) -> float:
        """Seconds of a step of so many replies and no prompt; 0: not known."""
        known, beside = self._usual, self._beside
        if n_replies in known or not n_replies:
            return known.get(n_replies, 0.0)
        if not known:
            return beside.get(n_replies, 0.0)
        nearest = min(known, key=lambda n: (abs(n - n_replies), n))
        if n_replies in beside and nearest in beside:
            return known[nearest] * beside[n_replies] / beside[nearest]
        return max(known[nearest], beside.get(n_replies, 0.0)) if n_replies > nearest else known[nearest]

    def crowd(self, n_readers: int, n_left: float) -> bool:
        """Whether so many prompts with so many tokens left are several short ones, which are soon read."""
        return n_readers > 1 and 0 < self._piece * n_left <= BURST

    def seconds(self, n_replies: int, n_readers: int = 1, spent: float = 0.0, n_left: float = math.inf) -> float:
        """That reading may take in a step of so many replies: as much for each prompt, as long as nobody minds.

        spent:   seconds that the replies of this step took, if that is known
        n_left:  tokens of all prompts that are not read yet
        """
        if not n_replies:
            return LONGEST
        usual = self.usual(n_replies)
        part = MARGIN * self._stall * usual - max(usual, spent)
        together = UNMINDED if self.crowd(n_readers, n_left) else min(part * n_readers, UNMINDED)
        return max(part, self._comfort, together)

    def allows(self, n_replies: int, depth: int, n_readers: int = 1) -> tuple[int, int]:
        """Tokens of prompts that a step of so many replies may read, and how many of them outside whole windows.

        depth:  positions before them
        """
        room, window = self._n_batch - n_replies, self._window
        seconds = self.seconds(n_replies, n_readers)
        wide = self._wide(depth) if self._wide.known else None
        single = self._single(depth) if self._single.known else wide and DEARER * wide
        if single is None and not n_replies:
            return room, room
        singles = min(room, max(1, int(seconds / single)) if single else FIRST)
        if window == 1 or room < window:
            least = 0 if n_replies else min(room, LEAST)
            return max(singles, least), max(singles, least)
        if wide is None:  # never tried
            return window, singles
        longest = max(seconds, (6 if single and single > 2 * wide else 2) * self._comfort)
        if wide * window > longest:
            return singles, singles
        return min(room // window, max(1, int(seconds / (wide * window)))) * window, singles

    def went_beside(self, n_replies: int, seconds: float) -> None:
        """Takes in the time of a step of replies between which a prompt is read."""
        usual = self._beside.get(n_replies)
        self._beside[n_replies] = usual + 0.2 * (min(seconds, 3 * usual) - usual) if usual else seconds

    def read(self, n_tokens: int, seconds: float) -> None:
        """Takes in the time of a piece of a prompt that was read between steps."""
        cost = seconds / n_tokens
        self._piece += 0.2 * (min(cost, 3 * self._piece) - self._piece) if self._piece else cost

    def learn(self, n_replies: int, n_single: int, n_wide: int, depth: int, seconds: float) -> None:
        """Takes in a step's time: its replies, and of its prompts' tokens those in whole windows and the others."""
        if not (n_single or n_wide):
            known = self._usual.get(n_replies)
            self._usual[n_replies] = known + 0.05 * (min(seconds, 3 * known) - known) if known else seconds
            return
        usual = self.usual(n_replies)
        extra = max(seconds - usual, 0.05 * seconds)
        if not n_wide:
            self._single.add(depth, extra / n_single)
        elif not self._single.known:
            self._wide.add(depth, extra / (n_wide + DEARER * n_single))
        else:
            self._wide.add(depth, max(extra - n_single * self._single(depth), 0.2 * extra) / n_wide)


def wide_part(start: int, count: int, window: int) -> int:
    """How many of `count` positions from `start` on lie in whole windows."""
    if window == 1:
        return 0
    return max(0, (start + count) // window - -(-start // window)) * window


def shared_out(
    tasks: Sequence[Task], budget: int, singles: int | None = None, window: int = 1, turn: int = 0
) -> list[tuple[Task, int]]:
    """How many tokens of each prompt a step reads: users get equal parts, of one user the first comes first.

    singles:  how many of the budget may be outside whole windows; None: all
    window:   positions that the backend computes best together; a part ends with one where it can
    turn:     counts steps, so that another user is first in each where there is not enough for all
    """
    if not tasks or budget <= 0:
        return []
    singles = budget if singles is None else singles
    untorn = budget >= window > 1  # what fills a window waits until all of it has room
    queues: dict[str, list[Task]] = {}
    for task in tasks:
        queues.setdefault(task.user, []).append(task)
    counts: dict[int, int] = {}
    users = list(queues.values())
    turn %= len(users)
    users = order = users[turn:] + users[:turn]
    while users and budget > 0:
        part = max(budget // len(users), min(budget, window))
        still = []
        for queue in users:
            left = min(part, budget)
            for task in queue:
                taken = counts.get(id(task), 0)
                count = min(task.slot.pending - taken, left)
                if count > 0:
                    counts[id(task)] = taken + count
                    left -= count
                    budget -= count
            if any(task.slot.pending > counts.get(id(task), 0) for task in queue):
                still.append(queue)
        users = still
    parts: list[tuple[Task, int]] = []
    for queue in order:
        for task in queue:
            count, start = counts.get(id(task), 0), task.slot.n_cached
            if count and count < task.slot.pending:
                whole = (start + count) // window * window - start
                if whole > 0 or (untorn and start % window == 0):
                    count = max(whole, 0)
            wide = wide_part(start, count, window)
            if count - wide > singles:  # no more than allowed, and first what comes first
                before = -start % window
                count = before + wide if wide and before <= singles else min(count, singles)
            singles -= count - wide_part(start, count, window)
            if count > 0:
                parts.append((task, count))
    if not parts:
        parts.append((tasks[0], 1))
    return parts
