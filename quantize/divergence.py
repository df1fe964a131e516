"""How far predictions are from another model's, token by token: log-likelihood, KL divergence, agreement."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.errors import EdgertError

Floats = NDArray[np.float32]

CACHED_LOGITS = 1 << 18  # logits that the sums go over at a time, so that they stay in the cache


@dataclass(frozen=True)
class Against:
    """How a model's predictions differ from those of another one, the base, on the same tokens.

    perplexity_base:  the base's own perplexity
    ratio:            perplexity over the base's, with its standard error
    kld_*:            KL divergence (base || model) of the next token, in nats: mean, its standard error, percentiles
    same_top:         share of places where both find the same token likeliest, with its standard error
    """

    perplexity_base: float
    ratio: float
    ratio_error: float
    kld_mean: float
    kld_error: float
    kld_median: float
    kld_99: float
    kld_999: float
    kld_max: float
    same_top: float
    same_top_error: float


@dataclass(frozen=True)
class Evaluation:
    """perplexity: exp of the mean negative log-likelihood over the n_tokens scored, with its standard error."""

    perplexity: float
    perplexity_error: float
    n_tokens: int
    n_chunks: int
    n_ctx: int
    against: Against | None = None

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


class Tally:
    """Collects what each scored token adds; per token it keeps four numbers, never a row of logits."""

    def __init__(self) -> None:
        self._nll: list[NDArray[np.float64]] = []
        self._nll_base: list[NDArray[np.float64]] = []
        self._kld: list[NDArray[np.float64]] = []
        self._same: list[NDArray[np.bool_]] = []

    def add(self, logits: Floats, targets: NDArray[np.int32], base: Floats | None = None) -> None:
        """Scores rows of logits.

        logits:   float32 (n, n_vocab); base: the other model's, of the same shape
        targets:  int32 (n,), the tokens that came next

        Raises: EdgertError when a logit is NaN or infinite.
        """
        n, n_vocab = logits.shape
        step = max(1, CACHED_LOGITS // n_vocab)
        for start in range(0, n, step):
            rows = slice(start, start + step)
            if base is None:
                self._nll.append(negative_log_likelihood(logits[rows], targets[rows]))
            else:
                self._compare(logits[rows], base[rows], targets[rows])

    def _compare(self, logits: Floats, base: Floats, targets: NDArray[np.int32]) -> None:
        log_q, log_p = log_softmax(logits), log_softmax(base)
        at = np.arange(len(targets)), targets
        self._nll.append(-log_q[at].astype(np.float64))
        self._nll_base.append(-log_p[at].astype(np.float64))
        self._same.append(log_q.argmax(1) == log_p.argmax(1))
        np.subtract(log_p, log_q, out=log_q)
        np.exp(log_p, out=log_p)
        self._kld.append(np.vecdot(log_p, log_q).astype(np.float64))

    @property
    def perplexity(self) -> float:
        """So far."""
        return math.exp(float(np.concatenate(self._nll).mean()))

    def result(self, n_chunks: int, n_ctx: int) -> Evaluation:
        """The figures over everything added."""
        nll = np.concatenate(self._nll)
        perplexity = math.exp(float(nll.mean()))
        against = None
        if self._kld:
            base, kld = np.concatenate(self._nll_base), np.concatenate(self._kld)
            same = np.concatenate(self._same)
            ratio = math.exp(float((nll - base).mean()))
            share = float(same.mean())
            q50, q99, q999 = np.percentile(kld, [50, 99, 99.9])
            against = Against(
                perplexity_base=math.exp(float(base.mean())),
                ratio=ratio,
                ratio_error=ratio * _standard_error(nll - base),
                kld_mean=float(kld.mean()),
                kld_error=_standard_error(kld),
                kld_median=float(q50),
                kld_99=float(q99),
                kld_999=float(q999),
                kld_max=float(kld.max()),
                same_top=share,
                same_top_error=math.sqrt(share * (1 - share) / max(1, len(same) - 1)),
            )
        return Evaluation(perplexity, perplexity * _standard_error(nll), len(nll), n_chunks, n_ctx, against)


def _standard_error(values: NDArray[Any]) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _sums(logits: Floats) -> tuple[Floats, Floats]:
    """float32 (n, n_vocab) -> the logits less each row's maximum, log of the sums of their exponents (n, 1)."""
    highest = logits.max(axis=1, keepdims=True)
    if not np.isfinite(highest).all():
        raise EdgertError("The model's logits are NaN or infinite: its weights are damaged.")
    shifted = logits - highest
    log_sum = np.log(np.exp(shifted).sum(axis=1, dtype=np.float32, keepdims=True))
    return shifted, log_sum


def log_softmax(logits: Floats) -> Floats:
    """float32 (n, n_vocab) -> log probabilities of the same shape. Raises: EdgertError for NaN or infinity."""
    shifted, log_sum = _sums(logits)
    shifted -= log_sum
    return shifted


def negative_log_likelihood(logits: Floats, targets: NDArray[np.int32]) -> NDArray[np.float64]:
    """-log of the probability of each target, float64 (n,). Raises: EdgertError for NaN or infinity."""
    shifted, log_sum = _sums(logits)
    return (log_sum[:, 0] - shifted[np.arange(len(targets)), targets]).astype(np.float64)
