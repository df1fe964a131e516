"""`edgert devices`: what this machine can run on, and what would have to be done for the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from edgert.cli.flags import json_flag
from edgert.cli.progress import ProgressLine, bar, compiling
from edgert.cli.verb import verb


@verb()
@click.option(
    "--measure/--no-measure", default=True, help="Measure memory and int8 products, which takes seconds the first time."
)
@json_flag
def command(measure: bool, as_json: bool) -> None:
    """Shows every processor of this machine and which backend can use it; if none can, why, and what helps."""
    with ProgressLine() as line:

        def on_step(done: int, of: int) -> None:
            line.show(f"{bar(done / of)} measuring this machine")

        if measure:
            on_step(0, 1)
        facts = gather(measure, compiling(line), on_step)
    click.echo(json.dumps(facts, ensure_ascii=False, indent=1) if as_json else as_text(facts))


def gather(
    measure: bool,
    progress: Callable[[int, int], None] | None = None,
    on_step: Callable[[int, int], object] = lambda _done, _of: None,
) -> dict[str, Any]:
    """The facts, as JSON can hold them; bytes, bytes a second, and multiply-adds a second."""
    from edgert.backends import survey
    from edgert.backends.cpu import isa
    from edgert.backends.cpu.rates import rates
    from edgert.devices import gpus, probe

    machine = rates(progress=progress, on_step=on_step) if measure else None
    cpu = probe.probe()
    found = gpus.gpus()
    facts: dict[str, Any] = {
        "cpu": asdict(cpu)
        | {
            "affinity": len(cpu.affinity),
            "threads": cpu.default_threads,
            "instruction_sets": isa.available(),
            "read_bytes_per_second": None if machine is None else round(machine.read[max(machine.read)]),
            "int8_per_second": None if machine is None else round(machine.int8),
            "busy": None if machine is None else machine.busy,
        },
        "gpus": [asdict(gpu) for gpu in found],
        "uses": [asdict(use) | {"usable": use.usable} for use in survey.survey(found)],
    }
    return facts


def as_text(facts: dict[str, Any]) -> str:
    """The facts for reading."""
    cpu = facts["cpu"]
    quota = "" if cpu["quota"] is None else f", quota {cpu['quota']:g}"
    caches = ", ".join(f"{name.upper()} {_size(cpu[name])}" for name in ("l1d", "l2", "l3") if cpu[name])
    lines = [
        f"CPU   {cpu['model_name']}",
        f"      {cpu['physical_cores']} cores, {cpu['affinity']} of {cpu['logical_cores']} processors usable{quota}, "
        f"{cpu['threads']} threads by default",
        f"      {caches or 'caches unknown'}; instruction sets {', '.join(cpu['instruction_sets'])}",
        f"      memory {_size(cpu['memory_available'])} free of {_size(cpu['memory_total'])}"
        + (f", read at {cpu['read_bytes_per_second'] / 1e9:.1f} GB/s" if cpu["read_bytes_per_second"] else ""),
    ]
    if cpu["int8_per_second"]:
        lines.append(f"      int8 products {cpu['int8_per_second'] / 1e9:,.0f} G multiply-adds/s")
    if cpu["busy"]:
        lines.append("      both measured while other programs ran, and too low: they are measured anew each time")
    for gpu in facts["gpus"]:
        lines.append(f"GPU   {gpu['name']}" + (f", driver {gpu['driver']}" if gpu["driver"] else ""))
        if gpu["memory_total"]:
            load = "" if gpu["utilisation"] is None else f", {gpu['utilisation']} % busy"
            lines.append(f"      memory {_size(gpu['memory_free'] or 0)} free of {_size(gpu['memory_total'])}{load}")
        if gpu["note"]:
            lines.append(f"      {gpu['note']}")
    if not facts["gpus"]:
        lines.append("GPU   none found")
    lines.append("")
    for use in facts["uses"]:
        name = f"{use['backend']:<6}{use['device']}"
        if use["usable"]:
            lines.append(f"  yes {name}" + (f", {use['version']}" if use["version"] else ""))
        else:
            lines += [f"  no  {name}: {use['obstacle']}", f"          {use['remedy']}"]
    return "\n".join(lines)


def _size(n_bytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:.1f} {name}"
    return f"{n_bytes} B"
