"""llama.cpp behind the waist, by llama-cpp-python's low-level API: the same batches, another engine.

The package is an extra (`edgert[gpu]`); importing this module does not load it, making a `LlamaBackend` does.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from os import fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import REPEATED, Backend, Batch, OnInput, Verdict, of_wanted
from edgert.backends.llama import devices
from edgert.backends.llama.cells import Cells
from edgert.backends.llama.door import validated
from edgert.backends.llama.library import function, messages, system_info, version
from edgert.backends.llama.observer import Observer
from edgert.backends.llama.offload import FITTING, SPLIT_MODES, Offload, amx_unused, load_model
from edgert.backends.llama.padding import SETTLING, Padding, suitable
from edgert.backends.sessions import check_facts
from edgert.devices import probe
from edgert.errors import (
    BackendUnavailableError,
    DoesNotFitError,
    EdgertError,
    ModelFileError,
    RequestError,
    SessionError,
)
from edgert.quantize.architecture import describe

if TYPE_CHECKING:
    from edgert.quantize.gguf_file import GGUFFile

FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
WHOLE = 64  # tokens of a step that gives more than the logits of a few
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2, "iq4_nl": 20}
KV_BITS = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5, "iq4_nl": 4.5}


class LlamaBackend(Backend):
    """A model run by llama.cpp.

    The cells of the cache are one pool for all sequences, so that a fork of any length shares them.
    """

    def __init__(
        self,
        model: GGUFFile | str | Path,
        *,
        n_ctx: int = 0,
        n_threads: int | None = None,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        n_cached: int = 0,
        flash_attn: str = "auto",
        type_k: str = "f16",
        type_v: str = "f16",
        swa_full: bool = True,
        use_extra_bufts: bool | None = None,
        device: str = "",
        n_gpu_layers: int = FITTING,
        split_mode: str = "layer",
        tensor_split: Sequence[float] = (),
        main_gpu: int = 0,
        gpu_memory: int = 0,
        rpc: Sequence[str] = (),
        require: bool = False,
        observable: bool = False,
        requested: str = "llama",
    ) -> None:
        """Loads the model.

        model:            a validated file, or a path that is validated first
        n_ctx:            positions that one sequence may have; 0 is the model's own
        n_threads:        threads for prefill and decode; None: what suits this machine
        n_cached:         positions that all sequences together may have; 0: n_ctx for each
        n_batch:          most tokens of one forward; n_ubatch: of one pass over the layers
        flash_attn:       "on", "off", or "auto"
        type_k, type_v:   how keys and values are cached: a name of KV_TYPES
        swa_full:         whole cache for layers with a window, so that truncate reaches back any length
        use_extra_bufts:  let llama.cpp keep weights in layouts of its own (repack, AMX); None: those that work here
        device:           "": all GPUs; "cpu"; or GPUs as `edgert devices` names them, "CUDA0,CUDA1"
        n_gpu_layers:     layers on GPUs, the head counts as one; -1: all; FITTING: as many as fit beside the cache
        split_mode:       several GPUs share "layer" by layer, each "tensor", "row" by row (by older builds), or
                          "none": main_gpu runs all
        tensor_split:     shares of the GPUs, of any sum; (): as their free memory
        gpu_memory:       bytes that may be taken of each GPU; 0: what is free
        rpc:              host:port of llama.cpp's rpc-servers, whose devices count as GPUs
        require:          raise when no GPU runs all that was asked for
        observable:       show what products read, by the capability "observe"; all steps take longer then

        Raises: BackendUnavailableError, ModelFileError, DoesNotFitError; ValueError for a wrong option.
        """
        _check_choices(flash_attn, split_mode, type_k, type_v)
        n_threads = probe.default_threads() if n_threads is None else probe.check_threads(n_threads)
        self._model: Any = None
        self._context: Any = None
        self._llama = devices.open_library("" if rpc else device)
        if rpc:
            devices.add_rpc_servers(self._llama, [rpc] if isinstance(rpc, str) else rpc)
        with validated(model) as file:
            path, names = fspath(file.path), list(file.tensors)
            fingerprint = _fingerprint(file)
            self._moves = _moves(file)
            self.n_ctx = n_ctx or file.get(f"{file.architecture}.context_length", int)
            self.n_cached = n_cached or self.n_ctx * n_seq_max
            offload = Offload.plan(
                *(file, n_gpu_layers, self.n_cached, (KV_BITS[type_k] + KV_BITS[type_v]) / 2 / 8),
                device=device,
                gpu_memory=gpu_memory,
                n_ubatch=n_ubatch,
                split_mode=split_mode,
                tensor_split=tensor_split,
                main_gpu=main_gpu,
            )
        on_cpu = device.strip().lower() == "cpu"
        if require and not offload.whole and not on_cpu:
            raise BackendUnavailableError(
                f"A GPU was required and {offload.why_not}: {offload.remedy}; "
                "--device cpu requires llama.cpp on the processor"
            )
        self.n_batch, self.n_seq_max = min(n_batch, self.n_ctx), n_seq_max
        self.capabilities = frozenset({"fork", "truncate", "batch", "session", "states"})
        self._observer: Observer | None = None
        if observable:
            self.capabilities |= {"observe"}
            self._observer = Observer(self._llama.ggml_backend_sched_eval_callback, names)

        messages.clear()
        self._open_model(path, use_extra_bufts, offload)
        options = self._context_options(n_threads, min(n_ubatch, self.n_batch))
        options.flash_attn_type = FLASH_ATTENTION[flash_attn]
        options.type_k, options.type_v = KV_TYPES[type_k], KV_TYPES[type_v]
        options.swa_full = swa_full
        options.offload_kqv, options.op_offload = offload.n_layers > 0, not on_cpu
        self._open_context(options)
        self._buffers = messages.buffers()

        cached = {"type_k": type_k, "type_v": type_v, "flash_attn": flash_attn}
        made_by = {"backend": "llama", "llama-cpp-python": version(), "model": fingerprint}
        self._session_facts: dict[str, Any] = {**made_by, **cached, "swa_full": swa_full}
        details = {**cached, "n_ubatch": str(options.n_ubatch)}
        self.verdict = self._judge(requested, offload, n_threads, details)
        self._lengths = [0] * n_seq_max
        self._cells = Cells(n_seq_max)
        self._make_batch(self.n_batch)
        self._padding = Padding() if self._keeps_graphs(offload) else None
        self.settling = SETTLING if self._padding else 1
        self._view_address = 0
        self._view = np.empty((0, self.n_vocab), np.float32)

    def _open_model(self, path: str, use_extra_bufts: bool | None, offload: Offload) -> None:
        """The weights, where the plan has them. Raises: DoesNotFitError, ModelFileError, in llama.cpp's words."""
        self._model = load_model(path, use_extra_bufts, offload)
        if not self._model:
            reason = messages.reason
            if offload.n_layers and re.search("alloc|memory", " ".join(messages.errors)):
                raise DoesNotFitError(
                    f"llama.cpp has no memory for {offload.n_layers} layers of {path} on {offload.device} ({reason}): "
                    "choose a smaller -ngl, or leave it out."
                )
            raise ModelFileError(f"llama.cpp does not load {path}: {reason}")
        self._vocab = self._llama.llama_model_get_vocab(self._model)
        self.n_vocab = int(self._llama.llama_vocab_n_tokens(self._vocab))

    def _context_options(self, n_threads: int, n_ubatch: int) -> Any:
        """What every context of ours has: one pool of cells, states of each token, no counting of time."""
        options = self._llama.llama_context_default_params()
        options.n_ctx = self.n_cached
        options.n_batch, options.n_ubatch = self.n_batch, n_ubatch
        options.n_seq_max = self.n_seq_max + 1  # one, for a moment, for the part of a sequence that is saved
        options.n_threads = options.n_threads_batch = n_threads
        options.kv_unified = True
        options.pooling_type = 0  # none: states of each token
        options.no_perf = True
        if self._observer is not None:
            options.cb_eval = self._observer.callback
        return options

    def _open_context(self, options: Any) -> None:
        """Cache and scratch memory. Raises: DoesNotFitError."""
        self._context = self._llama.llama_init_from_model(self._model, options)
        if not self._context:
            reason = messages.reason
            self.close()
            raise DoesNotFitError(
                f"llama.cpp has no memory for a context of {self.n_ctx} positions ({reason}): "
                "choose a smaller -c/--ctx-size."
            )
        self._memory = self._llama.llama_get_memory(self._context)
        self._logits_address = function("llama_get_logits", ctypes.c_void_p, ctypes.c_void_p)
        self._states_address = function("llama_get_embeddings", ctypes.c_void_p, ctypes.c_void_p)

    def _judge(self, requested: str, offload: Offload, n_threads: int, details: dict[str, str]) -> Verdict:
        details |= {
            "system_info": system_info(),
            "n_gpu_layers": str(offload.n_layers),
            "buffers": ", ".join(f"{where} {what} {size} MiB" for where, what, size in self._buffers),
        }
        if amx_unused():
            details["amx"] = "off: this build of llama.cpp fails with it"
        reason = f"llama-cpp-python {version()}, {n_threads} threads" + (f"; {offload.why}" if offload.why else "")
        return Verdict(requested, "llama", offload.device, reason, details)

    def _keeps_graphs(self, offload: Offload) -> bool:
        """Whether steps run from graphs of their size, and rows that nobody asked for can be taken back."""
        if not (offload.whole and offload.device.startswith("CUDA")):
            return False
        kinds = "llama_model_is_recurrent", "llama_model_is_hybrid"  # older builds lack the second
        return not any(hasattr(self._llama, kind) and getattr(self._llama, kind)(self._model) for kind in kinds)

    def _make_batch(self, n_batch: int) -> None:
        """Arrays that llama.cpp reads in place, one llama_batch that points to them."""
        self._tokens = np.zeros(n_batch, np.int32)
        self._positions = np.zeros(n_batch, np.int32)
        self._counts = np.ones(n_batch, np.int32)
        self._sequences = np.zeros(n_batch, np.int32)
        first = self._sequences.ctypes.data
        self._pointers = np.arange(first, first + 4 * n_batch, 4, dtype=np.uintp)
        self._wanted = np.zeros(n_batch, np.int8)
        fields = dict(self._llama.llama_batch._fields_)
        self._batch = self._llama.llama_batch(
            n_tokens=0,
            token=ctypes.cast(self._tokens.ctypes.data, fields["token"]),
            embd=None,
            pos=ctypes.cast(self._positions.ctypes.data, fields["pos"]),
            n_seq_id=ctypes.cast(self._counts.ctypes.data, fields["n_seq_id"]),
            seq_id=ctypes.cast(self._pointers.ctypes.data, fields["seq_id"]),
            logits=ctypes.cast(self._wanted.ctypes.data, fields["logits"]),
        )

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        self._check_open()
        n = len(batch)
        if not n:
            return self._view[:0]
        ends = self._check(batch)
        if self._padding:
            self._padding.interrupt()
        self._tokens[:n] = batch.tokens
        self._positions[:n] = batch.positions
        self._sequences[:n] = batch.sequences
        self._wanted[:n] = batch.wanted
        rows = int(batch.wanted[0]) if n == 1 else int(np.count_nonzero(batch.wanted))
        return self._decode(n, ends, rows)

    def extend(self, tokens: Sequence[int], position: int, sequence: int) -> NDArray[np.float32]:
        self._check_open()
        n = len(tokens)
        if not n:
            return self._view[:0]
        if n > self.n_batch:
            raise ValueError(f"a batch of {n} tokens; n_batch is {self.n_batch}")
        self._check_range(min(tokens), max(tokens), sequence, sequence)
        self._check_run(sequence, position, position + n - 1)
        rows = self._padding.rows(n) if self._padding else n
        if rows > n and (position + rows > self.n_ctx or self.free_positions() < rows):
            rows = n
        if rows == 1:  # of the usual step: what is set here, the device waits for
            self._tokens[0], self._positions[0], self._sequences[0], self._wanted[0] = tokens[0], position, sequence, 1
        else:
            self._tokens[:n], self._tokens[n:rows] = tokens, tokens[-1]
            self._positions[:rows] = range(position, position + rows)
            self._sequences[:rows], self._wanted[:rows] = sequence, 1
        logits = self._decode(rows, {sequence: position + n}, rows)
        if rows > n:
            self._llama.llama_memory_seq_rm(self._memory, sequence, position + n, -1)
        return logits[:n]

    def rows_of(self, n_tokens: int) -> int:
        return suitable(n_tokens) if self._padding else n_tokens

    @property
    def settled(self) -> bool:
        return self._padding is None or self._padding.settled

    def observe(self, batch: Batch, on_input: OnInput) -> None:
        self._check_open()
        if self._observer is None:
            raise NotImplementedError("the backend was not loaded with observable")
        for part, one in batch.whole(WHOLE):  # llama.cpp computes the last layer of wanted tokens alone
            self._observer.watch(of_wanted(on_input, batch.wanted[part]), functools.partial(self.forward, one))

    def states(self, batch: Batch) -> NDArray[np.float32]:
        self._check_open()
        width = int(self._llama.llama_model_n_embd(self._model))
        found = np.empty((len(batch), width), np.float32)
        self._llama.llama_set_embeddings(self._context, True)
        try:
            for part, one in batch.whole(WHOLE):  # llama.cpp makes logits of all of them as well
                self.forward(one)
                address = self._states_address(self._context)
                if not address:
                    raise EdgertError("llama.cpp returned no hidden states")
                rows = (ctypes.c_float * (len(one) * width)).from_address(address)
                found[part] = np.frombuffer(memoryview(rows).cast("B"), np.float32).reshape(len(one), width)
        finally:
            self._llama.llama_set_embeddings(self._context, False)
        return found

    def _decode(self, n: int, ends: Mapping[int, int], rows: int) -> NDArray[np.float32]:
        """Runs the n tokens that stand in the arrays: logits (rows, n_vocab).

        ends:  each sequence's length after them
        """
        self._batch.n_tokens = n
        status = self._llama.llama_decode(self._context, self._batch)
        if status:
            for sequence in ends:
                self._llama.llama_memory_seq_rm(self._memory, sequence, self._lengths[sequence], -1)
            if status == 1:
                raise DoesNotFitError(
                    f"The cache of {self.n_cached} positions has no room for {n} more tokens: "
                    "free a sequence or load the model with a larger -c/--ctx-size."
                )
            reason = messages.reason
            raise EdgertError(f"llama.cpp failed with status {status} on a batch of {n} tokens: {reason}")
        for sequence, end in ends.items():
            self._resize(sequence, end)
        return self._logits(rows) if rows else self._view[:0]

    def _check(self, batch: Batch) -> dict[int, int]:
        """Each sequence's length after the batch."""
        n = len(batch)
        if n > self.n_batch:
            raise ValueError(f"a batch of {n} tokens; n_batch is {self.n_batch}")
        if not (n == len(batch.sequences) == len(batch.positions) == len(batch.wanted)):
            raise ValueError("tokens, sequences, positions and wanted differ in length")
        if n == 1:
            token, sequence, position = int(batch.tokens[0]), int(batch.sequences[0]), int(batch.positions[0])
            self._check_range(token, token, sequence, sequence)
            self._check_run(sequence, position, position)
            return {sequence: position + 1}
        lowest, highest = int(batch.sequences.min()), int(batch.sequences.max())
        self._check_range(int(batch.tokens.min()), int(batch.tokens.max()), lowest, highest)
        ends = {}
        for sequence in range(lowest, highest + 1):
            positions = batch.positions[batch.sequences == sequence] if lowest < highest else batch.positions
            if not len(positions):
                continue
            first, last = int(positions[0]), int(positions[-1])
            if not np.array_equal(positions, np.arange(first, first + len(positions))):
                raise ValueError(f"positions of sequence {sequence} are not consecutive")
            self._check_run(sequence, first, last)
            ends[sequence] = last + 1
        return ends

    def _check_range(self, low_token: int, high_token: int, low_sequence: int, high_sequence: int) -> None:
        if low_token < 0 or high_token >= self.n_vocab:
            raise ValueError(f"token ids {low_token}..{high_token}; the vocabulary has {self.n_vocab}")
        if low_sequence < 0 or high_sequence >= self.n_seq_max:
            raise ValueError(f"sequences {low_sequence}..{high_sequence}; n_seq_max is {self.n_seq_max}")

    def _check_run(self, sequence: int, first: int, last: int) -> None:
        if first != self._lengths[sequence]:
            raise ValueError(
                f"sequence {sequence} has {self._lengths[sequence]} positions; the batch starts at {first}"
            )
        if last >= self.n_ctx:
            raise ValueError(f"position {last} of sequence {sequence}; n_ctx is {self.n_ctx}")

    def _logits(self, rows: int) -> NDArray[np.float32]:
        """llama.cpp's own output buffer seen as (rows, n_vocab), not copied; waits for the device."""
        address = self._logits_address(self._context)
        if address == self._view_address and rows <= len(self._view):
            return self._view if rows == len(self._view) else self._view[:rows]
        if not address:
            raise EdgertError("llama.cpp returned no logits")
        buffer = (ctypes.c_float * (rows * self.n_vocab)).from_address(address)
        self._view = np.frombuffer(memoryview(buffer).cast("B"), np.float32).reshape(rows, self.n_vocab)
        self._view_address = address
        return self._view

    def length(self, sequence: int) -> int:
        self._check_open()
        return self._lengths[sequence]

    def fork(self, source: int, target: int, length: int) -> None:
        self._check_open()
        if self._lengths[target]:
            raise ValueError(f"sequence {target} is not empty")
        if not 0 <= length <= self._lengths[source]:
            raise ValueError(f"sequence {source} has {self._lengths[source]} positions, not {length}")
        self._llama.llama_memory_seq_cp(self._memory, source, target, 0, length)
        self._cells.fork(source, target, length)
        self._lengths[target] = length

    def truncate(self, sequence: int, length: int) -> None:
        self._check_open()
        if length < 0:
            raise ValueError(f"length is {length}")
        if length >= self._lengths[sequence]:
            return
        if not self._llama.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise ValueError(f"llama.cpp cannot cut sequence {sequence} to {length} positions")
        if length and self._llama.llama_memory_seq_pos_min(self._memory, sequence) > 0:
            self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            self._resize(sequence, 0)
            raise ValueError(f"the window's cache no longer holds what precedes position {length}: load with swa_full")
        self._resize(sequence, length)

    def free_positions(self) -> int:
        self._check_open()
        return max(0, self.n_cached - self._cells.used)

    def fill(self, sequence: int, length: int) -> None:
        """Repeats what is cached, moved to where it is wanted: llama.cpp rotates moved keys before the next step."""
        if length > self.n_ctx or length - self._lengths[sequence] > self.free_positions():
            raise DoesNotFitError(f"The cache of {self.n_cached} positions has no room for {length} positions.")
        movable = self._moves and bool(self._llama.llama_memory_can_shift(self._memory))
        super().fill(sequence, min(length, REPEATED) if movable else length)
        done = self._lengths[sequence]
        if length <= done:
            return
        part = self.n_seq_max
        _, (data,) = self.save(sequence, done)
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        for start in range(done, length, done):
            if self._llama.llama_state_seq_set_data(self._context, pointer, data.nbytes, part) != data.nbytes:
                raise SessionError(f"llama.cpp does not take its own cache: {messages.reason}")
            self._llama.llama_memory_seq_add(self._memory, part, 0, -1, start)
            self._llama.llama_memory_seq_cp(self._memory, part, sequence, start, length)
            self._llama.llama_memory_seq_rm(self._memory, part, -1, -1)
        self._resize(sequence, length)

    def _resize(self, sequence: int, length: int) -> None:
        self._lengths[sequence] = length
        self._cells.resize(sequence, length)

    def save(self, sequence: int, length: int) -> tuple[dict[str, Any], list[NDArray[np.uint8]]]:
        self._check_open()
        if not 0 < length <= self._lengths[sequence]:
            raise ValueError(f"sequence {sequence} has {self._lengths[sequence]} positions, not {length}")
        llama, part = self._llama, self.n_seq_max
        llama.llama_memory_seq_cp(self._memory, sequence, part, 0, length)
        try:
            data = np.empty(llama.llama_state_seq_get_size(self._context, part), np.uint8)
            pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            n_bytes = llama.llama_state_seq_get_data(self._context, pointer, data.nbytes, part)
        finally:
            llama.llama_memory_seq_rm(self._memory, part, -1, -1)
        if n_bytes != data.nbytes:
            raise SessionError(f"llama.cpp does not give out its cache: {messages.reason}")
        return {**self._session_facts, "length": length, "n_bytes": n_bytes}, [data]

    def check_saved(self, facts: Mapping[str, Any], n_tokens: int, n_bytes: int) -> None:
        check_facts(self._session_facts, facts, n_tokens, self.n_ctx)
        if facts.get("n_bytes") != n_bytes:
            raise SessionError("The session's data are not as long as they were.")

    def restore(self, sequence: int, facts: Mapping[str, Any], data: NDArray[np.uint8]) -> None:
        self._check_open()
        length = int(facts["length"])
        self.check_saved(facts, length, data.nbytes)
        if self._lengths[sequence]:
            raise ValueError(f"sequence {sequence} is not empty")
        if self.free_positions() < length:
            raise DoesNotFitError(f"The cache has no room for the session's {length} positions: end a sequence.")
        data = np.ascontiguousarray(data)
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        taken = self._llama.llama_state_seq_set_data(self._context, pointer, data.nbytes, sequence)
        last = self._llama.llama_memory_seq_pos_max(self._memory, sequence)
        if taken != data.nbytes or last != length - 1:
            self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            raise SessionError(f"llama.cpp does not take the session's data: {messages.reason}")
        self._resize(sequence, length)

    def memory(self) -> dict[str, int]:
        """Bytes held, as llama.cpp reported them at load; weights as the model's tensors add up to."""
        self._check_open()
        sizes = {"weights": int(self._llama.llama_model_size(self._model)), "kv": 0, "buffers": 0}
        for _, what, size in self._buffers:
            if what != "model":
                sizes["kv" if what == "KV" else "buffers"] += int(float(size) * (1 << 20))
        return sizes

    def facts(self) -> dict[str, Any]:
        """llama.cpp's own words for the model: description, bytes of all tensors, parameters."""
        self._check_open()
        text = ctypes.create_string_buffer(256)
        self._llama.llama_model_desc(self._model, text, len(text))
        return {
            "model_type": text.value.decode("utf-8", "replace"),
            "model_size": int(self._llama.llama_model_size(self._model)),
            "model_n_params": int(self._llama.llama_model_n_params(self._model)),
        }

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids by llama.cpp's own tokenizer, to check ours against."""
        self._check_open()
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        n = self._llama.llama_tokenize(self._vocab, data, len(data), ids, len(ids), add_special, parse_special)
        if n < 0:
            raise EdgertError(f"llama.cpp cannot tokenize a text of {len(data)} bytes")
        return list(ids[:n])

    def _check_open(self) -> None:
        if self._context is None:
            raise ValueError("the backend is closed")

    def close(self) -> None:
        # The view points into memory that goes away now.
        self._view = np.empty((0, 0), np.float32)
        if self._context:
            self._llama.llama_free(self._context)
        if self._model:
            self._llama.llama_model_free(self._model)
        self._context = self._model = None

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self.close()


