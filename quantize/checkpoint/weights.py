"""Which safetensors files make up a checkpoint: one, or the shards of an index, all there and nothing besides."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from edgert.errors import EdgertError, ModelFileError, UnsupportedFormatError
from edgert.quantize.checkpoint.config import load_json
from edgert.quantize.checkpoint.safetensors import Entry, SafetensorsFile

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def open_weights(folder: Path, stack: contextlib.ExitStack) -> tuple[dict[str, Entry], list[Path]]:
    """Every tensor by its name in the checkpoint, and the files; the stack closes them.

    Raises: ModelFileError that lists what is missing or left over.
    """
    index = folder / _INDEX
    if index.is_file():
        weight_map = _weight_map(index)
        names = sorted(set(weight_map.values()))
        _refuse_missing(folder, names, f"which {_INDEX} lists")
        present = [path.name for path in folder.glob("*.safetensors") if _is_part(path.name, names)]
        if extra := sorted(set(present) - set(names)):
            raise ModelFileError(
                f"{folder}: {', '.join(extra)} is in no entry of {_INDEX}: the parts do not belong together; "
                "download the checkpoint again."
            )
    else:
        weight_map = None
        names = _unindexed(folder)
    files = []
    for name in names:
        files.append(SafetensorsFile(folder / name))
        stack.callback(files[-1].close)
    tensors: dict[str, Entry] = {}
    for file in files:
        for name, entry in file.tensors.items():
            if name in tensors:
                raise ModelFileError(
                    f"{folder}: the tensor {name!r} is both in {tensors[name].file.path.name} and {file.path.name}."
                )
            tensors[name] = entry
    if weight_map is not None:
        _check_index(folder, weight_map, tensors)
    return tensors, [file.path for file in files]


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = load_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index} has no weight_map: download it again.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file or "\\" in file:
            raise ModelFileError(
                f"{index}: {name!r} is said to be in {file!r}, which is no safetensors file beside it."
            )
    return weight_map


def _refuse_missing(folder: Path, names: list[str], why: str) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ModelFileError(f"{folder} lacks {shown}, {why}: download it to the same folder.")


def _is_part(name: str, names: list[str]) -> bool:
    """Whether a file looks like a shard of the same series as the index's files."""
    match = _SHARD.fullmatch(name)
    stems = {shard["stem"] for shard in map(_SHARD.fullmatch, names) if shard}
    return match is not None and match["stem"] in stems


def _unindexed(folder: Path) -> list[str]:
    """model.safetensors, the only file, or a series that is complete by its names."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if _SINGLE in names:
        return [_SINGLE]
    if not names:
        raise _without_safetensors(folder)
    shards = [_SHARD.fullmatch(name) for name in names]
    series = {(shard["stem"], shard["count"]) for shard in shards if shard}
    if len(series) == 1 and all(shards):
        stem, count = series.pop()
        expected = [f"{stem}-{i + 1:0{len(count)}d}-of-{count}.safetensors" for i in range(min(int(count), 100_000))]
        _refuse_missing(folder, expected, f"parts of the same checkpoint as {names[0]}")
        return expected
    if len(names) == 1 and not shards[0]:
        return names
    raise ModelFileError(
        f"{folder} has {', '.join(names[:5])} and no {_INDEX} that says which belong together: download it as well."
    )


def _without_safetensors(folder: Path) -> EdgertError:
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if others:
        return UnsupportedFormatError(
            f"{folder} has its weights as a pickle ({', '.join(others[:3])}), which may run code when it is opened: "
            "save it as safetensors first (transformers: model.save_pretrained(folder))."
        )
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        return ModelFileError(f"{folder} has no safetensors files; name the GGUF file itself: {folder / ggufs[0]}.")
    return ModelFileError(f"{folder} has no *.safetensors files: it is not a model in Hugging Face's format.")


def _check_index(folder: Path, weight_map: dict[str, str], tensors: dict[str, Entry]) -> None:
    """Index and files name the same tensors in the same places."""
    wrong = [name for name, file in weight_map.items() if name not in tensors or tensors[name].file.path.name != file]
    if wrong:
        raise ModelFileError(
            f"{folder}: {_INDEX} says that {wrong[0]!r} is in {weight_map[wrong[0]]}, and it is not "
            f"({len(wrong)} in all): the parts do not belong together; download the checkpoint again."
        )
    orphans = [name for name in tensors if name not in weight_map]
    if orphans:
        raise ModelFileError(
            f"{folder}: {tensors[orphans[0]].file.path.name} holds the tensor {orphans[0]!r}, which {_INDEX} does not "
            f"list ({len(orphans)} in all): the parts do not belong together; download the checkpoint again."
        )
