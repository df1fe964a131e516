"""What speculation gains over plain decoding: the same requests with and without it, in turn.

    python tests/bench/speculation.py MODEL.gguf [-md DRAFT.gguf] [--chats heldout_chats.jsonl] [--only chat,...]

Sets: `chat` (first messages of the chats, greedy), `sampled` (the same at temperature 0.8), `ngram` (summarising,
editing and rewriting of a text in the prompt, greedy, n-grams alone), `random` (noise at a high temperature after
random words). Every text must be the same with and without guesses. Rates are tokens over the time from the first
token to the last; the ratio is that of the sums.
"""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import click

import edgert
from edgert.reply import Reply

TEXT = """The harbour of Ostrova lies where two rivers meet the sea. In spring the ice breaks early there, and the
fishing boats leave before sunrise to reach the banks beyond the islands. Mira Halvorsen, who has kept the lighthouse
for thirty one years, writes the weather down every hour in a green notebook. Last March she noted that the wind turned
north in a single night and pushed the drifting ice back into the bay. Eleven boats were caught, and the village spent
four days cutting a channel with saws and hot water. Nobody was hurt. Since then the council has bought a small
icebreaker, which the children named Walnut because of its round brown hull."""
CODE = """def moving_average(values, width):
    if width < 1:
        raise ValueError("width must be positive")
    result = []
    total = 0.0
    for index, value in enumerate(values):
        total += value
        if index >= width:
            total -= values[index - width]
        if index >= width - 1:
            result.append(total / width)
    return result


def largest_change(values):
    best = 0.0
    for left, right in zip(values, values[1:]):
        change = abs(right - left)
        if change > best:
            best = change
    return best"""
COPYING = [
    f"Summarise this text by quoting its most important sentences word for word.\n\n{TEXT}",
    f"Summarise the following text in five sentences taken from it.\n\n{TEXT}",
    f"Correct the spelling of this text and give the whole text back, nothing else.\n\n{TEXT}",
    f"Rewrite the following text with Mira Halvorsen called Mira Olsen.\n\n{TEXT}",
    f"Repeat this text, and put every sentence on a line of its own.\n\n{TEXT}",
    f"Edit this text: replace the word boats by ships. Print the edited text.\n\n{TEXT}",
    f"Rewrite this Python code with the name values changed to numbers.\n\n```python\n{CODE}\n```",
    f"Add a docstring to each function of this code and print all of it.\n\n```python\n{CODE}\n```",
    f"Print this code again with type hints.\n\n```python\n{CODE}\n```",
]


def chats(path: Path, n: int) -> list[list[dict[str, str]]]:
    """The messages up to the first question of n conversations."""
    result: list[list[dict[str, str]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if first is not None and len(result) < n:
            result.append(messages[: first + 1])
    return result


def requests(kind: str, held_out: list[list[dict[str, str]]], n_vocab: int) -> list[tuple[Any, dict[str, Any]]]:
    """(messages or ids, parameters) of a set."""
    if kind == "chat":
        return [(messages, {"temperature": 0}) for messages in held_out]
    if kind == "sampled":
        return [(messages, {"temperature": 0.8, "seed": i}) for i, messages in enumerate(held_out)]
    if kind == "ngram":
        return [([{"role": "user", "content": text}], {"temperature": 0}) for text in COPYING]
    draw = random.Random(0)
    noise = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True}
    return [([draw.randrange(n_vocab) for _ in range(64)], {**noise, "seed": i}) for i in range(12)]


def ask(model: edgert.Model, what: Any, n_predict: int, parameters: dict[str, Any]) -> Reply:
    if isinstance(what[0], dict):
        return model.chat(what, max_tokens=n_predict, **parameters)
    return model.generate(what, max_tokens=n_predict, **parameters)


def seconds(reply: Reply) -> float:
    return reply.stats.predicted_ms / 1e3


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("-md", "--draft", type=click.Path(exists=True, path_type=Path))
@click.option("--chats", "chats_path", type=click.Path(exists=True, path_type=Path))
@click.option("--only", default="chat,sampled,ngram,random", show_default=True)
@click.option("-n", "--n-predict", default=256, show_default=True)
@click.option("--prompts", default=50, show_default=True)
@click.option("-t", "--threads", default=2, show_default=True)
@click.option("--backend", default="cpu", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(
    model: Path,
    draft: Path | None,
    chats_path: Path | None,
    only: str,
    n_predict: int,
    prompts: int,
    threads: int,
    backend: str,
    as_json: bool,
) -> None:
    held_out = chats(chats_path, prompts) if chats_path else []
    options: dict[str, Any] = {"n_ctx": 2048, "n_threads": threads, "backend": backend}
    results = {}
    for kind in only.split(","):
        spec = "ngram" if kind == "ngram" else "auto"
        with (
            edgert.load(model, spec="off", **options) as plain,
            edgert.load(model, spec=spec, draft=None if spec == "ngram" else draft, **options) as guessing,
        ):
            ratios, times, totals, differing = [], [0.0, 0.0], [0, 0, 0], 0
            for i, (what, parameters) in enumerate(requests(kind, held_out, plain.n_vocab)):
                if i == 0:
                    for engine in (plain, guessing):
                        ask(engine, what, 32, parameters)
                order = (plain, guessing) if i % 2 else (guessing, plain)
                replies = {engine: ask(engine, what, n_predict, parameters) for engine in order}
                a, b = replies[plain], replies[guessing]
                differing += a.tokens != b.tokens
                if a.tokens == b.tokens and a.stats.predicted_n > 8:
                    times[0] += seconds(a)
                    times[1] += seconds(b)
                    ratios.append(seconds(a) / seconds(b))
                    totals[0] += a.stats.predicted_n - 1
                    totals[1] += b.stats.draft_n
                    totals[2] += b.stats.draft_n_accepted
        if not ratios:
            raise click.ClickException(f"{kind}: no reply to compare ({differing} differ)")
        results[kind] = {
            "replies": len(ratios),
            "differing": differing,
            "plain_tokens_per_second": totals[0] / times[0],
            "tokens_per_second": totals[0] / times[1],
            "ratio": times[0] / times[1],
            "ratio_median": statistics.median(ratios),
            "ratio_least": min(ratios),
            "guessed_per_token": totals[1] / totals[0],
            "accepted_share": totals[2] / max(totals[1], 1),
            "tokens_per_step": totals[0] / max(totals[0] - totals[2], 1),
        }
        if not as_json:
            click.echo(f"{kind:<8} " + "  ".join(f"{name} {value:.3g}" for name, value in results[kind].items()))
    if as_json:
        click.echo(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
