"""The benchmark: which tests run and in what order, what is timed, what is printed."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from edgert import backends, benchmark
from edgert.backends import choice
from edgert.backends.base import Backend, Batch, Verdict
from edgert.backends.cpu.isa import available
from edgert.benchmark import Facts, Result, measure, plan, runner
from edgert.benchmark.process import EngineProcess
from edgert.benchmark.runner import Runner, Test
from edgert.cli.verbs import perplexity
from edgert.cli.verbs.bench import as_csv, as_table, command
from edgert.devices import probe
from edgert.errors import BackendUnavailableError, EdgertError
from edgert.quantize.gguf_file import GGUFFile
from edgert.tokenizer import Tokenizer

needs_llama = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)


class Recorder(Backend):
    """A backend that writes down the steps it is asked for, and takes a given time of a clock for each token."""

    def __init__(self, n_batch: int = 16, seconds: float = 0.0, clock: SimpleNamespace | None = None) -> None:
        self.n_vocab, self.n_ctx, self.n_batch, self.n_seq_max = 50, 1000, n_batch, 1
        self.capabilities = frozenset()
        self.verdict = Verdict("test", "test", "test", "test")
        self.steps: list[tuple[int, int, int]] = []  # first position, tokens, wanted
        self.seconds, self.clock = seconds, clock or SimpleNamespace(now=0.0)
        self._length = 0

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        assert int(batch.positions[0]) == self._length
        assert batch.tokens.min() >= 0
        assert batch.tokens.max() < self.n_vocab
        self._length += len(batch)
        self.steps.append((int(batch.positions[0]), len(batch), int(batch.wanted.sum())))
        self.clock.now += self.seconds * len(batch)
        return np.zeros((int(batch.wanted.sum()), self.n_vocab), np.float32)

    def length(self, sequence: int) -> int:
        return self._length

    def fork(self, source: int, target: int, length: int) -> None:
        raise NotImplementedError

    def truncate(self, sequence: int, length: int) -> None:
        self._length = min(self._length, length)

    def memory(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


def test_tests_are_llama_bench_s() -> None:
    names = [test.name for test in plan([512, 64], [128, 0], [0, 4096])]
    assert names == ["pp512", "pp64", "tg128", "pp512 @ d4096", "pp64 @ d4096", "tg128 @ d4096"]
    assert plan([0], [0], [0]) == []


def test_a_prefill_wants_its_last_logits_only() -> None:
    backend = Recorder()
    Runner(backend).run(Test(40, 0))
    assert backend.steps == [(0, 16, 0), (16, 16, 0), (32, 8, 1)]


def test_decode_takes_single_steps_with_logits() -> None:
    backend = Recorder()
    Runner(backend).run(Test(0, 3))
    assert backend.steps == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The runner's clock, which steps of a Recorder move on and nothing else."""
    fake = SimpleNamespace(now=0.0)
    fake.perf_counter_ns = lambda: round(1e9 * fake.now)
    monkeypatch.setattr(runner, "time", fake)
    return fake


def test_what_stands_before_is_computed_once_and_not_timed(clock: SimpleNamespace) -> None:
    backend = Recorder(seconds=0.001, clock=clock)
    tests = Runner(backend)
    first = tests.run(Test(0, 2, n_depth=40))
    assert backend.steps == [(0, 16, 0), (16, 16, 0), (32, 8, 0), (40, 1, 1), (41, 1, 1)]
    backend.steps.clear()
    again = tests.run(Test(0, 2, n_depth=40))
    assert backend.steps == [(40, 1, 1), (41, 1, 1)]
    assert first == again == 2_000_000
    backend.steps.clear()
    tests.run(Test(5, 0, n_depth=50))
    assert backend.steps == [(42, 8, 0), (50, 5, 1)]


def test_time_is_of_the_test(clock: SimpleNamespace) -> None:
    assert Runner(Recorder(seconds=0.001, clock=clock)).run(Test(0, 20)) == 20_000_000


