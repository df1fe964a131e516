"""What `edgert plan` predicts beside what is measured: peak memory, prefill of a whole context, decode at its end.

    python tests/bench/plan.py smollm2 gemma3 random-1.1b.gguf -c 2048,8192 [--backend llama|onnx]

Every measurement has a process of its own, which loads the model through `edgert.load`, reads a prompt that fills
the context and writes 64 tokens; the rate of decoding is that of the median step. What predictions rest on is measured
as well, anew before each of them: this machine's rates for the cpu backend, and for the others excerpts of the model.
Both sides take turns (-r), and medians are compared. Each row is shown as it is measured; llama.cpp takes minutes for a
long context (-r 1).
"""

from __future__ import annotations

import functools
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

backend, path, n_ctx, n_threads = *sys.argv[1:3], *map(int, sys.argv[3:])
with edgert.load(path, backend=backend, n_ctx=n_ctx, n_threads=n_threads, spec="off") as model:
    ids = np.random.default_rng(0).integers(0, model.n_vocab, n_ctx - {REPLY} - 1).tolist()
    model.generate(ids[:512], max_tokens=4, temperature=0, ignore_eos=True)
    times = []
    for chunk in model.generate([1, *ids[1:]], True, max_tokens={REPLY}, temperature=0, ignore_eos=True):
        times += [time.perf_counter()] * bool(chunk.tokens)
        stats = chunk.stats or None
    gaps = [b - a for a, b in zip(times, times[1:])]
    rates = {{"prefill": stats.prompt_per_second, "decode_at_end": 1 / float(np.median(gaps))}}
    print(json.dumps(rates | {{"peak": probe.process_memory()[1]}}))
"""


@click.command(help=__doc__)
@click.argument("models", nargs=-1, required=True)
@click.option("-c", "--ctx-size", "contexts", default="2048,8192", show_default=True)
@click.option("-t", "--threads", default=2, show_default=True)
@click.option("-r", "--repetitions", default=3, show_default=True)
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
    from edgert.quantize.gguf_file import GGUFFile

    for name in models:
        path = store.resolve(name)
        with GGUFFile.open(path) as file:
            for n_ctx in contexts:
                sides: dict[str, list[dict[str, float]]] = {"predicted": [], "measured": []}
                for _ in range(repetitions):
                    found, basis = predicted(file, n_ctx, threads, backend)
                    sides["predicted"].append(found)
                    command = [sys.executable, "-c", CHILD, backend, str(path), str(n_ctx), str(threads)]
                    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                    sides["measured"].append(json.loads(done.stdout.splitlines()[-1]))
                medians = {
                    side: {what: statistics.median(one[what] for one in found) for what in found[0]}
                    for side, found in sides.items()
                }
                yield {"model": Path(path).stem, "n_ctx": n_ctx, "basis": basis, **medians, "runs": sides}


def predicted(file: Any, n_ctx: int, threads: int, backend: str) -> tuple[dict[str, float], str]:
    """What `edgert plan` says, measured anew, and where it comes from."""
    from edgert.backends import excerpts, planning
    from edgert.backends.cpu import rates
    from edgert.quantize.architecture import describe

    a = describe(file)
    heads = a.n_head, a.n_head_kv, a.head_dim
    machine = functools.partial(rates.rates, threads, heads, fresh=True) if backend == "cpu" else None
    found = planning.places(planning.Request(file, n_ctx, n_threads=threads), machine)
    place = next(one for one in found if (one.backend, one.device) == (backend, "cpu"))
    if machine is not None:
        return {
            "peak": place.memory["total"],
            "prefill": place.prefill or 0,
            "decode_at_end": place.decode_at_end or 0,
        }, place.basis
    options = {"device": "cpu"} if backend == "onnx" else planning._options("cpu", 0, (None, None))
    steps = excerpts.steps(file, backend, options, threads, fresh=True)
    return {"peak": place.memory["total"], **steps.rates(n_ctx)}, steps.basis


if __name__ == "__main__":
    main()
