"""`auto` beside the real libraries, which fail."""

from __future__ import annotations

import ctypes
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from twins import load

from edgert import backends
from edgert.backends import choice, survey
from edgert.backends.base import Verdict
from edgert.devices import accelerators
from edgert.errors import BackendUnavailableError, DoesNotFitError, EdgertError
from edgert.notes import Notes


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


needs_llama = pytest.mark.skipif(not has("llama_cpp"), reason="llama-cpp-python is not installed")
needs_onnx = pytest.mark.skipif(not (has("onnx") and has("onnxruntime")), reason="onnxruntime is not installed")


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp is told to give layers to a GPU that is not there; its build for the CPU ignores that."""
    from edgert.backends.llama import devices

    real = devices.devices
    gpu = devices.LlamaDevice("CUDA0", "a made-up GPU", "gpu", 8 << 30, 8 << 30)
    monkeypatch.setattr(devices, "devices", lambda: [*real(), gpu])


@needs_llama
def test_llama_without_its_library(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    from edgert.backends.llama import library

    monkeypatch.setattr(accelerators, "present", lambda *_: frozenset({"gpu"}))
    monkeypatch.setattr(library, "_library", None)

    real = importlib.import_module

    def broken(name: str) -> Any:
        if name.startswith("llama_cpp"):
            raise OSError("libcudart.so.13: cannot open shared object file")
        return real(name)

    monkeypatch.setattr(library.importlib, "import_module", broken)
    backend = load(path)
    backend.close()
    assert backend.verdict.backend == "cpu"
    assert "libcudart.so.13" in backend.verdict.trials[1].obstacle
    with pytest.raises(BackendUnavailableError, match=r"libcudart\.so\.13.*--force-reinstall"):
        load(path, backend="llama")


def test_llama_of_another_age(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Where a function is missing that the backend calls."""
    from edgert.backends.llama import library

    older = SimpleNamespace(**{name: None for name in library.NEEDED if name != "llama_memory_seq_rm"})
    monkeypatch.setattr(accelerators, "present", lambda *_: frozenset({"gpu"}))
    monkeypatch.setattr(choice, "installed", lambda name: name == "llama")
    monkeypatch.setattr(library, "_library", None)
    real = importlib.import_module
    mine = {"llama_cpp.llama_cpp": older}
    monkeypatch.setattr(library.importlib, "import_module", lambda name, *rest: mine.get(name) or real(name, *rest))
    backend = load(path)
    backend.close()
    words = "for edgert, since it has no llama_memory_seq_rm"
    assert backend.verdict.backend == "cpu" and words in backend.verdict.trials[1].obstacle
    with pytest.raises(BackendUnavailableError, match=f"{words}: pip install .* --upgrade"):
        load(path, backend="llama")
    found = [use for use in survey.survey([]) if use.backend == "llama"]
    assert found and all(words in use.obstacle for use in found)


def test_whatever_the_llama_backend_calls_is_looked_for() -> None:
    """But for what llama.cpp has had since long before the rest."""
    from edgert.backends.llama import library

    folder = Path(library.__file__).parent
    called = {
        name for file in folder.glob("*.py") for name in re.findall(r"\.(llama_[a-z_]+)\(", file.read_text("utf-8"))
    }
    old = {
        *("llama_backend_init", "llama_batch", "llama_context_default_params", "llama_decode", "llama_free"),
        *("llama_log_callback", "llama_log_set", "llama_max_devices", "llama_model_default_params", "llama_model_desc"),
        *("llama_model_free", "llama_model_get_vocab", "llama_model_n_embd", "llama_model_size"),
        *("llama_print_system_info", "llama_state_seq_get_size", "llama_tokenize"),
    }
    assert called - old <= set(library.NEEDED)
    if has("llama_cpp"):
        assert all(hasattr(library.library(), name) for name in (called & old) | set(library.NEEDED))


