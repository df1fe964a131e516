"""What edgert's llama backend does on this machine's GPUs: choice, plan, parity, rates beside llama-bench, splits.

    python tests/gpu/measure.py --models FOLDER --llama-bench PATH --out FOLDER [--steps auto,rates,...] [--layers 32]

FOLDER holds GGUF files; a random 7B-shaped Q4_K llama is written there. Each step is reported as it ends, and a step
that fails is reported and does not end the others; one for which --seconds leave no time is left out and named.
gpu.json and gpu.md hold everything.

A GPU that was idle takes a while to reach its clock, and a model of 100 MB is through with a prompt before that: every
measured engine first works for WARM_UP seconds, and repeats its test until it has worked as long again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
SMALL = 16  # tokens of a step that stays where its layers are
WARM_UP = 0.7  # seconds
N_PROMPT, N_GEN = 512, 128


def write_random(path: Path, n_layer: int, n_embd: int, n_ff: int, n_head: int) -> None:
    """A llama of random Q4_K weights."""
    from make_random_model import write

    shape = {"n_layer": n_layer, "n_embd": n_embd, "n_ff": n_ff, "n_head": n_head, "n_head_kv": n_head}
    write(path, type="Q4_K", n_vocab=32000, **shape)


class Report:
    """Collects results; prints each."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.results = folder, {}  # type: ignore[var-annotated]
        self.end = time.perf_counter() + seconds

    def step(self, name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            result = work() if start < self.end else {"left out": "no time"}
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            result = {"failed": f"{type(error).__name__}: {error}"}
        self.results[name] = result
        print(f"[{time.perf_counter() - start:6.1f} s] {name}: {json.dumps(result)}", flush=True)
        (self.folder / "gpu.json").write_text(json.dumps(self.results, indent=1))
        return result


def load(path: Path, backend: str = "llama", **options: Any) -> Any:
    from edgert import backends

    return backends.load(path, backend=backend, **{"n_ctx": 1024, **options})


def medians(sides: dict[str, Callable[[], float]], rounds: int = 2) -> dict[str, float]:
    """Seconds of each side's work: warmed up, then in turn A B A B, the better of its medians.

    sides:  each runs its test once and returns the seconds it took
    """
    found: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, run in sides.items():
            for seconds in (WARM_UP, WARM_UP):  # the second time is what counts
                times, began = [], time.perf_counter()
                while len(times) < 3 or time.perf_counter() - began < seconds:
                    times.append(run())
            found[side].append(statistics.median(times))
    return {side: min(times) for side, times in found.items()}


def loops(backend: Any, path: Path, n_gpu_layers: int = -1, n_gen: int = N_GEN) -> dict[str, dict[str, float]]:
    """Tokens per second: of the backend as `edgert bench` drives it, of its single steps as a reply takes them, and of
    llama-bench's loop in this process, in turn."""
    from llama_overhead import Bare, seconds

    from edgert.backends.base import Batch
    from edgert.devices import probe

    bare = Bare(path, max(N_PROMPT, n_gen), probe.default_threads(), n_gpu_layers=n_gpu_layers)
    ids = np.random.default_rng(0).integers(0, backend.n_vocab, N_PROMPT).tolist()
    whole = (bare.llama.llama_token * N_PROMPT)(*ids)

    def bare_step(tokens: list[int], position: int) -> None:
        bare.decode((bare.llama.llama_token * len(tokens)).from_buffer(whole, 4 * position), position)

    def clear() -> None:
        backend.free(0)

    found: dict[str, dict[str, float]] = {}
    for name, n, parts in ((f"pp{N_PROMPT}", N_PROMPT, [ids]), (f"tg{n_gen}", n_gen, [[i] for i in ids[:n_gen]])):
        batches = [Batch.of(part, i * len(part)) for i, part in enumerate(parts)]

        def forward(tokens: list[int], position: int, batches: list[Any] = batches) -> None:
            backend.forward(batches[position // len(tokens)])

        sides = {
            "forward": lambda parts=parts, forward=forward: seconds(clear, forward, parts),
            "bare loop": lambda parts=parts: seconds(bare.clear, bare_step, parts),
        }
        if n == n_gen:
            sides["extend"] = lambda parts=parts: seconds(clear, lambda t, at: backend.extend(t, at, 0), parts)
        found[name] = {side: round(n / best, 1) for side, best in medians(sides).items()}
    bare.close()
    return found


def rates(backend: Any, n_prompt: int = N_PROMPT, n_gen: int = N_GEN) -> dict[str, float]:
    """Tokens per second through the waist, as `edgert bench` takes them."""
    from edgert.benchmark.runner import Runner, Test

    runner, found = Runner(backend), {}
    for test in (Test(n_prompt, 0), Test(0, n_gen)):
        best = medians({"": lambda test=test: runner.run(test) / 1e9}, 1)[""]
        found[test.name] = round((test.n_prompt + test.n_gen) / best, 1)
    return found


def llama_bench(
    binary: Path, path: Path, n: int, n_gen: int, *flags: Any, env: dict[str, str] | None = None
) -> dict[str, float]:
    """Tokens per second of both tests, medians of the later half of n runs."""
    command = [binary, "-m", path, "-p", N_PROMPT, "-n", n_gen, "-r", n, "-o", "json", "-fa", 1, *flags]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=120, env=env)
    if done.returncode:
        raise RuntimeError(f"llama-bench ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return {
        f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}": round(
            1e9 * (row["n_prompt"] + row["n_gen"]) / statistics.median(row["samples_ns"][n // 2 :]), 1
        )
        for row in json.loads(done.stdout)
    }


def beside(
    binary: Path,
    path: Path,
    options: dict[str, Any],
    flags: Sequence[Any],
    *,
    n: int = 20,
    n_gen: int = N_GEN,
    alone: bool = False,
) -> dict[str, Any]:
    """The backend's rates and llama-bench's, in turn: theirs, ours, theirs, ours; and both loops in one process.

    alone:  without the loops in one process, for which the model is loaded once more
    """
    ours, theirs = [], []
    backend = load(path, flash_attn="on", **options)
    try:
        verdict, details = str(backend.verdict), backend.verdict.details
        for _ in range(2):
            theirs.append(llama_bench(binary, path, n, n_gen, *flags))
            ours.append(rates(backend, n_gen=n_gen))
        inside = {} if alone else loops(backend, path, int(details["n_gpu_layers"]), n_gen)
    finally:
        backend.close()
    best = lambda runs: {test: max(run[test] for run in runs) for test in runs[0]}  # noqa: E731
    a, b = best(ours), best(theirs)
    return {
        "verdict": verdict,
        "layers": details["n_gpu_layers"],
        "edgert": a,
        "llama-bench": b,
        "ratio": {t: round(a[t] / b[t], 3) for t in a if b.get(t)},
        "in one process": inside,
        "runs": [ours, theirs],
    }


def edgert(*arguments: Any, check: bool = True) -> str:
    """What the command line prints."""
    command = [sys.executable, "-m", "edgert", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command[2:])} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout


def planned(path: Path, n_ctx: int) -> dict[str, Any]:
    """What `edgert plan` says of the GPU."""
    places = json.loads(edgert("plan", "-m", path, "-c", n_ctx, "--json", "--no-measure", check=False))
    return next((place for place in places["places"] if place["backend"] == "llama"), {})


def chosen(path: Path) -> dict[str, Any]:
    """`auto` on this machine, for the first time and again; what plan then foresees beside what it does."""
    found: dict[str, Any] = {}
    for time_ in ("first", "again"):
        start = time.perf_counter()
        backend = load(path, backend="auto")
        found[time_] = {
            "seconds": round(time.perf_counter() - start, 2),
            "verdict": str(backend.verdict),
            "trials": [str(trial) for trial in backend.verdict.trials],
        }
        if time_ == "again":
            found["rates"] = rates(backend)
        backend.close()
    place = planned(path, 1024)
    found["planned rates"] = {name: place.get(name) for name in ("prefill", "decode", "basis")}
    return found


def memory(path: Path, n_ctx: int) -> dict[str, Any]:
    """MiB of GPU memory that plan says and a process takes, its CUDA context included, with the context full."""
    from edgert.devices import gpus

    place = planned(path, n_ctx)
    code = (
        "import sys; from edgert import backends; from edgert.backends.base import Batch\n"
        f"b = backends.load({str(path)!r}, backend='llama', n_ctx={n_ctx}, flash_attn='on')\n"
        f"for i in range(0, {n_ctx}, 512): b.forward(Batch.of([1] * 512, i))\n"
        "print('full', flush=True); sys.stdin.readline()"
    )
    before = sum(gpu.memory_free or 0 for gpu in gpus.gpus())
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin and child.stdout
        child.stdout.readline()
        taken = before - sum(gpu.memory_free or 0 for gpu in gpus.gpus())
        child.stdin.close()
    total = int(place["memory"]["total"]) if place else 0
    return {"planned_mib": total >> 20, "taken_mib": taken >> 20, "ratio": round(total / max(taken, 1), 3)}


def parity(path: Path, against: str, n: int = 96, **options: Any) -> dict[str, Any]:
    """Top tokens and KL divergence against another engine, on random tokens: they differ less on text.

    About 0.06 is what CUDA's kernels make of types with a minimum: see tests/bench/cuda_rounding.py.
    """
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


def partial(path: Path, limit_mib: int, binary: Path, **options: Any) -> dict[str, Any]:
    """A GPU of which only so much may be used: what is planned, what is taken, how fast that is."""
    from edgert.backends.llama import devices
    from edgert.devices import probe

    before = sum(gpu.memory_free for gpu in devices.gpus())
    options |= {"gpu_memory": limit_mib << 20}
    backend = load(path, flash_attn="on", **options)
    taken = before - sum(gpu.memory_free for gpu in devices.gpus())
    details = backend.verdict.details
    backend.close()
    # Without layouts of its own (AMX among them) for the CPU's layers where our backend found that those fail.
    flags = ["-ngl", details["n_gpu_layers"], "-sm", "none", "-t", probe.default_threads()]
    flags += ["--repack", 0] if "amx" in details else []
    found = beside(binary, path, options, flags, n=4, n_gen=16)
    return {"limit_mib": limit_mib, "taken_mib": taken >> 20, **found}


@contextlib.contextmanager
def rpc_server(binary: Path, gpu: int) -> Iterator[str]:
    """llama.cpp's rpc-server with one of the GPUs: its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(binary.with_name("ggml-rpc-server")), "-H", "127.0.0.1", "-p", str(port)]
    child = subprocess.Popen(
        command, env=os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()


def over_rpc(path: Path, binary: Path, n_gpus: int) -> dict[str, Any]:
    """A model that spans this process's GPU and one of a server, which serves one process at a time."""
    code = (
        "import json, sys; from pathlib import Path; sys.path[:0] = [{tests!r}, {bench!r}]\n"
        "import measure\n"
        "from edgert.backends.llama import devices\n"
        "options = {{'rpc': ({address!r},), 'n_gpu_layers': -1, 'flash_attn': 'on'}}\n"
        "backend = measure.load(Path({path!r}), **options)\n"
        "found = {{'verdict': str(backend.verdict), 'buffers': backend.verdict.details['buffers']}}\n"
        "found['edgert'] = measure.rates(backend)\n"
        "found['devices'] = [vars(gpu) for gpu in devices.gpus()]\n"
        "backend.close()\n"
        "found['parity'] = measure.parity(Path({path!r}), 'llama', **options)\n"
        "print(json.dumps(found))"
    )
    tests = Path(__file__).resolve().parent
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    with rpc_server(binary, n_gpus - 1) as address:
        theirs = llama_bench(binary, path, 4, N_GEN, "-ngl", 99, "-rpc", address, env=environment)
    with rpc_server(binary, n_gpus - 1) as address:
        text = code.format(tests=str(tests), bench=str(tests.parent / "bench"), address=address, path=str(path))
        command = [sys.executable, "-c", text]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-600:])
    return json.loads(done.stdout.splitlines()[-1]) | {"llama-bench": theirs}


