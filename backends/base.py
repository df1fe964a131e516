"""The waist: token ids of several sequences go in, logits come out. Everything above speaks only this."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert.errors import SessionError
from edgert.quantize.engine import Expert, sums_of_squares

RESTED = 5.0  # seconds for which memory that is not in use is held, since fresh memory is slow to get on some hosts
HEADS = frozenset({"output.weight", "token_embd.weight"})  # the matrix that makes logits, by its names

# Called with the names of the tensors that a product multiplies, its input, float32 (n_tokens, n_cols), and of
# experts alone which of them reads it.
OnInput = Callable[..., object]
OnSquares = Callable[..., object]  # the same, with the sums of the squares of so many inputs in their place


@dataclass(frozen=True)
class Batch:
    """The tokens of one forward step; a prefill chunk, a decode step and a speculative check are all this.

    Tokens of one sequence stand in the order of their positions, and their first position is the
    sequence's present length.

    tokens:     int32 (n,), vocabulary ids
    sequences:  int32 (n,), which sequence each token belongs to
    positions:  int32 (n,), 0-based place in its sequence
    wanted:     bool (n,), whether the logits after this token are returned
    """

    tokens: NDArray[np.int32]
    sequences: NDArray[np.int32]
    positions: NDArray[np.int32]
    wanted: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, tokens: Sequence[int], position: int, sequence: int = 0, wanted: str = "last") -> Batch:
        """A run of tokens of one sequence that starts at `position`; wanted is "last", "all" or "none"."""
        n = len(tokens)
        mask = np.full(n, wanted == "all")
        if wanted == "last" and n:
            mask[-1] = True
        return cls(
            np.asarray(tokens, np.int32),
            np.full(n, sequence, np.int32),
            np.arange(position, position + n, dtype=np.int32),
            mask,
        )

    def whole(self, size: int) -> Iterator[tuple[slice, Batch]]:
        """Parts of so many tokens, all of them wanted, each with its place in the batch."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            wanted = np.ones_like(self.wanted[part])
            yield part, Batch(self.tokens[part], self.sequences[part], self.positions[part], wanted)


def of_wanted(on_input: OnInput, wanted: NDArray[np.bool_]) -> OnInput:
    """What `observe` tells of a step in which all tokens were wanted: the head's input is that of these alone."""

    def see(names: tuple[str, ...], rows: NDArray[np.float32], *expert: Expert) -> None:
        if HEADS.isdisjoint(names):
            on_input(names, rows, *expert)
        elif wanted.any():
            on_input(names, rows[wanted], *expert)

    return see


@dataclass
class Stakes:
    """When a draft's guessing is to end.

    most:    guesses; floors: float64 (most + 1,), the least chance that all of so many guesses are right for it to
             go on
    p_min:   the least probability of a guess
    sure:    float64 (n,), ascending bounds between classes of probabilities; odds: float64 (n + 1,), how often
             guesses of each class are right
    ends:    int64, tokens after which nothing is guessed
    extra:   float64 (most + 1,), how many tokens the time of checking so many guesses would give otherwise
    unknown: int64 (most + 1,), whether that is a mere belief
    further: how many guesses are checked beyond those that pay (if none pays, none; with ease 0 so many); ease: what
             the floors are multiplied by. Both of the first round of several.
    repeated: of several rounds the last one is that after which so many of the last tokens stand somewhere before; 0:
             that ends none
    """

    most: int
    floors: NDArray[np.float64]
    p_min: float
    sure: NDArray[np.float64]
    odds: NDArray[np.float64]
    ends: NDArray[np.int64]
    extra: NDArray[np.float64]
    unknown: NDArray[np.int64]
    further: int = 0
    ease: float = 1.0
    repeated: int = 0


class Round(NamedTuple):
    """What became of a draft's guesses that were checked in the walk in which they were made.

    shares:   float64, the guesses' probabilities; valid until the next call
    checked:  how many of the guesses were checked
    chosen:   the tokens chosen, none where nothing can be: guesses that were right, and one more
    """

    shares: NDArray[np.float64]
    checked: int
    chosen: list[int]


