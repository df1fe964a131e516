"""A short self-test of each backend on a random model made on the fly; as a program, so that a crash is a finding.

    python -m edgert.backends.selftest NAME FOLDER

The cpu backend is held against itself (a whole prompt, and the same token by token, take different kernels), the
others against what it left in FOLDER.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from edgert import backends, ending
from edgert.backends import choice, specimen
from edgert.backends.base import Backend, Batch
from edgert.errors import EdgertError
from edgert.quantize.gguf_file import GGUFFile

TIMEOUT = 180.0  # seconds; the first time compiles kernels
PROMPT = 128  # tokens: two windows for the kernels of many tokens
MOST_KL = 0.02  # of a model of 4-bit weights on processors; backends round activations differently, and GPUs more


@dataclass(frozen=True)
class Finding:
    """What became of a self-test; obstacle: "" when all is well."""

    backend: str
    device: str = ""
    obstacle: str = ""
    kl: float | None = None
    same_top: float | None = None


def run(name: str, folder: Path) -> Finding:
    """Tests a backend in a process of its own; "cpu" must have been tested in this folder before the others."""
    if getattr(sys, "frozen", False):  # no interpreter to start
        return _test(name, folder)
    environment = dict(os.environ) | ({"EDGERT_CACHE": str(folder)} if name == "onnx" else {})
    command = [sys.executable, "-m", "edgert.backends.selftest", name, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return Finding(name, obstacle=f"it had not ended after {TIMEOUT:.0f} seconds")
    except OSError as error:
        return Finding(name, obstacle=f"its process cannot be started ({error.strerror})")
    if done.returncode == 0:
        return Finding(**json.loads(done.stdout.splitlines()[-1]))
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    words = done.stderr.strip().splitlines()
    return Finding(name, obstacle=f"its process ended with {how}" + (f": {words[-1][:300]}" if words else ""))


def _test(name: str, folder: Path) -> Finding:
    try:
        path = folder / "specimen.gguf"
        if not path.exists():
            specimen.write(path, n_embd=576, n_ff=512, n_head=9, n_head_kv=3)
        with GGUFFile.open(path) as file:
            backend = backends.open_one(name, file, {"n_ctx": 256, "n_threads": None, "progress": None}, {})
        try:
            same_top, kl = _against_itself(backend, folder) if name == "cpu" else _against_cpu(backend, folder)
        finally:
            backend.close()
    except EdgertError as error:
        return Finding(name, obstacle=str(error))
    on_gpu = backend.verdict.details.get("n_gpu_layers", "0") != "0"
    sound = kl <= (choice.MOST_KL if on_gpu else MOST_KL)
    obstacle = "" if sound else f"its answers are wrong: mean KL divergence {kl:.3g}"
    return Finding(name, backend.verdict.device, obstacle, None if np.isnan(kl) else round(kl, 6), round(same_top, 3))


def _against_itself(backend: Backend, folder: Path) -> tuple[float, float]:
    tokens, logits = choice.greedy(backend)
    np.save(folder / "logits.npy", logits)
    (folder / "tokens.json").write_text(json.dumps(tokens), encoding="utf-8")
    tokens = np.random.default_rng(0).integers(0, backend.n_vocab, PROMPT).tolist()
    n = PROMPT - 16
    whole = backend.forward(Batch.of(tokens, 0, wanted="all"))[n:].copy()
    backend.free(0)
    backend.forward(Batch.of(tokens[:n], 0, wanted="none"))
    return choice.agreement(whole, np.stack([backend.step(token, 0).copy() for token in tokens[n:]]))


def _against_cpu(backend: Backend, folder: Path) -> tuple[float, float]:
    tokens = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    return choice.agreement(np.load(folder / "logits.npy"), choice.forced(backend, tokens))


if __name__ == "__main__":
    ending.with_parent()
    print(json.dumps(asdict(_test(sys.argv[1], Path(sys.argv[2])))))
