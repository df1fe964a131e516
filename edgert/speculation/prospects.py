"""What guesses promise where requests share a step, by what is known before they are tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter


def promised(
    seconds: Sequence[float],
    chances: Sequence[float],
    mean: float,
    longest: int,
    draft: Callable[[int], float],
) -> float:
    """Tokens a second of requests with guesses, over those without: of the number that promises most.

    seconds:  of steps with no guess for all requests together, with one, with two ...
    chances:  of each request's first guess; mean: of each that follows a right one
    longest:  guesses for one request
    draft:    seconds that a draft takes for so many guesses for each
    """
    n = len(chances)
    guesses = [(chance * mean**i, i + 1) for chance in chances for i in range(longest)]
    guesses.sort(key=itemgetter(0), reverse=True)
    best, tokens, depth = 0.0, float(n), 0
    for (likely, place), time in zip(guesses, seconds[1:], strict=False):
        tokens += likely
        depth = max(depth, place)
        best = max(best, tokens / (time + draft(depth)))
    return best * seconds[0] / n
