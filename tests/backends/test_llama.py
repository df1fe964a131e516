"""llama.cpp behind the waist: its logits, its sequences, what it refuses. Skipped where it is not installed."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from reference import Reference, kl_divergence

from edgert.backends.base import Batch
from edgert.backends.llama import amx, door
from edgert.backends.llama import library as module
from edgert.backends.llama.backend import LlamaBackend
from edgert.backends.llama.offload import Offload
from edgert.backends.llama.padding import Padding
from edgert.ending import Stop, Stopped
from edgert.errors import BackendUnavailableError, DoesNotFitError, EdgertError, ModelFileError, RequestError
from edgert.quantize.gguf_file import GGUFFile

needs_llama = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)
TOKENS = np.random.default_rng(3).integers(0, 384, 40).tolist()


@pytest.fixture
def make(tiny_model: Callable[..., Path]) -> Iterator[Callable[..., LlamaBackend]]:
    opened = []

    def load(family: str = "llama", n_layer: int = 0, **options: Any) -> LlamaBackend:
        options = {"n_ctx": 128, "n_threads": 1, **options}
        shape = {"n_layer": n_layer} if n_layer else {}
        opened.append(LlamaBackend(tiny_model(family, quant=Type.F32, **shape), **options))
        return opened[-1]

    yield load
    for backend in opened:
        backend.close()


def run(backend: LlamaBackend, tokens: list[int], start: int = 0, sequence: int = 0) -> Any:
    return backend.forward(Batch.of(tokens, start, sequence, wanted="all")).copy()


@needs_llama
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_logits_are_the_reference_s(
    make: Callable[..., LlamaBackend], tiny_model: Callable[..., Path], family: str, flash_attn: str
) -> None:
    expected = Reference(tiny_model(family, quant=Type.F32)).logits(TOKENS)
    logits = run(make(family, flash_attn=flash_attn), TOKENS)
    assert logits.dtype == np.float32
    assert kl_divergence(expected, logits).max() < 1e-4


@needs_llama
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_states_are_what_the_head_reads(
    make: Callable[..., LlamaBackend], tiny_model: Callable[..., Path], family: str
) -> None:
    backend, tokens = make(family), (TOKENS + TOKENS)[:71]
    cuts = [(0, 64), (64, 66), (66, 70), (70, 71)]  # more than 64 are not read at a time; how they are cut rounds them
    logits = np.concatenate([run(backend, tokens[a:b], a) for a, b in cuts])
    backend.free(0)
    states = np.concatenate([backend.states(Batch.of(tokens[a:b], a)) for a, b in ((0, 66), (66, 70))])
    assert states.dtype == np.float32 and backend.length(0) == 70
    with GGUFFile.open(tiny_model(family, quant=Type.F32)) as file:
        name = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
        np.testing.assert_allclose(states @ file.tensor(name).dequantize().T, logits[:70], atol=1e-3)
    np.testing.assert_allclose(run(backend, tokens[70:], 70), logits[70:], atol=1e-3)  # the cache is what it would be


@needs_llama
def test_only_wanted_logits_come_in_order(make: Callable[..., LlamaBackend]) -> None:
    backend = make()
    whole = run(backend, TOKENS)
    backend.free(0)
    batch = Batch.of(TOKENS, 0, wanted="none")
    batch.wanted[[3, 17, 39]] = True
    np.testing.assert_allclose(backend.forward(batch), whole[[3, 17, 39]], atol=1e-4)
    assert backend.length(0) == 40
    backend.free(0)
    assert backend.forward(Batch.of(TOKENS, 0, wanted="none")).shape == (0, 384)


@needs_llama
def test_logits_are_not_copied(make: Callable[..., LlamaBackend]) -> None:
    backend = make()
    first = backend.forward(Batch.of(TOKENS[:1], 0))
    second = backend.forward(Batch.of(TOKENS[1:2], 1))
    assert not first.flags.owndata
    assert first.ctypes.data == second.ctypes.data


@needs_llama
def test_steps_of_any_size_give_the_same(make: Callable[..., LlamaBackend]) -> None:
    backend = make(n_batch=16, n_ubatch=8)
    parts, start = [], 0
    for size in (16, 1, 7, 15, 1):
        parts.append(run(backend, TOKENS[start : start + size], start))
        start += size
    np.testing.assert_allclose(np.concatenate(parts), run(make(), TOKENS), atol=2e-3)


@needs_llama
def test_several_sequences_share_a_batch(make: Callable[..., LlamaBackend]) -> None:
    backend = make(n_seq_max=3)
    alone = run(make(), TOKENS[:20])
    other = run(make(), TOKENS[20:])
    order = np.argsort(np.tile(np.arange(20), 2), kind="stable")  # interleaved token by token
    batch = Batch(
        np.array(TOKENS, np.int32)[order],
        np.repeat(np.array([2, 0], np.int32), 20)[order],
        np.tile(np.arange(20, dtype=np.int32), 2)[order],
        np.ones(40, bool),
    )
    logits = backend.forward(batch)
    np.testing.assert_allclose(logits[0::2], alone, atol=2e-3)
    np.testing.assert_allclose(logits[1::2], other, atol=2e-3)
    assert [backend.length(i) for i in range(3)] == [20, 0, 20]


@needs_llama
def test_a_fork_goes_its_own_way(make: Callable[..., LlamaBackend]) -> None:
    backend = make(n_seq_max=2)
    whole = run(backend, TOKENS)
    backend.fork(0, 1, 13)
    assert backend.free_positions() == backend.n_cached - 40  # what they share counts once
    assert backend.length(1) == 13
    np.testing.assert_allclose(run(backend, TOKENS[13:], 13, sequence=1), whole[13:], atol=2e-3)
    backend.truncate(0, 5)
    np.testing.assert_allclose(run(backend, TOKENS[5:], 5), whole[5:], atol=2e-3)
    with pytest.raises(ValueError, match="not empty"):
        backend.fork(0, 1, 3)
    backend.free(1)
    with pytest.raises(ValueError, match="has 40 positions, not 41"):
        backend.fork(0, 1, 41)


@needs_llama
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_truncate_reaches_back_beyond_the_window(make: Callable[..., LlamaBackend], family: str) -> None:
    backend = make(family)
    whole = run(backend, TOKENS)
    backend.truncate(0, 4)
    np.testing.assert_allclose(run(backend, TOKENS[4:], 4), whole[4:], atol=2e-3)


@needs_llama
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [1, 384]}, "the vocabulary has 384"),
        ({"tokens": [-1, 2]}, "the vocabulary has 384"),
        ({"sequences": [0, 1]}, "n_seq_max is 1"),
        ({"positions": [1, 2]}, "has 0 positions; the batch starts at 1"),
        ({"positions": [0, 2]}, "not consecutive"),
        ({"positions": [0]}, "differ in length"),
    ],
)
def test_wrong_batches_are_refused_and_change_nothing(
    make: Callable[..., LlamaBackend], change: dict[str, list[int]], message: str
) -> None:
    backend = make()
    fields: dict[str, Any] = {"tokens": [1, 2], "sequences": [0, 0], "positions": [0, 1], **change}
    arrays = {name: np.array(values, np.int32) for name, values in fields.items()}
    with pytest.raises(ValueError, match=message):
        backend.forward(Batch(**arrays, wanted=np.ones(2, bool)))
    assert backend.length(0) == 0
    assert run(backend, [1, 2]).shape == (2, 384)


@needs_llama
def test_sizes_are_bounds(make: Callable[..., LlamaBackend]) -> None:
    backend = make(n_ctx=32, n_batch=8)
    with pytest.raises(ValueError, match="n_batch is 8"):
        run(backend, TOKENS[:9])
    for start in range(0, 32, 8):
        run(backend, TOKENS[start : start + 8], start)
    with pytest.raises(ValueError, match="n_ctx is 32"):
        run(backend, [1], 32)


@needs_llama
def test_a_failed_step_leaves_the_lengths(make: Callable[..., LlamaBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    run(backend, TOKENS[:8])
    for status, error in ((1, DoesNotFitError), (-3, EdgertError)):
        with monkeypatch.context() as patch:
            patch.setattr(module.library(), "llama_decode", lambda *_, status=status: status)
            with pytest.raises(error):
                run(backend, TOKENS[8:], 8)
        assert backend.length(0) == 8
    np.testing.assert_allclose(run(backend, TOKENS[8:], 8), run(make(), TOKENS)[8:], atol=2e-3)


@needs_llama
def test_closed_is_closed(make: Callable[..., LlamaBackend]) -> None:
    backend = make()
    backend.close()
    backend.close()
    for call in (lambda: backend.length(0), lambda: run(backend, [1]), backend.memory):
        with pytest.raises(ValueError, match="closed"):
            call()


@needs_llama
def test_facts_and_memory(make: Callable[..., LlamaBackend], tiny_model: Callable[..., Path]) -> None:
    backend = make(n_ctx=256)
    memory = backend.memory()
    # 2 layers, 2 heads of 32 for keys and as many for values, float16
    assert memory["kv"] == pytest.approx(256 * 2 * 2 * 2 * 32 * 2, rel=0.05)
    assert 0 < memory["weights"] <= tiny_model("llama", quant=Type.F32).stat().st_size
    assert backend.verdict.backend == "llama"
    assert "llama-cpp-python" in backend.verdict.reason
    assert backend.facts()["model_n_params"] > 0


@needs_llama
def test_options_have_known_values(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama")
    with pytest.raises(ValueError, match="flash_attn is 'maybe'"):
        LlamaBackend(path, flash_attn="maybe")
    with pytest.raises(RequestError, match="cache_type_k: is 'q3'"):
        LlamaBackend(path, type_k="q3")
    with pytest.raises(RequestError, match="cache_type_v: q8_0 needs flash attention, which is off"):
        LlamaBackend(path, flash_attn="off", type_v="q8_0")


@needs_llama
def test_damaged_files_never_reach_llama(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(tiny_model("llama").read_bytes()[:-4096])

    def reached(*_: Any) -> None:
        raise AssertionError("llama.cpp was given the file")

    monkeypatch.setattr(module.library(), "llama_model_load_from_file", reached)
    with pytest.raises(ModelFileError):
        LlamaBackend(path)


@needs_llama
def test_what_llama_refuses_says_why(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ModelFileError, match=r"llama\.cpp does not load"):
        LlamaBackend(tiny_model("llama", omit=["blk.1.attn_k.weight"]), n_ctx=64)


@needs_llama
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.expert_used_count", 7),
        ("llama.expert_count", 2**31),
        ("llama.rope.dimension_count", 15),
        ("llama.rope.dimension_count", 64),
        ("llama.rope.scaling.type", "su"),
        ("llama.attention.layer_norm_rms_epsilon", -1.0),
    ],
)
def test_what_llama_would_end_the_process_for_is_refused(tiny_model: Callable[..., Path], key: str, value: Any) -> None:
    path = tiny_model("llama", metadata={"llama.expert_count": 6, "llama.expert_used_count": 2, key: value})
    with pytest.raises(ModelFileError, match=key.replace(".", r"\.")):
        LlamaBackend(path, n_ctx=64)


@needs_llama
def test_vectors_that_llama_could_not_add_are_refused(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "half.gguf", "llama")
    for tensor in gguf.GGUFReader(tiny_model("llama")).tensors:
        if tensor.data.ndim == 1:
            writer.add_tensor(tensor.name, tensor.data.astype(np.float16))
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(tmp_path / "half.gguf") as file, pytest.raises(ModelFileError, match="as F32 and it is F16"):
        door.check_types(file)


@needs_llama
def test_its_log_goes_to_logging(
    make: Callable[..., LlamaBackend], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, logger="edgert.backends.llama"):
        make()
    assert any("n_ctx" in record.message for record in caplog.records)
    out, err = capfd.readouterr()
    assert "llama_model_loader" not in out + err


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_library", None)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.delitem(sys.modules, "llama_cpp.llama_cpp", raising=False)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'edgert\[gpu\]'"):
        LlamaBackend(tmp_path / "any.gguf")


def test_a_library_that_does_not_load_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(name: str) -> Any:
        raise RuntimeError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr(module, "_library", None)
    monkeypatch.setattr(module.importlib, "import_module", broken)
    with pytest.raises(BackendUnavailableError, match=r"libgomp\.so\.1.*pip install"):
        LlamaBackend(tmp_path / "any.gguf")


def test_the_module_does_not_load_the_package() -> None:
    code = "import sys, edgert.backends.llama.backend; sys.exit('llama_cpp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("code", "works"),
    [
        ("print('used', 0.9999)", True),
        ("print('used', 0.1)", False),
        ("print('unused', 0.1)", False),
        ("import os; os.abort()", False),
        ("raise SystemExit(3)", False),
        ("import time; time.sleep(60)", False),
    ],
)
def test_amx_is_trusted_only_when_its_trial_succeeds(
    code: str, works: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "libggml-cpu.so"
    library.write_bytes(b"x")
    monkeypatch.setenv("EDGERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(amx, "_TRY", code)
    monkeypatch.setattr(amx, "TIMEOUT", 0.5 if "sleep" in code else 60.0)
    assert amx.works(library, "model") is works
    monkeypatch.setattr(amx, "_TRY", "raise SystemExit(9)")
    assert amx.works(library, "model") is works  # remembered
    library.write_bytes(b"another build")
    assert amx.works(library, "model") is False


def test_a_model_that_does_not_use_amx_says_nothing_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "libggml-cpu.so"
    library.write_bytes(b"x")
    monkeypatch.setenv("EDGERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(amx, "_TRY", "print('unused', 0.9999)")
    assert amx.works(library, "small") is None
    monkeypatch.setattr(amx, "_TRY", "import os; os.abort()")
    assert amx.works(library, "large") is False


@pytest.mark.skipif(sys.platform != "linux", reason="signal stacks of Linux")
def test_amx_is_refused_only_inside() -> None:
    code = """
