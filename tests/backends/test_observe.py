"""What llama.cpp and ONNX Runtime show of their products' inputs, against the float32 reference and the cpu backend."""

from __future__ import annotations

import ctypes
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Type
from mixtures import N_EXPERT, write_mixture
from reference import ObservedReference, observed, relative_error

from edgert import backends
from edgert.backends.base import HEADS, Backend, Batch
from edgert.backends.llama import observer
from edgert.errors import BackendUnavailableError, EdgertError, RequestError
from edgert.quantize.engine import Expert, open_engine
from edgert.quantize.imatrix import read_imatrix

TOKENS = np.random.default_rng(21).integers(0, 384, 150).tolist()  # two parts of 64, and a rest
BOUNDS = {"llama": 0.005, "onnx": 0.01}  # float32 weights and a cache of float16; float32 throughout


def installed(*names: str) -> Any:
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} not installed")


needs_llama = installed("llama_cpp")
BACKENDS = [
    pytest.param("llama", marks=needs_llama),
    pytest.param("onnx", marks=installed("onnx", "onnxruntime")),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgert.backends.onnx.store.root", lambda: tmp_path / "onnx")


@pytest.fixture
def load() -> Iterator[Callable[..., Backend]]:
    opened: list[Backend] = []

    def make(path: Path, name: str, **options: Any) -> Backend:
        options = {"n_ctx": 256, "n_threads": 1, "device": "cpu", "observable": True, **options}
        opened.append(backends.load(path, backend=name, **options))
        return opened[-1]

    yield make
    for backend in opened:
        backend.close()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
@pytest.mark.parametrize("name", BACKENDS)
def test_inputs_are_those_of_the_reference(
    name: str, family: str, tiny_model: Callable[..., Path], load: Callable[..., Backend]
) -> None:
    path = tiny_model(family, quant=Type.F32)
    expected = ObservedReference(path).inputs(TOKENS)
    backend = load(path, name)
    found = observed(backend, Batch.of(TOKENS, 0, wanted="all"))
    assert found.keys() == expected.keys()
    errors = {tensor: relative_error(found[tensor], expected[tensor]) for tensor in found}
    assert {tensor: error for tensor, error in errors.items() if error > BOUNDS[name]} == {}
    assert backend.length(0) == len(TOKENS)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_head_s_input_is_that_of_wanted_tokens(
    name: str, tiny_model: Callable[..., Path], load: Callable[..., Backend]
) -> None:
    backend = load(tiny_model("llama", quant=Type.F32), name)
    whole = observed(backend, Batch.of(TOKENS, 0, wanted="all"))
    backend.free(0)
    batch = Batch.of(TOKENS, 0, wanted="none")
    batch.wanted[[3, 70, 149]] = True
    some = observed(backend, batch)
    for tensor in whole:
        expected = whole[tensor][batch.wanted] if tensor in HEADS else whole[tensor]
        np.testing.assert_allclose(some[tensor], expected, atol=1e-4)
    logits = backend.forward(Batch.of([7], 150))
    assert logits.shape == (1, 384) and np.isfinite(logits).all()


@pytest.mark.parametrize("name", BACKENDS)
def test_an_error_of_the_observer_comes_out(
    name: str, tiny_model: Callable[..., Path], load: Callable[..., Backend]
) -> None:
    backend = load(tiny_model("llama", quant=Type.F32), name)
    calls = []

    def fails(*arguments: Any) -> None:
        calls.append(arguments)
        raise EdgertError("NaN")

    with pytest.raises(EdgertError, match="NaN"):
        backend.observe(Batch.of(TOKENS[:5], 0), fails)
    assert len(calls) == 1
    backend.free(0)
    assert observed(backend, Batch.of(TOKENS[:5], 0)).keys() == observed(backend, Batch.of(TOKENS[:5], 5)).keys()


@pytest.mark.parametrize("name", BACKENDS)
def test_only_who_asked_may_observe(name: str, tiny_model: Callable[..., Path], load: Callable[..., Backend]) -> None:
    backend = load(tiny_model("llama", quant=Type.F32), name, observable=False)
    assert "observe" not in backend.capabilities
    with pytest.raises(NotImplementedError):
        backend.observe(Batch.of([1], 0), lambda *_: None)


@needs_llama
def test_experts_of_llama_cpp_read_what_those_of_the_cpu_backend_read(
    tmp_path: Path, load: Callable[..., Backend]
) -> None:
    path = write_mixture(tmp_path / "m.gguf", "qwen2moe", quant=Type.F32)
    seen: dict[str, Any] = {}
    for name, options in (("llama", {}), ("cpu", {"cache_type_k": "f16", "cache_type_v": "f16"})):
        sums: dict[Any, list[np.ndarray]] = defaultdict(list)

        def see(names: tuple[str, ...], rows: np.ndarray, expert: Expert | None = None, sums: Any = sums) -> None:
            for tensor in names:
                sums[tensor, expert].append(rows.copy())

        if name == "cpu":
            backend = backends.load(path, backend="cpu", n_ctx=256, n_threads=1, **options)
        else:
            backend = load(path, name)
        backend.observe(Batch.of(TOKENS, 0, wanted="all"), see)
        seen[name] = {key: np.concatenate(rows) for key, rows in sums.items()}
        backend.close()
    assert seen["llama"].keys() == seen["cpu"].keys()
    experts = [key for key in seen["llama"] if key[1] is not None]
    assert {key[1].of for key in experts} == {N_EXPERT} and len(experts) > 20
    for key, rows in seen["llama"].items():
        assert len(rows) == len(seen["cpu"][key]), key
        squares = [(x.astype(float) ** 2).sum() for x in (rows, seen["cpu"][key])]
        assert squares[0] == pytest.approx(squares[1], rel=0.03), key


@needs_llama
def test_tensors_of_another_build_are_not_read(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path], load: Callable[..., Backend]
) -> None:
    fields = [("type", ctypes.c_int), ("flag", ctypes.c_void_p), *observer.Tensor._fields_[1:]]
    monkeypatch.setattr(observer, "Tensor", type("Tensor", (ctypes.Structure,), {"_fields_": fields}))
    with pytest.raises(BackendUnavailableError, match=r"keeps its tensors otherwise than edgert knows.*--backend cpu"):
        load(tiny_model("llama", quant=Type.F32), "llama")


