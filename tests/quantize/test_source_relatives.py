"""Checkpoints in names of their own and of models that see: what transformers computes, edgert and llama.cpp do."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_configs import LONG_ROPE, ROPE, SEEING, SIZES
from checkpoints import logits_of, write_checkpoint, write_tokenizer
from llama_oracle import llama_cpp_logits
from reference import Reference, kl_divergence
from relatives import RELATIVES, write_relative

from edgert import backends
from edgert.backends.base import Batch
from edgert.errors import EdgertError, ModelFileError, UnsupportedFormatError
from edgert.quantize.convert import convert
from edgert.quantize.source import open_source

library = pytest.importorskip("safetensors.numpy", reason="it writes the checkpoints of these tests")

TOKENS = np.random.default_rng(3).integers(6, 370, 90).tolist()
LLAMA_CPP = {"qwen2vl": 1e-5, "qwen2.5vl": 1e-5}  # it takes another epsilon than theirs


def written(folder: Path, name: str, **changes: Any) -> Any:
    """The checkpoint, and transformers' model of it."""
    return write_relative(folder, name, **changes) if name in RELATIVES else write_checkpoint(folder, name, **changes)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "baichuan")) for name in (*RELATIVES, *SEEING)]
)
def test_logits_are_transformers(name: str, tmp_path: Path) -> None:
    expected = logits_of(written(tmp_path / "hf", name), TOKENS)
    assert expected.std() > 0.5
    convert(tmp_path / "hf", tmp_path / "m.gguf", "F32")
    assert kl_divergence(expected, Reference(tmp_path / "m.gguf").logits(TOKENS)).mean() < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RELATIVES, *SEEING])
def test_both_engines_compute_the_same(name: str, tmp_path: Path) -> None:
    expected = logits_of(written(tmp_path / "hf", name), TOKENS)
    convert(tmp_path / "hf", tmp_path / "m.gguf", "F32")
    options = {"n_ctx": 128, "n_threads": 1, "cache_type_k": "f16", "cache_type_v": "f16"}
    with closing(backends.load(tmp_path / "m.gguf", backend="cpu", **options)) as backend:
        logits = backend.forward(Batch.of(TOKENS, 0, 0, "all")).copy()
    lost = kl_divergence(expected, logits)  # the cache is rounded to 16 bits, so that a token may take another expert
    with open_source(tmp_path / "hf") as source:
        n_layer = source.describe().n_layer  # each of which adds to the rounding: baichuan has 32
    assert np.median(lost) < 3e-6 * n_layer and lost.mean() < 1e-3
    assert kl_divergence(expected, llama_cpp_logits(tmp_path / "m.gguf", TOKENS)).mean() < LLAMA_CPP.get(name, 1e-9)


def opened(folder: Path) -> dict[str, Any]:
    """The keys that a folder becomes."""
    with open_source(folder) as source:
        return {key: value.decode() for key, value in source.metadata.items()}


def edit(folder: Path, **changes: Any) -> None:
    """Changes values of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    return dict(library.load_file(folder / "model.safetensors"))


def save(folder: Path, weights: dict[str, np.ndarray]) -> None:
    library.save_file({key: np.ascontiguousarray(value) for key, value in weights.items()},
                      folder / "model.safetensors", {"format": "pt"})  # fmt: skip


def lost(folder: Path, expected: np.ndarray) -> float:
    """Mean KL divergence of the converted folder, in float64."""
    path = folder.parent / "m.gguf"
    convert(folder, path, "F32")
    return float(kl_divergence(expected, Reference(path).logits(TOKENS)).mean())


@pytest.mark.parametrize("width", [80, 96, 192])
def test_stacked_experts_stand_either_way(width: int, tmp_path: Path) -> None:
    """Columns first in the published files, rows first as transformers saves; known by the shapes, also square ones."""
    folder = tmp_path / "hf"
    expected = logits_of(write_checkpoint(folder, "qwen3vlmoe", moe_intermediate_size=width), TOKENS)
    assert lost(folder, expected) < 1e-9
    turned = {
        key: value.swapaxes(1, 2) if ".mlp.experts." in key else value for key, value in weights_of(folder).items()
    }
    save(folder, turned)
    assert lost(folder, expected) < 1e-9


def test_names_of_an_older_seeing_model(tmp_path: Path) -> None:
    """Qwen2-VL's files before there was a text_config: all in one, with a rotation of the kind mrope."""
    folder = tmp_path / "hf"
    expected = logits_of(write_checkpoint(folder, "qwen2vl"), TOKENS)
    document = json.loads((folder / "config.json").read_text())
    text = document.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [6, 5, 5]}}
    (folder / "config.json").write_text(json.dumps({**text, **document}))
    assert lost(folder, expected) < 1e-9
    assert opened(folder)["qwen2vl.rope.dimension_sections"].tolist() == [6, 5, 5, 0]
    edit(folder, rope_scaling={"type": "mrope"})
    with pytest.raises(ModelFileError, match="'mrope_section' is None and should be three integers whose sum is 16"):
        opened(folder)


