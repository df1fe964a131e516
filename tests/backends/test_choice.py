"""`auto`: what is tried, what every failure of every backend leads to, and what is remembered.

Failures are injected at the backends' doors: in the table of openers, in the libraries that they load, in the files
that they keep. The cpu backend and its answers are real.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgert
from edgert import backends
from edgert.backends import choice
from edgert.backends.base import Backend, Verdict
from edgert.backends.cpu.backend import CpuBackend
from edgert.devices import accelerators
from edgert.devices.notes import Notes
from edgert.errors import BackendUnavailableError, DoesNotFitError, EdgertError, RequestError, UnsupportedFormatError
from edgert.quantize.gguf_file import GGUFFile


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


needs_llama = pytest.mark.skipif(not has("llama_cpp"), reason="llama-cpp-python is not installed")
needs_onnx = pytest.mark.skipif(not (has("onnx") and has("onnxruntime")), reason="onnxruntime is not installed")
KINDS = {"llama": "gpu", "onnx": "npu"}


class Twin(CpuBackend):
    """The cpu backend under another name, with what a test wants to go wrong."""

    name, device = "llama", "CUDA0 (made up)"
    pause = 0.0
    bend: Callable[[Any], Any] | None = None

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **{k: v for k, v in options.items() if k not in ("device", "require", "n_gpu_layers")})
        self.verdict = Verdict("x", self.name, self.device, "a twin")
        self.options = options

    def _walk(self, shape: Any, n_wanted: int) -> Any:
        time.sleep(self.pause)
        logits = super()._walk(shape, n_wanted)
        return self.bend(logits) if self.bend else logits


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Notes of this test alone; kernels where all tests have them."""
    monkeypatch.setattr("edgert.devices.notes.cache_root", lambda: tmp_path / "notes")


