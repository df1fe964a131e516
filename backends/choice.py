"""`auto`: which backend runs a model here. Tried once, held against the cpu backend's answers, then remembered.

Where nothing but the cpu backend could win, nothing is tried and no other library is loaded. Only one backend is open
at a time, so that memory suffices for each as if it were alone.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgert import backends, ending
from edgert.backends import attempts
from edgert.backends.base import Backend, Batch, Trial
from edgert.devices import accelerators
from edgert.errors import BackendUnavailableError, DoesNotFitError, EdgertError, RequestError, UnsupportedFormatError
from edgert.notes import Notes

if TYPE_CHECKING:
    from edgert.quantize.gguf_file import GGUFFile

log = logging.getLogger(__name__)

CHECK_PROMPT, CHECK_STEPS = 32, 24  # tokens that are read, and then continued greedily, for a comparison of answers
# Sound backends differ from each other by 0.01, GPUs, which round more, and caches of 4 bits by 0.1; what computes
# something else by 1 and more.
MOST_KL, LEAST_SAME_TOP = 0.15, 0.7
# A token counts as the likeliest that is at least so likely as the likeliest: which of two near ties comes first is
# chance, and in a model that knows nothing all are.
NEAR_TIE = 0.5
TURN = 512, 128  # tokens of a prompt and of a reply: the backend that takes the least time for both is the fastest
SPREAD = ("split_mode", "tensor_split", "main_gpu", "rpc")  # options of llama alone: who gives one asks for it
BUDGET = 0.5  # seconds for each measured rate
RENEW = "renew its package and its driver, and look with `edgert doctor`"
KINDS = {"llama": "gpu", "onnx": "npu"}  # of devices that a backend is for
PACKAGES = {
    "llama": ("llama_cpp", "llama-cpp-python", "edgert[gpu]"),
    "onnx": ("onnxruntime", "onnxruntime", "edgert[npu]"),
}


@dataclass(frozen=True)
class Wish:
    """What the caller of `auto` said: a device, layers for GPUs, whether nothing else will do, and how llama.cpp is to
    spread the model."""

    device: str | None
    n_gpu_layers: int | None
    require: bool
    spread: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cpu_only(self) -> bool:
        return (self.device or "").lower() == "cpu" or (self.device is None and self.n_gpu_layers == 0)

    @property
    def named(self) -> bool:
        """Whether a device beside the CPU was named."""
        return not self.cpu_only and bool(self.device is not None or self.n_gpu_layers is not None or self.spread)


@dataclass(frozen=True)
class Candidate:
    """A backend to try, and the options that it gets besides."""

    backend: str
    options: Mapping[str, Any]


def choose(file: GGUFFile, common: Mapping[str, Any], options: Mapping[str, Any]) -> Backend:
    """The backend for a model; arguments as `backends.open_one` takes them.

    Raises: EdgertError when nothing can run it, or what was required cannot.
    """
    options = dict(options)
    spread = {name: options.pop(name) for name in SPREAD if name in options}
    wish = Wish(options.pop("device", None), options.pop("n_gpu_layers", None), options.pop("require", False), spread)
    if wish.cpu_only and spread:
        raise RequestError(next(iter(spread)), "spreads a model over GPUs, and the cpu alone was asked for")
    if wish.require and not (wish.named or wish.cpu_only):
        raise RequestError("require", "says that nothing else will do, but not than what: name a backend or a device")
    found, absent = candidates(wish)
    if wish.cpu_only or not found:
        try:
            return _judged(backends.open_one("cpu", file, common, options), absent)
        except (UnsupportedFormatError, DoesNotFitError) as error:
            found = [Candidate(name, {}) for name in PACKAGES if installed(name) and not wish.cpu_only]
            if not found:
                raise
            return _first_that_loads(file, common, options, found, error)
    notes, key = Notes("choices"), _key(file, common, options, wish)
    known = notes.get(key)
    if known is not None:
        try:
            return _as_before(file, common, options, known, key)
        except (EdgertError, KeyError, TypeError) as error:
            log.warning("The backend that was chosen before no longer serves (%s): all are tried again.", error)
            notes.put(key, None)
    return _Trials(file, common, options, wish, found, key).winner(notes)


def candidates(wish: Wish) -> tuple[list[Candidate], list[Trial]]:
    """What could beat the cpu backend, and what would if its package were installed."""
    if wish.cpu_only:
        return [], []
    if wish.named:
        return _named(wish), []
    present, found, absent = accelerators.present(), [], []
    for name, kind in KINDS.items():
        if kind not in present:
            continue
        if installed(name):
            found.append(Candidate(name, {"device": kind}))
        else:
            _, package, extra = PACKAGES[name]
            obstacle = f"{package} is not installed, so the {kind.upper()} is idle: pip install '{extra}'"
            absent.append(Trial(name, kind.upper(), obstacle))
    # For processors that have kernels of their own only there.
    others = [name for name in PACKAGES if installed(name) and all(one.backend != name for one in found)]
    if others and _portable():
        found += [Candidate(name, {"device": "cpu"}) for name in others]
    return found, absent


def _named(wish: Wish) -> list[Candidate]:
    device = (wish.device or "gpu").strip()
    layers = {} if wish.n_gpu_layers is None else {"n_gpu_layers": wish.n_gpu_layers}
    require = {"require": True} if wish.require else {}
    of_onnx = device.partition(":")[0].lower() in ("npu", "openvino", "qnn")
    if of_onnx and wish.spread:
        raise RequestError(next(iter(wish.spread)), f"is llama.cpp's, and {device} is ONNX Runtime's")
    return [Candidate("onnx" if of_onnx else "llama", {"device": device, **layers, **require, **wish.spread})]


def installed(name: str) -> bool:
    return importlib.util.find_spec(PACKAGES[name][0]) is not None


def check_installed(name: str) -> None:
    """Says at once, without loading anything, that a backend's package is missing. Raises: BackendUnavailableError."""
    if not installed(name):
        _, package, extra = PACKAGES[name]
        raise BackendUnavailableError(f"{package} is not installed: pip install '{extra}'")


