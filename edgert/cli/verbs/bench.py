"""`edgert bench`: how fast a model is here, with the tests and fields of llama-bench."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

import click

from edgert.cli.flags import CACHE_FLAGS, CONTEXT, THREADS_HELP, Several, Threads, backend_flags, backend_options, flag
from edgert.cli.loading import model_path
from edgert.cli.progress import ProgressLine, compiling, notices
from edgert.cli.verb import verb

if TYPE_CHECKING:
    from edgert.benchmark import Result


@verb()
@flag("-m", "--model", metavar="MODEL,...", help="The models; without it, smollm2.")
@click.option("-p", "--n-prompt", type=Several(CONTEXT), default="512", show_default=True, help="Prefill; 0: none.")
@click.option("-n", "--n-gen", type=Several(CONTEXT), default="128", show_default=True, help="Decode; 0: none.")
@click.option("-d", "--n-depth", type=Several(CONTEXT), default="0", show_default=True, help="Tokens cached before.")
@flag("-t", "--threads", type=Several(Threads()), help=THREADS_HELP)
@click.option("-r", "--repetitions", type=click.IntRange(1, 1000), default=5, show_default=True, help="Runs of a test.")
@backend_flags
@click.option("--against", type=click.Choice(["llama"]), help="Run llama.cpp in turn on the same file and threads.")
@click.option(
    "-fa",
    "--flash-attn",
    type=click.Choice(["faster", "on", "off"]),
    default="faster",
    show_default=True,
    help="Flash attention of llama.cpp in a comparison.",
)
@click.option(
    "--isa", type=Several(click.STRING), metavar="NAME,...", help="Instruction sets, each in turn; see doctor."
)
@CACHE_FLAGS[0]
@CACHE_FLAGS[1]
@click.option("-o", "--output", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
def command(
    model: str | None,
    n_prompt: list[int],
    n_gen: list[int],
    n_depth: list[int],
    threads: list[int | None] | None,
    repetitions: int,
    against: str | None,
    flash_attn: str,
    isa: list[str] | None,
    cache_type_k: str | None,
    cache_type_v: str | None,
    output: str,
    **flags: Any,
) -> None:
    """Measures prefill (pp) and decode (tg) of MODEL in tokens per second.

    Several values between commas give one row each. --against llama runs llama.cpp in turn, A B A B, with flash
    attention on or off as it is faster, and prints the ratio of the medians. --isa does so with instruction sets,
    and prints each one's ratio to the first where nothing else is compared.
    """
    from edgert.benchmark import measure, plan

    tests = plan(n_prompt, n_gen, n_depth)
    if not tests:
        raise click.UsageError("-p and -n are both 0: nothing to measure.")
    paths = [model_path(name) for name in model.split(",")] if model is not None else [model_path(None)]
    choices = ("on", "off") if flash_attn == "faster" else (flash_attn,)
    engine = backend_options(flags)
    backend = engine.pop("backend")
    if isa:
        _check_isas(isa, backend)
        backend = "cpu"
    results: list[Result] = []
    with ProgressLine() as line, notices(line):
        for path in paths:
            for n_threads in threads or (None,):
                results += measure(
                    *(path, tests, n_threads, repetitions, backend, against, choices, isa or ()),
                    on_run=line.show,
                    progress=compiling(line),
                    cache_type_k=cache_type_k,
                    cache_type_v=cache_type_v,
                    **engine,
                )
    click.echo({"table": as_table, "json": as_json, "csv": as_csv}[output](results))


def _check_isas(names: list[str], backend: str) -> None:
    """Raises: click.UsageError for what the processor or the backend lacks."""
    from edgert.backends.cpu.isa import available

    if backend not in ("auto", "cpu"):
        raise click.UsageError(f"--isa chooses kernels of the cpu backend, not of {backend}.")
    if missing := [name for name in names if name not in available()]:
        raise click.UsageError(f"--isa: this processor has {', '.join(available())}, not {', '.join(missing)}.")


def as_json(results: list[Result]) -> str:
    """A list of rows."""
    return json.dumps([result.row() for result in results], indent=1)


def as_csv(results: list[Result]) -> str:
    """A row for each test and engine; samples are left to JSON."""
    text = io.StringIO()
    rows = [{k: v for k, v in result.row().items() if not isinstance(v, list)} for result in results]
    writer = csv.DictWriter(text, rows[0], quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def as_table(results: list[Result]) -> str:
    """Markdown as llama-bench prints it; then each engine's peak memory, and what ran."""
    rows = [["model", "size", "params", "backend", "threads", "fa", "test", "t/s", "median"]]
    compared = any(result.ratio is not None for result in results)
    rows[0] += ["ratio"] if compared else []
    several = len({result.engine["isa"] for result in results if result.engine["isa"]}) > 1
    peaks: dict[tuple[str, str, int, str], tuple[Result, int]] = {}
    for result in results:
        row = result.row()
        engine = result.engine["backend"], result.engine["n_threads"], result.engine["isa"]
        known = peaks.get((result.facts.model_filename, *engine), (result, 0))[1]
        peaks[result.facts.model_filename, *engine] = result, max(known, result.peak_rss)
        cells = _cells(result, result.test.name, several)
        cells += [f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}", f"{result.median_ts:.2f}"]
        rows.append(cells + ([f"{result.ratio:.2f}x" if result.ratio else ""] if compared else []))
    for result, peak in peaks.values():
        rows.append([*_cells(result, "peak memory", several), f"{peak / 2**20:.1f} MiB", *([""] * (1 + compared))])
    right = {4, *range(7, len(rows[0]))}
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    rule = ["-" * (width - 1) + (":" if i in right else "-") for i, width in enumerate(widths)]
    lines.insert(1, "| " + " | ".join(rule) + " |")
    engines = sorted({f"{r.engine['backend']} {r.engine['version']}: {r.engine['build']}" for r in results})
    return "\n".join([*lines, "", f"CPU: {results[0].engine['cpu_info']}", *engines])


def _cells(result: Result, test: str, with_isa: bool) -> list[str]:
    """What stands left of the numbers.

    with_isa:  the backend is told by its instruction set
    """
    facts, engine = result.facts, result.engine
    return [
        facts.model_type,
        f"{facts.model_size / 2**20:.2f} MiB",
        f"{facts.model_n_params / 1e6:.2f} M",
        engine["isa"] if with_isa and engine["isa"] else engine["backend"],
        str(engine["n_threads"]),
        engine["flash_attn"],
        test,
    ]
