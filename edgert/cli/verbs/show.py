"""`edgert show`: what a model is and what it costs."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import click

from edgert import store
from edgert.cli.flags import CACHE_FLAGS, CONTEXT, flag, json_flag
from edgert.cli.verb import verb
from edgert.errors import EdgertError

if TYPE_CHECKING:
    from pathlib import Path

    from edgert.quantize.architecture import Architecture
    from edgert.quantize.gguf_file import GGUFFile

N_CTX = 4096  # where neither -c nor the model says otherwise


@verb()
@click.argument("model", default=store.DEFAULT)
@flag("-c", "--ctx-size", type=CONTEXT, help="The context whose memory is told; 0: the model's.")
@CACHE_FLAGS[0]
@CACHE_FLAGS[1]
@click.option("--template", "only_template", is_flag=True, help="Print the chat template alone.")
@json_flag
def command(
    model: str,
    ctx_size: int | None,
    cache_type_k: str | None,
    cache_type_v: str | None,
    only_template: bool,
    as_json: bool,
) -> None:
    """Shows what MODEL is: sizes, true bits per weight, context, template, and its cost in memory."""
    from edgert.quantize.gguf_file import GGUFFile

    path = store.resolve(model)
    with GGUFFile.open(path) as file:
        facts = {"model": model, "path": str(path), **describe_file(file, ctx_size, (cache_type_k, cache_type_v))}
    if only_template:
        if facts["chat_template"] is None:
            raise EdgertError(f"{model} has no chat template.")
        click.echo(facts["chat_template"])
    elif as_json:
        click.echo(json.dumps(facts, ensure_ascii=False, indent=1))
    else:
        click.echo(as_text(facts))


def describe_file(
    file: GGUFFile, n_ctx: int | None, types: tuple[str | None, str | None] = (None, None)
) -> dict[str, Any]:
    """The facts of a file, as JSON can hold them; sizes in bytes.

    n_ctx:  context whose memory is told; 0: the model's; None: a common one
    types:  of the cached keys and values; None: the cpu backend's choice
    """
    from edgert.backends import choice
    from edgert.quantize.architecture import describe
    from edgert.speculation.loading import find_made_for

    draft = find_made_for(file)
    try:
        architecture, obstacle = describe(file), None
    except EdgertError as error:
        architecture, obstacle = None, str(error)
    weights = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    n_bytes = sum(tensor.n_bytes for tensor in file.tensors.values())
    metadata = file.metadata
    template = metadata.get("tokenizer.chat_template")
    facts: dict[str, Any] = {
        "name": str(metadata.get("general.name") or ""),
        "license": str(metadata.get("general.license") or ""),
        "architecture": str(metadata.get("general.architecture") or ""),
        "runs_here": obstacle is None,
        "obstacle": obstacle,
        "file_size": file.n_bytes,
        "parameters": weights,
        "bits_per_weight": round(8 * n_bytes / weights, 3) if weights else 0.0,
        "tensor_types": tensor_types(file),
        "sizes": sizes(architecture) if architecture else {},
        "tokenizer": {
            "model": str(metadata.get("tokenizer.ggml.model") or ""),
            "pre": str(metadata.get("tokenizer.ggml.pre") or ""),
            "n_vocab": metadata.length("tokenizer.ggml.tokens") or 0,
        },
        "chat_template": template if isinstance(template, str) else None,
        "sampling": sampling(file),
        "quantization": quantization(file),
        "draft": None if draft is None else str(draft),
        "memory": memory_cost(file, architecture, n_ctx, types, draft) if architecture else {},
        "engine": choice.foresee(file) if architecture else {},
    }
    return facts


def quantization(file: GGUFFile) -> dict[str, Any]:
    """What edgert's quantizer noted in the file of its own making, and how far the model is from its source."""
    from dataclasses import asdict

    from edgert.quantize.report import from_metadata

    facts, domains = from_metadata(file.metadata)
    return facts | {"quality": {name: asdict(row) for name, row in domains.items()}} if facts else {}


def tensor_types(file: GGUFFile) -> list[dict[str, Any]]:
    """One row for each format in the file, the one with the most bytes first."""
    rows: dict[str, dict[str, Any]] = {}
    for tensor in file.tensors.values():
        row = rows.setdefault(
            tensor.format.name,
            {
                "type": tensor.format.name,
                "tensors": 0,
                "parameters": 0,
                "bits_per_weight": tensor.format.bits_per_weight,
                "bytes": 0,
            },
        )
        row["tensors"] += 1
        row["parameters"] += math.prod(tensor.shape)
        row["bytes"] += tensor.n_bytes
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def sizes(architecture: Architecture) -> dict[str, Any]:
    """The numbers of the architecture by GGUF's names."""
    windows = sorted({layer.window for layer in architecture.layers if layer.window})
    return {
        name: getattr(architecture, name)
        for name in ("n_ctx_train", "n_layer", "n_embd", "n_ff", "n_head", "n_head_kv", "head_dim", "n_vocab")
    } | {"windows": windows, "tied_head": architecture.tied_head}


