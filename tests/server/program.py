"""A program of ours, as a person starts and ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

from fake import PATIENCE


@contextlib.contextmanager
def program(*arguments: str, until: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A server that has said something, and the lines until then; it must have ended when the block does."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=os.environ | variables,
        process_group=0 if sys.platform != "win32" else None,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    assert process.stderr
    watchdog = threading.Timer(2 * PATIENCE, process.kill)
    watchdog.start()
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if until in line:
                break
        yield process, lines
        lines += process.stderr.readlines()
        process.wait(PATIENCE)
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stderr.close()
