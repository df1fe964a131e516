"""The screen of `edgert top` in a terminal: keys, sizes, and the terminal afterwards."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from edgert.cli.verbs import top

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

import fcntl
import pty
import struct
import termios

PROGRAM = """
from edgert.cli.watching import Watch
with Watch() as watch:
    while True:
        watch.draw("one\\n" + "x" * 100 + "\\n" + "\\n".join("abcdef") + "\\nend")
        if not watch.wait(0.2):
            break
"""


def read(master: int, until: bytes) -> bytes:
    data = b""
    while until not in data:
        assert select.select([master], [], [], 60)[0], data
        data += os.read(master, 65536)
    return data


def test_q_leaves_and_no_key_is_echoed() -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 6, 40, 0, 0))
    before = termios.tcgetattr(slave)
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    child = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=slave, stdout=slave, env=environment)
    try:
        seen = read(master, b"c\x1b[K")
        os.write(master, b"zzz")
        seen += read(master, b"c\x1b[K") + read(master, b"c\x1b[K")
        os.write(master, b"q")
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
    while select.select([master], [], [], 0)[0]:
        seen += os.read(master, 65536)
    assert b"z" not in seen
    assert b"x" * 40 in seen
    assert b"x" * 41 not in seen
    assert b"end" not in seen, "of nine lines five have room"
    assert termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)


def measures(started: float, up: float, finished: float) -> top.Samples:
    return top.samples(
        f"edgert_start_time_seconds {started}\nedgert_uptime_seconds {up}\nedgert_finished_total {finished}"
    )


def test_a_server_that_was_started_again_counts_from_nothing() -> None:
    table = top.figures(measures(2000.0, 10.0, 5.0), measures(1000.0, 500.0, 90.0), {})
    assert table["requests_per_second"] == 0.5
    table = top.figures(measures(1000.0, 510.0, 95.0), measures(1000.0, 500.0, 90.0), {})
    assert table["requests_per_second"] == 0.5


def test_a_narrow_terminal_has_one_column() -> None:
    table = top.figures(measures(1000.0, 10.0, 5.0), None, {})
    narrow, wide = (top.render("http://x", table, width).splitlines()[1:] for width in (40, 80))
    assert len(narrow) == 2 * len(wide)
    assert max(map(len, narrow)) < 40
    assert [word for line in narrow for word in line.split()] == [word for line in wide for word in line.split()]
