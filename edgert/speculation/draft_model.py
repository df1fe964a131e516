"""Guesses from a small model of the same vocabulary."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Backend, Batch, Round, Stakes
from edgert.errors import DoesNotFitError, EdgertError
from edgert.sampler import Sampler

FEW = 64  # tokens, as others have guessed them
REACH = 512  # tokens back that are read when it has fallen behind by more
NEAR = 64  # the same where it guesses for several texts


class Text(NamedTuple):
    """What is guessed for, as `DraftModel.guess` has it."""

    sequence: int
    tokens: NDArray[np.int32]
    n: int
    sampler: Sampler
    stakes: Stakes
    owner: object = None


class DraftModel:
    """A backend that follows the target's sequences, each from some token on.

    What it has read of a long text may begin anywhere: it only has to guess what comes next.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._native: Any = backend if "guess" in backend.capabilities else None
        self.together = "guess together" in backend.capabilities  # whether guesses for several are one walk
        self.checks = "check" in backend.capabilities  # whether it can go on to the target's step
        # Set to 1 by any thread, it has `rounds` end with the present one.
        self.interrupted: memoryview[int] = memoryview(bytearray(8)).cast("q")
        if self.checks:
            draft: Any = backend
            self.interrupted = draft.interrupted
        self.catching_up = 3e-4  # seconds that reading a few tokens takes which it has not seen, lately
        self.reading = 1e-5  # seconds that a token of a longer text takes, lately
        self.read = 0.0  # seconds in which the latest call read what it had missed
        self._read = [np.zeros(backend.n_ctx, np.int32) for _ in range(backend.n_seq_max)]
        self._starts = [0] * backend.n_seq_max
        self._last: list[tuple[object, int, list[int]]] = [(None, 0, [])] * backend.n_seq_max

    def guess(
        self,
        sequence: int,
        tokens: NDArray[np.int32],
        n: int,
        sampler: Sampler,
        stakes: Stakes,
        owner: object = None,
    ) -> NDArray[np.float64]:
        """Writes guesses behind the first n tokens of a sequence; float64, their probabilities.

        owner:  whose text it is: for the same one as in the call before, the tokens of that call are still there

        Raises: EdgertError when it cannot.
        """
        self.read = 0.0
        if self._native and sampler.has_kernel:
            pending = self._pending(sequence, tokens, n, owner)
            chain = sampler.chain_over(self._native.some)
            shares: NDArray[np.float64] = self._native.guess(sequence, pending, chain, tokens, n, stakes)
            self._note(sequence, tokens, n - len(pending), n, owner)
            return shares
        return self._guess_in_turn(sequence, tokens, n, sampler, stakes)

    def guess_together(self, texts: Sequence[Text]) -> list[NDArray[np.float64] | None]:
        """`guess` for several texts, in one walk where the backend can; None for one for which it cannot guess."""
        self.read = 0.0
        if self.together and len(texts) > 1 and all(text.sampler.has_kernel for text in texts):
            asked = {text.sequence for text in texts}
            others = [i for i in range(self.backend.n_seq_max) if i not in asked]
            for victims in (others, asked, ()):
                try:
                    return self._in_one_walk(texts)
                except DoesNotFitError:
                    for victim in victims:  # those not asked for are read again when they are needed, the others now
                        self.backend.free(victim)
        found: list[NDArray[np.float64] | None] = []
        read = self.read
        for text in texts:
            try:
                found.append(self.guess(*text).copy())
                read += self.read
            except EdgertError:  # its memory is full, or its weights are damaged
                found.append(None)
        self.read = read
        return found

    def _in_one_walk(self, texts: Sequence[Text]) -> list[NDArray[np.float64] | None]:
        pending = self._all_pending(texts)
        asked = [
            (text.sequence, left, text.sampler.chain_over(self._native.some), text.tokens, text.n, text.stakes)
            for text, left in zip(texts, pending, strict=True)
        ]
        shares: list[NDArray[np.float64] | None] = self._native.guess_together(asked)
        for text, left in zip(texts, pending, strict=True):
            self._note(text.sequence, text.tokens, text.n - len(left), text.n, text.owner)
        return shares

    def _all_pending(self, texts: Sequence[Text]) -> list[list[int]]:
        """As `_pending` of each text; what it has missed of them is read in common steps."""
        found = [self._followed(text.sequence, text.tokens, text.n, text.owner) for text in texts]
        missed = [text for text, left in zip(texts, found, strict=True) if left is None]
        if missed:
            began = perf_counter()
            n_read = self._read_together(missed)
            self.read = perf_counter() - began
            if n_read > FEW:
                self._learn_reading(self.read / n_read)
        for text in texts:
            self._last[text.sequence] = None, 0, []
        return [
            text.tokens[self._starts[text.sequence] + self.backend.length(text.sequence) : text.n].tolist()
            if left is None
            else left
            for text, left in zip(texts, found, strict=True)
        ]

    def _read_together(self, texts: Sequence[Text]) -> int:
        """Reads all but the one or two last tokens of texts; returns how many it has read.

        Raises: DoesNotFitError.
        """
        backend = self.backend
        left, n_read = [(text, self._begin(text.sequence, text.tokens, text.n, NEAR)) for text in texts], 0
        while left := [(text, read) for text, read in left if text.n - read > 2]:
            parts, room = list[tuple[Text, int, int]](), backend.n_batch
            for text, read in left:
                count = min(text.n - 1 - read, room)
                if count:
                    parts.append((text, read, count))
                room -= count
            tokens = np.concatenate([text.tokens[read : read + count] for text, read, count in parts])
            sequences = np.repeat([text.sequence for text, _, _ in parts], [count for _, _, count in parts])
            positions = np.concatenate(
                [np.arange(read, read + count) - self._starts[text.sequence] for text, read, count in parts]
            )
            backend.forward(
                Batch(tokens, sequences.astype(np.int32), positions.astype(np.int32), np.zeros(len(tokens), np.bool_))
            )
            n_read += len(tokens)
            done = {text.sequence: count for text, _, count in parts}
            left = [(text, read + done.get(text.sequence, 0)) for text, read in left]
        return n_read

    def rounds(
        self,
        sequence: int,
        tokens: NDArray[np.int32],
        n: int,
        sampler: Sampler,
        stakes: Stakes,
        owner: object,
        most_rounds: int,
        reach: int,
    ) -> list[Round] | None:
        """`guess`, then the target's step that checks as many guesses as pay, and the choice of tokens; then the same
        for the text with these, up to so many times.

        reach:    tokens that may be guessed behind the first n in all rounds together
        returns:  None where only `guess` will do

        Raises: as `guess`.
        """
        if not self.checks or sampler.chain is None:
            return None
        pending, chain = self._pending(sequence, tokens, n, owner), sampler.chain_over(self._native.some)
        found: list[Round] | None = self._native.rounds(
            sequence, pending, chain, tokens, n, stakes, sampler.chain, most_rounds, reach
        )
        if found is not None:
            self._note(sequence, tokens, n - len(pending), None, owner)
        return found

    def behind(self, sequence: int, n: int, owner: object, reach: int = REACH) -> float:
        """Seconds, about, until it has read what it has missed of an owner's n tokens, at most `reach` of them."""
        last, before, _ = self._last[sequence]
        missed = min(n if last is not owner else n - before, reach)
        return missed * self.reading if missed > FEW else 0.0

    @property
    def times(self) -> list[tuple[float, float]]:
        """Seconds that guessing and checking took in each of the latest `rounds`."""
        times: list[tuple[float, float]] = self._native.times
        return times

    def _pending(self, sequence: int, tokens: NDArray[np.int32], n: int, owner: object) -> list[int]:
        """The one or two last of n tokens; all before them it has read."""
        pending = self._followed(sequence, tokens, n, owner)
        if pending is None:
            behind, began = n - self._starts[sequence] - self.backend.length(sequence), perf_counter()
            pending = self._catch_up(sequence, tokens, n, 2).tolist()
            spent = perf_counter() - began
            if 2 < behind <= FEW:
                self.catching_up += 0.1 * (min(spent, 2 * self.catching_up) - self.catching_up)
            elif behind > FEW:
                self._learn_reading(spent / min(behind, REACH))
        self._last[sequence] = None, 0, []
        return pending

    def _learn_reading(self, seconds: float) -> None:
        """Takes in what a token of a longer text has taken."""
        self.reading += 0.3 * (min(seconds, 3 * self.reading) - self.reading)

    def _note(self, sequence: int, tokens: NDArray[np.int32], first: int, sure: int | None, owner: object) -> None:
        """Remembers what has been read, from token `first` on; up to `sure` it is no mere guess (None: all of it)."""
        start = self._starts[sequence]
        end = start + self.backend.length(sequence)
        self._read[sequence][first - start : end - start] = tokens[first:end]
        sure = end if sure is None else sure
        self._last[sequence] = owner, sure, tokens[sure:end].tolist()

    def _followed(self, sequence: int, tokens: NDArray[np.int32], n: int, owner: object) -> list[int] | None:
        """What is left to read of the first n tokens after what the owner had read; None: look at all of them."""
        last, before, read = self._last[sequence]
        held = before - self._starts[sequence] + len(read)
        if owner is None or last is not owner or held != self.backend.length(sequence) or n <= before:
            return None
        if n - self._starts[sequence] >= self.backend.n_ctx:  # its context may be shorter than the target's
            return None
        new, same = tokens[before:n].tolist(), 0
        while same < min(len(read), len(new) - 1) and read[same] == new[same]:
            same += 1
        if len(new) - same > 2:
            return None
        if same < len(read):
            self.backend.truncate(sequence, held - len(read) + same)
        return new[same:]

    def _guess_in_turn(
        self, sequence: int, tokens: NDArray[np.int32], n: int, sampler: Sampler, stakes: Stakes
    ) -> NDArray[np.float64]:
        """The same, one call of the backend for each token."""
        token, likely, shares = int(self._catch_up(sequence, tokens, n, 1)[0]), 1.0, list[float]()
        most = min(stakes.most, self.backend.n_ctx - self.backend.length(sequence))
        while True:
            row = self._step(sequence, token)
            token, share = sampler.guess(row, tokens, n + len(shares))
            if share < stakes.p_min:
                break
            tokens[n + len(shares)] = token
            shares.append(share)
            likely *= stakes.odds[bisect_right(stakes.sure, share)]
            if len(shares) >= most or likely < stakes.ease * stakes.floors[len(shares)] or token in stakes.ends:
                break
        return np.array(shares)

    def _catch_up(self, sequence: int, tokens: NDArray[np.int32], n: int, rest: int) -> NDArray[np.int32]:
        """Reads what it has not read of the first n tokens, but for the last ones: those, 1 to `rest`."""
        backend, began = self.backend, perf_counter()
        same = self._begin(sequence, tokens, n, REACH)
        start = self._starts[sequence]
        same -= start
        missed = n - start - same
        while start + same < n - rest:
            count = min(backend.n_batch, n - 1 - start - same)
            try:
                backend.forward(Batch.of(tokens[start + same : start + same + count].tolist(), same, sequence, "none"))
            except DoesNotFitError:
                others = [i for i in range(backend.n_seq_max) if i != sequence and backend.length(i)]
                if not others:
                    raise
                for other in others:  # they are read again when they are needed
                    backend.free(other)
                continue
            same += count
        self.read = perf_counter() - began if missed > 2 else 0.0
        return tokens[start + same : n].copy()

    def _begin(self, sequence: int, tokens: NDArray[np.int32], n: int, reach: int) -> int:
        """Forgets what is none of the first n tokens; up to which one it has read them. Where more than `reach` are
        missing it starts anew so far back."""
        backend, read, start = self.backend, self._read[sequence], self._starts[sequence]
        held = backend.length(sequence)
        same = max(0, min(held, n - 1 - start))
        if same and not np.array_equal(read[:same], tokens[start : start + same]):
            same = int((read[:same] != tokens[start : start + same]).argmax())
        reach = min(reach, backend.n_ctx // 2)
        if not same or n - start - same > reach or n - start >= backend.n_ctx:
            start = self._starts[sequence] = 0 if n <= reach else n - reach
            same = 0
        if same < held:
            backend.truncate(sequence, same)
        read[same : n - start] = tokens[start + same : n]
        return start + same

    def _step(self, sequence: int, token: int) -> NDArray[np.float32]:
        """Reads one token more: float32 (n_vocab,)."""
        self._read[sequence][self.backend.length(sequence)] = token
        return self.backend.step(token, sequence)