@needs_llama
def test_llama_as_a_build_for_the_cpu_beside_a_gpu(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr(accelerators, "present", lambda *_: frozenset({"gpu"}))
    backend = load(path)
    backend.close()
    obstacle = backend.verdict.trials[1].obstacle
    assert "sees no GPU" in obstacle and "CMAKE_ARGS=-DGGML_CUDA=on pip install" in obstacle
    with pytest.raises(BackendUnavailableError, match="no GPU 'CUDA7' here"):
        load(path, device="CUDA7", require=True)


@needs_llama
def test_llama_is_right_and_taken_by_name(fake_gpu: None, path: Path) -> None:
    backend = load(path, device="CUDA0", require=True)
    assert (backend.verdict.backend, backend.verdict.device) == ("llama", "CUDA0 (a made-up GPU)")
    assert backend.verdict.trials[1].kl < 0.01
    backend.close()


@needs_llama
def test_llama_out_of_memory(monkeypatch: pytest.MonkeyPatch, fake_gpu: None, path: Path) -> None:
    from edgert.backends.llama import library

    def full(*_: Any) -> None:
        library.messages.write(4, b"ggml_backend_cuda_buffer_type_alloc_buffer: allocating 900.00 MiB failed\n")

    monkeypatch.setattr(library.library(), "llama_model_load_from_file", full)
    monkeypatch.setattr(accelerators, "present", lambda *_: frozenset({"gpu"}))
    backend = load(path)
    backend.close()
    assert backend.verdict.backend == "cpu"
    assert "has no memory for 3 layers" in backend.verdict.trials[1].obstacle
    with pytest.raises(DoesNotFitError, match=r"allocating 900\.00 MiB failed"):
        load(path, device="gpu", require=True)


@needs_llama
def test_llama_where_not_a_layer_fits(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    from edgert.backends.llama import devices

    gpu = devices.LlamaDevice("CUDA0", "full", "gpu", 100 << 20, 8 << 30)
    monkeypatch.setattr(devices, "devices", lambda: [gpu])
    with pytest.raises(DoesNotFitError, match=r"Not one layer of .* into 100 MiB of GPU memory"):
        load(path, device="gpu", require=True)


@needs_llama
def test_llama_with_wrong_answers(monkeypatch: pytest.MonkeyPatch, fake_gpu: None, path: Path) -> None:
    from edgert.backends.llama import backend as llama

    garbage = (ctypes.c_float * (512 * 384))(*np.random.default_rng(0).normal(0, 5, 512 * 384))
    monkeypatch.setattr(llama, "function", lambda name, *types: lambda context: ctypes.addressof(garbage))
    monkeypatch.setattr(accelerators, "present", lambda *_: frozenset({"gpu"}))
    backend = load(path)
    backend.close()
    trial = backend.verdict.trials[1]
    assert backend.verdict.backend == "cpu" and trial.kl > 1
    assert "its answers are wrong" in trial.obstacle
    with pytest.raises(BackendUnavailableError, match="its answers are wrong"):
        load(path, device="gpu", require=True)


@needs_llama
def test_llama_that_does_not_know_the_model(monkeypatch: pytest.MonkeyPatch, fake_gpu: None, path: Path) -> None:
    from edgert.backends.llama import library

    def refused(*_: Any) -> None:
        library.messages.write(4, b"llama_model_load: error loading model: unknown model architecture: 'new'\n")

    monkeypatch.setattr(library.library(), "llama_model_load_from_file", refused)
    monkeypatch.setattr(accelerators, "present", lambda *_: frozenset({"gpu"}))
    backend = load(path)
    backend.close()
    assert "unknown model architecture" in backend.verdict.trials[1].obstacle


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_onnx_whose_package_does_not_load(monkeypatch: pytest.MonkeyPatch, path: Path, package: str) -> None:
    from edgert.backends.onnx import providers

    def broken(name: str) -> Any:
        if name == package:
            raise ImportError("libonnx.so: undefined symbol")
        return SimpleNamespace()

    monkeypatch.setattr(providers.importlib, "import_module", broken)
    monkeypatch.setattr(accelerators, "present", lambda *_: frozenset({"npu"}))
    monkeypatch.setattr(accelerators, "lack", lambda *_: ("", ""))
    monkeypatch.setattr(choice, "installed", lambda name: name == "onnx")
    backend = load(path)
    backend.close()
    words = f"The package {package} is installed but does not load"
    assert backend.verdict.backend == "cpu" and words in backend.verdict.trials[1].obstacle
    with pytest.raises(BackendUnavailableError, match=f"{words} .*undefined symbol.*--force-reinstall"):
        load(path, device="npu", require=True)


def test_onnx_of_another_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes no plug-ins: what is built in may still run."""
    from edgert.backends.onnx import providers

    older = SimpleNamespace(__version__="1.15.0", get_available_providers=lambda: [providers.CPU])
    monkeypatch.setattr(providers, "runtime", lambda: older)
    monkeypatch.setattr(accelerators, "lack", lambda *_: ("", ""))
    found = {device.name: device.obstacle for device in providers.devices()}
    assert found["cpu"] == "" and found["qnn"] == "onnxruntime 1.15.0 is too old to take plug-ins"


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without kernels of its own, where other engines may be faster on the same CPU."""
    monkeypatch.setenv("EDGERT_ISA", "portable")
    monkeypatch.setitem(backends.OPENERS, "llama", lambda *_: (_ for _ in ()).throw(BackendUnavailableError("not now")))


def onnx_trial(verdict: Verdict) -> Any:
    return next(trial for trial in verdict.trials if trial.backend == "onnx")


@needs_onnx
def test_onnx_on_a_processor_without_kernels_of_its_own(portable: None, path: Path) -> None:
    backend = load(path)
    backend.close()
    trial = onnx_trial(backend.verdict)
    assert not trial.obstacle and trial.decode > 0
    assert trial.same_top > 0.9 and trial.kl < 0.01


@needs_onnx
def test_onnx_whose_kept_weights_are_damaged(
    monkeypatch: pytest.MonkeyPatch, portable: None, path: Path, tmp_path: Path
) -> None:
    from edgert.backends.onnx import store

    monkeypatch.setattr(store, "cache_root", lambda: tmp_path)
    load(path).close()
    (data,) = [
        one for one in tmp_path.rglob("*") if one.is_file() and one.name.startswith("weights") and one.suffix != ".json"
    ]
    data.write_bytes(np.random.default_rng(0).integers(0, 255, data.stat().st_size, np.uint8).tobytes())
    Notes("choices").path.unlink()
    backend = load(path)
    backend.close()
    assert backend.verdict.backend == "cpu"
    assert "its answers are wrong" in onnx_trial(backend.verdict).obstacle


@needs_onnx
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("NOT_IMPLEMENTED : Could not find an implementation for MatMulNBits"), "does not load the model"),
        (MemoryError(), "has not enough memory"),
    ],
)
def test_onnx_whose_session_fails(
    monkeypatch: pytest.MonkeyPatch, portable: None, path: Path, error: Exception, words: str
) -> None:
    import onnxruntime

    def session(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    backend = load(path)
    backend.close()
    assert backend.verdict.backend == "cpu"
    assert words in onnx_trial(backend.verdict).obstacle
    with pytest.raises(EdgertError, match=words):
        load(path, backend="onnx", require=True)


@needs_onnx
def test_onnx_without_an_npu(path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="reaches no NPU here"):
        load(path, device="npu", require=True)
