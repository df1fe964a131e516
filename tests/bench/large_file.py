"""How long a large file takes to load: beside reading it once, packed the first time, mapped the second.

    python tests/bench/make_random_model.py 7b.gguf --type Q4_K --n-layer 32 --n-embd 4096 --n-ff 11008 \
        --n-head-kv 32 --n-vocab 32000
    EDGERT_CACHE=FOLDER python tests/bench/large_file.py 7b.gguf

Each load is a process of its own: from its start, before any import, to the first token of an answer to 16 tokens.
Kernels are compiled before. Peak memory is the process's resident set, in which mapped pages count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import click

PIECE = 8 << 20
WAYS = (("packed, no copy", "off", False), ("packed, copied", "1T", True), ("mapped", "1T", False))
LOAD = """
import json, sys, time, resource
start = float(sys.argv[2])
from edgert import backends
from edgert.backends.base import Batch
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
@click.option("-r", "--repetitions", default=2, show_default=True)
def main(path: Path, threads: int, repetitions: int) -> None:
    size = path.stat().st_size
    for _ in range(repetitions):
        click.echo(f"read once       {read_once(path):6.2f} s   ({size / 1e9:.2f} GB)")
        root = Path(os.environ["EDGERT_CACHE"], "packed")
        for label, setting, wait in WAYS:
            if wait:
                for copy in root.glob("*.packed"):
                    copy.unlink()
            found = load(path, threads, setting, wait)
            click.echo(
                f"{label:15} {found['load']:6.2f} s load, {found['to first token']:.2f} s to the first token, "
                f"{found['decode']:.1f} tok/s, peak {found['peak'] / size:.3f} of the file, "
                f"copy after {found['copy written']:.2f} s"
            )


if __name__ == "__main__":
    main()
