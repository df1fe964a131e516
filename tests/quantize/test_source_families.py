"""Checkpoints of every family to GGUF: logits as transformers computes them, keys as llama.cpp's converter writes."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoint_configs import CONFIGS, TIED
from checkpoints import logits_of, write_checkpoint
from llama_oracle import llama_cpp_logits
from reference import ObservedReference, Reference, kl_divergence

from edgert import backends
from edgert.backends.base import Batch
from edgert.backends.cpu import isa
from edgert.errors import EdgertError, RequestError
from edgert.quantize import quantize
from edgert.quantize.convert import convert
from edgert.quantize.source import open_source

TOKENS = np.random.default_rng(3).integers(6, 370, 90).tolist()  # past llama-3's original context of 32


N_CTX = 128
# Of these llama.cpp ignores the window, or wants more layers before it heeds windows or norms q and k.
UNLIKE_LLAMA_CPP = ("phi3", "starcoder2", "command-r-plus", "exaone4-windows")
KNOWN_PARTS = (
    "exaone4",
    "exaone4-windows",
    "seed-oss",
    "ernie4.5",
    "gemma4",
    "glm",
)  # which other families have as well


def near(logits: np.ndarray, expected: np.ndarray, share: float) -> bool:
    return bool(np.abs(logits - expected).max() < share * np.abs(expected).max())


def cpu_logits(path: Path) -> np.ndarray:
    options = {"n_ctx": N_CTX, "n_threads": 2, "cache_type_k": "f16", "cache_type_v": "f16"}
    with closing(backends.load(path, backend="cpu", **options)) as backend:
        return backend.forward(Batch.of(TOKENS, 0, 0, "all")).copy()


BOTH = ("llama", "llama-head", "llama-bias", "llama-linear", "llama-3", "mistral", "qwen2", "qwen3", "gemma3",
        "gemma3-linear")  # fmt: skip
CASES = [(name, tied) for name in CONFIGS for tied in ((False, True) if name in BOTH else (name in TIED,))]


def marked(name: str, *others: Any) -> Any:
    return pytest.param(name, *others, marks=[pytest.mark.slow] * (name in KNOWN_PARTS))


@pytest.mark.parametrize(
    ("name", "tied"), [marked(*case) for case in CASES], ids=[f"{name}{'-tied' * tied}" for name, tied in CASES]
)
def test_logits_equal_transformers(name: str, tied: bool, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "hf", name, tied=tied)
    expected = logits_of(model, TOKENS)
    assert expected.std() > 0.5
    convert(tmp_path / "hf", tmp_path / "m.gguf", "F32")
    assert near(Reference(tmp_path / "m.gguf", n_ctx=N_CTX).logits(TOKENS), expected, 1e-4)
    logits = cpu_logits(tmp_path / "m.gguf")
    assert near(logits, expected, 0.02)  # the cache is rounded to 16 bits
    assert kl_divergence(expected, logits).mean() < 1e-5
    with open_source(tmp_path / "hf") as source:
        assert source.describe() is not None
        assert ("output.weight" in source.tensors) != tied


@pytest.mark.parametrize("name", [marked(name) for name in CONFIGS if name not in UNLIKE_LLAMA_CPP])
def test_llama_cpp_computes_the_same(name: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "hf", name, tied=name in TIED)
    expected = logits_of(model, TOKENS)
    convert(tmp_path / "hf", tmp_path / "m.gguf", "F32")
    assert near(llama_cpp_logits(tmp_path / "m.gguf", TOKENS), expected, 0.02)


FEW_BITS = [name if name in ("gemma2", "gptneox") else pytest.param(name, marks=pytest.mark.slow)
            for name in CONFIGS if name not in BOTH]  # fmt: skip


@pytest.mark.parametrize("name", FEW_BITS)
def test_few_bits_are_near_the_same_weights_in_float(name: str, tmp_path: Path) -> None:
    """What the kernels of quantized weights add to the types' own rounding: biases, norms and activations.

    By tiles it is little; where squares (nemotron) or sharp attention (smollm3) make more of it, less than what
    llama.cpp adds. Processors without tiles add what activations rounded to bytes alone do, as llama.cpp does.
    """
    write_checkpoint(tmp_path / "hf", name, tied=name in TIED)
    quantize(tmp_path / "hf", tmp_path / "m.gguf", budget="q8_0", calibration=(), n_threads=1)
    expected = Reference(tmp_path / "m.gguf", n_ctx=N_CTX).logits(TOKENS)
    lost = kl_divergence(expected, cpu_logits(tmp_path / "m.gguf")).mean()
    if lost < 1e-3:
        return
    if isa.select().name != "amx":
        rounded = ObservedReference(tmp_path / "m.gguf", int8=True, n_ctx=N_CTX).logits(TOKENS)
        assert lost < 1.2 * kl_divergence(expected, rounded).mean()
    else:
        assert name in ("nemotron", "smollm3")
        assert lost < 0.5 * kl_divergence(expected, llama_cpp_logits(tmp_path / "m.gguf", TOKENS)).mean()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"enable_moe_block": True}, "enable_moe_block is True; edgert converts gemma4 where it is False"),
        ({"per_layer_config": [1]}, r"'per_layer_config' is \[1\] and should be an object of objects"),
        ({"layer_types": "full"}, "'layer_types' is 'full' and should be 7 times"),
        ({"num_kv_shared_layers": 7}, "attention.shared_kv_layers is 7, of 7 layers: none is left to share with"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_other_models_of_gemma4s_class_are_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", "gemma4", tied=True)
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(EdgertError, match=says):
        convert(tmp_path / "hf", tmp_path / "m.gguf", "F32")


def test_a_table_of_positions_ends(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", "gpt2")
    convert(tmp_path / "hf", tmp_path / "m.gguf", "F32")
    with pytest.raises(RequestError, match="n_ctx: is 513, and the model's table of positions ends after 512"):
        backends.load(tmp_path / "m.gguf", backend="cpu", n_ctx=513)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama-3", "gemma3"])
def test_half_precision_and_shards(name: str, dtype: str, tmp_path: Path) -> None:
    """The weights as they are stored, from several files, in a file of several shards."""
    model = write_checkpoint(tmp_path / "hf", name, dtype=dtype, shard_size="100KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    float32 = type(model).from_pretrained(tmp_path / "hf", dtype="float32", attn_implementation="eager")
    expected = logits_of(float32, TOKENS)
    kind = {"bfloat16": "BF16", "float16": "F16"}[dtype]
    result = convert(tmp_path / "hf", tmp_path / "m.gguf", kind, split_max_size=100_000)
    assert len(result.paths) > 2
    assert result.n_bytes == sum(path.stat().st_size for path in result.paths)
    convert(result.paths[0], tmp_path / "whole.gguf", kind)  # from the shards to one file
    assert near(Reference(tmp_path / "whole.gguf").logits(TOKENS), expected, 1e-4)
    # where a norm became 1 + w it needs more bits than either half format has, and gets them
    assert kl_divergence(expected, cpu_logits(tmp_path / "whole.gguf")).mean() < 1e-3


def test_weights_become_quantized_and_stay_near(tmp_path: Path) -> None:
    """gemma3 from checkpoint to Q8_0 by gguf's own quantizer: no symbol repeated, no norm forgotten."""
    model = write_checkpoint(tmp_path / "hf", "gemma3", tied=True)
    expected = logits_of(model, TOKENS)
    with open_source(tmp_path / "hf") as source:
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
        for key, value in source.metadata.items():
            if key != "general.architecture":
                decoded = value.decode()
                if hasattr(decoded, "to_str"):
                    writer.add_array(key, decoded.to_str())
                elif isinstance(decoded, np.ndarray):
                    writer.add_array(key, decoded.tolist())
                else:
                    writer.add_key_value(key, decoded, gguf.GGUFValueType(value.kind))
        for name, tensor in source.tensors.items():
            if len(tensor.shape) == 1:
                writer.add_tensor(name, tensor.dequantize())
            else:
                quantized = gguf.quants.quantize(tensor.dequantize(), gguf.GGMLQuantizationType.Q8_0)
                writer.add_tensor(name, quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert kl_divergence(expected, Reference(tmp_path / "m.gguf").logits(TOKENS)).mean() < 0.01


U, F, B, S = "UINT32", "FLOAT32", "BOOL", "STRING"
COMMON_KEYS = {
    "general.architecture": S,
    "general.type": S,
    "general.name": S,
    "general.size_label": S,
    "general.file_type": U,
    "general.quantization_version": U,
    "{}.block_count": U,
    "{}.context_length": U,
    "{}.embedding_length": U,
    "{}.feed_forward_length": U,
    "{}.attention.head_count": U,
    "{}.attention.head_count_kv": U,
    "{}.rope.freq_base": F,
    "{}.attention.layer_norm_rms_epsilon": F,
    "tokenizer.ggml.model": S,
    "tokenizer.ggml.pre": S,
    "tokenizer.ggml.tokens": f"ARRAY {S}",
    "tokenizer.ggml.token_type": "ARRAY INT32",
    "tokenizer.ggml.bos_token_id": U,
    "tokenizer.ggml.eos_token_id": U,
    "tokenizer.ggml.padding_token_id": U,
    "tokenizer.ggml.add_bos_token": B,
    "tokenizer.ggml.add_eos_token": B,
    "tokenizer.chat_template": S,
}
HEAD_KEYS = {"{}.attention.key_length": U, "{}.attention.value_length": U}
SPM_KEYS = {
    "tokenizer.ggml.scores": "ARRAY FLOAT32",
    "tokenizer.ggml.unknown_token_id": U,
    "tokenizer.ggml.add_space_prefix": B,
}
LLAMA_KEYS = {"{}.vocab_size": U, "{}.rope.dimension_count": U}
BPE_KEYS = {"tokenizer.ggml.merges": f"ARRAY {S}"}
# What llama.cpp's convert_hf_to_gguf.py (2026-11) writes for these checkpoints, key by key with its type; compared
# with its files once by hand. Besides, it writes tokenizer.ggml.add_sep_token = false, which means nothing, for
# gemma and mistral, and it leaves out add_eos_token = false where the other families have it.
KEYS: dict[str, tuple[str, dict[str, str]]] = {
    "llama": ("llama", {**LLAMA_KEYS, **HEAD_KEYS, **BPE_KEYS}),
    "llama-head": ("llama", {**LLAMA_KEYS, **HEAD_KEYS, **BPE_KEYS}),
    "llama-linear": (
        "llama",
        {**LLAMA_KEYS, **HEAD_KEYS, **BPE_KEYS, "{}.rope.scaling.type": S, "{}.rope.scaling.factor": F},
    ),
    "llama-3": ("llama", {**LLAMA_KEYS, **HEAD_KEYS, **BPE_KEYS}),
    "mistral": ("llama", {**LLAMA_KEYS, **SPM_KEYS, **HEAD_KEYS}),
    "qwen2": ("qwen2", BPE_KEYS),
    "qwen3": ("qwen3", {**BPE_KEYS, **HEAD_KEYS}),
    "gemma3": (
        "gemma3",
        {**SPM_KEYS, **HEAD_KEYS, "{}.attention.sliding_window": U, "{}.rope.freq_base_swa": F},
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_and_types_are_llama_cpps(name: str, tmp_path: Path) -> None:
    family, own = KEYS[name]
    write_checkpoint(tmp_path / "hf", name)
    convert(tmp_path / "hf", tmp_path / "m.gguf")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    found = {key: " ".join(t.name for t in f.types) for key, f in fields.items() if not key.startswith("GGUF.")}
    assert found == {key.format(family): kind for key, kind in {**COMMON_KEYS, **own}.items()}
    assert fields[f"{family}.block_count"].contents() == (7 if family == "gemma3" else 3)


def test_values_of_the_draft_are_llama_cpps(shared_dir: Path, tmp_path: Path) -> None:
    """The real checkpoint: what llama.cpp's converter wrote for it, compared by hand in full, recorded here."""
    convert(shared_dir / "models" / "smollm2-draft", tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    values = {key: field.contents() for key, field in reader.fields.items()}
    expected = {
        "general.architecture": "llama",
        "general.size_label": "17M",
        "general.license": "apache-2.0",
        "general.file_type": 32,
        "llama.block_count": 6,
        "llama.context_length": 2048,
        "llama.embedding_length": 256,
        "llama.feed_forward_length": 768,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 100_000.0,
        "llama.attention.key_length": 64,
        "llama.attention.value_length": 64,
        "llama.vocab_size": 49_152,
        "llama.rope.dimension_count": 64,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    assert {key: values[key] for key in expected} == expected
    assert len(values["tokenizer.ggml.merges"]) == 48_900
    assert np.bincount(values["tokenizer.ggml.token_type"]).tolist() == [0, 49_135, 0, 17]
    assert len(reader.tensors) == 56
    assert {t.tensor_type.name for t in reader.tensors if "norm" in t.name} == {"F32"}
    assert {t.tensor_type.name for t in reader.tensors if "norm" not in t.name} == {"BF16"}


def test_every_source_tensor_is_accounted_for(tmp_path: Path) -> None:
    """Sums of all values, by family: what goes in comes out, or is listed as skipped."""
    for name in ("llama", "qwen3", "gemma3"):
        model = write_checkpoint(tmp_path / name, name)
        with open_source(tmp_path / name) as source:
            shift = 1.0 if name == "gemma3" else 0.0
            left = {key: float(p.detach().double().sum()) + (p.numel() * shift if key.endswith("norm.weight") else 0.0)
                    for key, p in model.named_parameters()}  # fmt: skip
            sums = sorted(float(tensor.dequantize().sum(dtype=np.float64)) for tensor in source.tensors.values())
            assert source.skipped == []
            np.testing.assert_allclose(sums, sorted(left.values()), atol=1e-3)


def test_yarn_is_carried(tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 24.0,
    }
    model = write_checkpoint(tmp_path / "hf", "qwen2", rope_parameters=rope)
    result = convert(tmp_path / "hf", tmp_path / "m.gguf", "F32")
    fields = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    assert {key: value for key, value in fields.items() if ".rope." in key} == {
        "qwen2.rope.freq_base": 10_000.0,
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 128,
        "qwen2.rope.scaling.yarn_beta_fast": 24.0,
    }
    assert not result.notices
    assert near(Reference(tmp_path / "m.gguf").logits(TOKENS), logits_of(model, TOKENS), 1e-4)


@pytest.mark.parametrize(
    ("layers", "key"),
    [
        (["sliding_attention", "full_attention"] * 3, [True, False] * 3),
        ([*["sliding_attention"] * 5, "full_attention"], None),
        (["full_attention"] * 6, None),
    ],
    ids=["every second", "every sixth", "none"],
)
def test_windows_of_gemma3(layers: list[str], key: Any, tmp_path: Path) -> None:
    """Layers that differ from the family's habit are written down, and both engines obey."""
    model = write_checkpoint(tmp_path / "hf", "gemma3", layer_types=layers, num_hidden_layers=6)
    convert(tmp_path / "hf", tmp_path / "m.gguf", "F32")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    pattern = fields.get("gemma3.attention.sliding_window_pattern")
    assert (pattern and pattern.contents()) == key
    assert fields["gemma3.attention.sliding_window"].contents() == (13 if "sliding_attention" in layers else 0)
    expected = logits_of(model, TOKENS)
    assert near(Reference(tmp_path / "m.gguf").logits(TOKENS), expected, 1e-4)
    assert near(llama_cpp_logits(tmp_path / "m.gguf", TOKENS), expected, 0.02)


def test_memory_stays_near_a_slab(tmp_path: Path) -> None:
    """A conversion holds a slab, not the model: 200 MB of weights, less than 90 MB more than before."""
    resource = pytest.importorskip("resource")
    import json
    import subprocess
    import sys

    from safetensors.numpy import save_file

    write_checkpoint(tmp_path / "hf", "llama", num_hidden_layers=1, intermediate_size=160)
    shapes = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 4, "head_dim": 64}
    config = json.loads((tmp_path / "hf" / "config.json").read_text()) | shapes
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {}
    big = {"mlp.gate_proj": (8192, 1024), "mlp.up_proj": (8192, 1024), "mlp.down_proj": (1024, 8192)}
    small = {"self_attn.q_proj": (384, 1024), "self_attn.k_proj": (128, 1024), "self_attn.v_proj": (128, 1024)}
    for i in range(4):
        for part, shape in {**big, **small, "self_attn.o_proj": (1024, 384)}.items():
            weights[f"model.layers.{i}.{part}.weight"] = rng.integers(-9, 9, shape).astype(np.float16)
        for part in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{i}.{part}.weight"] = np.ones(1024, np.float16)
    weights |= {
        "model.embed_tokens.weight": np.ones((384, 1024), np.float16),
        "model.norm.weight": np.ones(1024, np.float16),
    }
    weights["lm_head.weight"] = np.zeros((384, 1024), np.float16)
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    code = (
        "import resource, sys; from edgert.quantize.convert import convert; "
        "import tokenizers, edgert.quantize.checkpoint; "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; convert(sys.argv[1], sys.argv[2]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    args = [sys.executable, "-c", code, str(tmp_path / "hf"), str(tmp_path / "m.gguf")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    growth = int(subprocess.run(args, capture_output=True, text=True, check=True, env=env).stdout)
    assert (tmp_path / "m.gguf").stat().st_size > 200e6
    assert resource is not None and growth * 1024 < 90e6