def markdown(results: dict[str, Any]) -> str:
    import cuda_rounding

    lines = ["| what | test | edgert | llama-bench | ratio |", "|---|---|---:|---:|---:|"]
    for name, result in results.items():
        if isinstance(result, dict) and isinstance(result.get("edgert"), dict):
            for test, rate in result["edgert"].items():
                other = result["llama-bench"].get(test)
                ratio = f"{rate / other:.3f}" if other else ""
                lines.append(f"| {name} | {test} | {rate} | {other} | {ratio} |")
    lines += [
        "",
        "| what | test | edgert | single steps | llama-bench's loop | ratio |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, result in results.items():
        for test, side in (result.get("in one process") or {} if isinstance(result, dict) else {}).items():
            ratio = f"{side['forward'] / side['bare loop']:.3f}"
            lines.append(
                f"| {name} | {test} | {side['forward']} | {side.get('extend', '')} | {side['bare loop']} | {ratio} |"
            )
    lines += ["", "| what | same top token | mean KL | largest KL |", "|---|---:|---:|---:|"]
    for name, result in results.items():
        if isinstance(result, dict) and "kl_mean" in result:
            lines.append(f"| {name} | {result['same_top']:.3f} | {result['kl_mean']:.2e} | {result['kl_max']:.2e} |")
    for name, result in results.items():
        if name.endswith(": rounding") and isinstance(result, dict) and "float" in result:
            lines += ["", cuda_rounding.markdown(name, result)]
    return "\n".join(lines)


Steps = Iterator[tuple[str, Callable[[], Any]]]


@dataclass(frozen=True)
class Machine:
    """What there is to measure, on what.

    large:  the random model; binary: llama-bench
    alone:  options and flags for the first of several GPUs
    """

    models: list[Path]
    large: Path
    binary: Path
    gpus: list[dict[str, Any]]

    @property
    def alone(self) -> tuple[dict[str, Any], list[Any]]:
        many = len(self.gpus) > 1
        return {"split_mode": "none"} if many else {}, ["-ngl", 99, *(["-sm", "none"] if many else [])]


def of_devices(_: Machine) -> Steps:
    yield "edgert devices", lambda: json.loads(edgert("devices", "--json"))
    yield "edgert doctor", lambda: json.loads(edgert("doctor", "--json", check=False))


def of_hiding(m: Machine) -> Steps:
    """What is said where CUDA is told to show no GPU."""
    code = (
        "import time, sys; from edgert import backends, errors; start = time.perf_counter()\n"
        f"try: backends.load({str(m.large)!r}, device='gpu', require=True)\n"
        "except errors.EdgertError as error: print(f'after {time.perf_counter() - start:.2f} s: {error}')"
    )
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}

    def said(*command: str) -> str:
        done = subprocess.run([sys.executable, *command], env=hidden, capture_output=True, text=True, check=False)
        return done.stdout or done.stderr

    yield (
        "CUDA_VISIBLE_DEVICES empty",
        lambda: {
            "devices": json.loads(said("-m", "edgert", "devices", "--no-measure", "--json"))["uses"],
            "require": said("-c", code),
        },
    )


