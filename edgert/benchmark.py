"""How fast a model is here: llama-bench's tests, several engines in turn.

Every engine lives in a process of its own that is told over a pipe what to run next. So its peak memory is its
own, a crash of one does not end the others, and only one computes at a time: an engine's waiting threads stop
spinning within PAUSE seconds after its run, before the next engine starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from edgert.errors import BackendUnavailableError, EdgertError

if TYPE_CHECKING:
    from edgert.backends.base import Backend, Batch, Verdict

PAUSE = 0.05  # seconds between the runs of two engines
WARM_UP_PROMPT = 512  # tokens at most
WARM_UP_TOKENS = 4
TRIALS = 1  # runs that decide whether llama.cpp is faster with flash attention

FILE_TYPES = {
    0: "all F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    25: "IQ4_NL",
    30: "IQ4_XS",
    32: "BF16",
}


@dataclass(frozen=True)
class Test:
    """n_prompt tokens in one prefill, or n_gen single-token steps, behind n_depth cached tokens."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    __test__ = False  # no test case of pytest

    @property
    def name(self) -> str:
        """llama-bench's name."""
        what = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{what} @ d{self.n_depth}" if self.n_depth else what


def plan(n_prompt: Sequence[int], n_gen: Sequence[int], n_depth: Sequence[int]) -> list[Test]:
    """All combinations, as llama-bench orders them; 0 leaves a kind out."""
    tests = []
    for depth in n_depth:
        tests += [Test(p, 0, depth) for p in n_prompt if p]
        tests += [Test(0, n, depth) for n in n_gen if n]
    return tests


@dataclass(frozen=True)
class Facts:
    """The file, and the machine."""

    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_vocab: int

    @classmethod
    def of(cls, path: Path) -> Facts:
        """Reads the file's header. Raises: ModelFileError."""
        import math

        from edgert.quantize.gguf_file import GGUFFile

        with GGUFFile.open(path) as file:
            n_params = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
            kind = FILE_TYPES.get(file.get("general.file_type", int, -1), "mixed")
            return cls(
                model_filename=str(path),
                model_type=f"{file.architecture} {_short(n_params)} {kind}",
                model_size=sum(tensor.n_bytes for tensor in file.tensors.values()),
                model_n_params=n_params,
                n_vocab=file.metadata.length("tokenizer.ggml.tokens") or 0,
            )


def _short(n: int) -> str:
    return f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.0f}M"


@dataclass
class Result:
    """One engine's runs of one test; `row` gives llama-bench's fields.

    samples_ns:  nanoseconds of each run
    peak_rss:    bytes that the engine's process held at most until the end of this test
    ratio:       median rate over that of the engine compared with, or of the first instruction set
    """

    facts: Facts
    test: Test
    engine: dict[str, Any]
    samples_ns: list[int] = field(default_factory=list)
    test_time: str = ""
    peak_rss: int = 0
    ratio: float | None = None

    @property
    def samples_ts(self) -> list[float]:
        """Tokens per second of each run."""
        return [1e9 * (self.test.n_prompt + self.test.n_gen) / ns for ns in self.samples_ns]

    @property
    def median_ts(self) -> float:
        """Tokens per second, the median of the runs."""
        return statistics.median(self.samples_ts)

    def row(self) -> dict[str, Any]:
        """One line of JSON or CSV."""
        ts, ns = self.samples_ts, self.samples_ns
        spread = statistics.stdev if len(ns) > 1 else lambda _: 0.0
        return {
            "build_commit": self.engine["version"],
            "build_number": 0,
            "cpu_info": self.engine["cpu_info"],
            "gpu_info": "",
            "backends": self.engine["backend"],
            **{name: value for name, value in asdict(self.facts).items() if name != "n_vocab"},
            "n_batch": self.engine["n_batch"],
            "n_ubatch": self.engine["n_ubatch"],
            "n_threads": self.engine["n_threads"],
            "isa": self.engine["isa"],
            "type_k": self.engine["type_k"],
            "type_v": self.engine["type_v"],
            "n_gpu_layers": self.engine["n_gpu_layers"],
            "flash_attn": self.engine["flash_attn"],
            "n_prompt": self.test.n_prompt,
            "n_gen": self.test.n_gen,
            "n_depth": self.test.n_depth,
            "test_time": self.test_time,
            "avg_ns": int(statistics.fmean(ns)),
            "stddev_ns": int(spread(ns)),
            "avg_ts": statistics.fmean(ts),
            "stddev_ts": float(spread(ts)),
            "samples_ns": ns,
            "samples_ts": ts,
            "test": self.test.name,
            "median_ts": self.median_ts,
            "peak_rss": self.peak_rss,
            "device": self.engine["device"],
            "verdict": self.engine["verdict"],
            "ratio": self.ratio,
        }


