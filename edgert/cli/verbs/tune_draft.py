"""`edgert tune-draft`: what a draft model gains here, by the length of its guesses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgert.cli.flags import Finite, Several, json_flag, model_flags
from edgert.cli.loading import load
from edgert.cli.progress import ProgressLine
from edgert.cli.verb import verb
from edgert.errors import EdgertError

MOST = 62  # as speculation/loading.py, which is not imported before it is needed (a test compares them)

if TYPE_CHECKING:
    from edgert.speculation.tuning import Point


@verb()
@model_flags
@click.option(
    "--lengths",
    type=Several(click.IntRange(1, MOST)),
    default="1,2,3,4,5,6,8",
    show_default=True,
    help="Lengths to try.",
)
@click.option(
    "--temps",
    type=Several(Finite(0, 100)),
    default="0,0.7,0.9",
    show_default=True,
    help="Temperatures to try them at.",
)
@click.option("-n", "--n-predict", type=click.IntRange(2), default=96, show_default=True, help="Tokens of an answer.")
@click.option("-f", "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A prompt a line.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Write the curve as a picture.")
@json_flag
def command(
    lengths: list[int],
    temps: list[float],
    n_predict: int,
    file: Path | None,
    png: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Measures what a draft model gains on this machine, by the number of tokens that it guesses for a step.

    Each prompt is answered with every length in turn, without guesses, and with the length chosen anew at each
    step, which is what `chat` and `run` do. The answers are the same with all of them.
    """
    from edgert.speculation.tuning import PROMPTS, best, curve

    prompts: tuple[str, ...] = PROMPTS
    if file is not None:
        prompts = tuple(
            line for line in file.read_text(encoding="utf-8-sig", errors="replace").splitlines() if line.strip()
        )
        if not prompts:
            raise click.UsageError(f"--file: {file} has no line with a prompt.")
    if png is not None:
        _pyplot()
    flags["spec_type"] = "draft"
    flags["spec_max"] = max(*lengths, flags["spec_max"] or 8)
    with load(flags) as model, ProgressLine() as line:
        points = []
        for temperature in temps:

            def show(done: int, of: int, temperature: float = temperature) -> None:
                line.stage(f"temperature {temperature:g}", done, of)

            points += curve(
                model,
                lengths,
                temperature,
                prompts=prompts,
                n_predict=n_predict,
                progress=show,
            )
        line.clear()
        length, gain = best(points)
        if as_json:
            rows = [point.as_dict() for point in points]
            click.echo(json.dumps({"backend": str(model.verdict), "best": length, "speed_up": gain, "points": rows}))
        else:
            click.echo(f"{model.verdict}\n")
            click.echo(table(points))
            click.echo(f"\n{advice(length, gain)}")
    if png is not None:
        picture(points, png)


def name(length: int) -> str:
    """A length as it is shown."""
    return {0: "none", -1: "adaptive"}.get(length, str(length))


def table(points: list[Point]) -> str:
    """A row for each length at each temperature, with a bar for its speed-up."""
    most = max(point.speed_up for point in points)
    lines = ["temp  guessed   tok/s  speed-up   right   wrong  tokens/step"]
    order = sorted(points, key=lambda p: (p.temperature, p.length if p.length >= 0 else 1 << 20))
    for before, point in zip([None, *order], order, strict=False):
        if before and before.temperature != point.temperature:
            lines.append("")
        shares = f"{100 * point.accepted:5.1f} %  {100 * point.rejected:5.1f} %" if point.length else "      -        -"
        lines.append(
            f"{point.temperature:4.2g}  {name(point.length):<8} {point.per_second:6.1f}   {point.speed_up:6.2f}x  "
            f"{shares}  {point.per_step:6.2f}  {'█' * round(20 * point.speed_up / most)}"
        )
    return "\n".join(lines)


def advice(length: int, gain: float) -> str:
    """What to do with the result."""
    if length == 0:
        return "Best: no guesses; this draft does not pay here (--spec-type off or ngram)."
    if length < 0:
        return f"Best: as many as promise to pay, which is the default: {gain:.2f}x over these temperatures."
    return (
        f"Best: {length} in each step, {gain:.2f}x over these temperatures (--spec-min {length} --spec-max {length})."
    )


def _pyplot() -> Any:
    """matplotlib without a screen. Raises: EdgertError when it is not installed."""
    import importlib

    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise EdgertError("--png needs matplotlib: pip install matplotlib") from None


def picture(points: list[Point], path: Path) -> None:
    """Writes the speed-up by length, a line for each temperature, and the adaptive one as a level."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for i, temperature in enumerate(dict.fromkeys(point.temperature for point in points)):
        mine = sorted((p.length, p.speed_up) for p in points if p.temperature == temperature)
        fixed = [(x, y) for x, y in mine if x >= 0]
        axes.plot(*zip(*fixed, strict=True), "o-", color=f"C{i}", label=f"temperature {temperature:g}")
        axes.axhline(mine[0][1], color=f"C{i}", linestyle=":", label=f"adaptive, {temperature:g}")
    axes.set_xlabel("tokens guessed in each step")
    axes.set_ylabel("speed-up over plain decoding")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