def of_rounding(m: Machine) -> Steps:
    """What was emulated of the GPU's arithmetic beside that GPU: of the draft that comes with edgert, as it is and in
    types with and without a minimum, and of the models."""
    from cuda_rounding import compare

    import edgert as package

    draft, gpu = Path(package.__file__).parent / "assets" / "smollm2-draft.gguf", str(m.gpus[0]["name"])
    yield f"{draft.stem}: rounding", lambda: compare(draft, 96, gpu)
    for kind in ("q4_1", "q4_0", "q4_k_m"):
        path = m.large.parent.with_name("drafts") / f"{draft.stem}-{kind}.gguf"

        def made(path: Path = path, kind: str = kind) -> Any:
            path.parent.mkdir(exist_ok=True)
            if not path.exists():
                edgert("quantize", draft, "-o", path, "--allow-requantize", "--fast", "--type", kind)
            return compare(path, 96, gpu)

        yield f"{path.stem}: rounding", made
    for path in m.models:
        if path != m.large:
            yield f"{path.stem}: rounding", lambda path=path: compare(path, 96, gpu)


def of_auto(m: Machine) -> Steps:
    for path in m.models:
        yield f"{path.stem}: auto", lambda path=path: chosen(path)


def of_memory(m: Machine) -> Steps:
    for path, n_ctx in itertools.product(m.models, (2048, 8192)):
        yield f"{path.stem}: memory at {n_ctx}", lambda path=path, n=n_ctx: memory(path, n)


