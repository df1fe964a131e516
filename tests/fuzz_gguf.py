"""Hands thousands of damaged GGUF files to the reader and counts how it takes them.

    python tests/fuzz_gguf.py --mutations 10000

A file survives when it opens (and all of its metadata and weights can be read) or is refused with one of
edgert's own errors. Anything else is printed with the seed that makes it again, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import collections
import random
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

from edgert.errors import EdgertError
from edgert.quantize.gguf_file import GGUFFile

VALUES = (0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**63, 2**64 - 1)


@dataclass
class Count:
    tried: int = 0
    opened: int = 0
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)
    slowest: float = 0.0  # seconds


def write_sample(path: Path) -> bytes:
    """A small file that has a value of every kind and tensors of several formats."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.uint8", 1)
    writer.add_int8("a.int8", -1)
    writer.add_uint16("a.uint16", 2)
    writer.add_int16("a.int16", -2)
    writer.add_int32("a.int32", -3)
    writer.add_uint64("a.uint64", 2**40)
    writer.add_int64("a.int64", -(2**40))
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 0.25)
    writer.add_bool("a.bool", True)
    writer.add_array("a.bools", [True, False])
    writer.add_block_count(1)
    writer.add_token_list(["<s>", "</s>", "", "Grüße", "好"])
    writer.add_token_scores([0.0, -1.0, -2.0, -3.0, -4.0])
    writer.add_token_types([3, 3, 1, 1, 1])
    rng = np.random.default_rng(0)
    values = rng.standard_normal((4, 256)).astype(np.float32)
    writer.add_tensor("token_embd.weight", values)
    writer.add_tensor("output_norm.weight", values[0, :5].copy())
    for name, kind in (("q4_0", gguf.GGMLQuantizationType.Q4_0), ("q8_0", gguf.GGMLQuantizationType.Q8_0)):
        writer.add_tensor(f"blk.0.{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    blocks = np.zeros((2, 144), np.uint8)
    writer.add_tensor("blk.0.q4_k.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def length_fields(data: bytes) -> Iterator[tuple[int, int, str]]:
    """(position, bytes, meaning) of every count, length, type, dimension and offset in a sound file."""
    position = 0

    def number(width: int, meaning: str) -> Iterator[tuple[int, int, str]]:
        nonlocal position, value
        value = int.from_bytes(data[position : position + width], "little")
        yield position, width, meaning
        position += width

    def text(meaning: str) -> Iterator[tuple[int, int, str]]:
        nonlocal position
        yield from number(8, meaning)
        position += value

    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    value = 0
    position = 4
    yield from number(4, "version")
    yield from number(8, "tensors")
    n_tensors = value
    yield from number(8, "keys")
    for _ in range(value):
        yield from text("key length")
        yield from number(4, "value type")
        if value == 8:
            yield from text("string length")
        elif value == 9:
            yield from number(4, "element type")
            kind = value
            yield from number(8, "array length")
            for _ in range(value if kind == 8 else 0):
                yield from text("element length")
            position += 0 if kind == 8 else value * sizes[kind]
        else:
            position += sizes[value]
    for _ in range(n_tensors):
        yield from text("name length")
        yield from number(4, "dimensions")
        for _ in range(value):
            yield from number(8, "dimension")
        yield from number(4, "tensor type")
        yield from number(8, "offset")


def replaced(data: bytes, position: int, width: int, value: int) -> bytes:
    value &= (1 << 8 * width) - 1
    return data[:position] + value.to_bytes(width, "little") + data[position + width :]


def mutated(data: bytes, seed: int) -> bytes:
    """One to four random damages; the same seed gives the same bytes."""
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 4)):
        size = max(len(data), 1)
        # Two of three damages hit the first part, where the structure is.
        at = rng.randrange(size) if rng.random() < 1 / 3 else rng.randrange(max(1, min(size, 1600)))
        kind = rng.randrange(8)
        if kind == 0:  # flip a bit
            data = replaced(data, at, 1, (data[at] if at < len(data) else 0) ^ 1 << rng.randrange(8))
        elif kind == 1:  # a random byte
            data = replaced(data, at, 1, rng.randrange(256))
        elif kind == 2:  # a telling number
            data = replaced(data, at, rng.choice((1, 2, 4, 8)), rng.choice(VALUES) + rng.randint(-1, 1))
        elif kind == 3:  # a small change of a number
            width = rng.choice((4, 8))
            number = int.from_bytes(data[at : at + width], "little")
            data = replaced(data, at, width, number + rng.choice((-32, -8, -1, 1, 8, 32)))
        elif kind == 4:  # random bytes come in
            data = data[:at] + rng.randbytes(rng.randint(1, 64)) + data[at:]
        elif kind == 5:  # bytes go missing
            data = data[:at] + data[at + rng.randint(1, 64) :]
        elif kind == 6:  # a piece is copied over another
            source = rng.randrange(size)
            piece = data[source : source + rng.randint(1, 128)]
            data = data[:at] + piece + data[at + len(piece) :]
        else:  # the end is cut off
            data = data[: rng.randrange(size)]
    return data


