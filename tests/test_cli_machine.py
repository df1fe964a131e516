"""`edgert plan`, `doctor` and `devices`: what they print, their JSON, their exit codes."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edgert import cli
from edgert.backends import excerpts, selftest
from edgert.backends.cpu import rates
from edgert.backends.cpu.rates import Rates
from edgert.backends.selftest import Finding
from edgert.cli.verbs import devices, doctor
from edgert.devices import gpus, probe
from edgert.errors import DoesNotFitError, EdgertError

MACHINE = Rates(2, "amx", 500e9, {2048: 300e9}, 250e9, 60e9, {16 << 20: 45e9, 256 << 20: 30e9})

EXCERPTS = excerpts.Steps((0, 4096), (1.0, 2.0), (0.1, 0.2), (0.01, 0.02), (2, 4))


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates that need no measurement; memory and disk that nobody else has taken."""
    monkeypatch.setattr(rates, "rates", lambda *_, **__: MACHINE)
    monkeypatch.setattr(excerpts, "steps", lambda *_, **__: EXCERPTS)
    machine = replace(probe.probe(), memory_total=16 << 30, memory_available=8 << 30)
    monkeypatch.setattr(probe, "probe", lambda *_: machine)
    usage = shutil.disk_usage(".")._replace(free=64 << 30)
    monkeypatch.setattr(doctor, "shutil", SimpleNamespace(disk_usage=lambda _: usage))


def edgert(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli.group, list(arguments), env=environment)


# plan


def test_a_plan_for_reading_and_as_json(tiny_model: Callable[..., Path]) -> None:
    path = str(tiny_model("llama"))
    done = edgert("plan", "-m", path, "-c", "256")
    assert done.exit_code == 0
    for words in ("memory ", "fits ", "the largest context that fits is 512", "rates ", "basis    2 threads, amx"):
        assert words in done.output
    facts = json.loads(edgert("plan", "-m", path, "-c", "0", "--json").output)
    place = facts["places"][0]
    assert facts["n_ctx"] == 512 and place["backend"] == "cpu" and place["fits"]
    assert {"weights", "kv", "draft", "prompt_cache", "buffers", "program", "total"} == set(place["memory"])
    assert place["prefill"] > 0 and place["decode"] >= place["decode_at_end"] > 0
    assert json.loads(edgert("plan", "-m", path, "--no-measure", "--json").output)["places"][0]["prefill"] is None


def test_a_plan_for_several_conversations_and_a_draft(tiny_model: Callable[..., Path]) -> None:
    path, draft = str(tiny_model("llama")), str(tiny_model("llama", n_layer=1))

    def memory(*arguments: str) -> dict[str, int]:
        found: dict[str, int] = json.loads(edgert("plan", "-m", path, "-c", "128", "--json", *arguments).output)[
            "places"
        ][0]["memory"]
        return found

    one = memory()
    assert memory("-np", "3")["kv"] == 3 * one["kv"]
    text = edgert("plan", "-m", path, "-c", "128", "-np", "3", "--draft", draft).output
    assert "3 conversations of 128 tokens" in text and "tok/s for one conversation alone, without guesses" in text
    assert memory("--draft", draft)["draft"] > 0 == one["draft"]
    assert memory("-ctk", "q4_0", "-ctv", "q4_0")["kv"] < one["kv"]
    other = edgert("plan", "-m", path, "--draft", str(tiny_model("llama", n_vocab=400)))
    assert isinstance(other.exception, EdgertError) and "must share its model's vocabulary" in str(other.exception)


def test_a_plan_counts_the_draft_that_comes_with_the_model(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> None:
    """On the cpu backend, which alone guesses unasked."""
    draft = tiny_model("llama", n_layer=1)
    monkeypatch.setattr("edgert.speculation.loading.find_made_for", lambda _file: draft)
    facts = json.loads(edgert("plan", "-m", str(tiny_model("llama")), "-c", "128", "--json").output)
    assert facts["draft"] == str(draft)
    for place in facts["places"]:
        assert (place["memory"]["draft"] > 0) == (place["backend"] == "cpu")


def test_a_plan_that_fits_nowhere_fails_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> None:
    machine = replace(probe.probe(), memory_available=95_000_000)
    monkeypatch.setattr(probe, "probe", lambda *_: machine)
    monkeypatch.setattr(probe, "process_memory", lambda: (0, 0))
    path = str(tiny_model("llama", n_ctx=100_000))
    arguments = ["plan", "-m", path, "-c", "90000", "--json"]
    done = CliRunner().invoke(cli.group, arguments)
    assert isinstance(done.exception, EdgertError)
    assert "MiB are missing; " in str(done.exception) and "at most -c" in str(done.exception)
    assert cli.call(arguments) == 1
    place = json.loads(done.output)["places"][0]
    assert not place["fits"] and place["missing"] > 0 and place["largest_context"] < 90_000


def test_what_fits_nowhere_is_said_at_once(monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]) -> None:
    """Nothing is measured for it: no rates are wanted, and adding up those of so many steps would take minutes."""

    def measured(*_: Any, **__: Any) -> Any:
        raise AssertionError("what does not fit has no rates")

    monkeypatch.setattr(rates, "rates", measured)
    monkeypatch.setattr(excerpts, "steps", measured)
    path = str(tiny_model("llama"))
    done = edgert("plan", "-m", path, "-c", "999999999")
    assert isinstance(done.exception, DoesNotFitError)
    assert "MiB are missing; at most -c" in str(done.exception) and "rates" not in done.output
    assert "basis" not in done.output and "too big" in done.output


# devices


