"""Where the time of a round of guessing goes: the draft's walk, the target's, and all that lies between walks.

    python tests/bench/rounds.py MODEL.gguf -md DRAFT.gguf --chats heldout_chats.jsonl [--temperature 0.8]

In a round the draft guesses, the target checks, tokens are chosen and handed out. Several rounds are mostly one walk of
both models (`both`), some rounds are two walks, with the choice of tokens apart. Printed are microseconds of each part
over all rounds in which the draft guessed, those of one walk having equal parts of its time, and medians by the rows
that the target had and the rounds of the walk.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

import click
from speculation import chats

import edgert
from edgert.sampler import Sampler

PARTS = ("draft", "target", "choose", "both", "rest", "round")


class Watch:
    """Adds up what calls take, until the round ends."""

    def __init__(self, engine: edgert.Model) -> None:
        self.rounds: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)
        self._last = 0.0
        speculator: Any = engine.speculator
        backend: Any = engine.backend
        draft: Any = speculator.model.backend
        self._walker = "target"
        team_walk, follow, learn = backend._team.walk, Sampler.follow, speculator.learn

        def walk(*tape: int) -> None:  # one team serves both models
            began = perf_counter()
            team_walk(*tape)
            self._now[self._walker] += perf_counter() - began

        def within(name: str, walker: str) -> None:
            call = getattr(draft, name)

            def named(*arguments: Any) -> Any:
                self._walker = walker
                try:
                    return call(*arguments)
                finally:
                    self._walker = "target"
                    self._now["steps"] = 1

            setattr(draft, name, named)

        def choosing(*arguments: Any) -> list[int]:
            began = perf_counter()
            found = follow(*arguments)
            self._now["choose"] += perf_counter() - began
            return found

        def learning(tasks: Any, counts: Any) -> None:
            request = tasks[0].guessing
            walked = [(n, accepted) for _, n, accepted, _ in request.walked]
            learn(tasks, counts)
            now, parts = perf_counter(), self._now
            parts["round"] = now - self._last
            parts["rest"] = parts["round"] - sum(parts[part] for part in PARTS[:4])
            if self._last and (walked or parts["steps"]):
                rounds = walked or [(sum(counts), tasks[0].n_accepted)]
                equal = {part: parts[part] / len(rounds) for part in PARTS}
                self.rounds += [
                    equal | {"rows": 1 + n, "made": 1 + right, "at_once": len(rounds)} for n, right in rounds
                ]
            self._last = now
            parts.clear()

        within("guess", "draft")
        within("rounds", "both")
        backend._team.walk, speculator.learn = walk, learning
        Sampler.follow = choosing  # type: ignore[method-assign]

    def skip(self) -> None:
        """What comes next is another text."""
        self._last = 0.0
        self._now.clear()


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("-md", "--draft", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--chats", "chats_path", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--prompts", default=12, show_default=True)
@click.option("-n", "--n-predict", default=160, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("-t", "--threads", default=2, show_default=True)
def main(
    model: Path, draft: Path, chats_path: Path, prompts: int, n_predict: int, temperature: float, threads: int
) -> None:
    with edgert.load(model, draft=draft, n_ctx=2048, n_threads=threads) as engine:
        watch = Watch(engine)
        for i, messages in enumerate(chats(chats_path, prompts)):
            engine.chat(messages, max_tokens=n_predict, temperature=temperature, seed=i)
            watch.skip()
            if i == 0:
                watch.rounds.clear()
        assert engine.speculator is not None
        report(watch.rounds, engine.speculator.costs)


def report(rounds: list[dict[str, float]], costs: Any) -> None:
    click.echo(f"{len(rounds)} rounds of the draft, {statistics.fmean(r['made'] for r in rounds):.2f} tokens each")
    by_size = defaultdict(list)
    for part in PARTS:
        values = [1e6 * r[part] for r in rounds if r.get(part)]
        if len(values) > 1:
            tenths = statistics.quantiles(values, n=10)
            click.echo(
                f"{part:<8}in {len(values):4}  mean {statistics.fmean(values):7.0f}"
                f"  median {statistics.median(values):7.0f}  10 % {tenths[0]:7.0f}  90 % {tenths[-1]:7.0f}"
            )
    for r in rounds:
        by_size[int(r["rows"]), int(r["at_once"])].append(r)
    for (n, at_once), some in sorted(by_size.items()):
        medians = (f"{part} {statistics.median(1e6 * r[part] for r in some):.0f}" for part in ("rest", "round"))
        made = statistics.fmean(r["made"] for r in some)
        click.echo(
            f"{n:2} rows, {at_once} rounds a walk: {len(some):4} rounds  made {made:.2f}  {'  '.join(medians)}"
            f"  believed of the target's step {1e6 * costs[n]:.0f}"
        )


if __name__ == "__main__":
    main()
