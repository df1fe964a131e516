"""From a source to a float GGUF file, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgert.errors import UnsupportedFormatError
from edgert.quantize import rounding
from edgert.quantize.formats import FILE_TYPES, FLOATS, FORMATS
from edgert.quantize.gguf_value import Value
from edgert.quantize.gguf_writer import Writer
from edgert.quantize.mixes import is_quantizable
from edgert.quantize.source import Source, open_source
from edgert.quantize.source_tensor import SourceTensor

_F16_MAX = 65519.996  # larger ones round to infinity


@dataclass(frozen=True)
class Conversion:
    """What convert() did.

    paths:    the files
    n_bytes:  of all of them
    wider:    tensors that were kept in another type than asked for, and why
    skipped:  (name in the source, reason) of what was not carried over
    notices:  sentences that the user should read
    """

    paths: tuple[Path, ...]
    n_bytes: int
    wider: tuple[tuple[str, str], ...]
    skipped: tuple[tuple[str, str], ...]
    notices: tuple[str, ...]


def convert(
    source: str | Path | Source,
    out: str | Path,
    format: str = "BF16",
    *,
    allow_requantize: bool = False,
    split_max_size: int | None = None,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes a GGUF file of floats; vectors, norms and routers of experts stay F32, as llama.cpp has them.

    Experts that were trained in MXFP4 stay in it.

    format:    "BF16", "F16" or "F32", for the matrices
    progress:  called with the bytes written and their total

    Raises: ModelFileError, UnsupportedFormatError, DoesNotFitError.
    """
    if format not in FLOATS:
        raise UnsupportedFormatError(f"{format!r} is no type of floats; convert writes {', '.join(FLOATS)}.")
    if not isinstance(source, Source):
        with open_source(source, allow_requantize=allow_requantize) as opened:
            return convert(opened, out, format, split_max_size=split_max_size, resume=resume, progress=progress)
    wider: list[tuple[str, str]] = []
    plan = []
    for tensor in source.tensors.values():
        kind = FORMATS["F32"] if is_vector(tensor) else FORMATS[format]
        if tensor.is_native:
            kind = tensor.format
            wider.append((tensor.name, f"kept {kind}, which the model was trained in"))
        if kind.name == "F16" and not fits_f16(tensor):
            kind = FORMATS["BF16" if tensor.format.name == "BF16" else "F32"]
            wider.append((tensor.name, f"kept {kind}: it has values beyond F16's 65504"))
        plan.append((tensor.name, tensor.shape, kind))
    metadata = source.metadata | {
        "general.file_type": Value.u32(FILE_TYPES[format]),
        "general.quantization_version": Value.u32(2),
    }
    writer = Writer(out, metadata, plan, split_max_size=split_max_size, resume=resume, fingerprint=source.fingerprint)
    kinds = {name: kind for name, _, kind in plan}
    with writer:
        for name in writer.pending:
            tensor = source.tensors[name]
            for start, stop in tensor.slabs():
                if tensor.is_native:
                    data = tensor.stored(start, stop)
                else:
                    data = rounding.quantize(tensor.rows(start, stop), kinds[name])
                writer.write(name, data)
                if progress:
                    progress(writer.n_written, writer.n_bytes)
    return Conversion(writer.paths, writer.n_bytes, tuple(wider), tuple(source.skipped), tuple(source.notices))


def is_vector(tensor: SourceTensor) -> bool:
    """Whether llama.cpp keeps it in F32 whatever the type of the file."""
    return not is_quantizable(tensor.name, tensor.shape)


def fits_f16(tensor: SourceTensor) -> bool:
    """Whether no value becomes infinite in F16."""
    if tensor.format.name not in ("F32", "BF16"):
        return True
    slabs = (tensor.rows(start, stop) for start, stop in tensor.slabs())
    return all(max(-values.min(), values.max()) < _F16_MAX for values in slabs)
