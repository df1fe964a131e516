"""Files of edgert quantize beside llama-quantize's of the same size, judged on held-out text by both sides' tools.

    python tests/bench/quantizer.py SOURCE BASE.gguf --llama BIN --calibration C.jsonl --calibration V.txt \
        --text T.txt --text H.jsonl [--types Q4_K_M,Q4_K_S,IQ4_NL,Q4_0] [--chunks 16]

SOURCE is what edgert quantizes, BASE.gguf the same weights as BF16 for llama.cpp; BIN is a folder with llama-quantize
and, for its judgement, llama-perplexity. Both sides take one importance matrix, collected by edgert from the
calibration texts; edgert gets as its budget the bytes of llama-quantize's file. A .jsonl text is chats, rendered with
the model's template; llama-perplexity reads the same rendering as plain text.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np

from edgert.backends import load
from edgert.evaluate import chunks_of, evaluate
from edgert.quantize.gguf_file import GGUFFile
from edgert.template import ChatTemplate
from edgert.tokenizer import Tokenizer

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


def llamas_judgement(tools: Path, base: Path, text: Path, n_chunks: int, threads: int, files: list[Path]) -> list[dict]:
    """Of each file: the figures that llama-perplexity --kl-divergence prints."""
    common = ("-f", text, "--chunks", n_chunks, "-c", 512, "-t", threads)
    with tempfile.TemporaryDirectory() as folder:
        logits = Path(folder) / "logits"
        run(tools / "llama-perplexity", "-m", base, *common, "--kl-divergence-base", logits)
        judged = []
        for file in files:
            said = run(tools / "llama-perplexity", "-m", file, *common, "--kl-divergence-base", logits,
                       "--kl-divergence")  # fmt: skip
            found = {name: re.search(pattern, said) for name, pattern in FIGURES.items()}
            judged.append({name: float(match[1]) for name, match in found.items() if match})
    return judged


def our_judgement(base: Path, text: Path, n_chunks: int, threads: int, files: list[Path]) -> list[dict]:
    """Of each file: edgert's figures, through its int8 kernels; chats are read with their control tokens."""
    with GGUFFile.open(base) as file:
        tokenizer, template = Tokenizer.from_gguf(file), ChatTemplate.from_gguf(file)
    content = text.read_bytes().decode("utf-8")
    if text.suffix == ".jsonl":
        assert template is not None
        ids: list[int] = []
        for line in content.splitlines():
            pieces = template.render(json.loads(line)["messages"], add_generation_prompt=False)
            ids += tokenizer.encode_pieces(pieces, add_special=False)
        chunks = np.array(ids[: n_chunks * 512], np.int32).reshape(-1, 512)
    else:
        chunks = chunks_of(tokenizer, content.removesuffix("\n"), 512, n_chunks)
    judged = []
    exact = load(base, n_ctx=512, n_threads=threads)
    for path in files:
        model = load(path, n_ctx=512, n_threads=threads)
        found = evaluate(model, chunks, exact).against
        model.close()
        assert found is not None
        judged.append({"mean": found.kld_mean, "99 %": found.kld_99, "99.9 %": found.kld_999,
                       "same top": 100 * found.same_top})  # fmt: skip
    exact.close()
    return judged


@click.command(help=__doc__)
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("base", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--llama", "tools", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--calibration", multiple=True, type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--text", "texts", multiple=True, type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--types", default="Q4_K_M,Q4_K_S,IQ4_NL,Q4_0", show_default=True)
@click.option("--chunks", "n_chunks", default=16, show_default=True)
@click.option("--imatrix-chunks", default=100, show_default=True, help="Chunks that the importances are collected on.")
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
    threads: int,
    allow_requantize: bool,
    folder: Path | None,
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        edgert = (sys.executable, "-m", "edgert")
        named = [part for text in calibration for part in ("--calibration", text)]
        requantize = ("--allow-requantize",) if allow_requantize else ()
        imatrix, sensitivity = folder / "imatrix.gguf", folder / "sensitivity.json"
        if not imatrix.exists():
            files = [part for text in calibration for part in ("-f", text)]
            run(*edgert, "imatrix", "-m", base, *files, "--chunks", imatrix_chunks, "-o", imatrix, "-t", threads)
        if not sensitivity.exists():
            run(*edgert, "sensitivity", source, *named, "-o", sensitivity, "-t", threads)
        pairs: list[tuple[str, Path, Path, float]] = []
        for name in types.split(","):
            theirs, ours = folder / f"llama-{name}.gguf", folder / f"edgert-{name}.gguf"
            if not theirs.exists():
                run(tools / "llama-quantize", *requantize, "--imatrix", imatrix, base, theirs, name, threads)
            started = time.perf_counter()
            if not ours.exists():
                run(*edgert, "quantize", source, "-o", ours, "--size", theirs.stat().st_size, "--no-report", *named,
                    "--sensitivity", sensitivity, *requantize, "-t", threads)  # fmt: skip
            pairs.append((name, theirs, ours, time.perf_counter() - started))
        files = [file for _, theirs, ours, _ in pairs for file in (theirs, ours)]
        judges = {"edgert": lambda text: our_judgement(base, text, n_chunks, threads, files)}
        if os.access(tools / "llama-perplexity", os.X_OK):
            judges["llama.cpp"] = lambda text: llamas_judgement(
                tools, base, plain(text, base, folder), n_chunks, threads, files
            )
        for text in texts:
            for judge, judgement in judges.items():
                figures = judgement(text)
                click.echo(f"\n{text.name}, judged by {judge}")
                head = "".join(f"{name:>10}" for name in FIGURES)
                click.echo(f"{'':<22}{'bytes':>12}{head}")
                for i, (name, *both, _) in enumerate(pairs):
                    for who, file, found in zip(("llama-quantize", "edgert"), both, figures[2 * i :], strict=False):
                        cells = "".join(f"{found[column]:>10.4f}" for column in FIGURES)
                        click.echo(f"{name + ' ' + who:<22}{file.stat().st_size:>12,}{cells}")
                    change = figures[2 * i + 1]["mean"] / figures[2 * i]["mean"] - 1
                    click.echo(f"{'':<22}{'':>12}{100 * change:>+9.0f}%")


if __name__ == "__main__":
    main()