def test_warm_up_is_short_but_fills_the_cache() -> None:
    backend = Recorder()
    Runner(backend).warm_up(Test(0, 128))
    assert len(backend.steps) == runner.WARM_UP_TOKENS
    backend = Recorder(n_batch=1000)
    Runner(backend).warm_up(Test(900, 0, n_depth=20))
    assert backend.steps == [(0, 20, 0), (20, runner.WARM_UP_PROMPT, 1)]


class FakeProcess:
    """Stands in for EngineProcess; its times come from a list."""

    log: list[str] = []  # noqa: RUF012

    def __init__(self, path: Path, backend: str, n_ctx: int, n_threads: int | None, **options: Any) -> None:
        self.kind = options.get("isa", backend) + str(options.get("flash_attn", ""))
        self.n_ctx = n_ctx
        self.engine = engine_of(backend, options.get("flash_attn", "on"), options.get("isa", ""))
        self.closed = False

    def load(self, progress: Any = None) -> dict[str, Any]:
        return self.engine

    def run(self, test: Test, warm_up: bool = False) -> int:
        self.log.append(f"{'warm ' if warm_up else ''}{self.kind} {test.name}")
        slow = {"cpu": 1, "llamaon": 2, "llamaoff": 3, "amx": 1, "avx2": 4}[self.kind]
        if test.n_gen:  # at decode the one without flash attention is the faster
            slow = {1: 1, 2: 3, 3: 2}[slow]
        return 1_000_000 * slow * (test.n_prompt + test.n_gen)

    def peak_rss(self) -> int:
        return 123 << 20

    def close(self) -> None:
        self.log.append(f"close {self.kind}")


def engine_of(backend: str, flash_attn: str = "on", isa: str = "") -> dict[str, Any]:
    return {
        "backend": backend,
        "device": "CPU",
        "verdict": f"{backend} on CPU",
        "n_gpu_layers": 0,
        "version": "1.2",
        "build": f"built for {backend}",
        "n_threads": 2,
        "n_batch": 512,
        "n_ubatch": 512,
        "flash_attn": flash_attn,
        "isa": isa,
        "type_k": "f16",
        "type_v": "f16",
        "cpu_info": "A processor",
    }


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(benchmark, "EngineProcess", FakeProcess)
    monkeypatch.setattr(benchmark, "PAUSE", 0)
    monkeypatch.setattr(choice, "installed", lambda name: True)
    FakeProcess.log = []
    return FakeProcess.log


def test_engines_run_in_turn(tiny_model: Callable[..., Path], fakes: list[str]) -> None:
    results = list(measure(tiny_model("llama"), [Test(8, 0)], 2, repetitions=3, against="llama"))
    runs = [line for line in fakes if not line.startswith(("warm", "close"))]
    trials = ["llamaon pp8", "llamaoff pp8"] * benchmark.TRIALS
    assert runs == trials + ["cpu pp8", "llamaon pp8"] * 3
    assert sorted(fakes[-3:]) == ["close cpu", "close llamaoff", "close llamaon"]
    ours, theirs = results
    assert (ours.median_ts, theirs.median_ts, ours.ratio, theirs.ratio) == (1000, 500, 2, None)
    assert len(ours.samples_ns) == len(theirs.samples_ns) == 3


def test_without_llama_nothing_is_measured_first(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path], fakes: list[str], tmp_path: Path
) -> None:
    """Neither by bench nor by perplexity; nor is anything loaded."""
    monkeypatch.setattr(choice, "installed", lambda name: False)
    monkeypatch.setattr(backends, "load", lambda *_, **__: pytest.fail("a backend was loaded"))
    (tmp_path / "text").write_text("text")
    path = str(tiny_model("llama"))
    for program, more in ((command, ()), (perplexity.command, ("-f", str(tmp_path / "text")))):
        done = CliRunner().invoke(program, ["-m", path, *more, "--against", "llama"])
        assert isinstance(done.exception, BackendUnavailableError)
        assert str(done.exception) == "llama-cpp-python is not installed: pip install 'edgert[gpu]'"
    assert fakes == []


def test_flash_attention_is_chosen_for_each_test(tiny_model: Callable[..., Path], fakes: list[str]) -> None:
    results = list(measure(tiny_model("llama"), [Test(8, 0), Test(0, 4)], 2, 1, against="llama"))
    chosen = [(result.test.name, result.engine["flash_attn"]) for result in results[1::2]]
    assert chosen == [("pp8", "on"), ("tg4", "off")]


