"""The devices that an installed llama.cpp sees, by ggml's registry, and how many layers fit on them."""

from __future__ import annotations

import bisect
import ctypes
import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgert.backends.llama.footprint import besides, head_bytes, kv_of_layer, layer_bytes
from edgert.backends.llama.library import complaint, ggml_function, library
from edgert.devices import accelerators
from edgert.devices import gpus as gpu_list
from edgert.errors import BackendUnavailableError, RequestError

if TYPE_CHECKING:
    from edgert.quantize.architecture import Architecture
    from edgert.quantize.gguf_file import GGUFFile

KINDS = ("cpu", "gpu", "igpu", "accel")  # ggml_backend_dev_type
GPU_BUILD = "CMAKE_ARGS=-DGGML_CUDA=on pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python"
BUILDS = {
    "nvidia": f"{GPU_BUILD} llama-cpp-python",
    "amd": f"{GPU_BUILD.replace('GGML_CUDA', 'GGML_HIP')} llama-cpp-python",
    "intel": f"{GPU_BUILD.replace('GGML_CUDA', 'GGML_VULKAN')} llama-cpp-python",
    "apple": f"{GPU_BUILD.replace('GGML_CUDA', 'GGML_METAL')} llama-cpp-python",
}  # the command that builds llama.cpp for a maker's GPUs


def unreached() -> tuple[str, str]:
    """Why the installed build reaches no GPU of this machine, and what helps."""
    reason, remedy = accelerators.lack("gpu")
    if reason:
        return reason, remedy
    here = gpu_list.gpus()
    if kinds := _built_for():
        if words := complaint():
            renew = "install the GPU's newest driver, and look again with `edgert devices`"
            return f"its build for {', '.join(kinds)} finds none ({words})", renew
        what = f"the {here[0].name}" if here else "a GPU"
        look = "look whether its driver answers and whether a variable such as CUDA_VISIBLE_DEVICES hides it"
        return f"its build for {', '.join(kinds)} finds none, though the system has {what}", look
    return "it is a build for the CPU alone", BUILDS[here[0].maker if here else "nvidia"]


def open_library(device: str) -> Any:
    """llama.cpp's module, for a device as `LlamaBackend` has it.

    Raises: BackendUnavailableError, which speaks of the package only where the machine could use it.
    """
    try:
        return library()
    except BackendUnavailableError as error:
        reason, remedy = accelerators.lack("gpu")
        if not reason or device.strip().lower() in ("", "cpu"):
            raise
        raise BackendUnavailableError(f"llama.cpp runs on no GPU here, since {reason}: {remedy}") from error


def _built_for() -> list[str]:
    """What ggml has kernels for beside processors, devices or not."""
    count = ggml_function("ggml_backend_reg_count", ctypes.c_size_t)
    get = ggml_function("ggml_backend_reg_get", ctypes.c_void_p, ctypes.c_size_t)
    name = ggml_function("ggml_backend_reg_name", ctypes.c_char_p, ctypes.c_void_p)
    found = [name(get(i)).decode("utf-8", "replace") for i in range(count())]
    return [one for one in found if one not in ("CPU", "BLAS", "RPC", "Accelerate")]


@dataclass(frozen=True)
class LlamaDevice:
    """A device of ggml's registry; memory in bytes."""

    name: str
    description: str
    kind: str
    memory_free: int
    memory_total: int


