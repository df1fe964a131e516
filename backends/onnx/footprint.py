"""How much memory the onnx backend takes for a model: the estimate behind `plan` and the check at load."""

from __future__ import annotations

from math import prod

from edgert.backends.onnx.packing import PACKINGS
from edgert.quantize.architecture import Architecture, is_matrix
from edgert.quantize.gguf_file import GGUFFile


def footprint(file: GGUFFile, a: Architecture, n_ctx: int, n_full: float = 1) -> tuple[int, int, int]:
    """Bytes of weights, as converted and as the provider lays them out again; of a float32 cache; of logits."""
    per_position = a.n_layer * 2 * a.n_head_kv * a.head_dim * 4
    return 2 * converted_bytes(file, a), round(n_ctx * n_full) * per_position, 4 * a.n_vocab


def converted_bytes(file: GGUFFile, a: Architecture) -> int:
    """Bytes of the weights file, but for what aligns its tensors: rows of embeddings are read from the GGUF file."""
    total = 0.0
    for name, shape in a.tensors().items():
        if name == "token_embd.weight" and not a.tied_head:
            continue
        packing = PACKINGS.get(file.tensor(name).format.name) if is_matrix(name, shape) else None
        each = packing.bits / 8 + 4 * (1 + packing.has_rest) / packing.block_size if packing else 4
        total += each * prod(shape)
    return round(total)
