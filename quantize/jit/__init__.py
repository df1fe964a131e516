"""Compiled kernels: `compiled` is the door to Numba, `objects` loads what was compiled before without it.

Here is what both go by: where code is kept, and what it depends on.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from importlib import metadata
from pathlib import Path

from edgert.folders import cache_root

PACKAGE = "edgert.quantize"
_IMPORT = re.compile(r"^\s*from (edgert\.quantize[\w.]*) import (\([^)]*\)|[^\n(]*)", re.MULTILINE)


@functools.cache
def sources(module: str) -> str:
    """A hash of a module's source and of all that it imports from this package; empty where they are not at hand."""
    found: dict[str, bytes] = {}
    left = [module]
    while left:
        name = left.pop()
        if name in found:
            continue
        found[name] = _source(name)
        for package, names in _IMPORT.findall(found[name].decode()):
            left += [package, *(f"{package}.{part}" for part in re.findall(r"\w+", names))]
    if not found[module]:  # a frozen application
        return ""
    return hashlib.sha256(b"".join(found[name] for name in sorted(found))).hexdigest()[:16]


def _source(module: str) -> bytes:
    """What a module of this package consists of, whether it is loaded or not: the hash must not depend on that.

    The package itself counts for nothing: it names everything and makes no kernel.
    """
    path = Path(__file__).parents[1].joinpath(*module.removeprefix(PACKAGE).split(".")[1:])
    files = (path / "__init__.py", path.with_suffix(".py"))
    return b"" if module == PACKAGE else next((file.read_bytes() for file in files if file.is_file()), b"")


def cache_folder() -> Path:
    """Where compiled kernels of this package are kept."""
    return cache_root() / "quantize"


def stamp(*modules: str) -> str:
    """Changes with the sources of kernels in these modules, with Numba and with the processor."""
    from llvmlite import binding

    parts = (metadata.version("numba"), sys.version, binding.get_host_cpu_name(), *map(sources, modules))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
