"""`edgert ls`: lists models."""

from __future__ import annotations

import json

import click

from edgert import store
from edgert.cli.flags import json_flag
from edgert.cli.verb import verb


@verb()
@json_flag
def command(as_json: bool) -> None:
    """Lists the models on this machine, those of other tools included, and those that can be fetched."""
    here = store.models()
    names = {model.name for model in here}
    absent = [entry for entry in store.CATALOGUE.values() if entry.name not in names]
    if as_json:
        click.echo(
            json.dumps(
                {
                    "folder": str(store.folder()),
                    "models": [{"name": m.name, "size": m.size, "source": m.source, "path": str(m.path)} for m in here],
                    "available": [{"name": e.name, "title": e.title, "size": e.size} for e in absent],
                },
                indent=1,
            )
        )
        return
    rows = [("NAME", "SIZE", "WHERE")]
    rows += [(m.name, f"{m.size / 1e6:.0f} MB", m.source) for m in here]
    rows += [(e.name, f"{e.size / 1e6:.0f} MB", f"not here yet: edgert pull {e.name}") for e in absent]
    wide = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for name, size, where in rows:
        click.echo(f"{name:<{wide[0]}}  {size:>{wide[1]}}  {where}")
