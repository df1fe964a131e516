"""Writes a llama of the shape asked for whose weights are random Q4_0 blocks: a file to measure speed on.

    python tests/bench/make_random_model.py random-1.1b.gguf
    python tests/bench/make_random_model.py small.gguf --n-layer 2 --n-embd 256 --n-ff 512 --n-head 4

The tokenizer is byte-level: 256 bytes, one merge, then unused entries up to the vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import click
import gguf
import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 20  # blocks drawn at a time


def byte_symbols() -> list[str]:
    """The printable character for each byte of a byte-level vocabulary. Source: GPT-2's encoder."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbol = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [symbol[byte] for byte in range(256)]


def q4_0(rng: np.random.Generator, rows: int, columns: int, deviation: float) -> NDArray[np.uint8]:
    """Random Q4_0 rows, uint8 (rows, columns / 32 * 18), whose weights have about this standard deviation.

    A quant is uniform over -8..7, so that its deviation is 4.61; the scale of each block varies by a third.
    """
    blocks = rows * columns // 32
    data = np.empty((blocks, 18), np.uint8)
    for start in range(0, blocks, CHUNK):
        part = data[start : start + CHUNK]
        scale = (deviation / 4.61) * rng.uniform(0.67, 1.33, len(part))
        part[:, :2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
        part[:, 2:] = rng.integers(0, 256, (len(part), 16), np.uint8)
    return data.reshape(rows, columns // 32 * 18)


def write(
    path: Path,
    *,
    n_layer: int = 22,
    n_embd: int = 2048,
    n_ff: int = 5632,
    n_head: int = 32,
    n_head_kv: int = 4,
    n_vocab: int = 49152,
    n_ctx: int = 8192,
    seed: int = 0,
) -> None:
    """Writes the file; every 2-D tensor is Q4_0, norms are ones in F32."""
    rng = np.random.default_rng(seed)
    head_dim = n_embd // n_head
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"random {n_layer}x{n_embd}")
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(n_vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    special = ["<|endoftext|>"]
    symbols = [*byte_symbols(), "th"]
    unused = [f"[unused{i}]" for i in range(n_vocab - len(special) - len(symbols))]
    types = (
        [gguf.TokenType.CONTROL] * len(special)
        + [gguf.TokenType.NORMAL] * len(symbols)
        + [gguf.TokenType.UNUSED] * len(unused)
    )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*special, *symbols, *unused])
    writer.add_token_types(types)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)

    n_embd_kv = n_head_kv * head_dim
    shapes: list[tuple[str, int, int]] = [("token_embd.weight", n_vocab, n_embd)]
    for i in range(n_layer):
        shapes += [
            (f"blk.{i}.attn_norm.weight", 0, n_embd),
            (f"blk.{i}.attn_q.weight", n_embd, n_embd),
            (f"blk.{i}.attn_k.weight", n_embd_kv, n_embd),
            (f"blk.{i}.attn_v.weight", n_embd_kv, n_embd),
            (f"blk.{i}.attn_output.weight", n_embd, n_embd),
            (f"blk.{i}.ffn_norm.weight", 0, n_embd),
            (f"blk.{i}.ffn_gate.weight", n_ff, n_embd),
            (f"blk.{i}.ffn_up.weight", n_ff, n_embd),
            (f"blk.{i}.ffn_down.weight", n_embd, n_ff),
        ]
    shapes += [("output_norm.weight", 0, n_embd), ("output.weight", n_vocab, n_embd)]
    for name, rows, columns in shapes:
        if rows == 0:
            writer.add_tensor(name, np.ones(columns, np.float32))
        else:
            deviation = 1.0 if name == "token_embd.weight" else columns**-0.5
            data = q4_0(rng, rows, columns, deviation)
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@click.command(help=__doc__)
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--n-layer", default=22, show_default=True)
@click.option("--n-embd", default=2048, show_default=True)
@click.option("--n-ff", default=5632, show_default=True)
@click.option("--n-head", default=32, show_default=True)
@click.option("--n-head-kv", default=4, show_default=True)
@click.option("--n-vocab", default=49152, show_default=True)
@click.option("--n-ctx", default=8192, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(path: Path, **shape: int) -> None:
    write(path, **shape)
    click.echo(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
