"""Memory that the engine does not hold on to."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest

from edgert.backends.cpu.memory import (
    ALIGNMENT,
    JUDGED,
    LARGE_PAGE,
    SLOW,
    SMALL_AT_ONCE,
    Arena,
    FreshMemory,
    aligned,
)

CHILD = r"""
import ctypes
import re
from llvmlite import binding
from edgert.backends.cpu.memory import give_back_code

def held():
    maps = open("/proc/self/smaps").read()
    ours = re.findall(r"r-(?:x|-)p.*libllvmlite.*\n(?:[A-Z].*\n)*?Rss: +(\d+)(?:.*\n)*?Anonymous: +(\d+)", maps)
    return sum(int(rss) for rss, written in ours if written == "0")

binding.initialize_native_target()
before = held()
give_back_code("libllvmlite")
after = held()
assert before > 15_000 and after < before / 10, (before, after)
binding.initialize_native_asmprinter()
module = binding.parse_assembly("define i32 @f() { ret i32 7 }")
assert "ret i32 7" in str(module) and held() > after
machine = binding.Target.from_default_triple().create_target_machine()
give_back_code("libllvmlite")
engine = binding.create_mcjit_compiler(module, machine)
engine.finalize_object()
give_back_code("libllvmlite")
assert ctypes.CFUNCTYPE(ctypes.c_int32)(engine.get_function_address("f"))() == 7
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_code_that_was_given_back_still_runs() -> None:
    """Its pages leave memory, and come again from the file."""
    subprocess.run([sys.executable, "-c", CHILD], check=True)


def test_large_pieces_begin_at_a_large_page() -> None:
    """Else the system backs their ends by small pages, each of which costs a fault of its own."""
    assert aligned(4 * LARGE_PAGE).ctypes.data % LARGE_PAGE == 0
    assert aligned(1000).ctypes.data % ALIGNMENT == 0 and len(aligned(1000)) == 1000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="advises Linux")
def test_large_pages_are_taken_while_they_come_quickly() -> None:
    """Where they do not, small ones follow after a few, for all the memory; and settling ends that."""
    data = aligned(16 * LARGE_PAGE)
    begin = data.ctypes.data
    flags = functools.partial(flags_of, begin)
    fresh = FreshMemory([(begin, begin + data.nbytes)])
    for _ in range(2 * JUDGED // LARGE_PAGE - 1):
        fresh.judge(LARGE_PAGE, 0.9 * SLOW)
    assert fresh.unit == LARGE_PAGE and "nh" not in flags() and not fresh.scarce
    fresh.judge(2 * LARGE_PAGE, 0.0)  # the second judgement
    fresh.judge(JUDGED - LARGE_PAGE, JUDGED / LARGE_PAGE * SLOW)
    assert fresh.unit == LARGE_PAGE and "nh" not in flags()
    fresh.judge(LARGE_PAGE, 0.0)
    assert fresh.unit == SMALL_AT_ONCE and "nh" in flags() and not fresh.scarce
    fresh.judge(JUDGED, 0.0)
    assert not fresh.scarce
    fresh.judge(JUDGED, JUDGED / LARGE_PAGE * SLOW)
    assert fresh.unit == SMALL_AT_ONCE and fresh.scarce
    fresh.settle()
    assert "nh" not in flags() and "hg" in flags()


def flags_of(address: int) -> list[str]:
    """What the system has been told of the memory at an address."""
    inside = False
    with open("/proc/self/smaps", encoding="utf-8") as mappings:
        for line in mappings:
            if not line[0].isupper():
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                inside = begin <= address < end
            elif inside and line.startswith("VmFlags:"):
                return line.split()[1:]
    raise AssertionError("no such memory")


def test_what_is_larger_than_a_piece_shares_its_last_one() -> None:
    arena = Arena(4 * LARGE_PAGE)
    large = arena.take(5 * LARGE_PAGE)
    small = arena.take(100)
    assert large.ctypes.data % LARGE_PAGE == 0 and not large[:: 1 << 20].any()
    assert small.ctypes.data == large.ctypes.data + large.nbytes
    assert arena.take(4 * LARGE_PAGE).ctypes.data % LARGE_PAGE == 0
