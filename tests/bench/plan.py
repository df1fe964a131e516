"""What `edgert plan` predicts beside what is measured: peak memory, prefill of a whole context, decode at its end.

    python tests/bench/plan.py smollm2 gemma3 random-1.1b.gguf -c 2048,8192 [--backend llama]

Every measurement has a process of its own, which loads the model through `edgert.load`, reads a prompt that fills
the context and writes 64 tokens; the rate of decoding is that of the median step, and of several prefills the best
counts, because what else runs on the machine only takes away. The machine's rates are measured anew before each model.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

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
@click.option("--backend", type=click.Choice(["cpu", "llama"]), default="cpu", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(models: tuple[str, ...], contexts: str, threads: int, repetitions: int, backend: str, as_json: bool) -> None:
    from edgert import store
    from edgert.backends import planning
    from edgert.backends.cpu import rates
    from edgert.quantize.architecture import describe
    from edgert.quantize.gguf_file import GGUFFile

    rows, bases = [], []
    for name in models:
        path = store.resolve(name)
        with GGUFFile.open(path) as file:
            a = describe(file)
        machine = None
        if backend == "cpu":
            machine = rates.rates(threads, (a.n_head, a.n_head_kv, a.head_dim), fresh=True)
            bases.append(f"{Path(path).stem}: {machine.basis}")
        for n_ctx in map(int, contexts.split(",")):
            with GGUFFile.open(path) as file:
                found = planning.places(planning.Request(file, n_ctx), machine)
            place = next(one for one in found if (one.backend, one.device) == (backend, "cpu"))
            command = [sys.executable, "-c", CHILD, backend, str(path), str(n_ctx), str(threads), str(repetitions)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            measured = json.loads(done.stdout.splitlines()[-1])
            predicted = {"peak": place.memory["total"], "prefill": place.prefill, "decode_at_end": place.decode_at_end}
            rows.append({"model": Path(path).stem, "n_ctx": n_ctx, "predicted": predicted, "measured": measured})
    if as_json:
        click.echo(json.dumps({"basis": bases, "rows": rows}, indent=1))
        return
    click.echo("\n".join([*bases, ""]))
    click.echo("| model, context | peak, MB | error | prefill, tok/s | error | decode at the end, tok/s | error |")
    click.echo("|---|---:|---:|---:|---:|---:|---:|")
    errors: dict[str, list[float]] = {}
    for row in rows:
        cells = [f"{row['model']}, {row['n_ctx']:,}"]
        for what, unit in (("peak", 1e6), ("prefill", 1.0), ("decode_at_end", 1.0)):
            p, m = row["predicted"][what], row["measured"][what]
            if p is None:  # llama.cpp's rates are not predicted
                cells += [f"{m / unit:,.0f}", ""]
                continue
            errors.setdefault(what, []).append(abs(p / m - 1))
            cells += [f"{p / unit:,.0f} / {m / unit:,.0f}", f"{100 * (p / m - 1):+.0f} %"]
        click.echo(f"| {' | '.join(cells)} |")
    worst = [f"{what} {100 * max(e):.0f} % (median {100 * statistics.median(e):.0f} %)" for what, e in errors.items()]
    click.echo(f"\nlargest errors: {', '.join(worst)}")


if __name__ == "__main__":
    main()
