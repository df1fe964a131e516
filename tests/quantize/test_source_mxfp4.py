"""gpt-oss as it is published: experts in MXFP4 come to GGUF as they are, and compute what transformers' do."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import logits_of, write_checkpoint
from llama_oracle import llama_cpp_logits
from reference import Reference, kl_divergence

from edgert import backends
from edgert.backends.base import Batch
from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize import quantize
from edgert.quantize.convert import convert
from edgert.quantize.source import open_source

TOKENS = np.random.default_rng(3).integers(6, 370, 60).tolist()
MXFP4 = gguf.GGMLQuantizationType.MXFP4
PARTS = ("gate_up_proj", "down_proj")


def published(folder: Path) -> Any:
    """A tiny gpt-oss whose experts are in MXFP4, saved as the real ones are; returns transformers' model of it."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = write_checkpoint(folder, "gpt-oss")
    tensors = load_file(folder / "model.safetensors")
    state = model.state_dict()
    generator = torch.Generator().manual_seed(4)
    for name in [name for name in tensors if name.endswith(PARTS)]:
        n_expert, n_cols, n_rows = tensors.pop(name).shape  # columns first, as transformers has them
        codes = torch.randint(0, 256, (n_expert, n_rows, n_cols // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, codes.shape[:3], dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        state[name] = convert_moe_packed_tensors(codes, scales, dtype=torch.float32).reshape(state[name].shape)
    model.load_state_dict(state)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def test_experts_in_mxfp4_stay_as_they_are(tmp_path: Path) -> None:
    model = published(tmp_path / "hf")
    expected = logits_of(model, TOKENS)
    path = convert(tmp_path / "hf", tmp_path / "m.gguf", "F32").paths[0]
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    experts = [name for name in reader if name.endswith("_exps.weight")]
    assert len(experts) == 12 and {reader[name].tensor_type.name for name in experts} == {"MXFP4"}
    for i in range(4):
        stored = {
            part: gguf.quants.dequantize(
                reader[f"blk.{i}.ffn_{part}_exps.weight"].data, gguf.GGMLQuantizationType.MXFP4
            )
            for part in ("gate", "up", "down")
        }
        both = state[f"model.layers.{i}.mlp.experts.gate_up_proj"].transpose(0, 2, 1)
        np.testing.assert_array_equal(stored["gate"], both[:, ::2])
        np.testing.assert_array_equal(stored["up"], both[:, 1::2])
        down = state[f"model.layers.{i}.mlp.experts.down_proj"].transpose(0, 2, 1)
        np.testing.assert_array_equal(stored["down"], down)
    assert kl_divergence(expected, Reference(path).logits(TOKENS)).mean() < 1e-6
    assert kl_divergence(expected, llama_cpp_logits(path, TOKENS)).mean() < 0.05  # rounds activations beside them
    options = {"n_ctx": 128, "n_threads": 1, "cache_type_k": "f16", "cache_type_v": "f16"}
    with closing(backends.load(path, backend="cpu", **options)) as backend:
        assert kl_divergence(expected, backend.forward(Batch.of(TOKENS, 0, 0, "all"))).mean() < 0.05


def test_a_budget_leaves_them_alone(tmp_path: Path) -> None:
    published(tmp_path / "hf")
    report = quantize(tmp_path / "hf", tmp_path / "m.gguf", budget="q8_0", calibration=(), report=False, n_threads=1)
    for name, kind in report.types.items():
        if name.endswith("_exps.weight"):
            assert (kind, report.methods[name]) == ("MXFP4", "kept")
    assert "Q8_0" in report.types.values()
    convert(tmp_path / "hf", tmp_path / "f.gguf", "BF16")
    before, after = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / name).tensors} for name in ("f.gguf", "m.gguf")
    )
    name = "blk.1.ffn_up_exps.weight"
    np.testing.assert_array_equal(before[name].data, after[name].data)


def test_other_quantizations_are_refused(tmp_path: Path) -> None:
    published(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFormatError, match=r"quantized already \(gptq\)"):
        open_source(tmp_path / "hf")


def test_a_lost_part_is_named(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    published(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"lacks the tensor for 'blk\.2\.ffn_down_exps\.scales'"):
        open_source(tmp_path / "hf")
