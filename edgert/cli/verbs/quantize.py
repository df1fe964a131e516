"""`edgert quantize`: a smaller model of a larger one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgert.cli.flags import flag, json_flag, threads_flag
from edgert.cli.loading import source_path
from edgert.cli.progress import stages
from edgert.cli.verb import verb

if TYPE_CHECKING:
    from edgert.quantize.report import Report
    from edgert.quantize.settings import Budget

HELP = {
    "bpw": "Bits per weight over all tensors.  [4.8]",
    "size": "Size of the file, such as 95MB or 1.5GiB.",
    "type": "One of llama.cpp's mixes (q4_k_m, q4_0, ...), or one type for all (bf16, q8_0, ...).",
    "fast": "No calibration: decide by the weights alone.",
    "calibration": "A text (.txt), chats (.jsonl) or the name of a set (articles, chat, code, languages, prose) to "
    "calibrate on; may be given again.  [all sets]",
    "tokens": "Tokens of those texts that are read at most.",
    "imatrix": "Importances from a file (llama.cpp's imatrix) in place of calibrating.",
    "gptq": "Let weights make up for the rounding of others. auto: where it helps on other text.",
    "tensor_type": "Give the tensors that REGEX finds in their names this type; may be given again.",
    "output_type": "Type of output.weight, or of the shared table when it serves as the head.",
    "embedding_type": "Type of token_embd.weight.",
    "keep": "Leave the tensors that REGEX finds in their names as they are; may be given again.",
    "sensitivity": "Sensitivities that `edgert sensitivity` measured, in place of measuring them.",
    "dry_run": "Plan only: print types, sizes, bits per weight and fall-backs.",
    "resume": "Go on where a stopped run of the same command ended.",
    "report": "Compare the result with the source on held-out text, and keep the figures in the file.",
    "report_text": "Held-out text, as --calibration; each is a domain of its own; may be given again.",
    "seed": "Which parts of the texts calibrate, which decide and which judge; 0: every eighth decides and judges.",
    "max_memory": "What this process may take at its peak, such as 1.5GiB.  [what suits the work]",
    "split_max_size": "Write files with tensors of at most this size each; a larger tensor has a file of its own.",
    "allow_requantize": "Take a source that is quantized already; the report says so.",
}


@verb()
@click.argument("source")
@flag("-o", "--output", type=click.Path(path_type=Path), help="The file to write, OUT.gguf.")
@flag("--bpw", type=float, help=HELP["bpw"])
@flag("--size", help=HELP["size"])
@flag("--type", "type_name", help=HELP["type"])
@flag("--fast", is_flag=True, help=HELP["fast"])
@flag("--calibration", multiple=True, metavar="FILE|NAME", help=HELP["calibration"])
@flag("--tokens", type=click.IntRange(2048), default=50_000, show_default=True, help=HELP["tokens"])
@flag("--imatrix", type=click.Path(exists=True, dir_okay=False, path_type=Path), help=HELP["imatrix"])
@flag("--gptq", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True, help=HELP["gptq"])
@flag("--tensor-type", "tensor_types", multiple=True, metavar="REGEX=TYPE", help=HELP["tensor_type"])
@flag("--output-type", metavar="TYPE", help=HELP["output_type"])
@flag("--embedding-type", metavar="TYPE", help=HELP["embedding_type"])
@flag("--keep", multiple=True, metavar="REGEX", help=HELP["keep"])
@flag("--sensitivity", type=click.Path(exists=True, dir_okay=False, path_type=Path), help=HELP["sensitivity"])
@flag("--dry-run", is_flag=True, help=HELP["dry_run"])
@flag("--resume", is_flag=True, help=HELP["resume"])
@flag("--report/--no-report", default=None, help=HELP["report"])
@flag("--report-text", multiple=True, metavar="FILE|NAME", help=HELP["report_text"])
@flag("-s", "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help=HELP["seed"])
@threads_flag
@flag("--max-memory", help=HELP["max_memory"])
@flag("--split-max-size", help=HELP["split_max_size"])
@flag("--allow-requantize", is_flag=True, help=HELP["allow_requantize"])
@json_flag
def command(source: str, output: Path | None, as_json: bool, **flags: Any) -> None:
    """Makes a GGUF model of few bits from SOURCE, a Hugging Face folder or a GGUF of floats.

    Without further flags the types are chosen tensor by tensor: the model itself reads calibration text, the
    loss of each tensor in each type is measured, and the sum is made least within the budget.
    """
    from edgert.quantize import quantizer

    if not flags["dry_run"] and output is None:
        raise click.UsageError("Name the file to write with -o OUT.gguf, or see the plan with --dry-run.")
    budgets = {name: flags.pop(name) for name in ("bpw", "size", "type_name")}
    given = [name for name, value in budgets.items() if value is not None]
    if len(given) > 1:
        raise click.UsageError("--bpw, --size and --type each say how large the result may be: give one of them.")
    budget = budget_of(**budgets)
    try:
        with stages() as on_progress:
            report = quantizer.quantize(
                source_path(source), output, budget=budget, progress=on_progress, **_python_names(flags)
            )
    except KeyboardInterrupt:
        if not flags["dry_run"]:
            click.echo("Stopped. The same command with --resume goes on from here.", err=True)
        raise
    click.echo(json.dumps(report.as_dict(), indent=1) if as_json else as_text(report))


def budget_of(bpw: float | None, size: str | None, type_name: str | None) -> Budget | float | None:
    """The one that is given. Raises: RequestError that names its flag."""
    from edgert.quantize.settings import Budget, n_bytes

    if size is not None:
        return Budget(size=n_bytes(size))
    return bpw if type_name is None else Budget.named(type_name)


def _python_names(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags as `quantizer.quantize` calls them."""
    from edgert.devices.probe import default_threads

    pins = {}
    for given in flags.pop("tensor_types"):
        pattern, equals, name = given.rpartition("=")
        if not equals or not pattern:
            raise click.UsageError(f"--tensor-type is {given!r}, and must be REGEX=TYPE, such as ffn_down=q6_k.")
        pins[pattern] = name
    fast = flags.pop("fast")
    if fast and (flags["calibration"] or flags["imatrix"]):
        raise click.UsageError("--fast is without calibration: leave out --calibration and --imatrix, or --fast.")
    calibration = flags.pop("calibration")
    return flags | {
        "tensor_types": pins,
        "calibration": () if fast else calibration or None,
        "calibration_tokens": flags.pop("tokens"),
        "n_threads": flags.pop("threads") or default_threads(),
    }


def as_text(report: Report) -> str:
    """The report for reading."""
    rows = [f"{name:<14}{text}" for name, text in report.lines()]
    return "\n".join(rows)
