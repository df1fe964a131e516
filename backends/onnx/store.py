"""What is made of a GGUF file for ONNX Runtime, kept in the cache: weights, graphs, compiled blobs.

Everything is written under another name and renamed, so that a folder is whole or absent.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from edgert.backends.onnx import weights
from edgert.backends.onnx.style import Style
from edgert.backends.onnx.weights import Weights
from edgert.errors import DoesNotFitError
from edgert.folders import cache_root
from edgert.notes import Notes
from edgert.quantize.architecture import Architecture
from edgert.quantize.gguf_file import GGUFFile

if TYPE_CHECKING:
    import onnx

log = logging.getLogger(__name__)

VERSION = 2  # of the graphs and of the weights' layout


def root() -> Path:
    """The folder of the cache."""
    return cache_root() / "onnx"


def file_hash(file: GGUFFile) -> str:
    """sha256 of all shards, remembered for files that have not changed."""
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in file.paths]
    notes, key = Notes("hashes"), json.dumps(facts)
    known = notes.get(key)
    if isinstance(known, str):
        return known
    digest = hashlib.sha256()
    for path in file.paths:
        with path.open("rb") as stream:
            while piece := stream.read(1 << 22):
                digest.update(piece)
    found = digest.hexdigest()
    notes.put(key, found)
    return found


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class ModelFolder:
    """The folder of one model: key is the file's hash and the builder's version."""

    def __init__(self, file: GGUFFile, a: Architecture) -> None:
        """Converts the weights if that was not done before.

        Raises: DoesNotFitError when the disk has no room; ModelFileError for weights that are no numbers.
        """
        self.path = root() / f"{file_hash(file)[:24]}-{VERSION}"
        self._a = a
        try:
            self.weights = Weights.read(self.path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if self.path.exists():
                log.warning("%s is damaged (%s): the weights are converted again.", self.path, error)
                shutil.rmtree(self.path, ignore_errors=True)
            self._convert(file, a)
            self.weights = Weights.read(self.path)

    def _convert(self, file: GGUFFile, a: Architecture) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix="new-", dir=self.path.parent))
        try:
            weights.write(part, file, a)
            try:
                part.replace(self.path)
            except OSError:
                if not self.path.exists():  # else another process was faster
                    raise
        except OSError as error:
            free = shutil.disk_usage(self.path.parent).free
            raise DoesNotFitError(
                f"The weights of {file.path} cannot be written to {self.path.parent} ({error.strerror or error}; "
                f"{free >> 20} MiB are free, about {2 * file.n_bytes >> 20} MiB are needed): make room, "
                "or name another folder in EDGERT_CACHE."
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def graph(self, name: str, style: Style, build: Callable[[], onnx.ModelProto]) -> Path:
        """The file of a graph, built if it is not there."""
        path = self.path / f"{name}-{style.key}.onnx"
        if not path.exists():
            _write(path, build().SerializeToString())
        return path

    def blob(self, graph: Path, key: str) -> Path:
        """Where a graph compiled under these circumstances is kept."""
        return graph.with_name(f"{graph.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.blob.onnx")
