"""What a model's file says about itself, read without loading it."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from edgert import store
from edgert.errors import EdgertError


@dataclass(frozen=True)
class Facts:
    """size in bytes; modified in seconds of Unix time; digest: of the file's name, size and time, not of its bytes."""

    size: int = 0
    modified: float = 0.0
    digest: str = ""
    family: str = ""
    parameters: str = ""
    quantization: str = ""
    template: str = ""
    licence: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


def of(source: str | Path) -> Facts:
    """The facts of what `edgert.load` would load; empty ones where there is no readable file."""
    try:
        path = store.resolve(source)
        state = path.stat()
        return _read(path, state.st_size, state.st_mtime)
    except (EdgertError, OSError):
        return Facts()


@lru_cache(maxsize=64)
def _read(path: Path, size: int, modified: float) -> Facts:
    from edgert.quantize.gguf_file import GGUFFile

    with GGUFFile.open(path) as file:
        counts: Counter[str] = Counter()
        for tensor in file.tensors.values():
            counts[tensor.format.name] += math.prod(tensor.shape)
        told = {
            name: value
            for name, value in file.metadata.items()
            if isinstance(value, str | int | float | bool) and name != "tokenizer.chat_template"
        }
        return Facts(
            size,
            modified,
            "sha256:" + hashlib.sha256(f"{path.name} {size} {modified}".encode()).hexdigest(),
            file.architecture,
            _short(sum(counts.values())),
            counts.most_common(1)[0][0] if counts else "",
            str(file.metadata.get("tokenizer.chat_template") or ""),
            str(file.metadata.get("general.license") or ""),
            told,
        )


def _short(count: int) -> str:
    """A number of parameters as people say it."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
