"""How fast a backend runs a model, from excerpts of it that run for some seconds: files of its first layers.

A step takes so much for every layer and so much besides, and attention adds to it as the context grows. A short excerpt
tells what prompts cost, at the beginning of a context and further on. What a single token costs tells a longer one,
which caches near the cores do not hold: in a whole model weights and cache come from further away. Kernels of other
engines are good at some types and bad at others, so that no other model would do.

    python -m edgert.backends.excerpts JSON     what `steps` runs, so that no kernel of this process is in the way

That process says a line whenever it knows more, and is listened to for TIMEOUT seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgert import backends, ending
from edgert.backends import choice
from edgert.backends.base import Backend
from edgert.backends.clock import Clock
from edgert.devices import probe
from edgert.errors import BackendUnavailableError, EdgertError
from edgert.notes import Notes
from edgert.quantize.architecture import describe
from edgert.quantize.gguf_file import GGUFFile

CHUNK = 512  # tokens of a prefill step
DEEP = 4096  # cached tokens that tell how the time goes on; fewer where that many take long
# How the scheduler reads a prompt where nobody waits for a token: in steps of about so many seconds, of so many tokens
# at least.
STEP, FEW = 0.5, 64
LONG = 48 << 20  # bytes of layers in the longer excerpt: more than caches near the cores hold
MORE = 4  # layers that the longer one has more at least, so that they are told from noise
FILL = 1.5  # seconds in which an excerpt is given cached tokens
LEAST_ADDED = 0.05  # of a step: what cached tokens must add for their part to be told from noise
PATIENCE = 6.0  # seconds, after which steps are timed once
TIMEOUT = 12.0  # seconds; on an idle machine about four suffice
TICK = 0.2  # seconds between two looks at the process

OnWait = Callable[[float], object]

Curve = tuple[float, ...]  # seconds, by depths


@dataclass(frozen=True)
class Steps:
    """Seconds of a whole model's steps behind so many cached tokens as `depths` say, in ascending order from 0.

    prompt:  of CHUNK tokens; few: of FEW; single: of one
    layers:  of the two excerpts; the first 0 where only the longer one was run in time
    busy:    whether other programs took so much that the figures are high
    """

    depths: tuple[int, ...]
    prompt: Curve
    few: Curve
    single: Curve
    layers: tuple[int, int]
    busy: bool = False

    def rates(self, n_ctx: int) -> dict[str, float]:
        """Tokens a second of a prompt that fills the context, and of replies at its beginning and its end."""
        seconds, depth = 0.0, 0
        while depth < n_ctx:
            few = _behind(self.depths, self.few, depth)
            each = max(1e-9, _behind(self.depths, self.prompt, depth) - few) / (CHUNK - FEW)
            n = min(CHUNK, max(FEW, FEW + int((STEP - few) / each)), n_ctx - depth)
            seconds += few + (n - FEW) * each
            depth += n
        return {
            "prefill": n_ctx / seconds,
            "decode": 1 / self.single[0],
            "decode_at_end": 1 / _behind(self.depths, self.single, n_ctx),
        }

    @property
    def basis(self) -> str:
        few, many = self.layers
        what = f"first {few} and {many} layers" if 0 < few < many else f"{'' if few else 'first '}{many} layers"
        cut = "" if few else f", broken off after {TIMEOUT:.0f} seconds"
        return f"its {what}, run here for some seconds{cut}" + (" while other programs ran" if self.busy else "")


def _behind(depths: Sequence[int], curve: Sequence[float], depth: float) -> float:
    """Straight between what was measured, and on from the last two."""
    if len(curve) == 1:
        return curve[0]
    right = min(max(1, bisect_left(depths, depth)), len(curve) - 1)
    share = (depth - depths[right - 1]) / (depths[right] - depths[right - 1])
    return curve[right - 1] + share * max(0.0, curve[right] - curve[right - 1])


def steps(
    file: GGUFFile,
    backend: str,
    options: Mapping[str, Any],
    n_threads: int | None = None,
    *,
    fresh: bool = False,
    on_wait: OnWait = lambda _: None,
) -> Steps:
    """What a backend takes for a file's steps, from the notes of an earlier measurement unless `fresh`.

    options:  of the backend, the device among them
    on_wait:  called with how many seconds it has taken so far, now and then

    Raises: EdgertError where it cannot run the excerpts.
    """
    n_threads = probe.default_threads() if n_threads is None else probe.check_threads(n_threads)
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in file.paths]
    here = [n_threads, choice.build_of(backend), probe.probe().model_name, LONG, DEEP]
    key = json.dumps([facts, backend, options, *here])
    notes = Notes("excerpts")
    found = None if fresh else _noted(notes.get(key))
    if found is None:
        found = _asked(file.path, backend, options, n_threads, on_wait)
        if not found.busy and found.layers[0]:
            notes.put(key, asdict(found))
    return found


def _noted(note: Any) -> Steps | None:
    try:
        depths, prompt, few, single = (tuple(note[name]) for name in ("depths", "prompt", "few", "single"))
        whole = depths and all(len(curve) == len(depths) and min(curve) > 0 for curve in (prompt, few, single))
        short, longer = map(int, note["layers"])
        return Steps(depths, prompt, few, single, (short, longer), bool(note["busy"])) if whole else None
    except (TypeError, KeyError, ValueError):
        return None


def _asked(path: Path, backend: str, options: Mapping[str, Any], n_threads: int, on_wait: OnWait) -> Steps:
    """Measured by another process: llama.cpp cannot be kept from kernels that this one has used, and may crash."""
    with tempfile.TemporaryDirectory(prefix="edgert-") as folder:
        arguments: list[Any] = [str(path), backend, dict(options), n_threads, folder]
        if getattr(sys, "frozen", False):  # no interpreter to start
            return [*_measured(*arguments)][-1]
        command = [sys.executable, "-m", "edgert.backends.excerpts", json.dumps(arguments)]
        # Where the onnx backend keeps what it makes of a file.
        environment = dict(os.environ) | ({"EDGERT_CACHE": folder} if backend == "onnx" else {})
        try:
            said, words, status = _heard(command, environment, on_wait)
        except OSError as error:
            raise BackendUnavailableError(f"its excerpts were not run ({error})") from error
    found = None if status else _last(said)
    if found is None:
        late = f"its excerpts did not run within {TIMEOUT:.0f} seconds, as other programs run"
        last = words.decode(errors="replace").strip().splitlines()[-1:]
        raise BackendUnavailableError(late if status is None else "".join(last) or f"they ended with status {status}")
    return found


def _heard(command: list[str], environment: dict[str, str], on_wait: OnWait) -> tuple[bytes, bytes, int | None]:
    """What a process says on both channels within TIMEOUT, and its status, None where it had to be ended."""
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        try:
            while (waited := time.monotonic() - began) < TIMEOUT:
                on_wait(waited)
                with suppress(subprocess.TimeoutExpired):
                    said, words = process.communicate(timeout=min(TICK, TIMEOUT - waited))
                    return said, words, process.returncode
        finally:
            process.kill()  # one that has ended does not mind
        said, _ = process.communicate()
        return said, b"", None


def _last(said: bytes) -> Steps | None:
    """The last whole line that another process said."""
    for line in reversed(said.splitlines(keepends=True)):
        with suppress(ValueError):  # a library's own words
            if line.endswith(b"\n") and (found := _noted(json.loads(line))):
                return found
    return None


def _measured(path: str, backend: str, options: Mapping[str, Any], n_threads: int, folder: str) -> Iterator[Steps]:
    """What is known of the whole model: first roughly, then in full."""
    from edgert.quantize.prune import units_of, write_without
    from edgert.quantize.source import open_source

    with GGUFFile.open(path) as file:
        a = describe(file)
        n, period = a.n_layer, len(units_of(a.layers)[0])
        layer = sum(tensor.n_bytes for name, tensor in file.tensors.items() if name.startswith("blk.")) / n
        head = file.tensors["token_embd.weight" if a.tied_head else "output.weight"].n_bytes
    few = min(n, period * -(-2 // period))
    many = min(n, max(-(-(few + MORE) // period), round(LONG / layer / period)) * period)
    clock = Clock(PATIENCE)

    def opened(n_layer: int) -> Backend:
        excerpt = Path(path)
        if n_layer < n:
            excerpt = Path(folder) / f"{n_layer}.gguf"
            with open_source(path, allow_requantize=True) as source:
                write_without(source, excerpt, range(n_layer, n))
        with GGUFFile.open(excerpt) as file:
            common = {"n_ctx": DEEP + 2 * CHUNK, "n_threads": n_threads, "progress": None}
            return backends.open_one(backend, file, common, options)

    with closing(opened(many)) as longer:
        start, wide = clock.seconds(longer, 0, 1), clock.seconds(longer, 0, FEW)
        depth = _filled(longer, DEEP)
        added = clock.seconds(longer, depth, 1) - start
    ends = start * n / many, (start + added) * n / many
    prompt = wide * n / many
    yield Steps((0, depth), (prompt * CHUNK / FEW,) * 2, (prompt,) * 2, ends, (0, many), clock.busy)
    depths: list[int] = []
    curves: dict[int, list[float]] = {CHUNK: [], FEW: [], 1: []}
    with closing(opened(few)) as short:
        for most in (0, CHUNK, DEEP):
            depths.append(_filled(short, most))
            for n_tokens, curve in curves.items():
                curve.append(clock.seconds(short, depths[-1], n_tokens))
    single = curves[1]
    each = max(0.0, start - single[0]) / (many - few) if many > few else single[0] / few
    each = _possible(each, start, many, layer, head)
    besides = max(0.0, single[0] - few * each)
    shares = _shares(depths, single, depth)
    # Many tokens at once are slower among many layers as well.
    slower = max(1.0, (wide - besides) / many / max(1e-9, (curves[FEW][0] - besides) / few))
    yield Steps(
        tuple(depths),
        _scaled(curves[CHUNK], few, n * slower, besides),
        _scaled(curves[FEW], few, n * slower, besides),
        tuple(start + (n - many) * each + n / many * max(0.0, added) * share for share in shares),
        (few, many),
        clock.busy,
    )


def _filled(backend: Backend, most: int) -> int:
    """Gives a sequence so many cached tokens, or fewer if they take longer than FILL: how many."""
    began, depth = time.perf_counter(), min(CHUNK, most)
    backend.fill(0, depth)
    while (time.perf_counter() - began) * 3 < FILL and depth < most:  # the next take twice as long
        depth *= 2
        backend.fill(0, depth)
    return depth


def _possible(each: float, step: float, n: int, layer: float, head: float) -> float:
    """Seconds of a layer for a token, as far as a step of n of them allows.

    Their difference from a shorter step tells it, in which what other programs disturbed counts several times. But all
    layers take no more than the step, and no less than half of their part of the bytes (`layer`, `head`) that it reads.
    """
    return min(max(each, step / 2 * layer / (n * layer + head)), step / n)


def _shares(depths: Sequence[int], curve: Sequence[float], depth: int) -> list[float]:
    """What cached tokens add at each of the depths, where they add 1 at `depth`: as they do in a curve."""
    there = _behind(depths, curve, depth) - curve[0]
    if there < LEAST_ADDED * curve[0]:
        return [at / depth for at in depths]
    return [max(0.0, seconds - curve[0]) / there for seconds in curve]


def _scaled(curve: Sequence[float], few: int, n: float, besides: float) -> Curve:
    """Of n layers what `few` take, `besides` of it once."""
    start = curve[0] + (n - few) * max(0.0, curve[0] - besides) / few
    return tuple(start + n / few * max(0.0, seconds - curve[0]) for seconds in curve)


if __name__ == "__main__":
    ending.with_parent()
    try:
        for known in _measured(*json.loads(sys.argv[1])):
            print(json.dumps(asdict(known)), flush=True)
    except EdgertError as error:
        sys.exit(str(error))
