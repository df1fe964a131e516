"""The machine's facts: on this machine, and read from made-up /proc and /sys trees."""

from __future__ import annotations

import dataclasses
import logging
import mmap
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from edgert.devices import probe
from edgert.errors import RequestError


@pytest.fixture
def tree(tmp_path: Path):
    """tree({path: text}) writes the files of a made-up root and returns it."""

    def make(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def test_facts_of_this_machine() -> None:
    cpu = probe.probe()
    assert cpu.model_name
    assert 1 <= cpu.physical_cores <= cpu.logical_cores == psutil.cpu_count()
    assert 0 < cpu.memory_available <= cpu.memory_total <= psutil.virtual_memory().total
    assert 1 <= cpu.default_threads <= cpu.max_threads <= len(cpu.affinity)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cpu.l2 = 0  # type: ignore[misc]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_affinity_limits_the_threads() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    try:
        os.sched_setaffinity(0, {one})
        cpu = probe.probe()
    finally:
        os.sched_setaffinity(0, before)
    assert cpu.affinity == (one,)
    assert cpu.default_threads == cpu.max_threads == cpu.physical_cores == 1


V2 = {"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/cgroup.controllers": "cpu memory"}
V1 = {"proc/self/cgroup": "9:name=systemd:/\n5:memory:/box\n4:cpu,cpuacct:/box\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        (V2 | {"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        (V2 | {"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        (V2 | {"sys/fs/cgroup/docker/abc/cpu.max": "50000 100000"}, 0.5),
        (
            V2
            | {
                "sys/fs/cgroup/docker/abc/cpu.max": "max 100000",
                "sys/fs/cgroup/docker/cpu.max": "300000 100000",
                "sys/fs/cgroup/cpu.max": "400000 100000",
            },
            3.0,
        ),
        (V2 | {"sys/fs/cgroup/cpu.max": "nonsense"}, None),
        (V2 | {"sys/fs/cgroup/cpu.max": "100000 0"}, None),
        (
            V1
            | {
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "150000",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            },
            1.5,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",  # seen from inside a container
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            2.0,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_quota(tree, files: dict[str, str], quota: float | None) -> None:
    assert probe.probe(tree(files)).quota == quota


def cpu_with(**facts: object) -> probe.Cpu:
    return dataclasses.replace(
        probe.probe(), **{"physical_cores": 8, "affinity": tuple(range(16)), "quota": None} | facts
    )


@pytest.mark.parametrize(
    ("facts", "default", "most"),
    [
        ({}, 8, 16),
        ({"quota": 2.5}, 2, 3),
        ({"quota": 0.5}, 1, 1),
        ({"quota": 64.0}, 8, 16),
        ({"affinity": (0, 1, 2)}, 3, 3),
        ({"physical_cores": 4, "affinity": (0, 8), "quota": 1.0}, 1, 1),
    ],
)
def test_threads(facts: dict[str, object], default: int, most: int) -> None:
    cpu = cpu_with(**facts)
    assert (cpu.default_threads, cpu.max_threads) == (default, most)


def test_too_many_threads_are_lowered_and_said(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    two = cpu_with(affinity=(0, 1))
    monkeypatch.setattr(probe, "probe", lambda: two)
    with caplog.at_level(logging.WARNING):
        assert probe.check_threads(2) == 2
        assert not caplog.records
        assert probe.check_threads(8) == 2
    assert "8 threads" in caplog.text


@pytest.mark.parametrize("n", [0, -1, -(2**63), True, 1.5, "2", None])
def test_no_number_of_threads(n: object) -> None:
    with pytest.raises(RequestError) as caught:
        probe.check_threads(n)  # type: ignore[arg-type]
    assert caught.value.field == "threads"
    assert repr(n) in str(caught.value)


def test_siblings_of_a_core_count_once_and_caches_are_read(tree) -> None:
    files = {}
    for cpu in range(4):
        base = f"sys/devices/system/cpu/cpu{cpu}"
        files |= {
            f"{base}/topology/core_id": f"{cpu // 2}",
            f"{base}/topology/physical_package_id": "0",
            f"{base}/cache/index0/level": "1",
            f"{base}/cache/index0/type": "Data",
            f"{base}/cache/index0/size": "48K",
            f"{base}/cache/index1/level": "1",
            f"{base}/cache/index1/type": "Instruction",
            f"{base}/cache/index1/size": "32K",
            f"{base}/cache/index2/level": "2",
            f"{base}/cache/index2/type": "Unified",
            f"{base}/cache/index2/size": "2M",
        }
    root = tree(files)
    assert probe._physical_cores(root, (0, 1, 2, 3)) == 2
    assert probe._physical_cores(root, (0, 1)) == 1
    assert probe._physical_cores(root, (0, 9)) == 0
    assert [probe._cache_bytes(root, 0, level) for level in (1, 2, 3)] == [48 << 10, 2 << 20, 0]


def test_two_packages_have_different_cores(tree) -> None:
    root = tree(
        {
            f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": value
            for cpu in (0, 1)
            for name, value in (("core_id", "0"), ("physical_package_id", str(cpu)))
        }
    )
    assert probe._physical_cores(root, (0, 1)) == 2


GIB = 1 << 30


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (V2 | {"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "5"}, None),
        (V1 | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        (
            V2
            | {
                "sys/fs/cgroup/memory.max": str(GIB),
                "sys/fs/cgroup/memory.current": "3000",
                "sys/fs/cgroup/memory.stat": "anon 500\nactive_file 1000\ninactive_file 1500\n",
            },
            (GIB, 500),
        ),
        (
            V1
            | {
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(GIB),
                "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "3000",
                "sys/fs/cgroup/memory/box/memory.stat": "active_file 1\ntotal_active_file 7\ntotal_inactive_file 3\n",
            },
            (GIB, 2990),
        ),
        (
            V2
            | {
                "sys/fs/cgroup/docker/abc/memory.max": str(2 * GIB),
                "sys/fs/cgroup/docker/memory.max": str(GIB),
                "sys/fs/cgroup/memory.max": str(3 * GIB),
            },
            (GIB, 0),
        ),
    ],
)
def test_memory_limit(tree, files: dict[str, str], expected: tuple[int, int] | None) -> None:
    root = tree(files)
    if expected is None:
        assert probe.probe(root).memory_total == psutil.virtual_memory().total
    else:
        assert probe._memory_limit(root) == expected
        cpu = probe.probe(root)
        limit, used = expected
        assert cpu.memory_total == min(limit, psutil.virtual_memory().total)
        assert cpu.memory_available <= limit - used


def test_process_memory_grows_with_what_is_held() -> None:
    before, _ = probe.process_memory()
    with mmap.mmap(-1, 64 << 20) as held:  # pages of its own: the heap may have room that counts already
        held.write(b"x" * len(held))
        now, peak = probe.process_memory()
    assert now - before > 48 << 20
    assert peak >= now - (8 << 20)


def test_import_leaves_psutil_out() -> None:
    code = "import edgert.devices.probe, sys; print('psutil' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
