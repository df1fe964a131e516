"""What llama.cpp and ONNX Runtime take on the processor, against what they report and take."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from edgert.backends import choice, planning
from edgert.backends.llama.footprint import copied_types
from edgert.backends.planning import Request
from edgert.errors import BackendUnavailableError
from edgert.quantize.gguf_file import GGUFFile

needs_llama = pytest.mark.skipif(not choice.installed("llama"), reason="llama-cpp-python is not installed")


def on_llama(path: Path, n_ctx: int, **request: Any) -> planning.Place:
    with GGUFFile.open(path) as file:
        found = planning.places(Request(file, n_ctx, **request), None)
    return next(place for place in found if (place.backend, place.device) == ("llama", "cpu"))


HELD = """
import sys
from edgert import backends
from edgert.backends import planning
from edgert.quantize.gguf_file import GGUFFile
for path in sys.argv[1:]:
    backend = backends.load(path, backend="llama", device="cpu", n_ctx=512, n_threads=1)
    weights = sum(float(size) for _, what, size in backend._buffers if what == "model") * 2**20
    held = backend.memory()
    backend.close()
    with GGUFFile.open(path) as file:  # afterwards, since a first load finds out about AMX
        places = planning.places(planning.Request(file, 512), None)
    place = next(place for place in places if (place.backend, place.device) == ("llama", "cpu"))
    print(weights, place.memory["weights"], held["kv"], place.memory["kv"])
"""


@needs_llama
def test_llama_s_weights_and_cache_are_what_it_reports(tiny_model: Callable[..., Path]) -> None:
    """Copies in layouts of its own included, as this build and processor make them.

    In a process of its own: where edgert's kernels have used AMX, llama.cpp's that fail can only be avoided without
    such layouts.
    """
    shape = {"n_embd": 512, "n_ff": 512, "head_dim": 64, "n_vocab": 2048}
    paths = [tiny_model("llama", quant=quant, **shape) for quant in (Type.Q4_0, Type.Q4_1, Type.Q4_K, Type.Q8_0)]
    done = subprocess.run([sys.executable, "-c", HELD, *paths], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        weights, planned, kv, planned_kv = map(float, line.split())
        assert planned == pytest.approx(weights, rel=0.03)
        assert planned_kv == kv
    assert len(done.stdout.splitlines()) == len(paths)


@needs_llama
def test_llama_on_the_processor_has_conversations_types_and_what_is_missing(
    with_memory: Callable[[int], None], tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model("llama", n_ctx=100_000)
    one, four = on_llama(path, 4096), on_llama(path, 4096, n_parallel=4)
    assert four.memory["kv"] == 4 * one.memory["kv"] and four.memory["weights"] == one.memory["weights"]
    assert on_llama(path, 4096, types=("q8_0", "q8_0")).memory["kv"] == one.memory["kv"] * 8.5 / 16
    with_memory(one.memory["total"] - (10 << 20))
    place = on_llama(path, 4096)
    assert not place.fits and place.missing == 10 << 20
    assert f"at most -c {place.largest_context} fits" in place.remedy and 0 < place.largest_context < 4096
    assert on_llama(path, place.largest_context).fits


@needs_llama
def test_a_llama_that_does_not_load_is_named_unusable(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> None:
    def broken(*_: Any) -> Any:
        raise BackendUnavailableError("its library does not load (x): build it again")

    monkeypatch.setattr("edgert.backends.llama.library.system_info", broken)
    place = on_llama(tiny_model("llama"), 256)
    assert (place.obstacle, place.remedy) == ("its library does not load (x)", "build it again")


def test_types_that_llama_copies_follow_its_own_words() -> None:
    x86 = "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 1 | AMX_INT8 = 1 | REPACK = 1"
    assert copied_types("CPU : AVX2 = 1 | REPACK = 1") == {"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"}
    assert "Q4_1" in copied_types(x86) and "Q4_1" not in copied_types(x86, ("AMX_INT8",))
    assert "Q2_K" in copied_types(x86, ("AMX_INT8",))
    assert "Q8_0" in copied_types("CPU : NEON = 1 | DOTPROD = 1 | REPACK = 1")
    assert not copied_types("CPU : AVX2 = 1")


PEAK = """
import sys
import edgert
from edgert.backends import planning
from edgert.devices import probe
from edgert.quantize.gguf_file import GGUFFile
path, n_ctx = sys.argv[1], int(sys.argv[2])
with edgert.load(path, backend=sys.argv[3], device="cpu", n_ctx=n_ctx, n_threads=1) as model:
    model.generate(list(range(100, 100 + int(sys.argv[4]))), max_tokens=2, temperature=0, ignore_eos=True)
    peak = probe.process_memory()[1]
with GGUFFile.open(path) as file:
    places = planning.places(planning.Request(file, n_ctx), None)
place = next(place for place in places if (place.backend, place.device) == (sys.argv[3], "cpu"))
print(peak, place.memory["total"])
"""


def peak_and_plan(path: Path, *arguments: object) -> tuple[int, int]:
    command = [sys.executable, "-c", PEAK, str(path), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, planned = map(int, done.stdout.split()[-2:])
    return peak, planned


@needs_llama
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@pytest.mark.parametrize("n_ctx", [2048, 8192])
def test_llama_s_peak_is_foretold(name: str, n_ctx: int, request: pytest.FixtureRequest) -> None:
    """The cache is taken whole at load, so that a prompt of a whole pass shows the peak."""
    peak, planned = peak_and_plan(request.getfixturevalue(f"{name}_path"), n_ctx, "llama", 512)
    assert planned == pytest.approx(peak, rel=0.15)


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime")), reason="ONNX Runtime is not installed"
)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_onnx_runtime_s_peak_is_foretold(name: str, request: pytest.FixtureRequest) -> None:
    """When its weights are converted as well, and when they are there already."""
    path = request.getfixturevalue(f"{name}_path")
    for _ in range(2):
        peak, planned = peak_and_plan(path, 2048, "onnx", 2040)
        assert planned == pytest.approx(peak, rel=0.15)
