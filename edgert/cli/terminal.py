"""The terminal of a chat: reading messages, and leaving the terminal as it was found, come what may."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgert.cli.wrapping import wrapped_whole

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

PLACEHOLDER = "Send a message (/? for help)"
QUOTES = '"""'
PASTE_ON, PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"


def clean(text: str) -> str:
    """The text with what was not UTF-8 in it (surrogates, as Python decodes stray bytes) replaced."""
    return re.sub("[\ud800-\udfff]+", "\ufffd", text)


def wrapped(text: str) -> str:
    """The text broken between words where a terminal would break it within one; as it is where output is none."""
    return wrapped_whole(text) if sys.stdout.isatty() else text


def unquote(text: str) -> str:
    """A message without the triple quotes that allow it several lines."""
    if is_open(text):
        return text.lstrip()[3:].strip("\n")
    stripped = text.strip()
    if stripped.startswith(QUOTES) and len(stripped) >= 6:
        return stripped[3:-3].strip("\n")
    return text


def is_open(text: str) -> bool:
    """Whether a message began with triple quotes and has not come to those that end it."""
    stripped = text.strip()
    return stripped.startswith(QUOTES) and not (len(stripped) >= 6 and stripped.endswith(QUOTES))


class Prompt:
    """Reads one message at a time, with editing, history, several lines and pasting."""

    def __init__(self, history_file: Path | None, commands: list[str]) -> None:
        self._commands = commands
        self._file = history_file
        self._session: PromptSession[str] | None = None
        self.keep_history = True

    def read(self) -> str | None:
        """What was typed next, with its quotes; None when the user leaves. Raises: KeyboardInterrupt for Ctrl+C."""
        if self._session is None:
            self._session = self._make()
        try:
            text = self._session.prompt()
        except EOFError:
            return None
        return clean(text)

    def _make(self) -> PromptSession[str]:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.styles import Style

        keys = KeyBindings()

        @keys.add("enter")
        def _enter(event: Any) -> None:
            buffer = event.current_buffer
            if is_open(buffer.text):
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def _newline(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        return PromptSession(
            ">>> ",
            placeholder=[("class:hint", PLACEHOLDER)],
            style=Style.from_dict({"hint": "#808080"}),
            prompt_continuation=lambda width, line, soft: [("class:hint", "" if soft else "... ")],
            multiline=True,
            key_bindings=keys,
            history=self._history(),
            completer=WordCompleter(self._commands, sentence=True),
            complete_while_typing=False,
            reserve_space_for_menu=0,
        )

    def _history(self) -> History:
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        if self._file is None:
            return InMemoryHistory()
        prompt, file = self, self._file

        class CleanHistory(FileHistory):
            """A file of its own user's, in UTF-8 whatever was typed."""

            def store_string(self, string: str) -> None:
                if prompt.keep_history:
                    with contextlib.suppress(OSError):
                        super().store_string(clean(string))

        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        except OSError:
            return InMemoryHistory()
        return CleanHistory(str(file))


class Terminal:
    """Keeps the terminal's settings while the block runs and puts them back at its end.

    When the block ends by an error or a signal, what was typed or pasted and not read is thrown away, so
    that it does not reach the shell as commands.
    """

    def __init__(self) -> None:
        self._saved: list[Any] | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Terminal:
        if sys.platform != "win32" and sys.stdin.isatty():
            import termios

            self._saved = termios.tcgetattr(sys.stdin.fileno())
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGTERM", "SIGHUP"):
                if number := getattr(signal, name, None):
                    self._handlers[number] = signal.signal(number, self._die)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self._drain()
        finally:
            self._restore()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def _die(self, number: int, frame: Any) -> None:
        """Ends the program by the signal that came, the terminal in order.

        An exception could be swallowed, by a finalizer or an event loop, wherever the signal happens to come.
        """
        try:
            self._drain()
        finally:
            self._restore()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        if sys.platform == "win32" or self._saved is None:
            return
        import termios

        with contextlib.suppress(OSError, termios.error, ValueError):
            sys.stdout.write(f"{PASTE_OFF}\x1b[?25h\x1b[0m")
            sys.stdout.flush()
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._saved)

    def _drain(self) -> None:
        """Reads input away until none has come for a moment, at most two seconds."""
        if sys.platform == "win32" or self._saved is None:
            return
        import termios

        descriptor = sys.stdin.fileno()
        end = time.monotonic() + 2.0
        with contextlib.suppress(OSError, termios.error), self.quiet():
            while time.monotonic() < end and select.select([descriptor], [], [], 0.15)[0]:
                if not os.read(descriptor, 65536):
                    break
            termios.tcflush(descriptor, termios.TCIFLUSH)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """While an answer is written, keys are not echoed into it; they wait for the next prompt.

        Pastes keep their brackets, so that one of many lines stays one message.
        """
        if sys.platform == "win32" or self._saved is None:
            yield
            return
        import termios

        descriptor = sys.stdin.fileno()
        try:
            before = termios.tcgetattr(descriptor)
            silent = list(before)
            silent[0] &= ~termios.ICRNL
            silent[3] &= ~(termios.ECHO | termios.ICANON)
            termios.tcsetattr(descriptor, termios.TCSANOW, silent)
        except (OSError, termios.error):
            yield
            return
        try:
            sys.stdout.write(PASTE_ON)
            sys.stdout.flush()
            yield
        finally:
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(descriptor, termios.TCSANOW, before)
