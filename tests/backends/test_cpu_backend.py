"""The CPU backend's door: what it refuses before any work, and what is left behind it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgert
from edgert import backends
from edgert.backends.base import REPEATED
from edgert.backends.cpu import graph
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


@pytest.mark.parametrize("whole", [False, True], ids=["backend", "model"])
def test_weights_and_cache_leave_with_their_last_user(tiny_model: Callable[..., Path], whole: bool) -> None:
    """At once: who closes one model to load another has no time for the collector of cycles."""
    path = tiny_model("llama")
    gc.collect()
    gc.disable()
    try:
        model = edgert.load(path, n_ctx=64, n_threads=1) if whole else None
        if model:
            model.generate([1, 2, 3], max_tokens=2)
        backend = model.backend if model else backends.load(path, backend="cpu", n_ctx=64, n_threads=1)
        held = [weakref.ref(part) for part in (backend._cache, backend._graph)]
        (model or backend).close()
        del model, backend
        assert [part() for part in held] == [None, None]
    finally:
        gc.enable()


def test_a_product_knows_the_weights_that_are_read_next(tiny_model: Callable[..., Path]) -> None:
    """It asks for them before their turn comes; after a step's last product that of the next step begins."""
    from edgert.backends.cpu.kernels import product

    assert product.ARGUMENTS[-graph.FOLLOWING :] == ("following", "following_panels", "following_panel_bytes")
    backend = backends.load(tiny_model("llama"), backend="cpu", n_ctx=64, n_threads=1)
    for n in (1, 3):
        ops = [op for op in backend._graph.ops(backend._graph.shape(0, n, n)) if op.reads is not None]
        matrices = [op.reads.matrix for op in ops]
        assert [op.arguments[0] for op in ops] == [matrix.data.ctypes.data for matrix in matrices]
        expected = [(m.data.ctypes.data, m.n_panels, m.data.nbytes // m.n_panels) for m in matrices]
        assert [tuple(op.arguments[-graph.FOLLOWING :]) for op in ops] == [*expected[1:], expected[0]]
    backend.close()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_sequence_is_filled_by_copies_of_what_is_cached(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """What is read stays as it is; a sequence of other lengths than whole pages is read on."""
    backend = backends.load(tiny_model(family, n_ctx=512), backend="cpu", n_ctx=512, n_threads=1, n_seq_max=2)
    try:
        backend.fill(1, REPEATED)
        expected = backend.step(5, 1).copy()
        read: list[int] = []
        real = backend.forward
        monkeypatch.setattr(backend, "forward", lambda batch: (read.append(len(batch)), real(batch))[1])
        backend.fill(0, 300)
        assert read == [REPEATED] and backend.length(0) == 300
        assert np.isfinite(backend.step(5, 0)).all()
        backend.fill(1, 100)
        assert read == [REPEATED, 100 - REPEATED - 1] and backend.length(1) == 100
        backend.free(0)
        backend.fill(0, REPEATED)
        assert np.array_equal(backend.step(5, 0), expected)
        with pytest.raises(ValueError, match="positions run from 0 to 511"):
            backend.fill(0, 600)
    finally:
        backend.close()