@pytest.fixture
def path(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which doors were opened."""
    found: list[str] = []
    for name, opener in list(backends.OPENERS.items()):

        def counted(*arguments: Any, name: str = name, opener: Any = opener) -> Backend:
            found.append(name)
            return opener(*arguments)

        monkeypatch.setitem(backends.OPENERS, name, counted)
    return found


def machine(
    monkeypatch: pytest.MonkeyPatch, *kinds: str, packages: tuple[str, ...] = ("llama_cpp", "onnxruntime")
) -> None:
    """A machine with such accelerators, and only these packages."""
    monkeypatch.setattr(accelerators, "present", lambda *_: frozenset(kinds))
    real = importlib.util.find_spec

    def find_spec(name: str, *rest: Any) -> Any:
        if name in ("llama_cpp", "onnxruntime"):
            return real("json") if name in packages else None
        return real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def door(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> list[Twin]:
    """A twin behind a backend's door: every one that is opened."""
    made: list[Twin] = []
    kind = type("Made", (Twin,), {"name": name, "device": f"{name}'s device", **attributes})

    def opener(file: Any, common: dict[str, Any], options: dict[str, Any]) -> Backend:
        made.append(kind(file, **common, **options))
        return made[-1]

    monkeypatch.setitem(backends.OPENERS, name, opener)
    return made


def failing(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    def opener(*_: Any) -> Backend:
        raise error

    monkeypatch.setitem(backends.OPENERS, name, opener)


def load(path: Path, **options: Any) -> Backend:
    return backends.load(path, n_ctx=128, n_threads=1, **options)


# Nothing but the cpu backend can win


@pytest.mark.parametrize(
    ("kinds", "packages"), [((), ("llama_cpp", "onnxruntime")), (("gpu",), ()), (("npu",), ("llama_cpp",)), ((), ())]
)
def test_where_only_the_cpu_can_win_nothing_else_is_opened(
    monkeypatch: pytest.MonkeyPatch, path: Path, opened: list[str], kinds: tuple[str, ...], packages: tuple[str, ...]
) -> None:
    machine(monkeypatch, *kinds, packages=packages)
    with_time = load(path)
    with_time.close()
    assert opened == ["cpu"]
    assert with_time.verdict.requested == "auto"
    assert not Notes("choices").path.exists()


def test_auto_loads_no_other_library_and_costs_nothing(path: Path) -> None:
    code = """
import sys, time
from edgert.backends import choice
from edgert.backends.choice import Wish
choice._portable()
start = time.perf_counter()
found, absent = choice.candidates(Wish(None, None, False))
print(time.perf_counter() - start, "llama_cpp" in sys.modules, "onnxruntime" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, *loaded = done.stdout.split()
    assert float(seconds) < 0.02
    assert loaded == ["False", "False"]


def test_an_idle_gpu_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    machine(monkeypatch, "gpu", packages=())
    backend = load(path)
    backend.close()
    assert "the GPU is idle: pip install 'edgert[gpu]'" in str(backend.verdict)
    (trial,) = backend.verdict.trials
    assert (trial.backend, trial.decode) == ("llama", None)


# The fastest is taken


@pytest.mark.parametrize("name", ["llama", "onnx"])
def test_the_fastest_is_taken_and_the_figures_are_told(monkeypatch: pytest.MonkeyPatch, path: Path, name: str) -> None:
    machine(monkeypatch, KINDS[name])
    door(monkeypatch, "cpu", pause=0.004)
    made = door(monkeypatch, name)
    backend = load(path)
    verdict = backend.verdict
    assert (verdict.requested, verdict.backend) == ("auto", name)
    cpu, other = verdict.trials
    assert cpu.decode < other.decode and cpu.prefill < other.prefill
    assert other.same_top == 1.0 and other.kl == pytest.approx(0, abs=1e-6)
    assert f"{other.decode:,.1f} tok/s" in verdict.reason and "beside cpu" in verdict.reason
    assert made[0].options["device"] == KINDS[name]
    assert not made[-1]._closed
    backend.close()


def test_a_slower_one_is_closed_and_the_cpu_runs(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    machine(monkeypatch, "gpu", "npu")
    llama, onnx = door(monkeypatch, "llama", pause=0.01), door(monkeypatch, "onnx", pause=0.02)
    backend = load(path)
    assert backend.verdict.backend == "cpu"
    assert [trial.backend for trial in backend.verdict.trials] == ["cpu", "llama", "onnx"]
    assert "beside llama" in backend.verdict.reason and "beside onnx" in backend.verdict.reason
    assert all(one._closed for one in [*llama, *onnx]) and len(llama) == len(onnx) == 1
    backend.close()


def test_the_choice_is_remembered_for_model_device_version_and_options(
    monkeypatch: pytest.MonkeyPatch, path: Path, tmp_path: Path, opened: list[str]
) -> None:
    machine(monkeypatch, "gpu")
    made = door(monkeypatch, "llama")
    door(monkeypatch, "cpu", pause=0.004)
    first = load(path)
    first.close()
    assert len(made) == 1
    again = load(path)
    again.close()
    assert len(made) == 2, "the winner alone is opened"
    assert str(again.verdict) == str(first.verdict)
    assert again.verdict.trials == first.verdict.trials
    with GGUFFile.open(path) as file:
        note = choice.remembered(file)
    assert note is not None and note["backend"] == "llama"

    for change in ({"n_ctx": 64}, {"cache_type_k": "q8_0"}):
        before = len(Notes("choices").all())
        backends.load(path, **{"n_ctx": 128, "n_threads": 1, **change}).close()
        assert len(Notes("choices").all()) == before + 1
    monkeypatch.setattr(choice, "_version", lambda package: "another")
    before = len(Notes("choices").all())
    load(path).close()
    assert len(Notes("choices").all()) == before + 1


def test_a_damaged_note_is_made_anew(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    machine(monkeypatch, "gpu")
    door(monkeypatch, "llama", pause=0.01)
    load(path).close()
    notes = Notes("choices")
    for damage in ("{", '{"x": 1}', json.dumps({key: {"backend": 3} for key in notes.all()})):
        notes.path.write_text(damage)
        backend = load(path)
        assert len(backend.verdict.trials) == 2
        backend.close()


def test_a_remembered_backend_that_is_gone_is_replaced(
    monkeypatch: pytest.MonkeyPatch, path: Path, caplog: Any
) -> None:
    machine(monkeypatch, "gpu")
    door(monkeypatch, "cpu", pause=0.004)
    door(monkeypatch, "llama")
    load(path).close()
    failing(monkeypatch, "llama", BackendUnavailableError("the driver is gone: install it"))
    backend = load(path)
    backend.close()
    assert backend.verdict.backend == "cpu"
    assert "not llama: the driver is gone: install it" in backend.verdict.reason
    assert "no longer serves" in caplog.text


# Every failure of every backend

FAILURES: dict[str, tuple[BaseException | dict[str, Any], str]] = {
    "missing library": (BackendUnavailableError("its package is not installed: pip install it"), "pip install it"),
    "absent device": (BackendUnavailableError("no such device: install the driver"), "install the driver"),
    "corrupt blob": (BackendUnavailableError("its blob is damaged and does not compile"), "its blob is damaged"),
    "unsupported op": (UnsupportedFormatError("it lacks the operator Swish"), "lacks the operator Swish"),
    "out of memory": (DoesNotFitError("it needs 900 MiB, 100 MiB are free: use -c 64"), "needs 900 MiB"),
    "no memory at all": (MemoryError(), "there is not enough memory for it"),
    "the library's own": (RuntimeError("CUDA error 719"), "it failed (RuntimeError: CUDA error 719)"),
    "wrong answer": ({"bend": lambda self, logits: logits[:, ::-1]}, "its answers are wrong"),
    "no numbers": ({"bend": lambda self, logits: logits * np.float32(np.nan)}, "its answers are wrong"),
}


@pytest.mark.parametrize("name", ["llama", "onnx"])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("require", [False, True])
def test_every_failure_has_its_verdict(
    monkeypatch: pytest.MonkeyPatch, path: Path, name: str, failure: str, require: bool, caplog: Any
) -> None:
    machine(monkeypatch, KINDS[name])
    cause, words = FAILURES[failure]
    if isinstance(cause, dict):
        made = door(monkeypatch, name, **cause)
    else:
        failing(monkeypatch, name, cause)
        made = []
    if require:
        expected: type[BaseException] = BackendUnavailableError if isinstance(cause, dict) else type(cause)
        if not issubclass(expected, EdgertError):
            expected = BackendUnavailableError
        with pytest.raises(expected) as caught:
            load(path, device=KINDS[name], require=True)
        assert words in str(caught.value)
        assert not Notes("choices").path.exists()
    else:
        backend = load(path)
        cpu, other = backend.verdict.trials
        assert (backend.verdict.backend, cpu.backend, cpu.obstacle) == ("cpu", "cpu", "")
        assert other.backend == name and words in other.obstacle and other.decode is None
        assert f"not {name}: {other.obstacle}" in str(backend.verdict)
        assert (failure in ("out of memory", "no memory at all")) == (not Notes("choices").path.exists())
        backend.close()
    assert all(one._closed for one in made)


@pytest.mark.parametrize("failure", FAILURES)
def test_the_next_backend_is_gone_on_with(monkeypatch: pytest.MonkeyPatch, path: Path, failure: str) -> None:
    machine(monkeypatch, "gpu", "npu")
    door(monkeypatch, "cpu", pause=0.004)
    cause, words = FAILURES[failure]
    if isinstance(cause, dict):
        door(monkeypatch, "llama", **cause)
    else:
        failing(monkeypatch, "llama", cause)
    door(monkeypatch, "onnx")
    backend = load(path)
    assert backend.verdict.backend == "onnx"
    assert words in backend.verdict.trials[1].obstacle
    backend.close()


@pytest.mark.parametrize(("device", "name"), [("gpu", "llama"), ("CUDA0", "llama"), ("npu", "onnx"), ("qnn", "onnx")])
def test_a_named_device_is_taken_though_slower(
    monkeypatch: pytest.MonkeyPatch, path: Path, device: str, name: str
) -> None:
    machine(monkeypatch)
    made = door(monkeypatch, name, pause=0.004)
    backend = load(path, device=device)
    assert backend.verdict.backend == name
    assert made[0].options["device"] == device
    backend.close()


def test_layers_for_a_gpu_ask_for_llama(monkeypatch: pytest.MonkeyPatch, path: Path, caplog: Any, opened: Any) -> None:
    machine(monkeypatch)
    made = door(monkeypatch, "llama", pause=0.004)
    backend = load(path, n_gpu_layers=7)
    assert made[0].options["n_gpu_layers"] == 7
    backend.close()
    load(path, n_gpu_layers=0).close()
    assert len(made) == 1
    failing(monkeypatch, "llama", BackendUnavailableError("no GPU here"))
    Notes("choices").path.unlink()
    with caplog.at_level(logging.WARNING):
        backend = load(path, n_gpu_layers=7)
    backend.close()
    assert "-ngl 7 cannot serve (no GPU here): the cpu backend runs the model" in caplog.text


def test_what_the_cpu_backend_cannot_run_goes_to_another(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    machine(monkeypatch)
    failing(monkeypatch, "cpu", UnsupportedFormatError("heads of 12"))
    failing(monkeypatch, "onnx", BackendUnavailableError("no onnx"))
    door(monkeypatch, "llama")
    backend = load(path)
    assert backend.verdict.backend == "llama"
    assert "not cpu: heads of 12" in backend.verdict.reason
    backend.close()
    failing(monkeypatch, "llama", DoesNotFitError("no room"))
    with pytest.raises(UnsupportedFormatError, match=r"heads of 12; llama: not used: no room; onnx: not used: no onnx"):
        load(path)
    machine(monkeypatch, packages=())
    with pytest.raises(UnsupportedFormatError, match=r"^heads of 12$"):
        load(path)


def test_a_fault_of_the_file_ends_the_search(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    machine(monkeypatch, "gpu")
    failing(monkeypatch, "cpu", edgert.ModelFileError("the weights are no numbers"))
    made = door(monkeypatch, "llama")
    with pytest.raises(edgert.ModelFileError):
        load(path)
    assert not made


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"require": True}, "require: says that nothing else will do"),
        ({"require": 1}, "require: must be True or False"),
        ({"device": 3}, "device: must be a name"),
        ({"n_gpu_layers": "all"}, "n_gpu_layers: must be a number"),
        ({"backend": "cpu", "device": "gpu"}, "device: is 'gpu', and the cpu backend"),
        ({"backend": "cpu", "n_gpu_layers": 3}, "n_gpu_layers: gives layers to a GPU"),
        ({"backend": "onnx", "n_gpu_layers": 3}, r"n_gpu_layers: is llama\.cpp's"),
        ({"backend": "onnx", "cache_type_k": "q8_0"}, "cache_type_k: is 'q8_0', and the onnx"),
        ({"backend": "cpu", "wrong": 3}, "wrong: is not an option of this backend"),
    ],
)
def test_wishes_that_contradict_themselves(path: Path, options: Mapping[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        load(path, **options)


def test_the_model_and_its_engine_carry_the_verdict(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    machine(monkeypatch, "gpu")
    door(monkeypatch, "cpu", pause=0.004)
    door(monkeypatch, "llama")
    with edgert.load(path, n_ctx=128, n_threads=1) as model:
        assert model.verdict.backend == "llama"
        assert model.generate("Hello", max_tokens=4, temperature=0).tokens


def test_show_tells_the_choice_before_and_after(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    from edgert.cli.show import as_text, describe_file

    def told() -> tuple[Any, str]:
        with GGUFFile.open(path) as file:
            facts = {"model": "tiny", "path": str(path), **describe_file(file, None)}
        return facts["engine"]["backend"], as_text(facts)

    machine(monkeypatch)
    assert told()[0] == "cpu" and "nothing that could be faster is here" in told()[1]
    machine(monkeypatch, "npu", packages=())
    assert "so the NPU is idle" in told()[1]
    machine(monkeypatch, "gpu")
    assert told()[0] is None and "cpu, llama are tried when it is first loaded" in told()[1]
    door(monkeypatch, "cpu", pause=0.004)
    door(monkeypatch, "llama")
    load(path).close()
    backend, text = told()
    assert backend == "llama" and "llama on llama's device: prefill" in text and "cpu on" in text


# What is asked of a backend


def test_agreement_is_that_of_probabilities() -> None:
    a = np.array([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]], np.float32)
    assert choice.agreement(a, a + 5) == (1.0, pytest.approx(0, abs=1e-12))
    b = np.array([[2.0, 1.0, 0.0], [3.0, 0.0, 0.0]], np.float32)
    same_top, kl = choice.agreement(a, b)
    p, q = (np.exp(x[0]) / np.exp(x[0]).sum() for x in (a, b))
    assert same_top == 0.5
    assert kl == pytest.approx(float((p * np.log(p / q)).sum()) / 2)
    assert np.isnan(choice.agreement(a, np.full_like(a, np.nan))[1])
    assert choice.agreement(a, b[:1])[0] == 0.0


def test_near_ties_agree() -> None:
    a = np.array([[1.0, 1.2, -5.0]], np.float32)
    assert choice.agreement(a, np.array([[1.2, 1.0, -5.0]], np.float32))[0] == 1.0
    assert choice.agreement(a, np.array([[1.0, 1.2, 3.0]], np.float32))[0] == 0.0


def test_rates_are_those_of_the_clock(path: Path) -> None:
    with GGUFFile.open(path) as file:
        backend = type("Slow", (Twin,), {"pause": 0.01})(file, n_ctx=128, n_threads=1)
    prefill, decode = choice.rates(backend)
    backend.close()
    assert 50 < decode < 100
    assert prefill < 128 / 0.01
    assert backend.length(0) == 0


# The real libraries, failing


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


def test_trials_read_as_sentences() -> None:
    trial = choice.Trial("llama", "CUDA0", prefill=1234.5, decode=56.78, same_top=0.96, kl=0.00123)
    assert str(trial) == (
        "llama on CUDA0: prefill 1,234 tok/s, decode 56.8 tok/s; "
        "same top token as the cpu backend in 96 %, mean KL 0.0012"
    )
    assert str(replace(trial, obstacle="slow", decode=None)) == "llama on CUDA0: not used: slow"
