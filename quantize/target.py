"""Whether a result can be written under a name: asked before the work, so that it is not in vain."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from edgert.errors import DoesNotFitError, ModelFileError, RequestError


def check_target(path: str | Path, reads: Iterable[str | Path] = (), paths: Sequence[Path] = ()) -> Path:
    """The file itself that a name or link stands for.

    reads:  files that the work reads, which it must not replace; texts may be names of sets
    paths:  further names under which it will write

    Raises: ModelFileError for a name under which nothing can be written; RequestError for a file that is read.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise ModelFileError(f"{path} cannot be written: the folder {target.parent} does not exist.")
    if not os.access(target.parent, os.W_OK):
        raise ModelFileError(f"{path} cannot be written: the folder {target.parent} may only be read.")
    for file in (target, *paths):
        if file.exists() and not file.is_file():
            raise ModelFileError(f"{file} cannot be written: a folder or device has that name.")
    part = re.compile(re.escape(target.stem) + r"-\d{5}-of-\d{5}\.gguf")
    for read in reads:
        file = Path(os.path.realpath(read))
        if file.exists() and (file == target or (file.parent == target.parent and part.fullmatch(file.name))):
            raise RequestError("output", f"is {path}, and would replace {read}, which is read: choose another name")
    return target


def check_room(path: Path, needed: int) -> None:
    """Refuses what the disk has no room for, in bytes. Raises: DoesNotFitError."""
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise DoesNotFitError(
            f"{path} needs {_size(needed)} more and its disk has {_size(free)} free: "
            "make room, choose another place or a smaller size."
        )


def _size(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"
