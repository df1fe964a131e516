"""What a model takes: against what the CPU engine holds, and what is said of it and of devices that are not used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from edgert import backends
from edgert.backends import planning
from edgert.backends.base import Batch
from edgert.backends.cpu.footprint import footprint
from edgert.backends.planning import Request
from edgert.devices import accelerators, gpus
from edgert.errors import DoesNotFitError
from edgert.notes import Notes
from edgert.quantize.architecture import describe
from edgert.quantize.gguf_file import GGUFFile


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_the_footprint_is_what_the_backend_holds(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(f"{name}_path")
    n_ctx = 256
    with GGUFFile.open(path) as file:
        predicted = footprint(file, describe(file), n_ctx, types=(kind, kind))
    backend = backends.load(path, backend="cpu", n_ctx=n_ctx, cache_type_k=kind, cache_type_v=kind)
    try:
        backend.forward(Batch.of([1] * n_ctx, 0, wanted="none"))
        held = backend.memory()
    finally:
        backend.close()
    assert predicted.weights == pytest.approx(held["weights"], rel=0.01)
    assert predicted.kv_per_token == held["kv_per_token"]
    assert predicted.kv == pytest.approx(held["kv"], rel=0.08)  # refined keys take a page more
    assert predicted.buffers == pytest.approx(held["buffers"], rel=0.25)


@pytest.mark.parametrize("quant", [Type.F32, Type.F16, Type.Q8_0, Type.Q4_0, Type.Q4_K, Type.Q6_K])
def test_weights_of_every_type(tiny_model: Callable[..., Path], quant: Type) -> None:
    path = tiny_model("llama", quant=quant, n_embd=256, n_ff=256, head_dim=64)
    with GGUFFile.open(path) as file:
        predicted = footprint(file, describe(file), 64).weights
    backend = backends.load(path, backend="cpu", n_ctx=64, n_threads=1)
    assert predicted == pytest.approx(backend.memory()["weights"], rel=0.02)
    backend.close()


def test_the_check_at_load_and_the_plan_say_the_same(
    with_memory: Callable[[int], None], tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model("llama", n_ctx=100_000)
    with GGUFFile.open(path) as file:
        a = describe(file)
        whole = footprint(file, a, 90_000, with_program=False).total
        with_memory(whole - (10 << 20))
        with pytest.raises(DoesNotFitError) as caught:
            backends.load(path, backend="cpu", n_ctx=90_000, n_threads=1)
        assert "10 MiB are missing" in str(caught.value)
        most = int(str(caught.value).rpartition("-c ")[2].split()[0])
        assert "it fits with -ctk q4_0 -ctv q4_0" in str(caught.value)
        with_memory(whole - (10 << 20) + footprint(file, a, 16).program)
        place, *_ = planning.places(Request(file, 90_000), None)
    assert place.largest_context == most and not place.fits
    assert f"at most -c {most} fits" in place.remedy
    assert "10 MiB are missing; it fits with -ctk q4_0" in str(place.refusal("It"))
    assert footprint(file, a, most).total <= whole - (10 << 20) + place.memory["program"]


def test_conversations_and_a_draft_take_their_own(tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model("llama")) as file, GGUFFile.open(tiny_model("llama", n_layer=1)) as draft:
        one, *_ = planning.places(Request(file, 512), None)
        four, *_ = planning.places(Request(file, 512, 4), None)
        guessed, *_ = planning.places(Request(file, 512, draft=draft), None)
        packed, *_ = planning.places(Request(file, 512, types=("q4_0", "q4_0")), None)
        extra = footprint(draft, describe(draft), 512, with_program=False)
    assert four.memory["kv"] == 4 * one.memory["kv"]
    assert four.memory["weights"] == one.memory["weights"]
    assert guessed.memory["draft"] == extra.total == guessed.memory["total"] - one.memory["total"]
    assert packed.memory["kv"] < 0.6 * one.memory["kv"]
    for place in (one, four, guessed):
        assert place.memory["total"] == sum(size for name, size in place.memory.items() if name != "total")


# Devices of other backends


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that the driver tells of, and no llama.cpp."""
    from edgert.backends.llama import library

    monkeypatch.setattr(accelerators, "present", lambda *_: frozenset({"gpu"}))
    monkeypatch.setattr(gpus, "gpus", lambda *_: [gpus.Gpu("NVIDIA Test", "nvidia", 2 << 30, 1 << 30, "580", 3)])
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.delitem(sys.modules, "llama_cpp.llama_cpp", raising=False)


def test_a_gpu_without_llama_is_planned_for_and_named_unusable(gpu: None, tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model("llama")) as file:
        _, place, *_ = planning.places(Request(file, 256), None)
        a = describe(file)
    assert (place.backend, place.device) == ("llama", "NVIDIA Test")
    assert "not installed" in place.obstacle and "pip install" in place.remedy
    assert place.layers == (a.n_layer + 1, a.n_layer + 1)
    assert place.memory["kv"] == 256 * 2 * a.n_layer * a.n_head_kv * a.head_dim * 2
    assert place.available == 1 << 30 and place.fits
    assert place.decode is None and "edgert bench --backend llama" in place.basis


def test_a_model_too_large_for_a_gpu(gpu: None, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GGUFFile.open(smollm2_path) as file:
        whole = planning.places(Request(file, 8192), None)[1].memory["total"]
        free = whole - (120 << 20)
        monkeypatch.setattr(gpus, "gpus", lambda *_: [gpus.Gpu("NVIDIA Test", "nvidia", 2 << 30, free, "580", 3)])
        place = planning.places(Request(file, 8192), None)[1]
    assert place.missing == 120 << 20
    assert place.layers is not None and 0 < place.layers[0] < place.layers[1] == 31
    assert 0 < place.largest_context < 8192


def test_measured_rates_of_a_choice_are_the_plan_s(gpu: None, tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model("llama")) as file:
        trial = {"backend": "llama", "device": "CUDA0", "prefill": 9000.0, "decode": 300.0}
        Notes("choices").put("key", {"file": str(file.path), "backend": "llama", "options": {}, "trials": [trial]})
        place = planning.places(Request(file, 256), None)[1]
    assert (place.prefill, place.decode, place.basis) == (9000.0, 300.0, "measured when auto tried it")
