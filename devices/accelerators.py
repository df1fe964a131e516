"""Whether this machine may have a GPU or an NPU, in a millisecond: by what the system lists, no library loaded."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from edgert.devices.gpus import DISPLAY, by_pci

SIGNS_OF_NVIDIA = ("proc/driver/nvidia/version", "dev/nvidia0", "dev/nvidiactl", "dev/dxg")  # the last is WSL's
# Signs of a driver, and the PCI class by which Linux lists what has none.
SIGNS_OF_NPU = {"intel": "dev/accel/accel*", "qualcomm": "dev/fastrpc-cdsp"}
CLASSES = {"gpu": DISPLAY, "npu": "0x1200"}
MAKERS = {"gpu": ("nvidia", "amd", "intel"), "npu": ("intel", "qualcomm")}
NAMES = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel", "qualcomm": "Qualcomm"}
NOTHING = "nothing has to be installed"


def present(root: Path = Path("/")) -> frozenset[str]:
    """Of "gpu" and "npu" those that may be here; where the system lists nothing, both; `root` is where /dev is."""
    if sys.platform == "win32":
        return frozenset({"gpu", "npu"})
    if sys.platform == "darwin":
        return frozenset({"gpu"}) if platform.machine() == "arm64" else frozenset()
    return frozenset(kind for kind, makers in MAKERS.items() if any(_served(kind, maker, root) for maker in makers))


def lack(kind: str, makers: tuple[str, ...] = (), root: Path = Path("/")) -> tuple[str, str]:
    """Why no "gpu" or "npu" can be used here, whatever is installed, and what helps; empty where one may be.

    makers:  whose would do; (): anybody's
    """
    if kind in present(root) and (not makers or sys.platform != "linux"):
        return "", ""
    makers = makers or MAKERS[kind]
    if any(_served(kind, maker, root) for maker in makers):
        return "", ""
    idle = [one for one in by_pci(root, CLASSES[kind]) if one.maker in makers]
    if idle:
        driver = f"install {NAMES[idle[0].maker]}'s driver, and look again with `edgert devices`"
        return f"no driver serves the {idle[0].name}", driver
    names = [NAMES[maker] for maker in makers]
    whose = ", ".join(names[:-1]) + " or " * (len(names) > 1) + names[-1]
    return f"this machine has no {kind.upper()} of {whose}", NOTHING


def _served(kind: str, maker: str, root: Path) -> bool:
    """Whether Linux has a driver for one of them."""
    if kind == "npu":
        return any(root.glob(SIGNS_OF_NPU[maker]))
    if maker == "nvidia" and any((root / sign).exists() for sign in SIGNS_OF_NVIDIA):
        return True
    return any(gpu.driver for gpu in by_pci(root) if gpu.maker == maker)
