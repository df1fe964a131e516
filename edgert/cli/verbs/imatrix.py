"""`edgert imatrix`: which columns of a model's matrices matter, as files that llama.cpp's tools share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgert.cli.flags import backend_flags, backend_options, flag, json_flag, threads_flag
from edgert.cli.loading import model_path
from edgert.cli.progress import ProgressLine, compiling, notices
from edgert.cli.verb import verb

if TYPE_CHECKING:
    from edgert.quantize.calibration import Statistics

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@verb()
@flag("-m", "--model", metavar="MODEL", help="A model, or a folder in Hugging Face's format.")
@flag(
    "-f",
    "--file",
    "texts",
    metavar="TEXT",
    multiple=True,
    help='A text (UTF-8), chats (.jsonl, one {"messages": [...]} a line), or one of the built-in sets articles, '
    "chat, code, languages, prose; may be given again. Without it, all of the sets.",
)
@flag("-o", "--output-file", type=click.Path(dir_okay=False, path_type=Path), help="GGUF, or .dat.  [imatrix.gguf]")
@flag("-c", "--ctx-size", type=click.IntRange(2), default=512, show_default=True, help="Tokens of a chunk.")
@flag("--chunks", type=click.IntRange(1), help="How many chunks at most; all of the texts without it.")
@click.option("--in-file", type=FILE, multiple=True, help="Add what is in these files; without -m, only that.")
@click.option("--show", type=FILE, help="Print what a file holds, and stop.")
@threads_flag
@backend_flags
@json_flag
def command(
    model: str | None,
    texts: tuple[str, ...],
    output_file: Path | None,
    ctx_size: int,
    chunks: int | None,
    in_file: tuple[Path, ...],
    show: Path | None,
    threads: int | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Runs MODEL on texts and writes the mean squares of what its matrices read, column by column.

    Quantizers weigh rounding errors by them; llama-quantize takes the file with --imatrix. The matrices of a model
    without a head of its own (tied embeddings) all have an entry, the embedding included. --backend llama (on a GPU,
    say) and onnx run a GGUF file as it is; auto is the cpu backend, which also reads folders.
    """
    from edgert.quantize.imatrix import read_imatrix, write_imatrix
    from edgert.quantize.target import check_target

    if show:
        shown = table(read_imatrix(show))
        click.echo(json.dumps(shown, indent=1) if as_json else as_text(shown))
        return
    if model is None and not in_file:
        raise click.UsageError("name a model with -m, or a file with --show or --in-file.")
    if model is None and texts:
        raise click.UsageError("-f is read by a model: name it with -m.")
    engine = backend_options(flags)
    engine["backend"] = {"auto": "cpu"}.get(engine["backend"], engine["backend"])
    output_file = output_file or Path("imatrix.gguf")
    check_target(output_file, [*filter(None, [model]), *texts])
    parts = [read_imatrix(path) for path in in_file]
    if model is not None:
        parts.append(collect(model, texts, ctx_size, chunks, threads, **engine))
    whole = parts[0]
    for part in parts[1:]:
        whole.merge(part)
    write_imatrix(output_file, whole)
    facts = {"output": str(output_file), "tensors": len(whole.sums), "chunks": whole.n_chunks, "texts": whole.datasets}
    unreached = {name: n for name in whole.sums if (n := whole.unreached(name))}
    if as_json:
        click.echo(json.dumps({**facts, "unreached_experts": unreached}, indent=1))
        return
    click.echo(f"{output_file}: {len(whole.sums)} tensors, {whole.n_chunks} chunks of {', '.join(whole.datasets)}")
    if unreached:
        click.echo(f"No token reached {sum(unreached.values())} experts in {len(unreached)} tensors: give more text.")


def collect(
    model: str, sources: Sequence[str], n_ctx: int, n_chunks: int | None, n_threads: int | None, **engine: Any
) -> Statistics:
    """Statistics of a model on texts, with a line that tells how far it is; engine: options of `open_engine`."""
    from edgert.quantize.calibration import calibrate
    from edgert.quantize.calibration_text import cut, default_texts, read_text
    from edgert.quantize.engine import open_engine

    path = Path(model) if Path(model).is_dir() else model_path(model)
    with ProgressLine() as line, notices(line):
        line.show(f"loading {path.name}")
        with open_engine(path, n_ctx=n_ctx, n_threads=n_threads, progress=compiling(line), **engine) as running:
            line.show("reading the texts")
            most = n_chunks and n_chunks * n_ctx
            texts = [read_text(running, source, most) for source in sources] or default_texts(running, most)
            pieces = cut(running, texts, n_ctx, n_chunks)

            def on_chunk(done: int, of: int) -> None:
                line.stage("calibrating", done, of)

            line.stage("calibrating", 0, len(pieces))
            return calibrate(running, pieces, datasets=[Path(text.name).name for text in texts], on_chunk=on_chunk)


def table(statistics: Statistics) -> dict[str, Any]:
    """What a file holds, as JSON can hold it: for each tensor the mean square, the largest column's, and how much of
    the sum the largest hundredth of the columns has."""
    import numpy as np

    rows = []
    for name, sums in statistics.sums.items():
        counts = statistics.counts[name]
        importance = statistics.importance(name)
        means: Any = np.zeros(sums.shape) if importance is None else importance.reshape(sums.shape).astype(float)
        top = -np.sort(-means, axis=1)[:, : max(1, means.shape[1] // 100)]
        rows.append(
            {
                "tensor": name,
                "matrices": len(counts),
                "columns": sums.shape[1],
                "tokens": int(counts.sum()),
                "unreached": int((counts == 0).sum()),
                "mean_square": float(means.mean()),
                "largest": float(means.max()),
                "top_1_percent": float(top.sum() / max(means.sum(), 1e-30)),
            }
        )
    return {
        "texts": statistics.datasets,
        "chunks": statistics.n_chunks,
        "chunk_size": statistics.chunk_size,
        "tensors": rows,
    }


def as_text(shown: dict[str, Any]) -> str:
    """The table for reading."""
    rows = shown["tensors"]
    width = max(len(row["tensor"]) for row in rows)
    texts = ", ".join(shown["texts"]) or "unnamed texts"
    lines = [
        f"{len(rows)} tensors, {shown['chunks']} chunks of {shown['chunk_size']} tokens: {texts}",
        "",
        f"{'tensor':<{width}}  {'columns':>8}{'tokens':>10}{'mean x²':>12}{'largest':>12}{'top 1 %':>9}",
    ]
    for row in rows:
        columns = f"{row['matrices']}x{row['columns']}" if row["matrices"] > 1 else str(row["columns"])
        note = f"  {row['unreached']} experts unreached" if row["unreached"] else ""
        lines.append(
            f"{row['tensor']:<{width}}  {columns:>8}{row['tokens']:>10,}{row['mean_square']:>12.4g}"
            f"{row['largest']:>12.4g}{100 * row['top_1_percent']:>7.1f} %{note}"
        )
    return "\n".join(lines)
