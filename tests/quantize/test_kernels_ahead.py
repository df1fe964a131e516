"""Kernels compiled before they are needed: in child processes, once, and then only loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgert.quantize.kernels_ahead import compile_ahead

LOADED = """
import sys
import numpy as np
from edgert.quantize import rounding
rounding.quantize(np.ones((16, 32), np.float32), "Q4_0")
print("numba" in sys.modules)
"""


def test_children_compile_what_this_process_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EDGERT_CACHE", str(tmp_path))
    told: list[tuple[str, int, int]] = []
    compile_ahead([("Q4_0", "plain"), ("Q4_0", "plain")], 2, lambda *args: told.append(args))
    assert told[0] == ("Q4_0", 0, 1) and told[-1] == ("", 1, 1)
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"  # nothing was compiled again
    told.clear()
    compile_ahead([("Q4_0", "plain")], 2, lambda *args: told.append(args))
    assert not told  # nothing was left to do


def test_a_child_that_fails_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EDGERT_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")  # no folder can be made there
    told: list[tuple[str, int, int]] = []
    compile_ahead([("Q4_0", "plain")], 1, lambda *args: told.append(args))
    assert told[-1] == ("", 1, 1)


def test_the_stamp_does_not_depend_on_what_is_loaded():
    """Else a kernel that one program compiled would be compiled again in the next."""
    script = "from edgert.quantize.jit import sources; print(sources('edgert.quantize.feedback_kernels'))"
    more = "import edgert.quantize.quantizer, edgert.quantize.sensitivity; "
    found = [
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
        for text in (script, more + script)
    ]
    assert len(found[0].strip()) == 16 and found[0] == found[1]
