"""Which instruction set serves which processor, by LLVM's names of features."""

from __future__ import annotations

import platform

import pytest

from edgert.backends.cpu import isa
from edgert.errors import BackendUnavailableError

AVX2 = ["avx", "avx2", "fma", "f16c"]
AVX512 = [*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"]
ARM = ["neon", "fullfp16", "dotprod", "i8mm", "bf16", "sve", "sve2"]

PROCESSORS = {
    "Haswell": ("x86_64", AVX2, ["avx2"]),
    "Skylake with AVX-512, which lacks VNNI": ("x86_64", AVX512, ["avx2"]),
    "Ice Lake": ("x86_64", [*AVX512, "avx512vnni"], ["avx512", "avx2"]),
    "Alder Lake": ("x86_64", [*AVX2, "avxvnni"], ["avxvnni", "avx2"]),
    "Sapphire Rapids": (
        "x86_64",
        [*AVX512, "avx512vnni", "avxvnni", "avx512bf16", "amx-tile", "amx-bf16", "amx-int8"],
        ["amx", "avx512", "avxvnni", "avx2"],
    ),
    "without AVX2": ("x86_64", ["sse4.2", "avx"], []),
    "Cortex-A72": ("aarch64", ARM[:1], ["asimd"]),
    "Neoverse N1": ("aarch64", ARM[:3], ["neon", "asimd"]),
    "some other": ("riscv64", ["v"], []),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_each_processor_gets_what_it_can_run(name: str):
    kind, features, expected = PROCESSORS[name]
    assert isa.fitting(kind, dict.fromkeys(features, True)) == [*expected, "portable"]


def test_a_set_uses_no_feature_of_another():
    everything = dict.fromkeys([*PROCESSORS["Sapphire Rapids"][1], "avx10.1"], True)
    avx2 = isa.assemble("avx2", "x86_64", "skylake-avx512", everything)
    on = [feature for feature in avx2.features.split(",") if feature.startswith("+")]
    assert on == ["+avx", "+avx2", "+f16c", "+fma"]
    neon = isa.assemble("neon", "aarch64", "neoverse-v1", dict.fromkeys(ARM, True))
    assert neon.features == "-bf16,+dotprod,+fullfp16,-i8mm,+neon,-sve,-sve2"


def test_an_unknown_set_is_refused_with_what_there_is():
    with pytest.raises(BackendUnavailableError, match=r"'mmx' .*unknown; here are: .*portable"):
        isa.select("mmx")
    foreign = "neon" if isa.machine() == "x86_64" else "avx2"
    with pytest.raises(BackendUnavailableError, match="not available on this processor"):
        isa.select(foreign)


@pytest.mark.parametrize(("told", "machine"), [("AMD64", "x86_64"), ("arm64", "aarch64"), ("x86_64", "x86_64")])
def test_systems_call_one_processor_by_several_names(monkeypatch: pytest.MonkeyPatch, told: str, machine: str):
    monkeypatch.setattr(platform, "machine", lambda: told)
    assert isa.machine() == machine
