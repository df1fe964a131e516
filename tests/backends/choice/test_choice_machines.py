"""What is said, and advised, of a GPU or NPU that cannot be used: by what machine it is and what is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from twins import load, machine

from edgert.backends import survey
from edgert.backends.onnx import providers
from edgert.devices import accelerators, gpus
from edgert.devices.gpus import Gpu
from edgert.errors import BackendUnavailableError

needs_llama = pytest.mark.skipif(not importlib.util.find_spec("llama_cpp"), reason="llama-cpp-python is not installed")

NVIDIA = Gpu("NVIDIA GPU 0x2335", "nvidia", driver="nvidia")
NONE = "this machine has no GPU of NVIDIA, AMD or Intel"
CPU_BUILD = "it is a build for the CPU alone"
# GPUs that the system lists, what llama.cpp is built for, and what is true there: the reason, and what helps.
MACHINES: dict[str, tuple[list[Gpu], list[str], str, str]] = {
    "none": ([], [], NONE, "nothing has to be installed"),
    "none, a build for CUDA": ([], ["CUDA"], NONE, "nothing has to be installed"),
    "no driver": (
        [Gpu("AMD GPU 0x744c", "amd")],
        [],
        "no driver serves the AMD GPU 0x744c",
        "install AMD's driver, and look again with `edgert devices`",
    ),
    "NVIDIA": ([NVIDIA], [], CPU_BUILD, "CMAKE_ARGS=-DGGML_CUDA=on pip install"),
    "AMD": ([Gpu("AMD GPU", "amd", driver="amdgpu")], [], CPU_BUILD, "CMAKE_ARGS=-DGGML_HIP=on pip install"),
    "Intel": ([Gpu("INTEL GPU", "intel", driver="xe")], [], CPU_BUILD, "CMAKE_ARGS=-DGGML_VULKAN=on pip install"),
    "hidden": (
        [NVIDIA],
        ["CUDA"],
        "its build for CUDA finds none, though the system has the NVIDIA GPU 0x2335",
        "look whether its driver answers and whether a variable such as CUDA_VISIBLE_DEVICES hides it",
    ),
}


def listed(monkeypatch: pytest.MonkeyPatch, found: list[Gpu]) -> None:
    """A Linux that lists these GPUs, and no NPU."""
    monkeypatch.setattr(accelerators.sys, "platform", "linux")
    monkeypatch.setattr(accelerators, "SIGNS_OF_NVIDIA", ())
    monkeypatch.setattr(accelerators, "SIGNS_OF_NPU", {"intel": "no/such", "qualcomm": "no/such"})
    monkeypatch.setattr(accelerators, "by_pci", lambda _, kind="0x03": found if kind == "0x03" else [])
    monkeypatch.setattr(gpus, "gpus", lambda *_: found)


@needs_llama
@pytest.mark.parametrize("name", MACHINES)
def test_llama_reaches_no_gpu(monkeypatch: pytest.MonkeyPatch, path: Path, opened: list[str], name: str) -> None:
    from edgert.backends.llama import devices

    found, built_for, reason, remedy = MACHINES[name]
    listed(monkeypatch, found)
    monkeypatch.setattr(devices, "devices", list)
    monkeypatch.setattr(devices, "_built_for", lambda: built_for)
    for options, words in (
        ({"device": "gpu", "require": True}, f"llama.cpp sees no GPU, since {reason}: {remedy}"),
        ({"n_gpu_layers": 99, "require": True}, f"llama.cpp sees no GPU, since {reason}: {remedy}"),
        ({"device": "CUDA0", "require": True}, f"llama.cpp has no GPU 'CUDA0' here ({reason}): {remedy}"),
        (
            {"backend": "llama", "n_gpu_layers": 99, "require": True},
            f"A GPU was required and llama.cpp sees none, since {reason}: {remedy}",
        ),
    ):
        with pytest.raises(BackendUnavailableError) as caught:
            load(path, **options)
        assert str(caught.value).startswith(words)
    assert str(caught.value).endswith("--device cpu requires llama.cpp on the processor")
    assert set(opened) == {"llama"}, "the cpu backend, which compiles kernels, is not opened for a refusal"
    for use in survey.survey(found):
        if use.backend == "llama" and not use.usable:
            assert (use.obstacle, use.remedy.startswith(remedy)) == (reason, True)


@needs_llama
def test_a_driver_that_is_too_old_is_told_in_llama_s_words(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    from edgert.backends.llama import devices, library

    listed(monkeypatch, [NVIDIA])
    monkeypatch.setattr(devices, "devices", list)
    monkeypatch.setattr(devices, "_built_for", lambda: ["CUDA"])
    words = "ggml_cuda_init: failed to initialize CUDA: CUDA driver version is insufficient for CUDA runtime version"
    library.library()
    monkeypatch.setattr(library, "_complaints", [words])
    with pytest.raises(BackendUnavailableError) as caught:
        load(path, device="gpu", require=True)
    assert f"its build for CUDA finds none ({words}): install the GPU's newest driver" in str(caught.value)
    (use,) = [use for use in survey.survey([NVIDIA]) if use.backend == "llama" and not use.usable]
    assert words in use.obstacle and use.remedy.startswith("install the GPU's newest driver")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], f"llama.cpp runs on no GPU here, since {NONE}: nothing has to be installed"),
        ([NVIDIA], "llama-cpp-python is not installed: pip install 'edgert[gpu]'"),
    ],
)
def test_llama_is_not_installed(monkeypatch: pytest.MonkeyPatch, path: Path, found: list[Gpu], said: str) -> None:
    from edgert.backends.llama import library

    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    listed(monkeypatch, found)
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library.importlib, "import_module", absent)
    with pytest.raises(BackendUnavailableError) as caught:
        load(path, device="gpu", require=True)
    assert str(caught.value) == said
    with pytest.raises(BackendUnavailableError, match=r"pip install 'edgert\[gpu\]'"):
        load(path, backend="llama")  # on the processor it may be wanted all the same
    uses = [use for use in survey.survey(found) if use.backend == "llama"]
    assert all(use.obstacle == "llama-cpp-python is not installed" for use in uses)
    assert all(("nothing has to be installed" in use.remedy) == (not found) for use in uses)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("npu", "ONNX Runtime reaches no npu here, since this machine has no NPU of Intel or Qualcomm: nothing"),
        ("openvino", "ONNX Runtime reaches no openvino here, since this machine has no NPU of Intel: nothing"),
        ("openvino:gpu", "ONNX Runtime reaches no openvino:gpu here, since this machine has no GPU of Intel: nothing"),
        ("qnn", "ONNX Runtime reaches no qnn here, since this machine has no NPU of Qualcomm: nothing"),
        ("openvino:cpu", "The package onnx is not installed: pip install"),
        ("cpu", "The package onnx is not installed: pip install"),
    ],
)
def test_onnx_is_not_installed_where_no_npu_is(
    monkeypatch: pytest.MonkeyPatch, path: Path, device: str, words: str
) -> None:
    def absent() -> None:
        raise BackendUnavailableError(f"The package onnx is not installed: {providers.INSTALL}")

    listed(monkeypatch, [NVIDIA])
    monkeypatch.setattr(providers, "runtime", absent)
    with pytest.raises(BackendUnavailableError) as caught:
        load(path, backend="onnx", device=device, require=True)
    assert str(caught.value).startswith(words)
    rows = {use.device: use for use in survey.survey([]) if use.backend == "onnx"}
    assert rows["qnn"].remedy == "nothing has to be installed" and "pip install" in rows["cpu"].remedy


@pytest.mark.parametrize("kind", ["npu", "gpu"])
def test_a_provider_that_could_be_installed_is_named_where_its_device_is(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of Intel's devices; whether OpenVINO itself is here does not matter."""
    row = providers.PROVIDERS["openvino"]

    def found() -> providers.Device:
        return next(device for device in providers._absent(row, "it is not here") if device.kind == kind)

    listed(monkeypatch, [])
    assert found().remedy == "nothing has to be installed"
    machine(monkeypatch, kind)
    if kind == "gpu":
        listed(monkeypatch, [Gpu("INTEL GPU", "intel", driver="xe")])
    else:
        monkeypatch.setattr(accelerators, "SIGNS_OF_NPU", {"intel": "*", "qualcomm": "no/such"})
    assert (found().obstacle, found().remedy) == ("it is not here", row.install)
