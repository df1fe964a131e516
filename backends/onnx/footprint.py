"""How much memory the onnx backend takes for a model: the estimate behind `plan` and the check at load.

Measured against: the peak of a process that fills the context, by `tests/bench/plan.py --backend onnx`.
"""

from __future__ import annotations

from math import prod

from edgert.backends.cpu.footprint import Footprint
from edgert.backends.onnx.packing import PACKINGS
from edgert.quantize.architecture import Architecture, is_matrix
from edgert.quantize.gguf_file import GGUFFile

N_BATCH = 512  # tokens of one step
TABLE = "token_embd.weight"
SEEN = 0.5  # of a table whose rows are looked up: texts of random tokens bring all of it to memory, others a part

# Python with onnx, ONNX Runtime, Numba's loader and the tokenizer, resident: measured on x86-64 Linux with vocabularies
# of 49,152 and of 262,144 tokens: 116 MB and 158 MB.
PROGRAM = 106_000_000
PROGRAM_PER_TOKEN = 200


def footprint(file: GGUFFile, a: Architecture, n_ctx: int, n_full: float = 1, *, fused: bool = True) -> Footprint:
    """Bytes of a model with n_full contexts full of tokens in a cache of float32.

    fused:  as the CPU provider runs it; of others it is known only that they lay the weights out again
    """
    per_position = a.n_layer * 2 * a.n_head_kv * a.head_dim * 4
    return Footprint(
        weights=_laid_out(file, a) if fused else 2 * converted_bytes(file, a),
        kv=round(n_ctx * n_full) * per_position,
        kv_per_token=per_position,
        buffers=_activations(a, min(N_BATCH, n_ctx)) + 4 * a.n_vocab,
        program=PROGRAM + PROGRAM_PER_TOKEN * a.n_vocab,
    )


def _activations(a: Architecture, rows: int) -> int:
    """Bytes of what a step computes, in the memory that ONNX Runtime keeps for the next one.

    It holds about twice what is alive at once: products rounded to int8 lie beside it, and sizes do not fit gaps.
    """
    return 2 * 4 * rows * (4 * a.n_embd + 2 * a.n_ff + 2 * a.n_head * a.head_dim)


def _laid_out(file: GGUFFile, a: Architecture) -> int:
    """Bytes of the weights as the CPU provider holds them: scales are in its own layout and stay mapped besides.

    A product of rounded activations wants the sum of each block of codes too, as many numbers as scales.
    """
    total = 0.0
    for name, shape in a.tensors().items():
        codes, scales, rest = _parts(file, name, shape)
        if name == TABLE:  # rows are looked up where it is mapped, converted or in the GGUF file
            looked_up = codes + scales if a.tied_head and scales and not rest else file.tensor(name).n_bytes
            total += SEEN * looked_up
        if name != TABLE or a.tied_head:
            total += codes + 3 * scales + rest
    return round(total)


def converted_bytes(file: GGUFFile, a: Architecture) -> int:
    """Bytes of the weights file, but for what aligns its tensors: rows of embeddings are read from the GGUF file."""
    tensors = [(name, shape) for name, shape in a.tensors().items() if name != TABLE or a.tied_head]
    return round(sum(sum(_parts(file, name, shape)) for name, shape in tensors))


def _parts(file: GGUFFile, name: str, shape: tuple[int, ...]) -> tuple[float, float, float]:
    """Bytes of a tensor's codes or floats, of its scales, and of what is left over."""
    packing = PACKINGS.get(file.tensor(name).format.name) if is_matrix(name, shape) else None
    if packing is None:
        return 4 * prod(shape), 0, 0
    scales = 4 * prod(shape) / packing.block_size
    return prod(shape) * packing.bits / 8, scales, scales * packing.has_rest
