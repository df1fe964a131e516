"""The CPU backend's door: what it refuses before any work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgert import backends
from edgert.devices import probe
from edgert.errors import DoesNotFitError


def test_a_cache_that_does_not_fit_is_refused_with_both_sizes(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("llama")
    facts = replace(probe.probe(), memory_available=path.stat().st_size + (1 << 20))
    monkeypatch.setattr(probe, "probe", lambda: facts)
    with pytest.raises(
        DoesNotFitError, match=r"100000 cached positions needs \d+ MiB, and \d+ MiB.*at most -c \d+ fits"
    ):
        backends.load(path, backend="cpu", n_ctx=100_000)
    facts = replace(facts, memory_available=1 << 10)
    with pytest.raises(DoesNotFitError, match="smaller model"):
        backends.load(path, backend="cpu", n_ctx=256)