def devices() -> list[LlamaDevice]:
    """All devices of the installed build, processors included. llama.cpp must have been initialised."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    get = ggml_function("ggml_backend_dev_get", pointer, size)
    name = ggml_function("ggml_backend_dev_name", ctypes.c_char_p, pointer)
    describe = ggml_function("ggml_backend_dev_description", ctypes.c_char_p, pointer)
    kind = ggml_function("ggml_backend_dev_type", ctypes.c_int, pointer)
    memory = ggml_function("ggml_backend_dev_memory", None, pointer, ctypes.POINTER(size), ctypes.POINTER(size))
    found = []
    for i in range(ggml_function("ggml_backend_dev_count", size)()):
        device, free, total = get(i), size(), size()
        memory(device, ctypes.byref(free), ctypes.byref(total))
        number = kind(device)
        found.append(
            LlamaDevice(
                name(device).decode("utf-8", "replace"),
                describe(device).decode("utf-8", "replace"),
                KINDS[number] if number < len(KINDS) else "other",
                free.value,
                total.value,
            )
        )
    return found


def gpus(names: Sequence[str] = ()) -> list[LlamaDevice]:
    """The devices that layers can be given to; with names, these in their order.

    Raises: BackendUnavailableError for a name that is none of them.
    """
    found = {device.name: device for device in devices() if device.kind in ("gpu", "igpu")}
    if unknown := [name for name in names if name not in found]:
        reason, remedy = (f"it sees {', '.join(found)}", "choose one of these") if found else unreached()
        raise BackendUnavailableError(f"llama.cpp has no GPU {unknown[0]!r} here ({reason}): {remedy}")
    return [found[name] for name in names] or list(found.values())


def pointers(names: Sequence[str]) -> Any:
    """What `llama_model_params.devices` takes: the devices of these names, closed by a null."""
    pointer = ctypes.c_void_p
    by_name = ggml_function("ggml_backend_dev_by_name", pointer, ctypes.c_char_p)
    return (pointer * (len(names) + 1))(*[by_name(name.encode()) for name in names], None)


def splits_rows(device: LlamaDevice) -> bool:
    """Whether this build can share the rows of a matrix among this device and others of its kind."""
    pointer = ctypes.c_void_p
    found = ggml_function("ggml_backend_dev_by_name", pointer, ctypes.c_char_p)(device.name.encode())
    registry = ggml_function("ggml_backend_dev_backend_reg", pointer, pointer)(found)
    address = ggml_function("ggml_backend_reg_get_proc_address", pointer, pointer, ctypes.c_char_p)
    return bool(address(registry, b"ggml_backend_split_buffer_type"))


PATIENCE = 5.0  # seconds for an RPC server to take a connection
_servers: set[str] = set()  # a second registration of a server would double its devices


def add_rpc_servers(llama: Any, endpoints: Sequence[str]) -> None:
    """Makes devices of other machines, where llama.cpp's rpc-server runs, known to this process.

    Raises: BackendUnavailableError when the installed build has no RPC, or a server does not answer.
    """
    if not llama.llama_supports_rpc():
        raise BackendUnavailableError(
            "The installed llama.cpp was built without RPC: "
            f"{BUILDS['nvidia'].replace('-DGGML_CUDA=on', '-DGGML_RPC=on')}"
        )
    pointer = ctypes.c_void_p
    registry = ggml_function("ggml_backend_reg_by_name", pointer, ctypes.c_char_p)(b"RPC")
    address = ggml_function("ggml_backend_reg_get_proc_address", pointer, pointer, ctypes.c_char_p)(
        registry, b"ggml_backend_rpc_add_server"
    )
    if not address:
        raise BackendUnavailableError("The installed llama.cpp has no way to add RPC servers: install a newer one.")
    add = ctypes.CFUNCTYPE(pointer, ctypes.c_char_p)(address)
    register = ggml_function("ggml_backend_register", None, pointer)
    for endpoint in endpoints:
        if endpoint in _servers:
            continue
        _check_answers(endpoint)
        server = add(endpoint.encode())
        if not server:
            raise BackendUnavailableError(f"No llama.cpp rpc-server answers at {endpoint}: start it there first.")
        register(server)
        _servers.add(endpoint)


def _check_answers(endpoint: str) -> None:
    """Looks whether somebody listens there: llama.cpp ends the process where nobody does.

    Raises: RequestError for what is no host:port; BackendUnavailableError.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise RequestError("rpc", f"names llama.cpp's rpc-servers as host:port, not {endpoint!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
    except OSError as error:
        raise BackendUnavailableError(
            f"No llama.cpp rpc-server answers at {endpoint} ({error.strerror or error}): start it there first."
        ) from error


def layers_that_fit(
    file: GGUFFile,
    a: Architecture,
    free: Sequence[int],
    n_positions: int,
    kv_bytes: float,
    n_ubatch: int,
    shares: Sequence[float] = (),
) -> int:
    """How many layers, counted from the last as llama.cpp does and the head as one more, fit on the GPUs.

    free:      bytes on each GPU
    kv_bytes:  of one element of the cache
    shares:    of each GPU, where they were given
    """
    kv = kv_of_layer(a, n_positions, kv_bytes)
    costs = [head_bytes(file, a), *(layer_bytes(file, a, i) + kv for i in reversed(range(a.n_layer)))]
    room = [max(0, one - besides(a, n_ubatch)) for one in free]
    if shares:
        return next((n for n in range(len(costs), 0, -1) if _shared(costs[:n], shares, room)), 0)
    n = 0
    for cost in costs:  # each GPU takes whole layers
        place = max(range(len(room)), key=room.__getitem__, default=None)
        if place is None or room[place] < cost:
            break
        room[place] -= cost
        n += 1
    return n


def _shared(costs: Sequence[int], shares: Sequence[float], room: Sequence[int]) -> bool:
    """Whether layers fit that are dealt out as llama.cpp does, in their order: each GPU its share of their number."""
    bounds = list(itertools.accumulate(shares))
    taken = [0] * len(room)
    for i, cost in enumerate(reversed(costs)):
        taken[bisect.bisect_right(bounds, i / len(costs) * bounds[-1])] += cost
    return all(used <= here for used, here in zip(taken, room, strict=True))
