"""Memory that the engine does not hold on to."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = r"""
import re
from llvmlite import binding
from edgert.backends.cpu.memory import give_back_code

def held():
    maps = open("/proc/self/smaps").read()
    return sum(map(int, re.findall(r"r-xp.*libllvmlite.*\n(?:[A-Z].*\n)*?Rss: +(\d+)", maps)))

binding.initialize_native_target()
before = held()
give_back_code("libllvmlite")
after = held()
assert before > 10_000 and after < before / 10, (before, after)
module = binding.parse_assembly("define i32 @f() { ret i32 7 }")
assert "ret i32 7" in str(module) and held() > after
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_code_that_was_given_back_still_runs() -> None:
    """Its pages leave memory, and come again from the file."""
    subprocess.run([sys.executable, "-c", CHILD], check=True)
