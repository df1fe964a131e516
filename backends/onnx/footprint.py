"""How much memory the onnx backend takes for a model: the estimate behind `plan` and the check at load."""

from __future__ import annotations

from edgert.quantize.architecture import Architecture
from edgert.quantize.gguf_file import GGUFFile


def footprint(file: GGUFFile, a: Architecture, n_ctx: int, n_full: float = 1) -> tuple[int, int, int]:
    """Bytes of weights, as converted and as the provider lays them out again; of a float32 cache; of logits."""
    per_position = a.n_layer * 2 * a.n_head_kv * a.head_dim * 4
    return 2 * file.n_bytes, round(n_ctx * n_full) * per_position, 4 * a.n_vocab