@dataclass(frozen=True)
class Trial:
    """What became of a backend that was tried for a model.

    obstacle:          why it is not used, "" for one that could be
    prefill, decode:   tokens per second, None where it did not come to that
    same_top, kl:      beside the cpu backend on the same text: share of steps with the same likeliest token, and mean
                       KL divergence of the probabilities; None for the cpu backend itself
    """

    backend: str
    device: str = ""
    obstacle: str = ""
    prefill: float | None = None
    decode: float | None = None
    same_top: float | None = None
    kl: float | None = None

    def __str__(self) -> str:
        name = f"{self.backend} on {self.device}" if self.device else self.backend
        parts = [f"not used: {self.obstacle}"] if self.obstacle else []
        if self.prefill and self.decode:
            parts.append(f"prefill {self.prefill:,.0f} tok/s, decode {self.decode:,.1f} tok/s")
        if self.kl is not None and self.same_top is not None and not self.obstacle:
            parts.append(f"same top token as the cpu backend in {100 * self.same_top:.0f} %, mean KL {self.kl:.2g}")
        return f"{name}: {'; '.join(parts)}"


@dataclass(frozen=True)
class Verdict:
    """Which backend runs the model and why; trials are what `auto` considered, in its order."""

    requested: str
    backend: str
    device: str
    reason: str
    details: dict[str, str] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()

    def __str__(self) -> str:
        return f"{self.backend} on {self.device}: {self.reason}"


FILLING = 512  # tokens of a step that only fills a sequence
REPEATED = 64  # tokens that are read where what is cached can be repeated


