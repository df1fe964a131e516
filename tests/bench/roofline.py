"""What this machine could do at best: plain reads of memory, and int8 dot products, by number of threads.

    python tests/bench/roofline.py [--mib 640] [--threads 1,2]

Reads: a sum over a buffer much larger than the caches. Dot products: vpdpbusd of 512 bits (64 multiply-adds)
on registers only, twelve chains at a time so that its latency is hidden.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import click
import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

CHAINS = 12
MACS = 64  # multiply-adds of one vpdpbusd of 512 bits


@numba.njit(nogil=True, boundscheck=False)
def read(words: Any) -> int:
    """uint64 (n,) -> their sum; four streams, as prefetchers like several."""
    a, b, c, d = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    quarter = len(words) // 4
    w, x, y, z = words[:quarter], words[quarter:], words[2 * quarter :], words[3 * quarter :]
    for i in range(quarter):
        a += w[i]
        b += x[i]
        c += y[i]
        d += z[i]
    return a + b + c + d


@intrinsic
def _dot_chains(_: Any, n: Any, seed: Any) -> Any:
    """n rounds of CHAINS independent vpdpbusd; the sum of a lane keeps them alive."""
    vector = ir.VectorType(ir.IntType(32), 16)

    def generate(__: Any, builder: Any, ___: Any, arguments: Any) -> Any:
        rounds, value = arguments
        dot = builder.module.declare_intrinsic(
            "llvm.x86.avx512.vpdpbusd.512", (), ir.FunctionType(vector, [vector, vector, vector])
        )
        operand = ir.Constant(vector, ir.Undefined)
        for lane in range(16):
            operand = builder.insert_element(operand, value, ir.IntType(32)(lane))
        before = builder.basic_block
        body = builder.append_basic_block("dots")
        after = builder.append_basic_block("done")
        builder.branch(body)
        builder.position_at_end(body)
        i = builder.phi(ir.IntType(64))
        i.add_incoming(ir.IntType(64)(0), before)
        chains = [builder.phi(vector) for _ in range(CHAINS)]
        results = []
        for number, chain in enumerate(chains):
            chain.add_incoming(ir.Constant(vector, [number] * 16), before)
            results.append(builder.call(dot, [chain, operand, operand]))
        following = builder.add(i, ir.IntType(64)(1))
        i.add_incoming(following, body)
        for chain, result in zip(chains, results, strict=True):
            chain.add_incoming(result, body)
        builder.cbranch(builder.icmp_signed("<", following, rounds), body, after)
        builder.position_at_end(after)
        total = results[0]
        for result in results[1:]:
            total = builder.add(total, result)
        return builder.extract_element(total, ir.IntType(32)(0))

    return types.int32(types.int64, types.int32), generate


@numba.njit(nogil=True)
def dot(n: int, seed: Any) -> Any:
    return _dot_chains(n, seed)


def together(work: Callable[[int], object], n_threads: int, repetitions: int) -> float:
    """Median seconds of work(0), work(1), ... on so many threads at once."""
    times = []
    for _ in range(repetitions):
        start = threading.Barrier(n_threads + 1)

        def run(number: int, start: threading.Barrier = start) -> None:
            start.wait()
            work(number)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(n_threads)]
        for thread in threads:
            thread.start()
        start.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def read_rate(words: Any, n_threads: int, repetitions: int) -> float:
    """Bytes per second."""
    parts = np.array_split(words, n_threads)
    read(words[:64])
    return float(words.nbytes / together(lambda i: read(parts[i]), n_threads, repetitions))


def dot_rate(n_threads: int, repetitions: int, rounds: int = 2_000_000) -> float | None:
    """int8 multiply-adds per second by vpdpbusd of 512 bits; None where the processor has none."""
    from llvmlite.binding import get_host_cpu_features

    if not get_host_cpu_features().get("avx512vnni"):
        return None
    dot(1, np.int32(1))
    seconds = together(lambda _: dot(rounds, np.int32(0x01010101)), n_threads, repetitions)
    return n_threads * rounds * CHAINS * MACS / seconds


@click.command(help=__doc__)
@click.option("--mib", default=640, show_default=True, help="Size of the buffer that is read.")
@click.option("--threads", default="1,2", show_default=True)
@click.option("-r", "--repetitions", default=7, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(mib: int, threads: str, repetitions: int, as_json: bool) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 63, mib << 17, np.uint64)
    rows = []
    for n_threads in map(int, threads.split(",")):
        rate = dot_rate(n_threads, repetitions)
        rows.append({"threads": n_threads, "read": read_rate(words, n_threads, repetitions), "vpdpbusd": rate})
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        dots = f"{row['vpdpbusd'] / 1e9:.1f} G multiply-adds/s" if row["vpdpbusd"] else "not here"
        click.echo(f"{row['threads']} threads: read {row['read'] / 1e9:.2f} GB/s, vpdpbusd {dots}")


if __name__ == "__main__":
    main()