@pytest.mark.parametrize(("type_v", "tried"), [("f16", {"on", "off"}), ("q8_0", {"on"}), ("q4_0", {"on"})])
def test_packed_values_leave_flash_attention_no_choice(
    tiny_model: Callable[..., Path], fakes: list[str], type_v: str, tried: set[str]
) -> None:
    """llama.cpp cannot read them without."""
    options = {"cache_type_k": type_v, "cache_type_v": type_v}
    list(measure(tiny_model("llama"), [Test(8, 0)], 2, 1, against="llama", **options))
    assert {line.split()[0] for line in fakes if line.startswith("llama")} == {f"llama{fa}" for fa in tried}


def test_one_choice_of_flash_attention_needs_no_trial(tiny_model: Callable[..., Path], fakes: list[str]) -> None:
    results = list(measure(tiny_model("llama"), [Test(8, 0)], 2, 1, against="llama", flash_attn=["off"]))
    assert results[1].engine["flash_attn"] == "off"
    assert [line for line in fakes if line.startswith("llama")] == ["llamaoff pp8"]


def test_instruction_sets_run_in_turn(tiny_model: Callable[..., Path], fakes: list[str]) -> None:
    results = list(measure(tiny_model("llama"), [Test(8, 0)], 2, repetitions=2, isas=["avx2", "amx"]))
    assert [line for line in fakes if not line.startswith(("warm", "close"))] == ["avx2 pp8", "amx pp8"] * 2
    assert [(result.engine["isa"], result.ratio) for result in results] == [("avx2", 1), ("amx", 4)]
    lines = as_table(results).splitlines()
    assert "| avx2    |" in lines[2]
    assert "4.00x" in lines[3]
    assert "| amx     | 2       | on | peak memory" in lines[5]


def test_instruction_sets_against_another_engine(tiny_model: Callable[..., Path], fakes: list[str]) -> None:
    path, sets = tiny_model("llama"), ["avx2", "amx"]
    results = list(measure(path, [Test(8, 0)], 2, 1, against="llama", flash_attn=["on"], isas=sets))
    assert [(result.engine["backend"], result.ratio) for result in results] == [
        ("cpu", 0.5),
        ("cpu", 2),
        ("llama", None),
    ]


def test_engines_are_closed_after_an_error(
    tiny_model: Callable[..., Path], fakes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise EdgertError("it fell over")

    monkeypatch.setattr(FakeProcess, "run", fail)
    with pytest.raises(EdgertError, match="it fell over"):
        list(measure(tiny_model("llama"), [Test(8, 0)], 2, 1))
    assert fakes == ["close cpu"]


def results() -> list[Result]:
    facts = Facts("m.gguf", "llama 1M Q4_0", 3 << 20, 1_000_000, 384)
    ours = Result(facts, Test(512, 0), engine_of("cpu"), [1_000_000_000, 2_000_000_000, 4_000_000_000])
    theirs = Result(facts, Test(512, 0), engine_of("llama", "off"), [4_000_000_000], "now", 5 << 20)
    ours.peak_rss, ours.ratio = 7 << 20, ours.median_ts / theirs.median_ts
    return [ours, theirs]


def test_a_row_has_llama_bench_s_fields() -> None:
    row = results()[0].row()
    known = """build_commit build_number cpu_info gpu_info backends model_filename model_type model_size
        model_n_params n_batch n_ubatch n_threads type_k type_v n_gpu_layers flash_attn n_prompt n_gen n_depth
        test_time avg_ns stddev_ns avg_ts stddev_ts samples_ns samples_ts"""
    assert set(known.split()) <= set(row)
    assert row["samples_ts"] == [512, 256, 128]
    assert row["avg_ts"] == pytest.approx(298.667, abs=1e-3)
    assert row["median_ts"] == 256
    assert row["stddev_ts"] == pytest.approx(np.std([512, 256, 128], ddof=1))
    assert row["avg_ns"] == 2_333_333_333
    assert row["ratio"] == 2


def test_the_table_reads_like_llama_bench_s() -> None:
    lines = as_table(results()).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == (
        ["model", "size", "params", "backend", "threads", "fa", "test", "t/s", "median", "ratio"]
    )
    assert {len(line) for line in lines[:6]} == {len(lines[0])}
    assert "298.67 ± 195.52" in lines[2]
    assert "2.00x" in lines[2]
    assert "| llama   | 2       | off | pp512" in lines[3]
    assert "peak memory | 7.0 MiB" in lines[4]
    assert "peak memory | 5.0 MiB" in lines[5]
    assert lines[-3:] == ["CPU: A processor", "cpu 1.2: built for cpu", "llama 1.2: built for llama"]


def test_csv_reads_back() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(results()))))
    assert [row["backends"] for row in rows] == ["cpu", "llama"]
    assert (float(rows[0]["median_ts"]), rows[0]["model_type"]) == (256.0, "llama 1M Q4_0")


