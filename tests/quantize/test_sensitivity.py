"""Measured and predicted divergence, groups, the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.errors import EdgertError, ModelFileError
from edgert.quantize import feedback, probing, rounding, sensitivity
from edgert.quantize.feedback import Curvature
from edgert.quantize.formats import FORMATS
from edgert.quantize.probing import Baseline, groups_of
from edgert.quantize.sensitivity import Sensitivity
from edgert.quantize.source_tensor import SourceTensor

Floats = NDArray[np.float32]
N_VOCAB, N = 700, 64


class Kept(SourceTensor):
    """A tensor in memory."""

    def __init__(self, name: str, values: Floats) -> None:
        super().__init__(name, values.shape, FORMATS["F32"])
        self.values = values

    def _read(self, start: int, stop: int) -> Floats:
        return self.values[start:stop]


class TwoLayers:
    """An engine of two layers of tanh and a head; each token is predicted from itself."""

    n_vocab, n_ctx = N_VOCAB, 512

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.embedding = rng.normal(size=(N_VOCAB, N)).astype(np.float32)
        shapes = {"blk.0.ffn_up.weight": (N, N), "blk.1.ffn_up.weight": (N, N), "output.weight": (N_VOCAB, N)}
        self.tensors = {
            name: Kept(name, (rng.normal(size=shape) / np.sqrt(N)).astype(np.float32)) for name, shape in shapes.items()
        }
        self.tensors["output.weight"].values *= 3
        self.own = {name: tensor.values for name, tensor in self.tensors.items()}
        self.now = dict(self.own)
        self.replaced: list[str] = []

    def observe(self, tokens: NDArray[np.int32], on_input: Callable[..., object]) -> Floats:
        x = self.embedding[tokens]
        for name in ("blk.0.ffn_up.weight", "blk.1.ffn_up.weight"):
            on_input((name,), x)
            x = np.tanh(x @ self.now[name].T)
        on_input(("output.weight",), x)
        return x @ self.now["output.weight"].T

    def logits(self, tokens: NDArray[np.int32], first: int = 0) -> Floats:
        return self.observe(tokens, lambda *_: None)[first:]

    def pieces(self, tokens: NDArray[np.int32], first: int = 0) -> Iterator[Floats]:
        return iter(np.array_split(self.logits(tokens, first), 3))

    def replace(self, name: str, values: Floats | None, first: int = 0) -> None:
        self.replaced.append(name)
        self.now[name] = self.own[name] if values is None else self.now[name].copy()
        if values is not None:
            self.now[name][first : first + len(values)] = values

    def tokenize(self, text: str, *, add_special: bool = True) -> NDArray[np.int32]:
        raise NotImplementedError

    def render(self, messages: Sequence[Mapping[str, Any]]) -> NDArray[np.int32]:
        raise NotImplementedError

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


@pytest.fixture
def engine() -> TwoLayers:
    return TwoLayers()


CHUNKS = [np.random.default_rng(i).integers(0, N_VOCAB, 256).astype(np.int32) for i in range(8)]


def curvatures(engine: TwoLayers, chunks: Sequence[NDArray[np.int32]]) -> Callable[[str], Curvature]:
    sums: dict[str, Floats] = {}

    def add(names: tuple[str, ...], x: Floats) -> None:
        sums[names[0]] = sums.get(names[0], np.zeros((N, N), np.float32)) + x.T @ x

    for chunk in chunks:
        engine.observe(chunk, add)
    made = {name: Curvature(total) for name, total in sums.items()}
    return made.__getitem__


def true_divergence(engine: TwoLayers, name: str, values: Floats) -> float:
    """In float64 over the whole vocabulary."""
    own = np.concatenate([engine.logits(chunk, 128).copy() for chunk in CHUNKS]).astype(np.float64)
    engine.replace(name, values)
    new = np.concatenate([engine.logits(chunk, 128).copy() for chunk in CHUNKS]).astype(np.float64)
    engine.replace(name, None)
    log_p = own - np.log(np.exp(own).sum(1, keepdims=True))
    log_q = new - np.log(np.exp(new).sum(1, keepdims=True))
    return float((np.exp(log_p) * (log_p - log_q)).sum(1).mean())


def test_divergence_of_the_likeliest_tokens_is_nearly_the_whole(engine: TwoLayers) -> None:
    baseline = Baseline(engine, CHUNKS)
    assert baseline.n_tokens == 8 * 128
    assert baseline.divergence() == pytest.approx(0, abs=1e-6)
    values = engine.own["output.weight"] + np.random.default_rng(5).normal(size=(N_VOCAB, N)).astype(np.float32) * 0.02
    expected = true_divergence(engine, "output.weight", values)
    engine.replace("output.weight", values)
    found = baseline.divergence()
    assert 0.85 * expected < found <= expected * 1.001


def test_one_probe_predicts_the_other_formats(engine: TwoLayers) -> None:
    measured = probing.measure(
        engine,
        engine.tensors,
        curvatures(engine, CHUNKS),
        CHUNKS,
        lambda tensor: ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"),
        with_feedback=False,
        fingerprint="mine",
    )
    assert measured.fingerprint == "mine"
    assert all(engine.now[name] is engine.own[name] for name in engine.own)
    assert [probe.tensors for probe in measured.probes] == [(name,) for name in
            ("output.weight", "blk.0.ffn_up.weight", "blk.1.ffn_up.weight")]  # fmt: skip
    importance = curvatures(engine, CHUNKS)
    for name, tensor in engine.tensors.items():
        for format in ("Q4_1", "Q5_0", "Q8_0"):
            data = rounding.quantize(tensor.values, format, importance(name).importance)
            true = true_divergence(engine, name, FORMATS[format].dequantize(data))
            assert measured.loss(name, format) == pytest.approx(true, rel=0.35), (name, format)
        assert measured.loss(name, "Q8_0") < measured.loss(name, "Q5_1") < measured.loss(name, "Q4_1")


def test_what_was_found_is_not_measured_again(engine: TwoLayers, tmp_path: Path) -> None:
    """A run that is stopped at any step, kept as JSON, and gone on with finds what one run finds."""

    class Stopped(Exception):
        pass

    def measure(stop_at: int, known: Sensitivity | None = None) -> Sensitivity:
        def on_step(found: Sensitivity, stage: str, done: int, of: int) -> None:
            found.save(tmp_path / "s.json")
            if {"probing": 0, "measuring": 3}[stage] + done == stop_at:
                raise Stopped
            assert done <= of == 3

        formats = ("Q4_1", "Q8_0")
        seen = curvatures(engine, CHUNKS)
        return probing.measure(
            engine, engine.tensors, seen, CHUNKS, lambda tensor: formats, known=known, on_step=on_step
        )

    whole = measure(99)
    for stop_at in range(1, 6):
        with pytest.raises(Stopped):
            measure(stop_at)
        kept = Sensitivity.load(tmp_path / "s.json")
        assert len(kept.probes) == min(stop_at, 3) and len(kept.errors) == max(0, stop_at - 3)
        engine.replaced.clear()
        assert measure(99, kept) == whole
        assert len(engine.replaced) == 2 * (3 - len(kept.probes))  # each probe's values, and the model's own again


def test_a_failure_leaves_the_models_own_values(engine: TwoLayers, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))

    def divergence(self: Baseline) -> float:
        if next(calls) == 1:
            raise MemoryError
        return 0.1

    monkeypatch.setattr(Baseline, "divergence", divergence)
    with pytest.raises(MemoryError):
        probing.probe(engine, engine.tensors, curvatures(engine, CHUNKS), CHUNKS)
    assert all(engine.now[name] is engine.own[name] for name in engine.own)


def test_errors_of_a_sample_stand_for_all_rows(engine: TwoLayers) -> None:
    curvature = curvatures(engine, CHUNKS)("output.weight")
    tensor = engine.tensors["output.weight"]
    sample = probing.errors_of(tensor, ["Q4_0", "F16"], curvature)
    data = feedback.quantize(tensor.values, "Q4_0", curvature)
    whole = feedback.output_error(FORMATS["Q4_0"].dequantize(data) - tensor.values, curvature.hessian)
    whole /= feedback.output_error(tensor.values, curvature.hessian)
    assert sample["Q4_0"] == pytest.approx(whole, rel=0.1)
    assert sample["F16"] < 1e-3 * sample["Q4_0"]


def test_groups() -> None:
    names = [f"blk.{i}.{kind}.weight" for i in range(30) for kind in ("attn_q", "ffn_down")]
    few = groups_of(["token_embd.weight", *names[:8]], 9)
    assert few == [("token_embd.weight",), *((n,) for n in names[0:8:2]), *((n,) for n in names[1:8:2])]
    groups = groups_of(["token_embd.weight", *names], 13)
    assert sorted(n for group in groups for n in group) == sorted(["token_embd.weight", *names])
    assert len(groups) == 13
    assert ("blk.0.attn_q.weight",) in groups and ("blk.29.ffn_down.weight",) in groups
    assert sensitivity.label(groups[2]) == "attn_q 1-7"
    assert len(groups_of(names, 1)) == 2  # a kind is never mixed with another


def test_the_file_gives_back_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    made = Sensitivity(
        "f", {"a": {"Q4_0": 0.5, "Q8_0": 0.01}}, {"a": 0.25}, [sensitivity.Probe(("a",), "Q4_0", 0.125, 0.5)], 7
    )
    made.save(path)
    assert Sensitivity.load(path) == made
    assert (made.loss("a", "Q4_0"), made.loss("a", "Q8_0")) == (0.125, 0.0025)
    assert [one.name for one in tmp_path.iterdir()] == ["s.json"]
    for name, format in (("a", "Q5_K"), ("b", "Q4_0"), ("a", "BF16")):
        with pytest.raises(EdgertError, match=f"do not hold {name} as {format}"):
            made.loss(name, format)
    assert sensitivity.table(made) == (
        ["Q4_0", "Q8_0"],
        [{"group": "a", "tensors": ["a"], "kld": {"Q4_0": 0.125, "Q8_0": 0.0025}}],
    )


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"kind": "a picture"},
        {"factors": {"a": -1.0}},
        {"factors": {"a": float("nan")}},
        {"factors": {}},
        {"errors": {"a": {"Q4_17": 1.0}}},
        {"errors": []},
        {"probes": [{"tensors": 3}]},
        {"n_tokens": "many"},
    ],
)
def test_files_of_another_kind_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    Sensitivity("f", {"a": {"Q4_0": 0.5}}, {"a": 0.25}).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelFileError, match="measure them again"):
        Sensitivity.load(path)
    path.write_bytes(b"\x00\xff{")
    with pytest.raises(ModelFileError, match="measure them again"):
        Sensitivity.load(path)
