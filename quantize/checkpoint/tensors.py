"""The checkpoint's tensors under GGUF's names, in the order of the computation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize.architecture import expected
from edgert.quantize.checkpoint.config import Config
from edgert.quantize.checkpoint.experts import Stack, blocks_of, parts_of
from edgert.quantize.checkpoint.families.family import EXPERT, Family
from edgert.quantize.checkpoint.hyperparameters import Sizes
from edgert.quantize.checkpoint.naming import Naming
from edgert.quantize.checkpoint.rows import order_of, pieces_of
from edgert.quantize.checkpoint.safetensors import Entry
from edgert.quantize.checkpoint.stored import CheckpointTensor, ConstantTensor, NormedHead
from edgert.quantize.gguf_file import Metadata, Model
from edgert.quantize.gguf_value import Value
from edgert.quantize.source_tensor import SourceTensor

_FLOATS = ("F32", "F16", "BF16")
_CODED = (".codes", ".scales")  # endings of the parts of experts in MXFP4, by the names that families give them
_COMPARE_BYTES = 1 << 24


class Mapping:
    """Assigns every tensor of a checkpoint: to a GGUF name, or to the list of what is left out.

    Raises: UnsupportedFormatError, ModelFileError that name a tensor that is unknown, missing or of a wrong shape.
    """

    def __init__(self, folder: Path, config: Config, family: Family, entries: dict[str, Entry]) -> None:
        self.folder = folder
        self.family = family
        self.skipped: list[tuple[str, str]] = []
        self.notices: list[str] = []
        self._head_lengths = config.get("head_lengths")
        self._found: dict[str, Entry] = {}
        self._experts: dict[str, dict[int, Entry]] = {}  # those that stand apart, by number
        naming = Naming(config, family, entries)
        for name, entry in entries.items():
            reason = naming.reason(name)
            if reason:
                self.skipped.append((name, reason))
                continue
            target = naming.target(name)
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

    @property
    def n_vocab(self) -> int:
        """Rows of the table of tokens."""
        return self._entry("token_embd.weight").shape[0]

    def settle_head(self, config: Config) -> None:
        """Drops a head that equals the table of tokens; keeps one that differs, whatever config.json says."""
        tied = config.get("tie_word_embeddings")
        head, table = self._found.get("output.weight"), self._entry("token_embd.weight")
        if self._head_lengths:
            self._found.setdefault("output.weight", table)
            return
        if head is None:
            if tied is False and any(name.endswith("Model") for name in config.classes):
                self.notices.append("there is no head, without which a model embeds texts and should write none")
            elif tied is False:
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
            made |= self._made_of(name, entry, sizes)
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

    def _made_of(self, name: str, entry: Entry, sizes: Sizes) -> dict[str, SourceTensor]:
        """The GGUF tensors of a stored one that the family calls `name`."""
        if name.endswith(_CODED):
            stem = name.rpartition(".")[0]
            codes, scales = (self._entry(f"{stem}{end}") for end in _CODED)
            return blocks_of(f"{stem}.weight", codes, scales, self.family.in_turn)
        if "_exps." in name:
            return parts_of(name, entry, self._in_columns(name, sizes.n_embd), self.family.in_turn)
        whole = name.split(".")[-2]
        pieces = pieces_of(whole, entry.shape[0], self.family, sizes)
        if pieces:
            named = {name.replace(whole, part): rows for part, rows in pieces.items()}
            return {own: CheckpointTensor(own, entry, order=rows) for own, rows in named.items()}
        tensor = self._tensor(name, entry, sizes)
        if name == "output.weight" and self._head_lengths:
            return {name: NormedHead(tensor, columns=self._head_lengths == "columns")}
        return {name: tensor}

    def _in_columns(self, name: str, n_embd: int) -> bool:
        """Whether the stacked experts of a tensor's layer stand columns first."""
        if self.family.expert_columns != "either":
            return self.family.expert_columns == "always"
        layer = name.rpartition(".ffn_")[0]
        _, *down = self._entry(f"{layer}.ffn_down_exps.weight").shape
        _, *gate_up = self._entry(f"{layer}.ffn_gate_up_exps.weight").shape
        return down[-1] == n_embd if down[0] != down[-1] else gate_up[0] == n_embd

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
        order = order_of(part, entry.shape[0], self.family, sizes)
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
