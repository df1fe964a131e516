"""Backends and machines that are made up, for tests of what chooses between backends.

Failures are injected at the backends' doors: in the table of openers, in the libraries that they load, in the files
that they keep. The cpu backend and its answers are real.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgert import backends
from edgert.backends import choice
from edgert.backends.base import Backend, Verdict
from edgert.backends.choice import SPREAD
from edgert.backends.cpu.backend import CpuBackend
from edgert.devices import accelerators

KINDS = {"llama": "gpu", "onnx": "npu"}
OTHERS = ("device", "require", "n_gpu_layers", *SPREAD)  # options that the cpu backend lacks


class Clock:
    """Stands for the module `time` in `choice`: a machine with other work cannot change which backend is faster."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.002
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Twin(CpuBackend):
    """The cpu backend under another name, with what a test wants to go wrong."""

    name, device = "llama", "CUDA0 (made up)"
    pause = 0.0
    bend: Callable[[Any], Any] | None = None

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **{name: value for name, value in options.items() if name not in OTHERS})
        self.verdict = Verdict("x", self.name, self.device, "a twin")
        self.options = options

    def _walk(self, shape: Any, n_wanted: int) -> Any:
        choice.time.sleep(self.pause)  # by the clock that rates are measured with
        logits = super()._walk(shape, n_wanted)
        return self.bend(logits) if self.bend else logits


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
