"""`edgert rm`: deletes models."""

from __future__ import annotations

import json

import click

from edgert import store
from edgert.cli.flags import json_flag
from edgert.cli.verb import verb


@verb()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@json_flag
def command(models: tuple[str, ...], as_json: bool) -> None:
    """Deletes models that edgert fetched, and what unfinished downloads of them left.

    What was kept of them packed goes as well. Files of other tools are never touched.
    """
    from edgert.backends.cpu import copies

    for model in models:
        path = store.remove(model)
        freed = copies.forget([path])
        facts = {"removed": model, "path": str(path)} | ({"packed_bytes": freed} if freed else {})
        text = f"removed {path}" + (f" and {freed / 1e6:,.1f} MB of packed weights" if freed else "")
        click.echo(json.dumps(facts) if as_json else text)
