"""Compiles kernels for ARM processors on any machine: LLVM knows all of them, and Numba can be told another target.

    python tests/arm/assembly.py neon product.codec=q4_0.epilogue=store.width=1

prints the assembly, and what the kernel's innermost loop of products holds.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections import Counter

from edgert.backends.cpu.isa import Isa, assemble

TRIPLE = "aarch64-unknown-linux-gnu"
PROCESSORS = {"asimd": "cortex-a72", "neon": "neoverse-n1", "i8mm": "neoverse-n2"}
FEATURES = ("neon", "fullfp16", "dotprod", "i8mm")
DOTS = ("sdot", "smmla", "smull", "smull2", "smlal", "smlal2")


def foreign(name: str) -> Isa:
    """One of the instruction sets for ARM, as if this were such a processor."""
    return assemble(name, "aarch64", PROCESSORS[name], dict.fromkeys(FEATURES, True))


def compile_for_arm() -> None:
    """Makes Numba's target an ARM processor, from its first use on for all of the process's life."""
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    binding.get_process_triple = lambda: TRIPLE


def assemblies(isa: Isa, names: list[str]) -> dict[str, str]:
    """The assembly of kernels; to be called once, in a process of its own."""
    os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = isa.cpu, isa.features
    compile_for_arm()
    from numba import cfunc, types

    from edgert.backends.cpu.compiler import parse_name

    found = {}
    for name in names:
        module, parameters = parse_name(name)
        function = importlib.import_module(f"edgert.backends.cpu.kernels.{module}").build(isa, **parameters)
        signature = types.void(types.int64, types.int64, types.int64)
        compiled = cfunc(signature, error_model="numpy", forceinline=True)(function)
        found[name] = compiled._library.get_asm_str()
    return found


def loops(assembly: str) -> list[list[str]]:
    """The instructions of each innermost loop: from a label to a branch back to it, with no label between."""
    found: list[list[str]] = []
    label, body = "", []
    for line in assembly.splitlines():
        line = line.split("//")[0].strip()
        if match := re.match(r"(\.?\w+):", line):
            label, body = match[1], []
        elif line and not line.startswith("."):
            body.append(line)
            if re.match(r"(b\.\w+|cbn?z|tbn?z|b)\s", line) and re.search(rf"{re.escape(label)}$", line):
                found.append(list(body))
    return found


def densest(assembly: str) -> list[str]:
    """The loop that holds the most dot products."""
    return max(loops(assembly), key=lambda body: sum(operation(line) in DOTS for line in body), default=[])


def operation(line: str) -> str:
    """An instruction's name."""
    return line.split()[0]


def touches_stack(line: str) -> bool:
    """Whether an instruction moves a vector between registers and the stack, for want of registers."""
    return bool(re.match(r"(ldr|str|ldp|stp|ldur|stur)\s+[qdsv].*\[sp", line))


def main(arguments: list[str]) -> None:
    """Prints what the command line asks for."""
    name, *kernels = arguments
    for kernel, assembly in assemblies(foreign(name), kernels).items():
        body = densest(assembly)
        print(assembly)
        print(f"{kernel}: {len(body)} instructions in the loop:", dict(Counter(map(operation, body)).most_common()))


if __name__ == "__main__":
    main(sys.argv[1:])
