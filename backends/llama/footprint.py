"""How much memory llama.cpp takes for a model, on GPUs and on the processor: the estimates behind `plan`.

Measured against: the peak of a process that fills the context, by `tests/bench/plan.py --backend llama`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from edgert.backends.cpu.footprint import Footprint
from edgert.quantize.architecture import is_matrix

if TYPE_CHECKING:
    from edgert.quantize.architecture import Architecture
    from edgert.quantize.gguf_file import GGUFFile

N_UBATCH = 512  # tokens of a pass over the layers
RESERVE = 512 << 20  # bytes of a GPU left to its driver's context and to scratch memory

# Python with llama.cpp's library and both tokenizers, resident: measured on x86-64 Linux with vocabularies of 49,152
# and of 262,144 tokens.
PROGRAM = 110_000_000
PROGRAM_PER_TOKEN = 315

# Types that llama.cpp copies into layouts of its own, by the words of its system_info; the file stays mapped besides.
COPIED = {
    "AVX2": {"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"},
    "AVX512": {"Q2_K"},
    "DOTPROD": {"Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"},
    "AMX_INT8": {"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"},
}
COPIED_ROWS = 8  # of which a matrix must have a multiple


def copied_types(system: str, without: Collection[str] = ()) -> set[str]:
    """What a build copies, by its system_info; `without` names instructions that it is kept from."""
    words = {word.strip() for word in system.rpartition(":")[2].split("|")}
    if "REPACK = 1" not in words:
        return set()
    return {kind for name, kinds in COPIED.items() if f"{name} = 1" in words and name not in without for kind in kinds}


def cpu_footprint(
    file: GGUFFile, a: Architecture, n_ctx: int, n_positions: int, kv_bytes: float, copied: Collection[str]
) -> Footprint:
    """Bytes of a model on the processor: what stays mapped of the file, copies, a cache that is whole from the start.

    n_positions:  of the cache
    kv_bytes:     of one element of the cache
    copied:       types as `copied_types` tells them
    """

    def is_copied(name: str) -> bool:
        tensor = file.tensor(name)
        return is_matrix(name, tensor.shape) and tensor.format.name in copied and tensor.n_rows % COPIED_ROWS == 0

    table = "token_embd.weight"  # is looked up where it is mapped, and copied if it is the head as well
    kept = [name != table and is_copied(name) for name in file.tensors]
    first, last = kept.index(False), len(kept) - kept[::-1].index(False)  # beyond them the file is mapped no more
    held = list(file.tensors)[first:last]
    held += [name for name in file.tensors if is_copied(name) and (name != table or a.tied_head)]
    rows = min(N_UBATCH, n_ctx)
    mask = 4 * rows * n_positions
    return Footprint(
        weights=sum(file.tensor(name).n_bytes for name in held),
        kv=a.n_layer * kv_of_layer(a, n_positions, kv_bytes),
        kv_per_token=a.n_layer * kv_of_layer(a, 1, kv_bytes),
        buffers=activations(a, rows) + mask + 4 * a.n_vocab,
        program=PROGRAM + PROGRAM_PER_TOKEN * a.n_vocab,
    )


def gpu_bytes(
    file: GGUFFile, a: Architecture, n_positions: int, kv_bytes: float, n_ubatch: int = N_UBATCH
) -> tuple[int, int, int]:
    """Bytes of all layers and the head, of their cache, and of what each GPU needs besides (driver and scratch).

    kv_bytes:  of one element of the cache
    """
    layers = sum(layer_bytes(file, a, i) for i in range(a.n_layer))
    return layers + head_bytes(file, a), a.n_layer * kv_of_layer(a, n_positions, kv_bytes), besides(a, n_ubatch)


def layer_bytes(file: GGUFFile, a: Architecture, i: int) -> int:
    return sum(file.tensor(name).n_bytes for name in a.layer_tensors(i))


def head_bytes(file: GGUFFile, a: Architecture) -> int:
    return file.tensor("token_embd.weight" if a.tied_head else "output.weight").n_bytes


def kv_of_layer(a: Architecture, n_positions: int, kv_bytes: float) -> int:
    """Bytes of a layer's cache."""
    return math.ceil(2 * a.n_head_kv * a.head_dim * n_positions * kv_bytes)


def besides(a: Architecture, n_ubatch: int) -> int:
    """Bytes that each GPU needs besides weights and cache."""
    return RESERVE + activations(a, n_ubatch) + 4 * n_ubatch * a.n_vocab


def activations(a: Architecture, n_ubatch: int) -> int:
    """Bytes of what a pass computes, without its logits."""
    return 4 * n_ubatch * (4 * a.n_embd + 2 * a.n_ff + 2 * a.n_head * a.head_dim)
