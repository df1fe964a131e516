"""Whether this machine may have a GPU or an NPU, in a millisecond: by what the system lists, no library loaded."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from edgert.devices.gpus import by_pci

SIGNS_OF_NVIDIA = ("proc/driver/nvidia/version", "dev/nvidia0", "dev/nvidiactl", "dev/dxg")  # the last is WSL's


def present(root: Path = Path("/")) -> frozenset[str]:
    """Of "gpu" and "npu" those that may be here; where the system lists nothing, both; `root` is where /dev is."""
    if sys.platform == "win32":
        return frozenset({"gpu", "npu"})
    if sys.platform == "darwin":
        return frozenset({"gpu"}) if platform.machine() == "arm64" else frozenset()
    found = set()
    if any((root / sign).exists() for sign in SIGNS_OF_NVIDIA) or any(gpu.driver for gpu in by_pci(root)):
        found.add("gpu")
    if any((root / "dev/accel").glob("accel*")) or (root / "dev/fastrpc-cdsp").exists():
        found.add("npu")
    return frozenset(found)
