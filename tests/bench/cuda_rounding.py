"""Which rounding sets llama.cpp's CUDA kernels apart from engines on the processor: emulated in NumPy, no GPU needed.

    python tests/bench/cuda_rounding.py MODEL [-n 96]

All of them round activations to int8 in blocks of 32. A weight of a type with a minimum is d q + m, so that a block's
part of a product is d sum(q x) + m sum(x). The processor's kernels sum the rounded x, and its errors are weighed with
d q + m, which is around zero; CUDA's (quantize.cu, quantize_q8_1) sum the x before they are rounded, so that the errors
are weighed with d q, all of one sign and twice as large. Shown are mean KL divergences on random tokens, where models
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


class Emulated(Reference):
    """Products with activations as an engine rounds them: "float", "f16", "int8", or "cuda"."""

    engine = "float"

    def product(self, h: Floats, name: str) -> Floats:
        weight = self.weight(f"{name}.weight")
        if self.engine in ("float", "f16"):
            return (f16(h) if self.engine == "f16" else h) @ weight.T
        x = rounded(h)
        y = x @ weight.T
        minimums = self.minimums(f"{name}.weight") if self.engine == "cuda" else None
        if minimums is not None:
            sums, seen = (part.reshape(len(h), -1, BLOCK).sum(-1) for part in (h, x))
            y += (f16(sums) - seen) @ minimums.T
        return y

    def minimums(self, name: str) -> Floats | None:
        """What is added to each block of 32, float32 (rows, blocks); None: the type has none."""
        from edgert.quantize.blocks import k4_scales

        assert self.cache is not None
        tensor, key = self.tensors[name], f"{name} minimums"
        kind, data = tensor.tensor_type.name, np.asarray(tensor.data)
        if key not in self.cache and kind == "Q4_1":
            blocks = data.reshape(len(data), -1, 20)
            self.cache[key] = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0].astype(np.float32)
        if key not in self.cache and kind in ("Q4_K", "Q5_K"):
            blocks = data.reshape(-1, {"Q4_K": 144, "Q5_K": 176}[kind])
            least = np.ascontiguousarray(blocks[:, 2:4]).view(np.float16).astype(np.float32)
            self.cache[key] = -(least * k4_scales(blocks[:, 4:16])[1]).reshape(len(data), -1)
        return self.cache.get(key)

    def logits(self, tokens: Any, last: bool = False) -> Floats:
        return self.product(self.states(tokens, last), "token_embd" if self.architecture.tied_head else "output")


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("-n", "--n-tokens", default=96, show_default=True)
def main(model: Path, n_tokens: int) -> None:
    from edgert import backends
    from edgert.backends.base import Batch

    emulated = Emulated(model)
    tokens = np.random.default_rng(0).integers(0, emulated.architecture.n_vocab, n_tokens).tolist()
    logits = {}
    for what, engine, attention in (
        ("float", "float", attend),
        ("attention in float16", "float", attend_in_halves),
        ("activations in float16", "f16", attend),
        ("activations in int8", "int8", attend),
        ("the same, sums as CUDA's", "cuda", attend),
        ("CUDA: all of it", "cuda", attend_in_halves),
    ):
        emulated.engine, reference.attention = engine, attention
        logits[what] = emulated.logits(tokens)
    for kind in ("f16", "q8_0"):
        backend = backends.load(model, backend="cpu", n_ctx=n_tokens, cache_type_k=kind, cache_type_v=kind)
        logits[f"edgert, cache {kind}"] = backend.forward(Batch.of(tokens, 0, wanted="all")).copy()
        backend.close()
    against = ("float", "activations in int8", "edgert, cache q8_0")
    click.echo(f"| {model.stem}: mean KL divergence from | {' | '.join(against)} |\n|---|{'---:|' * len(against)}")
    for what, rows in logits.items():
        cells = (f"{kl_divergence(logits[other], rows).mean():.4f}" for other in against)
        click.echo(f"| {what} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
