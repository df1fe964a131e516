"""What edgert's llama backend does on this machine's GPUs: verdicts, parity, rates beside llama-bench, partial offload.

    python tests/gpu/measure.py --models FOLDER --llama-bench PATH --out FOLDER [--layers 32]

FOLDER holds GGUF files; a random 7B-shaped Q4_K llama is written there. Each step is reported as it ends, and a step
that fails is reported and does not end the others. gpu.json and gpu.md hold everything.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
POOL = 1 << 18  # random blocks that tensors are cut from
SMALL = 16  # tokens of a step that stays where its layers are
BLOCK = 144  # bytes of a Q4_K block of 256 weights


def q4_k(pool: NDArray[np.uint8], rows: int, columns: int, start: int) -> NDArray[np.uint8]:
    """Q4_K rows from the pool, uint8 (rows, columns / 256 * 144); start moves where they are cut."""
    n = rows * columns // 256
    places = (start + np.arange(n)) % len(pool)
    return pool[places].reshape(rows, -1)


def write_random(path: Path, n_layer: int, n_embd: int, n_ff: int, n_head: int, n_vocab: int = 32000) -> None:
    """A llama of random Q4_K weights, whose deviation suits the width."""
    from make_random_model import byte_symbols

    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, (POOL, BLOCK), np.uint8)
    # 6-bit scales and 4-bit codes are uniform: d * 31.5 * 4.6 is about the deviation; dmin centres the codes.
    d = rng.uniform(0.8, 1.2, POOL) / (31.5 * 4.6 * np.sqrt(n_embd))
    pool[:, 0:2] = d.astype(np.float16).view(np.uint8).reshape(-1, 2)
    pool[:, 2:4] = (7.5 * d).astype(np.float16).view(np.uint8).reshape(-1, 2)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"random {n_layer}x{n_embd} Q4_K")
    writer.add_block_count(n_layer)
    writer.add_context_length(8192)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(n_embd // n_head)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(n_vocab)
    symbols = byte_symbols()
    tokens = [*symbols, symbols[0] + symbols[1]]
    tokens += [f"<unused{i}>" for i in range(n_vocab - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [5] * (n_vocab - 257))
    writer.add_token_merges([f"{symbols[0]} {symbols[1]}"])
    writer.add_eos_token_id(n_vocab - 1)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd)}
    for i in range(n_layer):
        shapes |= {f"blk.{i}.attn_{part}.weight": (n_embd, n_embd) for part in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.ffn_{part}.weight": (n_ff, n_embd) for part in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down.weight": (n_embd, n_ff)}
        shapes |= {f"blk.{i}.{part}_norm.weight": (n_embd,) for part in ("attn", "ffn")}
    shapes |= {"output_norm.weight": (n_embd,), "output.weight": (n_vocab, n_embd)}
    kind = gguf.GGMLQuantizationType.Q4_K
    for name, size in shapes.items():
        if len(size) == 1:
            writer.add_tensor_info(name, size, np.dtype(np.float32), 4 * size[0])
        else:
            bytes_shape = (size[0], size[1] // 256 * BLOCK)
            writer.add_tensor_info(name, bytes_shape, np.dtype(np.uint8), int(np.prod(bytes_shape)), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for start, (_, size) in enumerate(shapes.items()):
        data = np.ones(size, np.float32) if len(size) == 1 else q4_k(pool, *size, start * 7919)
        writer.write_tensor_data(data)
    writer.close()


class Report:
    """Collects results; prints each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.results = folder, {}  # type: ignore[var-annotated]

    def step(self, name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            result = work()
        except Exception as error:
            traceback.print_exc()
            result = {"failed": f"{type(error).__name__}: {error}"}
        self.results[name] = result
        print(f"[{time.perf_counter() - start:6.1f} s] {name}: {json.dumps(result)}", flush=True)
        (self.folder / "gpu.json").write_text(json.dumps(self.results, indent=1))
        return result


def load(path: Path, backend: str = "llama", **options: Any) -> Any:
    from edgert import backends

    return backends.load(path, backend=backend, n_ctx=1024, **options)


def rates(backend: Any, n_prompt: int, n_gen: int, repetitions: int = 3) -> dict[str, float]:
    """Median tokens per second through the waist, as `edgert bench` takes them."""
    from edgert.benchmark import Runner, Test

    runner, found = Runner(backend), {}
    for test in (Test(n_prompt, 0), Test(0, n_gen)):
        runner.warm_up(test)
        times = [runner.run(test) for _ in range(repetitions)]
        found[test.name] = round((test.n_prompt + test.n_gen) * 1e9 / statistics.median(times), 1)
    return found


def llama_bench(binary: Path, path: Path, n_prompt: int, n_gen: int, *flags: Any) -> dict[str, float]:
    command = [binary, "-m", path, "-p", n_prompt, "-n", n_gen, "-r", 3, "-o", "json", "-fa", 1, *flags]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"llama-bench ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    rows = json.loads(done.stdout)
    return {
        f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}": round(
            1e9 * (row["n_prompt"] + row["n_gen"]) / statistics.median(row["samples_ns"]), 1
        )
        for row in rows
    }


def beside(binary: Path, path: Path, n_prompt: int, n_gen: int, options: dict[str, Any], *flags: str) -> dict[str, Any]:
    """The backend's rates and llama-bench's, in turn: theirs, ours, theirs, ours."""
    ours, theirs = [], []
    backend = load(path, flash_attn="on", **options)
    try:
        verdict = str(backend.verdict)
        for _ in range(2):
            theirs.append(llama_bench(binary, path, n_prompt, n_gen, *flags))
            ours.append(rates(backend, n_prompt, n_gen))
    finally:
        backend.close()
    best = lambda runs: {test: max(run[test] for run in runs) for test in runs[0]}  # noqa: E731
    a, b = best(ours), best(theirs)
    return {
        "verdict": verdict,
        "edgert": a,
        "llama-bench": b,
        "ratio": {t: round(a[t] / b[t], 3) for t in a if b.get(t)},
    }


