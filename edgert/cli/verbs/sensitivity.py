"""`edgert sensitivity`: which tensors of a model must not be rounded coarsely."""

from __future__ import annotations

import importlib
import json
import math
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from edgert.cli.flags import flag, json_flag, threads_flag
from edgert.cli.loading import model_path
from edgert.cli.progress import ProgressLine, notices, stages
from edgert.cli.verb import verb
from edgert.errors import EdgertError

if TYPE_CHECKING:
    from edgert.quantize.sensitivity import Sensitivity

BAR = 40  # characters of the longest


@verb()
@click.argument("source", metavar="MODEL|FOLDER|JSON")
@flag("-o", "--output-file", type=click.Path(dir_okay=False, path_type=Path), help="Keep the figures as JSON.")
@flag(
    "--calibration",
    multiple=True,
    metavar="FILE|NAME",
    help="A text, chats (.jsonl) or the name of a set, to measure on; may be given again.",
)
@flag("--tokens", type=click.IntRange(2048), default=50_000, show_default=True, help="Tokens that are read at most.")
@flag(
    "--types",
    default="",
    metavar="TYPE,...",
    help="Types to compare; without it those that `edgert quantize` chooses from.",
)
@flag(
    "--groups", type=click.IntRange(1), default=64, show_default=True, help="Probes at most, each a group of tensors."
)
@flag("--gptq/--no-gptq", default=True, show_default=True, help="Round with error feedback, as `quantize` does.")
@flag("--max-memory", help="What this process may take at its peak, such as 1.5GiB.  [what suits the work]")
@flag("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw a picture too; needs edgert[plots].")
@threads_flag
@json_flag
def command(source: str, output_file: Path | None, png: Path | None, as_json: bool, **flags: Any) -> None:
    """Measures how far each tensor group of a model pushes its predictions when it is rounded to each type.

    Figures are KL divergences in nats a token, predicted from a few probes of the running model. `edgert quantize`
    takes the file with --sensitivity in place of measuring again. A file that was written before is shown anew.
    """
    from edgert.quantize.sensitivity import Sensitivity, table
    from edgert.quantize.target import check_target

    if png:
        _matplotlib()  # before the work, not after it
    for written in filter(None, (output_file, png)):
        check_target(written, [source, *flags["calibration"]] if not source.endswith(".json") else ())
    path = Path(source)
    if path.suffix == ".json" and path.is_file():
        found = Sensitivity.load(path)
    else:
        if not output_file and not as_json:
            click.echo("note: with -o FILE.json the figures are kept for `edgert quantize --sensitivity`.", err=True)
        found = measured(path if path.exists() else model_path(source), **flags)
    if output_file:
        found.save(output_file)
    formats, rows = table(found)
    if png:
        draw(formats, rows, png)
    if as_json:
        click.echo(json.dumps({"n_tokens": found.n_tokens, "formats": formats, "groups": rows}, indent=1))
        return
    click.echo(as_text(formats, rows, found.n_tokens))
    for written in filter(None, (output_file, png)):
        click.echo(f"written: {written}")


def measured(
    source: Path,
    calibration: tuple[str, ...],
    tokens: int,
    types: str,
    groups: int,
    gptq: bool,
    threads: int | None,
    max_memory: str | None,
) -> Sensitivity:
    """Lets the model read, and probes it."""
    from edgert.devices.probe import default_threads
    from edgert.quantize import encoding
    from edgert.quantize.allocation import offered
    from edgert.quantize.formats import WRITABLE
    from edgert.quantize.measuring import Measuring
    from edgert.quantize.mixes import is_quantizable
    from edgert.quantize.settings import DEFAULT, Budget, Settings, n_bytes
    from edgert.quantize.source import open_source

    chosen = [name.strip().upper() for name in types.split(",") if name.strip()] or None
    for name in chosen or ():
        if name not in WRITABLE:
            raise click.UsageError(f"--types: {name!r} is no type that edgert quantizes to.")
    settings = Settings(
        Budget.of(None),
        calibration=calibration or DEFAULT,
        calibration_tokens=tokens,
        gptq="auto" if gptq else "off",
        n_threads=threads or default_threads(),
        max_memory=None if max_memory is None else n_bytes(max_memory, "max_memory"),
        report=False,
    )
    with (
        notices(ProgressLine()),
        stages() as on_progress,
        TemporaryDirectory(prefix="edgert-") as folder,
        open_source(source, allow_requantize=True) as opened,
    ):
        if opened.is_quantized:
            click.echo(
                f"note: {source} is quantized already. Types that hold its values exactly seem to cost nothing, "
                "and what is derived from them means little: measure the float original.",
                err=True,
            )
        types_of = {
            name: offered(tensor.shape, chosen, chosen is None and encoding.lies_on_grid(tensor))
            for name, tensor in opened.tensors.items()
            if is_quantizable(name, tensor.shape)
        }
        matrices = {name: opened.tensors[name] for name, formats in types_of.items() if formats}

        shapes = {name: tensor.shape for name, tensor in matrices.items()}
        with closing(Measuring(opened, settings, shapes, lambda: Path(folder), on_progress)) as measuring:
            measuring.check(needs_model=True)
            names = {format.name for formats in types_of.values() for format in formats}
            measuring.foretell(names, rounds=False, max_groups=groups)
            return measuring.sensitivity(matrices, lambda tensor: types_of[tensor.name], groups)


def as_text(formats: list[str], rows: list[dict[str, Any]], n_tokens: int) -> str:
    """The table, and bars of each group's type of the fewest bits."""
    width = max(len("group"), *(len(row["group"]) for row in rows))
    lines = [
        f"KL divergence of the output (nats a token, measured on {n_tokens:,} tokens) when a group alone has a type:",
        "",
        f"{'group':<{width}}" + "".join(f"{name:>10}" for name in formats),
    ]
    for row in rows:
        cells = (row["kld"][name] for name in formats)
        lines.append(f"{row['group']:<{width}}" + "".join(f"{_number(value):>10}" for value in cells))
    values = {
        row["group"]: next((row["kld"][name] for name in formats if row["kld"][name] is not None), 0.0) for row in rows
    }
    longest = max(values.values(), default=0.0) or 1.0
    # On a scale of roots: bars of single layers would vanish beside an embedding's.
    lines += ["", "In the first type of each, lengths as square roots:"]
    for group, value in values.items():
        lines.append(f"{group:<{width}} {'█' * math.ceil(BAR * math.sqrt(value / longest)):<{BAR}} {_number(value)}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.6f}" if value >= 1e-6 or value == 0 else f"{value:.0e}"


def _matplotlib() -> Any:
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        raise EdgertError('A picture needs matplotlib: pip install "edgert[plots]", or leave --png out.') from None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def draw(formats: list[str], rows: list[dict[str, Any]], path: Path) -> None:
    """A picture of the table: groups down, types across, logarithmic colours."""
    pyplot = _matplotlib()
    values = [
        [math.nan if row["kld"][name] is None else math.log10(max(row["kld"][name], 1e-9)) for name in formats]
        for row in rows
    ]
    figure, axes = pyplot.subplots(figsize=(2 + 0.6 * len(formats), 1.5 + 0.2 * len(rows)))
    image = axes.imshow(values, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(formats)), formats, rotation=45)
    axes.set_yticks(range(len(rows)), [row["group"] for row in rows], fontsize=6)
    figure.colorbar(image, label="log10 of the KL divergence")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