@installed("onnx", "onnxruntime")
def test_npus_show_nothing(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path], load: Callable[..., Backend]
) -> None:
    from edgert.backends.onnx import providers

    monkeypatch.setitem(providers.PROVIDERS, "cpu", replace(providers.PROVIDERS["cpu"], profile="static"))
    with pytest.raises(BackendUnavailableError, match="stays there: choose --device cpu"):
        load(tiny_model("llama", quant=Type.Q4_0), "onnx")


@pytest.mark.parametrize("name", BACKENDS)
def test_an_importance_matrix_is_the_cpu_backend_s(name: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from edgert.cli.verbs.imatrix import command

    path = tiny_model("llama", tied=True)
    made = {}
    for backend, more in ((name, ["--device", "cpu"]), ("auto", [])):
        out = tmp_path / f"{backend}.gguf"
        arguments = ["-m", str(path), "-f", "code", "-c", "64", "--chunks", "3", "-o", str(out), "-t", "1"]
        result = CliRunner().invoke(command, [*arguments, "--backend", backend, *more])
        assert result.exit_code == 0, result.output
        made[backend] = read_imatrix(out)
    assert made[name].counts.keys() == made["auto"].counts.keys()
    for tensor, counts in made["auto"].counts.items():
        assert made[name].counts[tensor].tolist() == counts.tolist()
        found, expected = made[name].importance(tensor), made["auto"].importance(tensor)
        assert found is not None and expected is not None
        assert relative_error(found, expected) < 0.05


def test_what_other_backends_cannot_observe_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="llama runs GGUF files alone: convert the folder first"):
        open_engine(tmp_path, backend="llama")
    with pytest.raises(RequestError, match="device: is for another backend: name it, llama or onnx"):
        open_engine(tiny_model("llama"), device="gpu")
