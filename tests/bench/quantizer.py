"""Files of edgert quantize beside llama-quantize's of the same size, judged on held-out text by both sides' tools.

    python tests/bench/quantizer.py SOURCE BASE.gguf --llama BIN --calibration C.jsonl --calibration V.txt \
        --text T.txt --text H.jsonl [--types Q4_K_M,Q4_K_S,IQ4_NL,Q4_0] [--chunks 16] [--noise 0.1] [--keep DIR]

SOURCE is what edgert quantizes, BASE.gguf the same weights as BF16 for llama.cpp, written where it does not exist. BIN
is a folder with llama-quantize and, for its judgement, llama-perplexity. Both sides take one importance matrix, which
edgert collects from the calibration texts; edgert gets as its budget the bytes of llama-quantize's file. A .jsonl text
is chats, rendered with the model's template; llama-perplexity reads the same rendering as plain text.

A type may have flags of llama-quantize before it ("--pure Q5_K"). A SOURCE that was quantized before flatters whoever
finds its grid again. --noise adds so much of each matrix's standard deviation to BASE, which edgert then quantizes too.
Figures are printed as they come; with --keep a run that is stopped goes on where it was.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np

from edgert.backends import load
from edgert.evaluate import chunks_of, evaluate
from edgert.quantize import rounding
from edgert.quantize.formats import FORMATS
from edgert.quantize.gguf_file import GGUFFile
from edgert.quantize.gguf_value import Value
from edgert.quantize.gguf_writer import Writer
from edgert.quantize.source import open_source
from edgert.template import ChatTemplate
from edgert.tokenizer import Tokenizer

Figures = dict[str, float]

FIGURES = {
    "mean": r"Mean\s+KLD:\s+([\d.]+)",
    "99 %": r"99\.0%\s+KLD:\s+([\d.]+)",
    "99.9 %": r"99\.9%\s+KLD:\s+([\d.]+)",
    "same top": r"Same top p:\s+([\d.]+)",
}


def run(*command: object) -> str:
    """A program's output. Raises: click.ClickException with its last lines when it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise click.ClickException(f"{command[0]} failed:\n" + "\n".join((done.stdout + done.stderr).splitlines()[-8:]))
    return done.stdout + done.stderr


def write_base(source: Path, base: Path, noise: float) -> None:
    """The source's values as BF16, each matrix with normal noise of so much of its standard deviation."""
    rng = np.random.default_rng(1)
    with open_source(source, allow_requantize=True) as opened:
        plan = [(n, t.shape, FORMATS["F32" if len(t.shape) == 1 else "BF16"]) for n, t in opened.tensors.items()]
        facts = {"general.file_type": Value.u32(32), "general.quantization_version": Value.u32(2)}
        with Writer(base, opened.metadata | facts, plan) as writer:
            for name, shape, format in plan:
                values = opened.tensors[name].rows()
                if format.name == "BF16" and noise:
                    scale = np.float32(noise * values.std())
                    values = values + scale * rng.standard_normal(values.shape, dtype=np.float32)
                writer.write(name, rounding.quantize(values.reshape(-1, shape[-1]), format))


def plain(text: Path, base: Path, folder: Path) -> Path:
    """The text as llama-perplexity reads it: chats are rendered."""
    if text.suffix != ".jsonl":
        return text
    with GGUFFile.open(base) as file:
        template = ChatTemplate.from_gguf(file)
    assert template is not None
    out = folder / f"{text.stem}.txt"
    chats = (json.loads(line)["messages"] for line in text.read_text(encoding="utf-8").splitlines() if line.strip())
    out.write_text("".join("".join(template.render(m, add_generation_prompt=False)) for m in chats), encoding="utf-8")
    return out


class Llama:
    """llama-perplexity --kl-divergence as the judge; what the base says of a text is computed once."""

    name = "llama.cpp"

    def __init__(self, tools: Path, base: Path, n_chunks: int, threads: int, folder: Path) -> None:
        self._tool, self._base, self._folder = tools / "llama-perplexity", base, folder
        self._common = ("--chunks", n_chunks, "-c", 512, "-t", threads)
        self._base_of = cache(self._base_logits)

    def _base_logits(self, text: Path) -> tuple[Path, Path]:
        read, logits = plain(text, self._base, self._folder), self._folder / f"{text.stem}.logits"
        if not logits.exists():
            part = logits.with_suffix(".part")
            run(self._tool, "-m", self._base, "-f", read, *self._common, "--kl-divergence-base", part)
            part.replace(logits)
        return read, logits

    def judge(self, text: Path, file: Path) -> Figures:
        """What it prints of a file on a text."""
        read, logits = self._base_of(text)
        said = run(self._tool, "-m", file, "-f", read, *self._common, "--kl-divergence-base", logits, "--kl-divergence")
        found = {name: re.findall(pattern, said) for name, pattern in FIGURES.items()}
        if not all(found.values()):
            raise click.ClickException(f"llama-perplexity said no figures of {file}:\n{said[-2000:]}")
        return {name: float(figures[0]) for name, figures in found.items()}


