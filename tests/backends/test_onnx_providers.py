"""The providers for other processors, for real: each in a virtual environment of its own, since they replace or
extend onnxruntime. OpenVINO runs on its CPU device, Qualcomm's HTP on its simulator. Skipped where pip has none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from reference import Reference, kl_divergence

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "EDGERT_TEST_VENVS" not in os.environ, reason="EDGERT_TEST_VENVS does not name a folder for 200 MB of wheels"
    ),
]
RUN = """
import json, sys, time
import numpy as np
from edgert import backends
from edgert.backends.base import Batch

path, device, out = sys.argv[1:4]
tokens = json.loads(sys.argv[4])
start = time.perf_counter()
backend = backends.load(path, backend="onnx", device=device, n_ctx=256, n_threads=2, require=True)
seconds = time.perf_counter() - start
n = len(tokens) - 3
rows = [backend.forward(Batch.of(tokens[:n], 0, wanted="all")).copy()]
rows += [backend.forward(Batch.of([token], n + i)).copy() for i, token in enumerate(tokens[n:])]
np.save(out, np.concatenate(rows))
print(json.dumps({**backend.verdict.details, "device": backend.verdict.device, "seconds": seconds}))
"""


def environment(name: str, packages: list[str]) -> Path:
    """A virtual environment that sees this one's packages behind its own; kept between runs of the tests."""
    base = Path(os.environ["EDGERT_TEST_VENVS"]) / name
    python = base / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not (base / "ready").exists():
        try:
            subprocess.run([sys.executable, "-m", "venv", base], check=True, capture_output=True)
            install = [python, "-m", "pip", "install", "-q", *packages]
            subprocess.run(install, check=True, capture_output=True, text=True, timeout=400)
        except (subprocess.SubprocessError, OSError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            pytest.skip(f"{' '.join(packages)} cannot be installed here: {said[-1] if said else error}")
        site = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        behind = [path for path in sys.path if "site-packages" in path]
        Path(site, "zz_behind.pth").write_text("\n".join([*behind, str(ROOT)]))
        (base / "ready").touch()
    return python


def two_layers(source: Path, target: Path, n_vocab: int = 2048) -> Path:
    """The first two layers of a real model, with the first tokens of its vocabulary."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for key, entry in reader.fields.items():
        if key.startswith(("GGUF.", "tokenizer.")) or key == "general.architecture":
            continue
        value, kind = entry.contents(), entry.types[0]
        if key == "llama.block_count":
            value = 2
        if key == "llama.vocab_size":
            value = n_vocab
        if kind == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, kind)
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and int(tensor.name.split(".")[1]) > 1:
            continue
        data = tensor.data[:n_vocab] if tensor.name in ("token_embd.weight", "output.weight") else tensor.data
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def run(python: Path, model: Path, device: str, tokens: list[int], folder: Path) -> tuple[dict[str, Any], Any]:
    """The verdict, and the logits after each token."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "EDGERT_CACHE": str(folder / "cache")}
    command = [python, "-c", RUN, str(model), device, str(folder / "logits.npy"), json.dumps(tokens)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1]), np.load(folder / "logits.npy")


def test_openvino_on_its_cpu_device(smollm2_path: Path, tmp_path: Path) -> None:
    python = environment("openvino", ["onnx", "onnxruntime-openvino"])
    tokens = [504, 3575, 282, 4649, 314, 260, 1100, 284, 253, 2070, 6330, 282, 260, 905, 30, 198, 57, 1131]
    verdict, logits = run(python, smollm2_path, "openvino:cpu", tokens, tmp_path)
    assert "no NPU" in verdict["device"]
    assert "OpenVINOExecutionProvider" in verdict["assignment"]
    assert "100 % of products" in verdict["assignment"]
    expected = Reference(smollm2_path, cache=False).logits(tokens)
    assert kl_divergence(expected, logits).mean() < 0.02
    assert (expected.argmax(1) == logits.argmax(1)).mean() > 0.8


def test_qualcomm_s_simulator_on_two_real_layers(smollm2_path: Path, tmp_path: Path) -> None:
    python = environment("qnn", ["onnx", "onnxruntime", "onnxruntime-qnn"])
    model = two_layers(smollm2_path, tmp_path / "two.gguf")
    tokens = np.random.default_rng(0).integers(0, 2048, 20).tolist()
    verdict, logits = run(python, model, "qnn:simulator", tokens, tmp_path)
    assert "simulator" in verdict["device"]
    assert "QNNExecutionProvider" in verdict["assignment"]
    assert "CPUExecutionProvider" not in verdict["assignment"]
    assert verdict["compiled"] == "compiled"
    expected = Reference(model).logits(tokens)
    assert kl_divergence(expected, logits).max() < 0.02  # it computes in float16

    again, same = run(python, model, "qnn:simulator", tokens, tmp_path)
    assert again["compiled"] == "hit"
    assert again["seconds"] < verdict["seconds"]
    np.testing.assert_array_equal(same, logits)

    for blob in (tmp_path / "cache").rglob("*.blob.onnx"):
        blob.write_bytes(blob.read_bytes()[:100])
    mended, same = run(python, model, "qnn:simulator", tokens, tmp_path)
    assert mended["compiled"] == "damaged: compiled again"
    np.testing.assert_array_equal(same, logits)
