"""Changes the metadata of a GGUF model that is already written, as when a report is added to what it describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edgert.quantize.gguf_file import GGUFFile
from edgert.quantize.gguf_value import Kind, Value
from edgert.quantize.gguf_writer import Writer

_CHUNK = 1 << 24


def read_metadata(file: GGUFFile) -> dict[str, Value]:
    """All keys with their exact types, in the order of the file."""
    metadata = {}
    for key in file.metadata:
        kind, data = file.raw_value(key)
        metadata[key] = Value(Kind(kind), data)
    return metadata


def set_metadata(path: str | Path, changes: Mapping[str, Value | None]) -> None:
    """Sets keys, or removes those whose value is None; the tensors stay as they are, bit for bit.

    The file (of several shards the first, which holds the keys) is written anew beside itself and then replaced, so
    that there is a whole model under its name at any moment.

    Raises: ModelFileError, DoesNotFitError.
    """
    with GGUFFile.open(path) as file:
        metadata = {key: value for key, value in read_metadata(file).items() if key not in changes}
        metadata |= {key: value for key, value in changes.items() if value is not None}
        own = [tensor for tensor in file.tensors.values() if tensor.path == file.path]
        plan = [(tensor.name, tensor.shape, tensor.format) for tensor in own]
        with Writer(file.path, metadata, plan) as writer:
            for tensor in own:
                for start in range(0, tensor.n_bytes, _CHUNK):
                    data = np.empty(min(_CHUNK, tensor.n_bytes - start), np.uint8)
                    tensor.read_into(data, start)
                    writer.write(tensor.name, data)
