"""Speculative decoding beside llama.cpp's own, with the same pair of models: the same prompts to each in turn.

    python tests/bench/speculation_llama.py MODEL.gguf DRAFT.gguf --chats CHATS.jsonl --llama-server PATH

llama-server runs once without a draft and once for each length of a guess (`--spec-draft-n-max`; 3 is its default).
Rates are tokens over the time from the first token to the last, as each engine itself counts it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from serve import Client, running
from speculation import chats

import edgert


@dataclass
class Total:
    """Tokens after the first, seconds that they took, guesses and those that were right."""

    tokens: int = 0
    seconds: float = 0.0
    guessed: int = 0
    accepted: int = 0

    def add(self, n: int, milliseconds: float, guessed: int, accepted: int) -> None:
        self.tokens += n - 1
        self.seconds += milliseconds / 1e3
        self.guessed += guessed
        self.accepted += accepted

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def ask_llama(client: Client, ids: list[int], total: Total, n_predict: int, parameters: dict[str, Any]) -> None:
    body = {"prompt": ids, "n_predict": n_predict, "cache_prompt": False, **parameters}
    timings = client.post("/completion", body)["timings"]
    guesses = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
    total.add(timings["predicted_n"], timings["predicted_ms"], *guesses)


def ask_edgert(model: edgert.Model, ids: list[int], total: Total, n_predict: int, parameters: dict[str, Any]) -> None:
    stats = model.generate(ids, max_tokens=n_predict, cache_prompt=False, **parameters).stats
    total.add(stats.predicted_n, stats.predicted_ms, stats.draft_n, stats.draft_n_accepted)


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("draft", type=click.Path(exists=True, path_type=Path))
@click.option("--chats", "chats_path", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--llama-server", type=click.Path(exists=True), required=True)
@click.option("--lengths", default="2,3,4,8", show_default=True, help="guesses in a round of llama-server")
@click.option("-n", "--n-predict", default=160, show_default=True)
@click.option("--prompts", default=10, show_default=True)
@click.option("--temp", default=0.0, show_default=True)
@click.option("-t", "--threads", default=2, show_default=True)
@click.option("--port", default=18190, show_default=True)
def main(
    model: Path,
    draft: Path,
    chats_path: Path,
    llama_server: str,
    lengths: str,
    n_predict: int,
    prompts: int,
    temp: float,
    threads: int,
    port: int,
) -> None:
    usual = [llama_server, "-m", str(model), "-t", str(threads), "-c", "2048", "-np", "1", "-fa", "on"]
    with ExitStack() as stack:
        enter = stack.enter_context
        engines: dict[str, tuple[Any, Any]] = {}
        for name, spec in (("edgert plain", "off"), ("edgert", "auto")):
            options: dict[str, Any] = {"n_ctx": 2048, "n_threads": threads, "backend": "cpu", "spec": spec}
            options |= {"draft": draft} if spec == "auto" else {}
            engines[name] = ask_edgert, enter(edgert.load(model, **options))
        drafting = ["--spec-type", "draft-simple", "-md", str(draft), "-td", str(threads), "--spec-draft-n-max"]
        variants = {"llama.cpp plain": []} | {f"llama.cpp, {n} guesses": [*drafting, n] for n in lengths.split(",")}
        for i, (name, more) in enumerate(variants.items()):
            command = [*usual, *more, "--port", str(port + i)]
            engines[name] = ask_llama, enter(running(command, port + i))
        totals = {name: Total() for name in engines}
        first: Any = engines["edgert plain"][1]
        for i, messages in enumerate(chats(chats_path, prompts)):
            ids, parameters = first.render(messages), {"temperature": temp, "seed": i}
            if i == 0:
                for ask, engine in engines.values():
                    ask(engine, ids, Total(), 24, parameters)
            for name, (ask, engine) in engines.items():
                ask(engine, ids, totals[name], n_predict, parameters)
    best = max(total.rate for name, total in totals.items() if name.startswith("llama.cpp,"))
    click.echo(f"{'engine':<22} {'tokens':>6} {'tok/s':>7} {'guessed':>8} {'accepted':>8} {'edgert / it':>11}")
    for name, total in totals.items():
        ratio = totals["edgert"].rate / total.rate
        click.echo(
            f"{name:<22} {total.tokens:>6} {total.rate:>7.1f} {total.guessed:>8} {total.accepted:>8} {ratio:>11.2f}"
        )
    click.echo(f"edgert over llama.cpp's best with a draft: {totals['edgert'].rate / best:.2f}")


if __name__ == "__main__":
    main()
