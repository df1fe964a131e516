"""Formats chosen under a budget, by the user's pins, and as llama.cpp's named mixes have them."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgert.errors import DoesNotFitError, RequestError
from edgert.quantize.allocation import Candidate, Pins, allocate, candidates, offered, padded_bytes
from edgert.quantize.formats import FORMATS
from edgert.quantize.gguf_file import GGUFFile
from edgert.quantize.mixes import MIXES, ModelFacts, fallback, mix

SHAPES = {
    "token_embd.weight": (320, 256),
    "blk.0.ffn_down.weight": (256, 768),
    "blk.0.ffn_up.weight": (768, 256),
    "blk.0.attn_q.weight": (256, 576),
}
STORED = dict.fromkeys(SHAPES, FORMATS["BF16"])


def test_types_whose_blocks_do_not_divide_the_rows_are_not_offered() -> None:
    assert {f.name for f in offered((10, 256))} == {"Q4_K", "Q5_K", "Q6_K", "Q8_0"}
    assert "Q4_0" in {f.name for f in offered((10, 256), on_grid=True)}  # weights that were trained for it
    names = {f.name for f in offered((10, 576))}
    assert "Q5_1" in names and not any(name.endswith("_K") for name in names)
    assert offered((10, 33)) == []


def test_bytes_are_those_of_the_file_with_padding() -> None:
    assert padded_bytes("a", (3, 32), FORMATS["Q4_0"]) == 64  # 54 and padding
    assert padded_bytes("a", (4, 256), FORMATS["Q6_K"]) == 864  # 840


def test_dominated_types_are_dropped() -> None:
    losses = {FORMATS["Q4_0"]: 3.0, FORMATS["Q4_K"]: 2.0, FORMATS["Q4_1"]: 2.5, FORMATS["Q5_K"]: 1.0}
    kept = candidates("a", (64, 256), losses)
    assert [c.format.name for c in kept] == ["Q4_K", "Q5_K"]


CHOICES = st.lists(
    st.lists(st.tuples(st.integers(1, 400), st.floats(0, 10)), min_size=1, max_size=4), min_size=1, max_size=5
)


@given(CHOICES, st.integers(0, 1500))
@example([[(1, 1e-300), (2, 0.0)], [(1, 5e-324), (3, 0.0)]], 3)
def test_the_knapsack_keeps_the_budget_and_is_near_the_best(choices: list, budget: int) -> None:
    format = FORMATS["F32"]
    options = {str(i): [Candidate(format, n, loss) for n, loss in every] for i, every in enumerate(choices)}
    fitting = [
        (sum(c.loss for c in chosen), sum(c.n_bytes for c in chosen))
        for chosen in itertools.product(*options.values())
        if sum(c.n_bytes for c in chosen) <= budget
    ]
    if not fitting:
        with pytest.raises(DoesNotFitError, match="budget"):
            allocate(options, budget)
        return
    found = allocate(options, budget)
    assert found.n_bytes <= budget
    assert found.loss >= min(fitting)[0] - 1e-9
    worst_step = max(max(c.loss for c in every) - min(c.loss for c in every) for every in options.values())
    assert found.loss <= min(fitting)[0] + worst_step + 1e-9  # a price per byte misses by one change at most


def test_many_small_tensors_reach_the_exact_optimum() -> None:
    """Against dynamic programming over all bytes."""
    rng = np.random.default_rng(0)
    format = FORMATS["F32"]
    options = {}
    for i in range(40):
        sizes = np.sort(rng.integers(10, 60, 4))
        losses = np.sort(rng.exponential(1, 4))[::-1]
        options[str(i)] = [Candidate(format, int(n), float(x)) for n, x in zip(sizes, losses, strict=True)]
    budget = 1300
    best = np.full(budget + 1, np.inf)
    best[0] = 0
    for every in options.values():
        new = np.full(budget + 1, np.inf)
        for c in every:
            new[c.n_bytes :] = np.minimum(new[c.n_bytes :], best[: budget + 1 - c.n_bytes] + c.loss)
        best = new
    assert allocate(options, budget).loss <= best.min() * 1.02


def test_a_large_tensor_is_weighed_against_all_others() -> None:
    """A price per byte would leave the embedding small, and half of the budget unused."""
    f4, f8 = FORMATS["Q4_0"], FORMATS["Q8_0"]
    options = {
        "embedding": [Candidate(f4, 1000, 10.0), Candidate(f8, 2000, 1.0)],
        "a": [Candidate(f4, 100, 2.0), Candidate(f8, 200, 0.0)],
        "b": [Candidate(f4, 100, 2.0), Candidate(f8, 200, 0.0)],
    }
    assert allocate(options, 2250).types == {"embedding": f8, "a": f4, "b": f4}


def test_a_budget_below_the_smallest_types_says_how_much_is_missing() -> None:
    with pytest.raises(DoesNotFitError, match="28 bytes more"):
        allocate({"a": [Candidate(FORMATS["Q4_0"], 128, 0.0)]}, 100)


def test_pins() -> None:
    pins = Pins([("ffn_.*", "q6_K"), ("ffn_up", "Q4_0")], keep=["attn_q"], embedding_type="q8_0")
    found = {name: format.name for name, format in pins.resolve(SHAPES, STORED).items()}
    assert found == {
        "token_embd.weight": "Q8_0",
        "blk.0.ffn_down.weight": "Q6_K",
        "blk.0.ffn_up.weight": "Q6_K",
        "blk.0.attn_q.weight": "BF16",
    }
    tied = Pins(output_type="Q6_K").resolve(SHAPES, STORED)
    assert {name: format.name for name, format in tied.items()} == {"token_embd.weight": "Q6_K"}


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        (Pins([("fnn_down", "Q6_K")]), "'fnn_down' matches no tensor"),
        (Pins(keep=["output"]), "'output' matches no tensor"),
        (Pins([("ffn_down", "Q6_J")]), "'Q6_J', which is none of"),
        (Pins([("ffn_down", "IQ1_S")]), "'IQ1_S', which is none of"),
        (Pins([("attn_q", "Q4_K")]), "blocks of 256 do not divide its rows of 576"),
        (Pins([("ffn_(", "Q4_K")]), "no regular expression"),
        (Pins(output_type="Q6_K", embedding_type="Q8_0"), "pinned to Q8_0"),
    ],
)
def test_pins_that_cannot_be(pins: Pins, says: str) -> None:
    with pytest.raises(RequestError, match="(?s)" + says.replace("(", r"\(")):
        pins.resolve(SHAPES, STORED)


# llama.cpp's llama_ftype
FTYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13,
    "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "Q2_K_S": 21, "IQ4_NL": 25, "IQ4_XS": 30,
    "F16": 1, "BF16": 32,
}  # fmt: skip
_QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
SIZES = {
    "k": {"n_embd": 256, "n_ff": 512, "n_head": 4, "n_head_kv": 2, "head_dim": 64, "n_layer": 9, "tied": True},
    "mixed": {"n_embd": 192, "n_ff": 256, "n_head": 4, "n_head_kv": 1, "head_dim": 64, "n_layer": 9, "tied": False},
}


@pytest.mark.parametrize("size", SIZES)
def test_mixes_are_llamas(size: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, whose quantizer is the reference")
    options = SIZES[size]
    path = tiny_model("llama", quant={}, **options)
    with GGUFFile.open(path) as file:
        shapes = {tensor.name: tensor.shape for tensor in file.tensors.values()}
    facts = ModelFacts(options["n_layer"], options["n_head"] // options["n_head_kv"], has_importance=False)
    llama_cpp.llama_log_set(_QUIET, None)
    for name, ftype in FTYPES.items():
        if name == "Q2_K_S":
            continue  # refused without importance weights
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = ftype, 1
        out = tmp_path / f"{name}.gguf"
        failed = llama_cpp.llama_model_quantize(str(path).encode(), str(out).encode(), ctypes.byref(params))
        assert failed == 0, name
        with GGUFFile.open(out) as file:
            theirs = {t.name: t.format.name for t in file.tensors.values()}
        ours = {tensor: format.name for tensor, format in mix(name, shapes, facts).items()}
        assert ours == {tensor: theirs[tensor] for tensor in ours}, name
        assert all(theirs[tensor] == "F32" for tensor in theirs if tensor not in ours), name
        out.unlink()


def test_mixes_that_importance_changes() -> None:
    shapes = {f"blk.{i}.{part}.weight": (256, 256) for i in range(8) for part in ("attn_v", "ffn_down")}
    types = mix("q4_0", shapes, ModelFacts(8, has_importance=True))
    assert [types[f"blk.{i}.ffn_down.weight"].name for i in (0, 1)] == ["Q4_1", "Q4_0"]
    assert types["blk.0.attn_v.weight"].name == "Q4_0"
    wide = mix("IQ4_NL", shapes, ModelFacts(8, n_gqa=4))
    assert (wide["blk.0.attn_v.weight"].name, wide["blk.0.ffn_down.weight"].name) == ("Q5_K", "IQ4_NL")


def test_every_mix_has_a_base_and_fall_backs() -> None:
    assert set(MIXES) == {*FTYPES, "F32"}
    for name, base in MIXES.items():
        assert base in FORMATS, name
        assert 96 % fallback(FORMATS[base], 96).block_size == 0
        assert fallback(FORMATS[base], 33).name in ("F16", base)
    with pytest.raises(RequestError, match="none of"):
        mix("q4_k_xl", {}, ModelFacts(1))
