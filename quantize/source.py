"""Where weights come from: a float GGUF or a folder in Hugging Face's format, seen as GGUF names and float32 rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from edgert.errors import UnsupportedFormatError
from edgert.quantize import widening
from edgert.quantize.architecture import Architecture, describe
from edgert.quantize.formats import check_finite
from edgert.quantize.gguf_file import GGUFFile, Metadata, Model, Tensor
from edgert.quantize.gguf_value import Kind, Value
from edgert.quantize.source_tensor import SourceTensor

# Keys that say how a file was quantized or split, which is the writer's business.
_OF_THE_WRITER = ("general.file_type", "general.quantization_version", "split.no", "split.count", "split.tensors.count")


class Source:
    """A model to convert or quantize. Use it in a `with`, or call close().

    path:          what the user named
    metadata:      the keys of the GGUF file to be written, with their exact types; general.file_type,
                   general.quantization_version and split.* are left to whoever writes it
    tensors:       by GGUF name, in the order of the file to be written
    skipped:       (name in the source, reason) of what is not carried over
    notices:       sentences that the user should read
    is_quantized:  whether some tensor has lost precision already
    files:         every file that was opened
    """

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Value],
        tensors: Iterable[SourceTensor],
        *,
        files: Iterable[Path] = (),
        skipped: Iterable[tuple[str, str]] = (),
        notices: Iterable[str] = (),
        close: contextlib.ExitStack | None = None,
    ) -> None:
        self.path = path
        self.metadata = {key: value for key, value in metadata.items() if key not in _OF_THE_WRITER}
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.files = tuple(files)
        self.skipped = list(skipped)
        self.notices = list(notices)
        self._resources = close or contextlib.ExitStack()

    @property
    def architecture(self) -> str:
        """general.architecture, "" when the source does not say."""
        value = self.metadata.get("general.architecture")
        return value.decode() if value is not None and value.kind == Kind.STRING else ""

    @property
    def quantized_types(self) -> tuple[str, ...]:
        """Names of the formats that have lost precision."""
        return tuple(sorted({tensor.format.name for tensor in self.tensors.values() if tensor.is_quantized}))

    @property
    def is_quantized(self) -> bool:
        return bool(self.quantized_types)

    @property
    def fingerprint(self) -> str:
        """Changes when a file of the source changes: names, sizes and times of modification."""
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in self.files]
        return repr(stats)

    def describe(self) -> Architecture:
        """What the model computes, checked as for a file that is loaded.

        Raises: UnsupportedFormatError for what edgert does not run; ModelFileError for contradictions.
        """
        return describe(self.model)

    @property
    def model(self) -> Model[SourceTensor]:
        """The source as what reads models wants to see one."""
        return _View(self)

    def close(self) -> None:
        self._resources.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _View(Model[SourceTensor]):
    """The source as describe() wants to see a model."""

    def __init__(self, source: Source) -> None:
        self.path = source.path
        self.metadata = Metadata({key: value.decode() for key, value in source.metadata.items()})
        self.tensors = source.tensors


class _GGUFTensor(SourceTensor):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.name, tensor.shape, tensor.format)
        self._tensor = tensor

    def stored(self, start: int, stop: int) -> NDArray[np.uint8]:
        data = self._bytes(start, stop)
        check_finite(self._tensor, data)
        return data

    def _read(self, start: int, stop: int) -> NDArray[np.float32]:
        return widening.dequantize(self.format, self._bytes(start, stop))

    def _bytes(self, start: int, stop: int) -> NDArray[np.uint8]:
        data = np.empty((stop - start, self._tensor.row_bytes), np.uint8)
        self._tensor.read_into(data, start * self._tensor.row_bytes)
        return data


def open_source(path: str | Path, *, allow_requantize: bool = False) -> Source:
    """Opens a GGUF file (or any shard of one) or a folder in Hugging Face's format, and checks all but the weights.

    allow_requantize:  accept weights that are quantized already, though what was lost stays lost

    Raises: ModelFileError for what is damaged, incomplete or missing; UnsupportedFormatError for families and parts
        that edgert cannot convert, and for quantized weights.
    """
    path = Path(path)
    if path.is_dir():
        from edgert.quantize.checkpoint import open_checkpoint

        return open_checkpoint(path)
    source = _open_gguf(path)
    try:
        if source.is_quantized and not allow_requantize:
            raise UnsupportedFormatError(
                f"{path} is quantized already ({', '.join(source.quantized_types)}): take the float original "
                "(a Hugging Face folder, or a GGUF of type BF16, F16 or F32), or allow it with --allow-requantize "
                "and lose more precision than the new type alone would cost."
            )
        for tensor in source.tensors.values():
            if tensor.format.decode is None:
                raise UnsupportedFormatError(
                    f"{path}: edgert cannot read the values of {tensor.name!r}, which is {tensor.format}."
                )
    except BaseException:
        source.close()
        raise
    return source


def _open_gguf(path: Path) -> Source:
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(GGUFFile.open(path))
        tensors = [_GGUFTensor(tensor) for tensor in file.tensors.values()]
        return Source(path, read_metadata(file), tensors, files=file.paths, close=stack.pop_all())
    raise AssertionError  # the stack suppresses nothing


def read_metadata(file: GGUFFile) -> dict[str, Value]:
    """All keys with their exact types, in the order of the file."""
    metadata = {}
    for key in file.metadata:
        kind, data = file.raw_value(key)
        metadata[key] = Value(Kind(kind), data)
    return metadata
