"""GPUs by NVML and by Linux' lists, on machines that are made up."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgert.devices import accelerators, gpus


def card(root: Path, number: int, driver: str = "", kind: str = "0x030000", **files: str) -> None:
    """A device on the PCI bus, as Linux lists it; driver: which one serves it."""
    folder = root / f"sys/bus/pci/devices/0000:{number:02x}:00.0"
    folder.mkdir(parents=True)
    for name, text in {"class": kind, **files}.items():
        (folder / name).write_text(text)
    if driver:
        (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(root / "drivers" / driver)


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
    card(tmp_path, 0, "nvidia", "0x030200", vendor="0x10de", device="0x2335")
    (gpu,) = gpus.gpus(tmp_path)
    assert (gpu.maker, gpu.memory_total) == ("nvidia", None)
    assert "pip install nvidia-ml-py" in gpu.note


def test_a_driver_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fail))
    card(tmp_path, 0, "nvidia", vendor="0x10de")
    assert "Driver Not Loaded" in gpus.gpus(tmp_path)[0].note


def test_amd_s_driver_tells_memory_and_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    card(
        tmp_path,
        1,
        "amdgpu",
        vendor="0x1002",
        device="0x744c",
        mem_info_vram_total="800",
        mem_info_vram_used="300",
        gpu_busy_percent="5",
    )
    card(tmp_path, 2, "snd_hda_intel", "0x040300", vendor="0x1002")  # its sound
    card(tmp_path, 3, "bochs-drm", vendor="0x1234")  # a virtual display
    (gpu,) = gpus.gpus(tmp_path)
    assert (gpu.maker, gpu.memory_total, gpu.memory_free, gpu.utilisation) == ("amd", 800, 500, 5)


def test_a_gpu_without_a_driver_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    card(tmp_path, 0, vendor="0x10de", device="0x2335")
    assert gpus.gpus(tmp_path)[0].note == "no driver of the system serves it: install its maker's"
    assert accelerators.present(tmp_path) == set()
    driver = "install NVIDIA's driver, and look again with `edgert devices`"
    assert accelerators.lack("gpu", root=tmp_path) == ("no driver serves the NVIDIA GPU 0x2335", driver)


def test_a_card_counts_when_a_driver_serves_it(tmp_path: Path) -> None:
    card(tmp_path, 0, "amdgpu", vendor="0x1002")
    assert accelerators.present(tmp_path) == {"gpu"}
    assert accelerators.lack("gpu", root=tmp_path) == ("", "")
    assert accelerators.lack("gpu", ("intel",), tmp_path) == ("this machine has no GPU of Intel", accelerators.NOTHING)


def test_an_npu_that_nothing_serves(tmp_path: Path) -> None:
    card(tmp_path, 11, kind="0x120000", vendor="0x8086", device="0x643e")
    assert accelerators.present(tmp_path) == set()
    assert accelerators.lack("npu", root=tmp_path)[0] == "no driver serves the INTEL device 0x643e"
    (tmp_path / "dev/accel").mkdir(parents=True)
    (tmp_path / "dev/accel/accel0").touch()
    assert accelerators.lack("npu", root=tmp_path) == ("", "")
    assert accelerators.lack("npu", ("qualcomm",), tmp_path)[0] == "this machine has no NPU of Qualcomm"


def test_a_machine_without_any_needs_nothing(tmp_path: Path) -> None:
    reason = "this machine has no GPU of NVIDIA, AMD or Intel"
    assert accelerators.lack("gpu", root=tmp_path) == (reason, "nothing has to be installed")
    assert accelerators.lack("npu", root=tmp_path)[0] == "this machine has no NPU of Intel or Qualcomm"


def test_no_gpu_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(sys, "platform", "linux")
    assert gpus.gpus(tmp_path) == []