def test_the_text_part_of_a_model_that_also_speaks(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    expected = logits_of(write_checkpoint(folder, "qwen2.5vl"), TOKENS)
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "thinker_config": config}
    (folder / "config.json").write_text(json.dumps(outer))
    weights = {f"thinker.{key}": value for key, value in weights_of(folder).items()}
    others = ("talker.model.layers.0.mlp.up_proj.weight", "token2wav.code2wav.x", "thinker.audio_tower.conv1.bias")
    save(folder, weights | dict.fromkeys(others, np.ones((2, 2), np.float32)))
    assert lost(folder, expected) < 1e-9
    with open_source(folder) as source:
        reasons = dict(source.skipped)
    assert {reasons[name].rpartition(" ")[2] for name in others} == {"speaks", "hears"}
    assert {name.split(".")[1] for name in reasons if name not in others} == {"visual"}


@pytest.mark.parametrize("columns", [False, True])
def test_heads_that_are_divided_on_use(columns: bool, tmp_path: Path) -> None:
    """By the lengths of rows in Baichuan 2, known by its vocabulary; of columns where Ling's config says so."""
    name = "bailingmoe" if columns else "baichuan"
    change = {"norm_head": True} if columns else {"vocab_size": 125_696}
    base = {} if columns else {"vocab_size": 125_696, "hidden_size": 48, "num_hidden_layers": 2}
    folder = tmp_path / "hf"
    model = write_relative(folder, name, base=base, head_axis=int(not columns), **change)
    assert lost(folder, logits_of(model, TOKENS)) < 1e-9


def test_layers_that_guess_ahead_are_left_out(tmp_path: Path) -> None:
    """GLM 4.5's stand behind the others, ERNIE's apart."""
    folder = tmp_path / "glm"
    expected = logits_of(write_checkpoint(folder, "glm4moe", num_nextn_predict_layers=1), TOKENS)
    ahead = [f"model.layers.3.{part}.weight" for part in ("eh_proj", "mlp.gate", "self_attn.q_proj")]
    extra = dict.fromkeys(ahead, np.ones((2, 2), np.float32))
    save(folder, weights_of(folder) | extra)
    assert lost(folder, expected) < 1e-9
    with open_source(folder) as source:
        assert source.skipped == [(name, "of a layer that guesses tokens ahead") for name in ahead]
    edit(folder, num_nextn_predict_layers=0)
    with pytest.raises(UnsupportedFormatError, match=r"model\.layers\.3\."):
        opened(folder)
    folder = tmp_path / "ernie"
    expected = logits_of(write_checkpoint(folder, "ernie4.5-moe"), TOKENS)
    ahead = ("model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight", "model.mtp_linear_proj.0.weight")
    save(folder, weights_of(folder) | dict.fromkeys(ahead, np.ones((2, 2), np.float32)))
    assert lost(folder, expected) < 1e-9
    with open_source(folder) as source:
        assert {why for _, why in source.skipped} == {"of the part that guesses tokens ahead"}