def _portable() -> bool:
    from edgert.backends.cpu import isa

    return isa.select(None).name == "portable"


def _first_that_loads(
    file: GGUFFile, common: Mapping[str, Any], options: Mapping[str, Any], found: list[Candidate], error: EdgertError
) -> Backend:
    """For a model that the cpu backend cannot run: the first of the others that can; nothing to hold it against."""
    trials = [Trial("cpu", obstacle=str(error))]
    for one in found:
        try:
            backend = backends.open_one(one.backend, file, common, {**options, **one.options})
        except EdgertError as other:
            trials.append(Trial(one.backend, obstacle=str(other)))
            continue
        return _judged(backend, [*trials, Trial(one.backend, backend.verdict.device)])
    raise type(error)("; ".join(text.rstrip(".") for text in (str(error), *map(str, trials[1:]))) + ".")


class _Trials:
    """Opens the cpu backend and every candidate in turn; `trials` tells what became of each."""

    def __init__(
        self,
        file: GGUFFile,
        common: Mapping[str, Any],
        options: Mapping[str, Any],
        wish: Wish,
        found: list[Candidate],
        key: str,
    ) -> None:
        self._file, self._common, self._options, self._wish, self._key = file, common, options, wish, key
        self._all = [Candidate("cpu", {}), *found]
        self.trials: list[Trial] = []
        self._errors: list[Exception] = []
        self._reference: tuple[list[int], NDArray[np.float32]] | None = None

    def winner(self, notes: Notes) -> Backend:
        """The backend to use, open. Raises: EdgertError when there is none, or not what was required."""
        if self._wish.require:
            self._refuse()
        last: tuple[int, Backend] | None = None
        for i, one in enumerate(self._all):
            if last is not None:
                last[1].close()
            backend = self._try(one)
            last = None if backend is None else (i, backend)
        best = self._best()
        if best is None:
            raise self._failure()
        if last is not None and last[0] == best:
            backend = last[1]
        else:
            if last is not None:
                last[1].close()
            backend = self._open(self._all[best])
        chosen = self._all[best]
        if self._wish.named and not best:
            log.warning("%s cannot serve (%s): the cpu backend runs the model.", self._asked, self.trials[-1].obstacle)
        if any(isinstance(error, DoesNotFitError | MemoryError) for error in self._errors):
            return _judged(backend, self.trials)  # next time there may be room
        note = asdict(chosen) | {"file": str(self._file.path), "named": self._wish.named}
        notes.put(self._key, note | {"trials": [asdict(trial) for trial in self.trials]})
        return _judged(backend, self.trials)

    def _refuse(self) -> None:
        """Opens what is required and nothing else, so that its absence is told before the cpu backend compiles kernels.

        Raises: EdgertError when it cannot be opened.
        """
        backend = self._try(self._all[1], examine=False)
        if backend is None:
            raise self._failure()
        backend.close()
        self.trials.clear()

    @property
    def _asked(self) -> str:
        wish = self._wish
        if wish.device is not None:
            return f"The device {wish.device}"
        if wish.n_gpu_layers is not None:
            return f"-ngl {wish.n_gpu_layers}"
        return f"--{next(iter(wish.spread)).replace('_', '-')}"

    def _open(self, one: Candidate) -> Backend:
        return backends.open_one(one.backend, self._file, self._common, {**self._options, **one.options})

    def _try(self, one: Candidate, examine: bool = True) -> Backend | None:
        """The backend, open, if it may be used; a trial is noted in any case."""
        backend: Backend | None = None
        trial = Trial(one.backend)
        try:
            with attempts.noted(one.backend, self._key, once=True):
                backend = self._open(one)
                trial = replace(trial, device=backend.verdict.device)
                trial = self._examine(one, backend, trial) if examine else trial
        except Exception as error:  # of libraries and drivers too: the next backend may still work
            if one.backend == "cpu" and not isinstance(error, UnsupportedFormatError | DoesNotFitError):
                if backend is not None:
                    backend.close()
                raise
            if not isinstance(error, EdgertError):
                log.warning("%s failed while it was tried: %r", one.backend, error)
            trial = replace(trial, obstacle=_words(error))
            self._errors.append(error)
        self.trials.append(trial)
        if trial.obstacle and backend is not None:
            backend.close()
            backend = None
        return backend

    def _examine(self, one: Candidate, backend: Backend, trial: Trial) -> Trial:
        if one.backend == "cpu":
            self._reference = greedy(backend)
        elif self._reference is not None:
            tokens, expected = self._reference
            same_top, kl = agreement(expected, forced(backend, tokens))
            trial = replace(trial, same_top=round(same_top, 4), kl=kl if math.isnan(kl) else round(kl, 6))
            if not (kl <= MOST_KL and same_top >= LEAST_SAME_TOP):
                obstacle = (
                    f"its answers are wrong: the cpu backend's likeliest token in {100 * same_top:.0f} % of "
                    f"{len(expected)} steps, mean KL divergence {kl:.3g}: {RENEW}"
                )
                self._errors.append(BackendUnavailableError(f"{trial.device}: {obstacle}"))
                return replace(trial, obstacle=obstacle, kl=None if math.isnan(kl) else trial.kl)
        prefill, decode = rates(backend)
        return replace(trial, prefill=round(prefill, 1), decode=round(decode, 1))

    def _best(self) -> int | None:
        """The place of the fastest that may be used; of a named device, where it can be used at all."""
        sound = [i for i, trial in enumerate(self.trials) if not trial.obstacle]
        if self._wish.named:
            others = [i for i in sound if i]
            if others or self._wish.require:
                return others[0] if others else None
        return min(sound, key=lambda i: _turn_seconds(self.trials[i]), default=None)

    def _failure(self) -> Exception:
        relevant = self._errors[-1:] if self._wish.require else self._errors
        if len(relevant) == 1 and isinstance(relevant[0], EdgertError):
            return relevant[0]
        return BackendUnavailableError("; ".join(f"{t.backend}: {t.obstacle}" for t in self.trials if t.obstacle))


