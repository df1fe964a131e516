"""How fast a backend runs a model, from excerpts of it that run for some seconds: files of its first layers.

A step takes so much for every layer and so much besides, and attention adds to it as the context grows. Two excerpts
tell the first two apart, cached tokens in the shorter one the third; a whole model is those added up. Kernels of other
engines are good at some types and bad at others, so that no other model would do.

    python -m edgert.backends.excerpts JSON     what `steps` runs, so that no kernel of this process is in the way
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgert import backends
from edgert.backends import choice
from edgert.backends.base import Backend, Batch
from edgert.devices import probe
from edgert.devices.notes import Notes
from edgert.errors import BackendUnavailableError, EdgertError
from edgert.quantize.architecture import describe
from edgert.quantize.gguf_file import GGUFFile

CHUNK, DEPTH = 512, 4096  # tokens of a prefill step, and cached ones
# How the scheduler reads a prompt where nobody waits for a token: in steps of about so many seconds, of so many tokens
# at least.
STEP, FEW = 0.5, 64
LONG = 48 << 20  # bytes of layers in the longer excerpt: more than caches near the cores hold
BUDGET = 0.6  # seconds for each measurement
BUSY = 1.5  # times the best step: what the usual one takes where other programs compute as well
TIMEOUT = 120.0  # seconds; on an idle machine they take about fifteen


@dataclass(frozen=True)
class Steps:
    """Seconds of a whole model's steps, in an empty context and behind DEPTH cached tokens.

    prompt:  of CHUNK tokens; few: of FEW; single: of one
    layers:  of the two excerpts
    busy:    whether other programs took so much that the figures are high
    """

    prompt: tuple[float, float]
    few: tuple[float, float]
    single: tuple[float, float]
    layers: tuple[int, int]
    busy: bool = False

    def rates(self, n_ctx: int) -> dict[str, float]:
        """Tokens a second of a prompt that fills the context, and of replies at its beginning and its end."""
        seconds, depth = 0.0, 0
        while depth < n_ctx:
            few = _behind(self.few, depth)
            each = max(1e-9, _behind(self.prompt, depth) - few) / (CHUNK - FEW)
            n = min(CHUNK, max(FEW, FEW + int((STEP - few) / each)), n_ctx - depth)
            seconds += few + (n - FEW) * each
            depth += n
        return {
            "prefill": n_ctx / seconds,
            "decode": 1 / self.single[0],
            "decode_at_end": 1 / _behind(self.single, n_ctx),
        }

    @property
    def basis(self) -> str:
        few, many = self.layers
        what = f"its first {few} and {many} layers" if few < many else f"its {many} layers"
        return f"{what}, run here for some seconds" + (" while other programs ran" if self.busy else "")


def _behind(seconds: tuple[float, float], depth: float) -> float:
    """Straight on from what was measured at 0 and DEPTH."""
    return seconds[0] + max(0.0, seconds[1] - seconds[0]) * depth / DEPTH


def steps(
    file: GGUFFile, backend: str, options: Mapping[str, Any], n_threads: int | None = None, *, fresh: bool = False
) -> Steps:
    """What a backend takes for a file's steps, from the notes of an earlier measurement unless `fresh`.

    options:  of the backend, the device among them

    Raises: EdgertError where it cannot run the excerpts.
    """
    n_threads = probe.default_threads() if n_threads is None else probe.check_threads(n_threads)
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in file.paths]
    here = [n_threads, choice.build_of(backend), probe.probe().model_name, LONG, DEPTH]
    key = json.dumps([facts, backend, options, *here])
    notes = Notes("excerpts")
    found = None if fresh else _noted(notes.get(key))
    if found is None:
        found = _asked(file.path, backend, options, n_threads)
        if not found.busy:
            notes.put(key, asdict(found))
    return found


def _noted(note: Any) -> Steps | None:
    try:
        prompt, few, single, layers = (tuple(note[name]) for name in ("prompt", "few", "single", "layers"))
        whole = all(len(pair) == 2 for pair in (prompt, few, single, layers))
        return Steps(prompt, few, single, layers, bool(note["busy"])) if whole else None
    except (TypeError, KeyError, ValueError):
        return None


def _asked(path: Path, backend: str, options: Mapping[str, Any], n_threads: int) -> Steps:
    """Measured by another process: llama.cpp cannot be kept from kernels that this one has used, and may crash."""
    with tempfile.TemporaryDirectory(prefix="edgert-") as folder:
        arguments: list[Any] = [str(path), backend, dict(options), n_threads, folder]
        if getattr(sys, "frozen", False):  # no interpreter to start
            return _measured(*arguments)
        command = [sys.executable, "-m", "edgert.backends.excerpts", json.dumps(arguments)]
        # Where the onnx backend keeps what it makes of a file.
        environment = dict(os.environ) | ({"EDGERT_CACHE": folder} if backend == "onnx" else {})
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=environment
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BackendUnavailableError(f"its excerpts were not run to their end ({error})") from error
    found = None if done.returncode else _noted(json.loads(done.stdout.splitlines()[-1]))
    if found is None:
        words = done.stderr.strip().splitlines()
        raise BackendUnavailableError(words[-1] if words else f"its excerpts ended with status {done.returncode}.")
    return found


def _measured(path: str, backend: str, options: Mapping[str, Any], n_threads: int, folder: str) -> Steps:
    from edgert.quantize.prune import units_of, write_without
    from edgert.quantize.source import open_source

    with GGUFFile.open(path) as file:
        a = describe(file)
        n, period = a.n_layer, len(units_of(a.layers)[0])
        each = sum(tensor.n_bytes for name, tensor in file.tensors.items() if name.startswith("blk.")) / n
    with open_source(path, allow_requantize=True) as source:
        few = min(n, period * -(-2 // period))
        many = min(n, max(few + period, round(LONG / each / period) * period))
        clock = _Clock()
        measured = []
        for n_layer in dict.fromkeys((few, many)):
            excerpt = Path(path)
            if n_layer < n:
                excerpt = Path(folder) / f"{n_layer}.gguf"
                write_without(source, excerpt, range(n_layer, n))
            with GGUFFile.open(excerpt) as file:
                common = {"n_ctx": DEPTH + 2 * CHUNK, "n_threads": n_threads, "progress": None}
                opened = backends.open_one(backend, file, common, options)
            try:
                measured.append(clock.steps(opened, 0))
                if n_layer == few:
                    _fill(opened)
                    deep = clock.steps(opened, DEPTH)
            finally:
                opened.close()
    share = (n - few) / (many - few) if many > few else 0.0
    whole, behind = [], []
    for shallow, longer, at_depth in zip(measured[0], measured[-1], deep, strict=True):
        whole.append(max(shallow, shallow + share * (longer - shallow)))
        behind.append(whole[-1] + n / few * max(0.0, at_depth - shallow))
    prompt, small, single = zip(whole, behind, strict=True)
    return Steps(prompt, small, single, (few, many), clock.busy)


def _fill(backend: Backend) -> None:
    for start in range(backend.length(0), DEPTH, CHUNK):
        backend.forward(_batch(backend, CHUNK, start))


def _batch(backend: Backend, n: int, start: int) -> Batch:
    return Batch.of([(7 * i + start) % backend.n_vocab for i in range(n)], start)


class _Clock:
    """Times steps; `busy` when the usual one of a kind took far longer than the best."""

    def __init__(self) -> None:
        self.busy = False

    def steps(self, backend: Backend, depth: int) -> tuple[float, float, float]:
        """Seconds of steps of CHUNK, of FEW and of one token behind `depth` cached ones."""

        def read(n: int) -> Callable[[], object]:
            size = min(n, backend.n_batch)
            parts = range(depth, depth + n, size)
            return lambda: [backend.forward(_batch(backend, size, start)) for start in parts]

        chunk, few = (self._timed(backend, depth, read(n), 2) for n in (CHUNK, FEW))
        return chunk, few, self._timed(backend, depth, lambda: backend.step(1, 0), 24)

    def _timed(self, backend: Backend, depth: int, work: Callable[[], object], least: int) -> float:
        work()
        backend.truncate(0, depth)
        seconds: list[float] = []
        while len(seconds) < least or (sum(seconds) < BUDGET and len(seconds) < 200):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
            backend.truncate(0, depth)
        middle = statistics.median(seconds)
        self.busy |= middle > BUSY * min(seconds)
        return middle


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(_measured(*json.loads(sys.argv[1])))))
    except EdgertError as error:
        sys.exit(str(error))
