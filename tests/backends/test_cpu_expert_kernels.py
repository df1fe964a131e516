"""The kernels of mixtures of experts one by one, against NumPy, on every instruction set that this machine has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_cpu_kernels import chosen, pack, quantize, random_rows, run

from edgert.backends.cpu import compiler, isa
from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.expert_tiles import ARGUMENTS as TILED
from edgert.backends.cpu.kernels.experts import ARGUMENTS as EXPERTS
from edgert.backends.cpu.kernels.gather import ARGUMENTS as GATHER
from edgert.backends.cpu.kernels.route import ARGUMENTS as ROUTE
from edgert.backends.cpu.kernels.route import LEAST_SUM
from edgert.backends.cpu.layouts import CODEC_OF, tile_scratch_bytes
from edgert.backends.cpu.memory import aligned
from edgert.backends.cpu.tape import float_bits
from edgert.quantize.formats import FORMATS

__all__ = ["chosen"]
N_EXPERT, N_USED = 5, 2


def call(chosen: Isa, name: str, order: tuple[str, ...], arguments: dict[str, Any], n_threads: int = 2) -> None:
    """Runs a kernel; arrays are given by what they are, numbers as they are, the rest is 0."""
    assert set(arguments) <= set(order)
    values = [arguments.get(key, 0) for key in order]
    run(chosen, name, [v.ctypes.data if isinstance(v, np.ndarray) else int(v) for v in values], n_threads)


def route(chosen: Isa, gating: str, norm: int, logits: np.ndarray, n_used: int, **more: Any) -> Any:
    n, n_expert = logits.shape
    ids, shares = np.full((n, n_used), -1), np.zeros((n, n_used), np.float32)
    arguments = {
        "logits": logits.copy(),
        "stride": logits.strides[0],
        "n_rows_at": np.array([n]),
        "n_expert": n_expert,
        "n_used": n_used,
        "scale": float_bits(1.0),
        "ids": ids,
        "shares": shares,
        "keys": np.zeros((2, n_expert), np.float32),
    }
    call(chosen, compiler.name_of("route", gating=gating, norm=norm), ROUTE, arguments | more)
    return ids, shares


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@pytest.mark.parametrize("gating, norm", [("softmax", 0), ("softmax", 1), ("sigmoid", 1), ("chosen", 0)])
def test_routes_are_those_of_the_formula(chosen: Isa, gating: str, norm: int) -> None:
    rng = np.random.default_rng(3)
    logits = (3 * rng.standard_normal((7, 40))).astype(np.float32)
    preference = rng.standard_normal(40).astype(np.float32)
    ids, shares = route(chosen, gating, norm, logits, 4, preference=preference, scale=float_bits(1.5))
    sigmoid = 1 / (1 + np.exp(-logits.astype(np.float64)))
    scores = {"softmax": softmax(logits), "sigmoid": sigmoid, "chosen": logits}[gating]
    expected = np.argsort(-(scores + preference), axis=1)[:, :4]
    np.testing.assert_array_equal(ids, expected)
    found = np.take_along_axis(scores, expected, 1)
    if gating == "chosen":
        found = softmax(found)
    elif norm:
        found = found / np.maximum(found.sum(1, keepdims=True), LEAST_SUM)
    np.testing.assert_allclose(shares, 1.5 * found, rtol=2e-6)


def test_logits_that_are_no_numbers_choose_experts_that_exist(chosen: Isa) -> None:
    ids, _ = route(chosen, "softmax", 1, np.full((3, 6), np.nan, np.float32), 2)
    assert ((ids >= 0) & (ids < 6)).all()


@pytest.mark.parametrize("unit", [1, 32])
def test_rows_are_gathered_by_expert(unit: int) -> None:
    _, ids, gathered = _gathered(isa.select("portable"), np.random.default_rng(4), 50, 3, 45, unit)
    table, rows, shares, n_slots = gathered
    seen = []
    for expert, slot, count in table:
        assert slot % unit == 0
        run_rows = rows[slot : slot + count]
        assert (np.diff(run_rows) > 0).all()
        seen += [(row, expert) for row in run_rows]
        np.testing.assert_array_equal(shares[slot : slot + count], 100 * run_rows + expert)
    assert sorted(seen) == sorted((row, expert) for row in range(3, 48) for expert in ids[row])
    assert list(table[:, 0]) == sorted(set(table[:, 0]))
    assert n_slots == sum(-(-count // unit) * unit for count in table[:, 2])
    assert ((rows[:n_slots] >= 3) & (rows[:n_slots] < 48)).all()


def _gathered(chosen: Isa, rng: np.random.Generator, n_rows: int, first: int, n: int, unit: int) -> Any:
    """Rows of experts at random, but for the last, which nobody chooses; shares are 100 * row + expert."""
    ids = np.stack([rng.permutation(N_EXPERT - 1)[:N_USED] for _ in range(n_rows)]).astype(np.int64)
    shares = (100 * np.arange(n_rows)[:, None] + ids).astype(np.float32)
    most = n * N_USED + N_EXPERT * unit
    table, rows, slot_shares = np.zeros((N_EXPERT, 3), np.int64), np.zeros(most, np.int64), np.zeros(most, np.float32)
    places = np.array([first, n, -1, -1])
    arguments = {
        "ids": ids,
        "shares": shares,
        "n_used": N_USED,
        "n_expert": N_EXPERT,
        "first_row_at": places,
        "n_rows_at": places[1:],
        "unit": unit,
        "table": table,
        "n_active_at": places[2:],
        "n_slots_at": places[3:],
        "rows": rows,
        "slot_shares": slot_shares,
        "counts": np.zeros(N_EXPERT, np.int64),
    }
    call(chosen, "gather", GATHER, arguments)
    return places, ids, (table[: places[2]], rows, slot_shares, int(places[3]))


ACTIVATIONS = {
    "silu": lambda gate, up: gate / (1 + np.exp(-gate)) * up,
    "swiglu_oai": lambda gate, up: (
        np.minimum(gate, 7) / (1 + np.exp(-1.702 * np.minimum(gate, 7))) * (np.clip(up, -7, 7) + 1)
    ),
}


@pytest.mark.parametrize(
    "format, epilogue, bias, tiled",
    [
        ("Q4_0", "silu", 0, False),
        ("F32", "swiglu_oai", 1, False),
        ("Q4_0", "scatter", 1, False),
        ("Q4_0", "swiglu_oai", 1, True),
        ("BF16", "scatter", 1, True),
        ("Q8_0", "store", 0, True),
    ],
)
def test_products_of_experts(chosen: Isa, format: str, epilogue: str, bias: int, tiled: bool) -> None:
    """Every slot's product with its own expert; rows run together and alone give the same bits."""
    if tiled and not chosen.tiles:
        pytest.skip("this instruction set has no tiles")
    rng = np.random.default_rng(6)
    n, n_cols, n_rows = 40, 256, 64
    lanes, pair = chosen.lanes, 2 if epilogue in ACTIVATIONS else 1
    places, _, (table, rows, shares, n_slots) = _gathered(chosen, rng, n, 0, n, 32 if tiled else 1)
    shares /= 1000
    x = (rng.standard_normal((n, n_cols)) / 3).astype(np.float32)
    gathered = np.ascontiguousarray(x[rows[:n_slots]])
    integers, words, seen = quantize(chosen, gathered)
    if format == "F32":
        integers, seen = gathered, gathered.astype(np.float64)
    if tiled:
        bits = (gathered.view(np.uint32) + 0x8000) >> 16
        seen = (bits << 16).astype(np.uint32).view(np.float32).astype(np.float64)
        tiles = bits.astype(np.uint16).reshape(n_slots // 16, 16, n_cols // 32, 32).swapaxes(1, 2)
        integers = np.ascontiguousarray(tiles).view(np.uint8).reshape(-1)
    raws = _weights(format, pair * N_EXPERT, n_rows, n_cols)
    matrices = [FORMATS[format].dequantize(raw).astype(np.float64) for raw in raws]
    packed = _packed(chosen, format, raws, n_cols, pair)
    biases = [rng.standard_normal((N_EXPERT, n_rows)).astype(np.float32) for _ in range(pair)] if bias else []
    expected = np.zeros((n_slots, n_rows))
    for expert, slot, count in table:
        part = slice(slot, slot + count)
        results = [seen[part] @ matrices[pair * expert + i].T for i in range(pair)]
        results = [y + b[expert] for y, b in zip(results, biases, strict=False)] if bias else results
        expected[part] = ACTIVATIONS[epilogue](*results) if pair == 2 else results[0]
    before = rng.standard_normal((n, n_rows)).astype(np.float32)
    real = np.concatenate([np.arange(slot, slot + count) for _, slot, count in table])
    if epilogue == "scatter":
        total = before.astype(np.float64)
        np.add.at(total, rows[real], shares[real, None] * expected[real])
        expected, real = total, np.arange(n)
    results = []
    for width in [0] if tiled else [8, 1]:
        y = before.copy() if epilogue == "scatter" else np.zeros((n_slots, n_rows), np.float32)
        arguments: dict[str, Any] = {
            "weights": packed,
            "x": integers,
            "y": y,
            "y_stride": y.strides[0],
            "n_cols": n_cols,
            "n_panels": pair * n_rows // lanes,
            "table": table,
            "n_active_at": places[2:],
            "rows": rows,
            "shares": shares,
            "bias": np.stack([b.reshape(N_EXPERT, -1, lanes) for b in biases], 2) if bias else 0,
        }
        parameters = {"codec": CODEC_OF[format], "epilogue": epilogue, "bias": "yes" if bias else "no"}
        if tiled:
            stride = tile_scratch_bytes(n_slots)
            arguments |= {"scratch": aligned(2 * stride), "scratch_stride": stride}
            call(chosen, compiler.name_of("expert_tiles", **parameters), TILED, arguments)
            if pair == 2:
                halves = y.view(np.uint16).reshape(-1)[: n_slots * n_rows].reshape(n_slots // 16, n_rows // 32, 16, 32)
                y = (halves.swapaxes(1, 2).astype(np.uint32) << 16).view(np.float32).reshape(n_slots, n_rows)
        else:
            call(chosen, compiler.name_of("experts", width=width, **parameters), EXPERTS, arguments | {"words": words})
        results.append(y)
    for y in results:
        bound = 0.01 if tiled else 1e-5
        assert np.abs(y[real] - expected[real]).max() < bound * np.abs(expected[real]).max()
        np.testing.assert_array_equal(y, results[0])


def _weights(format: str, n: int, n_rows: int, n_cols: int) -> list[np.ndarray]:
    if format in ("F32", "BF16"):
        values = np.random.default_rng(8).standard_normal((n, n_rows, n_cols)).astype(np.float32)
        bits = values.view(np.uint32) >> 16
        return list(values.view(np.uint8) if format == "F32" else bits.astype(np.uint16).view(np.uint8))
    return [random_rows(format, n_rows, n_cols, seed=i) for i in range(n)]


def _packed(chosen: Isa, format: str, raws: list[np.ndarray], n_cols: int, pair: int) -> np.ndarray:
    """Each matrix's panels one after the other; of pairs in turn."""
    panels = [pack(chosen, format, raw, n_cols).reshape(len(raws[0]) // chosen.lanes, -1) for raw in raws]
    if pair == 2:
        panels = [np.stack(panels[i : i + 2], 1) for i in range(0, len(panels), 2)]
    packed = aligned(sum(part.nbytes for part in panels))
    packed[:] = np.concatenate([part.reshape(-1) for part in panels])
    return packed
