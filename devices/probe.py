"""What this machine is: cores, limits, caches and memory. The only module that imports psutil."""

from __future__ import annotations

import logging
import math
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgert.errors import RequestError

log = logging.getLogger(__name__)

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as about 2^63


@dataclass(frozen=True)
class Cpu:
    """The processor and the memory that this process may use.

    physical_cores:   cores behind the processors that this process may run on
    logical_cores:    processors of the whole machine
    affinity:         the processors that this process may run on
    quota:            processors' worth of time that the container grants, None without a limit
    caches:           bytes by level: l1d, l2, l3, 0 where unknown
    memory_*:         bytes, the container's limit respected
    """

    model_name: str
    physical_cores: int
    logical_cores: int
    affinity: tuple[int, ...]
    quota: float | None
    l1d: int
    l2: int
    l3: int
    memory_total: int
    memory_available: int

    @property
    def default_threads(self) -> int:
        """One thread a physical core, within the quota: threads that share a core or wait only slow down."""
        quota = math.inf if self.quota is None else math.floor(self.quota)
        return max(1, int(min(self.physical_cores, len(self.affinity), quota)))

    @property
    def max_threads(self) -> int:
        """As many as can run at once."""
        quota = math.inf if self.quota is None else math.ceil(self.quota)
        return max(1, int(min(len(self.affinity), quota)))


def probe(root: Path = Path("/")) -> Cpu:
    """Looks at the machine; `root` is where /proc and /sys are."""
    psutil = _psutil()
    affinity = _affinity()
    limit, used = _memory_limit(root)
    memory = psutil.virtual_memory()
    return Cpu(
        model_name=_model_name(root),
        physical_cores=_physical_cores(root, affinity) or psutil.cpu_count(logical=False) or len(affinity),
        logical_cores=psutil.cpu_count() or len(affinity),
        affinity=affinity,
        quota=_cpu_quota(root),
        l1d=_cache_bytes(root, affinity[0], 1),
        l2=_cache_bytes(root, affinity[0], 2),
        l3=_cache_bytes(root, affinity[0], 3),
        memory_total=min(memory.total, limit),
        memory_available=max(0, min(memory.available, limit - used)),
    )


def default_threads() -> int:
    """The number of threads for someone who did not say."""
    return probe().default_threads


def check_threads(n: int) -> int:
    """A wished number of threads, lowered with a warning to what can run at once.

    Raises: RequestError below 1.
    """
    if type(n) is not int or n < 1:
        raise RequestError("threads", f"{n!r} is no number of threads: give 1 or more, or leave it out")
    most = probe().max_threads
    if n > most:
        log.warning("%d threads were asked for and %d can run here at once: using %d", n, most, most)
    return min(n, most)


def process_memory() -> tuple[int, int]:
    """Bytes that this process holds in memory now and held at most (resident set)."""
    info = _psutil().Process().memory_info()
    if sys.platform == "win32":
        return int(info.rss), int(info.peak_wset)
    for line in _read(Path("/proc/self/status")).splitlines():
        if line.startswith("VmHWM:"):  # getrusage counts what the parent held before it started this program
            return int(info.rss), int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(info.rss), int(peak if sys.platform == "darwin" else peak * 1024)


def runs(process: int) -> bool:
    """Whether there is a process of this number."""
    return bool(_psutil().pid_exists(process))


def _psutil() -> Any:
    """The module, imported on first use: it takes longer than everything else here together."""
    import psutil  # type: ignore[import-untyped]

    return psutil


def _affinity() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    psutil = _psutil()
    if hasattr(psutil.Process, "cpu_affinity"):
        return tuple(psutil.Process().cpu_affinity())
    return tuple(range(psutil.cpu_count() or 1))


def _read(path: Path) -> str:
    """A small file's text, empty when there is none."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _model_name(root: Path) -> str:
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def _physical_cores(root: Path, affinity: tuple[int, ...]) -> int:
    """Different cores among the processors, 0 when the system does not tell."""
    cores = set()
    for cpu in affinity:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        core = _read(topology / "core_id")
        if not core:
            return 0
        cores.add((_read(topology / "physical_package_id"), _read(topology / "die_id"), core))
    return len(cores)


def _cache_bytes(root: Path, cpu: int, level: int) -> int:
    """Size of the data or unified cache of a level that a processor sees."""
    for index in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
        if _read(index / "level") == str(level) and _read(index / "type") in ("Data", "Unified"):
            size = _read(index / "size")
            unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:], 1)
            digits = size.rstrip("KMG")
            return int(digits) * unit if digits.isdecimal() else 0
    return 0


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process' control group and of all above it, for cgroup v2 and v1.

    Inside a container the path in /proc may be the host's, and then only the mount's own root exists.
    """
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if not controllers:
            top = mount if (mount / "cgroup.controllers").exists() else mount / "unified"
        elif controller in controllers.split(","):
            top = mount / controllers if (mount / controllers).exists() else mount / controller
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = top.joinpath(*parts[:depth])
            if folder.is_dir():
                yield folder


def _cpu_quota(root: Path) -> float | None:
    """The tightest limit of processor time, in processors."""
    quotas = []
    for folder in _cgroups(root, "cpu"):
        text = _read(folder / "cpu.max") or " ".join(
            (_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))
        )
        quota, _, period = text.partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(quota) > 0 and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _memory_limit(root: Path) -> tuple[int, int]:
    """The group's memory limit that leaves the least, and what counts against it, in bytes.

    Cached pages of files count as used, but make room when needed, so they are taken off.
    """
    tightest = (_UNLIMITED, 0)
    for folder in _cgroups(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if not limit.isdecimal() or int(limit) >= _UNLIMITED:
            continue
        stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
        cached = sum(int(stat.get(f"total_{name}", stat.get(name, "0"))) for name in ("active_file", "inactive_file"))
        net = max(0, int(used) - cached) if used.isdecimal() else 0
        if int(limit) - net < tightest[0] - tightest[1]:
            tightest = (int(limit), net)
    return tightest
