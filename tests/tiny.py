"""Writes tiny random GGUF models of every family: small enough to run in milliseconds, real enough to chat.

Weights are scaled so that logits are of the order of 2, and norms differ from 1, so that a forgotten norm,
bias, scale or permutation changes the result.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Value
from numpy.typing import NDArray

Array = NDArray[Any]
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
# Bytes of a block that hold float16 factors: (offset, weight relative to the first) keep the mean near zero.
RANDOM_BLOCKS: dict[Type, tuple[tuple[int, float], ...]] = {
    Type.Q4_K: ((0, 1.0), (2, 7.5)),
    Type.Q5_K: ((0, 1.0), (2, 15.5)),
    Type.Q6_K: ((208, 1.0),),
    Type.IQ4_NL: ((0, 1.0),),
}
# In the order of their ranks; `left right`.
MERGES = """
Ġ t|h e|Ġt he|i n|e r|o n|r e|a n|an d|Ġ and|o r|l d|Ġ w|Ġw or|Ġwor ld|e l|l o|el lo|H ello|i s|Ġ is|Ġ a|o u
y ou|Ġ you|in g|e n|t h|s t|Ġ Ġ|Ċ Ċ|u s|us er|as s|a s|st an|0 0|1 2
"""
PIECES = """
▁t he ▁the in er on re an and ▁and or ld ▁w ▁wor ▁world el lo ello ▁a is ▁is ou
"""


def write_tiny(
    path: Path,
    family: str,
    *,
    n_layer: int | None = None,
    n_embd: int = 128,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 32,
    n_ff: int = 192,
    n_vocab: int = 384,
    n_ctx: int = 512,
    eps: float = 1e-5,
    quant: Type | Mapping[str, Type] = Type.Q4_0,
    seed: int = 0,
    window: int | None = None,
    rope_base: float | None = None,
    rope_factors: Iterable[float] | None = None,
    tied: bool | None = None,
    bias: bool | None = None,
    vocabulary: str | None = None,
    template: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    weights: Mapping[str, Array] | None = None,
    omit: Iterable[str] = (),
) -> Path:
    """A random model of the family; what is not given takes the family's habit.

    quant:     one type for all matrices, or {pattern of tensor names: type}, the first match counts, else F32
    window:    gemma3's sliding window (default 16, shorter than most test texts); 0: the key is written as 0
    metadata:  further or other values of keys; None removes a key; (value, GGUFValueType) forces a type
    weights:   float32 tensors by GGUF name that replace or extend the random ones
    omit:      names of tensors to leave out
    """
    gemma = family == "gemma3"
    n_layer = n_layer or (7 if gemma else 2)
    tied = gemma if tied is None else tied
    bias = family == "qwen2" if bias is None else bias
    rng = np.random.default_rng(seed)

    keys: dict[str, Any] = {
        "general.name": f"Tiny {family}",
        f"{family}.block_count": n_layer,
        f"{family}.context_length": n_ctx,
        f"{family}.embedding_length": n_embd,
        f"{family}.feed_forward_length": n_ff,
        f"{family}.attention.head_count": n_head,
        f"{family}.attention.head_count_kv": n_head_kv,
        f"{family}.attention.layer_norm_rms_epsilon": eps,
        f"{family}.rope.freq_base": rope_base or (1e6 if gemma else 1e4),
    }
    if head_dim * n_head != n_embd or family.startswith(("qwen3", "gemma3")):
        keys[f"{family}.attention.key_length"] = head_dim
        keys[f"{family}.attention.value_length"] = head_dim
    if family == "llama":
        keys["llama.rope.dimension_count"] = head_dim
        keys["llama.vocab_size"] = n_vocab
    if gemma:
        keys["gemma3.attention.sliding_window"] = 16 if window is None else window
    keys |= vocabulary_metadata(vocabulary or ("spm" if gemma else "bpe"), n_vocab, family)
    if template is not None:
        keys["tokenizer.chat_template"] = template

    shapes = tensor_shapes(family, n_layer, n_embd, n_head, n_head_kv, head_dim, n_ff, n_vocab, tied, bias)
    random = {name: random_weight(rng, name, shape, tied) for name, shape in shapes.items()}
    if rope_factors is not None:
        random["rope_freqs.weight"] = np.asarray(list(rope_factors), np.float32)
    return write_gguf(
        path,
        family,
        {name: w for name, w in (random | dict(weights or {})).items() if name not in set(omit)},
        keys | dict(metadata or {}),
        quant,
        rng,
        given=weights or (),
    )


def tensor_shapes(
    family: str,
    n_layer: int,
    n_embd: int,
    n_head: int,
    n_head_kv: int,
    head_dim: int,
    n_ff: int,
    n_vocab: int,
    tied: bool,
    bias: bool,
) -> dict[str, tuple[int, ...]]:
    """What a file of the family holds, rows first."""
    n_q, n_kv = n_head * head_dim, n_head_kv * head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd)}
    for i in range(n_layer):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (n_embd,),
            "attn_q.weight": (n_q, n_embd),
            "attn_k.weight": (n_kv, n_embd),
            "attn_v.weight": (n_kv, n_embd),
            "attn_output.weight": (n_embd, n_q),
            "ffn_norm.weight": (n_embd,),
            "ffn_gate.weight": (n_ff, n_embd),
            "ffn_up.weight": (n_ff, n_embd),
            "ffn_down.weight": (n_embd, n_ff),
        }
        if bias:
            layer |= {"attn_q.bias": (n_q,), "attn_k.bias": (n_kv,), "attn_v.bias": (n_kv,)}
        if family.startswith(("qwen3", "gemma3")):
            layer |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
        if family == "gemma3":
            layer |= {"post_attention_norm.weight": (n_embd,), "post_ffw_norm.weight": (n_embd,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    shapes["output_norm.weight"] = (n_embd,)
    if not tied:
        shapes["output.weight"] = (n_vocab, n_embd)
    return shapes


def random_weight(rng: np.random.Generator, name: str, shape: tuple[int, ...], tied: bool) -> Array:
    if name.endswith("norm.weight"):
        return rng.uniform(0.6, 1.4, shape).astype(np.float32)
    if name.endswith(".bias"):
        return rng.normal(0, 0.5, shape).astype(np.float32)
    gain = 2.0 if name == "output.weight" or (tied and name == "token_embd.weight") else 1.0
    if "attn_q." in name or "attn_k." in name:
        gain = 1.5  # sharper attention, so that positions matter
    return rng.normal(0, gain / np.sqrt(shape[-1]), shape).astype(np.float32)


def random_blocks(rng: np.random.Generator, kind: Type, weight: Array) -> Array:
    """uint8 (rows, bytes): random codes and sub-block scales of all values, with the weight's deviation."""
    size, type_size = gguf.GGML_QUANT_SIZES[kind]
    rows, cols = weight.shape
    blocks = rng.integers(0, 256, (rows, cols // size, type_size), np.uint8)

    def with_scale(scale: float) -> Array:
        for offset, ratio in RANDOM_BLOCKS[kind]:
            jitter = scale * ratio * rng.uniform(0.9, 1.1, blocks.shape[:2])
            blocks[..., offset : offset + 2] = jitter.astype("<f2")[..., None].view(np.uint8)
        return blocks.reshape(rows, -1)

    deviation = float(gguf.quants.dequantize(with_scale(1.0), kind).std())
    return with_scale(float(weight.std()) / deviation)


def write_gguf(
    path: Path,
    family: str,
    weights: Mapping[str, Array],
    metadata: Mapping[str, Any],
    quant: Type | Mapping[str, Type] = Type.F32,
    rng: np.random.Generator | None = None,
    given: Container[str] = (),
) -> Path:
    """Float32 weights to a file; types that gguf-py cannot quantize get random blocks, which takes an rng.

    given:  names of weights whose values count, so that random blocks cannot stand for them
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, family)
    for key, value in metadata.items():
        if value is not None:
            _add(writer, key, value)
    for name, weight in weights.items():
        kind = _type_of(name, quant) if weight.ndim > 1 else Type.F32
        if kind in RANDOM_BLOCKS:
            if rng is None or name in given:
                raise ValueError(f"{name}: {kind.name} is written with random weights only")
            data = random_blocks(rng, kind, weight)
        else:
            data = gguf.quants.quantize(np.ascontiguousarray(weight, np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _type_of(name: str, quant: Type | Mapping[str, Type]) -> Type:
    if isinstance(quant, Mapping):
        return next((kind for pattern, kind in quant.items() if fnmatch(name, pattern)), Type.F32)
    return quant


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, tuple):
        writer.add_key_value(key, value[0], value[1])
    elif isinstance(value, list | bytes):
        writer.add_array(key, value)
    else:
        kinds = {bool: Value.BOOL, int: Value.UINT32, float: Value.FLOAT32, str: Value.STRING}
        writer.add_key_value(key, value, kinds[type(value)])


def vocabulary_metadata(kind: str, n_vocab: int, family: str) -> dict[str, Any]:
    """The tokenizer.* keys of a small vocabulary: "bpe" (byte level) or "spm" (scores and byte fallback)."""
    return _bpe(n_vocab, family) if kind == "bpe" else _spm(n_vocab)


def byte_alphabet() -> list[str]:
    """The 256 printable characters that stand for bytes in byte-level BPE."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]


def _bpe(n_vocab: int, family: str) -> dict[str, Any]:
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*control, *byte_alphabet()]
    merges: list[str] = []
    for merge in MERGES.strip().replace("\n", "|").split("|"):
        left, right = merge.split(" ")
        if left in tokens and right in tokens and left + right not in tokens:
            merges.append(merge)
            tokens.append(left + right)
    types = [gguf.TokenType.CONTROL] * len(control) + [gguf.TokenType.NORMAL] * (len(tokens) - len(control))
    tokens, types = _filled(tokens, types, n_vocab)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2" if family.startswith("qwen") else "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _spm(n_vocab: int) -> dict[str, Any]:
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    types = [gguf.TokenType.CONTROL] * len(control)
    types[3] = gguf.TokenType.UNKNOWN
    pieces = PIECES.split()
    letters = ["▁", *(chr(c) for c in range(33, 127))]
    tokens = [*control, *(f"<0x{b:02X}>" for b in range(256)), *pieces, *letters]
    types += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * (len(pieces) + len(letters))
    n_real = len(tokens)
    tokens, types = _filled(tokens, types, n_vocab)
    scores = [0.0] * len(tokens)
    for i in range(len(control) + 256, n_real):
        scores[i] = -float(i - len(control) - 256)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _filled(tokens: list[str], types: list[int], n_vocab: int) -> tuple[list[str], list[int]]:
    if len(tokens) > n_vocab:
        raise ValueError(f"n_vocab is {n_vocab}, this vocabulary needs {len(tokens)} at least")
    spare = n_vocab - len(tokens)
    return tokens + [f"<unused{i}>" for i in range(spare)], [int(t) for t in types] + [5] * spare
