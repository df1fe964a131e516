"""The instruction sets that kernels are written for, and which of them this processor has."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass

from edgert.errors import BackendUnavailableError


@dataclass(frozen=True)
class Isa:
    """One way to compile the kernels.

    lanes:    float32 values in a vector, and rows in a panel of packed weights
    dot:      how four int8 products are summed: "vnni" (one instruction), "maddubs" (two), "scalar"
    tiles:    whether bf16 tile products (AMX) serve long runs of tokens
    cpu, features: what LLVM is told
    """

    name: str
    lanes: int
    dot: str
    tiles: bool
    cpu: str
    features: str


# name: lanes, dot, tiles, features it needs, features that it must not use
_TABLE: dict[str, tuple[int, str, bool, tuple[str, ...], tuple[str, ...]]] = {
    "amx": (16, "vnni", True, ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx512bf16",
                               "amx-tile", "amx-bf16"), ()),
    "avx512": (16, "vnni", False, ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"), ("amx",)),
    "avxvnni": (8, "vnni", False, ("avx2", "fma", "f16c", "avxvnni"), ("amx", "avx512", "avx10")),
    "avx2": (8, "maddubs", False, ("avx2", "fma", "f16c"), ("amx", "avx512", "avx10", "avxvnni")),
    "portable": (8, "scalar", False, (), ("amx", "avx512", "avx10", "avxvnni", "avx2", "fma", "f16c")),
}  # fmt: skip
NAMES = tuple(_TABLE)


@functools.cache
def _host() -> tuple[str, dict[str, bool]]:
    from llvmlite import binding

    return binding.get_host_cpu_name(), dict(binding.get_host_cpu_features())


def available() -> list[str]:
    """Names of the instruction sets that this processor can run, best first."""
    _, features = _host()
    found = []
    for name, (_, _, tiles, needed, _) in _TABLE.items():
        if all(features.get(feature) for feature in needed) and (not tiles or _tiles_permitted()):
            found.append(name)
    return found


@functools.cache
def _tiles_permitted() -> bool:
    """Asks the kernel for the tile registers: Linux gives them to a process that requests them."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    import ctypes

    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc.syscall(ctypes.c_long(arch_prctl), ctypes.c_long(request_permission), ctypes.c_long(tile_data)) == 0


def select(name: str | None = None) -> Isa:
    """The best instruction set, or the one that `name` or EDGERT_ISA forces.

    Raises: BackendUnavailableError for a name that is not known or not available here.
    """
    forced = name or os.environ.get("EDGERT_ISA")
    return _make(forced or available()[0])


@functools.cache
def _make(name: str) -> Isa:
    if name not in available():
        known = "unknown" if name not in _TABLE else "not available on this processor"
        raise BackendUnavailableError(
            f"Instruction set {name!r} (EDGERT_ISA) is {known}; here are: {', '.join(available())}."
        )
    lanes, dot, tiles, _, forbidden = _TABLE[name]
    cpu, features = _host()
    chosen = ",".join(
        ("+" if on and not feature.startswith(forbidden) else "-") + feature for feature, on in sorted(features.items())
    )
    return Isa(name, lanes, dot, tiles, cpu, chosen + ",-prefer-256-bit")
