"""Every family: tiny random models of transformers', converted, as edgert and llama.cpp compute them.

    python tests/bench/families.py [NAME ...] [--types Q8_0,Q4_0] [--markdown]

Mean KL divergence of the next token over 90 tokens, past what some rotations were made for. In float32 from
transformers; in types of few bits from a float32 evaluation of the same file, so that it is the engine that is judged
and not the type. `equal` is how many of 32 greedy tokens are transformers' own.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checkpoint_configs import CONFIGS, MIXTURES, SEEING, TIED
from checkpoints import logits_of, write_checkpoint
from llama_oracle import llama_cpp_logits
from reference import Reference, kl_divergence
from relatives import RELATIVES, write_relative

from edgert import backends
from edgert.backends.base import Batch
from edgert.quantize import quantize
from edgert.quantize.convert import convert

ALL = (*CONFIGS, *MIXTURES, *SEEING, *RELATIVES)
N_CTX, N_GREEDY = 128, 32
TOKENS = np.random.default_rng(3).integers(6, 370, 90).tolist()
FLOAT_CACHE = {"cache_type_k": "f16", "cache_type_v": "f16"}


def edgert_logits(path: Path) -> tuple[np.ndarray, list[int]]:
    """After each of TOKENS, and the greedy tokens that follow the first 20."""
    with closing(backends.load(path, backend="cpu", n_ctx=N_CTX, n_threads=1, n_seq_max=2, **FLOAT_CACHE)) as backend:
        logits = backend.forward(Batch.of(TOKENS, 0, 0, "all")).copy()
        found = [int(backend.forward(Batch.of(TOKENS[:20], 0, 1))[0].argmax())]
        for position in range(20, 19 + N_GREEDY):
            found.append(int(backend.forward(Batch.of(found[-1:], position, 1))[0].argmax()))
    return logits, found


def greedy_of(model: Any) -> list[int]:
    """transformers' own, each from all tokens before it."""
    tokens = TOKENS[:20]
    for _ in range(N_GREEDY):
        tokens = [*tokens, int(logits_of(model, tokens)[-1].argmax())]
    return tokens[20:]


def measure(name: str, folder: Path, types: Sequence[str]) -> dict[str, Any]:
    """A row of the table."""
    hf = folder / "hf"
    model = write_relative(hf, name) if name in RELATIVES else write_checkpoint(hf, name, tied=name in TIED)
    expected = logits_of(model, TOKENS)
    path = convert(hf, folder / "f32.gguf", "F32").paths[0]
    logits, found = edgert_logits(path)
    row: dict[str, Any] = {"family": name, "transformers": _divergence(expected, logits)}
    row["llama.cpp"] = _llama_cpp(path, expected)
    row["equal"] = sum(a == b for a, b in zip(found, greedy_of(model), strict=True))
    for kind in types:
        out = folder / f"{kind}.gguf"
        quantize(hf, out, budget=kind, calibration=(), n_threads=1)
        exact = Reference(out, n_ctx=N_CTX).logits(TOKENS)
        row[kind] = _divergence(exact, edgert_logits(out)[0])
        row[f"{kind} llama.cpp"] = _llama_cpp(out, exact)
    return row


def _divergence(expected: np.ndarray, logits: np.ndarray) -> float:
    return float(kl_divergence(expected, logits).mean())


def _llama_cpp(path: Path, expected: np.ndarray) -> float | None:
    """None where it does not load the file."""
    try:
        return _divergence(expected, llama_cpp_logits(path, TOKENS))
    except AssertionError:
        return None


def _shown(value: Any) -> str:
    if value is None:
        return "does not load"
    return f"{value:.1e}" if isinstance(value, float) else str(value)


def _line(values: Sequence[Any], markdown: bool) -> str:
    shown = [_shown(value) for value in values]
    return f"| {' | '.join(shown)} |" if markdown else "  ".join(f"{text:18}" for text in shown)


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(list(ALL)))
@click.option("--types", default="Q8_0,Q4_0", show_default=True)
@click.option("--markdown", is_flag=True)
def main(names: Sequence[str], types: str, markdown: bool) -> None:
    kinds = [kind for kind in types.split(",") if kind]
    columns = [
        "family",
        "transformers",
        "llama.cpp",
        "equal",
        *(f"{k}{end}" for k in kinds for end in ("", " llama.cpp")),
    ]
    print(_line(columns, markdown), flush=True)
    if markdown:
        print("|---" * len(columns) + "|")
    for name in names or ALL:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(name, Path(folder), kinds)
        print(_line([row[column] for column in columns], markdown), flush=True)


if __name__ == "__main__":
    main()
