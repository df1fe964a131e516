"""`auto`: what every failure of every backend leads to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twins import KINDS, door, failing, load, machine

import edgert
from edgert.backends import choice
from edgert.backends.choice import Wish
from edgert.errors import BackendUnavailableError, DoesNotFitError, EdgertError, UnsupportedFormatError
from edgert.notes import Notes
from edgert.quantize.gguf_file import GGUFFile

FAILURES: dict[str, tuple[BaseException | dict[str, Any], str]] = {
    "missing library": (BackendUnavailableError("its package is not installed: pip install it"), "pip install it"),
    "package that does not load": (BackendUnavailableError("its library does not load: build it again"), "build it"),
    "package too old": (BackendUnavailableError("its package is too old: renew it"), "too old: renew it"),
    "absent device": (BackendUnavailableError("no such device: install the driver"), "install the driver"),
    "driver too old": (BackendUnavailableError("the driver is insufficient: install a newer one"), "a newer one"),
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


@pytest.mark.parametrize(
    ("same_top", "kl", "right"),
    [(1.0, 0.16, False), (0.69, 0.0, False), (0.7, 0.15, True)],
    ids=["another distribution", "another likeliest token", "as GPUs round"],
)
@pytest.mark.parametrize("name", ["llama", "onnx"])
def test_answers_are_right_within_bounds(
    monkeypatch: pytest.MonkeyPatch, path: Path, name: str, same_top: float, kl: float, right: bool
) -> None:
    machine(monkeypatch, KINDS[name])
    door(monkeypatch, "cpu", pause=0.004)
    door(monkeypatch, name)
    monkeypatch.setattr(choice, "agreement", lambda *_: (same_top, kl))
    backend = load(path)
    backend.close()
    assert backend.verdict.backend == (name if right else "cpu")
    assert ("its answers are wrong" in backend.verdict.trials[1].obstacle) == (not right)
    if not right:
        with pytest.raises(BackendUnavailableError, match=f"in {100 * same_top:.0f} % of .* KL divergence {kl:.3g}"):
            load(path, device=KINDS[name], require=True)


@pytest.mark.parametrize("name", ["llama", "onnx"])
def test_what_ended_the_process_that_tried_it_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, path: Path, name: str
) -> None:
    """A library may crash; who insists may try it once more."""
    machine(monkeypatch, KINDS[name])
    with GGUFFile.open(path) as file:
        key = choice._key(file, {"n_ctx": 128, "n_threads": 1}, {}, Wish(None, None, False))
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    Notes("attempts").put(f"{name} {key}", child.pid)
    made = door(monkeypatch, name, pause=0.004)
    load(path).close()
    assert len(made) == 1, "another process that is still at it says nothing"
    Notes("choices").path.unlink()
    Notes("attempts").put(f"{name} {key}", child.pid)
    child.communicate()
    for _ in range(2):  # told, and remembered
        backend = load(path)
        backend.close()
        assert backend.verdict.backend == "cpu" and len(made) == 1
        assert f"not {name}: the process that tried it last ended in the middle of it" in str(backend.verdict)
    Notes("choices").path.unlink()
    load(path).close()
    assert len(made) == 2
    assert not Notes("attempts").all(), "who ended it, in whatever way, is not waited for"


@pytest.mark.parametrize("name", ["llama", "onnx"])
def test_a_chosen_backend_that_ended_the_process_is_given_up(
    monkeypatch: pytest.MonkeyPatch, path: Path, name: str, caplog: Any
) -> None:
    """As one may after its driver was renewed."""
    machine(monkeypatch, KINDS[name])
    door(monkeypatch, "cpu", pause=0.004)
    made = door(monkeypatch, name)
    load(path).close()
    ((key, note),) = Notes("choices").all().items()
    assert note["backend"] == name and len(made) == 1
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    Notes("attempts").put(f"{name} {key}", gone.pid)
    backend = load(path)
    backend.close()
    assert backend.verdict.backend == "cpu" and len(made) == 1
    assert "ended in the middle of it" in backend.verdict.trials[1].obstacle and "no longer serves" in caplog.text


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
