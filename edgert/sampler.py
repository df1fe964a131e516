"""Chooses the next token from a row of logits."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgert.errors import EdgertError, RequestError
from edgert.options import Bias, SamplingParams

if TYPE_CHECKING:
    from edgert.backends.cpu.sampling import Chain, SampleKernel, Some


class Sampler:
    """The chain of llama.cpp: bias, penalties, top-k, top-p, min-p, temperature, draw.

    It keeps no state between tokens: a draw depends on the seed and on the length of the history alone, so
    neither other requests nor a step taken back change it. The draw is a race of the kept tokens, each with a
    random time of its own, so that two models that think alike choose alike under one seed: a draft model's
    draw is then the likeliest guess of its target's. With a kernel `sample` takes the fast way to what
    `distribution` says in NumPy.

    Source: Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant speculative decoding" (2024).

    Raises: RequestError for a bias on an id outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        banned: Iterable[int] = (),
        kernel: SampleKernel | None = None,
    ) -> None:
        self.params = params
        self.n_vocab = n_vocab
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        bias = Bias.of(params.logit_bias)
        if forbidden := dict.fromkeys(banned, -math.inf):
            bias = Bias({**bias, **forbidden})
        if outside := next((token for token in bias if not 0 <= token < n_vocab), None):
            raise RequestError("logit_bias", f"token {outside} is outside the vocabulary of {n_vocab}")
        self._bias_ids, self._bias = bias.arrays
        self._penalised = bool(params.repeat_last_n) and (
            params.repeat_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self._kernel = kernel
        self._chain: Chain | None = self._bound(kernel, None) if kernel else None
        self._draft_chain: Chain | None = None

    def _bound(self, kernel: SampleKernel, some: Some | None) -> Chain:
        params = self.params
        return kernel.bind(
            self.n_vocab,
            seed=self.seed,
            n_last=params.repeat_last_n if self._penalised else 0,
            bias_ids=self._bias_ids,
            bias=self._bias.astype(np.float64),
            some=some,
            top_k=params.top_k,
            temperature=params.temperature,
            top_p=params.top_p,
            log_min_p=_log(params.min_p),
            log_rest=math.log(self.n_vocab) - _log(1 - params.top_p),
            repeat_penalty=params.repeat_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
        )

    def chain_over(self, some: Some | None) -> Chain:
        """The kernel's chain for a draft, over some tokens; all calls for one sampler name the same tokens."""
        if self._draft_chain is None:
            assert self._kernel is not None
            self._draft_chain = self._bound(self._kernel, some)
        return self._draft_chain

    @property
    def chain(self) -> Chain | None:
        """The kernel's chain for the model itself, where there is a kernel."""
        return self._chain

    @property
    def has_kernel(self) -> bool:
        """Whether there is a kernel for `chain_over`."""
        return self._kernel is not None

    def sample(self, logits: NDArray[np.float32], history: NDArray[np.int32], length: int | None = None) -> int:
        """The next token after `history`.

        logits:   float32 (n_vocab,), left as they are
        history:  int32 (n,), the prompt and what was generated
        length:   how many tokens of the history there are; None: all

        Raises: EdgertError when the logits are not finite numbers.
        """
        n = len(history) if length is None else length
        if self._chain:
            token = self._chain(logits, history, n)
            if token >= 0:
                return token
        return self._sample(logits, history[:n])[0]

    def follow(self, logits: NDArray[np.float32], history: NDArray[np.int32], length: int) -> list[int]:
        """What `sample` gives for one row after the other, as long as it is what the history guesses there.

        logits:   float32 (n, n_vocab), the first after `length` tokens, each other one after a guess more
        history:  int32, of which the first `length` and the n - 1 guesses behind them count
        returns:  1 to n ids; fewer than there could be before a row that nothing can be chosen from

        Raises: as `sample`.
        """
        if self._chain and logits.strides[1] == 4 and logits.flags.writeable:
            found = self._chain.follow(logits, history, length)
            if found[0] >= 0:
                return found[:-1] if found[-1] < 0 else found
        found = []
        for i, row in enumerate(logits):
            found.append(self.sample(row, history, length + i))
            if i + 1 < len(logits) and found[i] != history[length + i]:
                break
        return found

    def guess(self, logits: NDArray[np.float32], history: NDArray[np.int32], length: int) -> tuple[int, float]:
        """What `sample` gives, and its probability among the kept tokens; greedy: among all, at temperature 1.

        Raises: as `sample`.
        """
        if self._chain:
            token = self._chain(logits, history, length, True)
            if token >= 0:
                return token, self._chain.share
        return self._sample(logits, history[:length])

    def _sample(self, logits: NDArray[np.float32], history: NDArray[np.int32]) -> tuple[int, float]:
        ids, share = self.distribution(logits, history)
        if self.params.temperature == 0 or self.params.top_k == 1:
            return int(ids[0]), self._share_of(int(ids[0]), logits, history)
        state = _state(self.seed, len(history))
        near = share >= share[0] * math.exp(-_RACE_DEPTH)
        first, rest = ids[near], float(share[~near].sum())
        speeds = share[near] / _times(state, first)
        best = int(speeds.argmax())
        if rest > speeds[best] * float(_times(state, np.array([-1]))[0]):
            order = np.flatnonzero(~near)
            order = order[np.argsort(ids[order])]  # a draw goes by ids, so that nothing need be sorted by logits
            total = np.cumsum(share[order])
            place = order[
                min(int(np.searchsorted(total, uniform(self.seed, len(history)) * rest, "right")), len(order) - 1)
            ]
            return int(ids[place]), float(share[place])
        return int(first[best]), float(share[best])

    def _share_of(self, token: int, logits: NDArray[np.float32], history: NDArray[np.int32]) -> float:
        bent = logits.copy()
        self._bend(bent, history)
        return math.exp(logprobs(bent, token, 0)[0])

    def _window(self, history: NDArray[np.int32]) -> NDArray[np.int32]:
        """The tokens that the penalties see."""
        if not self._penalised:
            return history[:0]
        n = self.params.repeat_last_n
        return history if n < 0 else history[-n:]

    def distribution(
        self, logits: NDArray[np.float32], history: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The tokens that may come next, from the best to the worst, and their probabilities.

        logits, history:  as in `sample`
        returns:          int64 (k,) ids and float64 (k,) probabilities, k >= 1

        Raises: as `sample`.
        """
        if not math.isfinite(logits.sum()) and not np.isfinite(logits).all():
            raise EdgertError(
                f"The model's output after {len(history)} tokens is not a finite number: "
                "the file's weights are damaged or overflow; check the file with `edgert show`."
            )
        if len(self._bias_ids) or self._penalised:
            logits = logits.copy()
            self._bend(logits, history)
        best = logits.argmax()
        if logits[best] == -math.inf:
            raise RequestError("logit_bias", "forbids every token")
        if self.params.temperature == 0 or self.params.top_k == 1:
            return np.array([best]), np.ones(1)
        ids, kept = self._candidates(logits)
        weights = np.exp((kept - kept[0]) / self.params.temperature)
        return ids, weights / weights.sum()

    def _bend(self, logits: NDArray[np.float32], history: NDArray[np.int32]) -> None:
        """Applies bias and penalties in place."""
        logits[self._bias_ids] += self._bias
        if self._penalised:
            p = self.params
            seen, counts = np.unique(self._window(history), return_counts=True)
            values = logits[seen]
            values = np.where(values > 0, values / p.repeat_penalty, values * p.repeat_penalty)
            logits[seen] = values - counts * p.frequency_penalty - p.presence_penalty

    def _candidates(self, logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The ids that top-k, top-p and min-p leave, and their logits, from the best to the worst."""
        p = self.params
        if 0 < p.top_k < self.n_vocab:
            ids, kept = _best(logits, p.top_k)
            if p.top_p < 1:
                share = np.cumsum(np.exp(kept - kept[0]))
                end = int(np.searchsorted(share, p.top_p * share[-1])) + 1
                ids, kept = ids[:end], kept[:end]
        elif p.top_p < 1:
            peak = logits.max()
            goal = p.top_p * float(np.exp(logits - peak).sum(dtype=np.float64))
            count = min(256, self.n_vocab)
            while True:  # few tokens hold most of the probability, so the full sort is seldom needed
                ids, kept = _best(logits, count)
                share = np.cumsum(np.exp(kept - kept[0]))
                if share[-1] >= goal or count == self.n_vocab:
                    break
                count = min(8 * count, self.n_vocab)
            end = int(np.searchsorted(share, goal)) + 1
            ids, kept = ids[:end], kept[:end]
        else:
            floor = float(logits.max()) + _log(p.min_p)
            above = np.flatnonzero(logits >= floor)
            order = np.argsort(-logits[above], kind="stable")
            ids = above[order]
            return ids, logits[ids].astype(np.float64)
        if p.min_p > 0:
            end = int(np.count_nonzero(kept >= kept[0] + math.log(p.min_p)))
            ids, kept = ids[:end], kept[:end]
        return ids, kept


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _best(logits: NDArray[np.float32], count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The `count` highest logits and their ids, from the best to the worst, lower ids first among equals."""
    n = len(logits)
    if count < n:
        threshold = np.partition(logits, n - count)[n - count]
        above = np.flatnonzero(logits > threshold)
        equal = np.flatnonzero(logits == threshold)[: count - len(above)]
        ids = np.concatenate([above, equal])
    else:
        ids = np.arange(n)
    ids = ids[np.lexsort((ids, -logits[ids]))]
    return ids, logits[ids].astype(np.float64)


_MASK = (1 << 64) - 1
_RACE_DEPTH = 5.0  # as RACE_DEPTH of backends/cpu/sampling.py (a test compares them)


def uniform(seed: int, counter: int) -> float:
    """A number in [0, 1) that looks random and depends on the two arguments alone.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014), SplitMix64.
    """
    return (_state(seed, counter) >> 11) * 2.0**-53


def _state(seed: int, counter: int) -> int:
    z = _mix((seed ^ 0x5851F42D4C957F2D) & _MASK)
    return _mix((z + counter * 0x9E3779B97F4A7C15) & _MASK)


def _times(state: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64 (n,), exponentially distributed, each by the state and its token alone."""
    z = np.uint64(state) + (tokens + 1).astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return -np.log(((z >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53)


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def logprobs(logits: NDArray[np.float32], token: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """The natural log probability of `token`, and those of the `top` most probable tokens.

    logits:  float32 (n_vocab,)
    """
    peak = float(logits.max())
    norm = peak + math.log(float(np.exp(logits - peak).sum(dtype=np.float64)))
    best = [] if top == 0 else [(int(i), float(v) - norm) for i, v in zip(*_best(logits, top), strict=True)]
    return float(logits[token]) - norm, best
