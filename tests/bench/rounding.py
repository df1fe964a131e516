"""Prints how long rounding takes against libggml's quantizers, one thread each, in one process, A B A B, medians.

python tests/bench/rounding.py [--rows 4096] [--cols 4096] [--rounds 3] [FORMAT ...]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ggml

from edgert.quantize.rounding import GRIDS, quantize


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="*", default=list(GRIDS))
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slow-rows", type=int, default=256, help="rows for what takes libggml long")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((options.rows, options.cols)) * 0.02).astype(np.float32)
    importance = np.exp(rng.standard_normal(options.cols)).astype(np.float32)
    print(f"{options.rows} x {options.cols}, nanoseconds an element, one thread")
    print("           plain                  importance as ggml     search")
    print("format     edgert    ggml ratio   edgert    ggml ratio   edgert ratio to ggml")
    for name in options.formats:
        line = f"{name:8s}"
        fast = name[2:] in ("_0", "_1")
        for weights in (None, importance):
            rows = options.rows if fast and weights is None else options.slow_rows
            piece = values[:rows]
            methods = ["plain"] if weights is None else ["ggml", "search"]
            ours: dict[str, list[float]] = {method: [] for method in methods}
            theirs = []
            for method in methods:
                quantize(piece[:1], name, weights, method=method)  # compiles
            for _ in range(options.rounds):
                for method in methods:
                    ours[method].append(seconds(lambda m=method: quantize(piece, name, weights, method=m)))  # noqa: B023
                theirs.append(seconds(lambda: ggml.quantize(piece, name, weights)))  # noqa: B023
            their = statistics.median(theirs) / piece.size * 1e9
            for method in methods:
                our = statistics.median(ours[method]) / piece.size * 1e9
                line += f" {our:7.2f}"
                line += f" {their:7.2f} {their / our:5.1f}  " if method != "search" else f" {their / our:5.1f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
