"""What `edgert plan` predicts beside what is measured: peak memory, prefill of a whole context, decode at its end.

    python tests/bench/plan.py smollm2 gemma3 random-1.1b.gguf -c 2048,8192 [--backend llama|onnx]

Every measurement has a process of its own, which loads the model through `edgert.load`, reads a prompt that fills
the context and writes 64 tokens; the rate of decoding is that of the median step, and of several prefills the best
counts, because what else runs on the machine only takes away. What predictions rest on is measured as well: this
machine's rates for the cpu backend, anew before each model, and for the others excerpts of the model. Each row is shown
as it is measured; llama.cpp takes minutes for a long context (-r 1).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

REPLY = 64
CHILD = f"""
import json, sys, time
import numpy as np
import edgert
from edgert.devices import probe

backend, path, n_ctx, n_threads, repetitions = *sys.argv[1:3], *map(int, sys.argv[3:])
with edgert.load(path, backend=backend, n_ctx=n_ctx, n_threads=n_threads, spec="off") as model:
    ids = np.random.default_rng(0).integers(0, model.n_vocab, n_ctx - {REPLY} - 1).tolist()
    model.generate(ids[:512], max_tokens=4, temperature=0, ignore_eos=True)
    prefills, gaps = [], []
    for i in range(repetitions):
        times = []
        stream = model.generate([i + 1, *ids[1:]], True, max_tokens={REPLY}, temperature=0, ignore_eos=True)
        for chunk in stream:
            times += [time.perf_counter()] * bool(chunk.tokens)
            stats = chunk.stats or None
        prefills.append(stats.prompt_per_second)
        gaps += [b - a for a, b in zip(times, times[1:])]
    rates = {{"prefill": max(prefills), "decode_at_end": 1 / float(np.median(gaps))}}
    print(json.dumps(rates | {{"peak": probe.process_memory()[1]}}))
"""


@click.command(help=__doc__)
@click.argument("models", nargs=-1, required=True)
@click.option("-c", "--ctx-size", "contexts", default="2048,8192", show_default=True)
@click.option("-t", "--threads", default=2, show_default=True)
@click.option("-r", "--repetitions", default=2, show_default=True)
@click.option("--backend", type=click.Choice(["cpu", "llama", "onnx"]), default="cpu", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(models: tuple[str, ...], contexts: str, threads: int, repetitions: int, backend: str, as_json: bool) -> None:
    errors: dict[str, list[float]] = {}
    if not as_json:
        click.echo("| model, context | peak, MB | error | prefill, tok/s | error | decode at the end, tok/s | error |")
        click.echo("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows(models, [int(n) for n in contexts.split(",")], threads, repetitions, backend):
        if as_json:
            click.echo(json.dumps(row))
            continue
        cells = [f"{row['model']}, {row['n_ctx']:,}"]
        for what, unit in (("peak", 1e6), ("prefill", 1.0), ("decode_at_end", 1.0)):
            p, m = row["predicted"][what], row["measured"][what]
            errors.setdefault(what, []).append(abs(p / m - 1))
            cells += [f"{p / unit:,.0f} / {m / unit:,.0f}", f"{100 * (p / m - 1):+.0f} %"]
        click.echo(f"| {' | '.join(cells)} |")
        click.echo(f"{row['model']}: {row['basis']}", err=True)
    worst = [f"{what} {100 * max(e):.0f} % (median {100 * statistics.median(e):.0f} %)" for what, e in errors.items()]
    if worst:
        click.echo(f"\nlargest errors: {', '.join(worst)}")


def rows(
    models: tuple[str, ...], contexts: list[int], threads: int, repetitions: int, backend: str
) -> Iterator[dict[str, Any]]:
    """What is predicted and measured of each model in each context."""
    from edgert import store
    from edgert.backends import planning
    from edgert.backends.cpu import rates
    from edgert.quantize.architecture import describe
    from edgert.quantize.gguf_file import GGUFFile

    for name in models:
        path = store.resolve(name)
        with GGUFFile.open(path) as file:
            a = describe(file)
            machine = None
            if backend == "cpu":
                machine = rates.rates(threads, (a.n_head, a.n_head_kv, a.head_dim), fresh=True)
            for n_ctx in contexts:
                request = planning.Request(file, n_ctx, excerpts=backend != "cpu", n_threads=threads)
                found = planning.places(request, machine)
                place = next(one for one in found if (one.backend, one.device) == (backend, "cpu"))
                command = [sys.executable, "-c", CHILD, backend, str(path), str(n_ctx), str(threads), str(repetitions)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                yield {
                    "model": Path(path).stem,
                    "n_ctx": n_ctx,
                    "basis": place.basis,
                    "predicted": {
                        "peak": place.memory["total"],
                        "prefill": place.prefill,
                        "decode_at_end": place.decode_at_end,
                    },
                    "measured": json.loads(done.stdout.splitlines()[-1]),
                }


if __name__ == "__main__":
    main()
