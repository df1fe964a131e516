"""Says what a file really is when it was handed over as a GGUF model and is not one."""

from __future__ import annotations

import codecs
import re

_OLD_GGML = {
    b"lmgg": "GGML",
    b"fmgg": "GGMF",
    b"tjgg": "GGJT",
    b"algg": "GGLA (an old LoRA adapter)",
    b"nsgg": "GGSN (a saved session of llama.cpp)",
}

# (offset, bytes, what it is), tried in order
_SIGNATURES = (
    (0, b"PK\x05\x06", "an empty zip archive"),
    (0, b"\x1f\x8b", "a gzip archive; unpack it first"),
    (0, b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it first"),
    (0, b"\xfd7zXZ\x00", "an xz archive; unpack it first"),
    (0, b"BZh", "a bzip2 archive; unpack it first"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it first"),
    (0, b"Rar!", "a rar archive; unpack it first"),
    (257, b"ustar", "a tar archive; unpack it first"),
    (0, b"\x89HDF", "an HDF5 file (Keras)"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (4, b"TFL3", "a TensorFlow Lite model"),
    (0, b"%PDF", "a PDF document"),
    (0, b"\x89PNG", "a PNG picture"),
    (0, b"\xff\xd8\xff", "a JPEG picture"),
    (0, b"\x7fELF", "a program (ELF)"),
    (0, b"MZ", "a program for Windows"),
)

HEAD_BYTES = 4096  # what describe() wants to see of a file


def describe(head: bytes, size: int) -> str:
    """A phrase that fits after "is": what a file of `size` bytes with this head is, and what to do."""
    if size == 0:
        return "empty (0 bytes): the download never began; download it again"
    for known in (_git_lfs_pointer, _archive_or_pickle, _old_ggml, _safetensors, _text):
        found = known(head, size)
        if found:
            return found
    for offset, signature, kind in _SIGNATURES:
        if head[offset : offset + len(signature)] == signature:
            return kind
    if not head.strip(b"\0"):
        return f"filled with zeros at its start ({size:,} bytes): an unfinished download; download it again"
    return f"of an unknown kind: it begins with the bytes {head[:8].hex(' ')}, a GGUF file with 47 47 55 46"


def _git_lfs_pointer(head: bytes, size: int) -> str | None:
    if not head.startswith(b"version https://git-lfs"):
        return None
    stated = re.search(rb"^size (\d{1,20})\s*$", head, re.MULTILINE)
    real = f" to a file of {int(stated[1]):,} bytes" if stated else ""
    return f"a Git LFS pointer{real} ({size:,} bytes of text): fetch the file itself with `git lfs pull`"


def _archive_or_pickle(head: bytes, size: int) -> str | None:
    if head.startswith(b"PK\x03\x04"):
        if b"data.pkl" in head or b"/version" in head[:64]:
            return "a PyTorch checkpoint (a zip archive with a pickle inside); convert it to GGUF first"
        return "a zip archive; unpack it first"
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and len(head) > 1:
        return "a Python pickle (an old PyTorch checkpoint); convert it to GGUF first"
    return None


def _old_ggml(head: bytes, size: int) -> str | None:
    if head[:4] in _OLD_GGML:
        return f"in the old format {_OLD_GGML[head[:4]]}, which GGUF replaced in 2023; find the model as GGUF"
    if head[:4] == b"FUGG":
        return "a big-endian GGUF file; convert it to little-endian with gguf-convert-endian"
    return None


def _safetensors(head: bytes, size: int) -> str | None:
    length = int.from_bytes(head[:8], "little")
    if len(head) >= 9 and 2 <= length <= size - 8 and head[8:9] == b"{":
        return "a safetensors file; convert it to GGUF first"
    return None


def _text(head: bytes, size: int) -> str | None:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:512].lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<body", b"<!--")):
        return f"an HTML page ({size:,} bytes), probably a server's error or login page; download it again"
    if start.startswith((b"<?xml", b"<error")):
        return f"an XML document ({size:,} bytes), probably a server's error message; download it again"
    if start.startswith((b"{", b"[")):
        if b"weight_map" in head:
            return "the index of a sharded safetensors model (JSON); convert the model to GGUF first"
        return f"JSON text ({size:,} bytes), perhaps a server's error message or a model's configuration"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # the head may end inside a character
    except UnicodeDecodeError:
        return None
    if len(text) >= 4 and all(c.isprintable() or c.isspace() for c in text):
        return f"a text file ({size:,} bytes) that begins {' '.join(text.split())[:40]!r}"
    return None