def test_biases_of_internlm2(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    model = write_relative(folder, "internlm2", base={"attention_bias": True})
    assert lost(folder, logits_of(model, TOKENS)) < 1e-9
    with open_source(folder) as source:
        assert {"blk.0.attn_q.bias", "blk.0.attn_v.bias", "blk.0.attn_output.bias"} <= set(source.tensors)


def test_the_long_rotation_of_minicpm(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    rope = {**LONG_ROPE, "short_factor": LONG_ROPE["short_factor"][:8], "long_factor": LONG_ROPE["long_factor"][:8]}
    model = write_relative(folder, "minicpm", base={"rope_parameters": rope, "original_max_position_embeddings": 32})
    assert lost(folder, logits_of(model, TOKENS)) < 1e-9


def test_hunyuans_sizes_for_each_layer_and_its_rotation(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0}
    expected = logits_of(write_checkpoint(folder, "hunyuan-moe", rope_parameters=rope), TOKENS)
    lists = {"moe_topk": [2, 2, 2], "num_shared_expert": [1, 1, 1], "moe_intermediate_size": [96, 96, 96]}
    edit(folder, **lists)
    assert lost(folder, expected) < 1e-9
    assert opened(folder)["hunyuan-moe.rope.freq_base"] == pytest.approx(1e4 * 50 ** (32 / 30))
    edit(folder, moe_topk=[2, 3, 2])
    with pytest.raises(UnsupportedFormatError, match="moe_topk differs from layer to layer"):
        opened(folder)


def test_granite_with_an_expert_that_sees_every_token(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    assert lost(folder, logits_of(write_checkpoint(folder, "granitemoe-shared"), TOKENS)) < 1e-9


def test_exaone_as_transformers_saves_it(tmp_path: Path) -> None:
    """By llama's class, with the names of the published files."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ExaoneConfig(**{**SIZES, "rope_parameters": ROPE})
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf", "qwen2")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert lost(tmp_path / "hf", logits_of(model, TOKENS)) < 1e-9
    assert opened(tmp_path / "hf")["general.architecture"] == "exaone"


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_a_model_without_a_head_embeds(name: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "whole", name)
    model.model.save_pretrained(tmp_path / "bare")
    write_tokenizer(tmp_path / "bare", "qwen2")
    with open_source(tmp_path / "whole") as whole, open_source(tmp_path / "bare") as bare:
        assert set(whole.tensors) - set(bare.tensors) == {"output.weight"}
        assert bare.notices == ["there is no head, without which a model embeds texts and should write none"]
        for key, tensor in bare.tensors.items():
            np.testing.assert_array_equal(tensor.dequantize(), whole.tensors[key].dequantize())


ODD = (None, True, -1, 0, 3, 1e300, "x", [], [1, 2], {}, {"a": 1}, 2**40)


@pytest.mark.parametrize("name", ["internlm2", "hunyuan-moe", "qwen3vlmoe"])
def test_odd_values_of_config_are_refused_or_do_not_matter(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    written(folder, name)
    whole = json.loads((folder / "config.json").read_text())
    parts = [(), *[(part,) for part in ("text_config", "rope_parameters") if part in whole]]
    places = [(part, key) for part in parts for key in (whole[part[0]] if part else whole)]
    rng = random.Random(8)
    for part, key in rng.choices([*places, ((), "thinker_config"), ((), "rope_scaling")], k=20):
        document = json.loads(json.dumps(whole))
        (document[part[0]] if part else document)[key] = rng.choice(ODD)
        (folder / "config.json").write_text(json.dumps(document))
        try:
            opened(folder)
        except EdgertError as error:
            assert str(error).endswith(".")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("deepseek", {"norm_topk_prob": True}, "norm_topk_prob is True; edgert converts deepseek where it is False"),
        ("minicpm", {"num_experts": 8}, "num_experts is 8"),
        ("baichuan", {"num_hidden_layers": 40}, "ALiBi"),
        ("ernie4.5-moe", {"moe_layer_end_index": 1}, "moe_layer_end_index"),
        ("glm4moe", {"n_group": 2}, "n_group is 2"),
        ("bailingmoe", {"multi_gate": True}, "multi_gate is True"),
        ("qwen3vlmoe", {"text_config": {"norm_topk_prob": False}}, "norm_topk_prob is False"),
    ],
)
def test_what_gguf_cannot_say_is_refused(name: str, change: dict[str, Any], says: str, tmp_path: Path) -> None:
    written(tmp_path / "hf", name, **({"base": {"num_hidden_layers": 2}} if name == "baichuan" else {}))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    for key, value in change.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFormatError, match=says):
        opened(tmp_path / "hf")
