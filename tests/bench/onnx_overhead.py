"""edgert's onnx backend beside ONNX Runtime alone, and beside llama.cpp: decode and prefill on the CPU provider.

    python tests/bench/onnx_overhead.py MODEL [-t 1,2] [-p 512] [-n 64] [-r 5]

`bare` runs edgert's own session, in its process, with all memory bound once and nothing read or checked between the
steps: the most that ONNX Runtime does with exact weights. (Two sessions of one graph differ by 5 %, by where their
weights come to lie.) `rounded` does so with a graph as its own tools make it, where the minimum of a block is rounded
to an integer zero point: fewer operators, other weights. `llama.cpp` runs llama-bench's loop, without AMX. These two
have processes of their own, since waiting threads spin; one run of each in turn, A B B A; medians,
of rates and of the ratios within a round.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

PROCESSES = ("edgert", "bare"), ("rounded",), ("llama.cpp",)
SIDES = sum(PROCESSES, ())
PAUSE = 0.05  # seconds for the threads of the side before to fall asleep
Clear = Callable[[], object]
Step = Callable[[list[int], int], object]


def rounded(folder: Any, a: Any) -> bytes:
    """The fused graph with zero points in place of what is left over."""
    import onnx

    from edgert.backends.onnx.graph import Fused
    from edgert.backends.onnx.providers import PROVIDERS
    from edgert.backends.onnx.weights import Matrix

    class Rounded(Fused):
        def matmul(self, x: str, group: str, n_tokens: Any, bias: str = "") -> list[str]:
            kept = self.weights.groups[group]
            self.weights.groups[group] = [Matrix(m.name, m.n_rows, m.n_cols, m.bits, m.block_size) for m in kept]
            first = len(self.nodes)
            outputs = super().matmul(x, group, n_tokens, bias)
            self.weights.groups[group] = kept
            products = [node for node in self.nodes[first:] if node.op_type == "MatMulNBits"]
            for node, m in zip(products, (m for m in kept if m.bits), strict=True):
                if m.has_rest:
                    node.input.append(self._zero_points(m))
            return outputs

        def _zero_points(self, m: Any) -> str:
            values = self.weights.values
            scales = np.frombuffer(values(f"{m.name}.scales"), np.float32).reshape(m.n_rows, -1)
            rest = np.frombuffer(values(f"{m.name}.rest"), np.float32).reshape(-1, m.n_rows).T
            middle = 1 << m.bits - 1
            quotient = np.divide(rest, scales, out=np.zeros_like(rest), where=scales != 0)
            points = np.clip(np.rint(middle - quotient), 0, 2 * middle - 1).astype(np.uint8)
            if m.bits == 4:
                points = np.pad(points, ((0, 0), (0, points.shape[1] % 2)))
                points = points[:, 0::2] | points[:, 1::2] << np.uint8(4)
            name = f"{m.name}.zero_points"
            self.initializers[name] = onnx.numpy_helper.from_array(np.ascontiguousarray(points).reshape(-1), name)
            return name

    return bytes(Rounded(a, folder.weights, PROVIDERS["cpu"].style).build().SerializeToString())


class Bare:
    """ONNX Runtime alone: a session and a cache, bound once."""

    def __init__(self, session: Any, a: Any, n_ctx: int) -> None:
        import onnxruntime as ort

        from edgert.backends.onnx.graph import rope_table, ropes

        self._session = session
        self._value = ort.OrtValue.ortvalue_from_numpy
        self._binding = session.io_binding()
        self._held: list[Any] = []
        for i in range(a.n_layer):
            for part in "kv":
                cache = self._bind(f"{part}.{i}", np.zeros((1, a.n_head_kv, n_ctx, a.head_dim), np.float32))
                self._binding.bind_ortvalue_output(f"new_{part}.{i}", cache)
        for i, rope in enumerate(ropes(a)):
            for name, table in zip(("cos", "sin"), rope_table(rope, np.arange(n_ctx)), strict=True):
                self._bind(f"{name}.{i}", table)
        self._total, self._length = np.zeros((), np.int32), np.zeros(1, np.int32)
        self._bind("total", self._total)
        self._bind("lengths", self._length)
        rng = np.random.default_rng(0)
        self._read = {"tokens": rng.integers(0, 256, 512), "x": rng.standard_normal((512, a.n_embd), np.float32)}
        self._name = session.get_inputs()[0].name
        self._logits = np.zeros((1, a.n_vocab), np.float32)
        self._n = 0

    def _bind(self, name: str, array: Any) -> Any:
        value = self._value(array)
        self._held.append(array)
        self._binding.bind_ortvalue_input(name, value)
        return value

    def step(self, tokens: list[int], position: int) -> None:
        n = len(tokens)
        if n != self._n:
            self._n = n
            self._bind(self._name, self._read[self._name][:n])
            self._bind("wanted", np.array([n - 1]))
            self._binding.bind_ortvalue_output("logits", self._value(self._logits))
        self._total[()], self._length[0] = position + n, position + n - 1
        self._session.run_with_iobinding(self._binding)


def engines(names: tuple[str, ...], path: Path, n_ctx: int, n_threads: int) -> dict[str, tuple[Clear, Step]]:
    """By side: what empties its context, and what runs tokens behind so many."""
    if names == ("llama.cpp",):
        import llama_overhead

        loop = llama_overhead.Bare(path, n_ctx, n_threads)
        return {
            "llama.cpp": (
                loop.clear,
                lambda tokens, at: loop.decode((loop.llama.llama_token * len(tokens))(*tokens), at),
            )
        }
    from edgert.backends.base import Batch
    from edgert.backends.onnx.backend import OnnxBackend
    from edgert.quantize.gguf_file import GGUFFile

    file = GGUFFile.open(path)
    if names == ("rounded",):
        import onnxruntime as ort

        from edgert.backends.onnx.store import ModelFolder
        from edgert.quantize.architecture import describe

        a = describe(file)
        folder = ModelFolder(file, a)
        graph = folder.path / "rounded.onnx"
        graph.write_bytes(rounded(folder, a))
        options = ort.SessionOptions()
        options.intra_op_num_threads = n_threads
        session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        return {"rounded": (lambda: None, Bare(session, a, n_ctx).step)}
    backend = OnnxBackend(file, n_ctx=n_ctx, n_threads=n_threads, device="cpu")

    def step(tokens: list[int], position: int) -> None:
        if len(tokens) == 1:
            backend.step(tokens[0], 0)
        else:
            backend.forward(Batch.of(tokens, position))

    runner: Any = backend._runner
    bare = Bare(runner.sessions["fused"].session, backend.architecture, n_ctx)
    return {"edgert": (lambda: backend.free(0), step), "bare": (lambda: None, bare.step)}


def serve(names: str, path: str, n_ctx: str, n_threads: str) -> None:
    """The other side of the pipe: runs each test that a line names, and answers with its seconds."""
    sides = engines(tuple(names.split(",")), Path(path), int(n_ctx), int(n_threads))
    ids = np.random.default_rng(0).integers(0, 256, int(n_ctx)).tolist()
    for line in sys.stdin:
        name, n, size = json.loads(line)
        clear, step = sides[name]
        clear()
        start = time.perf_counter()
        for position in range(0, n, size):
            step(ids[position : position + size], position)
        print(json.dumps(time.perf_counter() - start), flush=True)


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("-t", "--threads", default="1,2", show_default=True)
@click.option("-p", "--n-prompt", default=512, show_default=True)
@click.option("-n", "--n-gen", default=64, show_default=True)
@click.option("-r", "--repetitions", default=5, show_default=True)
def main(model: Path, threads: str, n_prompt: int, n_gen: int, repetitions: int) -> None:
    from edgert.backends.onnx.backend import OnnxBackend
    from edgert.quantize.gguf_file import GGUFFile

    with GGUFFile.open(model) as file:
        OnnxBackend(file, n_ctx=8, device="cpu").close()  # makes the graph and its weights
    click.echo(f"| threads | test | {', tok/s | '.join(SIDES)}, tok/s | edgert / bare | / rounded | / llama.cpp |")
    click.echo(f"|---:|---|{'---:|' * (2 * len(SIDES) - 1)}")
    for n_threads in map(int, threads.split(",")):
        arguments = [str(model), str(max(n_prompt, n_gen)), str(n_threads)]
        processes = {}
        for names in PROCESSES:
            process = subprocess.Popen(
                [sys.executable, __file__, "--side", ",".join(names), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            processes |= dict.fromkeys(names, process)

        def run(name: str, test: tuple[int, int], processes: Any = processes) -> float:
            time.sleep(PAUSE)
            processes[name].stdin.write(json.dumps([name, *test]) + "\n")
            processes[name].stdin.flush()
            return float(processes[name].stdout.readline())

        for what, test in (("prefill", (n_prompt, min(n_prompt, 512))), ("decode", (n_gen, 1))):
            seconds = {name: [run(name, test)] for name in SIDES}  # the first warms up
            for i in range(repetitions):
                for name in SIDES if i % 2 else SIDES[::-1]:
                    seconds[name].append(run(name, test))
            rates = [test[0] / statistics.median(seconds[name][1:]) for name in SIDES]
            own = seconds[SIDES[0]][1:]
            pairs = [[b / a for a, b in zip(own, seconds[name][1:], strict=True)] for name in SIDES[1:]]
            ratios = [f"{statistics.median(pair):.3f}" for pair in pairs]
            cells = [str(n_threads), f"{what} {test[0]}", *(f"{rate:.1f}" for rate in rates), *ratios]
            click.echo(f"| {' | '.join(cells)} |")
        for process in {id(process): process for process in processes.values()}.values():
            process.stdin.close()
            process.wait()


if __name__ == "__main__":
    if "--side" in sys.argv:
        serve(*sys.argv[sys.argv.index("--side") + 1 :])
    else:
        main()