def sampling(file: GGUFFile) -> dict[str, Any]:
    """The sampling that requests start from: the file's `general.sampling.*` over edgert's defaults."""
    from dataclasses import asdict

    from edgert.options import SamplingParams

    values = asdict(SamplingParams.from_metadata(file.metadata))
    return {name: value for name, value in values.items() if name not in ("logit_bias", "seed")}


def memory_cost(
    file: GGUFFile,
    architecture: Architecture,
    n_ctx: int | None,
    types: tuple[str | None, str | None] = (None, None),
    draft: Path | None = None,
) -> dict[str, int]:
    """Bytes that the process takes with a context full of tokens, as `backends.cpu.footprint` tells them.

    draft:  the model that guesses besides
    """
    from dataclasses import asdict

    from edgert.backends.cpu.footprint import draft_bytes, footprint
    from edgert.quantize.gguf_file import GGUFFile

    if n_ctx is None:
        n_ctx = min(N_CTX, architecture.n_ctx_train)
    n_ctx = n_ctx or architecture.n_ctx_train
    cost = footprint(file, architecture, n_ctx, types=types)
    guessing = 0
    if draft is not None:
        with GGUFFile.open(draft) as small:
            guessing = draft_bytes(small, n_ctx)
    return {"n_ctx": n_ctx, **asdict(cost), "draft": guessing, "total": cost.total + guessing}


def as_text(facts: dict[str, Any]) -> str:
    """The facts for reading."""
    from edgert.quantize.report import Domain, quality_lines, tensor_count

    lines: list[tuple[str, str]] = [("model", facts["model"]), ("file", facts["path"])]
    if facts["name"]:
        licence = f" ({facts['license']})" if facts["license"] else ""
        lines.append(("name", facts["name"] + licence))
    lines.append(("architecture", facts["architecture"]))
    if facts["obstacle"]:
        lines.append(("", f"does not run: {facts['obstacle']}"))
    if size := facts["sizes"]:
        lines.append(
            (
                "layers",
                f"{size['n_layer']} of {size['n_embd']} wide, feed-forward {size['n_ff']}, "
                f"{size['n_head']} heads of {size['head_dim']} ({size['n_head_kv']} for keys and values)",
            )
        )
        window = f", {size['windows'][0]} in windowed layers" if size["windows"] else ""
        lines.append(("context", f"{size['n_ctx_train']:,} tokens{window}"))
    lines.append(
        (
            "parameters",
            f"{_count(facts['parameters'])} in {_mb(facts['file_size'])}, "
            f"{facts['bits_per_weight']:.2f} bits per weight",
        )
    )
    for row in facts["tensor_types"]:
        lines.append(
            (
                "",
                f"{row['type']:<8}{tensor_count(row['tensors'])} {_count(row['parameters']):>9} "
                f"{row['bits_per_weight']:>7.3f} bits {_mb(row['bytes']):>10}",
            )
        )
    tokenizer = facts["tokenizer"]
    kind = "/".join(filter(None, (tokenizer["model"], tokenizer["pre"])))
    lines.append(("tokenizer", f"{kind or 'none'}, {tokenizer['n_vocab']:,} tokens"))
    template = facts["chat_template"]
    lines.append(("template", f"{len(template)} characters (--template prints it)" if template else "none"))
    lines.append(("sampling", ", ".join(f"{name} {value}" for name, value in facts["sampling"].items())))
    if facts["draft"]:
        lines.append(("draft", f"{facts['draft']}, which guesses ahead unless --spec-type off is given"))
    if made := facts["quantization"]:
        again = ", which was quantized before" if made["requantized"] else ""
        text = "without calibration"
        if made["calibration"]:
            text = f"calibrated on {made['calibration_tokens']:,} tokens of {made['calibration']}"
        lines.append(("quantized", f"from {made['source_types']}{again}, {text}"))
        lines += quality_lines({name: Domain(**row) for name, row in made["quality"].items()})
    if cost := facts["memory"]:
        lines.append(
            (
                "memory",
                f"{_mb(cost['total'])} with {cost['n_ctx']:,} tokens of context: weights {_mb(cost['weights'])}, "
                f"cache {_mb(cost['kv'])} ({cost['kv_per_token'] / 1e3:.1f} kB per token), "
                f"buffers {_mb(cost['buffers'])}, "
                + (f"draft {_mb(cost['draft'])}, " if cost["draft"] else "")
                + f"program {_mb(cost['program'])}",
            )
        )
    if engine := facts["engine"]:
        from edgert.backends.base import Trial

        lines.append(("engine", f"{engine['backend'] or 'auto'}: {engine['reason']}"))
        lines += [("", str(Trial(**trial))) for trial in engine["trials"]]
    return "\n".join(f"{name:<14}{value}" for name, value in lines)


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB"


def _count(number: int) -> str:
    for unit, name in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)
