"""The checkpoint's tensors under GGUF's names, in the order of the computation, each read as GGUF stores it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize.checkpoint.config import Config
from edgert.quantize.checkpoint.families import OUTER_NAMES, Family
from edgert.quantize.checkpoint.hyperparameters import Sizes
from edgert.quantize.checkpoint.safetensors import Entry
from edgert.quantize.formats import FORMATS
from edgert.quantize.source_tensor import SourceTensor

# name in the layer; rows and columns; the field of Family that asks for it ("": every family)
LAYER_TENSORS = (
    ("attn_norm.weight", "embd", ""),
    ("attn_q.weight", "q embd", ""),
    ("attn_q.bias", "q", "qkv_bias"),
    ("attn_k.weight", "kv embd", ""),
    ("attn_k.bias", "kv", "qkv_bias"),
    ("attn_v.weight", "kv embd", ""),
    ("attn_v.bias", "kv", "qkv_bias"),
    ("attn_q_norm.weight", "head", "qk_norm"),
    ("attn_k_norm.weight", "head", "qk_norm"),
    ("attn_output.weight", "embd q", ""),
    ("post_attention_norm.weight", "embd", "post_norm"),
    ("ffn_norm.weight", "embd", ""),
    ("ffn_gate.weight", "ff embd", ""),
    ("ffn_up.weight", "ff embd", ""),
    ("ffn_down.weight", "embd ff", ""),
    ("post_ffw_norm.weight", "embd", "post_norm"),
)
_FLOATS = ("F32", "F16", "BF16")
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
# What a checkpoint may hold besides the weights of the text model.
_SKIPPED = (
    (r".*\.rotary_emb\.inv_freq|rotary_emb\.inv_freq", "a buffer that follows from config.json"),
    (r".*\.self_attn\.masked_bias|.*\.self_attn\.bias", "a mask that follows from the positions"),
    (r"(model\.)?(vision_tower|multi_modal_projector|vision_model)\..*", "of the part that sees pictures"),
)
_COMPARE_BYTES = 1 << 24


class CheckpointTensor(SourceTensor):
    """A tensor of a safetensors file.

    n_head:  heads whose rows change places, from (2, head_dim / 2) to (head_dim / 2, 2); 0: none do
    shift:   added to every value
    """

    def __init__(self, name: str, entry: Entry, *, n_head: int = 0, shift: float = 0.0) -> None:
        super().__init__(name, entry.shape, FORMATS[entry.dtype])
        self.entry = entry
        self._n_head = n_head
        self._shift = np.float32(shift)

    @property
    def described(self) -> str:
        return f"Tensor {self.entry.name!r} of {self.entry.file.path}"

    def _read(self, start: int, stop: int) -> NDArray[np.float32]:
        if self._n_head:
            return self._permuted(start, stop)
        values = self._stored(start, stop)
        return values + self._shift if self._shift else values

    def _stored(self, start: int, stop: int) -> NDArray[np.float32]:
        row_bytes = self.format.row_bytes(self.n_cols)
        data = np.empty((stop - start, row_bytes), np.uint8)
        self.entry.read_into(data, start * row_bytes)
        return self.format.dequantize(data)

    def _permuted(self, start: int, stop: int) -> NDArray[np.float32]:
        """Reads the whole heads around the rows; of a bias, whose row is all heads, everything."""
        if len(self.shape) == 1:
            return _neighbours(self._stored(0, 1).reshape(-1, 1), self._n_head).reshape(1, -1)
        size = self.n_rows // self._n_head
        first, last = start // size, -(-stop // size)
        heads = _neighbours(self._stored(first * size, last * size), last - first)
        return heads[start - first * size : stop - first * size]


class ConstantTensor(SourceTensor):
    """A small tensor that no file holds."""

    def __init__(self, name: str, values: NDArray[np.float32]) -> None:
        super().__init__(name, values.shape, FORMATS["F32"])
        self._values = values.reshape(-1, values.shape[-1])

    def _read(self, start: int, stop: int) -> NDArray[np.float32]:
        return self._values[start:stop]


def _neighbours(rows: NDArray[np.float32], n_head: int) -> NDArray[np.float32]:
    """(n_head * head_dim, n): rows i and i + head_dim / 2 of each head become 2i and 2i + 1."""
    if n_head == 0:
        return rows
    halves = rows.reshape(n_head, 2, -1, rows.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


class Mapping:
    """Assigns every tensor of a checkpoint: to a GGUF name, or to the list of what is left out.

    Raises: UnsupportedFormatError, ModelFileError that name a tensor that is unknown, missing or of a wrong shape.
    """

    def __init__(self, folder: Path, family: Family, entries: dict[str, Entry]) -> None:
        self.folder = folder
        self.family = family
        self.skipped: list[tuple[str, str]] = []
        self.notices: list[str] = []
        self._found: dict[str, Entry] = {}
        for name, entry in entries.items():
            reason = next((why for pattern, why in _SKIPPED if re.fullmatch(pattern, name)), None)
            if reason:
                self.skipped.append((name, reason))
                continue
            target = self._target(name)
            if target is None and name.endswith(".bias") and _is_zero(entry):
                self.skipped.append((name, "all zeros"))
                continue
            if target is None:
                raise UnsupportedFormatError(
                    f"{folder} has the tensor {name!r}, which edgert's {family.name} does not know: "
                    "without it the answers would be wrong."
                )
            if target in self._found:
                raise ModelFileError(
                    f"{folder} holds {target!r} twice: as {self._found[target].name!r} and as {name!r}."
                )
            if entry.dtype not in _FLOATS:
                raise UnsupportedFormatError(
                    f"{folder}: the tensor {name!r} is {entry.dtype}; edgert converts {', '.join(_FLOATS)}."
                )
            self._found[target] = entry
        self._in_first_layer = {name.removeprefix("blk.0.") for name in self._found if name.startswith("blk.0.")}

    def _target(self, name: str) -> str | None:
        """The GGUF name of a checkpoint's tensor; None for one that the family does not have."""
        for prefix in _PREFIXES:
            if not name.startswith(prefix):
                continue
            rest = name.removeprefix(prefix)
            if rest in OUTER_NAMES:
                return OUTER_NAMES[rest]
            layer = re.fullmatch(r"layers\.(\d{1,6})\.(.+)", rest)
            if layer and layer[2] in self.family.layer_names:
                return f"blk.{int(layer[1])}.{self.family.layer_names[layer[2]]}"
        return None

    @property
    def n_vocab(self) -> int:
        """Rows of the table of tokens."""
        return self._entry("token_embd.weight").shape[0]

    def settle_head(self, config: Config) -> None:
        """Drops a head that equals the table of tokens; keeps one that differs, whatever config.json says."""
        tied = config.get("tie_word_embeddings")
        head, table = self._found.get("output.weight"), self._entry("token_embd.weight")
        if head is None:
            if tied is False:
                raise ModelFileError(
                    f"{self.folder} has no lm_head.weight, and config.json says that the head is not tied to the "
                    "table of tokens (tie_word_embeddings): a shard may be missing; download it again."
                )
            if tied is None and not self.family.tied_head:
                self.notices.append("there is no lm_head.weight, so the table of tokens serves as the head")
        elif same_values(head, table):
            del self._found["output.weight"]
            self.skipped.append((head.name, f"equal to {table.name}, which serves as the head"))
        elif tied is True or (tied is None and self.family.tied_head):
            self.notices.append(
                f"{head.name} differs from {table.name} and is kept, although config.json says that they are tied"
            )

    def tensors(self, sizes: Sizes, rope_factors: NDArray[np.float32] | None) -> Iterator[SourceTensor]:
        """All tensors of the GGUF file in order, with their shapes checked; none may be left over."""
        yield self._tensor("token_embd.weight", (sizes.n_vocab, sizes.n_embd))
        if rope_factors is not None:
            yield ConstantTensor("rope_freqs.weight", rope_factors)
        for i in range(sizes.n_layer):
            for name, shape, condition in LAYER_TENSORS:
                if self._applies(name, condition):
                    yield self._tensor(f"blk.{i}.{name}", sizes.shape(shape), self._n_head(name, sizes))
        yield self._tensor("output_norm.weight", (sizes.n_embd,))
        if "output.weight" in self._found:
            yield self._tensor("output.weight", (sizes.n_vocab, sizes.n_embd))
        if self._found:
            name, entry = next(iter(self._found.items()))
            raise ModelFileError(
                f"{self.folder} has the tensor {entry.name!r} ({name}), and config.json describes {sizes.n_layer} "
                f"layers of {self.family.name} without it ({len(self._found)} such tensors)."
            )

    def _applies(self, name: str, condition: str) -> bool:
        if not condition:
            return True
        wanted = getattr(self.family, condition)
        return name in self._in_first_layer if wanted is None else bool(wanted)

    def _n_head(self, name: str, sizes: Sizes) -> int:
        if not self.family.rotated:
            return 0
        part = name.partition(".")[0]
        return {"attn_q": sizes.n_head, "attn_k": sizes.n_head_kv}.get(part, 0)

    def _tensor(self, name: str, shape: tuple[int, ...], n_head: int = 0) -> CheckpointTensor:
        entry = self._entry(name)
        del self._found[name]
        if entry.shape != shape:
            raise ModelFileError(
                f"{self.folder}: the tensor {entry.name!r} has the shape {entry.shape}, and by config.json it should "
                f"have {shape}."
            )
        shift = self.family.norm_shift if name.endswith("norm.weight") else 0.0
        return CheckpointTensor(name, entry, n_head=n_head, shift=shift)

    def _entry(self, name: str) -> Entry:
        if name not in self._found:
            raise ModelFileError(
                f"{self.folder} lacks the tensor for {name!r}, which {self.family.name} needs: a shard may be missing, "
                "or config.json belongs to another model."
            )
        return self._found[name]


def _is_zero(entry: Entry) -> bool:
    data = bytearray(entry.n_bytes)
    entry.read_into(data)
    return not any(data)


def same_values(a: Entry, b: Entry) -> bool:
    """Whether two tensors hold the same bytes in the same shape."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    for start in range(0, a.n_bytes, _COMPARE_BYTES):
        pieces = [bytearray(min(_COMPARE_BYTES, a.n_bytes - start)) for _ in range(2)]
        a.read_into(pieces[0], start)
        b.read_into(pieces[1], start)
        if pieces[0] != pieces[1]:
            return False
    return True
