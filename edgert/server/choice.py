"""A name that stands for a small and a large model: the small one answers what it is sure of. Off unless configured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgert.options import integer, real

if TYPE_CHECKING:
    from edgert.model import Model


@dataclass(frozen=True)
class Choice:
    """The rule.

    name:        what requests call it
    small, large:  names of models
    prompt:      prompts of more tokens go to the large one; 0: of any length may stay
    tokens:      so many first tokens of the small one's answer are looked at; 0: none
    sure:        their mean probability (geometric) from which on the small one answers

    Raises: RequestError naming the field.
    """

    name: str
    small: str
    large: str
    prompt: int = 0
    tokens: int = 8
    sure: float = 0.5

    def __post_init__(self) -> None:
        for field in ("prompt", "tokens"):
            integer(field, getattr(self, field), 0, 2**31 - 1)
        real("sure", self.sure, 0, 1)

    async def takes_small(
        self, model: Model, prompts: Sequence[Sequence[int]], params: Mapping[str, Any], user: str, **limits: Any
    ) -> bool:
        """Whether the small model answers: no prompt is too long, and it is sure of all answers' first tokens.

        limits:  as `Model.generate` takes them
        """
        if 0 < self.prompt < max(map(len, prompts)):
            return False
        return all([await self._is_sure(model, ids, params, user, limits) for ids in prompts])

    async def _is_sure(
        self, model: Model, ids: Sequence[int], params: Mapping[str, Any], user: str, limits: Mapping[str, Any]
    ) -> bool:
        """Whether the small model's first tokens are as probable to it as they must be; it reads the prompt for this,
        which is then cached for its answer."""
        if not self.tokens:
            return True
        given: dict[str, Any] = {n: params[n] for n in ("grammar", "logit_bias") if params.get(n) is not None}
        reply = await model.agenerate(
            ids, max_tokens=self.tokens, temperature=0.0, logprobs=True, user=user, **given, **limits
        )
        if not reply.logprobs:
            return True
        mean = math.fsum(score.logprob for score in reply.logprobs) / len(reply.logprobs)
        return math.exp(mean) >= self.sure
