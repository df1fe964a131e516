"""The folder tree is the design: which packages exist, who imports whom, one door for each dependency."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("edgert", "quantize", "backends", "devices")
# distribution -> where alone it may be imported
DOORS: dict[str, str | tuple[str, ...]] = {
    "psutil": "devices/probe.py",
    "numba": ("backends/cpu/", "quantize/jit/"),
    "llvmlite": ("backends/cpu/", "quantize/jit/"),
    "llama_cpp": "backends/llama",
    "onnx": "backends/onnx/",
    "onnxruntime": "backends/onnx/",
    "gguf": "quantize/",
}
FREE = tuple(f"edgert.{name}" for name in ("ending", "errors", "files", "folders", "notes"))  # import no other part
MAY_IMPORT = {
    "edgert": {"edgert", "quantize", "backends", "devices"},
    "backends": {"backends", "quantize", "devices"},
    "quantize": {"quantize"},
    "devices": {"devices"},
}


def sources() -> Iterator[Path]:
    """Every source file of the four packages, relative to the root; the links in edgert/ are not followed."""
    for room in ROOMS:
        for folder, _, files in os.walk(ROOT / room):  # which does not follow links
            yield from (Path(folder, name).relative_to(ROOT) for name in files if name.endswith(".py"))


def imports(path: Path) -> Iterator[str]:
    """The dotted names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_base_install_brings_nothing_that_is_not_used():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in project["dependencies"]}
    used = {name.partition(".")[0] for path in sources() for name in imports(path)}
    assert wanted - used == set()


def test_packages_of_the_wheel_are_those_on_disk():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    on_disk = set()
    for path in sources():
        parts = path.parent.parts
        on_disk.add(".".join(parts if parts[0] == "edgert" else ("edgert", *parts)))
    assert listed == on_disk


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_they_may(room: str):
    for path in sources():
        if path.parts[0] != room:
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "edgert" or name.startswith(FREE) or len(parts) == 1:
                continue
            other = parts[1] if parts[1] in ROOMS else "edgert"
            assert other in MAY_IMPORT[room], f"{path} imports {name}"


def test_one_door_for_each_dependency():
    for path in sources():
        for name in imports(path):
            door = DOORS.get(name.split(".")[0])
            assert door is None or str(path).startswith(door), f"{path} imports {name}"


@pytest.mark.parametrize("module", FREE)
def test_what_all_may_import_imports_no_other_part(module: str):
    found = {name for name in imports(Path(*module.split(".")).with_suffix(".py")) if name.startswith("edgert")}
    assert all(name.startswith(FREE) for name in found)


def test_import_is_light():
    code = "import sys, edgert; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {
        "numba",
        "llvmlite",
        "llama_cpp",
        "onnxruntime",
        "tokenizers",
        "jinja2",
        "prompt_toolkit",
        "huggingface_hub",
    }
    assert heavy.isdisjoint(loaded)
