"""Logits of tiny models on two machines: `make FOLDER` writes models and answers, `compare FOLDER SET` has others.

What is compared is one model in many formats, by prefill, by a few tokens and by single ones, with every cache.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

LENGTH = 100
TOKENS = np.random.default_rng(11).integers(0, 384, LENGTH).tolist()
BIG = {"n_embd": 256, "n_head": 4, "n_head_kv": 2, "head_dim": 64, "n_ff": 512, "n_layer": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # name: family, format, shape
    "llama F32": ("llama", "F32", {}),
    "llama Q4_0": ("llama", "Q4_0", {}),
    "llama Q6_K": ("llama", "Q6_K", BIG),
    "gemma3 Q8_0": ("gemma3", "Q8_0", {"window": 20, "n_layer": 6}),
}
CACHES = {"llama F32": ("f16", "q8_0", "q4_0"), "gemma3 Q8_0": ("f16", "q8_0")}
# How far logits may lie from another machine's, in standard deviations. Floats are summed in another order, so beside
# packed weights an activation now and then rounds to another side, and all that follows differs by that: between
# AVX2 and AVX-512 it is up to 0.008. A packed cache does the same to float weights.
NEAR = {"f16": 2e-3, "q8_0": 1e-2, "q4_0": 0.1, "quantized": 0.02}
# And from float64: 8 bits of an activation, or 16 of a cached one beside float weights; packed caches.
FAR = {"F32": 0.003, "quantized": 0.05, "q8_0": 0.03, "q4_0": 0.35}


def runs() -> Iterator[tuple[str, str]]:
    """(model, type of cache)"""
    for name in MODELS:
        for cache in CACHES.get(name, ("f16",)):
            yield name, cache


def logits(path: Path, cache: str) -> np.ndarray:
    """float32 (3, LENGTH, n_vocab): all tokens at once, seven at a time, one at a time.

    By the best instruction set that rounds activations to int8: tiles keep them in bf16.
    """
    from edgert import backends
    from edgert.backends.base import Batch
    from edgert.backends.cpu import isa

    found = []
    best = next(name for name in isa.available() if not isa.select(name).tiles)
    options = {"isa": best, "n_ctx": 128, "n_threads": 2, "n_seq_max": 3, "cache_type_k": cache, "cache_type_v": cache}
    with closing(backends.load(path, backend="cpu", **options)) as backend:
        for sequence, chunk in enumerate((LENGTH, 7, 1)):
            steps = [
                backend.forward(Batch.of(TOKENS[i : i + chunk], i, sequence, "all")).copy()
                for i in range(0, LENGTH, chunk)
            ]
            found.append(np.concatenate(steps))
    return np.stack(found)


def make(folder: Path) -> None:
    """Writes the models, this machine's logits and the reference's in float64."""
    from gguf import GGMLQuantizationType as Type
    from reference import Reference
    from tiny import write_tiny

    paths = {}
    for name, (family, form, shape) in MODELS.items():
        path = folder / f"{len(paths)}.gguf"
        paths[name] = path.name
        write_tiny(path, family, quant=Type[form], **shape)
        np.save(folder / f"{name}.npy", Reference(path, np.float64).logits(TOKENS))
    for name, cache in runs():
        np.save(folder / f"{name} {cache}.npy", logits(folder / paths[name], cache))
    (folder / "models.json").write_text(json.dumps(paths))


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference, in standard deviations."""
    return float(np.sqrt(((found - expected) ** 2).mean()) / expected.std())


def compile_together(name_of_set: str) -> None:
    """Compiles what the tests of formats need in as many processes as there are cores, not in two for each test."""
    from edgert.backends.cpu import compiler, isa
    from edgert.backends.cpu.layouts import CODEC_OF, CODECS

    chosen = isa.select(name_of_set)
    shapes: list[dict[str, Any]] = [{"width": 1}, *([{"width": 3, "form": "pairs"}] if chosen.matrix else [])]
    packed = {form: codec for form, codec in CODEC_OF.items() if not CODECS[codec].is_float}
    names = [compiler.name_of("repack", format=form) for form in packed]
    names += [
        compiler.name_of("product", codec=codec, epilogue="store", **shape)
        for codec in dict.fromkeys(packed.values())
        for shape in shapes
    ]
    compiler.compile_all(names, chosen)


def compare(folder: Path, name_of_set: str) -> bool:
    """Prints how far this machine's logits are from the others; whether all are within the bounds."""
    from edgert.backends.cpu import isa

    print("has", ", ".join(isa.available()))
    assert isa.available()[0] == name_of_set, "the processor's own choice is another set"
    compile_together(name_of_set)
    paths, fine = json.loads((folder / "models.json").read_text()), True
    print(f"{'model':14}{'cache':7}{'from float64':>14}{'there':>10}{'from there':>12}{'seconds':>9}")
    for name, cache in runs():
        start = time.monotonic()
        found = logits(folder / paths[name], cache)
        exact, other = np.load(folder / f"{name}.npy"), np.load(folder / f"{name} {cache}.npy")
        weights = "F32" if MODELS[name][1] == "F32" else "quantized"
        far, near = FAR[weights] + FAR.get(cache, 0), max(NEAR[cache], NEAR.get(weights, 0))
        errors = [max(distance(found[i], exact) for i in range(3)), max(distance(other[i], exact) for i in range(3))]
        apart = max(distance(found[i], other[i]) for i in range(3))
        right = errors[0] < far and apart < near
        fine &= right
        print(f"{name:14}{cache:7}{errors[0]:14.5f}{errors[1]:10.5f}{apart:12.5f}{time.monotonic() - start:9.1f}"
              f"{'' if right else '  WRONG'}", flush=True)  # fmt: skip
    return fine


if __name__ == "__main__":
    command, folder, *rest = sys.argv[1:]
    if command == "make":
        make(Path(folder))
    elif not compare(Path(folder), *rest):
        sys.exit(1)
