"""`edgert plan`: what a model needs on each device, whether it fits, and how fast it will be."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from edgert.cli.flags import CACHE_FLAGS, CONTEXT, flag, json_flag, threads_flag
from edgert.cli.loading import model_path
from edgert.cli.progress import ProgressLine, bar, compiling, notices
from edgert.cli.verb import verb

if TYPE_CHECKING:
    from edgert.backends.planning import Place


@verb()
@flag("-m", "--model", metavar="MODEL", help="The model; without it, smollm2.")
@flag("-c", "--ctx-size", type=CONTEXT, help="Context of each conversation in tokens; 0: the model's.  [4096]")
@flag("-md", "--model-draft", "--draft", "model_draft", metavar="MODEL", help="A draft that runs beside it.")
@flag("-np", "--parallel", type=click.IntRange(1, 1024), default=1, show_default=True, help="Conversations at once.")
@CACHE_FLAGS[0]
@CACHE_FLAGS[1]
@threads_flag
@click.option("--measure/--no-measure", default=True, help="Measure this machine, which takes seconds the first time.")
@json_flag
def command(
    model: str | None,
    ctx_size: int | None,
    model_draft: str | None,
    parallel: int,
    cache_type_k: str | None,
    cache_type_v: str | None,
    threads: int | None,
    measure: bool,
    as_json: bool,
) -> None:
    """Shows what MODEL needs on each device of this machine, whether it fits, and how fast it will be.

    The exit code is 1 where no device has room for it.
    """
    from edgert import context
    from edgert.backends import planning
    from edgert.backends.cpu import rates
    from edgert.quantize.architecture import describe
    from edgert.quantize.gguf_file import GGUFFile
    from edgert.speculation.loading import check_vocabulary, find, find_made_for

    path = model_path(model)
    with ExitStack() as stack, ProgressLine() as line, notices(line):
        file = stack.enter_context(GGUFFile.open(path))
        draft = find_made_for(file) if model_draft is None else find(model_draft)
        draft_file = None if draft is None else stack.enter_context(GGUFFile.open(draft))
        if draft_file is not None:
            check_vocabulary(file, draft_file)
        drafts = {"made_draft" if model_draft is None else "draft": draft_file}
        n_ctx = context.chosen(file, ctx_size)
        context.warn_beyond(file, n_ctx)
        types, a = (cache_type_k, cache_type_v), describe(file)

        def drawn(text: str, share: float) -> None:
            line.show(f"{bar(min(share, 1.0))} {text}")

        def on_step(done: int, of: int) -> None:
            drawn("measuring this machine, the first time for some seconds", done / of)

        def machine() -> rates.Rates:
            on_step(0, 1)
            heads = a.n_head, a.n_head_kv, a.head_dim
            return rates.rates(threads, heads, types, progress=compiling(line), on_step=on_step)

        request = planning.Request(
            file, n_ctx, parallel, types, **drafts, excerpts=measure, n_threads=threads, on_excerpt=drawn
        )
        places = planning.places(request, machine if measure else None)
    facts = {
        "model": str(path),
        "draft": None if draft is None else str(draft),
        "n_ctx": n_ctx,
        "n_parallel": parallel,
        "places": [asdict(place) | {"fits": place.fits} for place in places],
    }
    click.echo(json.dumps(facts, indent=1) if as_json else as_text(facts, places))
    if not any(place.fits for place in places):
        raise places[0].refusal(f"{path} with {parallel} x {n_ctx} positions")


def as_text(facts: dict[str, Any], places: list[Place]) -> str:
    """The plan for reading."""
    many = f"{facts['n_parallel']} conversations of " if facts["n_parallel"] > 1 else ""
    lines = [f"{facts['model']}, {many}{facts['n_ctx']:,} tokens"]
    for place in places:
        name = place.backend if place.device == place.backend else f"{place.backend} on {place.device}"
        parts = [
            f"{part.replace('_', ' ')} {_mb(size)}" for part, size in place.memory.items() if part != "total" and size
        ]
        lines += ["", f"{name}", f"  memory   {_mb(place.memory['total'])}: {', '.join(parts)}"]
        if place.obstacle:
            lines += [f"  unusable {place.obstacle}", f"           {place.remedy}"]
        available = f"{_mb(place.available)} are available"
        if place.fits:
            lines.append(f"  fits     {available}; the largest context that fits is {place.largest_context:,}")
        else:
            lines.append(f"  too big  {available}, {_mb(place.missing)} are missing; {place.remedy}")
        if place.layers:
            lines.append(f"  layers   {place.layers[0]} of {place.layers[1]} on the GPU")
        if place.prefill and place.decode:
            end = f", {place.decode_at_end:,.0f} at the end" if place.decode_at_end else ""
            where = " at the beginning of the context" if end else ""
            alone = " for one conversation alone" if facts["n_parallel"] > 1 else ""
            plain = ", without guesses" if place.memory["draft"] else ""
            rates = f"prefill {place.prefill:,.0f}, decode {place.decode:,.0f}{where}{end} tok/s"
            lines.append(f"  rates    {rates}{alone}{plain}")
        if place.basis:
            lines.append(f"  basis    {place.basis}")
    return "\n".join(lines)


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.0f} MB"
