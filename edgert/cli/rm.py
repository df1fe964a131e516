"""`edgert rm`: deletes models."""

from __future__ import annotations

import json

import click

from edgert import store
from edgert.cli.flags import json_flag


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@json_flag
def command(models: tuple[str, ...], as_json: bool) -> None:
    """Deletes models that edgert fetched, and what unfinished downloads of them left.

    Files of other tools are never touched.
    """
    for model in models:
        path = store.remove(model)
        click.echo(json.dumps({"removed": model, "path": str(path)}) if as_json else f"removed {path}")
