"""The checkpoint's tensors under GGUF's names, in the order of the computation, each read as GGUF stores it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize import widening
from edgert.quantize.architecture import expected
from edgert.quantize.checkpoint.config import Config
from edgert.quantize.checkpoint.experts import Stack, blocks_of, parts_of
from edgert.quantize.checkpoint.families.family import EXPERT, Family
from edgert.quantize.checkpoint.hyperparameters import Sizes
from edgert.quantize.checkpoint.safetensors import Entry
from edgert.quantize.formats import FORMATS
from edgert.quantize.gguf_file import Metadata, Model
from edgert.quantize.gguf_value import Value
from edgert.quantize.source_tensor import SourceTensor

_FLOATS = ("F32", "F16", "BF16")
_CODED = (".codes", ".scales")  # endings of the parts of experts in MXFP4, by the names that families give them
_PREFIXES = (
    *(
        "bert.encoder.",
        "encoder.",
        "bert.",
        "roberta.encoder.",
        "roberta.",
        "model.language_model.",
        "language_model.model.",
        "language_model.",
        "model.",
        "transformer.",
        "gpt_neox.",
    ),
    "",
)
# What a checkpoint may hold besides the weights of the text model.
_SKIPPED = (
    (r".*\.rotary_emb\.inv_freq|rotary_emb\.inv_freq", "a buffer that follows from config.json"),
    (r".*\.(self_attn|attn|attention)\.(masked_)?bias", "a mask that follows from the positions"),
    (r"((ro)?berta?\.)?(pooler|cls)\..*", "of the parts that guess words and pairs of sentences"),
    (r"((ro)?berta?\.)?embeddings\.position_ids", "a buffer that counts"),
    (
        r"(model\.)?(vision_tower|multi_modal_projector|vision_model|embed_vision)\..*",
        "of the part that sees pictures",
    ),
    (r"(model\.)?(audio_tower|embed_audio)\..*", "of the part that hears"),
)
_COMPARE_BYTES = 1 << 24


class CheckpointTensor(SourceTensor):
    """A tensor of a safetensors file.

    order:       int64: which row of the stored tensor (or element of a bias) each row is; None: the same
    transposed:  whether it is stored columns first
    shift:       added to every value
    """

    def __init__(
        self,
        name: str,
        entry: Entry,
        *,
        order: NDArray[np.int64] | None = None,
        transposed: bool = False,
        shift: float = 0.0,
    ) -> None:
        super().__init__(name, entry.shape[::-1] if transposed else entry.shape, FORMATS[entry.dtype])
        self.entry = entry
        self._order, self._transposed = order, transposed
        self._shift = np.float32(shift)

    @property
    def described(self) -> str:
        return f"Tensor {self.entry.name!r} of {self.entry.file.path}"

    def _read(self, start: int, stop: int) -> NDArray[np.float32]:
        if self._transposed:
            values = np.ascontiguousarray(self._stored(0, self.entry.shape[0], self.n_rows).T[start:stop])
        elif self._order is None:
            values = self._stored(start, stop, self.n_cols)
        elif len(self.shape) == 1:
            values = self._stored(0, 1, self.n_cols)[:, self._order]
        else:
            values = self._ordered(self._order[start:stop])
        return values + self._shift if self._shift else values

    def _stored(self, start: int, stop: int, n_cols: int) -> NDArray[np.float32]:
        row_bytes = self.format.row_bytes(n_cols)
        data = np.empty((stop - start, row_bytes), np.uint8)
        self.entry.read_into(data, start * row_bytes)
        return widening.dequantize(self.format, data)

    def _ordered(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Reads what lies around the rows, or if these are far apart each run of neighbours."""
        first, last = int(rows.min()), int(rows.max()) + 1
        if last - first <= 2 * len(rows):
            return self._stored(first, last, self.n_cols)[rows - first]
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        return np.concatenate([self._stored(int(run[0]), int(run[-1]) + 1, self.n_cols) for run in runs])


class ConstantTensor(SourceTensor):
    """A small tensor that no file holds."""

    def __init__(self, name: str, values: NDArray[np.float32]) -> None:
        super().__init__(name, values.shape, FORMATS["F32"])
        self._values = values.reshape(-1, values.shape[-1])

    def _read(self, start: int, stop: int) -> NDArray[np.float32]:
        return self._values[start:stop]


def neighbours(n_head: int, head_dim: int) -> NDArray[np.int64]:
    """The order in which rows i and i + head_dim / 2 of each head become 2i and 2i + 1."""
    rows = np.arange(n_head * head_dim, dtype=np.int64).reshape(n_head, 2, -1)
    return rows.swapaxes(1, 2).reshape(-1)


