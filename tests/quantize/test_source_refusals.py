"""Checkpoints that are incomplete, contradictory or of another kind: refused before any work, by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_checkpoint

from edgert.errors import EdgertError, ModelFileError, UnsupportedFormatError
from edgert.quantize.convert import convert
from edgert.quantize.source import Source, open_source

library = pytest.importorskip("safetensors.numpy", reason="it writes the checkpoints of these tests")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints to copy and spoil."""
    folder = tmp_path_factory.mktemp("saved")
    made: dict[str, dict[str, Any]] = {
        "llama": {},
        "tied": {"tied": True},
        "sharded": {"shard_size": "100KB"},
    }
    for name, options in made.items():
        write_checkpoint(folder / name, "llama", **options)
    write_checkpoint(folder / "gemma3", "gemma3", tied=True)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def copy(saved: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(saved[name], tmp_path / "hf"))


def load(folder: Path) -> dict[str, np.ndarray]:
    return dict(library.load_file(folder / "model.safetensors"))


def save(folder: Path, weights: dict[str, np.ndarray]) -> None:
    library.save_file(weights, folder / "model.safetensors")


def edit(path: Path, **changes: Any) -> None:
    """Changes values of a JSON file; None removes a key."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def refusal(folder: Path, kind: type[EdgertError] = ModelFileError) -> str:
    with pytest.raises(kind) as caught:
        open_source(folder)
    message = str(caught.value)
    assert message.endswith(".") and "Traceback" not in message
    return message


def opened(folder: Path) -> Source:
    with open_source(folder) as source:
        return source


def test_no_folder(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal(tmp_path / "empty")


def test_a_missing_shard_is_named(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    assert gone.name in refusal(folder)
    (folder / "model.safetensors.index.json").unlink()  # by the names alone
    assert gone.name in refusal(folder)


def test_shards_without_an_index(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    whole = opened(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert list(opened(folder).tensors) == list(whole.tensors)


def test_an_orphan_shard_is_named(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    library.save_file({"x": np.ones(1, np.float32)}, folder / "model-00009-of-00009.safetensors")
    assert "model-00009-of-00009.safetensors is in no entry" in refusal(folder)


def test_other_files_beside_the_shards_are_told(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    library.save_file({"x": np.ones(1, np.float32)}, folder / "adapter.safetensors")
    assert [name for name, _ in opened(folder).skipped] == ["adapter.safetensors"]


def test_orphan_tensors_are_named(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    name = "model.norm.weight"
    edit(index, weight_map={key: file for key, file in weight_map.items() if key != name})
    assert f"holds the tensor {name!r}, which" in refusal(folder)
    others = sorted(set(weight_map.values()) - {weight_map[name]})
    edit(index, weight_map={**weight_map, name: others[0]})
    assert f"{name!r} is in {others[0]}, and it is not" in refusal(folder)


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "a\\b.safetensors", 5, "x"])
def test_an_index_that_points_elsewhere(copy: Callable[[str], Path], file: Any) -> None:
    folder = copy("sharded")
    edit(folder / "model.safetensors.index.json", weight_map={"a": file})
    assert "no safetensors file beside it" in refusal(folder)


def test_pickles_are_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "may run code" in refusal(folder, UnsupportedFormatError)


def test_a_folder_with_a_gguf(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / "model.safetensors").rename(folder / "m.gguf")
    assert "name the GGUF file itself" in refusal(folder)


def test_unknown_tensors_are_named(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    weights = load(folder)
    save(folder, weights | {"model.layers.0.mlp.router.weight": np.ones((2, 2), np.float32)})
    message = refusal(folder, UnsupportedFormatError)
    assert "'model.layers.0.mlp.router.weight'" in message and "llama" in message


def test_biases_that_are_not_zero_are_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    weights = load(folder)
    name = "model.layers.0.self_attn.o_proj.bias"
    save(folder, weights | {name: np.zeros(96, np.float32)})
    assert (name, "all zeros") in opened(folder).skipped
    save(folder, weights | {name: np.ones(96, np.float32)})
    assert repr(name) in refusal(folder, UnsupportedFormatError)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_missing_tensors_are_named(copy: Callable[[str], Path], name: str) -> None:
    folder = copy("llama")
    weights = load(folder)
    del weights[name]
    save(folder, weights)
    assert "lacks the tensor for" in refusal(folder)


def test_layers_beyond_the_config_are_named(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    edit(folder / "config.json", num_hidden_layers=2)
    assert "model.layers.2." in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 97}, "embed_tokens.weight' has the shape (384, 96)"),
        (
            {"intermediate_size": 128},
            "gate_proj.weight' has the shape (160, 96), and by config.json it should have (128",
        ),
        ({"num_attention_heads": 12}, "q_proj.weight' has the shape (96, 96)"),
        ({"num_key_value_heads": 4}, "'num_key_value_heads' is 4"),
        ({"hidden_size": "96"}, "'hidden_size' is '96' and should be an integer"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"rms_norm_eps": -1}, "'rms_norm_eps' is -1"),
        ({"head_dim": 15}, "'head_dim' is 15"),
    ],
)
def test_sizes_that_contradict_each_other(copy: Callable[[str], Path], changes: dict[str, Any], message: str) -> None:
    folder = copy("llama")
    edit(folder / "config.json", **changes)
    assert message in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "describes MambaForCausalLM; edgert converts LlamaForCausalLM"),
        ({"architectures": 5, "model_type": "mamba"}, "describes mamba"),
        ({"hidden_act": "relu"}, "the activation is 'relu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized already (gptq)"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0, "rope_theta": 1e4}}, "by 'longrope'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "by 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "a part of each head"),
    ],
)
def test_what_edgert_does_not_convert(copy: Callable[[str], Path], changes: dict[str, Any], message: str) -> None:
    folder = copy("llama")
    edit(folder / "config.json", **changes)
    assert message in refusal(folder, UnsupportedFormatError)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 1e4},
        {"rope_type": "linear", "factor": 0, "rope_theta": 1e4},
        {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 4.0, "high_freq_factor": 1.0,
         "original_max_position_embeddings": 32},
        {"rope_type": "default", "rope_theta": "big"},
    ],
)  # fmt: skip
def test_rope_scaling_with_wrong_numbers(copy: Callable[[str], Path], rope: dict[str, Any]) -> None:
    folder = copy("llama")
    edit(folder / "config.json", rope_parameters=rope)
    assert "config.json" in refusal(folder)


def test_the_old_spelling_of_rope(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    scaling = {"type": "linear", "factor": 2.0}
    edit(folder / "config.json", rope_parameters=None, rope_theta=12_345.0, rope_scaling=scaling)
    metadata = {key: value.decode() for key, value in opened(folder).metadata.items() if ".rope." in key}
    assert metadata == {
        "llama.rope.freq_base": 12_345.0,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
        "llama.rope.dimension_count": 16,
    }


def test_gemma3s_scale_must_be_the_heads(copy: Callable[[str], Path]) -> None:
    folder = copy("gemma3")
    edit(folder / "config.json", query_pre_attn_scalar=100)
    assert "query_pre_attn_scalar is 100" in refusal(folder, UnsupportedFormatError)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_damaged_json(copy: Callable[[str], Path], file: str) -> None:
    folder = copy("llama")
    for content in ("{", "[]", "", '"text"'):
        (folder / file).write_text(content)
        assert file in refusal(folder)


def test_types_that_are_no_floats(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    weights = load(folder)
    save(folder, weights | {"model.norm.weight": np.ones(96, np.float64)})
    assert "'model.norm.weight' is F64; edgert converts F32, F16, BF16" in refusal(folder, UnsupportedFormatError)


def test_zero_rows_are_refused_by_name(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    weights = load(folder)
    save(folder, weights | {"model.layers.0.mlp.up_proj.weight": np.empty((0, 96), np.float32)})
    assert "'model.layers.0.mlp.up_proj.weight' has the shape (0, 96)" in refusal(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_named(copy: Callable[[str], Path], tmp_path: Path, value: float) -> None:
    folder = copy("llama")
    weights = load(folder)
    weights["model.layers.1.mlp.up_proj.weight"][7, 5] = value
    save(folder, weights)
    with pytest.raises(ModelFileError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' of .*: row 7, column 5 is"):
        convert(folder, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_buffers_are_listed_as_skipped(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    weights = load(folder)
    names = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(3)]
    save(folder, weights | dict.fromkeys(names, np.ones(8, np.float32)))
    source = opened(folder)
    assert [name for name, _ in source.skipped] == names
    assert len(source.tensors) == len(weights)


def test_an_equal_head_is_dropped_and_listed(copy: Callable[[str], Path]) -> None:
    folder = copy("tied")
    weights = load(folder)
    assert "lm_head.weight" not in weights
    save(folder, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    source = opened(folder)
    assert [name for name, _ in source.skipped] == ["lm_head.weight"]
    assert "output.weight" not in source.tensors


def test_a_different_head_overrules_the_config(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy("tied")
    weights = load(folder)
    head = weights["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1
    save(folder, weights | {"lm_head.weight": head})
    source = opened(folder)
    assert source.skipped == []
    assert any("lm_head.weight differs" in notice for notice in source.notices)
    with open_source(folder) as source:
        assert np.array_equal(source.tensors["output.weight"].dequantize(), head)


def test_an_absent_head(copy: Callable[[str], Path]) -> None:
    folder = copy("tied")
    edit(folder / "config.json", tie_word_embeddings=False)
    assert "no lm_head.weight" in refusal(folder)
    edit(folder / "config.json", tie_word_embeddings=None)
    assert any("serves as the head" in notice for notice in opened(folder).notices)


def test_the_part_that_sees_pictures_is_listed(copy: Callable[[str], Path]) -> None:
    """A multimodal checkpoint: other names, a text_config with few keys, and towers that are left out."""
    folder = copy("gemma3")
    weights = load(folder)
    plain = opened(folder)
    text = json.loads((folder / "config.json").read_text())
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = {name.replace("model.", prefix, 1): value for name, value in weights.items()}
        extra = {
            "vision_tower.vision_model.embeddings.position_embedding.weight": np.ones((2, 2), np.float32),
            "multi_modal_projector.mm_soft_emb_norm.weight": np.ones(2, np.float32),
        }
        save(folder, renamed | extra)
        outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}}
        (folder / "config.json").write_text(json.dumps(outer))
        source = opened(folder)
        assert {name for name, _ in source.skipped} == set(extra)
        assert list(source.tensors) == list(plain.tensors)
        assert source.metadata == plain.metadata


def test_odd_or_absent_side_files_do_not_matter(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy("llama")
    cards = [b"", b"---", b"---\ntags: [\n", b"---\nlicense: mit\ntags:\n- ---\n", b"\xff\xfe\x00", b"x" * 10**6]
    for card in cards:
        (folder / "README.md").write_bytes(card)
        source = opened(folder)
        value = source.metadata.get("general.license")
        assert (value and value.decode()) == ("mit" if b"mit" in card else None)
    (folder / "README.md").unlink()
    odd = {"temperature": "hot", "top_k": 1.5, "top_p": None, "eos_token_id": "x", "min_p": float("inf")}
    (folder / "generation_config.json").write_text(json.dumps(odd))
    assert not any(key.startswith("general.sampling") for key in opened(folder).metadata)
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", _name_or_path=["odd"], torch_dtype=7, transformers_version=None)
    convert(folder, tmp_path / "m.gguf")


def test_sampling_defaults_are_carried(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.05, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(values))
    metadata = opened(folder).metadata
    found = {key: value.decode() for key, value in metadata.items() if key.startswith("general.sampling.")}
    assert found == pytest.approx(
        {
            "general.sampling.top_k": 20,
            "general.sampling.top_p": 0.95,
            "general.sampling.min_p": 0.0,
            "general.sampling.temp": 0.6,
            "general.sampling.penalty_repeat": 1.05,
        }
    )


def test_a_window_that_gguf_cannot_say_is_mentioned(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    edit(folder / "config.json", architectures=["MistralForCausalLM"], sliding_window=4096)
    assert any("sliding window of 4096" in notice for notice in opened(folder).notices)
