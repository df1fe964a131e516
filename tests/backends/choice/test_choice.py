"""`auto`: what is tried, what is taken, what is remembered and what is told."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twins import KINDS, Twin, door, failing, load, machine

import edgert
from edgert import backends
from edgert.backends import choice
from edgert.errors import BackendUnavailableError, RequestError
from edgert.notes import Notes
from edgert.quantize.gguf_file import GGUFFile

# Nothing but the cpu backend can win


@pytest.mark.parametrize(
    ("kinds", "packages"), [((), ("llama_cpp", "onnxruntime")), (("gpu",), ()), (("npu",), ("llama_cpp",)), ((), ())]
)
def test_where_only_the_cpu_can_win_nothing_else_is_opened(
    monkeypatch: pytest.MonkeyPatch, path: Path, opened: list[str], kinds: tuple[str, ...], packages: tuple[str, ...]
) -> None:
    machine(monkeypatch, *kinds, packages=packages)
    with_time = load(path)
    with_time.close()
    assert opened == ["cpu"]
    assert with_time.verdict.requested == "auto"
    assert not Notes("choices").path.exists()


def test_auto_loads_no_other_library_and_costs_nothing(path: Path) -> None:
    code = """
import sys, time
from edgert.backends import choice
from edgert.backends.choice import Wish
choice._portable()
start = time.process_time()
found, absent = choice.candidates(Wish(None, None, False))
print(time.process_time() - start, "llama_cpp" in sys.modules, "onnxruntime" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, *loaded = done.stdout.split()
    assert float(seconds) < 0.02
    assert loaded == ["False", "False"]


def test_an_idle_gpu_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    machine(monkeypatch, "gpu", packages=())
    backend = load(path)
    backend.close()
    assert "the GPU is idle: pip install 'edgert[gpu]'" in str(backend.verdict)
    (trial,) = backend.verdict.trials
    assert (trial.backend, trial.decode) == ("llama", None)


# The fastest is taken


@pytest.mark.parametrize("name", ["llama", "onnx"])
def test_the_fastest_is_taken_and_the_figures_are_told(monkeypatch: pytest.MonkeyPatch, path: Path, name: str) -> None:
    machine(monkeypatch, KINDS[name])
    door(monkeypatch, "cpu", pause=0.004)
    made = door(monkeypatch, name)
    backend = load(path)
    verdict = backend.verdict
    assert (verdict.requested, verdict.backend) == ("auto", name)
    cpu, other = verdict.trials
    assert cpu.decode < other.decode and cpu.prefill < other.prefill
    assert other.same_top == 1.0 and other.kl == pytest.approx(0, abs=1e-6)
    assert f"{other.decode:,.1f} tok/s" in verdict.reason and "beside cpu" in verdict.reason
    assert made[0].options["device"] == KINDS[name]
    assert not made[-1]._closed
    backend.close()


def test_a_slower_one_is_closed_and_the_cpu_runs(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    machine(monkeypatch, "gpu", "npu")
    llama, onnx = door(monkeypatch, "llama", pause=0.01), door(monkeypatch, "onnx", pause=0.02)
    backend = load(path)
    assert backend.verdict.backend == "cpu"
    assert [trial.backend for trial in backend.verdict.trials] == ["cpu", "llama", "onnx"]
    assert "beside llama" in backend.verdict.reason and "beside onnx" in backend.verdict.reason
    assert all(one._closed for one in [*llama, *onnx]) and len(llama) == len(onnx) == 1
    backend.close()


def test_the_choice_is_remembered_for_model_device_version_and_options(
    monkeypatch: pytest.MonkeyPatch, path: Path, tmp_path: Path, opened: list[str]
) -> None:
    machine(monkeypatch, "gpu")
    made = door(monkeypatch, "llama")
    door(monkeypatch, "cpu", pause=0.004)
    first = load(path)
    first.close()
    assert len(made) == 1
    again = load(path)
    again.close()
    assert len(made) == 2, "the winner alone is opened"
    assert str(again.verdict) == str(first.verdict)
    assert again.verdict.trials == first.verdict.trials
    with GGUFFile.open(path) as file:
        note = choice.remembered(file)
    assert note is not None and note["backend"] == "llama"

    for change in ({"n_ctx": 64}, {"cache_type_k": "q8_0"}):
        before = len(Notes("choices").all())
        backends.load(path, **{"n_ctx": 128, "n_threads": 1, **change}).close()
        assert len(Notes("choices").all()) == before + 1
    monkeypatch.setattr(choice, "_version", lambda package: "another")
    before = len(Notes("choices").all())
    load(path).close()
    assert len(Notes("choices").all()) == before + 1


def test_a_damaged_note_is_made_anew(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    machine(monkeypatch, "gpu")
    door(monkeypatch, "llama", pause=0.01)
    load(path).close()
    notes = Notes("choices")
    for damage in ("{", '{"x": 1}', json.dumps({key: {"backend": 3} for key in notes.all()})):
        notes.path.write_text(damage)
        backend = load(path)
        assert len(backend.verdict.trials) == 2
        backend.close()


def test_a_remembered_backend_that_is_gone_is_replaced(
    monkeypatch: pytest.MonkeyPatch, path: Path, caplog: Any
) -> None:
    machine(monkeypatch, "gpu")
    door(monkeypatch, "cpu", pause=0.004)
    door(monkeypatch, "llama")
    load(path).close()
    failing(monkeypatch, "llama", BackendUnavailableError("the driver is gone: install it"))
    backend = load(path)
    backend.close()
    assert backend.verdict.backend == "cpu"
    assert "not llama: the driver is gone: install it" in backend.verdict.reason
    assert "no longer serves" in caplog.text


# What is wished for, and what is told


@pytest.mark.parametrize(("device", "name"), [("gpu", "llama"), ("CUDA0", "llama"), ("npu", "onnx"), ("qnn", "onnx")])
def test_a_named_device_is_taken_though_slower(
    monkeypatch: pytest.MonkeyPatch, path: Path, device: str, name: str
) -> None:
    machine(monkeypatch)
    made = door(monkeypatch, name, pause=0.004)
    backend = load(path, device=device)
    assert backend.verdict.backend == name
    assert made[0].options["device"] == device
    backend.close()


def test_layers_for_a_gpu_ask_for_llama(monkeypatch: pytest.MonkeyPatch, path: Path, caplog: Any, opened: Any) -> None:
    machine(monkeypatch)
    made = door(monkeypatch, "llama", pause=0.004)
    backend = load(path, n_gpu_layers=7)
    assert made[0].options["n_gpu_layers"] == 7
    backend.close()
    load(path, n_gpu_layers=0).close()
    assert len(made) == 1
    failing(monkeypatch, "llama", BackendUnavailableError("no GPU here"))
    Notes("choices").path.unlink()
    with caplog.at_level(logging.WARNING):
        backend = load(path, n_gpu_layers=7)
    backend.close()
    assert "-ngl 7 cannot serve (no GPU here): the cpu backend runs the model" in caplog.text


def test_how_it_is_spread_asks_for_llama(monkeypatch: pytest.MonkeyPatch, path: Path, caplog: Any) -> None:
    machine(monkeypatch)
    made = door(monkeypatch, "llama", pause=0.004)
    spread = {"split_mode": "layer", "tensor_split": (3.0, 1.0), "main_gpu": 1, "rpc": ("elsewhere:50052",)}
    load(path, **spread).close()
    assert {name: made[0].options[name] for name in spread} == spread
    failing(monkeypatch, "llama", BackendUnavailableError("no GPU here"))
    Notes("choices").path.unlink()
    with caplog.at_level(logging.WARNING):
        load(path, tensor_split=(3.0, 1.0)).close()
    assert "--tensor-split cannot serve (no GPU here): the cpu backend runs the model" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"require": True}, "require: says that nothing else will do"),
        ({"require": 1}, "require: must be True or False"),
        ({"device": 3}, "device: must be a name"),
        ({"n_gpu_layers": "all"}, "n_gpu_layers: must be a number"),
        ({"backend": "cpu", "device": "gpu"}, "device: is 'gpu', and the cpu backend"),
        ({"backend": "cpu", "n_gpu_layers": 3}, "n_gpu_layers: gives layers to a GPU"),
        ({"backend": "onnx", "n_gpu_layers": 3}, r"n_gpu_layers: is llama\.cpp's"),
        ({"backend": "onnx", "cache_type_k": "q8_0"}, "cache_type_k: is 'q8_0', and the onnx"),
        ({"backend": "cpu", "wrong": 3}, "wrong: is not an option of this backend"),
        ({"backend": "cpu", "tensor_split": (3, 1)}, "tensor_split: is not an option of this backend"),
        ({"device": "cpu", "split_mode": "row"}, "split_mode: spreads a model over GPUs, and the cpu alone"),
        ({"device": "npu", "rpc": ("here:1",)}, r"rpc: is llama\.cpp's, and npu is ONNX Runtime's"),
    ],
)
def test_wishes_that_contradict_themselves(path: Path, options: Mapping[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        load(path, **options)


def test_the_model_and_its_engine_carry_the_verdict(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    machine(monkeypatch, "gpu")
    door(monkeypatch, "cpu", pause=0.004)
    door(monkeypatch, "llama")
    with edgert.load(path, n_ctx=128, n_threads=1) as model:
        assert model.verdict.backend == "llama"
        assert model.generate("Hello", max_tokens=4, temperature=0).tokens


def test_show_tells_the_choice_before_and_after(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    from edgert.cli.verbs.show import as_text, describe_file

    def told() -> tuple[Any, str]:
        with GGUFFile.open(path) as file:
            facts = {"model": "tiny", "path": str(path), **describe_file(file, None)}
        return facts["engine"]["backend"], as_text(facts)

    machine(monkeypatch)
    assert told()[0] == "cpu" and "nothing that could be faster is here" in told()[1]
    machine(monkeypatch, "npu", packages=())
    assert "so the NPU is idle" in told()[1]
    machine(monkeypatch, "gpu")
    assert told()[0] is None and "cpu, llama are tried when it is first loaded" in told()[1]
    door(monkeypatch, "cpu", pause=0.004)
    door(monkeypatch, "llama")
    load(path).close()
    backend, text = told()
    assert backend == "llama" and "llama on llama's device: prefill" in text and "cpu on" in text


def test_trials_read_as_sentences() -> None:
    trial = choice.Trial("llama", "CUDA0", prefill=1234.5, decode=56.78, same_top=0.96, kl=0.00123)
    assert str(trial) == (
        "llama on CUDA0: prefill 1,234 tok/s, decode 56.8 tok/s; "
        "same top token as the cpu backend in 96 %, mean KL 0.0012"
    )
    assert str(replace(trial, obstacle="slow", decode=None)) == "llama on CUDA0: not used: slow"


# What is asked of a backend


def test_agreement_is_that_of_probabilities() -> None:
    a = np.array([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]], np.float32)
    assert choice.agreement(a, a + 5) == (1.0, pytest.approx(0, abs=1e-12))
    b = np.array([[2.0, 1.0, 0.0], [3.0, 0.0, 0.0]], np.float32)
    same_top, kl = choice.agreement(a, b)
    p, q = (np.exp(x[0]) / np.exp(x[0]).sum() for x in (a, b))
    assert same_top == 0.5
    assert kl == pytest.approx(float((p * np.log(p / q)).sum()) / 2)
    assert np.isnan(choice.agreement(a, np.full_like(a, np.nan))[1])
    assert choice.agreement(a, b[:1])[0] == 0.0


def test_near_ties_agree() -> None:
    a = np.array([[1.0, 1.2, -5.0]], np.float32)
    assert choice.agreement(a, np.array([[1.2, 1.0, -5.0]], np.float32))[0] == 1.0
    assert choice.agreement(a, np.array([[1.0, 1.2, 3.0]], np.float32))[0] == 0.0


def test_rates_are_those_of_the_clock(path: Path) -> None:
    with GGUFFile.open(path) as file:
        backend = type("Slow", (Twin,), {"pause": 0.01})(file, n_ctx=128, n_threads=1)
    prefill, decode = choice.rates(backend)
    backend.close()
    assert 50 < decode < 100
    assert prefill < 128 / 0.01
    assert backend.length(0) == 0
