"""A screen that is drawn again and again, until the user has seen enough."""

from __future__ import annotations

import os
import select
import shutil
import sys
import time
from typing import Any

import click


class Watch:
    """While the block runs, each screen is drawn over the last one, keys are not echoed, and q ends the waiting.

    Where output is no terminal screens follow each other, and where input is none there are no keys.
    """

    def __init__(self) -> None:
        self._drawn_over = sys.stdout.isatty()
        self._saved: list[Any] | None = None

    def __enter__(self) -> Watch:
        if sys.platform != "win32" and self._drawn_over and sys.stdin.isatty():
            import termios

            self._saved = termios.tcgetattr(sys.stdin.fileno())
            silent = list(self._saved)
            silent[3] &= ~(termios.ECHO | termios.ICANON)
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, silent)
        return self

    def __exit__(self, *_: object) -> None:
        if sys.platform != "win32" and self._saved is not None:
            import termios

            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, self._saved)

    @property
    def width(self) -> int:
        """The columns there are for a line."""
        return shutil.get_terminal_size().columns if self._drawn_over else 80

    def draw(self, screen: str) -> None:
        """Shows a screen; lines that have no room are left out."""
        if not self._drawn_over:
            click.echo(screen)
            return
        size = shutil.get_terminal_size()
        lines = [f"{line[: size.columns]}\x1b[K\n" for line in screen.splitlines()[: size.lines - 1]]
        click.echo(f"\x1b[H{''.join(lines)}\x1b[J", nl=False)

    def wait(self, seconds: float) -> bool:
        """Waits; false when the user leaves."""
        end = time.monotonic() + seconds
        while self._saved is not None and (left := end - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left)[0] and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
                return False
        time.sleep(max(0.0, end - time.monotonic()))
        return True
