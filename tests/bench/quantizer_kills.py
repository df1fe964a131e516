"""Kills edgert quantize at random moments over an older file of the final name, and counts what is left.

    python tests/bench/quantizer_kills.py SOURCE [--kills 100] [--seed 0] [QUANTIZE FLAGS, such as --fast --type q4_0]

After each kill the final name must hold the older file untouched or the whole new one, byte for byte; in the end a run
with --resume must make the whole new one and leave nothing beside it.
"""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import click

from edgert.quantize.gguf_file import GGUFFile

OLD = b"what was there before"


def weights(path: Path) -> str:
    """A hash of all tensors; figures of a comparison in the header may differ in the last digit."""
    digest = hashlib.sha256()
    with GGUFFile.open(path) as file:
        for name, tensor in file.tensors.items():
            digest.update(name.encode() + tensor.data.tobytes())
    return digest.hexdigest()


@click.command(help=__doc__, context_settings={"ignore_unknown_options": True})
@click.argument("source", type=click.Path(exists=True))
@click.option("--kills", default=100, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def main(source: str, kills: int, seed: int, flags: tuple[str, ...]) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        out, reference = Path(folder) / "out.gguf", Path(folder) / "reference" / "out.gguf"
        reference.parent.mkdir()
        command = [sys.executable, "-m", "edgert", "quantize", source, *flags]
        subprocess.run([*command, "-o", reference], check=True, capture_output=True)  # compiles
        started = time.perf_counter()
        subprocess.run([*command, "-o", reference], check=True, capture_output=True)
        seconds, expected = time.perf_counter() - started, weights(reference)
        counts: Counter[str] = Counter()
        out.write_bytes(OLD)
        for _ in range(kills):
            child = subprocess.Popen([*command, "-o", out, "--resume"], stdout=subprocess.DEVNULL,
                                     stderr=subprocess.DEVNULL)  # fmt: skip
            time.sleep(rng.uniform(0, 1.05 * seconds))
            child.send_signal(signal.SIGKILL)
            child.wait()
            left = {path.name.removeprefix("out.gguf") for path in Path(folder).iterdir()} - {"", "reference"}
            if out.read_bytes() == OLD:
                counts["older file intact, " + ("something" if left else "nothing") + " to go on with"] += 1
            elif weights(out) == expected:
                counts["new file whole"] += 1
                out.write_bytes(OLD)
            else:
                raise click.ClickException(f"{out} is neither the older file nor the new one")
        subprocess.run([*command, "-o", out, "--resume"], check=True, capture_output=True)
        assert weights(out) == expected
        assert {path.name for path in Path(folder).iterdir()} == {"out.gguf", "reference"}
        click.echo(f"{kills} kills within {1.05 * seconds:.1f} s: " + "; ".join(f"{n} {what}" for what, n in
                   counts.most_common()))  # fmt: skip


if __name__ == "__main__":
    main()
