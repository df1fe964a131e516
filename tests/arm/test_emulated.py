"""The engine on emulated ARM processors, where this machine can emulate them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parent / "run"
FOLDER = os.environ.get("EDGERT_ARM_ROOT")
USUAL = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgert-arm"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["asimd", "neon", "i8mm"])
def test_answers_and_kernels(name: str) -> None:
    if not shutil.which("qemu-aarch64-static"):
        pytest.skip("needs qemu-aarch64-static, which Debian's qemu-user-static has")
    if not FOLDER and not (USUAL / "prepared").exists():
        pytest.skip("needs an arm64 Python: tests/arm/run prepares one; with EDGERT_ARM_ROOT=FOLDER this test does")
    environment = os.environ | {"EDGERT_ARM_HOST_PYTHON": sys.executable}
    done = subprocess.run([RUN, name], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
