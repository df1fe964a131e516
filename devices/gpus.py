"""The GPUs of this machine, by NVIDIA's library (nvidia-ml-py, optional) and by what Linux tells of the others."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
DISPLAY = "0x03"  # the PCI class of GPUs, those without a display too
NVML_INSTALL = "pip install nvidia-ml-py"


@dataclass(frozen=True)
class Gpu:
    """A GPU; memory in bytes and utilisation in percent are None where nobody tells.

    maker:  "nvidia", "amd", "intel" or "apple"
    note:   why facts are missing and what would give them
    """

    name: str
    maker: str
    memory_total: int | None = None
    memory_free: int | None = None
    driver: str = ""
    utilisation: int | None = None
    note: str = ""


def gpus(root: Path = Path("/")) -> list[Gpu]:
    """Every GPU that can be seen, NVIDIA's first; `root` is where /proc and /sys are."""
    found, trouble = _nvidia()
    others = by_pci(root)
    if found:
        others = [gpu for gpu in others if gpu.maker != "nvidia"]
    else:
        others = [replace(gpu, note=trouble) if gpu.maker == "nvidia" and gpu.driver else gpu for gpu in others]
        if trouble and not others and (root / "proc/driver/nvidia/version").exists():
            others = [Gpu("NVIDIA GPU", "nvidia", note=trouble)]
    if sys.platform == "darwin":
        import platform

        if platform.machine() == "arm64":
            others.append(Gpu("Apple GPU", "apple", note="it shares the memory of the processor"))
    return found + others


def _nvidia() -> tuple[list[Gpu], str]:
    """NVIDIA's GPUs by NVML, and why there are none."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return [], f"its memory and load are not known: {NVML_INSTALL}"
    try:
        nvml.nvmlInit()
    except Exception as error:  # NVML has an exception of its own for each status
        return [], f"NVIDIA's driver does not answer ({error}): install or restart it, and look with nvidia-smi"
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        found = []
        for i in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(i)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            try:
                load: int | None = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            except Exception:  # not told for parts of a shared GPU
                load = None
            name = _text(nvml.nvmlDeviceGetName(handle))
            found.append(Gpu(name, "nvidia", int(memory.total), int(memory.free), driver, load))
        return found, ""
    finally:
        nvml.nvmlShutdown()


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def by_pci(root: Path, kind: str = DISPLAY) -> list[Gpu]:
    """What Linux lists of these makers on the PCI bus, served or not; AMD's driver tells memory and load there.

    kind:  how the class of the devices begins
    """
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        maker = VENDORS.get(_read(device / "vendor"))
        if maker is None or not _read(device / "class").startswith(kind):
            continue
        total, used = _number(device / "mem_info_vram_total"), _number(device / "mem_info_vram_used")
        free = total - used if total is not None and used is not None else None
        name = f"{maker.upper()} {'GPU' if kind == DISPLAY else 'device'} {_read(device / 'device')}".strip()
        load = _number(device / "gpu_busy_percent")
        driver = (device / "driver").resolve().name if (device / "driver").exists() else ""
        note = "" if driver else "no driver of the system serves it: install its maker's"
        found.append(Gpu(name, maker, total, free, driver, load, note))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdecimal() else None
