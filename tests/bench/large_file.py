"""How long a file takes to load: packed the first time, mapped the second, beside reading it once, and beside
copying as many bytes into fresh memory, below which nothing that packs can come.

    python tests/bench/make_random_model.py 7b.gguf --type Q4_K --n-layer 32 --n-embd 4096 --n-ff 11008 \
        --n-head-kv 32 --n-vocab 32000
    EDGERT_CACHE=FOLDER python tests/bench/large_file.py 7b.gguf

Each load is a process of its own: from its start, before any import, to the first token of an answer to 16 tokens.
Kernels are compiled before. Peak memory is the process's resident set, in which mapped pages count. Ways run in turn;
medians are printed. Copies are kept of files of any size here (`copies.WORTHWHILE` else). What is read, file or copy,
is in the system's memory before, or with --cold (as root, on Linux) on the disk alone.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import click
import numpy as np

PIECE = 8 << 20
WAYS = (("packed, no copy", "off", False), ("packed, copied", "1T", True), ("mapped", "1T", False))
LOAD = """
import json, sys, time, resource
start = float(sys.argv[2])
from edgert import backends
from edgert.backends.base import Batch
from edgert.backends.cpu import copies
copies.WORTHWHILE = 0
begun = time.time()
backend = backends.load(sys.argv[1], backend="cpu", n_ctx=512, n_threads=int(sys.argv[3]))
loaded = time.time()
backend.forward(Batch.of(list(range(2, 18)), 0))
first = time.time()
for i in range(16):
    backend.forward(Batch.of([i + 2], 16 + i))
decoded = time.time()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
keeper = getattr(backend, "_keeper", None)
if keeper and sys.argv[4] == "wait":
    keeper.wait()
kept = time.time()
backend.close()
print(json.dumps({"load": loaded - begun, "to first token": first - start, "decode": 16 / (decoded - first),
                  "peak": peak, "copy written": kept - decoded}))
"""


def read_once(path: Path) -> float:
    """Seconds to read the file's bytes."""
    buffer = bytearray(PIECE)
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start


def prepare(path: Path, cold: bool) -> None:
    """Has a file and its copies in the system's memory, or not."""
    if cold:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    else:
        for kept in (path, *Path(os.environ["EDGERT_CACHE"], "packed").glob("*.packed")):
            read_once(kept)


def copy_into_fresh_memory(n_bytes: int, threads: int) -> float:
    """Seconds that so many threads take together, a piece from a core's own cache at a time."""
    fresh = np.empty(n_bytes, np.uint8)  # comes into being when it is touched

    def fill(part: np.ndarray) -> None:
        piece = np.ones(1 << 20, np.uint8)
        for start in range(0, len(part), len(piece)):
            target = part[start : start + len(piece)]
            target[:] = piece[: len(target)]

    workers = [threading.Thread(target=fill, args=(part,)) for part in np.array_split(fresh, threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def load(path: Path, threads: int, setting: str, wait: bool = False) -> dict[str, float]:
    environment = {**os.environ, "EDGERT_PACKED_CACHE": setting}
    command = [sys.executable, "-c", LOAD, str(path), str(time.time()), str(threads), "wait" if wait else "no"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@click.command(help=__doc__)
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-t", "--threads", default=2, show_default=True)
@click.option("-r", "--repetitions", default=3, show_default=True)
@click.option("--cold", is_flag=True, help="Empty the system's cache of files before each time that is taken.")
def main(path: Path, threads: int, repetitions: int, cold: bool) -> None:
    size = path.stat().st_size
    root = Path(os.environ["EDGERT_CACHE"], "packed")
    plain: dict[str, list[float]] = {"read once": [], "fresh memory": []}
    loads: dict[str, list[dict[str, float]]] = {label: [] for label, _, _ in WAYS}
    for _ in range(repetitions):
        prepare(path, cold)
        plain["read once"].append(read_once(path))
        plain["fresh memory"].append(copy_into_fresh_memory(size, threads))
        for label, setting, wait in WAYS:
            if wait:
                for copy in root.glob("*.packed"):
                    copy.unlink()
            prepare(path, cold)
            loads[label].append(load(path, threads, setting, wait))
    click.echo(f"{path.name}, {size / 1e9:.2f} GB")
    for label, times in plain.items():
        click.echo(f"{label:15} {statistics.median(times):6.2f} s   ({min(times):.2f} to {max(times):.2f})")
    for label, rows in loads.items():
        found = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        times = [row["load"] for row in rows]
        click.echo(
            f"{label:15} {found['load']:6.2f} s load ({min(times):.2f} to {max(times):.2f}), "
            f"{found['to first token']:.2f} s to the first token, {found['decode']:.1f} tok/s, "
            f"peak {found['peak'] / size:.3f} of the file, copy after {found['copy written']:.2f} s"
        )


if __name__ == "__main__":
    main()
