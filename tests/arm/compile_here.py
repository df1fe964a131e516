"""Stands in for `python -m edgert.backends.cpu.compiler` of an emulated ARM processor: compiles for it on this one."""

from __future__ import annotations

import os
import sys

import assembly

from edgert.backends.cpu import compiler, isa


def main(names: list[str]) -> None:
    """Compiles each name for the processor that the environment describes, as the compiler's own `main` does."""
    features = {word[1:]: word[0] == "+" for word in os.environ["NUMBA_CPU_FEATURES"].split(",")}
    chosen = isa.assemble(os.environ["EDGERT_ISA"], "aarch64", os.environ["NUMBA_CPU_NAME"], features)
    assert chosen.features == os.environ["NUMBA_CPU_FEATURES"]
    assembly.compile_for_arm()
    for name in names:
        compiler.compile_one(name, chosen)
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