import ctypes, sys
from edgert.backends.llama.amx import refused
libc = ctypes.CDLL(None)
ask = lambda: libc.syscall(158, 0x1023, 18)
with refused():
    inside = ask()
print(inside, ask())
"""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    if "amx_int8" not in flags:
        pytest.skip("no AMX here")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["-1", "0"]


@needs_llama
def test_its_tokenizer_is_a_cross_check(make: Callable[..., LlamaBackend], tiny_model: Callable[..., Path]) -> None:
    from edgert.quantize.gguf_file import GGUFFile
    from edgert.tokenizer import Tokenizer

    with GGUFFile.open(tiny_model("llama", quant=Type.F32)) as file:
        tokenizer = Tokenizer.from_gguf(file)
    text = "Hello world, the user and the world"
    assert make().tokenize(text) == tokenizer.encode(text)


@needs_llama
@pytest.mark.parametrize(("family", "n_layer", "read"), [("llama", 1, 32), ("gemma3", 6, 100)])
def test_a_filled_sequence_holds_what_was_read_over_and_over(
    make: Callable[..., LlamaBackend], monkeypatch: pytest.MonkeyPatch, family: str, n_layer: int, read: int
) -> None:
    """As reading gives it in a model of one layer, whose keys and values depend on token and position alone.

    Where layers have windows, of which llama.cpp saves no more, all is read.
    """
    monkeypatch.setattr("edgert.backends.llama.backend.REPEATED", 32)
    backend = make(family, n_layer=n_layer, n_seq_max=2)
    decoded: list[int] = []
    real = backend._decode
    monkeypatch.setattr(backend, "_decode", lambda n, *rest: (decoded.append(n), real(n, *rest))[1])
    backend.fill(0, 100)
    assert sum(decoded) == read and backend.length(0) == 100 and backend.free_positions() == 2 * 128 - 100
    tokens = [7 * (i % read) % backend.n_vocab for i in range(100)]
    backend.forward(Batch.of(tokens, 0, 1, wanted="none"))
    for length in (100, 40):
        backend.truncate(0, length)
        backend.truncate(1, length)
        filled, expected = run(backend, TOKENS[:9], length, 0), run(backend, TOKENS[:9], length, 1)
        assert kl_divergence(expected, filled).max() < 1e-4
    with pytest.raises(DoesNotFitError):
        backend.fill(0, 300)


@needs_llama
def test_rows_that_nobody_asked_for_change_no_answer(make: Callable[..., LlamaBackend]) -> None:
    plain, padded = make(), make()
    padded._padding = Padding()
    at = 0
    for n in (1, 3, 1, 1, 7, 2, 1, 5, *[1] * 12, 4):
        part = (TOKENS * 2)[at : at + n]
        ours, theirs = (backend.extend(part, at, 0).copy() for backend in (padded, plain))
        assert ours.shape == theirs.shape == (n, 384)
        assert np.abs(ours - theirs).max() < 1e-2
        at += n
        assert padded.length(0) == at and padded.free_positions() == plain.free_positions()
    assert padded._padding._size == 4 and not padded.settled


@needs_llama
def test_at_the_end_of_the_context_there_are_no_rows_to_spare(make: Callable[..., LlamaBackend]) -> None:
    backend = make(n_ctx=32)
    backend._padding = Padding()
    for at in range(0, 30, 3):
        backend.extend([1, 2, 3], at, 0)
    assert backend.extend([1, 2], 30, 0).shape == (2, 384) and backend.length(0) == 32


def test_a_size_is_kept_while_it_is_asked_for_now_and_then() -> None:
    padding = Padding()
    assert [padding.rows(n) for n in (1, 1, 2, 1, 1, 5, 1, 3)] == [1, 1, 4, 4, 4, 8, 8, 8]
    assert [padding.rows(1) for _ in range(10)] == [8] * 6 + [1] * 4  # two had done with less before
    assert padding.settled
    assert padding.rows(1) == 1 and padding.settled
    assert padding.rows(40) == 40 and not padding.settled
    assert padding.rows(9) == 40


def test_only_a_whole_model_on_cuda_keeps_graphs(make: Callable[..., LlamaBackend]) -> None:
    pytest.importorskip("llama_cpp")
    backend = make()
    assert backend._padding is None and backend.settled and backend.settling == 1
    for layers, device, kept in ((5, "CUDA0 (a GPU)", True), (4, "CUDA0 (a GPU)", False), (5, "Vulkan0", False)):
        assert backend._keeps_graphs(Offload(layers, 5, device)) == kept


class Pressed(Stop):
    """As if Ctrl+C came between two tensors."""

    def check(self) -> None:
        raise KeyboardInterrupt


@needs_llama
@pytest.mark.parametrize("told", [Stop(), Pressed()], ids=["told", "Ctrl+C"])
def test_a_load_ends_between_two_tensors(make: Callable[..., LlamaBackend], told: Stop) -> None:
    told.tell()
    with pytest.raises((Stopped, KeyboardInterrupt)):
        told.over(make)
    assert make().n_vocab  # a later one is whole


@needs_llama
def test_a_trial_of_kernels_that_is_told_to_end_finds_nothing() -> None:
    """What it found would be remembered."""
    stop = Stop()
    timer = threading.Timer(0.2, stop.tell)
    timer.start()
    with pytest.raises(Stopped):
        stop.over(amx._ran, [sys.executable, "-c", "import time; time.sleep(1000)"])
    assert amx._ran([sys.executable, "-c", "print('said')"]) == (0, "said\n")