def _turn_seconds(trial: Trial) -> float:
    return TURN[0] / (trial.prefill or 1e-9) + TURN[1] / (trial.decode or 1e-9)


def _as_before(
    file: GGUFFile, common: Mapping[str, Any], options: Mapping[str, Any], known: Mapping[str, Any], key: str
) -> Backend:
    """The backend of an earlier choice. Raises: EdgertError, or what a damaged note gives."""
    trials = [Trial(**trial) for trial in known["trials"]]
    with attempts.noted(known["backend"], key):
        backend = backends.open_one(known["backend"], file, common, {**options, **known["options"]})
    return _judged(backend, trials)


def _judged(backend: Backend, trials: list[Trial]) -> Backend:
    """Puts into the verdict what was tried."""
    verdict = backend.verdict
    parts = [verdict.reason]
    own = next((trial for trial in trials if trial.backend == verdict.backend and trial.decode), None)
    if own is not None:
        parts.append(f"prefill {own.prefill:,.0f} and decode {own.decode:,.1f} tok/s when it was tried")
    for trial in trials:
        if trial is own or trial.backend == verdict.backend:
            continue
        parts.append(f"not {trial.backend}: {trial.obstacle}" if trial.obstacle else f"beside {_short(trial)}")
    backend.verdict = replace(verdict, requested="auto", reason="; ".join(parts), trials=tuple(trials))
    return backend


