"""Kernels one by one against NumPy in float64, on every instruction set that this machine has."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from compiling import IN_CHILDREN

from edgert.backends.cpu import compiler, isa, team
from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.layouts import (
    BYTE_TILE_TOKENS,
    CODEC_OF,
    CODECS,
    TOGETHER,
    byte_tile_scratch_bytes,
    tile_scratch_bytes,
)
from edgert.backends.cpu.memory import aligned
from edgert.errors import BackendUnavailableError
from edgert.quantize.formats import FORMATS

Kernel = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
FOLLOWING = [0, 0, 0]  # nothing follows a product
QUANTIZED = [name for name, codec in CODEC_OF.items() if not CODECS[codec].is_float]
EACH_WAY = ("Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4", "TQ2_0")  # of codes and of scales
every_format = pytest.mark.parametrize(
    "name", [name if name in EACH_WAY else pytest.param(name, marks=pytest.mark.slow) for name in QUANTIZED]
)


@pytest.fixture(params=isa.available())
def chosen(request: pytest.FixtureRequest) -> Isa:
    return isa.select(request.param)


def run(isa: Isa, name: str, arguments: list[int], n_threads: int = 1) -> np.ndarray:
    """Runs a kernel; its arguments afterwards."""
    kernel = Kernel(compiler.addresses([name], isa)[name])
    packed = np.array(arguments, np.int64)
    for thread in range(n_threads):
        kernel(thread, n_threads, packed.ctypes.data)
    return packed


def random_rows(name: str, n_rows: int, n_cols: int, seed: int = 0) -> np.ndarray:
    """Random codes with sane scales: uint8 (n_rows, row bytes)."""
    rng = np.random.default_rng(seed)
    form = FORMATS[name]
    raw = rng.integers(0, 256, (n_rows, n_cols // form.block_size, form.type_size), dtype=np.uint8)
    for offset, kind in form.floats:
        if kind == "f2":
            halves = rng.uniform(0.001, 0.02, raw.shape[:2]).astype(np.float16)
            raw[..., offset : offset + 2] = halves[..., None].view(np.uint8)
        elif kind == "e8m0":
            raw[..., offset] = rng.integers(115, 125, raw.shape[:2])
        else:  # IQ1_M: the exponent's bits, in the high nibbles of the last two words
            raw[..., 55] = raw[..., 55] & 15 | 0x20
    return raw.reshape(n_rows, -1)


def pack(isa: Isa, name: str, raw: np.ndarray, n_cols: int, flawed: bool = False) -> np.ndarray:
    codec = CODECS[CODEC_OF[name]]
    panels = -(-len(raw) // isa.lanes)
    packed = aligned(panels * codec.panel_bytes(n_cols, isa.lanes))
    where = [raw.ctypes.data, raw.shape[1], len(raw), n_cols, packed.ctypes.data, 0, 1]
    arguments = run(isa, compiler.name_of("repack", format=name), [*where, 0, 1, 0, 0, 0], n_threads=2)
    assert bool(arguments[-3]) == flawed
    return packed


def quantize(isa: Isa, x: np.ndarray, form: str = "int8") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int8 rows and words by the kernel, and the rows that these stand for (of the form "int8")."""
    n, n_cols = x.shape
    out, words = aligned((n + n % 2) * n_cols), aligned(n * n_cols // 2)
    header = np.array([n, 0], np.int64)
    arguments = [0] * 19
    arguments[0:8] = [x.ctypes.data, x.strides[0], 0, n_cols, header[1:].ctypes.data, header.ctypes.data,
                      out.ctypes.data, words.ctypes.data]  # fmt: skip
    run(isa, compiler.name_of("rows", source="plain", form=form), arguments)
    integers = out[: n * n_cols].view(np.int8).reshape(n, n_cols // 32, 32)
    scales = words.view(np.float32).reshape(n, n_cols // 32, 4)[..., :1]
    return out, words, (integers * scales.astype(np.float64)).reshape(n, n_cols)


@every_format
def test_products_of_every_format(chosen: Isa, name: str):
    n_cols, n_rows, n_tokens = 512, 2 * chosen.lanes, 3
    some = n_rows - 3  # what fills up the last panel is zeros
    raw = random_rows(name, some, n_cols)
    x = np.random.default_rng(1).standard_normal((n_tokens, n_cols)).astype(np.float32)
    integers, words, activations = quantize(chosen, x)
    assert np.abs(activations - x).max() <= np.abs(x).max() / 127
    packed = pack(chosen, name, raw, n_cols)
    weights = np.zeros((n_rows, n_cols))
    weights[:some] = FORMATS[name].dequantize(raw)
    expected = activations @ weights.T
    header = np.array([n_tokens, 0], np.int64)
    y = np.full((n_tokens + 8, n_rows), 9.0, np.float32)
    where = [packed.ctypes.data, integers.ctypes.data, words.ctypes.data, y.ctypes.data, y.strides[0], n_cols,
             n_rows // chosen.lanes, header.ctypes.data, 0, header[1:].ctypes.data, 0, *FOLLOWING]  # fmt: skip
    run(chosen, compiler.name_of("product", codec=CODEC_OF[name], width=1, epilogue="store"), where, n_threads=2)
    # Every type is held exactly: what differs are float32 sums.
    assert np.abs(y[:n_tokens] - expected).max() < 2e-6 * np.abs(weights).max() * np.abs(activations).sum(1).max()
    if chosen.matrix:  # the same sums, of two rows and two tokens at once
        pairs, together = quantize(chosen, x, "pairs")[0], np.zeros_like(y)
        where[1], where[3] = pairs.ctypes.data, together.ctypes.data
        parameters = {"codec": CODEC_OF[name], "width": n_tokens, "epilogue": "store", "form": "pairs"}
        run(chosen, compiler.name_of("product", **parameters), where, n_threads=2)
        np.testing.assert_array_equal(together[:n_tokens], y[:n_tokens])


@every_format
def test_a_float_that_is_not_finite_is_found_while_it_is_packed(chosen: Isa, name: str):
    n_rows, n_cols = chosen.lanes + 2, 512
    form = FORMATS[name]
    blocks = random_rows(name, n_rows, n_cols).reshape(n_rows, -1, form.type_size)
    values = {"f2": [b"\0\x7c", b"\1\xfc"], "e8m0": [b"\xfd", b"\xff"], "iq1_m": [b"\0\xc0" + 3 * b"\0\xf0"]}
    for offset, kind in form.floats:
        for place, value in zip([(0, 0), (chosen.lanes + 1, -1)], values[kind], strict=False):
            flawed = blocks.copy()
            flawed[place][offset : offset + len(value)] = np.frombuffer(value, np.uint8)
            assert not form.is_finite(flawed.reshape(n_rows, -1))
            pack(chosen, name, flawed.reshape(n_rows, -1), n_cols, flawed=True)


@pytest.mark.parametrize(("name", "values"), [("F16", [0x7C00, 0xFC01]), ("BF16", [0x7F80, 0xFFC0]),
                                              ("F32", [0x7F800000, 0xFFC00000])])  # fmt: skip
def test_floats_are_packed_column_by_column_and_checked(name: str, values: list[int]):
    chosen, n_cols = isa.select(None), 64
    n_rows, lanes, size = 2 * chosen.lanes - 1, chosen.lanes, FORMATS[name].type_size
    floats = np.random.default_rng(0).integers(0, 0x7000, (n_rows, n_cols)).astype(f"u{size}")
    packed = pack(chosen, name, floats.view(np.uint8), n_cols)
    found = packed.view(floats.dtype).reshape(2, n_cols, lanes).transpose(0, 2, 1).reshape(2 * lanes, n_cols)
    np.testing.assert_array_equal(found[:n_rows], floats)
    assert not found[n_rows:].any()
    for row, column, value in zip([0, n_rows - 1], [63, 31], values, strict=True):
        flawed = floats.copy()
        flawed[row, column] = value
        pack(chosen, name, flawed.view(np.uint8), n_cols, flawed=True)


@every_format
def test_embeddings_of_every_format(name: str):
    """A row that is looked up is the row that the type's decoder finds, bit by bit, up to ggml's order of products."""
    portable = isa.select("portable")
    n_cols, n_rows, scale = 512, 24, np.float32(1.5)
    raw = random_rows(name, n_rows, n_cols)
    packed = pack(portable, name, raw, n_cols)
    tokens = np.array([0, 23, 7, 8, 16], np.int64)
    header, x = np.array([len(tokens)], np.int64), np.zeros((len(tokens), n_cols), np.float32)
    bits = int(scale.view(np.uint32))
    where = [tokens.ctypes.data, header.ctypes.data, packed.ctypes.data, n_cols, x.ctypes.data, bits]
    run(portable, compiler.name_of("embed", codec=CODEC_OF[name]), where, n_threads=3)
    np.testing.assert_allclose(x, FORMATS[name].dequantize(raw)[tokens] * scale, rtol=1e-6, atol=1e-7)


@pytest.mark.skipif("amx" not in isa.available(), reason="this processor has no tiles")
@every_format
def test_tiles_of_every_format(name: str):
    """The tiles' products: weights and activations in bfloat16, sums in float32."""
    amx = isa.select("amx")
    n_cols, n_rows, n_tokens = 512, 64, 32
    raw = random_rows(name, n_rows, n_cols)
    packed = pack(amx, name, raw, n_cols)
    x = np.random.default_rng(1).standard_normal((n_tokens, n_cols)).astype(np.float32)
    halves = ((x.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
    tiles = np.ascontiguousarray(halves.reshape(2, 16, n_cols // 32, 32).transpose(0, 2, 1, 3))
    x = (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    weights = FORMATS[name].dequantize(raw)
    near = ((weights.view(np.uint32) + np.uint32(0x8000)) >> 16 << 16).view(np.float32).astype(np.float64)
    header, y = np.array([n_tokens], np.int64), np.zeros((n_tokens, n_rows), np.float32)
    scratch = aligned(tile_scratch_bytes(n_tokens))
    where = [packed.ctypes.data, tiles.ctypes.data, y.ctypes.data, y.strides[0], n_cols, n_rows // 16,
             header.ctypes.data, scratch.ctypes.data, len(scratch)]  # fmt: skip
    run(amx, compiler.name_of("tiles", codec=CODEC_OF[name], epilogue="store"), where)
    room = np.abs(x).sum(1).max() * np.abs(weights).max()
    # A weight that float32 rounds the other way is one bfloat16 off.
    assert np.abs(y - x @ near.T).max() < 1e-4 * room
    assert np.abs(y - x @ weights.T.astype(np.float64)).max() < 2e-3 * room


def test_width_does_not_change_a_result(chosen: Isa):
    n_cols, n_rows = 256, 4 * chosen.lanes
    packed = pack(chosen, "Q4_0", random_rows("Q4_0", n_rows, n_cols), n_cols)
    x = np.random.default_rng(2).standard_normal((8, n_cols)).astype(np.float32)
    header = np.array([8, 0], np.int64)
    results = []
    for width, form in ((1, "int8"), (8, "pairs" if chosen.matrix else "int8")):
        integers, words, _ = quantize(chosen, x, form)
        y = np.zeros((16, n_rows), np.float32)
        where = [packed.ctypes.data, integers.ctypes.data, words.ctypes.data, y.ctypes.data, y.strides[0], n_cols,
                 n_rows // chosen.lanes, header.ctypes.data, 0, header[1:].ctypes.data, 0, *FOLLOWING]  # fmt: skip
        pairs = {"form": form} if form == "pairs" else {}
        run(chosen, compiler.name_of("product", codec="q4_0", width=width, epilogue="store", **pairs), where)
        results.append(y[:8])
    np.testing.assert_array_equal(*results)


@pytest.mark.skipif("amx" not in isa.available(), reason="this processor has no tiles")
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q4_K", "Q6_K"])  # each way of scales, and of halves of blocks
def test_byte_tiles_change_no_result(name: str):
    """Bit for bit the products of single tokens, for full tiles, ends, and more tokens than are taken at once."""
    amx, most, n_cols, n_rows = isa.select("amx"), 2 * BYTE_TILE_TOKENS + 3, 768, 64
    packed = pack(amx, name, random_rows(name, n_rows, n_cols), n_cols)
    x = np.random.default_rng(3).standard_normal((most + TOGETHER, n_cols)).astype(np.float32)
    integers, words, _ = quantize(amx, x)
    scratch, header = aligned(2 * byte_tile_scratch_bytes()), np.array([most, 1], np.int64)
    last = {"product": FOLLOWING, "byte_tiles": [scratch.ctypes.data, len(scratch) // 2]}
    first = np.random.default_rng(4).standard_normal((most + 9, n_rows)).astype(np.float32)

    def product(kernel: str, **width: int) -> np.ndarray:
        y = first.copy()
        where = [packed.ctypes.data, integers.ctypes.data, words.ctypes.data, y.ctypes.data, y.strides[0], n_cols,
                 n_rows // 16, header.ctypes.data, 0, header[1:].ctypes.data, 0, *last[kernel]]  # fmt: skip
        run(amx, compiler.name_of(kernel, codec=CODEC_OF[name], epilogue="add", **width), where, n_threads=2)
        return y

    expected = product("product", width=1)
    for n in (1, 9, 16, 18, BYTE_TILE_TOKENS + 1, most):
        header[0] = n
        y = product("byte_tiles")
        np.testing.assert_array_equal(y[1 : n + 1], expected[1 : n + 1])
        np.testing.assert_array_equal(y[n + 1 :], first[n + 1 :])  # nothing is written behind


def test_places_of_the_team_are_those_of_the_walk():
    from edgert.backends.cpu.kernels import walk

    for name in (
        "GENERATION",
        "ARRIVALS",
        "TAPE",
        "N_OPS",
        "BASE",
        "STOP",
        "YIELD",
        "SYSCALL",
        "FUTEX",
        "ENDED",
        "N_THREADS",
        "NEXT",
        "N_NEXT",
        "LEAVE",
        "PARKED",
        "LINE",
    ):
        assert getattr(team, name) == getattr(walk, name), name


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2 if hasattr(os, "sched_getaffinity") else True, reason="one core")
def test_a_team_gets_on_beside_other_programs():
    """Threads that poll while their partner is put aside would take a turn of milliseconds for each op, and compute
    in all of it; what else the machine does makes that no more."""
    best = isa.select()
    address = compiler.addresses(["angles"], best)["angles"]
    one, zeros, out = np.zeros(1, np.int64), np.zeros(4), np.zeros(8, np.float32)
    where = [one.ctypes.data, one.ctypes.data, zeros.ctypes.data, 1, out.ctypes.data]
    arguments = np.array(where, np.int64)
    tape = np.array([[address, arguments.ctypes.data, 1]] * 500, np.int64)
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    pair = team.Team(2, best)
    try:
        pair.run(tape)
        start = time.process_time()
        for _ in range(20):
            pair.run(tape)
        assert time.process_time() - start < 5  # 10,000 ops: 0.002 s alone, 15 to 30 s by turns
    finally:
        pair.close()
        for hog in hogs:
            hog.kill()
            hog.wait()


def test_a_team_walks_where_threads_cannot_sleep_in_the_kernel(monkeypatch: pytest.MonkeyPatch):
    """Its workers then wait outside the kernels, and each tape wakes those that do."""
    monkeypatch.setattr(team, "_futex", lambda: (0, 0))
    best = isa.select()
    address = compiler.addresses(["angles"], best)["angles"]
    one, position, out = np.ones(1, np.int64), np.ones(1, np.int64), np.zeros(8, np.float32)
    scales, magnitude = np.ones(1), np.ones(1, np.float32).view(np.int32)
    where = [position.ctypes.data, one.ctypes.data, scales.ctypes.data, 1, out.ctypes.data, int(magnitude[0])]
    arguments = np.array(where, np.int64)
    tape = np.array([[address, arguments.ctypes.data, 1]], np.int64)
    pair = team.Team(2, best)
    try:
        for _ in range(20):
            deadline = time.monotonic() + 60
            while not pair._state[team.PARKED + team.LINE] and time.monotonic() < deadline:
                time.sleep(0.001)
            assert pair._state[team.PARKED + team.LINE]
            out[:] = 0
            pair.run(tape)
            assert out[:2].tolist() == pytest.approx([math.cos(1), math.sin(1)])
    finally:
        pair.close()


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled as for a user: by children of each load."""
    monkeypatch.setattr(compiler, "_compile", IN_CHILDREN)


@pytest.mark.usefixtures("children")
def test_kernels_are_cached_and_rebuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("EDGERT_CACHE", str(tmp_path))
    compiler.cache_folder.cache_clear()
    try:
        portable = isa.select("portable")
        done: list[tuple[int, int]] = []
        compiler.compile_all(["angles", "walk.role=post"], portable, lambda *at: done.append(at))
        assert done == [(0, 2), (1, 2), (2, 2)]
        made = sorted(path.name.split(".")[0] for path in compiler.cache_folder(portable).iterdir())
        assert made == ["angles", "walk"]
    finally:
        compiler.cache_folder.cache_clear()


def test_programs_that_start_together_compile_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("EDGERT_CACHE", str(tmp_path))
    monkeypatch.setenv("EDGERT_ISA", "portable")
    script = (
        "from edgert.backends.cpu import compiler, isa\n"
        "compiler.compile_all(['angles', 'walk.role=post'], isa.select(), lambda done, _: print(done))"
    )
    programs = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = sorted(program.communicate()[0].split() for program in programs)
    assert [program.returncode for program in programs] == [0, 0, 0]
    assert [steps.count("1") for steps in told].count(1) == 1
    assert all(steps[-1] == "2" for steps in told)


@pytest.mark.usefixtures("children")
@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 5000])
def test_damaged_kernels_are_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: bytes):
    """A file that a crash left without its content must not be run."""
    monkeypatch.setenv("EDGERT_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "_addresses", {})
    compiler.cache_folder.cache_clear()
    try:
        portable = isa.select("portable")
        compiler.compile_all(["angles"], portable)
        file = compiler.object_file("angles", portable)
        sound = file.read_bytes()
        file.write_bytes(damage)
        assert compiler.addresses(["angles"], portable)["angles"]
        assert len(file.read_bytes()) == len(sound)
    finally:
        compiler.cache_folder.cache_clear()


@pytest.mark.usefixtures("children")
def test_kernels_compile_where_the_cache_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """They serve this process alone, and a warning says why the next start compiles again."""
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("EDGERT_CACHE", str(blocked))
    monkeypatch.setattr(compiler, "_spare", [])
    monkeypatch.setattr(compiler, "_addresses", {})
    compiler.cache_folder.cache_clear()
    try:
        portable = isa.select("portable")
        first = compiler.addresses(["angles"], portable)["angles"]
        assert first and compiler.addresses(["angles"], portable) == {"angles": first}
        assert [
            record.message for record in caplog.records if "EDGERT_CACHE" in record.message and "file" in record.message
        ]
        assert len(caplog.records) == 1
        monkeypatch.setattr(compiler.tempfile, "tempdir", str(blocked))
        monkeypatch.setattr(compiler, "_spare", [])
        with pytest.raises(BackendUnavailableError, match="set EDGERT_CACHE"):
            compiler.addresses(["walk.role=post"], portable)
    finally:
        compiler.cache_folder.cache_clear()


def test_kernels_need_no_interpreter(chosen: Isa):
    """Their object code names nothing of Numba or Python: it runs without the lock, and loads without Numba."""
    name = compiler.name_of("product", codec="q4_0", width=1, epilogue="store")
    compiler.addresses([name, "angles"], chosen)
    for kernel in (name, "angles"):
        code = compiler.object_file(kernel, chosen).read_bytes()
        assert b"numba_" not in code.partition(b"\0")[2]
        assert b"Py_" not in code.partition(b"\0")[2]
