"""Every program in samples/ runs and does what its first lines say."""

from __future__ import annotations

import gc
import json
import random
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import edgert
from edgert.quantize.gguf_file import GGUFFile
from edgert.quantize.quantizer import quantize
from edgert.tokenizer import Tokenizer

Runner = Callable[..., str]
ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "samples"
DRAFT = ROOT / "edgert" / "assets" / "smollm2-draft.gguf"


@pytest.fixture
def run(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Runner]:
    def runner(name: str, arguments: Sequence[str] = ()) -> str:
        monkeypatch.setattr(sys, "argv", [*arguments] or [name, str(smollm2_path)])
        try:
            runpy.run_path(str(SAMPLES / name), run_name="__main__")
        except SystemExit as end:  # which click ends with
            assert not end.code
        return capsys.readouterr().out

    yield runner
    gc.collect()  # a program's globals and its model refer to each other


def test_stream_chat(run: Runner) -> None:
    output = run("stream_chat.py")
    counts = re.findall(r"\[(?:stop|length): (\d+) tokens read, (\d+) from the cache\]", output)
    assert len(counts) == 2
    (first, nothing), (second, cached) = (map(int, pair) for pair in counts)
    assert nothing == 0
    assert cached >= first
    assert second < cached


def test_async_requests(run: Runner) -> None:
    lines = run("async_requests.py").splitlines()
    for question, line in zip(("Name a colour.", "Name an animal.", "Name a river."), lines, strict=False):
        assert re.match(re.escape(question) + " -> .", line)
    assert len("".join(lines[3:])) > 10


def test_time_limit(run: Runner) -> None:
    assert re.search(r"\[cancelled after \d+ tokens\]\n$|\[length after \d+ tokens\]\n$", run("time_limit.py"))


def test_choose(run: Runner) -> None:
    scores = [float(line.split()[0]) for line in run("choose.py").splitlines()]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 3


def test_frequent_tokens(run: Runner, smollm2_path: Path, tmp_path: Path) -> None:
    chats, out = tmp_path / "chats.jsonl", tmp_path / "draft.gguf"
    messages = [{"role": "user", "content": "zebra"}, {"role": "assistant", "content": "The sea. The sea, the sea."}]
    chats.write_text(json.dumps({"messages": messages}) + "\n")
    arguments = ["frequent_tokens.py", str(DRAFT), str(out), "--chats", str(chats), "--keep", "5"]
    assert run("frequent_tokens.py", arguments).endswith(": 5 frequent tokens\n")
    with GGUFFile.open(out) as file:
        frequent = file.metadata["edgert.draft.frequent_tokens"].tolist()
        tokenizer = Tokenizer.from_gguf(file)
    assert set(frequent[: len(tokenizer.end_ids)]) == set(tokenizer.end_ids)
    assert tokenizer.encode(" sea")[0] in frequent and tokenizer.encode("zebra")[0] not in frequent
    options = {"max_tokens": 24, "temperature": 0.0}
    with edgert.load(smollm2_path, spec="off", n_ctx=256) as model:
        expected = model.generate("The sea. The", **options).text
    with edgert.load(smollm2_path, draft=out, spec="draft", spec_min=2, spec_max=2, n_ctx=256) as model:
        reply = model.generate("The sea. The", **options)
    assert reply.text == expected and reply.stats.draft_n > 0


@pytest.mark.slow
def test_distill_draft(run: Runner, smollm2_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    rows, out = tmp_path / "rows.jsonl", tmp_path / "draft.gguf"
    draw = random.Random(0)
    chats = [{"ids": [draw.randrange(100, 110) for _ in range(40)], "n_prompt": 8, "heat": 0.0} for _ in range(30)]
    rows.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    arguments = ["distill_draft.py", str(smollm2_path), "--out", str(out), "--rows", str(rows)]
    arguments += ["--minutes", "0.1", "--device", "cpu"]
    output = run("distill_draft.py", arguments)
    losses = [float(value) for value in re.findall(r"KL ([\d.]+)", output)]
    assert losses and losses[0] < 20
    assert len(re.findall(r"guesses of [468]: \d+\.\d\d accepted", output)) == 3
    assert len(rows.read_text().splitlines()) > 30
    with edgert.load(smollm2_path, draft=out, spec="draft", spec_min=2, spec_max=2, n_ctx=256) as model:
        assert model.generate("Hello", max_tokens=8, temperature=0).stats.draft_n > 0


@pytest.mark.slow
def test_a_draft_that_learned_on_the_grid_of_q4_0_loses_nothing_to_it(
    run: Runner, smollm2_path: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    rows, out, packed = tmp_path / "rows.jsonl", tmp_path / "draft.gguf", tmp_path / "q4_0.gguf"
    draw = random.Random(0)
    chats = [{"ids": [draw.randrange(100, 110) for _ in range(40)], "n_prompt": 8, "heat": 0.0} for _ in range(30)]
    rows.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    arguments = ["distill_draft.py", str(smollm2_path), "--out", str(out), "--rows", str(rows), "--only", "learn"]
    run("distill_draft.py", [*arguments, "--qat", "--minutes", "0.1", "--device", "cpu"])
    quantize(out, packed, budget="q4_0", embedding_type="q4_0", calibration=())
    with GGUFFile.open(out) as learned, GGUFFile.open(packed) as kept:
        for name, tensor in learned.tensors.items():
            assert kept.tensors[name].format.name == ("F32" if "norm" in name else "Q4_0")
            assert np.array_equal(tensor.dequantize(), kept.tensors[name].dequantize())


def test_every_sample_has_its_test() -> None:
    tested = set(re.findall(r'run\("(\w+\.py)"[,)]', Path(__file__).read_text()))
    own = {path.name for path in SAMPLES.glob("*.py")}
    assert own == tested
