"""`auto`: what every failure of every backend leads to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twins import KINDS, door, failing, load, machine

import edgert
from edgert.devices.notes import Notes
from edgert.errors import BackendUnavailableError, DoesNotFitError, EdgertError, UnsupportedFormatError

FAILURES: dict[str, tuple[BaseException | dict[str, Any], str]] = {
    "missing library": (BackendUnavailableError("its package is not installed: pip install it"), "pip install it"),
    "absent device": (BackendUnavailableError("no such device: install the driver"), "install the driver"),
    "corrupt blob": (BackendUnavailableError("its blob is damaged and does not compile"), "its blob is damaged"),
    "unsupported op": (UnsupportedFormatError("it lacks the operator Swish"), "lacks the operator Swish"),
    "out of memory": (DoesNotFitError("it needs 900 MiB, 100 MiB are free: use -c 64"), "needs 900 MiB"),
    "no memory at all": (MemoryError(), "there is not enough memory for it: choose a smaller -c"),
    "the library's own": (RuntimeError("CUDA error 719"), "it failed (RuntimeError: CUDA error 719): renew its"),
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
