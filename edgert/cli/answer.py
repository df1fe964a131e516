"""Shows an answer while it is made: thinking dimmed, control characters left out, progress, rates."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from edgert.cli.progress import ProgressLine, bar
from edgert.cli.wrapping import Wrapper

if TYPE_CHECKING:
    from edgert.reply import Progress, Stats
    from edgert.stream import Stream

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
FORMAL = frozenset({"grammar", "json_schema"})  # fields of a request whose answer is shown as it is
LONG_PROMPT = 128  # tokens to compute from which on a progress bar is shown

# A model's text must not move the cursor, change the title or answer to the shell.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """The text without control characters other than tab and newline."""
    return _CONTROL.sub("", text)


class Painter:
    """Dims a thinking block at the beginning of an answer, whose tags are not shown."""

    _OPEN, _CLOSE = "<think>", "</think>"
    _MAYBE_CLOSE = re.compile(r"\n*(<(/(t(h(i(nk?)?)?)?)?)?)?$")  # an end that may become the closing tag

    def __init__(self) -> None:
        self._state = "start"  # start -> opened -> thinking -> after -> text, or start -> text
        self._held = ""

    def push(self, piece: str) -> str:
        """What to write now."""
        text, self._held, shown = self._held + printable(piece), "", ""
        if self._state == "start":
            body = text.lstrip()
            if body.startswith(self._OPEN):
                self._state, text, shown = "opened", body[len(self._OPEN) :], DIM
            elif self._OPEN.startswith(body):
                self._held = text
                return ""
            else:
                self._state = "text"
        if self._state == "opened":
            text = text.lstrip("\n")
            if text:
                self._state = "thinking"
        if self._state == "thinking":
            thought, closed, rest = text.partition(self._CLOSE)
            if not closed and (end := self._MAYBE_CLOSE.search(text)):
                self._held = text[end.start() :]
                return shown + text[: end.start()]
            shown += thought.rstrip("\n") + PLAIN + "\n\n"
            self._state, text = "after", rest
        if self._state == "after":
            text = text.lstrip("\n")
            if text:
                self._state = "text"
        return shown + text

    def close(self) -> str:
        """What is still to be written when the answer ends or is stopped."""
        held, self._held = self._held, ""
        return held + (PLAIN if self._state in ("opened", "thinking") else "")


class PromptProgress:
    """`on_progress` of a request: a bar while a long prompt is read."""

    def __init__(self, line: ProgressLine) -> None:
        self._line = line

    def __call__(self, progress: Progress) -> None:
        todo = progress.total - progress.cache
        if todo < LONG_PROMPT or progress.processed >= progress.total:
            self._line.clear()
            return
        share = (progress.processed - progress.cache) / todo
        self._line.show(
            f"reading the prompt {bar(share)} {100 * share:3.0f} %  {progress.processed}/{progress.total} tokens"
        )


@contextmanager
def interrupts(cancel: Callable[[], None]) -> Iterator[None]:
    """While the block runs, Ctrl+C calls `cancel` and the third one in a row interrupts as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    calls = 0

    def handler(number: int, frame: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise KeyboardInterrupt
        cancel()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Answer:
    """What `show` has seen of an answer: sound at any moment, also after an error."""

    def __init__(self) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.stats: Stats | None = None


def show(stream: Stream, line: ProgressLine, answer: Answer, styled: bool, wrap: bool = True) -> None:
    """Writes a stream to standard output as it comes; Ctrl+C stops it and keeps what came.

    styled:  the output is a terminal: thinking is dimmed and control characters are left out
    wrap:    and lines are broken between words
    """
    painter, wrapper = Painter(), Wrapper() if wrap else None

    def write(text: str) -> None:
        sys.stdout.write(wrapper.push(text) if wrapper and styled else text)
        sys.stdout.flush()

    with interrupts(stream.cancel):
        try:
            for chunk in stream:
                line.clear()
                answer.text += chunk.text
                answer.finish_reason, answer.stats = chunk.finish_reason, chunk.stats
                write(painter.push(chunk.text) if styled else chunk.text)
        finally:
            line.clear()
            if styled:
                write(painter.close())
                sys.stdout.write(wrapper.close() if wrapper else "")
                sys.stdout.flush()


def rates(stats: Stats) -> str:
    """One line about a request."""
    cached = f" + {stats.cache_n} cached" if stats.cache_n else ""
    drafts = f" · {guesses(stats.draft_n, stats.draft_n_accepted)}" if stats.draft_n else ""
    pace = f", {stats.predicted_per_second:.1f} tok/s" if stats.timed_n else ""  # else all came with the prompt
    return (
        f"prompt {stats.prompt_n}{cached} tokens, {stats.prompt_per_second:.1f} tok/s · "
        f"answer {stats.predicted_n} tokens{pace}{drafts}"
    )


def guesses(tried: float, accepted: float) -> str:
    """How many guessed tokens were right."""
    return f"guessed {tried:.0f} tokens, {accepted:.0f} right ({100 * accepted / max(tried, 1):.0f} %)"
