"""`edgert sensitivity`: measured on a tiny model, shown from a file, refused with a sentence."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from edgert import cli
from edgert.cli.verbs.sensitivity import as_text


def test_a_tiny_model_is_measured_and_its_file_shown_again(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_model("llama", quant={})
    text = tmp_path / "text.txt"
    text.write_text("Hello world and the hello world is on her hand. " * 400, encoding="utf-8")
    out = tmp_path / "s.json"
    arguments = ["sensitivity", str(path), "--calibration", str(text), "--tokens", "4096", "--types", "q4_0,Q8_0"]
    assert cli.call([*arguments, "--groups", "4", "-t", "1", "-o", str(out)]) == 0
    shown, told = capsys.readouterr()
    assert "quantized already" not in told
    assert "ffn_down 0-1" in shown and "█" in shown and str(out) in shown
    content = json.loads(out.read_text())
    assert set(content["errors"]["blk.0.ffn_down.weight"]) == {"Q4_0", "Q8_0"}

    assert cli.call(["sensitivity", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["formats"] == ["Q4_0", "Q8_0"]
    for group in found["groups"]:
        assert 0 < group["kld"]["Q8_0"] < group["kld"]["Q4_0"], group


def test_of_a_quantized_model_it_says_what_its_figures_are_worth(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_model("llama", quant=gguf.GGMLQuantizationType.Q4_0)
    assert cli.call(["sensitivity", str(path), "--tokens", "2048", "--types", "q8_0", "--groups", "2", "-t", "1"]) == 0
    assert "is quantized already" in capsys.readouterr().err


def test_large_figures_do_not_touch() -> None:
    row = {"group": "ffn_up 3", "kld": {"Q4_K": 0.000028, "Q5_K": 288.277604, "Q6_K": 12281.9, "Q8_0": None}}
    line = as_text(["Q4_K", "Q5_K", "Q6_K", "Q8_0"], [row], 7).splitlines()[3]
    assert line.split() == ["ffn_up", "3", "0.000028", "288.3", "12281.9", "-"]


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_model: Callable[..., Path]) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert cli.call(["sensitivity", str(other)]) == 1
    assert "holds no sensitivities" in capsys.readouterr().err
    assert cli.call(["sensitivity", str(tiny_model("llama")), "--types", "Q4_17"]) == 2
    assert "'Q4_17' is no type" in capsys.readouterr().err


@pytest.fixture
def figures(tmp_path: Path) -> Path:
    from edgert.quantize.sensitivity import Probe, Sensitivity

    path = tmp_path / "s.json"
    Sensitivity("f", {"a": {"Q4_0": 0.5, "Q8_0": 0.01}}, {"a": 0.25}, [Probe(("a",), "Q4_0", 0.125, 0.5)], 7).save(path)
    return path


def test_a_picture(figures: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs edgert[plots]")
    assert cli.call(["sensitivity", str(figures), "--png", str(tmp_path / "s.png")]) == 0
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"


def test_without_matplotlib_a_picture_is_refused_before_the_work(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("edgert.cli.verbs.sensitivity.measured", None)  # whoever measures fails
    assert cli.call(["sensitivity", str(tiny_model("llama")), "--png", str(tmp_path / "s.png")]) == 1
    said = capsys.readouterr()
    assert said.err == 'edgert: A picture needs matplotlib: pip install "edgert[plots]", or leave --png out.\n'
    assert not said.out and not (tmp_path / "s.png").exists()