def _check_choices(flash_attn: str, split_mode: str, type_k: str, type_v: str) -> None:
    if flash_attn not in FLASH_ATTENTION:
        raise ValueError(f"flash_attn is {flash_attn!r}; it is one of {', '.join(FLASH_ATTENTION)}")
    if split_mode not in SPLIT_MODES:
        raise RequestError("split_mode", f"is {split_mode!r}; it is one of {', '.join(SPLIT_MODES)}")
    for name, value in (("cache_type_k", type_k), ("cache_type_v", type_v)):
        if value not in KV_TYPES:
            raise RequestError(name, f"is {value!r}; the llama backend has {', '.join(KV_TYPES)}")
    if flash_attn == "off" and KV_BITS[type_v] < 16:
        raise RequestError("cache_type_v", f"{type_v} needs flash attention, which is off")


def _moves(file: GGUFFile) -> bool:
    """Whether llama.cpp can move what it has cached of a model: of layers with a window it saves the window alone."""
    try:
        return not any(layer.window for layer in describe(file).layers)
    except EdgertError:  # a family that llama.cpp alone knows
        return False


def _fingerprint(file: GGUFFile) -> str:
    """A hash of what the file says of its architecture, and of the first row of each tensor."""
    own = [key for key in sorted(file.metadata) if key.startswith(f"{file.architecture}.")]
    digest = hashlib.sha256(repr([(key, file.metadata[key]) for key in own]).encode())
    for name in sorted(file.tensors):
        tensor = file.tensor(name)
        digest.update(f"{name} {tensor.shape}".encode())
        digest.update(tensor.data[:1].tobytes())
    return digest.hexdigest()