def test_facts_are_the_file_s(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama", metadata={"general.file_type": 2})
    facts = Facts.of(path)
    assert facts.model_type == "llama 0M Q4_0"
    assert 0 < facts.model_size < path.stat().st_size
    assert (facts.n_vocab, facts.model_filename) == (384, str(path))


@pytest.mark.parametrize(
    ("number", "name"), [(0, "all F32"), (12, "Q3_K_M"), (15, "Q4_K_M"), (26, "IQ3_S"), (39, "NVFP4"), (999, "mixed")]
)
def test_a_file_s_type_is_named_as_llama_cpp_names_it(tiny_model: Callable[..., Path], number: int, name: str) -> None:
    assert Facts.of(tiny_model("llama", metadata={"general.file_type": number})).model_type == f"llama 0M {name}"


def test_threads_are_told_as_they_ran(tiny_model: Callable[..., Path]) -> None:
    """More than the machine has are lowered, and the row says to what."""
    arguments = ["-m", str(tiny_model("llama")), "-p", "8", "-n", "0", "-r", "1", "-t", "4096", "-o", "json"]
    run = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert [row["n_threads"] for row in json.loads(run.stdout)] == [probe.probe().max_threads]


@pytest.mark.parametrize("backend", ["cpu", pytest.param("llama", marks=needs_llama)])
def test_the_command_runs_an_engine(tiny_model: Callable[..., Path], backend: str) -> None:
    arguments = ["-m", str(tiny_model("llama")), "-p", "32,16", "-n", "4", "-d", "0,8", "-r", "2", "-t", "1"]
    run = CliRunner().invoke(command, [*arguments, "--backend", backend, "-o", "json"], catch_exceptions=False)
    rows = json.loads(run.stdout)
    assert [row["test"] for row in rows] == ["pp32", "pp16", "tg4", "pp32 @ d8", "pp16 @ d8", "tg4 @ d8"]
    for row in rows:
        assert row["backends"] == backend
        assert len(row["samples_ns"]) == 2
        assert min(row["samples_ns"]) > 0
        assert row["peak_rss"] > 1 << 20
        assert row["n_threads"] == 1


def test_the_command_compares_instruction_sets(tiny_model: Callable[..., Path]) -> None:
    sets = [available()[0], "portable"]
    arguments = ["-m", str(tiny_model("llama")), "-p", "32", "-n", "0", "-r", "1", "-t", "1", "--isa", ",".join(sets)]
    run = CliRunner().invoke(command, [*arguments, "-o", "json"], catch_exceptions=False)
    rows = json.loads(run.stdout)
    assert [(row["isa"], row["verdict"].split()[-1]) for row in rows] == [(name, name) for name in sets]
    assert rows[1]["ratio"] == pytest.approx(rows[1]["median_ts"] / rows[0]["median_ts"])


@needs_llama
def test_the_command_compares(tiny_model: Callable[..., Path]) -> None:
    arguments = ["-m", str(tiny_model("llama")), "-p", "32", "-n", "4", "-r", "1", "-t", "1", "--against", "llama"]
    run = CliRunner().invoke(command, [*arguments, "-o", "json"], catch_exceptions=False)
    rows = json.loads(run.stdout)
    assert [(row["test"], row["backends"]) for row in rows] == [
        ("pp32", "cpu"),
        ("pp32", "llama"),
        ("tg4", "cpu"),
        ("tg4", "llama"),
    ]
    assert rows[0]["ratio"] == pytest.approx(rows[0]["median_ts"] / rows[1]["median_ts"])
    assert {row["flash_attn"] for row in rows[1::2]} <= {"on", "off"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["-p", "12,x"], "'x' is not an integer"),
        (["-n", "4,"], "'' is not an integer"),
        (["-t", "1,0"], "0 is neither -1"),
        (["-t", "-2"], "-2 is neither -1"),
        (["-t", "nan"], "'nan' is not an integer"),
        (["-d", "-5"], "-5 is not in the range"),
        (["-n", "99999999999"], "is not in the range"),
        (["-r", "0"], "0 is not in the range"),
        (["--isa", "portable,mmx"], "this processor has"),
        (["--isa", "portable", "--backend", "llama"], "not of llama"),
    ],
)
def test_wrong_flags_are_named(arguments: list[str], message: str) -> None:
    run = CliRunner().invoke(command, arguments)
    assert run.exit_code == 2
    assert message in " ".join(run.output.split())


