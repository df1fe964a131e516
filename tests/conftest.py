"""Models that tests run on: two real ones from the catalogue, and tiny random ones of every family."""

from __future__ import annotations

import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# OpenBLAS' threads wait for each other by spinning: beside the engine's threads, on few cores, the small products of
# the reference would take a hundred times longer. Must stand before the first import of NumPy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
MOST = 8  # processes side by side, each of which may hold 1 GB
sys.path.insert(0, str(Path(__file__).resolve().parent))  # so that tests say `from tiny import write_tiny`

# A busy machine fails no test: nothing is asserted of how long an example takes. Fixtures are not changed by examples.
# The examples are those of the run before: who looks for new ones says `--hypothesis-profile search`.
usual = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.register_profile("edgert", usual, derandomize=True)
settings.register_profile("search", usual, derandomize=False)
settings.load_profile("edgert")


def processors() -> int:
    """As many as this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The fast tests as a whole run on all processors; what is named, looked into or slow runs in this process."""
    option = config.option
    if not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput") or option.numprocesses is not None:
        return
    chosen = option.file_or_dir or option.keyword or option.collectonly or option.markexpr != "not slow"
    looked_into = option.usepdb or option.trace or option.capture == "no"
    if not (chosen or looked_into):
        option.numprocesses, option.dist = min(processors(), MOST), "loadfile"


@pytest.fixture(scope="session", autouse=True)
def compilers() -> Iterator[None]:
    """Kernels are compiled by processes that stay; a test of the product's own way to do it says so."""
    from compiling import compilers_that_stay

    with compilers_that_stay(min(MOST, processors())):  # who runs beside this process waits for the same kernels
        yield


@pytest.fixture(autouse=True)
def seeds(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Samplers that are given no seed draw the same ones in every run of a test: it passes always or never."""
    draws = random.Random(request.node.nodeid)
    monkeypatch.setattr("edgert.sampler.secrets", SimpleNamespace(randbits=draws.getrandbits))


def _real_model(name: str) -> Path:
    folder = os.environ.get("EDGERT_MODELS")
    if folder:
        path = Path(folder) / f"{name}.gguf"
        if not path.is_file():
            pytest.fail(f"EDGERT_MODELS is set, but {path} is missing")
        return path
    from edgert.store import pull

    return Path(pull(name))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1: llama family, byte-level BPE."""
    return _real_model("smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma3-270M Q4_K_M: sliding windows, SentencePiece with byte fallback."""
    return _real_model("gemma3")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The design folder with reference data, next to the repository."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the design folder ../shared, which is not part of the repository")
    return folder


@pytest.fixture(scope="session")
def llama_cpp_source() -> Path:
    """llama.cpp's sources, as llama-cpp-python's source package has them under vendor/llama.cpp."""
    folder = os.environ.get("EDGERT_LLAMA_CPP_SOURCE")
    if folder and not (Path(folder) / "models" / "templates").is_dir():
        pytest.fail(f"EDGERT_LLAMA_CPP_SOURCE is set, but {folder} has no models/templates")
    if not folder:
        pytest.skip(
            "needs llama.cpp's sources: unpack llama-cpp-python's source package "
            "and set EDGERT_LLAMA_CPP_SOURCE to its vendor/llama.cpp"
        )
    return Path(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_model(family, **options of tiny.write_tiny) -> path; equal requests give the same file."""
    from tiny import write_tiny

    folder = tmp_path_factory.mktemp("tiny")
    made: dict[bytes, Path] = {}

    def make(family: str, **options: Any) -> Path:
        request = pickle.dumps((family, sorted(options.items(), key=lambda item: item[0])))
        if request not in made:
            made[request] = write_tiny(folder / f"{len(made)}-{family}.gguf", family, **options)
        return made[request]

    return make
