"""What an engine counts and times; the engine's thread writes, any thread reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from edgert.generation.task import Task
    from edgert.reply import Drafts

RING = 1024  # the latest times that percentiles are of


class Ring:
    """The latest numbers, written by one thread and read by any."""

    def __init__(self, size: int = RING) -> None:
        self._values = [0.0] * size
        self._size = size
        self.n = 0  # ever added

    def add(self, value: float) -> None:
        """Adds one; the oldest goes."""
        self._values[self.n % self._size] = value
        self.n += 1

    def values(self) -> NDArray[np.float64]:
        """Those that are kept, in no order."""
        return np.array(self._values[: min(self.n, self._size)])

    def percentiles(self, *percents: float) -> list[float]:
        """Of what is kept; zeros when there is nothing."""
        values = self.values()
        return np.percentile(values, percents).tolist() if len(values) else [0.0] * len(percents)


@dataclass(frozen=True)
class Snapshot:
    """An engine at one moment; counts are since its start, times in seconds, percentiles of the latest 1,024.

    n_waiting, n_running:    requests in the queue and in work
    n_parallel, n_queue:     their bounds; n_queue None: unbounded
    batch_tokens:            tokens of the latest step, batch_sequences: requests in it
    n_steps:                 steps done
    prompt_tokens:           computed; cached_tokens: found in the cache; predicted_tokens: chosen
    draft_tokens, draft_accepted:  guessed, and of them chosen
    started, finished, cancelled, failed, timed_out, refused:  requests; finished are those that ended by themselves
    preempted:               times that a request was set aside and continued later
    prefix_lookups, prefix_hits:   prompts that looked for a cached beginning, and those that found one
    prefix_evictions:        cached beginnings that were forgotten to make room
    prefix_tokens, prefixes:       tokens held for later prompts, and in how many pieces
    kv_bytes, kv_bytes_total:      memory of present tokens, and its bound; 0: the backend does not tell
    retry_after:             when those that wait will have begun, as things go
    *_p50, *_p99:            from a request to its first token; from a token of a reply to its next; of a step
    """

    n_waiting: int
    n_running: int
    n_parallel: int
    n_queue: int | None
    batch_tokens: int
    batch_sequences: int
    n_steps: int
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int
    draft_tokens: int
    draft_accepted: int
    started: int
    finished: int
    cancelled: int
    failed: int
    timed_out: int
    refused: int
    preempted: int
    prefix_lookups: int
    prefix_hits: int
    prefix_evictions: int
    prefix_tokens: int
    prefixes: int
    kv_bytes: int
    kv_bytes_total: int
    retry_after: float
    first_token_p50: float
    first_token_p99: float
    token_p50: float
    token_p99: float
    step_p50: float
    step_p99: float


class Counters:
    """The numbers behind a snapshot, and the rings that percentiles come from."""

    def __init__(self) -> None:
        self.batch_tokens = self.batch_sequences = self.n_steps = 0
        self.prompt_tokens = self.cached_tokens = self.predicted_tokens = 0
        self.draft_tokens = self.draft_accepted = 0
        self.started = self.finished = self.cancelled = self.failed = self.timed_out = self.refused = 0
        self.preempted = 0
        self.first_token = Ring()  # seconds from a request to its first token
        self.token = Ring()  # seconds from a token of a reply to its next
        self.step_time = Ring()  # seconds

    def totals(self) -> dict[str, int]:
        """The counts by name."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, Ring)}

    def ended(self, task: Task) -> None:
        """Takes in a task that is done."""
        name = task.outcome.replace(" ", "_")
        setattr(self, name, getattr(self, name) + 1)

    def drafted(self, drafts: Drafts) -> None:
        """Takes in what was guessed for a reply."""
        self.draft_tokens += sum(drafts.tried)
        self.draft_accepted += sum(drafts.accepted)

    def steps(self, times: Sequence[tuple[float, float]], n_sequences: int, n_tokens: int) -> None:
        """Takes in steps by their begins and ends; the numbers are the last one's."""
        self.n_steps += len(times)
        for began, ended in times:
            self.step_time.add(ended - began)
        self.batch_sequences, self.batch_tokens = n_sequences, n_tokens

    def tokens(self, task: Task, ends: Sequence[float]) -> None:
        """Takes in when steps ended that gave a task its next token."""
        for ended in ends:
            if task.last_token:
                self.token.add(ended - task.last_token)
            else:
                self.first_token.add(ended - task.arrived)
            task.last_token = ended