def _short(trial: Trial) -> str:
    return f"{trial.backend} on {trial.device} {trial.prefill or 0:,.0f} and {trial.decode or 0:,.1f}"


def _words(error: Exception) -> str:
    if isinstance(error, EdgertError):
        return str(error)
    if isinstance(error, MemoryError):
        return "there is not enough memory for it: choose a smaller -c/--ctx-size"
    return f"it failed ({type(error).__name__}: {' '.join(str(error).split())[:300]}): {RENEW}"


def remembered(file: GGUFFile, named: bool = True) -> dict[str, Any] | None:
    """The latest choice for a file: backend, options, file, trials; None: none was made.

    named:  whether one counts for which a device was named
    """
    found = [note for note in Notes("choices").all().values() if isinstance(note, dict)]
    path = str(file.path)
    return next((n for n in reversed(found) if n.get("file") == path and (named or not n.get("named"))), None)


def foresee(file: GGUFFile) -> dict[str, Any]:
    """What `auto` takes for a file, without loading it: backend (None: not decided), reason, trials."""
    note = remembered(file, named=False)
    if note is not None:
        trials = [trial for trial in note.get("trials", []) if isinstance(trial, dict)]
        return {"backend": note.get("backend"), "reason": "chosen when it was first loaded", "trials": trials}
    found, absent = candidates(Wish(None, None, False))
    trials = [asdict(trial) for trial in absent]
    if not found:
        return {"backend": "cpu", "reason": "nothing that could be faster is here", "trials": trials}
    names = ", ".join(["cpu", *(one.backend for one in found)])
    return {"backend": None, "reason": f"{names} are tried when it is first loaded", "trials": trials}


def _key(file: GGUFFile, common: Mapping[str, Any], options: Mapping[str, Any], wish: Wish) -> str:
    """Everything that a choice depends on: model, devices, versions, options."""
    from edgert.devices import gpus

    facts = [
        [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in file.paths],
        [(gpu.name, gpu.driver, gpu.memory_total) for gpu in gpus.gpus()],
        [_version("edgert"), *(build_of(name) for name in PACKAGES)],
        {name: value for name, value in common.items() if name != "progress"},
        options,
        asdict(wish),
    ]
    return json.dumps(facts, sort_keys=True, default=str)


def build_of(name: str) -> Any:
    """What tells one installed build of a backend's package from another of the same version."""
    module, package, _ = PACKAGES[name]
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.origin:
        return None
    folder = Path(spec.origin).parent
    return _version(package), [path.stat().st_mtime_ns for path in (folder, folder / "lib") if path.exists()]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