def test_beyond_the_trained_context_is_told(tiny_model: Callable[..., Path], fakes: list[str]) -> None:
    arguments = ["-m", str(tiny_model("llama")), "-r", "1", "--backend", "cpu", "-o", "json", "-d"]
    within, beyond = (CliRunner().invoke(command, [*arguments, depth]) for depth in ("0", "60000"))
    assert within.exit_code == beyond.exit_code == 0
    assert not within.stderr and "The context of 60512 is longer than the" in beyond.stderr


def test_threads_may_be_left_to_the_machine(tiny_model: Callable[..., Path], fakes: list[str]) -> None:
    wished: list[int | None] = []

    class Process(FakeProcess):
        def __init__(self, path: Path, backend: str, n_ctx: int, n_threads: int | None, **options: Any) -> None:
            super().__init__(path, backend, n_ctx, n_threads, **options)
            wished.append(n_threads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "EngineProcess", Process)
        arguments = ["-m", str(tiny_model("llama")), "--backend", "cpu", "-n", "0", "-r", "1", "-t", "1,-1"]
        run = CliRunner().invoke(command, arguments)
    assert run.exit_code == 0 and wished == [1, None]


def test_an_engine_that_cannot_load_says_so(tiny_model: Callable[..., Path]) -> None:
    with EngineProcess(tiny_model("llama"), "none", 64, 1) as process, pytest.raises(EdgertError, match="none"):
        _ = process.engine


@needs_llama
def test_an_engine_that_dies_is_an_error(tiny_model: Callable[..., Path]) -> None:
    with EngineProcess(tiny_model("llama"), "llama", 64, 1) as process:
        assert process.run(Test(4, 0)) > 0 if process.engine else False
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(EdgertError, match="llama engine ended with signal 9"):
            process.run(Test(4, 0))


def test_the_random_model_runs_and_has_its_shape(tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent / "bench"))
    try:
        from make_random_model import write
    finally:
        sys.path.pop(0)
    path = tmp_path / "random.gguf"
    write(path, n_layer=2, n_embd=256, n_ff=512, n_head=4, n_head_kv=2, n_vocab=512, n_ctx=64)
    with GGUFFile.open(path) as file:
        kinds = {tensor.format.name for tensor in file.tensors.values() if len(tensor.shape) == 2}
        tokenizer = Tokenizer.from_gguf(file)
        deviations = [file.tensors[f"blk.0.{name}.weight"].dequantize().std() for name in ("attn_q", "ffn_down")]
    assert kinds == {"Q4_0"}
    assert deviations == pytest.approx([256**-0.5, 512**-0.5], rel=0.1)
    text = "Any text, also ümlauts: 你好"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with contextlib.closing(backends.load(path, n_ctx=64, n_threads=1)) as backend:
        logits = backend.forward(Batch.of(tokenizer.encode(text), 0))
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10
