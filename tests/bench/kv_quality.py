"""What a compact cache costs: each engine with q8_0 and q4_0 caches against the same engine with f16.

    python tests/bench/kv_quality.py MODEL.gguf TEXT.txt [--engines cpu,llama] [--types q8_0,q4_0]

Prints for each the KL divergence of the next token (mean, its standard error, 99th percentile), the ratio of
perplexities and the share of places with the same likeliest token. A type K/V holds keys and values apart.
The engines' own noise is in all figures: activations are rounded to 8 bits, so that the smallest change of a
number somewhere makes others round otherwise.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from edgert import backends
from edgert.evaluate import Evaluation, chunks_of, evaluate
from edgert.quantize.gguf_file import GGUFFile
from edgert.tokenizer import Tokenizer

LIMIT = 0.05  # nats: a cache whose mean divergence is above is not to be recommended


def compare(path: Path, engine: str, types: str, chunks: Any, n_threads: int) -> Evaluation:
    """One engine with these types of keys and values against itself with f16."""
    k, _, v = types.partition("/")
    common: dict[str, Any] = {"backend": engine, "n_ctx": chunks.shape[1], "n_threads": n_threads}
    if engine == "llama":
        common["flash_attn"] = "on"
    with (
        closing(backends.load(path, **common, cache_type_k="f16", cache_type_v="f16")) as base,
        closing(backends.load(path, **common, cache_type_k=k, cache_type_v=v or k)) as compact,
    ):
        return evaluate(compact, chunks, base)


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("text", type=click.Path(exists=True, path_type=Path))
@click.option("--engines", default="cpu,llama", show_default=True)
@click.option("--types", default="q8_0,q4_0", show_default=True)
@click.option("--shapes", default="16x512,1x8192", show_default=True, help="Chunks x tokens.")
@click.option("-t", "--threads", default=2, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(model: Path, text: Path, engines: str, types: str, shapes: str, threads: int, as_json: bool) -> None:
    with GGUFFile.open(model) as file:
        tokenizer = Tokenizer.from_gguf(file)
    content = text.read_bytes().decode("utf-8").removesuffix("\n")
    rows = []
    for shape in shapes.split(","):
        n_chunks, n_ctx = map(int, shape.split("x"))
        chunks = chunks_of(tokenizer, content, n_ctx, n_chunks)
        for kind in types.split(","):
            for engine in engines.split(","):
                result = compare(model, engine, kind, chunks, threads)
                other = result.against
                assert other is not None
                rows.append({"model": model.name, "shape": shape, "types": kind, "engine": engine, **result.as_dict()})
                if not as_json:
                    click.echo(
                        f"{model.stem:<10} {shape:<8} {kind:<10} {engine:<6} "
                        f"KLD {other.kld_mean:.5f} ± {other.kld_error:.5f}, 99 % {other.kld_99:.4f}, "
                        f"perplexity x {other.ratio:.4f}, same top {100 * other.same_top:.2f} %"
                        + ("  beyond what is recommended" if other.kld_mean > LIMIT else "")
                    )
    if as_json:
        click.echo(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
