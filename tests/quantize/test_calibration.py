"""Statistics and Hessians against plain NumPy, on inputs of a made-up engine and of the real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from edgert import calibration_engine
from edgert.errors import ContextFullError, EdgertError
from edgert.quantize.calibration import Statistics, calibrate, hessian_passes, inputs_of
from edgert.quantize.engine import open_engine
from edgert.quantize.gguf_file import GGUFFile

CHUNKS = np.random.default_rng(1).integers(0, 384, (3, 150)).astype(np.int32)


@pytest.fixture(scope="module")
def source(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", quant=Type.BF16, tied=True)


@pytest.fixture(scope="module")
def engine(source: Path) -> Any:
    with open_engine(source, n_ctx=160, n_threads=2) as engine:
        yield engine


def inputs_by_name(engine: Any) -> dict[str, np.ndarray]:
    found: dict[str, list[np.ndarray]] = {}
    for chunk in CHUNKS:
        engine.observe(chunk, lambda names, x: [found.setdefault(name, []).append(x.copy()) for name in names])
    return {name: np.concatenate(parts).astype(np.float64) for name, parts in found.items()}


def test_statistics_and_hessians_are_those_of_the_inputs(engine: Any) -> None:
    inputs = inputs_by_name(engine)
    chosen = {"blk.0.attn_k.weight", "blk.0.attn_v.weight", "blk.1.ffn_down.weight", "token_embd.weight"}
    statistics, calls = Statistics(datasets=["made up"]), []
    (hessians,) = hessian_passes(
        engine, CHUNKS, chosen, 1 << 30, statistics, on_chunk=lambda done, of: calls.append((done, of))
    )
    alone = calibrate(engine, CHUNKS, datasets=["made up"])
    assert alone.sums.keys() == statistics.sums.keys() and alone.counts == statistics.counts
    assert (alone.n_chunks, alone.chunk_size, alone.datasets) == (3, 150, ["made up"])
    assert (statistics.n_chunks, statistics.chunk_size, statistics.datasets) == (3, 150, ["made up"])
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert statistics.sums.keys() == inputs.keys()
    assert "token_embd.weight" in inputs  # the tied head
    for name, x in inputs.items():
        assert statistics.counts[name] == [450]
        np.testing.assert_allclose(statistics.sums[name][0], (x * x).sum(0), rtol=1e-5)
        np.testing.assert_allclose(statistics.importance(name), (x * x).mean(0), rtol=1e-5)
        np.testing.assert_allclose(alone.sums[name][0], (x * x).sum(0), rtol=1e-5)  # summed up by the engine
        assert (name in hessians) == (name in chosen)
        if name in chosen:
            assert hessians.count(name) == 450
            np.testing.assert_allclose(hessians[name], x.T @ x, atol=1e-5 * (x * x).sum(0).max())
    assert np.shares_memory(hessians["blk.0.attn_k.weight"], hessians["blk.0.attn_v.weight"])
    with pytest.raises(ValueError, match="read-only"):
        hessians["token_embd.weight"][0, 0] = 1


def test_passes_stay_within_the_memory(engine: Any) -> None:
    groups = inputs_of(engine)
    names = {name for shared in groups for name in shared if name.startswith("blk")}
    assert len(names) == 14
    inputs = inputs_by_name(engine)
    for max_bytes, n_passes in ((1, 8), (192 * 192 * 4, 6), (1 << 30, 1)):
        seen: list[str] = []
        passes = 0
        statistics = Statistics()
        for hessians in hessian_passes(engine, CHUNKS, names, max_bytes, statistics):
            passes += 1
            here = [name for name in names if name in hessians]
            arrays = {id(hessians[name].base): hessians[name].nbytes for name in here}
            assert sum(arrays.values()) <= max_bytes or len(arrays) == 1
            for name in here:
                x = inputs[name]
                np.testing.assert_allclose(hessians[name], x.T @ x, atol=1e-5 * (x * x).sum(0).max())
            seen += here
        assert sorted(seen) == sorted(names)
        assert passes == n_passes
        assert statistics.n_chunks == 3 and set(statistics.counts) >= names  # read once, however many passes
        assert {int(counts[0]) for counts in statistics.counts.values()} == {450}


def test_experts_and_merging() -> None:
    a = Statistics({"e": np.array([[8.0, 4.0], [0.0, 0.0]])}, {"e": np.array([4, 0])}, ["x"], 2)
    assert a.unreached("e") == 1
    np.testing.assert_array_equal(a.importance("e"), [[2, 1], [2, 1]])  # the one without tokens takes the mean
    a.merge(
        Statistics(
            {"e": np.array([[0.0, 0.0], [6.0, 3.0]]), "f": np.ones((1, 2))},
            {"e": np.array([0, 3]), "f": np.array([2])},
            ["x", "y"],
            1,
        )
    )
    np.testing.assert_array_equal(a.importance("e"), [[2, 1], [2, 1]])
    np.testing.assert_array_equal(a.importance("f"), [0.5, 0.5])
    assert (a.unreached("e"), a.datasets, a.n_chunks) == (0, ["x", "y"], 3)
    assert a.importance("g") is None
    with pytest.raises(EdgertError, match=r"f have the shapes \(1, 2\) and \(1, 3\)"):
        a.merge(Statistics({"f": np.ones((1, 3))}, {"f": np.array([2])}))


def test_inputs_that_are_not_finite_are_named() -> None:
    with pytest.raises(EdgertError, match=r"blk\.0\.ffn_down\.weight is NaN"):
        Statistics().add(["blk.0.ffn_down.weight"], np.array([[1.0, np.nan]], np.float32))


def test_engine(engine: Any, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = CHUNKS[0]
    whole = engine.logits(tokens).copy()
    assert whole.shape == (150, 384)
    np.testing.assert_allclose(engine.logits(tokens, first=100), whole[100:], atol=1e-4)
    weight = np.zeros((128, 192), np.float32)
    engine.replace("blk.1.ffn_down.weight", weight)
    assert np.abs(engine.logits(tokens) - whole).max() > 0.1
    engine.replace("blk.1.ffn_down.weight", None)
    np.testing.assert_array_equal(engine.logits(tokens), whole)
    short = engine.logits(tokens[:100], first=90)  # padded to whole windows
    np.testing.assert_allclose(short, whole[90:100], atol=0.05)
    monkeypatch.setattr(calibration_engine, "PIECE_BYTES", 1)  # pieces of a window
    pieces = [piece.copy() for piece in engine.pieces(tokens, first=40)]
    assert [len(piece) for piece in pieces] == [24, 64, 22]
    np.testing.assert_allclose(np.concatenate(pieces), whole[40:], atol=0.05)  # as many rows are computed otherwise
    with GGUFFile.open(source) as file:
        weight = file.tensors["blk.1.ffn_down.weight"].dequantize()
    weight[64:] = 0
    engine.replace("blk.1.ffn_down.weight", weight)
    expected = engine.logits(tokens).copy()
    engine.replace("blk.1.ffn_down.weight", None)  # from several pieces of the file
    np.testing.assert_array_equal(engine.logits(tokens), whole)
    engine.replace("blk.1.ffn_down.weight", weight[64:], first=64)
    np.testing.assert_array_equal(engine.logits(tokens), expected)
    with pytest.raises(ValueError, match="whole panels"):
        engine.replace("blk.1.ffn_down.weight", weight[:8], first=64)
    engine.replace("blk.1.ffn_down.weight", None)
    with pytest.raises(ContextFullError):
        engine.logits(np.zeros(161, np.int32))
    assert engine.tokenize("Hello world").dtype == np.int32
    assert len(engine.render([{"role": "user", "content": "Hello"}]))
