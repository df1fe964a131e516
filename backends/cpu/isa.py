"""The instruction sets that kernels are written for, and which of them this processor has."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from edgert.errors import BackendUnavailableError


@dataclass(frozen=True)
class Isa:
    """One way to compile the kernels.

    lanes:     float32 values in a vector, and rows in a panel of packed weights
    registers: vectors that the processor holds at once
    dot:       how four int8 products are summed: "vnni" and "sdot" (one instruction), "maddubs" (two), "smull"
               (four), "scalar"; all but vnni take signed bytes by signed ones
    matrix:    whether products of two rows and two tokens at once (smmla) serve several tokens
    tiles:     whether bf16 tile products (AMX) serve long runs of tokens
    bfloat:    whether vectors of bf16 pairs are multiplied (vdpbf16ps), 32 multiply-adds in the time of 16 of float32
    machine:   the processors whose instructions kernels may name: "x86_64" or "aarch64"
    cpu, features: what LLVM is told
    """

    name: str
    lanes: int
    registers: int
    dot: str
    matrix: bool
    tiles: bool
    bfloat: bool
    machine: str
    cpu: str
    features: str


@dataclass(frozen=True)
class _Way:
    """What an instruction set is, which features it needs, and which (by how they begin) it must not use."""

    machine: str
    lanes: int
    registers: int
    dot: str
    needs: tuple[str, ...]
    without: tuple[str, ...] = ()
    matrix: bool = False
    tiles: bool = False


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")
_NO_AVX512 = ("amx", "avx512", "avx10")
_WAYS = {
    "amx": _Way("x86_64", 16, 32, "vnni", (*_AVX512, "avx512bf16", "amx-tile", "amx-bf16", "amx-int8"), tiles=True),
    "avx512": _Way("x86_64", 16, 32, "vnni", _AVX512, ("amx",)),
    "avxvnni": _Way("x86_64", 8, 16, "vnni", (*_AVX2, "avxvnni"), _NO_AVX512),
    "avx2": _Way("x86_64", 8, 16, "maddubs", _AVX2, (*_NO_AVX512, "avxvnni", "gfni")),
    "i8mm": _Way("aarch64", 4, 32, "sdot", ("neon", "dotprod", "i8mm"), ("bf16", "sve", "sme"), matrix=True),
    "neon": _Way("aarch64", 4, 32, "sdot", ("neon", "dotprod"), ("i8mm", "bf16", "sve", "sme")),
    "asimd": _Way("aarch64", 4, 32, "smull", ("neon",), ("dotprod", "i8mm", "bf16", "sve", "sme", "fullfp16")),
    "portable": _Way("", 8, 16, "scalar", (), (*_NO_AVX512, "avxvnni", *_AVX2, "dotprod", "i8mm", "bf16", "sve",
                                               "sme", "fullfp16")),
}  # fmt: skip
NAMES = tuple(_WAYS)


def machine() -> str:
    """The kind of this process's processor: "x86_64", "aarch64", or what the system calls another."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


@functools.cache
def _host() -> tuple[str, dict[str, bool]]:
    """LLVM's name of this processor, and its features."""
    from llvmlite import binding

    features = dict(binding.get_host_cpu_features())
    if machine() == "aarch64":
        features.update(_arm_features())
    return binding.get_host_cpu_name(), features


# feature: bit of AT_HWCAP or, from 32 on, of AT_HWCAP2; name below hw.optional.arm of Apple's systems
_ARM_FEATURES = {
    "neon": (1, "AdvSIMD"),
    "fullfp16": (10, "FEAT_FP16"),
    "dotprod": (20, "FEAT_DotProd"),
    "i8mm": (32 + 13, "FEAT_I8MM"),
}


def _arm_features() -> dict[str, bool]:
    """What the system says of an ARM processor, since LLVM may not know it by name."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        library.getauxval.restype = ctypes.c_ulong
        library.getauxval.argtypes = (ctypes.c_ulong,)
        bits = library.getauxval(16) | library.getauxval(26) << 32
        return {feature: bool(bits >> bit & 1) for feature, (bit, _) in _ARM_FEATURES.items()}
    if sys.platform == "darwin":
        return {feature: _sysctl(f"hw.optional.arm.{name}") == 1 for feature, (_, name) in _ARM_FEATURES.items()}
    if sys.platform == "win32":
        dot_product = 43  # PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
        return {"neon": True, "dotprod": bool(ctypes.WinDLL("kernel32").IsProcessorFeaturePresent(dot_product))}
    return {}


def _sysctl(name: str) -> int:
    """A number that Apple's systems tell by name; 0 for what they do not know."""
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return value.value


def fitting(kind: str, features: Mapping[str, bool]) -> list[str]:
    """Names of the instruction sets for a kind of processor with these features of LLVM's, best first."""
    return [
        name
        for name, way in _WAYS.items()
        if way.machine in (kind, "") and all(features.get(feature) for feature in way.needs)
    ]


def available() -> list[str]:
    """Names of the instruction sets that this processor can run, best first."""
    found = fitting(machine(), _host()[1])
    return [name for name in found if not _WAYS[name].tiles or _tiles_permitted()]


@functools.cache
def _tiles_permitted() -> bool:
    """Asks the kernel for the tile registers: Linux gives them to a process that requests them."""
    if platform.system() != "Linux" or machine() != "x86_64":
        return False
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
        known = "unknown" if name not in _WAYS else "not available on this processor"
        raise BackendUnavailableError(
            f"Instruction set {name!r} (EDGERT_ISA) is {known}; here are: {', '.join(available())}."
        )
    return assemble(name, machine(), *_host())


def assemble(name: str, kind: str, cpu: str, features: Mapping[str, bool]) -> Isa:
    """An instruction set for a processor of this kind that LLVM calls `cpu`, whether this is one or not."""
    way = _WAYS[name]
    chosen = [
        ("+" if on and not feature.startswith(way.without or ("?",)) else "-") + feature
        for feature, on in sorted(features.items())
    ]
    if kind == "x86_64":
        chosen.append("-prefer-256-bit")
    bfloat = "+avx512bf16" in chosen
    return Isa(name, way.lanes, way.registers, way.dot, way.matrix, way.tiles, bfloat, kind, cpu, ",".join(chosen))
