"""What the llama backend adds to llama.cpp: its rates beside those of llama-bench's loop on the same library.

    python tests/bench/llama_overhead.py MODEL [-t 1,2] [-p 512] [-n 64] [-r 5]

The bare side does what llama-bench does in its source: a context of llama-bench's defaults, `llama_decode` of
`llama_batch_get_one` and `llama_synchronize`, nothing read or checked. Both run in turn, A B A B, in one process;
medians. Layouts that llama.cpp may choose itself (AMX) are off on both sides.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np


class Bare:
    """llama-bench's loop."""

    def __init__(self, path: Path, n_ctx: int, n_threads: int, n_gpu_layers: int = 0) -> None:
        """n_gpu_layers: on the first GPU; -1: all."""
        from edgert.backends.llama.library import library

        self.llama = llama = library()
        params = llama.llama_model_default_params()
        params.use_extra_bufts = False
        params.n_gpu_layers, params.split_mode = n_gpu_layers, 0 if n_gpu_layers else 1
        self.model = llama.llama_model_load_from_file(str(path).encode(), params)
        options = llama.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = n_ctx, 2048, 512
        options.n_threads = options.n_threads_batch = n_threads
        options.flash_attn_type, options.swa_full = 1, False
        self.context = llama.llama_init_from_model(self.model, options)
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))

    def clear(self) -> None:
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), False)

    def close(self) -> None:
        self.llama.llama_free(self.context)
        self.llama.llama_model_free(self.model)

    def decode(self, tokens: Any, position: int) -> None:
        batch = self.llama.llama_batch_get_one(tokens, len(tokens))
        if self.llama.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        self.llama.llama_synchronize(self.context)


def seconds(clear: Callable[[], object], decode: Callable[[list[int], int], object], steps: list[list[int]]) -> float:
    """Of some steps, one after the other, in an empty context."""
    clear()
    position, start = 0, time.perf_counter()
    for tokens in steps:
        decode(tokens, position)
        position += len(tokens)
    return time.perf_counter() - start


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("-t", "--threads", default="1,2", show_default=True)
@click.option("-p", "--n-prompt", default=512, show_default=True)
@click.option("-n", "--n-gen", default=64, show_default=True)
@click.option("-r", "--repetitions", default=5, show_default=True)
def main(model: Path, threads: str, n_prompt: int, n_gen: int, repetitions: int) -> None:
    from edgert.backends.base import Batch
    from edgert.backends.llama.backend import LlamaBackend

    click.echo("| threads | test | edgert, tok/s | bare loop, tok/s | ratio |\n|---:|---|---:|---:|---:|")
    for n_threads in map(int, threads.split(",")):
        ours = LlamaBackend(
            model, n_ctx=max(n_prompt, n_gen), n_threads=n_threads, flash_attn="on", use_extra_bufts=False
        )
        bare = Bare(model, max(n_prompt, n_gen), n_threads)
        ids = np.random.default_rng(0).integers(0, ours.n_vocab, max(n_prompt, n_gen)).tolist()
        array = bare.llama.llama_token * len(ids)
        whole = array(*ids)

        def bare_step(tokens: list[int], position: int, bare: Bare = bare, whole: Any = whole) -> None:
            bare.decode((bare.llama.llama_token * len(tokens)).from_buffer(whole, 4 * position), position)

        def our_step(tokens: list[int], position: int, ours: LlamaBackend = ours) -> None:
            ours.forward(Batch.of(tokens, position))

        for name, steps in (("prefill", [ids[:n_prompt]]), ("decode", [[token] for token in ids[:n_gen]])):
            sides = {
                "ours": (lambda ours=ours: ours.free(0), our_step),
                "bare": (lambda bare=bare: bare.clear(), bare_step),
            }
            times: dict[str, list[float]] = {side: [] for side in sides}
            for clear, step in sides.values():  # warm
                seconds(clear, step, steps)
            for _ in range(repetitions):
                for side, (clear, step) in sides.items():
                    times[side].append(seconds(clear, step, steps))
            n = sum(map(len, steps))
            a, b = (n / statistics.median(times[side]) for side in ("ours", "bare"))
            click.echo(f"| {n_threads} | {name} {n} | {a:.1f} | {b:.1f} | {a / b:.3f} |")
        ours.close()


if __name__ == "__main__":
    main()
