"""`edgert prune`: a model with fewer layers (experimental)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgert.cli.flags import flag, json_flag, threads_flag
from edgert.cli.loading import source_path
from edgert.cli.progress import stages
from edgert.cli.verb import verb

if TYPE_CHECKING:
    from edgert.quantize.prune import Step


@verb()
@click.argument("source")
@flag("-o", "--output", type=click.Path(path_type=Path), required=True, help="The file to write, OUT.gguf.")
@flag("--layers", "n_layers", type=click.IntRange(1), required=True, help="How many layers go.")
@flag("--calibration", multiple=True, metavar="FILE|NAME", help="Text to decide by; may be given again.")
@threads_flag
@flag("--allow-requantize", is_flag=True, help="Take a source that is quantized already.")
@json_flag
def command(
    source: str,
    output: Path,
    n_layers: int,
    calibration: tuple[str, ...],
    threads: int | None,
    allow_requantize: bool,
    as_json: bool,
) -> None:
    """Writes SOURCE without some of its layers (experimental).

    Step by step the layer goes without which the predictions on calibration text change least. What stays
    keeps its type: prune floats, and give them to `edgert quantize` or to further training, without which small
    models lose much.
    """
    from edgert.quantize import prune

    def tell(step: Step) -> None:
        click.echo(
            f"{prune.name_of(step.layers)} gone: mean KLD {step.kld:.4f}, on other text {step.held_out:.4f}",
            err=True,
        )

    with stages() as on_progress:
        result = prune.prune(
            source_path(source),
            output,
            n_layers,
            calibration=calibration or None,
            n_threads=threads,
            allow_requantize=allow_requantize,
            progress=on_progress,
            on_step=tell,
        )
    if as_json:
        click.echo(json.dumps(asdict(result) | {"removed": result.removed}, indent=1))
        return
    click.echo(f"{result.paths[0]}: {result.n_layer} layers, {result.n_bytes / 1e6:,.2f} MB")
    click.echo(f"without the source's layers {', '.join(map(str, result.removed))} (experimental)")
    click.echo(f"mean KLD from the source {result.steps[-1].held_out:.4f} on text that did not decide")
