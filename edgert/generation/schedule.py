"""Who is next, and how much of whose prompt a step reads: the scheduler's rules, apart from the engine's loop."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from edgert.errors import QueueFullError, QueueTimeoutError

if TYPE_CHECKING:
    from edgert.generation.task import Task

AGE = 30.0  # seconds of waiting that are worth a step of priority
DECODE_WEIGHT = 4  # a token of a reply costs about as much as so many of a prompt
REMEMBERED_USERS = 4096  # whose consumption is known although nothing of them is here
SIZES = (4, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)  # tokens of a prompt that a step may read
LONGEST = 0.5  # seconds of a step in which nobody waits for a token, since a cancellation waits for its end
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
        self._n = 0
        self._order = 0
        self._interval = 0.0  # seconds from one start to the next, of late
        self._last_start = 0.0

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Task]:
        return (task for heap in self._heaps.values() for _, _, task in heap if task.waiting)

    def add(self, task: Task) -> None:
        """Puts a new task in. Raises: QueueFullError."""
        if self.limit is not None and self._n >= self.limit:
            raise QueueFullError(self._n, self.retry_after)
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
        self._n += 1

    def drop(self, task: Task) -> None:
        """Forgets a task that waits; what is left of it in the heaps is passed over."""
        if task.waiting:
            task.waiting = False
            self._n -= 1
            self._leave(task)

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
        self._n -= 1
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
        if self._last_start and self._n:
            gap = min(now - self._last_start, 60.0)
            self._interval += 0.2 * (gap - self._interval) if self._interval else gap
        self._last_start = now

    def charge(self, task: Task, n_tokens: int) -> None:
        """Charges a user for tokens of a reply."""
        self._served[task.user] += DECODE_WEIGHT * n_tokens

    @property
    def retry_after(self) -> float:
        """Seconds in which all that wait will have begun, as things go; at least one."""
        return float(min(600, max(1, math.ceil(self._interval * self._n))))


class Pace:
    """How many tokens of prompts a step may read, from what steps have taken.

    most:     the time that a step beside replies may take, as a multiple of what it takes without a prompt
    n_batch:  tokens of a step at most
    """

    def __init__(self, n_batch: int, most: float) -> None:
        self._sizes = [size for size in SIZES if size < n_batch] + [n_batch]
        self._n_batch, self._most = n_batch, most
        self._usual: dict[int, float] = {}  # replies in a step without a prompt -> seconds
        self._extra: dict[int, float] = {}  # tokens of a prompt -> seconds more

    def usual(self, n_replies: int) -> float:
        """Seconds of a step of so many replies and no prompt; 0: not known."""
        known = self._usual
        if n_replies in known or not known:
            return known.get(n_replies, 0.0)
        return known[min(known, key=lambda n: (abs(n - n_replies), n))]

    def allows(self, n_replies: int) -> int:
        """Tokens of prompts that a step of so many replies may read besides them."""
        room = self._n_batch - n_replies
        usual = self.usual(n_replies)
        if n_replies and not usual:
            return min(room, self._sizes[0])
        if not n_replies and not self._extra:
            return room
        seconds = (MARGIN * self._most - 1) * usual if n_replies else LONGEST
        best = self._sizes[0]
        for size in self._sizes[1:]:
            if self.seconds(size) > seconds:
                break
            best = size
        return min(room, best)

    def seconds(self, n_tokens: int) -> float:
        """Seconds that so many tokens of a prompt add to a step, straight between the sizes that are known."""
        known = sorted(self._extra)
        if not known:
            return 0.0 if n_tokens <= self._sizes[min(1, len(self._sizes) - 1)] else math.inf
        i = bisect_left(known, n_tokens)
        if i == len(known):  # twice the largest known is tried, at its rate
            size = known[-1]
            return self._extra[size] * n_tokens / size
        right = known[i]
        left = known[i - 1] if i else 0
        low = self._extra[left] if i else 0.0
        return low + (self._extra[right] - low) * (n_tokens - left) / (right - left)

    def learn(self, n_replies: int, n_prompt: int, seconds: float) -> None:
        """Takes in a step's time; a single one that was held up counts little."""
        if not n_prompt:
            table, key, value = self._usual, n_replies, seconds
        else:
            key = min(self._sizes, key=lambda size: abs(size - n_prompt))
            table = self._extra
            value = max(seconds - self.usual(n_replies), 0.05 * seconds) * key / n_prompt
        old = table.get(key)
        if old is None:
            table[key] = value
        else:
            table[key] = old + (0.05 if not n_prompt else 0.2) * (min(value, 3 * old) - old)


def shared_out(tasks: Sequence[Task], budget: int, window: int = 1, turn: int = 0) -> list[tuple[Task, int]]:
    """How many tokens of each prompt a step reads: users get equal parts, of one user the first comes first.

    window:  positions that the backend computes best together; a part ends with one where it can
    turn:    counts steps, so that another user is first in each where there is not enough for all
    """
    if not tasks or budget <= 0:
        return []
    queues: dict[str, list[Task]] = {}
    for task in tasks:
        queues.setdefault(task.user, []).append(task)
    counts: dict[int, int] = {}
    users = list(queues.values())
    turn %= len(users)
    users = users[turn:] + users[:turn]
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
    parts = []
    for task in tasks:
        count = counts.get(id(task), 0)
        if count and count < task.slot.pending:
            end = task.slot.n_cached + count
            whole = end - end % window
            if whole > task.slot.n_cached:
                count = whole - task.slot.n_cached
        if count:
            parts.append((task, count))
    return parts
