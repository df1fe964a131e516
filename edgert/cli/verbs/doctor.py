"""`edgert doctor`: what is wrong here, if anything, and what helps."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgert.cli.flags import json_flag
from edgert.cli.progress import ProgressLine
from edgert.cli.verb import verb

if TYPE_CHECKING:
    from edgert.backends.selftest import Finding

OK, NOTE, PROBLEM = "ok", "note", "problem"
LEAST_DISK, LEAST_MEMORY = 500 << 20, 500 << 20  # bytes below which a first model is no pleasure
NEEDED = ("numpy", "numba", "llvmlite", "tokenizers", "jinja2", "psutil", "platformdirs")
# What serves GPUs and NPUs, and nothing on a machine without.
EXTRAS = {"llama-cpp-python": "gpu", "onnxruntime": "npu", "onnx": "npu"}
MODULES = {"llama-cpp-python": "llama_cpp", "nvidia-ml-py": "pynvml"}  # where the names differ


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; status: "ok", "note" (nothing is lost, but something could be won) or "problem"."""

    area: str
    name: str
    status: str
    text: str
    advice: str = ""


@verb()
@click.option("--self-test/--no-self-test", default=True, help="Run a tiny model on every backend.")
@json_flag
def command(self_test: bool, as_json: bool) -> None:
    """Looks at the environment, versions, drivers, caches and permissions, and runs a tiny model on every backend.

    The exit code is 1 where there is a problem.
    """
    checks: list[Check] = []
    with ProgressLine() as line:
        checks += [*environment(), *machine(), *caches()]
        if self_test:
            line.show("testing the backends")
            checks += backends()
    problems = sum(check.status == PROBLEM for check in checks)
    if as_json:
        click.echo(json.dumps({"problems": problems, "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        click.echo(as_text(checks))
    if problems:
        raise click.exceptions.Exit(1)


def as_text(checks: list[Check]) -> str:
    """The findings for reading."""
    marks = {OK: "ok  ", NOTE: "note", PROBLEM: "BAD "}
    lines: list[str] = []
    area = ""
    for check in checks:
        if check.area != area:
            area = check.area
            lines += ["", area] if lines else [area]
        lines.append(f"  {marks[check.status]} {check.name}: {check.text}")
        if check.advice:
            lines.append(f"       {check.advice}")
    n = sum(check.status == PROBLEM for check in checks)
    lines += ["", "nothing is wrong" if not n else f"{n} problem{'s' if n > 1 else ''}"]
    return "\n".join(lines)


def environment() -> Iterator[Check]:
    """Python, versions of packages, variables."""
    area = "environment"
    version = platform.python_version()
    yield Check(area, "python", OK, f"{version} on {platform.platform()}, {sys.executable}")
    yield _own_version(area)
    for package in NEEDED:
        found = _version(package)
        if found:
            yield Check(area, package, OK, found)
        else:
            yield Check(area, package, PROBLEM, "is not installed", f"pip install {package}")
    for package, kind in EXTRAS.items():
        yield _extra(area, package, kind, f"pip install 'edgert[{kind}]'")
    yield _extra(area, "nvidia-ml-py", "gpu", "pip install nvidia-ml-py", ("nvidia",))
    for name in sorted(name for name in os.environ if name.startswith("EDGERT_")):
        yield Check(area, name, OK, os.environ[name])


def _extra(area: str, package: str, kind: str, install: str, makers: tuple[str, ...] = ()) -> Check:
    """A package that serves a kind of device: it is missed only where the machine may have one."""
    from edgert.devices import accelerators

    found = _version(package)
    if found:
        return Check(area, package, OK, found)
    module = find_spec(MODULES.get(package, package))
    if module is not None:
        return Check(area, package, OK, f"is here, not installed by pip: {module.origin}")
    lacking = accelerators.lack(kind, makers)[0]
    if lacking:
        return Check(area, package, OK, f"is not installed, and not needed: {lacking}")
    return Check(area, package, NOTE, f"is not installed, and the {kind.upper()} needs it", install)


def _own_version(area: str) -> Check:
    import edgert

    found = _version("edgert")
    if found is None:
        return Check(area, "edgert", NOTE, f"runs from {Path(edgert.__file__).parent}, not installed", "pip install .")
    return Check(area, "edgert", OK, f"{found}, {Path(edgert.__file__).parent}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> Iterator[Check]:
    """Processor, memory, accelerators and their drivers."""
    from edgert.backends import survey
    from edgert.backends.cpu import isa
    from edgert.devices import gpus, probe

    area = "machine"
    cpu = probe.probe()
    found = isa.available()
    slow = found[0] == "portable"
    advice = "This processor has no kernels of its own: another backend may be faster." if slow else ""
    text = f"{cpu.model_name}, {cpu.default_threads} threads, {found[0]}"
    yield Check(area, "processor", NOTE if slow else OK, text, advice)
    scarce = cpu.memory_available < LEAST_MEMORY
    text = f"{cpu.memory_available >> 20} MiB of {cpu.memory_total >> 20} MiB are available"
    yield Check(area, "memory", PROBLEM if scarce else OK, text, "Close other programs." if scarce else "")
    here = gpus.gpus()
    for gpu in here:
        text = f"{gpu.name}, driver {gpu.driver or 'unknown'}"
        yield Check(area, "gpu", NOTE if gpu.note else OK, text, gpu.note)
    for use in survey.survey(here):
        if use.obstacle and use.backend == "llama" and here:
            yield Check(area, f"{use.backend} on {use.device}", NOTE, use.obstacle, use.remedy)


def caches() -> Iterator[Check]:
    """Where things are kept: sizes, permissions, room."""
    from edgert import store
    from edgert.folders import cache_root

    root = cache_root()
    folders = {
        "kernels": root / "kernels",
        "packed weights (EDGERT_PACKED_CACHE)": root / "packed",
        "quantizer's kernels": root / "quantize",
        "onnx graphs": root / "onnx",
        "models": store.folder(),
    }
    for name, folder in folders.items():
        yield _folder(name, folder)


def _folder(name: str, folder: Path) -> Check:
    variable = "EDGERT_MODELS" if name == "models" else "EDGERT_CACHE"
    there = next(path for path in (folder, *folder.parents) if path.exists())
    size = sum(_size(Path(place, file)) for place, _, files in os.walk(folder) for file in files)
    text = f"{folder}, {size / 1e6:,.0f} MB"
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        advice = f"Give yourself the right to write there, or name another folder in {variable}."
        return Check("caches", name, PROBLEM, f"{text}; {there} cannot be written", advice)
    free = shutil.disk_usage(there).free
    text += f", {free / 1e9:,.1f} GB free"
    if free < LEAST_DISK:
        return Check("caches", name, PROBLEM, text, f"Make room, or name a folder of another disk in {variable}.")
    return Check("caches", name, OK, text)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size if path.is_file() else 0
    except OSError:
        return 0


def backends() -> Iterator[Check]:
    """A tiny model on every backend that is installed."""
    from edgert.backends import choice, selftest
    from edgert.devices import accelerators

    with tempfile.TemporaryDirectory(prefix="edgert-") as folder:
        cpu = selftest.run("cpu", Path(folder))
        yield _self_test(cpu, "Try EDGERT_ISA=portable edgert doctor; pip install --force-reinstall edgert")
        for name, (_, package, extra) in choice.PACKAGES.items():
            remedy = f"pip install --force-reinstall '{extra}'"
            if not choice.installed(name):
                install = f"pip install '{extra}'" if choice.KINDS[name] in accelerators.present() else ""
                yield Check("self-test", name, NOTE, f"{package} is not installed", install)
            elif cpu.obstacle:
                yield Check("self-test", name, NOTE, "not tested, for want of the cpu backend's answers")
            else:
                yield _self_test(selftest.run(name, Path(folder)), remedy)


def _self_test(found: Finding, remedy: str) -> Check:
    if found.obstacle:
        return Check("self-test", found.backend, PROBLEM, found.obstacle, remedy)
    against = "itself in other steps" if found.backend == "cpu" else "the cpu backend"
    text = f"{found.device}: answers as {against} (mean KL divergence {found.kl:.1g})"
    return Check("self-test", found.backend, OK, text)