def of_rates(m: Machine) -> Steps:
    for path in m.models:
        yield path.stem, lambda path=path: beside(m.binary, path, *m.alone, n=8 if path == m.large else 20)


def of_parity(m: Machine) -> Steps:
    for path in m.models:
        for engine in ("llama",) if path == m.large else ("cpu", "llama"):
            yield f"{path.stem}: parity with {engine}", lambda path=path, e=engine: parity(path, e, **m.alone[0])


def of_partial(m: Machine) -> Steps:
    size = m.large.stat().st_size >> 20
    yield "partial offload", lambda: partial(m.large, size // 2 + 1024, m.binary, **m.alone[0])


def of_waist(m: Machine) -> Steps:
    """Of the models with a tokenizer; of the draft that comes with edgert where there are none."""
    import waist

    for path in [path for path in m.models if path != m.large] or [waist.DRAFT]:
        yield from waist.of(path).items()


def of_split(m: Machine) -> Steps:
    """Several GPUs: a build that cannot split rows says so, llama-bench in its way, and both are noted."""
    if len(m.gpus) < 2:
        return
    for mode in ("layer", "tensor", "row"):
        options, flags = {"split_mode": mode, "n_gpu_layers": -1}, ["-ngl", 99, "-sm", mode]
        what = f"{len(m.gpus)} GPUs, {mode} split"
        yield what, lambda o=options, f=flags: beside(m.binary, m.large, o, f, n=4, alone=True)
        if mode == "row":
            yield f"{what}: llama-bench", lambda f=flags: llama_bench(m.binary, m.large, 4, N_GEN, *f)
        else:
            yield f"{what}: parity", lambda o=options: parity(m.large, "llama", **o)
    last = str(m.gpus[-1]["name"])
    flags = ["-ngl", 99, "-dev", last]
    yield f"--device {last}", lambda: beside(m.binary, m.large, {"device": last}, flags, n=4, alone=True)


def of_rpc(m: Machine) -> Steps:
    if len(m.gpus) > 1:
        yield "rpc", lambda: over_rpc(m.large, m.binary, len(m.gpus))


STEPS: dict[str, Callable[[Machine], Steps]] = {
    "devices": of_devices,
    "rounding": of_rounding,
    "auto": of_auto,
    "memory": of_memory,
    "hiding": of_hiding,
    "waist": of_waist,
    "split": of_split,
    "rates": of_rates,
    "parity": of_parity,
    "partial": of_partial,
    "rpc": of_rpc,
}


@click.command()
@click.option("--models", "folder", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--llama-bench", "binary", type=click.Path(path_type=Path), required=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("."))
@click.option("--steps", default=",".join(STEPS), show_default=True)
@click.option("--layers", default=32, help="Of the random model.")
@click.option("--n-embd", default=4096)
@click.option("--n-ff", default=11008)
@click.option("--seconds", default=1e9, help="After so many no step begins.")
def main(
    folder: Path, binary: Path, out: Path, steps: str, layers: int, n_embd: int, n_ff: int, seconds: float
) -> None:
    """Runs what is asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    report = Report(out, seconds)
    large = folder / f"random-{layers}x{n_embd}-q4_k.gguf"
    if not large.exists():
        report.step("write", lambda: write_random(large, layers, n_embd, n_ff, n_embd // 128))
    from edgert.backends.llama import devices, library

    library.library()
    gpus = report.step("gpus", lambda: [vars(gpu) for gpu in devices.gpus()])
    if not gpus:
        raise click.ClickException("llama.cpp sees no GPU here.")
    machine = Machine(sorted(folder.glob("*.gguf")), large, binary, gpus)
    for kind in steps.split(","):
        for name, work in STEPS[kind](machine):
            report.step(name, work)
    (out / "gpu.md").write_text(markdown(report.results) + "\n")
    print(markdown(report.results))


if __name__ == "__main__":
    main()
