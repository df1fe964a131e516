"""What a step of several tokens costs beside a step of one: the gain of speculation and of shared steps.

    python tests/bench/batch.py MODEL.gguf [--sizes 1,2,4,6,8] [--depth 64] [-t 2]

For each size the tokens either follow each other in one sequence (as a speculative check), or stand in as many
sequences (as decode of several users); all logits are wanted. Sizes run in turn; medians are printed.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import click
import numpy as np

from edgert import backends
from edgert.backends.base import Backend, Batch


def one_sequence(backend: Backend, depth: int, size: int, tokens: np.ndarray) -> Batch:
    backend.truncate(0, depth)
    return Batch.of(tokens[:size].tolist(), depth, wanted="all")


def many_sequences(backend: Backend, depth: int, size: int, tokens: np.ndarray) -> Batch:
    for sequence in range(size):
        backend.truncate(sequence, depth)
    return Batch(
        tokens[:size].astype(np.int32),
        np.arange(size, dtype=np.int32),
        np.full(size, depth, np.int32),
        np.ones(size, bool),
    )


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--sizes", default="1,2,4,6,8", show_default=True)
@click.option("--depth", default=64, show_default=True)
@click.option("--backend", default="cpu", show_default=True)
@click.option("-t", "--threads", default=2, show_default=True)
@click.option("-r", "--repetitions", default=15, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(model: Path, sizes: str, depth: int, backend: str, threads: int, repetitions: int, as_json: bool) -> None:
    counts = [int(size) for size in sizes.split(",")]
    engine = backends.load(
        model, backend=backend, n_ctx=depth + max(counts) + 1, n_threads=threads, n_seq_max=max(counts)
    )
    random = np.random.default_rng(0)
    for sequence in range(max(counts)):
        prompt = random.integers(0, engine.n_vocab, depth).tolist()
        engine.forward(Batch.of(prompt, 0, sequence, wanted="none"))
    times: dict[str, dict[int, list[float]]] = {}
    for turn in range(repetitions + 1):
        for kind in (one_sequence, many_sequences):
            for size in counts:
                batch = kind(engine, depth, size, random.integers(0, engine.n_vocab, size))
                began = time.perf_counter()
                engine.forward(batch)
                took = time.perf_counter() - began
                if turn:  # the first one warms up
                    times.setdefault(kind.__name__, {}).setdefault(size, []).append(took)
    engine.close()
    medians = {kind: {n: statistics.median(t) for n, t in rows.items()} for kind, rows in times.items()}
    if as_json:
        click.echo(json.dumps(medians))
        return
    for kind, rows in medians.items():
        base = rows[counts[0]]
        text = "  ".join(f"{n}: {1e3 * t:.2f} ms ({t / base:.3f}x)" for n, t in rows.items())
        click.echo(f"{kind:<15}{text}")


if __name__ == "__main__":
    main()
