"""How llama.cpp is told to spread a model over GPUs: from flags to what the load takes."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from edgert import backends
from edgert.backends.llama import devices, footprint
from edgert.backends.llama.backend import LlamaBackend
from edgert.backends.llama.devices import LlamaDevice
from edgert.backends.llama.offload import FITTING, Offload
from edgert.cli.flags import backend_flags, backend_options
from edgert.errors import BackendUnavailableError, RequestError
from edgert.quantize.architecture import describe
from edgert.quantize.gguf_file import GGUFFile

MIB = 1 << 20
needs_llama = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[LlamaDevice]:
    found = [LlamaDevice(f"CUDA{i}", "a GPU", "gpu", size * MIB, size * MIB) for i, size in enumerate((8000, 2000))]
    monkeypatch.setattr(devices, "gpus", lambda names=(): found)
    return found


def parsed(*arguments: str) -> dict[str, Any]:
    taken: dict[str, Any] = {}

    @click.command()
    @backend_flags
    def command(**flags: Any) -> None:
        taken.update(backend_options(flags))

    result = CliRunner().invoke(command, list(arguments))
    if result.exit_code:
        raise click.UsageError(result.output)
    return taken


def test_flags_are_llama_cpp_s() -> None:
    arguments = ["-sm", "tensor", "-ts", "3,1", "-mg", "1", "--rpc", "a:50052,b:50052", "-ngl", "7", "--require"]
    assert parsed(*arguments) == {
        "backend": "auto",
        "n_gpu_layers": 7,
        "split_mode": "tensor",
        "tensor_split": (3.0, 1.0),
        "main_gpu": 1,
        "rpc": ("a:50052", "b:50052"),
        "require": True,
    }
    assert parsed() == {"backend": "auto"}
    for wrong in (["-ts", "3,x"], ["-sm", "halves"], ["-mg", "-1"]):
        with pytest.raises(click.UsageError):
            parsed(*wrong)


def test_layers_are_dealt_out_by_their_shares(tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model("llama", n_layer=7)) as file:
        a = describe(file)
        common = (0, 2.0, 512)  # positions, bytes of an element, tokens of a pass
        layer = sum(file.tensor(name).n_bytes for name in a.layer_tensors(0))
        idle = devices.layers_that_fit(file, a, [1 << 40], *common)
        assert idle == a.n_layer + 1
        base = footprint.gpu_bytes(file, a, *common)[2]

        def fit(shares: tuple[float, ...], *room: float) -> int:
            return devices.layers_that_fit(file, a, [round(base + size) for size in room], *common, shares)

        wide = 100.0 * layer
        assert fit((1, 1), wide, wide) == 8
        assert fit((1, 0), wide, 0) == 8 and fit((0, 1), 0, wide) == 8
        assert fit((1, 1), 4.5 * layer, wide) == 8  # four layers on the first
        assert fit((1, 1), 3.5 * layer, wide) == 6  # of seven the first would take four
        assert fit((3, 1), 3.5 * layer, wide) == 4  # three and the head, where by free memory all would go
        assert devices.layers_that_fit(file, a, [round(base + size) for size in (3.5 * layer, wide)], *common) == 8


def test_a_plan_keeps_the_shares_of_those_that_take_part(
    two_gpus: list[LlamaDevice], tiny_model: Callable[..., Path]
) -> None:
    with GGUFFile.open(tiny_model("llama")) as file:

        def plan(**options: Any) -> Offload:
            return Offload.plan(file, FITTING, 64, 2.0, **options)

        assert plan(tensor_split=(3, 1)).tensor_split == (3, 1)
        assert plan(tensor_split=(1,)).tensor_split == (1, 0)
        assert plan(split_mode="none", main_gpu=1, tensor_split=(3, 1)).tensor_split == ()
        for shares in ((0, 0), (-1, 2), (float("nan"), 1), (float("inf"), 1), "3,1"):
            with pytest.raises(RequestError, match="tensor_split: must be shares from 0 on"):
                plan(tensor_split=shares)
        with pytest.raises(RequestError, match="tensor_split: has 3 shares; there are 2 GPUs"):
            plan(tensor_split=(1, 1, 1))
        with pytest.raises(RequestError, match="main_gpu: is 2; there is no such GPU"):
            plan(split_mode="none", main_gpu=2)


@needs_llama
def test_the_load_takes_the_shares(monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]) -> None:
    from edgert.backends.llama import offload

    library, seen = offload.library(), []
    load = library.llama_model_load_from_file

    def noting(path: bytes, params: Any) -> Any:
        seen.append((params.tensor_split[0], params.tensor_split[1]))
        return load(path, params)

    monkeypatch.setattr(library, "llama_model_load_from_file", noting)
    path = str(tiny_model("llama"))
    handle = offload.load_model(path, True, Offload(0, 0, "CPU", tensor_split=(3.0, 1.0)))
    assert handle
    library.llama_model_free(handle)
    assert seen == [(3.0, 1.0)]


@needs_llama
def test_what_this_build_cannot_spread_is_said(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama")
    with pytest.raises(RequestError, match="split_mode: is 'halves'; it is one of none, layer, row, tensor"):
        LlamaBackend(path, split_mode="halves")
    if not devices.gpus():
        with pytest.raises(BackendUnavailableError, match="built without RPC: CMAKE_ARGS=-DGGML_RPC=on"):
            backends.load(path, backend="llama", rpc=("127.0.0.1:9",))


def test_servers_of_other_machines_are_asked_for_before_llama_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ends the process where nobody answers, and doubles the devices of a server that it is told of twice."""
    added: list[bytes] = []

    def add(endpoint: bytes) -> int:
        added.append(endpoint)
        return 1

    takes = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(add)
    functions: dict[str, Any] = {
        "ggml_backend_reg_by_name": lambda name: 1,
        "ggml_backend_reg_get_proc_address": lambda registry, name: ctypes.cast(takes, ctypes.c_void_p).value,
        "ggml_backend_register": lambda server: None,
    }
    monkeypatch.setattr(devices, "ggml_function", lambda name, *_: functions[name])
    monkeypatch.setattr(devices, "_servers", set())
    built_with = SimpleNamespace(llama_supports_rpc=lambda: True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = f"127.0.0.1:{server.getsockname()[1]}"
        devices.add_rpc_servers(built_with, [here, here])
        devices.add_rpc_servers(built_with, [here])
    assert added == [here.encode()]
    with pytest.raises(BackendUnavailableError, match=r"No llama\.cpp rpc-server answers at .*: start it there first"):
        monkeypatch.setattr(devices, "_servers", set())
        devices.add_rpc_servers(built_with, [here])  # which is closed by now
    for wrong in ("here", "here:", ":7", "here:x", "here:70000"):
        with pytest.raises(RequestError, match=r"rpc: names .* as host:port"):
            devices.add_rpc_servers(built_with, [wrong])
    assert len(added) == 1
    with pytest.raises(BackendUnavailableError, match="built without RPC: CMAKE_ARGS=-DGGML_RPC=on"):
        devices.add_rpc_servers(SimpleNamespace(llama_supports_rpc=lambda: False), [here])


# Two processes with llama.cpp's RPC. Builds that pip makes lack it: its part of ggml is compiled here.

REGISTER = """
import ctypes, sys
from edgert.backends.llama import library
llama = library.library()
rpc = ctypes.CDLL(sys.argv[1])
pointer, size = ctypes.c_void_p, ctypes.c_size_t
"""
SERVER = (
    REGISTER
    + """
cpu = library.ggml_function("ggml_backend_dev_get", pointer, size)(0)
serve = rpc.ggml_backend_rpc_start_server
serve.argtypes = [ctypes.c_char_p, ctypes.c_char_p, size, size, pointer]
serve(sys.argv[2].encode(), None, 1, 1, ctypes.cast((pointer * 1)(cpu), pointer))
"""
)
CLIENT = (
    REGISTER
    + """
import numpy as np
from edgert import backends
from edgert.backends.base import Batch
rpc.ggml_backend_rpc_reg.restype = pointer
library.ggml_function("ggml_backend_register", None, pointer)(rpc.ggml_backend_rpc_reg())
llama.llama_supports_rpc = lambda: True
logits = []
for options in ({"device": "cpu"}, {"rpc": (sys.argv[2],), "n_gpu_layers": -1, "require": True}):
    backend = backends.load(sys.argv[3], backend="llama", n_ctx=64, n_threads=1, **options)
    logits.append(backend.forward(Batch.of([1, 5, 9, 40], 0, wanted="all")).copy())
    print(backend.verdict)
    backend.close()
np.testing.assert_allclose(logits[1], logits[0], atol=1e-3)
"""
)


@needs_llama
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_model_behind_an_rpc_server(llama_cpp_source: Path, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    import llama_cpp

    ggml, libraries = llama_cpp_source / "ggml", Path(llama_cpp.__file__).parent / "lib"
    sources = [ggml / "src" / "ggml-rpc" / name for name in ("ggml-rpc.cpp", "transport.cpp")]
    folders = [f"-I{ggml / name}" for name in ("include", "src", "src/ggml-rpc")]
    linked = [f"-L{libraries}", "-l:libggml-base.so", "-l:libggml.so", f"-Wl,-rpath,{libraries}"]
    defined = ["-DGGML_BACKEND_SHARED", "-DGGML_BACKEND_BUILD", "-DGGML_SHARED"]
    library = tmp_path / "libggml-rpc.so"
    command = ["g++", "-shared", "-fPIC", "-std=c++17", *defined, *folders, *sources, "-o", library, *linked]
    subprocess.run(command, check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    server = subprocess.Popen([sys.executable, "-c", SERVER, library, endpoint], stdout=subprocess.DEVNULL)
    try:
        while True:
            assert server.poll() is None, "the server has ended"
            with contextlib.suppress(BackendUnavailableError):
                devices._check_answers(endpoint)
                break
            time.sleep(0.1)
        client = [sys.executable, "-c", CLIENT, library, endpoint, tiny_model("llama")]
        said = subprocess.run(client, stdout=subprocess.PIPE, text=True, check=True).stdout
    finally:
        server.kill()
        server.wait()
    assert f"llama on RPC0 ({endpoint})" in said and "3 of 3 layers on the GPU" in said
