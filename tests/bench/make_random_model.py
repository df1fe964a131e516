"""Writes a llama of the shape asked for whose weights are random blocks of one GGUF type: a file to measure speed on.

    python tests/bench/make_random_model.py random-1.1b.gguf
    python tests/bench/make_random_model.py 7b.gguf --type Q4_K --n-layer 32 --n-embd 4096 --n-ff 11008 --n-vocab 32000
    python tests/bench/make_random_model.py small.gguf --n-layer 2 --n-embd 256 --n-ff 512 --n-head 4
    python tests/bench/make_random_model.py random-moe.gguf --n-layer 16 --n-embd 1024 --n-ff 1024 --n-head 16 \
        --n-expert 32 --n-expert-used 4

The tokenizer is byte-level: 256 bytes, one merge, then unused entries up to the vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
from numpy.typing import NDArray

from edgert.quantize.blocks import UE4M3_HALVES
from edgert.quantize.formats import FORMATS, Format

POOL = 1 << 16  # random blocks that tensors are cut from


def byte_symbols() -> list[str]:
    """The printable character for each byte of a byte-level vocabulary. Source: GPT-2's encoder."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbol = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [symbol[byte] for byte in range(256)]


def random_blocks(rng: np.random.Generator, form: Format, n: int, deviation: float) -> NDArray[np.uint8]:
    """Random blocks of a type, uint8 (n, type_size), whose weights have about this deviation and a mean near 0.

    Codes and integer scales are uniform; the floating-point scale of each block varies by a third.
    """
    if form.block_size == 1:
        values = (deviation * rng.standard_normal((n, 1))).astype(np.float32)
        return (values.astype(np.float16) if form.name == "F16" else values).view(np.uint8)[:, -form.type_size :]
    data = rng.integers(0, 256, (n, form.type_size), np.uint8)
    varied = rng.uniform(0.67, 1.33, n)
    if form.name == "MXFP4":  # doubled E2M1 values have a deviation of 5.7
        data[:, 0] = 128 + np.round(np.log2(deviation / 5.7 * varied))
    elif form.name == "NVFP4":
        data[:, :4] = np.searchsorted(UE4M3_HALVES[:0x7F], deviation / 5.7 * varied)[:, None]
    elif form.name == "IQ1_M":  # a float16 in the high nibbles of four words
        unit = form.dequantize(_with_parted_half(data, np.ones(n))).std()
        data = _with_parted_half(data, deviation / unit * varied)
    else:
        halves = [offset for offset, _ in form.floats]
        weights = [form.dequantize(_with_halves(data, {at: np.full(n, at == one) for at in halves})) for one in halves]
        if len(halves) == 2:  # the second adds to all weights: it moves their mean to 0
            share = -weights[0].mean() / weights[1].mean()
            d = deviation / (weights[0] + share * weights[1]).std() * varied
            data = _with_halves(data, {halves[0]: d, halves[1]: share * d})
        else:
            data = _with_halves(data, {halves[0]: deviation / weights[0].std() * varied})
    return data


def _with_halves(data: NDArray[np.uint8], fields: dict[int, NDArray[np.float64]]) -> NDArray[np.uint8]:
    """A copy with float16 fields (n,) at byte offsets."""
    data = data.copy()
    for offset, values in fields.items():
        data[:, offset : offset + 2] = values.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return data


def _with_parted_half(data: NDArray[np.uint8], values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """A copy with IQ1_M's float16 (n,), four bits in each word from byte 48 on."""
    data = data.copy()
    bits = values.astype(np.float16).view(np.uint16)[:, None] >> np.array([0, 4, 8, 12], np.uint16) & 15
    data[:, 49::2] = data[:, 49::2] & 15 | (bits << 4).astype(np.uint8)
    return data


def rows_of(pool: NDArray[np.uint8], form: Format, rows: int, columns: int, start: int) -> NDArray[np.uint8]:
    """Rows from a pool of blocks, uint8 (rows, row_bytes); start moves where they are cut."""
    places = (start + np.arange(rows * columns // form.block_size)) % len(pool)
    return pool[places].reshape(rows, -1)


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
    n_expert: int = 0,
    n_expert_used: int = 0,
    type: str = "Q4_0",
    seed: int = 0,
) -> None:
    """Writes the file; every matrix has the type, but for routers in F32; norms are ones in F32.

    n_expert:  experts of each layer, of n_ff each; 0: no mixture
    """
    form, kind = FORMATS[type], gguf.GGMLQuantizationType[type]
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
    if n_expert:
        writer.add_expert_count(n_expert)
        writer.add_expert_used_count(n_expert_used)
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
        ]
        if n_expert:
            shapes.append((f"blk.{i}.ffn_gate_inp.weight", n_expert, n_embd))
        stacked, n = ("_exps", n_expert) if n_expert else ("", 1)
        shapes += [
            (f"blk.{i}.ffn_gate{stacked}.weight", n * n_ff, n_embd),
            (f"blk.{i}.ffn_up{stacked}.weight", n * n_ff, n_embd),
            (f"blk.{i}.ffn_down{stacked}.weight", n * n_embd, n_ff),
        ]
    shapes += [("output_norm.weight", 0, n_embd), ("output.weight", n_vocab, n_embd)]
    for name, rows, columns in shapes:
        if "gate_inp" in name:
            writer.add_tensor_info(name, (rows, columns), np.dtype(np.float32), 4 * rows * columns)
        elif rows:
            n_bytes = rows * form.row_bytes(columns)
            stack = (n_expert, rows // n_expert) if "_exps" in name else (rows,)
            writer.add_tensor_info(name, (*stack, form.row_bytes(columns)), np.dtype(np.uint8), n_bytes, kind)
        else:
            writer.add_tensor_info(name, (columns,), np.dtype(np.float32), 4 * columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pools: dict[float, NDArray[np.uint8]] = {}
    for number, (name, rows, columns) in enumerate(shapes):
        if rows == 0:
            writer.write_tensor_data(np.ones(columns, np.float32))
            continue
        if "gate_inp" in name:
            writer.write_tensor_data((rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32))
            continue
        deviation = 1.0 if name == "token_embd.weight" else columns**-0.5
        if deviation not in pools:
            pools[deviation] = random_blocks(rng, form, POOL * 32 // form.block_size, deviation)
        writer.write_tensor_data(rows_of(pools[deviation], form, rows, columns, number * 7919))
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
@click.option("--n-expert", default=0, show_default=True)
@click.option("--n-expert-used", default=0, show_default=True)
@click.option("--type", default="Q4_0", show_default=True, help="A GGUF type, such as Q4_K or IQ2_XS.")
@click.option("--seed", default=0, show_default=True)
def main(path: Path, **shape: Any) -> None:
    write(path, **shape)
    click.echo(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