class EngineProcess:
    """An engine in a process of its own. Use it in a `with`, or call close()."""

    def __init__(self, path: Path, backend: str, n_ctx: int, n_threads: int | None, **options: Any) -> None:
        """Starts loading; `engine` waits for it.

        options:  what the backend's class takes besides
        """
        request = {
            "path": str(path),
            "backend": backend,
            "n_ctx": n_ctx,
            "n_threads": n_threads,
            "options": options,
        }
        self._name = backend
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from edgert.benchmark import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._send(request)
        self._engine: dict[str, Any] | None = None

    @property
    def engine(self) -> dict[str, Any]:
        """What runs: backend, device, version, n_threads, n_batch, n_ubatch, flash_attn, cpu_info.

        Raises: EdgertError when the model could not be loaded.
        """
        return self.load()

    def load(self, progress: Callable[[int, int], object] = lambda done, of: None) -> dict[str, Any]:
        """As `engine`; progress: called with (kernels compiled, kernels to compile) until it is there."""
        while self._engine is None:
            answer = self._receive()
            if "compiled" in answer:
                progress(*answer["compiled"])
            else:
                self._engine = answer
        return self._engine

    def run(self, test: Test, warm_up: bool = False) -> int:
        """Runs a test once: nanoseconds. Raises: EdgertError when the engine fails."""
        self._send({"test": asdict(test), "warm_up": warm_up})
        while "compiled" in (answer := self._receive()):  # a shape of step that loading did not prepare
            pass
        return int(answer["ns"])

    def peak_rss(self) -> int:
        """Bytes that the process held at most so far."""
        self._send({"peak_rss": True})
        return int(self._receive()["peak_rss"])

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EdgertError(self._epitaph()) from None

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EdgertError(self._epitaph())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            kind = BackendUnavailableError if answer["unavailable"] else EdgertError
            raise kind(answer["error"])
        return answer

    def _epitaph(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"The process of the {self._name} engine ended with {how}" + (f": {words[-1]}" if words else ".")

    def close(self) -> None:
        """Ends the process."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def measure(
    path: Path,
    tests: Sequence[Test],
    n_threads: int | None,
    repetitions: int,
    backend: str = "cpu",
    against: str | None = None,
    flash_attn: Sequence[str] = ("on", "off"),
    isas: Sequence[str] = (),
    on_run: Callable[[str], object] = lambda _: None,
    progress: Callable[[int, int], object] = lambda done, of: None,
    **options: Any,
) -> Iterator[Result]:
    """Runs the tests; with `against`, one run of each engine in turn, A B A B.

    against:     "llama": llama.cpp on the same file and threads
    flash_attn:  what llama.cpp may use in a comparison; with several, the faster in a trial of each test
    isas:        instruction sets of the cpu backend, each an engine of its own; none: the best
    on_run:      called with a text before each run
    progress:    called with (kernels compiled, kernels to compile) while that is done

    Yields for each test a result of each engine, the other's last.
    """
    from edgert import context
    from edgert.quantize.gguf_file import GGUFFile

    facts = Facts.of(path)
    n_ctx = max(test.n_depth + test.n_prompt + test.n_gen for test in tests)
    with GGUFFile.open(path) as file:
        context.warn_beyond(file, n_ctx)
    own = [EngineProcess(path, backend, n_ctx, n_threads, **options, **kind)
           for kind in [{"isa": name} for name in isas] or [{}]]  # fmt: skip
    engines = list(own)
    try:
        on_run(f"loading {path.name}")
        for engine in own:
            engine.load(progress)
        if against == "llama":
            threads = engines[0].engine["n_threads"]
            types = {name: options[name] for name in ("cache_type_k", "cache_type_v") if options.get(name)}
            engines += [EngineProcess(path, "llama", n_ctx, threads, flash_attn=fa, **types) for fa in flash_attn]
        for engine in engines[len(own) :]:
            on_run(f"loading {path.name}")
            engine.load()
        for test in tests:
            yield from _measure(facts, test, own, engines[len(own) :], repetitions, on_run)
    finally:
        for engine in engines:
            engine.close()


def _measure(
    facts: Facts,
    test: Test,
    own: Sequence[EngineProcess],
    others: Sequence[EngineProcess],
    repetitions: int,
    on_run: Callable[[str], object],
) -> list[Result]:
    """The results of all own engines, and of the fastest of the others."""

    def run(engine: EngineProcess, note: str, warm_up: bool = False) -> int:
        what = engine.engine["isa"] if len(own) > 1 and engine in own else engine.engine["backend"]
        on_run(f"{test.name}, {what}, {note}")
        time.sleep(PAUSE)
        return engine.run(test, warm_up)

    for engine in (*own, *others):
        run(engine, "warm-up", warm_up=True)
    chosen = list(own)
    if others:
        trials: dict[EngineProcess, list[int]] = {engine: [] for engine in others}
        for _ in range(TRIALS if len(trials) > 1 else 0):
            for engine, times in trials.items():
                times.append(run(engine, "trial of flash attention"))
        chosen.append(min(trials, key=lambda engine: min(trials[engine], default=0)))
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    results = [Result(facts, test, engine.engine, test_time=now) for engine in chosen]
    for i in range(repetitions):
        for engine, result in zip(chosen, results, strict=True):
            result.samples_ns.append(run(engine, f"run {i + 1} of {repetitions}"))
    for engine, result in zip(chosen, results, strict=True):
        result.peak_rss = engine.peak_rss()
    base = results[len(own)] if others else results[0]
    for result in results[: len(own)] if len(results) > 1 else ():
        result.ratio = result.median_ts / base.median_ts
    return results


# The other side of the pipe.


def serve() -> None:
    """Runs what an EngineProcess asks for over standard input and output, until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not come between the answers

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    backend = None
    try:
        request = json.loads(sys.stdin.readline())
        backend, facts = _load(request, lambda done, of: answer({"compiled": [done, of]}))
        answer(facts)
        runner = Runner(backend)
        for line in sys.stdin:
            message = json.loads(line)
            if "test" in message:
                test = Test(**message["test"])
                if message["warm_up"]:
                    runner.warm_up(test)
                    answer({"ns": 0})
                else:
                    answer({"ns": runner.run(test)})
            else:
                from edgert.devices import probe

                answer({"peak_rss": probe.process_memory()[1]})
    except EdgertError as error:
        answer({"error": str(error), "unavailable": isinstance(error, BackendUnavailableError)})
    except KeyboardInterrupt:
        pass
    finally:
        if backend is not None:
            backend.close()


def _load(request: dict[str, Any], progress: Callable[[int, int], None]) -> tuple[Backend, dict[str, Any]]:
    from importlib.metadata import version

    from edgert import backends
    from edgert.devices import probe

    n_threads = probe.check_threads(request["n_threads"] or probe.default_threads())
    backend = backends.load(
        request["path"],
        backend=request["backend"],
        n_ctx=request["n_ctx"],
        n_threads=n_threads,
        progress=progress,
        **request["options"],
    )
    details = backend.verdict.details
    name = backend.verdict.backend
    return backend, {
        "backend": name,
        "device": backend.verdict.device,
        "verdict": str(backend.verdict),
        "n_gpu_layers": int(details.get("n_gpu_layers", 0)),
        "version": version("llama-cpp-python" if name == "llama" else "edgert"),
        "build": _build(backend.verdict),
        "n_threads": n_threads,
        "n_batch": backend.n_batch,
        "n_ubatch": int(details.get("n_ubatch", backend.n_batch)),
        "flash_attn": details.get("flash_attn", "on"),
        "isa": details.get("isa", ""),
        "type_k": details.get("type_k", "f16"),
        "type_v": details.get("type_v", "f16"),
        "cpu_info": probe.probe().model_name,
    }


def _build(verdict: Verdict) -> str:
    """What was built, and for what."""
    details = verdict.details
    if verdict.backend == "llama":
        parts = [verdict.reason, details["buffers"], *([f"AMX {details['amx']}"] if "amx" in details else [])]
        return "; ".join(parts)
    return verdict.reason


class Runner:
    """Runs tests on a backend. Token ids are random; batches are built before the clock starts."""

    def __init__(self, backend: Backend, seed: int = 0) -> None:
        import numpy as np

        self._backend = backend
        self._random = np.random.default_rng(seed)

    def warm_up(self, test: Test) -> None:
        """A prefill, or a few steps, so that memory is mapped and threads run; also what stands before them."""
        self.run(Test(min(test.n_prompt, WARM_UP_PROMPT), min(test.n_gen, WARM_UP_TOKENS), test.n_depth))

    def run(self, test: Test) -> int:
        """Nanoseconds of the test alone; what stands before it in the cache is there already."""
        self._fill(test.n_depth)
        if test.n_prompt:
            batches = self._batches(test.n_depth, test.n_prompt, self._backend.n_batch, last="last")
        else:
            batches = self._batches(test.n_depth, test.n_gen, 1, last="last", others="last")
        forward = self._backend.forward
        start = time.perf_counter_ns()
        for batch in batches:
            forward(batch)
        return time.perf_counter_ns() - start

    def _fill(self, depth: int) -> None:
        """Makes the sequence `depth` tokens long; those cached already are as random as new ones."""
        if self._backend.length(0) > depth:
            self._backend.truncate(0, depth)
        present = self._backend.length(0)
        for batch in self._batches(present, depth - present, self._backend.n_batch, last="none"):
            self._backend.forward(batch)

    def _batches(self, start: int, n: int, size: int, last: str, others: str = "none") -> list[Batch]:
        from edgert.backends.base import Batch

        tokens = self._random.integers(0, self._backend.n_vocab, n).tolist()
        return [
            Batch.of(tokens[i : i + size], start + i, wanted=last if i + size >= n else others)
            for i in range(0, n, size)
        ]
