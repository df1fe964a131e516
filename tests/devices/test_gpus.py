"""GPUs by NVML and by Linux' lists, on machines that are made up."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgert.devices import gpus


def card(root: Path, number: int, **files: str) -> None:
    folder = root / f"sys/class/drm/card{number}/device"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_nvml_tells_memory_driver_and_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580.1",
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=1000, free=600),
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=37),
        nvmlDeviceGetName=lambda _: "NVIDIA H200",
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    card(tmp_path, 0, vendor="0x10de")  # the same one, as Linux lists it
    assert gpus.gpus(tmp_path) == [gpus.Gpu("NVIDIA H200", "nvidia", 1000, 600, "580.1", 37)]


def test_without_nvml_the_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    card(tmp_path, 0, vendor="0x10de", device="0x2335")
    (gpu,) = gpus.gpus(tmp_path)
    assert (gpu.maker, gpu.memory_total) == ("nvidia", None)
    assert "pip install nvidia-ml-py" in gpu.note


def test_a_driver_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fail))
    card(tmp_path, 0, vendor="0x10de")
    assert "Driver Not Loaded" in gpus.gpus(tmp_path)[0].note


def test_amd_s_driver_tells_memory_and_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    card(
        tmp_path,
        1,
        vendor="0x1002",
        device="0x744c",
        mem_info_vram_total="800",
        mem_info_vram_used="300",
        gpu_busy_percent="5",
    )
    (tmp_path / "sys/class/drm/card1-HDMI-A-1/device").mkdir(parents=True)
    (gpu,) = gpus.gpus(tmp_path)
    assert (gpu.maker, gpu.memory_total, gpu.memory_free, gpu.utilisation) == ("amd", 800, 500, 5)


def test_no_gpu_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(sys, "platform", "linux")
    assert gpus.gpus(tmp_path) == []
