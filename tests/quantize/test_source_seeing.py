"""Folders of models that see or hear as transformers saves them: the text part is converted, the rest is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_configs import GEMMA3, HEADS, NO_PAD, PARTIAL, ROPE, SIZES, WIDE
from checkpoints import logits_of, write_tokenizer
from reference import Reference, kl_divergence

from edgert.errors import UnsupportedFormatError
from edgert.quantize import quantize
from edgert.quantize.convert import convert
from edgert.quantize.source import open_source

TOKENS = np.random.default_rng(3).integers(6, 370, 90).tolist()
TEXT = {**SIZES, **WIDE, **NO_PAD, "rope_parameters": ROPE}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
EYE = {**TOWER, "image_size": 16}
EAR = {**TOWER, "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
GLM = {"depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "image_size": 16, "out_hidden_size": 192,
       "intermediate_size": 32}  # fmt: skip
# name -> class in transformers, its text_config, its other parts, general.architecture
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "llava": (
        "LlavaNextForConditionalGeneration",
        {"model_type": "mistral", "sliding_window": None, **HEADS},
        {"vision_config": {**EYE, "model_type": "clip_vision_model"}, "image_grid_pinpoints": [[16, 16]]},
        "llama",
    ),
    "smolvlm": ("SmolVLMForConditionalGeneration", {"model_type": "llama"}, {"vision_config": EYE}, "llama"),
    "internvl": (
        "InternVLForConditionalGeneration",
        {"model_type": "qwen2"},
        {"vision_config": {**TOWER, "image_size": [16, 16], "patch_size": [4, 4], "model_type": "internvl_vision"}},
        "qwen2",
    ),
    "glm4v": (
        "Glm4vForConditionalGeneration",
        {"model_type": "glm4v_text", "rope_parameters": {**PARTIAL, "mrope_section": [3, 3, 2]}},
        {"vision_config": GLM},
        "glm4",
    ),
    "lfm2vl": (
        "Lfm2VlForConditionalGeneration",
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32},
        {"vision_config": {**TOWER, "model_type": "siglip2_vision_model", "num_patches": 16}},
        "lfm2",
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {**GEMMA3, "hidden_size": 96, "tie_word_embeddings": True},
        {"vision_config": EYE, "mm_tokens_per_image": 4},
        "gemma3",
    ),
    "qwen2audio": (
        "Qwen2AudioForConditionalGeneration",
        {"model_type": "qwen2"},
        {"audio_config": {**EAR, "model_type": "qwen2_audio_encoder"}},
        "qwen2",
    ),
}


def write_seeing(folder: Path, name: str) -> Any:
    """Saves a tiny random model of CASES, or of a class with llama's sizes, and returns it."""
    torch = pytest.importorskip("torch", reason="transformers makes the checkpoints: pip install torch")
    transformers = pytest.importorskip("transformers", reason="it makes the checkpoints")
    class_name, text, others, _ = CASES[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(1)
    model = model_class(model_class.config_class(text_config={**TEXT, **text}, **others)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("norm.weight"):
                parameter += torch.randn_like(parameter) * 0.2
            elif "layers" in key and parameter.dim() > 1:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    write_tokenizer(folder, "gemma" if name == "gemma3" else "qwen2")
    return model


@pytest.mark.parametrize("name", CASES)
def test_the_text_part_of_a_folder(name: str, tmp_path: Path) -> None:
    expected = logits_of(write_seeing(tmp_path / "hf", name), TOKENS)
    assert expected.std() > 0.15
    result = convert(tmp_path / "hf", tmp_path / "m.gguf", "F32")
    assert kl_divergence(expected, Reference(tmp_path / "m.gguf").logits(TOKENS)).mean() < 1e-9
    with open_source(tmp_path / "hf") as source:
        assert source.architecture == CASES[name][3]
    left_out = {key for key, _ in result.skipped}
    assert left_out and not [key for key in left_out if "language_model" in key or "text_model.layers" in key]


def test_the_report_says_what_was_left_out(tmp_path: Path) -> None:
    write_seeing(tmp_path / "hf", "llava")
    report = quantize(tmp_path / "hf", tmp_path / "m.gguf", budget="q8_0", calibration=(), n_threads=1)
    assert len(report.skipped) == 44
    said = [text for label, text in report.lines() if label == "left out"]
    assert len(said) == 3
    assert "image_newline: of another part than the text model" in said
    assert any(text.endswith("and 38 more: of the part that sees pictures") for text in said)


def test_a_text_model_that_sees_all_of_a_prompt_is_refused(tmp_path: Path) -> None:
    write_seeing(tmp_path / "hf", "gemma3")
    path = tmp_path / "hf" / "config.json"
    for changes, says in (
        ({"architectures": ["PaliGemmaForConditionalGeneration"]}, "PaliGemma, whose text model sees all of a prompt"),
        (
            {"architectures": ["OtherForConditionalGeneration"], "text_config": {"model_type": "other"}},
            "describes Other",
        ),
    ):
        document = json.loads(path.read_text()) | changes
        document["text_config"] = {**json.loads(path.read_text())["text_config"], **changes.get("text_config", {})}
        path.write_text(json.dumps(document))
        with pytest.raises(UnsupportedFormatError, match=says):
            open_source(tmp_path / "hf")
