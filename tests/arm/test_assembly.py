"""What LLVM makes of the kernels for ARM processors: seen on any machine, since no processor has to run it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import assembly

from edgert.backends.cpu.compiler import name_of
from edgert.backends.cpu.layouts import CODECS


def compiled(isa: str, names: list[str]) -> dict[str, str]:
    """Assembly by kernel, made in a process of its own."""
    script = (
        f"import sys, json; sys.path.insert(0, {str(Path(assembly.__file__).parent)!r}); import assembly\n"
        f"print(json.dumps(assembly.assemblies(assembly.foreign({isa!r}), {names!r})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def product(codec: str, width: int, **form: str) -> str:
    return name_of("product", codec=codec, width=width, epilogue="store", **form)


def counts(text: str) -> Counter[str]:
    """How often each instruction stands in the loop with the most dot products."""
    return Counter(map(assembly.operation, assembly.densest(text)))


def test_inner_loops_of_products():
    """A panel's block is four rows of 32 weights: eight dot products of 16 for each token, and nothing is called."""
    names = [product("q4_0", 1), product("q4_0", 8)]
    for width, text in zip((1, 8), compiled("neon", names).values(), strict=True):
        body = assembly.densest(text)
        found = counts(text)
        assert found["sdot"] == 8 * width
        assert not found["bl"] and not found["blr"]
        assert sum(found.values()) <= {1: 45, 8: 180}[width]
        assert sum(map(assembly.touches_stack, body)) <= {1: 0, 8: 4}[width]
        # x comes by the quad from a vector, not broadcast from memory
        assert all(".4b[" in line for line in body if line.startswith("sdot"))


def test_inner_loop_of_matrix_products():
    """Two rows by two tokens at once: half as many products, for eight zips, which more than two tokens repay."""
    (text,) = compiled("i8mm", [product("q4_0", 8, form="pairs")]).values()
    found = counts(text)
    assert (found["smmla"], found["sdot"], found["bl"]) == (32, 0, 0)
    assert sum(found.values()) <= 155
    assert not any(map(assembly.touches_stack, assembly.densest(text)))


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["i8mm", "neon", "asimd"])
def test_every_codec_multiplies_bytes(isa: str):
    codecs = [name for name, codec in CODECS.items() if not codec.is_float]
    form = {"form": "pairs"} if isa == "i8mm" else {}
    expected = {"i8mm": (16, 0, 0), "neon": (0, 32, 0), "asimd": (0, 0, 64)}[isa]
    names = [product(codec, 4, **form) for codec in codecs]
    for codec, text in zip(codecs, compiled(isa, names).values(), strict=True):
        found = counts(text)
        plain = sum(found[name] for name in ("smull", "smull2", "smlal", "smlal2"))
        assert (found["smmla"], found["sdot"], plain) == expected, codec
        assert not found["bl"] and not found["blr"], codec


@pytest.mark.slow
def test_other_kernels_are_made_of_native_instructions():
    """Half precision, prefetches, polling and the packed cache need no call and no x86."""
    heads = {"n_head": 8, "n_head_kv": 4, "head_dim": 64}
    attention = name_of("attention", **heads, type_k="q8_0", type_v="q8_0")
    floats = name_of("attention", **heads, type_k="f16", type_v="f16")
    rows = name_of("rows", source="norm", form="int8")
    names = [attention, floats, rows, "walk.role=worker", "sample", product("f16", 1)]
    found = compiled("neon", names)
    assert "sdot" in found[attention] and "prfm" in found[attention]
    assert "fcvtl" in found[floats] and "fmla" in found[floats]
    assert "isb" in found["walk.role=worker"]
    assert "fcvtl" in found[product("f16", 1)] and "fmla" in found[product("f16", 1)]
    for name in (attention, floats, rows, product("f16", 1)):
        calls = [line for line in found[name].splitlines() if line.split()[:1] == ["bl"]]
        assert not [line for line in calls if "mem" not in line and "_ZN" not in line and "edgert" not in line], name


def test_rounds_of_guessing_are_timed_by_the_counter_that_programs_may_read():
    for text in compiled("neon", ["again"]).values():
        assert re.search(r"mrs\s+x\d+, CNTVCT_EL0", text, re.IGNORECASE) and "PMCCNTR" not in text.upper()