def _apart(sizes: Sizes) -> NDArray[np.int64]:
    """The order in which all of q, all of k and all of v come from a stack of (group of q, k, v) for each k."""
    group = sizes.n_head // sizes.n_head_kv
    n_rows = (group + 2) * sizes.n_head_kv * sizes.head_dim
    rows = np.arange(n_rows, dtype=np.int64).reshape(sizes.n_head_kv, group + 2, sizes.head_dim)
    return np.concatenate([rows[:, :group].reshape(-1), rows[:, group].reshape(-1), rows[:, group + 1].reshape(-1)])


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
        self._experts: dict[str, dict[int, Entry]] = {}  # those that stand apart, by number
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
            if entry.dtype not in (("U8",) if target.endswith(_CODED) else _FLOATS):
                raise UnsupportedFormatError(
                    f"{folder}: the tensor {name!r} is {entry.dtype}; edgert converts {', '.join(_FLOATS)}."
                )
            expert = EXPERT.search(name)
            if expert:
                other = self._experts.setdefault(target, {}).setdefault(int(expert[1]), entry)
            else:
                other = self._found.setdefault(target, entry)
            if other is not entry:
                raise ModelFileError(f"{folder} holds {target!r} twice: as {other.name!r} and as {name!r}.")

    def _target(self, name: str) -> str | None:
        """The GGUF name of a checkpoint's tensor; None for one that the family does not have."""
        for prefix in _PREFIXES:
            if not name.startswith(prefix):
                continue
            rest = name.removeprefix(prefix)
            layer = re.fullmatch(r"(?:layers?|h)\.(\d{1,6})\.(.+)", rest)
            target = self.family.target(layer[2], int(layer[1])) if layer else self.family.target(rest, None)
            if target:
                return target
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

    def tensors(
        self, sizes: Sizes, factors: dict[str, NDArray[np.float32]], keys: dict[str, Value]
    ) -> list[SourceTensor]:
        """All tensors of the GGUF file in order, with their shapes checked; none may be left over.

        factors:  tensors that come from config.json
        keys:     of the family, as the GGUF file will have them
        """
        made: dict[str, SourceTensor] = {name: ConstantTensor(name, values) for name, values in factors.items()}
        made |= {name: Stack(name, entries, self.folder) for name, entries in self._experts.items()}
        for name, entry in self._found.items():
            if name.endswith(_CODED):
                stem = name.rpartition(".")[0]
                codes, scales = (self._entry(f"{stem}{end}") for end in _CODED)
                made |= blocks_of(f"{stem}.weight", codes, scales, self.family.in_turn)
            elif "_exps." in name:
                made |= parts_of(name, entry, self.family.in_turn, self.family.in_turn)
            else:
                made[name] = self._tensor(name, entry, sizes)
        needed = expected(_Expected(self.folder, self.family.name, keys, made)).tensors()
        for name, shape in needed.items():
            if name not in made:
                self._entry(name)
            elif made[name].shape != shape:
                raise ModelFileError(
                    f"{self.folder}: the tensor {self._stored_as(name)!r} has the shape {made[name].shape}, and by "
                    f"config.json it should have {shape}."
                )
        left = [name for name in made if name not in needed]
        if left:
            raise ModelFileError(
                f"{self.folder} has the tensor {self._stored_as(left[0])!r} ({left[0]}), and config.json describes "
                f"{sizes.n_layer} layers of {self.family.name} without it ({len(left)} such tensors)."
            )
        return [made[name] for name in needed]

    def _stored_as(self, name: str) -> str:
        """What the checkpoint calls a tensor, as far as it has it in one piece."""
        return self._found[name].name if name in self._found else name

    def _tensor(self, name: str, entry: Entry, sizes: Sizes) -> CheckpointTensor:
        part = name.split(".")[-2]
        if (
            part in ("ffn_gate_inp_shexp", "exp_probs_b") and len(entry.shape) == 2
        ):  # one row, which GGUF has as a vector
            entry = replace(entry, shape=entry.shape[1:])
        elif part == "conv" and len(entry.shape) == 3:  # (channels, 1, taps)
            entry = replace(entry, shape=(entry.shape[0], entry.shape[2]))
        elif part == "position_embd" and self.family.first_position:
            skipped = self.family.first_position * entry.n_bytes // max(1, entry.shape[0])
            shape = (entry.shape[0] - self.family.first_position, *entry.shape[1:])
            entry = replace(entry, shape=shape, offset=entry.offset + skipped, n_bytes=entry.n_bytes - skipped)
        order = None
        heads = {"attn_q": sizes.n_head, "attn_k": sizes.n_head_kv}.get(part)
        if self.family.rotated and heads and entry.shape[0] == heads * sizes.head_dim:
            order = neighbours(heads, sizes.head_dim)
        elif self.family.fused and part == "attn_qkv":
            order = _apart(sizes)
            order = order if len(order) == entry.shape[0] else None
        transposed = self.family.transposed and name.startswith("blk.") and len(entry.shape) == 2
        shift = self.family.norm_shift if name.endswith("norm.weight") else 0.0
        return CheckpointTensor(name, entry, order=order, transposed=transposed, shift=shift)

    def _entry(self, name: str) -> Entry:
        if name not in self._found:
            raise ModelFileError(
                f"{self.folder} lacks the tensor for {name!r}, which {self.family.name} needs: a shard may be missing, "
                "or config.json belongs to another model."
            )
        return self._found[name]


class _Expected(Model[SourceTensor]):
    """What is known before all of the file's keys are, as a description wants to see it."""

    def __init__(self, path: Path, family: str, keys: dict[str, Value], tensors: dict[str, SourceTensor]) -> None:
        self.path, self.tensors = path, tensors
        own = {key: value.decode() for key, value in keys.items()}
        self.metadata = Metadata({"general.architecture": family, **own})


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
