"""Perplexity and KL divergence: against their definitions in float64, and against the plain reference."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from reference import Reference

from edgert import evaluate as module
from edgert.backends.base import Backend, Batch, Verdict
from edgert.cli.verbs.perplexity import command
from edgert.errors import EdgertError, RequestError
from edgert.evaluate import check_same_vocabulary, chunks_of, evaluate, scored
from edgert.quantize import divergence
from edgert.quantize.divergence import Tally
from edgert.quantize.gguf_file import GGUFFile
from edgert.tokenizer import Tokenizer


class Bigrams(Backend):
    """A model whose logits after a token are that token's row of a table."""

    def __init__(self, table: NDArray[np.float32], n_batch: int = 64) -> None:
        self.table = table
        self.n_vocab = table.shape[1]
        self.n_ctx, self.n_batch, self.n_seq_max = 4096, n_batch, 1
        self.capabilities = frozenset({"truncate"})
        self.verdict = Verdict("test", "test", "test", "test")
        self.cached: list[int] = []
        self.most_wanted = 0

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        assert len(batch) <= self.n_batch
        assert batch.positions.tolist() == list(range(len(self.cached), len(self.cached) + len(batch)))
        self.cached += batch.tokens.tolist()
        self.most_wanted = max(self.most_wanted, int(batch.wanted.sum()))
        return self.table[batch.tokens[batch.wanted]].copy()

    def length(self, sequence: int) -> int:
        return len(self.cached)

    def fork(self, source: int, target: int, length: int) -> None:
        raise NotImplementedError

    def truncate(self, sequence: int, length: int) -> None:
        del self.cached[length:]

    def memory(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


def table(n_vocab: int, seed: int, scale: float = 3.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, scale, (n_vocab, n_vocab)).astype(np.float32)


def log_softmax(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    x = rows.astype(np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.fixture
def chunks() -> NDArray[np.int32]:
    return np.random.default_rng(5).integers(0, 300, (7, 48)).astype(np.int32)


def test_perplexity_is_that_of_the_second_half(chunks: NDArray[np.int32]) -> None:
    logits = table(300, 1)
    result = evaluate(Bigrams(logits), chunks)
    before, after = chunks[:, 24:47].ravel(), chunks[:, 25:].ravel()
    nll = -log_softmax(logits)[before, after]
    assert result.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-6)
    error = nll.std(ddof=1) / math.sqrt(len(nll)) * math.exp(nll.mean())
    assert result.perplexity_error == pytest.approx(error, rel=1e-6)
    assert (result.n_tokens, result.n_chunks, result.n_ctx) == (7 * 23, 7, 48)
    assert result.against is None


@pytest.mark.parametrize("n_batch", [1, 5, 24, 64])
def test_divergence_is_its_definition(chunks: NDArray[np.int32], n_batch: int) -> None:
    a, b = table(300, 1), table(300, 1) + table(300, 2, 0.2)
    other = evaluate(Bigrams(b, n_batch), chunks, Bigrams(a)).against
    before, after = chunks[:, 24:47].ravel(), chunks[:, 25:].ravel()
    p, q = log_softmax(a)[before], log_softmax(b)[before]
    kld = (np.exp(p) * (p - q)).sum(1)
    rows = np.arange(len(before))
    difference = p[rows, after] - q[rows, after]
    same = (p.argmax(1) == q.argmax(1)).mean()
    assert other is not None
    assert other.kld_mean == pytest.approx(kld.mean(), rel=1e-4)
    assert other.kld_error == pytest.approx(kld.std(ddof=1) / math.sqrt(len(kld)), rel=1e-4)
    assert other.kld_max == pytest.approx(kld.max(), rel=1e-4)
    assert other.kld_99 == pytest.approx(np.percentile(kld, 99), rel=1e-4)
    assert other.kld_999 == pytest.approx(np.percentile(kld, 99.9), rel=1e-4)
    assert other.same_top == pytest.approx(same)
    assert other.ratio == pytest.approx(math.exp(difference.mean()), rel=1e-5)
    assert other.perplexity_base == pytest.approx(math.exp(-p[rows, after].mean()), rel=1e-5)
    assert 0 < same < 1
    assert kld.mean() > 1e-3


def test_a_model_is_no_way_from_itself(chunks: NDArray[np.int32]) -> None:
    other = evaluate(Bigrams(table(300, 1)), chunks, Bigrams(table(300, 1))).against
    assert other is not None
    assert (other.kld_mean, other.kld_max, other.same_top, other.ratio) == (0, 0, 1, 1)


def test_few_logits_are_held_at_once(chunks: NDArray[np.int32], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evaluate(Bigrams(table(300, 1)), chunks, Bigrams(table(300, 2)))
    monkeypatch.setattr(module, "STEP_LOGITS", 4 * 300)
    monkeypatch.setattr(divergence, "CACHED_LOGITS", 2 * 300)
    one, other = Bigrams(table(300, 1)), Bigrams(table(300, 2))
    assert evaluate(one, chunks, other) == whole
    assert one.most_wanted == other.most_wanted == 4


def test_every_place_is_computed_once_and_the_last_never(chunks: NDArray[np.int32]) -> None:
    backend = Bigrams(table(300, 1), n_batch=10)
    places = [i for part, _ in scored(backend, chunks[0], 7) for i in range(part.start, part.stop)]
    assert places == list(range(24, 47))
    assert backend.cached == chunks[0, :47].tolist()


def test_other_vocabularies_are_refused_with_both_sizes(chunks: NDArray[np.int32]) -> None:
    with pytest.raises(EdgertError, match="300 and 301"):
        evaluate(Bigrams(table(300, 1)), chunks, Bigrams(table(301, 1)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(chunks: NDArray[np.int32], bad: float) -> None:
    damaged = table(300, 1)
    damaged[chunks[3, 30], 7] = bad
    with pytest.raises(EdgertError, match="NaN or infinite"):
        evaluate(Bigrams(damaged), chunks)
    with pytest.raises(EdgertError, match="NaN or infinite"):
        evaluate(Bigrams(table(300, 1)), chunks, Bigrams(damaged))


def test_a_forbidden_token_costs_nothing_but_itself() -> None:
    tally = Tally()
    logits = np.array([[0.0, 1.0, -np.inf]], np.float32)
    tally.add(logits, np.array([1], np.int32))
    assert tally.perplexity == pytest.approx(1 + math.exp(-1))


def tokenizer_of(path: Path) -> Tokenizer:
    with GGUFFile.open(path) as file:
        return Tokenizer.from_gguf(file)


TEXT = "Hello world, you are the user and this is the world. " * 40


def test_each_chunk_starts_with_the_begin_token(tiny_model: Callable[..., Path]) -> None:
    tokenizer = tokenizer_of(tiny_model("gemma3"))
    assert tokenizer.add_bos
    chunks = chunks_of(tokenizer, TEXT, 32, limit=3)
    ids = tokenizer.encode(TEXT)
    assert chunks.shape == (3, 32)
    assert (chunks[:, 0] == tokenizer.bos_id).all()
    assert chunks[1, 1:].tolist() == ids[33:64]


def test_too_little_text_says_how_much_there_is(tiny_model: Callable[..., Path]) -> None:
    tokenizer = tokenizer_of(tiny_model("llama"))
    n = len(tokenizer.encode("Hello world"))
    with pytest.raises(RequestError, match=rf"has {n} tokens and a chunk takes 512"):
        chunks_of(tokenizer, "Hello world", 512)


def test_too_little_text_is_told_by_the_flag(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Hello world", encoding="utf-8")
    run = CliRunner().invoke(command, ["-m", str(tiny_model("llama")), "-f", str(text)])
    assert run.exit_code == 2
    assert re.search(r"Error: --file has \d+ tokens and a chunk takes 512: give more text", run.output)


def test_vocabularies_of_equal_size_that_differ_are_refused(tiny_model: Callable[..., Path]) -> None:
    a, b = tokenizer_of(tiny_model("llama")), tokenizer_of(tiny_model("gemma3"))
    check_same_vocabulary(a, a)
    with pytest.raises(EdgertError, match=r"token \d+ is b"):
        check_same_vocabulary(a, b)


@pytest.mark.parametrize("backend", ["cpu", "llama"])
def test_the_command_agrees_with_the_reference(tiny_model: Callable[..., Path], tmp_path: Path, backend: str) -> None:
    if backend == "llama":
        pytest.importorskip("llama_cpp")
    path = tiny_model("llama", quant=Type.F32)
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    arguments = ["-m", str(path), "-f", str(text), "-c", "64", "--chunks", "3", "-t", "1", "--json"]
    run = CliRunner().invoke(command, [*arguments, "--backend", backend], catch_exceptions=False)
    figures = json.loads(run.stdout)
    chunks = chunks_of(tokenizer_of(path), TEXT, 64, 3)
    reference = Reference(path)
    rows = np.concatenate([log_softmax(reference.logits(chunk))[32:63] for chunk in chunks])
    nll = -rows[np.arange(len(rows)), chunks[:, 33:].ravel()]
    assert figures["perplexity"] == pytest.approx(math.exp(nll.mean()), rel=2e-3)
    assert (figures["n_tokens"], figures["n_chunks"]) == (93, 3)
    assert figures["backend"] == backend


def test_the_command_compares_engines(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    path = tiny_model("llama", quant=Type.F32)
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    arguments = ["-m", str(path), "-f", str(text), "-c", "64", "--chunks", "2", "-t", "1", "--against", "llama"]
    run = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)
    figures = json.loads(run.stdout)
    assert (figures["backend"], figures["against_backend"]) == ("cpu", "llama")
    assert 0 <= figures["against"]["kld_mean"] < 1e-3
    table = CliRunner().invoke(command, arguments, catch_exceptions=False).stdout
    assert "mean KLD" in table
    assert f"perplexity  {figures['perplexity']:.4f}" in table


def test_a_file_of_another_vocabulary_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    other = tiny_model("llama", n_vocab=400)
    arguments = ["-m", str(tiny_model("llama")), "-f", str(text), "-c", "64", "--against", str(other)]
    with pytest.raises(EdgertError, match="384 and 400"):
        CliRunner().invoke(command, arguments, catch_exceptions=False)


def test_text_that_is_not_utf8_is_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"Hello \xff world")
    run = CliRunner().invoke(command, ["-m", str(tiny_model("llama")), "-f", str(text)])
    assert run.exit_code == 1
    assert "not UTF-8 at byte 6" in str(run.exception)
