"""The door: what describe() reads from each family's file, and what it refuses, by name."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny import FAMILIES, write_tiny

from edgert.errors import EdgertError, ModelFileError, UnsupportedFormatError
from edgert.quantize import architecture
from edgert.quantize.architecture import Architecture, Rope, describe
from edgert.quantize.checkpoint.families import FAMILIES as CONVERTED
from edgert.quantize.gguf_file import GGUFFile

Make = Callable[..., Architecture]


def test_what_runs_can_be_converted() -> None:
    assert set(architecture.FAMILIES) == {family.name for family in CONVERTED}


@pytest.fixture
def tiny(tmp_path: Path) -> Make:
    """Writes a tiny model and describes it."""

    def make(family: str, **options: Any) -> Architecture:
        path = write_tiny(tmp_path / "model.gguf", family, **options)
        with GGUFFile.open(path) as file:
            return describe(file)

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes(family: str, tiny: Make) -> None:
    a = tiny(family, n_layer=3, n_embd=160, n_head=6, n_head_kv=3, head_dim=16, n_ff=224, n_ctx=77, eps=1e-3)
    assert (a.name, a.n_layer, a.n_embd, a.n_head, a.n_head_kv) == (family, 3, 160, 6, 3)
    assert (a.head_dim, a.n_ff, a.n_vocab, a.n_ctx_train) == (16, 224, 384, 77)
    assert a.norm_eps == pytest.approx(1e-3)
    assert a.attention_scale == 0.25
    assert len(a.layers) == 3
    assert {layer.rope.n_dims for layer in a.layers} == {16}


@pytest.mark.parametrize("family", FAMILIES)
def test_needed_tensors_are_those_of_the_file(family: str, tmp_path: Path) -> None:
    with GGUFFile.open(write_tiny(tmp_path / "model.gguf", family)) as file:
        needed = describe(file).tensors()
        assert needed == {name: tensor.shape for name, tensor in file.tensors.items()}
    names = list(needed)
    assert names.index("blk.0.attn_q.weight") < names.index("blk.0.attn_output.weight")
    assert names.index("blk.0.ffn_down.weight") < names.index("blk.1.attn_norm.weight")


def test_how_families_differ(tiny: Make) -> None:
    llama, qwen2, qwen3, gemma3 = (tiny(family) for family in FAMILIES)
    assert [a.layers[0].rope.style for a in (llama, qwen2, qwen3, gemma3)] == ["norm", "neox", "neox", "neox"]
    assert [a.qkv_bias for a in (llama, qwen2, qwen3, gemma3)] == [False, True, False, False]
    assert [a.qk_norm for a in (llama, qwen2, qwen3, gemma3)] == [False, False, True, True]
    assert [a.post_norm for a in (llama, qwen2, qwen3, gemma3)] == [False, False, False, True]
    assert [a.activation for a in (llama, qwen2, qwen3, gemma3)] == ["silu", "silu", "silu", "gelu"]
    assert [a.tied_head for a in (llama, qwen2, qwen3, gemma3)] == [False, False, False, True]
    assert gemma3.embedding_scale == math.sqrt(128)
    assert tiny("llama", tied=True).tied_head
    assert tiny("llama", bias=True).qkv_bias


def test_gemma3_windows(tiny: Make) -> None:
    a = tiny("gemma3", n_layer=13, window=24)
    full = [i for i, layer in enumerate(a.layers) if not layer.window]
    assert full == [5, 11]
    assert {layer.window for layer in a.layers} == {0, 24}
    assert {layer.rope.base for layer in a.layers if layer.window} == {10_000.0}
    assert {layer.rope.base for layer in a.layers if not layer.window} == {1_000_000.0}


@pytest.mark.parametrize(("pattern", "full"), [(2, [1, 3]), ([True, False, False, True], [1, 2])])
def test_gemma3_pattern(pattern: int | list[bool], full: list[int], tiny: Make) -> None:
    a = tiny("gemma3", n_layer=4, metadata={"gemma3.attention.sliding_window_pattern": pattern})
    assert [i for i, layer in enumerate(a.layers) if not layer.window] == full


def test_gemma3_scaling_of_long_contexts_is_for_the_full_layers(tiny: Make) -> None:
    keys = {
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.rope.freq_base_swa": 20_000.0,
    }
    a = tiny("gemma3", metadata=keys)
    assert {layer.rope.scale for layer in a.layers if layer.window} == {1.0}
    assert {layer.rope.scale for layer in a.layers if not layer.window} == {0.125}
    assert {layer.rope.base for layer in a.layers if layer.window} == {20_000.0}


def test_gemma3_27b_scales_by_width(tiny: Make) -> None:
    a = tiny("gemma3", n_layer=62, n_embd=96, n_head=2, n_head_kv=1, head_dim=32, n_ff=32)
    assert a.attention_scale == pytest.approx(1 / math.sqrt(48))


@pytest.mark.parametrize(("n_layer", "window"), [(18, 512), (34, 1024), (7, 0)])
def test_gemma3_without_window_key(n_layer: int, window: int, tiny: Make, caplog: pytest.LogCaptureFixture) -> None:
    key = "gemma3.attention.sliding_window"
    with caplog.at_level(logging.WARNING, "edgert"):
        a = tiny("gemma3", n_layer=n_layer, n_embd=32, n_ff=32, metadata={key: None})
    assert a.layers[0].window == window
    assert key in caplog.text


@pytest.mark.parametrize(("family", "base"), [("llama", 1e4), ("qwen2", 1e4), ("qwen3", 1e4), ("gemma3", 1e6)])
def test_missing_rope_base_is_a_documented_default(
    family: str, base: float, tiny: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "edgert"):
        a = tiny(family, n_layer=6, metadata={f"{family}.rope.freq_base": None})
    assert a.layers[5].rope.base == base
    assert f"{family}.rope.freq_base" in caplog.text


def test_sound_files_do_not_warn(tiny: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "edgert"):
        for family in FAMILIES:
            tiny(family)
    assert not caplog.records


def test_rope_frequencies() -> None:
    plain = Rope(8, 10_000.0, "neox").frequencies()
    np.testing.assert_allclose(plain, [1, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(Rope(8, 10_000.0, "neox", 0.5).frequencies(), plain / 2)
    factors = np.array([1, 1, 2, 8], np.float32)
    np.testing.assert_allclose(Rope(8, 10_000.0, "neox", 1.0, factors).frequencies(), plain / factors)


def test_rope_factors(tiny: Make) -> None:
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    a = tiny("llama", rope_factors=factors)
    found = a.layers[0].rope.factors
    assert found is not None
    np.testing.assert_array_equal(found, factors)
    assert a.tensors()["rope_freqs.weight"] == (16,)
    for bad in (factors[:8], factors * np.nan, factors - 1):
        with pytest.raises(ModelFileError, match="rope_freqs"):
            tiny("llama", rope_factors=bad)


@pytest.mark.parametrize(
    ("kind", "factor", "scale"),
    [("linear", 4.0, 0.25), ("none", 4.0, 1.0), (None, 4.0, 0.25), ("linear", 0.0, 1.0), (None, None, 1.0)],
)
def test_rope_scaling(kind: str | None, factor: float | None, scale: float, tiny: Make) -> None:
    a = tiny("llama", metadata={"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": factor})
    assert a.layers[0].rope.scale == scale


def test_partial_rotation(tiny: Make) -> None:
    rope = tiny("llama", metadata={"llama.rope.dimension_count": 16}).layers[0].rope
    assert rope.n_dims == 16
    np.testing.assert_allclose(rope.frequencies(), 10_000.0 ** (-np.arange(8) / 8))


def test_long_rope_depends_on_the_context(tiny: Make) -> None:
    factors = {
        f"rope_factors_{name}.weight": np.full(16, value, np.float32) for name, value in (("long", 4), ("short", 2))
    }
    keys = {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.original_context_length": 64,
            "llama.rope.scaling.attn_factor": 1.5}  # fmt: skip
    a = tiny("llama", weights=factors, metadata=keys)
    plain = Rope(32, 10_000.0, "norm").frequencies()
    for n_ctx, divisor in ((64, 2), (65, 4)):
        rope = a.for_context(n_ctx).layers[0].rope
        np.testing.assert_allclose(rope.frequencies(), plain / divisor)
        assert rope.magnitude == 1.5


@pytest.mark.parametrize("family", FAMILIES)
def test_decoders_that_look_ahead_are_refused(family: str, tiny: Make) -> None:
    """Embedding models made of decoders: llama.cpp obeys the key, so that other answers would be wrong."""
    assert tiny(family, metadata={f"{family}.attention.causal": True}).name == family
    with pytest.raises(UnsupportedFormatError, match=rf"{family}\.attention\.causal is false"):
        tiny(family, metadata={f"{family}.attention.causal": False})


def test_softcapping(tiny: Make) -> None:
    a = tiny("gemma3", metadata={"gemma3.final_logit_softcapping": 30.0, "gemma3.attn_logit_softcapping": 50.0})
    assert (a.final_logit_softcapping, a.attn_logit_softcapping) == (30.0, 50.0)


def test_equal_entries_for_each_layer(tiny: Make) -> None:
    arrays = {"llama.attention.head_count": [4, 4], "llama.feed_forward_length": [192, 192]}
    a = tiny("llama", metadata=arrays)
    assert (a.n_head, a.n_ff) == (4, 192)


def test_missing_head_count_kv_means_no_groups(tiny: Make) -> None:
    assert tiny("llama", n_head_kv=4, metadata={"llama.attention.head_count_kv": None}).n_head_kv == 4


def test_stored_head_beside_tied_names(tiny: Make) -> None:
    assert not tiny("gemma3", tied=False).tied_head


REFUSED: dict[str, tuple[str, dict[str, Any], type[EdgertError], str]] = {
    "missing eps": ("llama", {"llama.attention.layer_norm_rms_epsilon": None}, ModelFileError, "rms_epsilon"),
    "negative eps": ("llama", {"llama.attention.layer_norm_rms_epsilon": -1.0}, ModelFileError, "rms_epsilon"),
    "missing width": ("qwen3", {"qwen3.embedding_length": None}, ModelFileError, "qwen3.embedding_length"),
    "no layers": ("llama", {"llama.block_count": 0}, ModelFileError, "llama.block_count"),
    "2^31 layers": ("llama", {"llama.block_count": 2**31}, ModelFileError, "llama.block_count"),
    "a third layer": ("llama", {"llama.block_count": 3}, ModelFileError, "blk.2.attn_norm.weight"),
    "no heads": ("llama", {"llama.attention.head_count": 0}, ModelFileError, "attention.head_count"),
    "heads in no groups": ("llama", {"llama.attention.head_count_kv": 3}, ModelFileError, "head_count_kv = 3"),
    "heads of part": ("llama", {"llama.attention.head_count": 6}, ModelFileError, "embedding_length"),
    "too many heads": ("llama", {"llama.attention.head_count": 8}, UnsupportedFormatError, "a head has 16"),
    "odd heads": ("qwen3", {"qwen3.attention.key_length": 31}, ModelFileError, "key_length"),
    "width": (
        "qwen3",
        {"qwen3.embedding_length": 256},
        ModelFileError,
        r"embd.weight.*\(384, 128\).*\(384, 256\)",
    ),
    "ff": ("llama", {"llama.feed_forward_length": 256}, ModelFileError, r"ffn_gate.weight.*\(192, 128\)"),
    "value heads": ("qwen3", {"qwen3.attention.value_length": 16}, UnsupportedFormatError, "value_length"),
    "odd rotation": ("llama", {"llama.rope.dimension_count": 15}, UnsupportedFormatError, "dimension_count"),
    "another scaling": ("qwen2", {"qwen2.rope.scaling.type": "dynamic"}, UnsupportedFormatError, "'dynamic'.*yarn"),
    "longrope": ("llama", {"llama.rope.scaling.type": "longrope"}, ModelFileError, "rope_factors_long.weight"),
    "rope of no base": ("llama", {"llama.rope.freq_base": 0.0}, ModelFileError, "rope.freq_base"),
    "yarn without waves": (
        "qwen2",
        {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.freq_base": 1.0},
        ModelFileError,
        "freq_base is 1.0.*more than 1",
    ),
    "a text to mix by": (
        "qwen2",
        {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.yarn_ext_factor": "all"},
        ModelFileError,
        "yarn_ext_factor.*a number",
    ),
    "no number to mix by": (
        "qwen2",
        {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.yarn_ext_factor": float("nan")},
        ModelFileError,
        "yarn_ext_factor.*is nan",
    ),
    "a window of 64 bits": (
        "gemma3",
        {"gemma3.attention.sliding_window": (2**63, gguf.GGUFValueType.UINT64)},
        ModelFileError,
        "sliding_window is 9223372036854775808.*or less",
    ),
    "experts": ("qwen2", {"qwen2.expert_count": 8}, UnsupportedFormatError, "experts"),
    "layers that differ": ("llama", {"llama.context_length": [2, 4]}, UnsupportedFormatError, "2 to 4"),
    "heads of one layer": (
        "llama",
        {"llama.attention.head_count_kv": [2, 4]},
        ModelFileError,
        r"blk\.1\.attn_k\.weight.*\(64, 128\).*\(128, 128\)",
    ),
    "heads of other layers": ("llama", {"llama.attention.head_count_kv": [1, 2, 4]}, ModelFileError, "3 entries for 2"),
    "eos": ("llama", {"tokenizer.ggml.eos_token_id": 2**32 - 1}, ModelFileError, "eos_token_id is 4294967295.*384"),
    "bos": ("gemma3", {"tokenizer.ggml.bos_token_id": 384}, ModelFileError, "bos_token_id is 384.*384"),
    "unk": ("gemma3", {"tokenizer.ggml.unknown_token_id": 2**31}, ModelFileError, "unknown_token_id is 2147483648"),
    "tokens": ("llama", {"tokenizer.ggml.tokens": ["a", "b"]}, ModelFileError, "384 rows.*2 tokens"),
    "text for a number": ("llama", {"llama.block_count": "two"}, ModelFileError, "llama.block_count"),
    "pattern": (
        "gemma3",
        {"gemma3.attention.sliding_window_pattern": [True, False]},
        ModelFileError,
        "sliding_window_pattern has 2 entries for 7",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tiny: Make) -> None:
    family, metadata, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        tiny(family, metadata=metadata)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_missing_tensor_is_named(family: str, tmp_path: Path) -> None:
    with GGUFFile.open(write_tiny(tmp_path / "whole.gguf", family, n_layer=1)) as file:
        needed = describe(file).tensors()
    for name in needed:
        if name == "output.weight":  # its absence means a tied head
            continue
        path = write_tiny(tmp_path / "part.gguf", family, n_layer=1, omit=[name])
        with GGUFFile.open(path) as file, pytest.raises(ModelFileError, match=name):
            describe(file)


def test_some_biases_are_not_enough(tiny: Make) -> None:
    with pytest.raises(ModelFileError, match=r"blk\.1\.attn_k\.bias"):
        tiny("llama", bias=True, omit=["blk.1.attn_k.bias"])
    with pytest.raises(ModelFileError, match=r"blk\.1\.attn_output\.bias"):
        tiny("llama", weights={"blk.0.attn_output.bias": np.ones(128, np.float32)})


def test_unknown_tensors_warn(tiny: Make, caplog: pytest.LogCaptureFixture) -> None:
    extra = dict.fromkeys(("v.patch_embd.weight", "blk", "blk.", "blk.x", "blk.0", "blk.x.y"), np.ones(4, np.float32))
    with caplog.at_level(logging.WARNING, "edgert"):
        assert tiny("llama", weights=extra).n_layer == 2
    assert "v.patch_embd.weight, blk, blk., blk.x, blk.0" in caplog.text


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("llama", "blk.0.attn_norm.bias", (128,)),
        ("llama", "blk.1.attn_q_norm.weight", (32,)),
        ("llama", "blk.1.attn_gate.weight", (32, 128)),
        ("gemma3", "output.bias", (384,)),
        ("qwen3", "blk.0.post_ffw_norm.weight", (128,)),
        ("llama", "rope_factors_long.weight", (16,)),
        ("llama", "blk.0.attn_q.scale", (1,)),
        ("llama", "token_embd.scale", (1,)),
        ("llama", "token_embd.bias", (384,)),
        ("gemma3", "per_layer_token_embd.weight", (384, 64)),
    ],
)
def test_tensors_that_change_the_result_are_refused(family: str, name: str, shape: tuple[int, ...], tiny: Make) -> None:
    with pytest.raises(UnsupportedFormatError, match=name):
        tiny(family, weights={name: np.ones(shape, np.float32)})


def test_odd_padding_id_only_warns(tiny: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "edgert"):
        tiny("llama", metadata={"tokenizer.ggml.padding_token_id": 2**32 - 1})
    assert "padding_token_id" in caplog.text


def test_unknown_family_lists_the_known(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf", "mamba")
    with (
        GGUFFile.open(path) as file,
        pytest.raises(
            UnsupportedFormatError, match=r"'mamba'.*cohere2.* gemma3, .*llama, .*qwen2, qwen2moe, qwen2vl, qw"
        ),
    ):
        describe(file)


def test_families_are_those_on_disk() -> None:
    files = {path.stem for path in Path(architecture.__file__).parent.glob("*.py")}
    families = set(architecture.FAMILIES.values())
    assert files - {"__init__", "base", "checks", "mixture", "common", "rope"} == families


def test_real_models(smollm2_path: Path, gemma3_path: Path) -> None:
    with GGUFFile.open(smollm2_path) as file:
        a = describe(file)
    assert (a.n_layer, a.n_embd, a.n_head, a.n_head_kv, a.head_dim, a.n_ff) == (30, 576, 9, 3, 64, 1536)
    assert a.layers[0].rope.base == 100_000.0
    assert a.tied_head
    with GGUFFile.open(gemma3_path) as file:
        a = describe(file)
    assert (a.n_layer, a.n_embd, a.n_head, a.n_head_kv, a.head_dim, a.n_ff) == (18, 640, 4, 1, 256, 2048)
    assert [i for i, layer in enumerate(a.layers) if not layer.window] == [5, 11, 17]
    assert {layer.window for layer in a.layers} == {0, 512}