def read_everything(path: Path) -> None:
    """Opens a file and touches every value and every byte of every tensor."""
    with GGUFFile.open(path) as file:
        for key in file.metadata:
            file.metadata[key]
        for tensor in file.tensors.values():
            copy = bytearray(tensor.n_bytes)
            tensor.read_into(copy)
            assert copy == tensor.data.tobytes()
            if tensor.format.decode:
                assert tensor.dequantize().shape == tensor.shape


def attempt(path: Path, data: bytes, label: str, count: Count) -> None:
    path.write_bytes(data)
    count.tried += 1
    begin = time.process_time()
    try:
        read_everything(path)
        count.opened += 1
    except EdgertError as error:
        count.refused[type(error).__name__] += 1
        if str(path) not in str(error) or "\n" in str(error):
            count.failures.append(f"{label}: a message of the wrong shape: {error!r}")
    except BaseException:
        count.failures.append(f"{label}: {traceback.format_exc()}")
    seconds = time.process_time() - begin
    count.slowest = max(count.slowest, seconds)
    if seconds > 2:
        count.failures.append(f"{label}: took {seconds:.1f} s")


def peak_memory() -> int:
    """Most bytes that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run(n_mutations: int, first_seed: int = 0) -> tuple[dict[str, Count], int]:
    """Tries truncations, telling numbers in every length field, and random mutations.

    Returns the counts by name, and by how many bytes the peak of memory grew over the largest file.
    """
    counts = {name: Count() for name in ("truncations", "length fields", "mutations")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sample.gguf"
        data = write_sample(path)
        read_everything(path)
        before = peak_memory()
        for size in range(0, len(data), 64):
            attempt(path, data[:size], f"the first {size} bytes", counts["truncations"])
        for position, width, meaning in length_fields(data):
            for value in VALUES:
                damaged = replaced(data, position, width, value)
                attempt(path, damaged, f"{meaning} at {position} = {value}", counts["length fields"])
        for seed in range(first_seed, first_seed + n_mutations):
            attempt(path, mutated(data, seed), f"seed {seed}", counts["mutations"])
    return counts, peak_memory() - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10_000, metavar="N")
    parser.add_argument("--first-seed", type=int, default=0, metavar="SEED")
    arguments = parser.parse_args()
    counts, grown = run(arguments.mutations, arguments.first_seed)
    failed = False
    for name, count in counts.items():
        refused = ", ".join(f"{n} {kind}" for kind, n in count.refused.most_common())
        print(
            f"{name}: tried {count.tried}, survived {count.tried - len(count.failures)} "
            f"(opened {count.opened}, refused: {refused}), slowest {count.slowest * 1000:.0f} ms"
        )
        for failure in count.failures[:10]:
            print(failure)
        failed |= bool(count.failures)
    print(f"peak memory grew by {grown / 2**20:.1f} MiB")
    return int(failed or grown > 200 << 20)


if __name__ == "__main__":
    sys.exit(main())
