"""What llama.cpp takes for granted of a file: where it is not so, it ends the process instead of refusing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize import architecture
from edgert.quantize.architecture.rope import KINDS
from edgert.quantize.gguf_file import GGUFFile

MAX_EXPERTS = 512  # LLAMA_MAX_EXPERTS


@contextmanager
def validated(model: GGUFFile | str | Path) -> Iterator[GGUFFile]:
    """A file whose structure and sizes our reader has checked; llama.cpp trusts what it reads.

    Raises: ModelFileError.
    """
    if isinstance(model, str | Path):
        with GGUFFile.open(model) as file:
            check(file)
            yield file
    else:
        check(model)
        yield model


def check(file: GGUFFile) -> None:
    """Raises: ModelFileError for what llama.cpp asserts."""
    if file.architecture in architecture.FAMILIES:
        with suppress(UnsupportedFormatError):  # llama.cpp may know the variant
            architecture.expected(file)
    name = f"{file.architecture}.expert_count"
    if (n_expert := file.get(name, int, 0)) > MAX_EXPERTS:
        raise ModelFileError(f"{file.path}: {name} is {n_expert}, and llama.cpp runs {MAX_EXPERTS} at most.")
    name = f"{file.architecture}.rope.dimension_count"
    n_dims = file.get(name, int, 0)
    head_dim = file.get(f"{file.architecture}.attention.key_length", int, _even_share(file))
    if n_dims % 2 or n_dims > head_dim > 0:
        raise ModelFileError(
            f"{file.path}: {name} is {n_dims}, which is odd or more than a head has; convert the model anew."
        )
    name = f"{file.architecture}.rope.scaling.type"
    kind = file.get(name, str, "none")
    if kind not in KINDS:
        raise ModelFileError(f"{file.path}: {name} is {kind!r}; llama.cpp runs {', '.join(KINDS)}.")
    check_types(file)


def check_types(file: GGUFFile) -> None:
    """Raises: ModelFileError for what llama.cpp adds or multiplies element by element, and cannot in its type."""
    for tensor in file.tensors.values():
        if (len(tensor.shape) == 1 or tensor.name == "token_types.weight") and tensor.format.name != "F32":
            raise ModelFileError(
                f"{file.path}: llama.cpp wants the tensor {tensor.name!r} as F32 and it is {tensor.format.name}; "
                "convert the model anew, or run it with --backend cpu."
            )


def _even_share(file: GGUFFile) -> int:
    """Elements of a head where the file does not say; 0: not known."""
    sizes = [file.metadata.get(f"{file.architecture}.{key}") for key in ("embedding_length", "attention.head_count")]
    n_embd, n_head = (size if type(size) is int else 0 for size in sizes)
    return n_embd // n_head if n_head > 0 else 0