def parity(path: Path, against: str, n: int = 96, **options: Any) -> dict[str, Any]:
    """Top tokens and KL divergence against another engine, on random tokens: they differ less on text."""
    from edgert.backends.base import Batch

    ours = load(path, **options)
    other = load(path, against, **({"n_gpu_layers": 0} if against == "llama" else {}))
    tokens = np.random.default_rng(0).integers(0, ours.n_vocab, n).tolist()
    a = ours.forward(Batch.of(tokens, 0, wanted="all")).astype(np.float64)
    # llama.cpp gives the products of 32 tokens and more to a GPU even where the layers are the CPU's.
    parts = range(0, n, SMALL)
    rows = [other.forward(Batch.of(tokens[i : i + SMALL], i, wanted="all")).astype(np.float64) for i in parts]
    b = np.concatenate(rows)
    a, b = (x - x.max(1, keepdims=True) for x in (a, b))
    p, q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (a, b))
    kl = (np.exp(q) * (q - p)).sum(1)
    result = {
        "same_top": float((a.argmax(1) == b.argmax(1)).mean()),
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
    }
    ours.close()
    other.close()
    return result


def partial(path: Path, limit_mib: int, binary: Path) -> dict[str, Any]:
    """A GPU of which only so much may be used: what is planned, what is taken, how fast that is."""
    from edgert.backends.llama import devices
    from edgert.devices import probe

    before = sum(gpu.memory_free for gpu in devices.gpus())
    backend = load(path, gpu_memory=limit_mib << 20, flash_attn="on")
    taken = before - sum(gpu.memory_free for gpu in devices.gpus())
    layers = backend.verdict.details["n_gpu_layers"]
    found = rates(backend, 512, 64)
    verdict = str(backend.verdict)
    backend.close()
    # Without layouts of its own (AMX among them) for the CPU's layers where our backend found that those fail.
    flags = ["-t", probe.default_threads(), *(["--repack", 0] if "amx" in backend.verdict.details else [])]
    return {
        "limit_mib": limit_mib,
        "taken_mib": taken >> 20,
        "layers": layers,
        "verdict": verdict,
        "edgert": found,
        "llama-bench": llama_bench(binary, path, 512, 64, "-ngl", layers, *flags),
    }


def markdown(results: dict[str, Any]) -> str:
    lines = ["| what | test | edgert | llama-bench | ratio |", "|---|---|---:|---:|---:|"]
    for name, result in results.items():
        if isinstance(result, dict) and isinstance(result.get("edgert"), dict):
            for test, rate in result["edgert"].items():
                other = result["llama-bench"].get(test)
                ratio = f"{rate / other:.3f}" if other else ""
                lines.append(f"| {name} | {test} | {rate} | {other} | {ratio} |")
    lines += ["", "| what | same top token | mean KL | largest KL |", "|---|---:|---:|---:|"]
    for name, result in results.items():
        if isinstance(result, dict) and "kl_mean" in result:
            lines.append(f"| {name} | {result['same_top']:.3f} | {result['kl_mean']:.2e} | {result['kl_max']:.2e} |")
    return "\n".join(lines)


@click.command()
@click.option("--models", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--llama-bench", "binary", type=click.Path(path_type=Path), required=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("."))
@click.option("--layers", default=32, help="Of the random model.")
@click.option("--n-embd", default=4096)
@click.option("--n-ff", default=11008)
def main(models: Path, binary: Path, out: Path, layers: int, n_embd: int, n_ff: int) -> None:
    """Runs everything."""
    models.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    report = Report(out)
    large = models / f"random-{layers}x{n_embd}-q4_k.gguf"
    if not large.exists():
        report.step("write", lambda: write_random(large, layers, n_embd, n_ff, n_embd // 128))
    report.step(
        "edgert devices",
        lambda: json.loads(
            subprocess.run(
                [sys.executable, "-m", "edgert", "devices", "--json"], capture_output=True, text=True, check=True
            ).stdout
        ),
    )
    from edgert.backends.llama import devices, library

    library.library()
    gpus = report.step("gpus", lambda: [vars(gpu) for gpu in devices.gpus()])
    one = {"split_mode": "none"} if len(gpus) > 1 else {}
    flags = ["-sm", "none"] if len(gpus) > 1 else []
    for path in sorted(models.glob("*.gguf")):
        report.step(f"{path.stem}", lambda path=path: beside(binary, path, 512, 128, one, "-ngl", "99", *flags))
        engine = "llama" if path == large else "cpu"
        report.step(f"{path.stem}: parity with {engine}", lambda path=path, e=engine: parity(path, e, **one))
        if engine == "cpu":
            report.step(f"{path.stem}: parity with llama", lambda path=path: parity(path, "llama", **one))
    for mode in ("layer", "row") if len(gpus) > 1 else ():
        options = {"split_mode": mode, "n_gpu_layers": -1}
        report.step(
            f"{len(gpus)} GPUs, {mode} split",
            lambda o=options, m=mode: beside(binary, large, 512, 128, o, "-ngl", "99", "-sm", m),
        )
        report.step(f"{len(gpus)} GPUs, {mode} split: parity", lambda o=options: parity(large, "llama", **o))
    size = large.stat().st_size >> 20
    report.step("partial offload", lambda: partial(large, size // 2 + 1024, binary))
    (out / "gpu.md").write_text(markdown(report.results) + "\n")
    print(markdown(report.results))


if __name__ == "__main__":
    main()
