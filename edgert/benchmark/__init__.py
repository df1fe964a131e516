"""How fast a model is here: llama-bench's tests, several engines in turn.

Every engine lives in a process of its own (`process.py`); one's waiting threads stop spinning within PAUSE seconds
after its run, before the next engine starts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edgert.benchmark.process import EngineProcess
from edgert.benchmark.runner import Test

PAUSE = 0.05  # seconds between the runs of two engines
WITHOUT_FLASH = ("f32", "f16", "bf16")  # values that llama.cpp reads without flash attention
TRIALS = 1  # runs that decide whether llama.cpp is faster with flash attention


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

        from edgert.quantize.formats import FILE_TYPES
        from edgert.quantize.gguf_file import GGUFFile

        names = {number: name for name, number in FILE_TYPES.items()} | {0: "all F32"}
        with GGUFFile.open(path) as file:
            n_params = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
            kind = names.get(file.get("general.file_type", int, -1), "mixed")
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
    flash_attn:  what llama.cpp may use; with several, "on" for packed values, else the faster in a trial
    isas:        instruction sets of the cpu backend, each an engine of its own; none: the best
    on_run:      called with a text before each run
    progress:    called with (kernels compiled, kernels to compile) while that is done

    Yields for each test a result of each engine, the other's last.

    Raises: EdgertError, before anything is measured where the other's package is missing.
    """
    from edgert import context
    from edgert.backends import choice
    from edgert.quantize.gguf_file import GGUFFile

    if against is not None:
        choice.check_installed(against)
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
            if len(flash_attn) > 1 and types.get("cache_type_v", "f16") not in WITHOUT_FLASH:
                flash_attn = ["on"]
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