class Backend(ABC):
    """A loaded model. One thread at a time may call its methods; the caller serialises."""

    n_vocab: int
    n_ctx: int  # positions that one sequence may have
    n_batch: int  # most tokens that one forward takes
    n_seq_max: int
    n_cached: int = 0  # positions that all sequences together may have; 0: n_ctx for each
    n_window: int = 1  # positions that are computed best together, from a multiple of it on
    rounds_windows: bool = False  # whether whole windows are rounded otherwise than their positions one by one
    shares_pages: bool = True  # whether forks share memory, and idle sequences take no more than their positions
    settling: int = 1  # steps of one size, after some of another, until one takes as long as those that follow
    pauses: bool = False  # whether `in_parts` comes back before a step is done
    fingerprint: str = ""  # of the model and of how it is cached, where the backend knows it
    capabilities: frozenset[str]
    verdict: Verdict

    @abstractmethod
    def forward(self, batch: Batch) -> NDArray[np.float32]:
        """Runs one step: float32 (number of wanted tokens, n_vocab), valid until the next call.

        Raises: ValueError for ids, positions or sequences out of range; DoesNotFitError when the cache is full.
        """

    def observe(self, batch: Batch, on_input: OnInput) -> None:
        """Runs one step for what its matrix products read; needs the capability "observe". No logits are computed.

        on_input sees every token of the batch once for each tensor, of experts for each that the token goes to, and
        for the head the tokens whose logits are
        wanted; a large batch may come in several calls, tokens of one sequence in their order. The tensors of a
        call share their input. The array is valid until on_input returns.

        Raises: as forward.
        """
        raise NotImplementedError

    def squares(self, batch: Batch, on_squares: OnSquares) -> None:
        """As observe, for who wants no more than the sums of the squares of what products read, column by column.

        Raises: as forward.
        """

        def see(names: tuple[str, ...], rows: NDArray[np.float32], *expert: Expert) -> None:
            on_squares(names, sums_of_squares(rows), len(rows), *expert)

        self.observe(batch, see)

    def states(self, batch: Batch) -> NDArray[np.float32]:
        """Runs one step for what the head reads after each token, float32 (n, n_embd); needs the capability "states".

        Raises: as forward.
        """
        found: list[NDArray[np.float32]] = []

        def see(names: tuple[str, ...], rows: NDArray[np.float32], _expert: Expert | None = None) -> None:
            if HEADS.intersection(names):
                found.append(rows.copy())

        self.observe(replace(batch, wanted=np.ones(len(batch), np.bool_)), see)
        return np.concatenate(found)

    def replace(self, name: str, values: NDArray[np.float32], first: int = 0) -> None:
        """Gives rows of a matrix other values, for the next step on; needs the capability "replace".

        values:  float32 (n, n_cols), rounded to the type that holds the matrix
        first:   their first row, a multiple of 64

        Raises: ValueError for a name or shape that the model lacks; UnsupportedFormatError when the matrix is held
        in a quantized type, or the type cannot hold the values.
        """
        raise NotImplementedError

    def in_parts(self, batch: Batch) -> Callable[[float], NDArray[np.float32] | None]:
        """A step that goes on for about as many seconds as it is called with: None until it is done, then the logits.

        Between the calls other sequences may take steps, but for those of the batch, which may only be forgotten: then
        it is not called any more.

        Raises: as `forward`, at the first call.
        """
        return lambda seconds: self.forward(batch)

    def extend(self, tokens: Sequence[int], position: int, sequence: int) -> NDArray[np.float32]:
        """Some tokens more of one sequence: float32 (n, n_vocab), as `forward` gives them. Raises: as `forward`."""
        return self.forward(Batch.of(tokens, position, sequence, "all"))

    def rows_of(self, n_tokens: int) -> int:
        """Rows that a step of one sequence has for so many tokens: some may be nobody's."""
        return n_tokens

    @property
    def settled(self) -> bool:
        """Whether the latest step of one sequence took as long as others of its size will that follow it."""
        return True

    def step(self, token: int, sequence: int) -> NDArray[np.float32]:
        """One token more of a sequence: float32 (n_vocab,), valid until the next call. Raises: as `forward`."""
        logits: NDArray[np.float32] = self.extend([token], self.length(sequence), sequence)[0]
        return logits

    def prepare(self, n_tokens: int) -> None:  # noqa: B027
        """Makes ready for steps of up to so many tokens at once, if that takes time."""

    def fill(self, sequence: int, length: int) -> None:
        """Makes a sequence so long, by whatever tokens: for who measures what comes behind them."""
        while (start := self.length(sequence)) < length:
            n = min(self.n_batch, FILLING, length - start)
            tokens = [(7 * (start + i)) % self.n_vocab for i in range(n)]
            self.forward(Batch.of(tokens, start, sequence, "none"))

    @abstractmethod
    def length(self, sequence: int) -> int:
        """How many positions of the sequence are cached."""

    @abstractmethod
    def fork(self, source: int, target: int, length: int) -> None:
        """Makes the (empty) target sequence share the first `length` positions of the source."""

    @abstractmethod
    def truncate(self, sequence: int, length: int) -> None:
        """Forgets all positions from `length` on."""

    def reachable(self, sequence: int, length: int) -> int:
        """The most of the first `length` positions that `truncate` and `fork` can go on from.

        Less than `length` where layers with a window have forgotten what precedes it.
        """
        return length

    def free(self, sequence: int) -> None:
        """Forgets the sequence."""
        self.truncate(sequence, 0)

    def rest(self, sequence: int) -> None:  # noqa: B027
        """Holds as little memory for the sequence as can be once `give_back` is called, until it is used again."""

    def give_back(self, seconds: float = 0.0) -> float:
        """Gives back memory that has not been in use for so long; how long until there will be more (inf: nothing)."""
        return math.inf

    def free_positions(self) -> int:
        """By how many positions sequences may still grow, all together; too few where shared ones count twice."""
        total = self.n_cached or self.n_ctx * self.n_seq_max
        return max(0, total - sum(self.length(sequence) for sequence in range(self.n_seq_max)))

    def save(self, sequence: int, length: int) -> tuple[dict[str, Any], list[NDArray[np.uint8]]]:
        """Copies of what is cached of the first `length` positions, and what JSON can hold about it.

        With the capability "session".
        """
        raise SessionError("This backend cannot save what it has cached.")

    def check_saved(self, facts: Mapping[str, Any], n_tokens: int, n_bytes: int) -> None:
        """Raises: SessionError unless `restore` can take what `save` gave."""
        raise SessionError("This backend cannot restore a saved cache.")

    def restore(self, sequence: int, facts: Mapping[str, Any], data: NDArray[np.uint8]) -> None:
        """Fills an empty sequence with what `save` gave, its pieces joined and checked by `check_saved`.

        Raises: DoesNotFitError when the cache is full.
        """
        raise SessionError("This backend cannot restore a saved cache.")

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes held, by purpose: weights, kv (reserved for present tokens), buffers; and kv_per_token."""

    @abstractmethod
    def close(self) -> None:
        """Gives back threads and memory; further calls raise ValueError."""