# What is asked of a backend.


def greedy(backend: Backend) -> tuple[list[int], NDArray[np.float32]]:
    """Random tokens, continued greedily: all of them, and the logits (steps, n_vocab) that chose the continuation."""
    n = min(CHECK_PROMPT, backend.n_ctx // 2)
    tokens = np.random.default_rng(7).integers(0, backend.n_vocab, n).tolist()
    rows = []
    for row in _steps(backend, tokens, n):
        rows.append(row)
        tokens.append(int(row.argmax()))
    return tokens, np.stack(rows)


def forced(backend: Backend, tokens: list[int]) -> NDArray[np.float32]:
    """The logits of another backend after the same tokens."""
    return np.stack(list(_steps(backend, tokens, min(CHECK_PROMPT, backend.n_ctx // 2))))


def _steps(backend: Backend, tokens: list[int], n_prompt: int) -> Iterator[NDArray[np.float32]]:
    """Logits after a prompt, and after each token that stands behind it in the list, which may grow meanwhile."""
    backend.free(0)
    yield _read(backend, tokens[:n_prompt]).copy()
    for i in range(n_prompt, min(n_prompt + CHECK_STEPS, backend.n_ctx) - 1):
        yield backend.step(tokens[i], 0).copy()
    backend.free(0)


def _read(backend: Backend, tokens: list[int]) -> NDArray[np.float32]:
    """Reads a text into sequence 0: the logits after it."""
    row = np.empty(0, np.float32)
    for start in range(0, len(tokens), backend.n_batch):
        ending.check()
        row = backend.forward(Batch.of(tokens[start : start + backend.n_batch], start))[0]
    return row


def agreement(expected: NDArray[np.float32], logits: NDArray[np.float32]) -> tuple[float, float]:
    """Share of rows with the same likeliest token, near ties included, and mean KL divergence of the probabilities.

    NaN for what are no numbers.
    """
    if expected.shape != logits.shape:
        return 0.0, math.nan
    p, q = _log_softmax(expected), _log_softmax(logits)
    kl = float((np.exp(p) * (p - q)).sum(1).mean())
    chosen = np.take_along_axis(p, logits.argmax(1)[:, None], 1)[:, 0]
    return float((chosen >= p.max(1) + math.log(NEAR_TIE)).mean()), kl


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(1, keepdims=True)
    x -= np.log(np.exp(x).sum(1, keepdims=True))
    return x


def rates(backend: Backend) -> tuple[float, float]:
    """Tokens per second of prefill and of decode, in a bit more than a second.

    Decode comes first: with it a GPU that was idle reaches its clock.
    """
    n = max(1, min(64, backend.n_ctx // 2))
    tokens = np.random.default_rng(11).integers(0, backend.n_vocab, max(n, min(TURN[0], backend.n_ctx - 1))).tolist()
    seconds = min(_timed(backend, tokens[:n]) for _ in range(2))
    decode = _decode_rate(backend, tokens[0])
    longest = n * max(1, round(BUDGET / 2 / max(seconds, 1e-6)))
    n = min(len(tokens), longest)
    began = time.perf_counter()
    seconds = min(_timed(backend, tokens[:n]) for _ in range(2))
    while time.perf_counter() - began < BUDGET / 2:
        seconds = min(seconds, _timed(backend, tokens[:n]))
    backend.free(0)
    return n / seconds, decode


def _timed(backend: Backend, tokens: list[int]) -> float:
    backend.free(0)
    start = time.perf_counter()
    _read(backend, tokens)
    return time.perf_counter() - start


def _decode_rate(backend: Backend, token: int) -> float:
    room = min(TURN[1], backend.n_ctx - backend.length(0))
    if room < 4:
        backend.free(0)
        room = min(TURN[1], backend.n_ctx)
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < room and (len(seconds) < 4 or time.perf_counter() - began < BUDGET):
        start = time.perf_counter()
        backend.step(token, 0)
        seconds.append(time.perf_counter() - start)
    backend.free(0)
    return 1 / float(np.median(seconds))