def test_devices_tells_bandwidth_and_int8_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = devices.gather(True)
    assert facts["cpu"]["read_bytes_per_second"] == 30_000_000_000
    assert facts["cpu"]["int8_per_second"] == 250_000_000_000
    text = devices.as_text(facts)
    assert "read at 30.0 GB/s" in text and "int8 products 250 G multiply-adds/s" in text
    monkeypatch.setattr(rates, "rates", lambda *_, **__: replace(MACHINE, busy=True))
    assert "both measured while other programs ran" in devices.as_text(devices.gather(True))
    quick = devices.gather(False)
    assert quick["cpu"]["int8_per_second"] is None and "int8" not in devices.as_text(quick)


# doctor


def checks(*arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = edgert("doctor", "--json", *arguments, **environment)
    found = json.loads(done.output)
    assert found["problems"] == sum(check["status"] == "problem" for check in found["checks"])
    return done.exit_code, {check["name"]: check for check in found["checks"]}


def test_a_sound_environment_has_no_problem(tmp_path: Path) -> None:
    code, found = checks("--no-self-test", EDGERT_MODELS=str(tmp_path / "models"))
    assert code == 0
    assert {"python", "edgert", "numba", "llama-cpp-python", "processor", "memory", "kernels", "models"} <= set(found)
    assert found["EDGERT_MODELS"]["text"] == str(tmp_path / "models")
    assert "nothing is wrong" in edgert("doctor", "--no-self-test").output


def test_what_is_wrong_is_named_with_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.gguf").write_bytes(bytes(3_000_000))
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "numba" else real(package))
    machine = replace(probe.probe(), memory_available=50 << 20)
    monkeypatch.setattr(probe, "probe", lambda *_: machine)
    note = "NVIDIA's driver does not answer: install or restart it"
    monkeypatch.setattr(gpus, "gpus", lambda *_: [gpus.Gpu("NVIDIA Test", "nvidia", note=note)])
    places = {"EDGERT_CACHE": str(tmp_path / "file" / "cache"), "EDGERT_MODELS": str(tmp_path / "models")}
    code, found = checks("--no-self-test", **places)
    assert code == 1
    assert found["numba"]["status"] == "problem" and found["numba"]["advice"] == "pip install numba"
    assert found["memory"]["status"] == "problem" and found["memory"]["text"].startswith("50 MiB")
    assert found["kernels"]["status"] == "problem" and "EDGERT_CACHE" in found["kernels"]["advice"]
    assert found["models"]["status"] == "ok" and ", 3 MB," in found["models"]["text"]
    assert found["gpu"]["status"] == "note" and found["gpu"]["advice"] == note
    text = edgert("doctor", "--no-self-test", **places).output
    assert "BAD  numba" in text and text.rstrip().endswith("problems")


def test_a_package_that_pip_has_not_installed_is_none_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "llama-cpp-python" else real(package))
    monkeypatch.setattr(gpus, "gpus", lambda *_: [gpus.Gpu("NVIDIA Test", "nvidia")])
    monkeypatch.setattr(doctor, "find_spec", lambda module: SimpleNamespace(origin=f"/built/{module}/__init__.py"))
    found = checks("--no-self-test")[1]["llama-cpp-python"]
    assert found["status"] == "ok" and "/built/llama_cpp/" in found["text"]
    monkeypatch.setattr(doctor, "find_spec", lambda module: None)
    found = checks("--no-self-test")[1]["llama-cpp-python"]
    assert "is not installed" in found["text"]


def test_a_full_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(doctor, "shutil", SimpleNamespace(disk_usage=lambda _: usage))
    code, found = checks("--no-self-test")
    assert code == 1 and "Make room" in found["models"]["advice"]


def test_backends_are_tested_for_real() -> None:
    code, found = checks()
    assert code == 0
    assert found["cpu"]["status"] == "ok" and "answers as itself" in found["cpu"]["text"]
    import importlib.util

    for name, module in (("llama", "llama_cpp"), ("onnx", "onnxruntime")):
        status = "ok" if importlib.util.find_spec(module) else "note"
        assert found[name]["status"] == status, found[name]
        assert status == "note" or "answers as the cpu backend" in found[name]["text"]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -ILL $$", "its process ended with signal 4"),
        ("echo Segfault >&2; exit 3", "its process ended with status 3: Segfault"),
        ("sleep 20", "it had not ended after 1 seconds"),
        ("no such program", "cannot be started"),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_a_backend_that_crashes_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, words: str
) -> None:
    program = tmp_path / "python"
    if script != "no such program":
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(selftest, "TIMEOUT", 1.0 if "sleep" in script else 30.0)
    assert words in selftest.run("cpu", tmp_path).obstacle


def test_wrong_answers_and_missing_ones_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Finding("cpu", "x", "its answers are wrong: mean KL divergence 3")
    monkeypatch.setattr(selftest, "run", lambda name, _: wrong)
    code, found = checks()
    assert code == 1 and found["cpu"]["status"] == "problem" and "EDGERT_ISA" in found["cpu"]["advice"]
    assert all(found[name]["status"] == "note" for name in ("llama", "onnx"))


def test_a_self_test_notices_wrong_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from edgert.backends.cpu.backend import CpuBackend

    assert selftest._test("cpu", tmp_path).obstacle == ""
    real: Any = CpuBackend.step

    def bent(self: Any, token: int, sequence: int) -> Any:
        return real(self, token, sequence)[::-1]

    monkeypatch.setattr(CpuBackend, "step", bent)
    assert "its answers are wrong" in selftest._test("cpu", tmp_path).obstacle
