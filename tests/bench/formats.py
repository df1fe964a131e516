"""Each GGUF type beside llama.cpp: what it takes on disk and packed, prefill and decode, on a random llama of the type.

    python tests/bench/formats.py [--types Q2_K,IQ3_S] [-p 0 -r 7]

The model has 8 layers 1024 wide. edgert and llama.cpp run in turn on the same file and threads (`edgert bench
--against llama`); a ratio above 1 is edgert's favour. "exact": edgert's decoder has libggml's floats bit by bit.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import numpy as np
from make_random_model import random_blocks, write

from edgert.backends.cpu.layouts import BLOCK, CODEC_OF, CODECS
from edgert.quantize.formats import FORMATS

SHAPE = {"n_layer": 8, "n_embd": 1024, "n_ff": 2816, "n_head": 16, "n_head_kv": 4, "n_vocab": 8192}
LANES = 16
TYPES = [name for name, codec in CODEC_OF.items() if not CODECS[codec].is_float]


def is_exact(name: str) -> bool:
    """Whether the decoder's floats are libggml's, on random blocks."""
    form = FORMATS[name]
    data = random_blocks(np.random.default_rng(0), form, 4096, 0.03)
    spec = importlib.util.find_spec("llama_cpp")
    assert spec and spec.submodule_search_locations
    (library,) = Path(spec.submodule_search_locations[0], "lib").glob("libggml-base*.so")
    function = getattr(ctypes.CDLL(str(library)), f"dequantize_row_{name.lower()}".replace("_k", "_K"))
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    ours = form.dequantize(data)
    theirs = np.empty_like(ours)
    function(data.ctypes.data, theirs.ctypes.data, theirs.size)
    return np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def rates(path: Path, prompt: int, threads: int, repetitions: int) -> list[dict[str, float]]:
    """The rows of prefill, if there is a prompt, and decode."""
    command = [sys.executable, "-m", "edgert", "bench", "-m", str(path), "-p", str(prompt), "-n", "64"]
    command += ["-t", str(threads)]
    command += ["-r", str(repetitions), "--backend", "cpu", "--against", "llama", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{path.name}: {done.stderr.strip()[-500:]}")
    rows: list[dict[str, float]] = [row for row in json.loads(done.stdout) if row.get("ratio")]
    return rows


@click.command(help=__doc__)
@click.option("--types", default=",".join(TYPES), show_default=True)
@click.option("-p", "--prompt", default=512, show_default=True, help="Tokens of the prefill; 0: decode alone.")
@click.option("-t", "--threads", default=2, show_default=True)
@click.option("-r", "--repetitions", default=3, show_default=True)
def main(types: str, prompt: int, threads: int, repetitions: int) -> None:
    heads = ["type", "bits in the file", "bits packed", "exact"]
    heads += ["prefill tok/s, ratio"] * (prompt > 0) + ["decode tok/s, ratio"]
    click.echo(f"| {' | '.join(heads)} |")
    click.echo("|---" * len(heads) + "|")
    for name in types.split(","):
        packed = CODECS[CODEC_OF[name]].panel_bytes(BLOCK, LANES) * 8 / (BLOCK * LANES)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{name}.gguf")
            write(path, type=name, **SHAPE)
            cells = [f"{row['median_ts']:.0f}, {row['ratio']:.2f}" for row in rates(path, prompt, threads, repetitions)]
        exact = "yes" if is_exact(name) else "no"
        line = [name, f"{FORMATS[name].bits_per_weight:.2f}", f"{packed:.2f}", exact, *cells]
        click.echo(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
