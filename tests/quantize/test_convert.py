"""From a source to a float GGUF: exact bits, values too large for F16, killed in the middle."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import logits_of, write_checkpoint
from gguf import GGMLQuantizationType as Type
from reference import kl_divergence

import edgert
from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize.convert import convert
from edgert.quantize.rounding import quantize
from edgert.quantize.source import open_source


def tensors_of(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    return {
        t.name: (t.tensor_type.name, gguf.quants.dequantize(t.data, t.tensor_type))
        for t in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize("format", ["BF16", "F16", "F32"])
def test_rounding_is_ggufs(format: str) -> None:
    """Ties to even, subnormals, both signs, the largest finite ones."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    values = values[np.abs(values) < (65504 if format == "F16" else 3.3e38)]
    ties = (np.arange(0x3F80_0000, 0x3F90_0000, 0x8000, dtype=np.uint32)).view(np.float32)
    small = np.float32(2.0) ** np.arange(-149, 16, dtype=np.float32)
    values = np.concatenate([values[: len(values) // 8 * 8], ties, -ties, small, -small])[None]
    expected = gguf.quants.quantize(values, getattr(Type, format))
    assert quantize(values, format).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_value_too_large_for_f16_stays_wide(tmp_path: Path, dtype: str) -> None:
    """One weight of 1e5: never an infinity, and the tensor is listed."""
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    write_checkpoint(tmp_path / "hf", dtype=dtype)
    weights = library.load_file(tmp_path / "hf" / "model.safetensors")
    large = 1e5 if dtype != "float16" else 65504
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = large
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = -65504 if dtype != "bfloat16" else -65280
    library.save_file(weights, tmp_path / "hf" / "model.safetensors")
    result = convert(tmp_path / "hf", tmp_path / "m.gguf", "F16")
    found = tensors_of(tmp_path / "m.gguf")
    assert all(np.isfinite(values).all() for _, values in found.values())
    kind, values = found["blk.1.ffn_up.weight"]
    assert kind == {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]
    assert values[3, 5] == torch.tensor(large, dtype=getattr(torch, dtype)).float().item()
    assert [name for name, _ in result.wider] == ([] if dtype == "float16" else ["blk.1.ffn_up.weight"])
    assert found["blk.1.ffn_down.weight"][0] == "F16"


def test_a_round_trip_keeps_every_bit(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """BF16 -> F32 -> BF16, and every key but the type of the file."""
    path = tiny_model("gemma3", quant=Type.BF16)
    convert(path, tmp_path / "wide.gguf", "F32")
    convert(tmp_path / "wide.gguf", tmp_path / "back.gguf", "BF16")
    with open_source(path) as before, open_source(tmp_path / "back.gguf") as after:
        assert before.metadata == after.metadata
    before_tensors, after_tensors = gguf.GGUFReader(path).tensors, gguf.GGUFReader(tmp_path / "back.gguf").tensors
    assert [t.name for t in before_tensors] == [t.name for t in after_tensors]
    for old, new in zip(before_tensors, after_tensors, strict=True):
        if old.tensor_type == new.tensor_type:
            assert old.data.tobytes() == new.data.tobytes()
    assert gguf.GGUFReader(tmp_path / "wide.gguf").fields["general.file_type"].contents() == 0


def test_taken_back_from_a_quantized_file(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama", quant=Type.Q4_0)
    with pytest.raises(UnsupportedFormatError, match=r"quantized already \(Q4_0\)"):
        convert(path, tmp_path / "m.gguf")
    convert(path, tmp_path / "m.gguf", "F32", allow_requantize=True)
    expected = {name: values for name, (_, values) in tensors_of(path).items()}
    for name, (_, values) in tensors_of(tmp_path / "m.gguf").items():
        assert np.array_equal(values, expected[name])


def test_progress_and_types(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    seen: list[tuple[int, int]] = []
    path = tiny_model("llama", quant=Type.F16)
    result = convert(path, tmp_path / "m.gguf", "BF16", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (result.n_bytes, result.n_bytes) == ((tmp_path / "m.gguf").stat().st_size,) * 2
    with pytest.raises(UnsupportedFormatError, match="'Q4_0' is no type of floats; convert writes F32, F16, BF16"):
        convert(path, tmp_path / "m.gguf", "Q4_0")


def test_in_place(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """The source may be the target: it is read to its end before it is replaced."""
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_model("llama", quant=Type.F16).read_bytes())
    before = tensors_of(path)
    convert(path, path, "F32")
    for name, (kind, values) in tensors_of(path).items():
        assert kind == "F32"
        assert np.array_equal(values, before[name][1])


def test_a_source_that_changes_is_not_resumed(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """What lies half written was made from other weights: it is begun anew."""
    source = tmp_path / "s.gguf"
    good = tiny_model("llama", quant=Type.F32, seed=1).read_bytes()
    bad_weight = np.full((128, 128), np.nan, np.float32)
    source.write_bytes(tiny_model("llama", quant=Type.F32, weights={"output.weight": bad_weight}).read_bytes())
    with pytest.raises(ModelFileError):
        convert(source, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf.part").exists()
    before = source.stat()
    source.write_bytes(good)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # later, however coarse the system's clock is
    convert(source, tmp_path / "m.gguf", "F32", resume=True)
    expected = tensors_of(source)
    for name, (_, values) in tensors_of(tmp_path / "m.gguf").items():
        assert np.array_equal(values, expected[name][1])


def test_the_draft_chats(shared_dir: Path, tmp_path: Path) -> None:
    """The real checkpoint: transformers' logits, and an answer in sentences at the terminal."""
    transformers = pytest.importorskip("transformers")
    folder = shared_dir / "models" / "smollm2-draft"
    path = convert(folder, tmp_path / "draft.gguf").paths[0]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    args = [sys.executable, "-m", "edgert", "run", "-m", str(path), "--backend", "cpu", "--temp", "0", "-n", "24"]
    result = subprocess.run([*args, "-p", "Tell me about the sea."], capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) > 8
    with edgert.load(str(path), backend="cpu", n_ctx=256) as model:
        ids = model.tokenize("The lighthouse keeper counted the ships that passed before the storm came.")
        logits = model.logits(ids)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager")
    assert kl_divergence(logits_of(theirs, ids), logits).mean() < 1e-3


KILLED = """
import sys
from edgert.quantize.convert import convert
first = True
def progress(done, total):
    global first
    if first:
        print("ready", flush=True)
        first = False
    if len(sys.argv) > 3 and done >= float(sys.argv[3]) * total:
        sys.stdin.read()  # until it is killed
convert(sys.argv[1], sys.argv[2], resume=True, progress=progress)
"""


def test_killed_and_run_again(tmp_path: Path) -> None:
    """SIGKILL at ten moments of a real conversion: nothing has the name, and the last run is whole."""
    library = pytest.importorskip("safetensors.numpy")
    folder = tmp_path / "hf"
    write_checkpoint(folder, num_hidden_layers=1)
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "head_dim": 16}
    config = json.loads((folder / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    shapes = {"q_proj": (96, 512), "k_proj": (32, 512), "v_proj": (32, 512), "o_proj": (512, 96)}
    weights = {}
    for i in range(12):
        prefix = f"model.layers.{i}"
        mlp = {"gate_proj": (2048, 512), "up_proj": (2048, 512), "down_proj": (512, 2048)}
        named = {f"self_attn.{part}": shape for part, shape in shapes.items()}
        named |= {f"mlp.{part}": shape for part, shape in mlp.items()}
        for part, shape in named.items():
            weights[f"{prefix}.{part}.weight"] = rng.standard_normal(shape, np.float32)
        for part in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{part}.weight"] = np.ones(512, np.float32)
    weights |= {"model.norm.weight": np.ones(512, np.float32)}
    weights |= {name: np.ones((384, 512), np.float32) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    library.save_file(weights, folder / "model.safetensors")
    out = tmp_path / "m.gguf"
    args = [sys.executable, "-c", KILLED, str(folder), str(out)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pause = random.Random(2)
    for i in range(10):
        at_last = str((i + 1) / 11)  # the share of it that it does not go beyond, should nobody kill it
        with subprocess.Popen([*args, at_last], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(pause.uniform(0, 0.02))
            process.kill()
        assert not out.exists()
    subprocess.run(args, env=env, check=True, capture_output=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m.gguf"]
    convert(folder, tmp_path / "again.gguf")
    assert out.read_bytes() == (tmp_path / "again.gguf").read_bytes()
