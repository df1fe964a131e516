"""A step that is interrupted between layers gives what it gives at once, whatever is computed in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from edgert import backends
from edgert.backends.base import Batch
from edgert.errors import DoesNotFitError

TOKENS = np.random.default_rng(5).integers(0, 384, 200).tolist()


def decode(backend: Any, position: int, sequence: int) -> np.ndarray:
    logits: np.ndarray = backend.extend([TOKENS[position]], position, sequence).copy()
    return logits


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_other_sequences_go_on_between_the_layers(family: str, tiny_model: Callable[..., Path]) -> None:
    """gemma3 has norms after its blocks and layers with a window, so that more passes from layer to layer."""
    path = tiny_model(family, quant=Type.Q8_0)
    with_breaks, at_once = (
        backends.load(path, backend="cpu", n_ctx=256, n_threads=1, n_seq_max=3, n_cached=768) for _ in range(2)
    )
    assert with_breaks.pauses
    for backend in (with_breaks, at_once):
        backend.forward(Batch.of(TOKENS[:64], 0, 0))
        backend.forward(Batch.of(TOKENS[:9], 0, 1))
    expected = at_once.forward(Batch.of(TOKENS[64:192], 64, 0)).copy()
    go_on, n_breaks = with_breaks.in_parts(Batch.of(TOKENS[64:192], 64, 0)), 0
    while (logits := go_on(0.0)) is None:
        # another step of the same shape, and one of a single token
        with_breaks.forward(Batch.of(TOKENS[:128], 0, 2))
        with_breaks.truncate(2, 0)
        np.testing.assert_array_equal(decode(with_breaks, 9 + n_breaks, 1), decode(at_once, 9 + n_breaks, 1))
        n_breaks += 1
    assert n_breaks >= 1
    np.testing.assert_array_equal(logits, expected)
    np.testing.assert_array_equal(decode(with_breaks, 192, 0), decode(at_once, 192, 0))
    # One that is given up leaves nothing behind.
    assert with_breaks.in_parts(Batch.of(TOKENS[:64], 0, 2))(0.0) is None
    with_breaks.free(2)
    np.testing.assert_array_equal(
        with_breaks.forward(Batch.of(TOKENS[:70], 0, 2)), at_once.forward(Batch.of(TOKENS[:70], 0, 2))
    )
    assert with_breaks.memory() == at_once.memory()
    # With time enough it does not come back in between.
    for backend in (with_breaks, at_once):
        backend.free(2)
    logits = with_breaks.in_parts(Batch.of(TOKENS[:64], 0, 2))(60.0)
    np.testing.assert_array_equal(logits, at_once.forward(Batch.of(TOKENS[:64], 0, 2)))
    for backend in (with_breaks, at_once):
        backend.close()


def test_what_does_not_fit_is_told_at_the_first_call_and_may_be_tried_again(tiny_model: Callable[..., Path]) -> None:
    with_room = backends.load(
        tiny_model("llama", quant=Type.Q8_0), backend="cpu", n_ctx=256, n_threads=1, n_seq_max=2, n_cached=128
    )
    with_room.forward(Batch.of(TOKENS[:128], 0, 0))
    go_on = with_room.in_parts(Batch.of(TOKENS[:64], 0, 1))
    with pytest.raises(DoesNotFitError):
        go_on(0.0)
    with_room.free(0)
    while (logits := go_on(0.0)) is None:
        pass
    assert logits.shape == (1, with_room.n_vocab)
    with_room.close()
