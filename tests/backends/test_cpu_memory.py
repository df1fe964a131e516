"""Memory that the engine does not hold on to."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest

from edgert.backends.cpu import memory
from edgert.backends.cpu.memory import ALIGNMENT, LARGE_AT_ONCE, LARGE_PAGE, Arena, FreshMemory, aligned

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
@pytest.mark.parametrize("slow", [0.0, 1e9], ids=["slow", "quick"])
def test_large_pages_are_taken_while_they_come_quickly(slow: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they do not, small ones follow after a few; each page is brought once, and settling ends the advice."""
    advice: list[tuple[int, int]] = []
    monkeypatch.setattr(memory, "SLOW", slow)
    monkeypatch.setattr(memory, "_advise", lambda page, what: not advice.append((page, what)))
    page = 1000 * LARGE_PAGE
    fresh = FreshMemory()
    fresh.touch(page + 5, page + 2 * LARGE_AT_ONCE * LARGE_PAGE)
    fresh.touch(page, page + 100)
    brought = [number for number, what in advice if what == memory.POPULATE_WRITE]
    assert brought == list(range(1000, 1000 + 2 * LARGE_AT_ONCE))
    small = [number for number, what in advice if what == mmap.MADV_NOHUGEPAGE]
    assert small == ([] if slow else brought[LARGE_AT_ONCE:])
    assert fresh.scarce == (not slow)
    fresh.settle()
    assert [number for number, what in advice if what == mmap.MADV_HUGEPAGE] == small


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="advises Linux")
def test_memory_that_was_brought_holds_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """On pages of both sizes; and where the system refuses, as old ones do, nothing changes."""
    for slow in (0.0, 1e9):
        monkeypatch.setattr(memory, "SLOW", slow)
        data = aligned(4 * LARGE_AT_ONCE * LARGE_PAGE)
        fresh = FreshMemory()
        fresh.touch(data.ctypes.data, data.ctypes.data + data.nbytes // 2)
        assert not data.any()
        data[:] = 7
        fresh.settle()
        assert (data == 7).all()
    fresh = FreshMemory()
    fresh.touch(0, 3 * LARGE_PAGE)  # where nothing is
    fresh.settle()


def test_what_is_larger_than_a_piece_shares_its_last_one() -> None:
    arena = Arena(4 * LARGE_PAGE)
    large = arena.take(5 * LARGE_PAGE)
    small = arena.take(100)
    assert large.ctypes.data % LARGE_PAGE == 0 and not large[:: 1 << 20].any()
    assert small.ctypes.data == large.ctypes.data + large.nbytes
    assert arena.take(4 * LARGE_PAGE).ctypes.data % LARGE_PAGE == 0
