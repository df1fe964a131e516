"""Which rounding sets llama.cpp's CUDA kernels apart from engines on the processor: emulated in NumPy.

    python tests/bench/cuda_rounding.py MODEL [-n 96] [--gpu CUDA0]

No GPU is needed; one that is named is held against what was emulated.

All of them round activations to int8 in blocks of 32. A weight of a type with a minimum is d q + m, so that a block's
part of a product is d sum(q x) + m sum(x). The processor's kernels sum the rounded x, and its errors are weighed with
d q + m, which is around zero; CUDA's (quantize.cu, quantize_q8_1) sum the x before they are rounded, so that the errors
are weighed with d q, all of one sign and twice as large; which types that concerns differs between steps of many tokens
and of few. Shown are mean KL divergences on random tokens, where models
differ more than on text.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import reference
from reference import Floats, Reference, kl_divergence

from edgert.quantize.architecture import describe
from edgert.quantize.gguf_file import GGUFFile

BLOCK = 32
attend = reference.attention


def f16(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)


def rounded(x: Floats) -> Floats:
    """(n, columns) as blocks of int8 with a float16 scale hold it."""
    blocks = x.reshape(len(x), -1, BLOCK)
    d = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    codes = np.rint(np.divide(blocks, d, out=np.zeros_like(blocks), where=d > 0))
    return (codes * f16(d)).reshape(x.shape)


def attend_in_halves(q: Floats, k: Floats, v: Floats, *rest: Any) -> Floats:
    """Flash attention's operands in float16."""
    return f16(attend(f16(q), f16(k), f16(v), *rest))


# Types of which a sum of x that was not rounded is multiplied, by kind of step: of many tokens (mmq.cuh, the layouts
# with sums) and of up to eight (vecdotq.cuh, what reads ds.y).
SUMS = {"cuda": ("Q4_1", "Q5_1", "Q4_K", "Q5_K"), "cuda, single": ("Q4_0", "Q4_1", "Q5_0", "Q5_1")}
# Their blocks of 32: bytes, where the float16 is that the sum is multiplied with, and by what.
FACTORS = {"Q4_0": (18, 0, -8), "Q4_1": (20, 2, 1), "Q5_0": (22, 0, -16), "Q5_1": (24, 2, 1)}


class Emulated(Reference):
    """Products with activations as an engine rounds them: "float", "f16", "int8", or one of SUMS."""

    engine = "float"

    def product(self, h: Floats, name: str) -> Floats:
        weight = self.weight(f"{name}.weight")
        if self.engine in ("float", "f16"):
            return (f16(h) if self.engine == "f16" else h) @ weight.T
        x = rounded(h)
        y = x @ weight.T
        if self.tensors[f"{name}.weight"].tensor_type.name in SUMS.get(self.engine, ()):
            sums, seen = (part.reshape(len(h), -1, BLOCK).sum(-1) for part in (h, x))
            y += (f16(sums) - seen) @ self.factors(f"{name}.weight").T
        return y

    def factors(self, name: str) -> Floats:
        """What the sum of each block of 32 is multiplied with, float32 (rows, blocks)."""
        from edgert.quantize.blocks import k4_scales

        assert self.cache is not None
        tensor, key = self.tensors[name], f"{name} factors"
        kind, data = tensor.tensor_type.name, np.asarray(tensor.data)
        if key not in self.cache and kind in FACTORS:
            size, at, times = FACTORS[kind]
            halves = np.ascontiguousarray(data.reshape(len(data), -1, size)[..., at : at + 2]).view(np.float16)
            self.cache[key] = times * halves[..., 0].astype(np.float32)
        elif key not in self.cache:
            blocks = data.reshape(-1, {"Q4_K": 144, "Q5_K": 176}[kind])
            least = np.ascontiguousarray(blocks[:, 2:4]).view(np.float16).astype(np.float32)
            self.cache[key] = -(least * k4_scales(blocks[:, 4:16])[1]).reshape(len(data), -1)
        return self.cache[key]

    def logits(self, tokens: Any, last: bool = False) -> Floats:
        return self.product(self.states(tokens, last), "token_embd" if self.architecture.tied_head else "output")


def emulated(model: Path, tokens: list[int]) -> dict[str, Floats]:
    """The logits (n, n_vocab) after every token, by what is rounded on the way."""
    model_ = Emulated(model)
    logits = {}
    for what, engine, attention in (
        ("float", "float", attend),
        ("attention in float16", "float", attend_in_halves),
        ("activations in float16", "f16", attend),
        ("activations in int8", "int8", attend),
        ("the same, sums as CUDA's", "cuda", attend),
        ("CUDA: all of it", "cuda", attend_in_halves),
        ("CUDA, token by token", "cuda, single", attend_in_halves),
    ):
        model_.engine, reference.attention = engine, attention
        logits[what] = model_.logits(tokens)
    reference.attention = attend
    return logits


def computed(model: Path, tokens: list[int], step: int = 0, **options: Any) -> Floats:
    """The same of a backend; step: tokens at a time, 0 for all."""
    from edgert import backends
    from edgert.backends.base import Batch

    backend = backends.load(model, n_ctx=len(tokens), **options)
    try:
        parts = range(0, len(tokens), step or len(tokens))
        rows = [backend.forward(Batch.of(tokens[i : i + (step or len(tokens))], i, wanted="all")).copy() for i in parts]
    finally:
        backend.close()
    return np.concatenate(rows)


def compare(model: Path, n_tokens: int, gpu: str | None = None) -> dict[str, dict[str, float]]:
    """Mean KL divergence of each row from each column.

    gpu:  a device of llama.cpp, which joins rows and columns
    """
    with GGUFFile.open(model) as file:
        n_vocab = describe(file).n_vocab
    tokens = np.random.default_rng(0).integers(0, n_vocab, n_tokens).tolist()
    logits = emulated(model, tokens)
    against = ["float", "activations in int8", "CUDA: all of it", "CUDA, token by token"]
    for kind in ("f16", "q8_0"):
        name = f"edgert, cache {kind}"
        logits[name] = computed(model, tokens, backend="cpu", cache_type_k=kind, cache_type_v=kind)
    against.append(name)
    if gpu:
        there = {"backend": "llama", "device": gpu, "n_gpu_layers": -1, "require": True, "split_mode": "none"}
        logits["GPU"] = computed(model, tokens, **there, flash_attn="on")
        logits["GPU, no flash attention"] = computed(model, tokens, **there, flash_attn="off")
        logits["GPU, token by token"] = computed(model, tokens, 1, **there, flash_attn="on")
        against += ["GPU", "GPU, token by token"]
    return {
        what: {other: float(kl_divergence(logits[other], rows).mean()) for other in against}
        for what, rows in logits.items()
    }


def markdown(name: str, found: dict[str, dict[str, float]]) -> str:
    against = list(next(iter(found.values())))
    lines = [f"| {name}: mean KL divergence from | {' | '.join(against)} |", f"|---|{'---:|' * len(against)}"]
    lines += [f"| {what} | {' | '.join(f'{row[other]:.4f}' for other in against)} |" for what, row in found.items()]
    return "\n".join(lines)


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("-n", "--n-tokens", default=96, show_default=True)
@click.option("--gpu", help="A GPU of llama.cpp, CUDA0 for one, to hold the emulation against.")
def main(model: Path, n_tokens: int, gpu: str | None) -> None:
    click.echo(markdown(model.stem, compare(model, n_tokens, gpu)))


if __name__ == "__main__":
    main()
