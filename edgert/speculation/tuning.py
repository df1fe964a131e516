"""Measures what each length of a guess gains on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgert.model import Model

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a dog that finds its way home.",
    "Explain to a child how rain comes about.",
    "Give me five tips for a healthy breakfast.",
    "Write a Python function that adds the even numbers of a list.",
    "I am nervous about a job interview tomorrow. What should I do?",
)
ADAPTIVE = -1  # the length that is chosen anew at each step
CLEARLY = 1.05  # times as fast as with that a fixed length has to be, which does not follow the text, to be advised


@dataclass(frozen=True)
class Point:
    """What one length gave at one temperature.

    length:       tokens guessed in each step; 0: none, -1 (ADAPTIVE): as many as promise to pay
    per_second:   tokens a second, the prompt apart
    speed_up:     per_second by that of length 0
    accepted:     share of the guessed tokens that were right; rejected: of those that were not
    per_step:     tokens that a step gave
    """

    temperature: float
    length: int
    per_second: float
    speed_up: float
    accepted: float
    rejected: float
    per_step: float

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def curve(
    model: Model,
    lengths: Sequence[int],
    temperature: float,
    *,
    prompts: Sequence[str] = PROMPTS,
    n_predict: int = 96,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> list[Point]:
    """Answers each prompt with each length in turn, so that a busy moment of the machine meets all of them.

    Of what a step takes the middle one of the answers counts: one that other programs held up says nothing.

    model:  loaded with a draft
    """
    speculator = model.speculator
    assert speculator is not None
    usual = speculator.most, speculator.least
    settings = {0: (0, 0), ADAPTIVE: (usual[0], 0)} | {n: (n, n) for n in lengths if n > 0}
    sums = {length: [0, 0, 0, 0] for length in settings}  # tokens, timed ones, guessed, right
    paces: dict[int, list[float]] = {length: [] for length in settings}  # milliseconds of a step, by answer
    try:
        for i, prompt in enumerate(prompts):
            for j, (length, (speculator.most, speculator.least)) in enumerate(settings.items()):
                progress(i * len(settings) + j, len(prompts) * len(settings))
                ask = model.generate if model.template is None else _chat(model)
                reply = ask(prompt, max_tokens=n_predict, temperature=temperature, seed=i)
                stats, total = reply.stats, sums[length]
                total[0] += stats.predicted_n
                total[1] += stats.timed_n
                total[2] += stats.draft_n
                total[3] += stats.draft_n_accepted
                if stats.timed_n:
                    paces[length].append(stats.predicted_ms / max(1, stats.timed_n - stats.draft_n_accepted))
    finally:
        speculator.most, speculator.least = usual
    rates = {
        length: timed / max(1, timed - right) / max(statistics.median(paces[length] or [0.0]), 1e-9)
        for length, (_, timed, _, right) in sums.items()
    }
    plain = rates[0]
    points = []
    for length, (tokens, _, guessed, right) in sums.items():
        rate = rates[length]
        share = right / guessed if guessed else 0.0
        wrong = 1 - share if guessed else 0.0
        points.append(
            Point(temperature, length, 1e3 * rate, rate / plain, share, wrong, tokens / max(tokens - right, 1))
        )
    return points


def _chat(model: Model) -> Callable[..., Any]:
    def ask(prompt: str, **params: Any) -> Any:
        return model.chat([{"role": "user", "content": prompt}], **params)

    return ask


def best(points: Sequence[Point]) -> tuple[int, float]:
    """The length with the highest speed-up over all temperatures, their rates being joined as harmonic means; the
    adaptive one, unless a fixed one is clearly faster."""
    lengths = dict.fromkeys(point.length for point in points)
    joined = {}
    for length in lengths:
        ups = [point.speed_up for point in points if point.length == length]
        joined[length] = len(ups) / sum(1 / max(up, 1e-9) for up in ups)
    winner = max(joined, key=lambda length: joined[length])
    if joined[winner] < CLEARLY * joined.get(ADAPTIVE, 0.0):
        winner = ADAPTIVE
    return winner, joined[winner]
