"""Kernels kept as object code and loaded without Numba, which takes longer to start than to round a small model.

Such a kernel is a function `int64 (int64 address)` of the address of its arguments, int64 each: numbers, and the
addresses of arrays. It allocates nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.files import whole, write_all
from edgert.quantize.jit import cache_folder, sources, stamp

Function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


@functools.cache
def load(module: str, name: str) -> Callable[..., int]:
    """A kernel of a module, which makes it by its function `build(name)` where it is not kept: a call takes arrays and
    integers, and gives an integer. Without the GIL while it runs."""
    kept = sources(module)  # none: a frozen application
    path = cache_folder() / f"{name}.{stamp(module)}.o"
    found = read(path) if kept else None
    if found is None:
        from edgert.quantize.jit.compiled import object_code

        found = object_code(importlib.import_module(module).build(name), name)
        if kept:
            with contextlib.suppress(OSError):
                write(path, *found)
    function = Function(_address(*found))

    def call(*arguments: NDArray[Any] | int) -> int:
        words = np.array([one.ctypes.data if isinstance(one, np.ndarray) else one for one in arguments], np.int64)
        return int(function(words.ctypes.data))  # of a name: what has none is freed before the call

    return call


def read(path: Path) -> tuple[str, bytes] | None:
    """A symbol and its object code; None where they are absent or damaged: wrong code would end the process."""
    try:
        digest, _, content = path.read_bytes().partition(b" ")
    except OSError:
        return None
    if digest != hashlib.sha256(content).hexdigest().encode():
        return None
    symbol, _, code = content.partition(b"\0")
    return symbol.decode(), code


def write(path: Path, symbol: str, code: bytes) -> None:
    """Keeps a kernel: SHA-256 of what follows, its symbol, a zero byte, its object code. Raises: OSError."""
    content = symbol.encode() + b"\0" + code
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as out:
        write_all(out, hashlib.sha256(content).hexdigest().encode() + b" " + content)


# What Numba's wrappers name for the case that a kernel raises or allocates. None does.
_NEVER_CALLED = (
    "numba_gil_ensure",
    "numba_gil_release",
    "numba_unpickle",
    "numba_do_raise",
    "numba_runtime_build_excinfo_struct",
    "NRT_Free",
    "NRT_MemInfo_call_dtor",
)


@functools.cache
def engine() -> Any:
    """One MCJIT engine for the process; it owns all loaded code, so it lives as long as the process."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    abort = ctypes.cast(ctypes.pythonapi.Py_FatalError, ctypes.c_void_p).value
    for name in _NEVER_CALLED:
        if not binding.address_of_symbol(name):
            binding.add_symbol(name, abort)
    machine = binding.Target.from_default_triple().create_target_machine()
    return binding.create_mcjit_compiler(binding.parse_assembly(""), machine)


def _address(symbol: str, code: bytes) -> int:
    from llvmlite import binding

    engine().add_object_file(binding.ObjectFileRef.from_data(code))
    engine().finalize_object()
    return int(engine().get_function_address(symbol))