class Edgert:
    """edgert's figures, through its int8 kernels; chats are read with their control tokens."""

    name = "edgert"

    def __init__(self, base: Path, n_chunks: int, threads: int) -> None:
        self._base, self._n_chunks, self._threads = base, n_chunks, threads
        self._chunks_of = cache(self._chunks)

    def _chunks(self, text: Path) -> Any:
        with GGUFFile.open(self._base) as file:
            tokenizer, template = Tokenizer.from_gguf(file), ChatTemplate.from_gguf(file)
        content = text.read_bytes().decode("utf-8")
        if text.suffix != ".jsonl":
            return chunks_of(tokenizer, content.removesuffix("\n"), 512, self._n_chunks)
        assert template is not None
        ids: list[int] = []
        for line in content.splitlines():
            pieces = template.render(json.loads(line)["messages"], add_generation_prompt=False)
            ids += tokenizer.encode_pieces(pieces, add_special=False)
            if len(ids) >= self._n_chunks * 512:
                break
        return np.array(ids[: self._n_chunks * 512], np.int32).reshape(-1, 512)

    def judge(self, text: Path, file: Path) -> Figures:
        """What `edgert perplexity` finds of a file on a text."""
        exact, model = (load(path, n_ctx=512, n_threads=self._threads) for path in (self._base, file))
        try:
            found = evaluate(model, self._chunks_of(text), exact).against
        finally:
            model.close()
            exact.close()
        assert found is not None
        return {"mean": found.kld_mean, "99 %": found.kld_99, "99.9 %": found.kld_999, "same top": 100 * found.same_top}


def remembered(path: Path) -> Callable[[str, Callable[[], Figures]], Figures]:
    """A function that works figures out once, however often the bench is started."""
    known: dict[str, Figures] = json.loads(path.read_text()) if path.exists() else {}

    def figures(key: str, found: Callable[[], Figures]) -> Figures:
        if key not in known:
            known[key] = found()
            path.write_text(json.dumps(known, indent=1))
        return known[key]

    return figures


@click.command(help=__doc__)
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("base", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--llama", "tools", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--calibration", multiple=True, type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--text", "texts", multiple=True, type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--types", default="Q4_K_M,Q4_K_S,IQ4_NL,Q4_0", show_default=True)
@click.option("--chunks", "n_chunks", default=16, show_default=True)
@click.option("--imatrix-chunks", default=100, show_default=True, help="Chunks that the importances are collected on.")
@click.option("--tokens", default=50_000, show_default=True, help="Tokens that edgert calibrates on at most.")
@click.option("--noise", default=0.0, show_default=True, help="Share of each matrix's standard deviation.")
@click.option("-t", "--threads", default=2, show_default=True)
@click.option("--allow-requantize", is_flag=True)
@click.option("--keep", "folder", type=click.Path(file_okay=False, path_type=Path), help="Keep the files here.")
def main(
    source: Path,
    base: Path,
    tools: Path,
    calibration: tuple[Path, ...],
    texts: tuple[Path, ...],
    types: str,
    n_chunks: int,
    imatrix_chunks: int,
    tokens: int,
    noise: float,
    threads: int,
    allow_requantize: bool,
    folder: Path | None,
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not base.exists():
            write_base(source, base, noise)
        source = base if noise else source
        edgert = (sys.executable, "-m", "edgert")
        named = [part for text in calibration for part in ("--calibration", text)]
        requantize = ("--allow-requantize",) if allow_requantize else ()
        imatrix, sensitivity = folder / "imatrix.gguf", folder / "sensitivity.json"
        if not imatrix.exists():
            files = [part for text in calibration for part in ("-f", text)]
            run(*edgert, "imatrix", "-m", base, *files, "--chunks", imatrix_chunks, "-o", imatrix, "-t", threads)
        if not sensitivity.exists():
            read = (*named, "--tokens", tokens)
            click.echo(run(*edgert, "sensitivity", source, *read, "-o", sensitivity, "-t", threads))
        judges: list[Edgert | Llama] = [Edgert(base, n_chunks, threads)]
        if os.access(tools / "llama-perplexity", os.X_OK):
            judges.append(Llama(tools, base, n_chunks, threads, folder))
        figures = remembered(folder / f"figures-{n_chunks}.json")
        head = "".join(f"{name:>10}" for name in FIGURES)
        for name in types.split(","):
            *flags, kind = name.split()
            theirs, ours = (folder / f"{who}-{name.strip('-').replace(' ', '-')}.gguf" for who in ("llama", "edgert"))
            if not theirs.exists():
                run(tools / "llama-quantize", *requantize, *flags, "--imatrix", imatrix, base, theirs, kind, threads)
            if not ours.exists():
                size = theirs.stat().st_size
                measured = ("--sensitivity", sensitivity, "--tokens", tokens)
                click.echo(run(*edgert, "quantize", source, "-o", ours, "--size", size, "--no-report", *named,
                               *measured, *requantize, "-t", threads))  # fmt: skip
            for text in texts:
                for judge in judges:
                    click.echo(f"\n{text.name}, judged by {judge.name}\n{'':<27}{'bytes':>12}{head}")
                    found = []
                    for who, file in (("llama-quantize", theirs), ("edgert", ours)):
                        facts = file.stat()
                        key = f"{judge.name} {text.name} {file.name} {facts.st_size} {facts.st_mtime_ns}"
                        found.append(figures(key, lambda j=judge, t=text, f=file: j.judge(t, f)))  # type: ignore[misc]
                        cells = "".join(f"{found[-1][column]:>10.4f}" for column in FIGURES)
                        click.echo(f"{name + ' ' + who:<27}{file.stat().st_size:>12,}{cells}")
                    change = found[1]["mean"] / found[0]["mean"] - 1
                    click.echo(f"{'':<27}{'':>12}{100 * change:>+9.0f}%")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
