"""What comes back from a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "cancelled", "timeout"]


@dataclass
class Drafts:
    """How many tokens were guessed for one request, and how many of them the model chose, by place in the guess."""

    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def try_(self, count: int) -> None:
        """Counts a guess of `count` tokens."""
        if count > len(self.tried):
            self.tried += [0] * (count - len(self.tried))
            self.accepted += [0] * (count - len(self.accepted))
        for place in range(count):
            self.tried[place] += 1

    def count(self, tried: int, accepted: int) -> None:
        """Counts a guess of `tried` tokens of which the first `accepted` were chosen."""
        self.try_(tried)
        for place in range(accepted):
            self.accepted[place] += 1


@dataclass(frozen=True)
class Stats:
    """Counts and times of one request; names are those of llama-server's `timings`.

    cache_n:               prompt tokens found in the cache
    prompt_n, prompt_ms:   prompt tokens computed, and the time until their logits were there
    predicted_n:           tokens chosen, an end token included
    predicted_ms:          from the logits of the prompt to the last token
    prompt_per_second:     computed prompt tokens by prompt_ms
    predicted_per_second:  tokens chosen after those that came with the prompt's logits, by predicted_ms; 0: none
    draft_n:               tokens guessed and checked, draft_n_accepted: those of them that the model chose
    draft_positions:       the same two numbers for each place in a guess
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    draft_n: int = 0
    draft_n_accepted: int = 0
    draft_positions: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(
        cls,
        cache_n: int,
        prompt_n: int,
        prompt_s: float,
        predicted_n: int,
        predicted_s: float,
        drafts: Drafts | None = None,
        first_n: int = 1,
    ) -> Stats:
        """From counts and seconds; of the predicted tokens, `first_n` came with the prompt's logits."""
        later, drafts = max(predicted_n - first_n, 0), drafts or Drafts()
        return cls(
            cache_n,
            prompt_n,
            1e3 * prompt_s,
            prompt_n / prompt_s if prompt_s > 0 else 0.0,
            predicted_n,
            1e3 * predicted_s,
            later / predicted_s if predicted_s > 0 else 0.0,
            sum(drafts.tried),
            sum(drafts.accepted),
            tuple(zip(drafts.tried, drafts.accepted, strict=True)),
        )

    @property
    def timed_n(self) -> int:
        """The tokens that predicted_per_second counts; those of several answers by their times are a common rate."""
        return round(self.predicted_per_second * self.predicted_ms / 1e3)

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON wants them."""
        return asdict(self)


@dataclass(frozen=True)
class Progress:
    """How far the prompt has been read; names are those of llama-server's `prompt_progress`.

    processed counts the cached tokens too.
    """

    total: int
    cache: int
    processed: int
    time_ms: float


@dataclass(frozen=True)
class TokenLogprob:
    """A token's natural log probability and the most probable ones in its place."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Chunk(NamedTuple):
    """A piece of a streamed reply: text that will not change, and the tokens chosen since the last piece.

    The last piece, and no other, has a finish_reason and stats. (A tuple, because one is made for each token.)
    """

    text: str
    tokens: Sequence[int]
    finish_reason: FinishReason | None = None
    stats: Stats | None = None
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True)
class Reply:
    """A whole reply.

    finish_reason:  "stop" (the model ended, or a stop string came), "length" (max_tokens, the context or the
                    memory of the cache is used up), "cancelled", "timeout" (the request's time is used up)
    tokens:         the tokens chosen, the end token left out
    seed:           the seed in use; given again with the same request it gives the same text
    logprobs:       of the tokens whose text is shown: not of a stop string's
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: Stats
    seed: int
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def __str__(self) -> str:
        return self.text
