"""In which order rows of a stored product are those of GGUF: rotated neighbours, and q, k and v that stand together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgert.quantize.checkpoint.families.family import Family
from edgert.quantize.checkpoint.hyperparameters import Sizes

PARTS = ("attn_q", "attn_k", "attn_v")
Rows = NDArray[np.int64]


def neighbours(n_head: int, head_dim: int) -> Rows:
    """The order in which rows i and i + head_dim / 2 of each head become 2i and 2i + 1."""
    rows = np.arange(n_head * head_dim, dtype=np.int64).reshape(n_head, 2, -1)
    return rows.swapaxes(1, 2).reshape(-1)


def pieces_of(part: str, n_rows: int, family: Family, sizes: Sizes) -> dict[str, Rows]:
    """Which rows of a stored tensor become which GGUF tensor, by names in a layer; {} for one that stays whole."""
    if part == "attn_qkv" and family.apart:
        parts = rows_of_parts(family, sizes)
        return parts if sum(map(len, parts.values())) == n_rows else {}
    if part == "ffn_gate_up_shexp" and n_rows % 2 == 0:
        gate, up = np.split(np.arange(n_rows, dtype=np.int64), 2)
        return {"ffn_gate_shexp": gate, "ffn_up_shexp": up}
    return {}


def rows_of_parts(family: Family, sizes: Sizes) -> dict[str, Rows]:
    """Which rows of a product of q, k and v are whose, by the names of PARTS, and in which order."""
    group, n_kv, head_dim = sizes.n_head // sizes.n_head_kv, sizes.n_head_kv, sizes.head_dim
    rows = np.arange((group + 2) * n_kv * head_dim, dtype=np.int64)
    if family.fused == "groups":
        heads = rows.reshape(n_kv, group + 2, head_dim)
        found = [heads[:, :group], heads[:, group], heads[:, group + 1]]
    else:
        found = np.split(rows, [group * n_kv * head_dim, (group + 1) * n_kv * head_dim])
    parts = {name: part.reshape(-1) for name, part in zip(PARTS, found, strict=True)}
    if family.rotated:
        parts["attn_q"] = parts["attn_q"][neighbours(sizes.n_head, head_dim)]
        parts["attn_k"] = parts["attn_k"][neighbours(n_kv, head_dim)]
    return parts


def order_of(part: str, n_rows: int, family: Family, sizes: Sizes) -> Rows | None:
    """The order of the rows of a tensor by its name in a layer, without ending; None: as they are stored."""
    if part == "attn_qkv" and family.fused == "groups" and not family.apart:
        together = np.concatenate(list(rows_of_parts(family, sizes).values()))
        return together if len(together) == n_rows else None
    n_head = {"attn_q": sizes.n_head, "attn_k": sizes.n_head_kv}.get(part)
    if family.rotated and n_head and n_rows == n_head * sizes.head_dim:
        return neighbours(n_head, sizes.head_dim)
    return None
