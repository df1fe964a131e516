"""A small random model in a GGUF file, for self-tests and for measuring a machine without any model at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgert.quantize.formats import FORMATS, Format
from edgert.quantize.gguf_layout import TensorPlan
from edgert.quantize.gguf_value import Value
from edgert.quantize.gguf_writer import Writer

DIFFERENT = 2  # layers of weights of their own

# Format -> bytes of a block before its codes, and the standard deviation of a weight with a scale of 1.
_BLOCKS = {"Q4_0": (2, 4.6), "Q8_0": (2, 73.9)}


def write(
    path: Path,
    *,
    n_layer: int = 2,
    n_embd: int = 256,
    n_ff: int = 512,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_vocab: int = 320,
    n_ctx: int = 512,
    type: str = "Q4_0",
    seed: int = 0,
) -> Path:
    """Writes a llama with heads of n_embd / n_head and tokens of single bytes; type: "Q4_0" or "Q8_0".

    From the third layer on matrices are those of earlier layers, for random numbers take longer than to write them.
    """
    rng = np.random.default_rng(seed)
    matrix, vector = FORMATS[type], FORMATS["F32"]
    kv = n_embd // n_head * n_head_kv
    plan: list[TensorPlan] = [("token_embd.weight", (n_vocab, n_embd), FORMATS["Q8_0"])]
    for i in range(n_layer):
        shapes = {"attn_q": (n_embd, n_embd), "attn_k": (kv, n_embd), "attn_v": (kv, n_embd)}
        shapes |= {"attn_output": (n_embd, n_embd), "ffn_gate": (n_ff, n_embd), "ffn_up": (n_ff, n_embd)}
        plan += [(f"blk.{i}.{name}_norm.weight", (n_embd,), vector) for name in ("attn", "ffn")]
        plan += [(f"blk.{i}.{name}.weight", shape, matrix) for name, shape in shapes.items()]
        plan.append((f"blk.{i}.ffn_down.weight", (n_embd, n_ff), matrix))
    plan.append(("output_norm.weight", (n_embd,), vector))
    sizes = {"context_length": n_ctx, "embedding_length": n_embd, "block_count": n_layer, "feed_forward_length": n_ff}
    sizes |= {"attention.head_count": n_head, "attention.head_count_kv": n_head_kv, "vocab_size": n_vocab}
    sizes |= {"rope.dimension_count": n_embd // n_head}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"[{i}]" for i in range(len(tokens), n_vocab)]
    kinds = np.array([2, 3, 3] + [6] * 256 + [1] * (n_vocab - 259), np.int32)
    metadata = {
        "general.architecture": Value.string("llama"),
        "general.name": Value.string("specimen"),
        **{f"llama.{name}": Value.u32(size) for name, size in sizes.items()},
        "llama.attention.layer_norm_rms_epsilon": Value.f32(1e-5),
        "llama.rope.freq_base": Value.f32(10_000),
        "tokenizer.ggml.model": Value.string("llama"),
        "tokenizer.ggml.tokens": Value.strings(tokens),
        "tokenizer.ggml.scores": Value.array(np.zeros(n_vocab, np.float32)),
        "tokenizer.ggml.token_type": Value.array(kinds),
        "tokenizer.ggml.bos_token_id": Value.u32(1),
        "tokenizer.ggml.eos_token_id": Value.u32(2),
    }
    with Writer(path, metadata, plan) as writer:
        made: dict[str, NDArray[np.uint8]] = {}
        for name, shape, format in plan:
            _, number, rest = name.split(".", 2) if name.startswith("blk.") else ("", "0", name)
            key = f"{int(number) % DIFFERENT}.{rest}"
            if key not in made:
                made[key] = _random(shape, format, rng, embedding=name.startswith("token_embd"))
            writer.write(name, made[key])
    return path


def _random(shape: tuple[int, ...], format: Format, rng: np.random.Generator, embedding: bool) -> NDArray[np.uint8]:
    """Bytes of a tensor whose products neither grow nor vanish; norms are near 1."""
    if format.name == "F32":
        return (1 + 0.1 * rng.standard_normal(shape, np.float32)).view(np.uint8)
    lead, deviation = _BLOCKS[format.name]
    n_blocks = shape[0] * shape[1] // format.block_size
    blocks = rng.integers(0, 256, (n_blocks, format.type_size), np.uint8)
    scale = (2.0 if embedding else 1.0) * shape[1] ** -0.5 / deviation
    blocks[:, :lead] = np.full(n_blocks, scale, np.float16)[:, None].view(np.uint8)
    return blocks.reshape(-1)
