"""What takes time is told on standard error: lines drawn over themselves, bars, and the warnings met meanwhile."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from edgert.quantize.progress import OnProgress


def bar(share: float) -> str:
    """A bar filled to a share from 0 to 1."""
    filled = int(24 * share)
    return "█" * filled + "░" * (24 - filled)


def duration(seconds: float) -> str:
    """As long as that, roughly."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


class Milestones:
    """Tells those who see no line, in a file or a pipe, what has begun, and after each tenth of it how long it will
    yet take; what takes a few seconds goes without."""

    PAUSE = 5.0  # seconds between two lines of a stage at least

    def __init__(self) -> None:
        self._stage = ""
        self._began = self._said = 0.0
        self._first = 0.0  # what was done when it began: what a run before had done
        self._tenths = 0

    def __call__(self, stage: str, done: float = 0, total: float = 1) -> None:
        now, share = time.monotonic(), done / max(total, 1e-9)
        if stage != self._stage:
            self._stage, self._began, self._said, self._first, self._tenths = stage, now, now, share, int(10 * share)
            click.echo(stage, err=True)
        elif int(10 * share) > self._tenths and now >= self._said + self.PAUSE:
            left = (now - self._began) * (1 - share) / max(share - self._first, 1e-9)
            if left >= self.PAUSE:
                self._said, self._tenths = now, int(10 * share)
                click.echo(f"{stage}: {100 * share:.0f} %, about {duration(left)} left", err=True)


class ProgressLine:
    """A line on standard error that is drawn over itself; silent where that is no terminal, or a dumb one.

    Used as `progress` of `store.pull`: called with (what, done, total). As a context it says nothing once the block
    has ended: a kernel that a later step needs must not be announced in the middle of an answer.
    """

    def __init__(self) -> None:
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._shown: tuple[Any, ...] = ()
        self._started = 0.0
        self._first = 0.0
        self._what = ""
        self._said: set[str] = set()
        self._ended = False
        self._milestones = Milestones()

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
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

    def stage(self, what: str, done: float, total: float, detail: str = "") -> None:
        """How far something is that may take minutes; detail: what those who see the line want to know besides."""
        if not self._live:
            self._milestones(what, done, total)
            return
        now = time.monotonic()
        if what != self._what:
            self._what, self._started, self._first = what, now, done
        share, fresh = done / max(total, 1e-9), done - self._first
        left = f", {duration((now - self._started) / fresh * (total - done))} left" if fresh > 0 else ""
        self.show(f"{what} {bar(min(1.0, share))} {100 * share:3.0f} %{left}{'  ' * bool(detail)}{detail}")

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


@contextmanager
def stages() -> Iterator[OnProgress]:
    """What all may take, and a bar on standard error that tells the stage, the tensor, the time left and the memory.

    Where that is no terminal, lines of what has begun, and of how far it is.
    """
    from edgert.quantize.progress import EXPECTED

    if not sys.stderr.isatty():
        milestones = Milestones()

        def plain(stage: str, name: str, done: float, total: float) -> None:
            if stage == EXPECTED:
                click.echo(f"This will take about {duration(total)}.", err=True)
            else:
                milestones(stage, done, total)

        yield plain
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from edgert.devices import probe

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[memory]}  {task.fields[name]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        shown, task = "", None

        def draw(stage: str, name: str, done: float, total: float) -> None:
            nonlocal shown, task
            if stage == EXPECTED:
                bars.console.print(f"This will take about {duration(total)}.", highlight=False)
                return
            if stage != shown:  # kernels are compiled more than once, each time with a bar of their own
                if task is not None:
                    bars.remove_task(task)
                shown, task = stage, bars.add_task(stage, total=total, name="", memory="")
            assert task is not None
            memory = f"{probe.process_memory()[0] / 1e6:,.0f} MB"
            bars.update(task, completed=done, total=total, name=name, memory=memory)

        yield draw
