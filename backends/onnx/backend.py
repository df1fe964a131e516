"""The onnx backend: batches of tokens in, logits out, by ONNX Runtime on whatever device a provider reaches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import REPEATED, Backend, Batch, OnInput, Verdict, of_wanted
from edgert.backends.onnx import providers
from edgert.backends.onnx.embedding import Embedding
from edgert.backends.onnx.footprint import N_BATCH, footprint
from edgert.backends.onnx.providers import CPU, Device
from edgert.backends.onnx.runner import FusedRunner, Runner, StaticRunner
from edgert.backends.onnx.store import ModelFolder
from edgert.backends.onnx.weights import members
from edgert.backends.sessions import check_facts
from edgert.devices import fitting, probe
from edgert.errors import BackendUnavailableError, DoesNotFitError, SessionError, UnsupportedFormatError
from edgert.quantize.architecture import Architecture, describe
from edgert.quantize.gguf_file import GGUFFile

log = logging.getLogger(__name__)

WHOLE = 64  # tokens of a step that gives logits of all besides what products read
QKV = tuple(f"attn_{part}.bias" for part in "qkv")


class OnnxBackend(Backend):
    """A model run by ONNX Runtime; sequences of a batch are computed one after another.

    n_ctx:      positions that one sequence may have; 0: as many as the model was trained on
    n_cached:   positions that all sequences together may have; 0: n_ctx for each
    device:     "auto" (an NPU, or else the CPU), or a name that `edgert devices` shows: cpu, openvino:npu, qnn ...
    require:    raise when the device cannot run the whole model, instead of leaving parts to the CPU
    observable: show what products read, by the capability "observe"; steps take longer then
    """

    def __init__(
        self,
        file: GGUFFile,
        *,
        n_ctx: int = 0,
        n_threads: int | None = None,
        n_batch: int = N_BATCH,
        n_seq_max: int = 1,
        n_cached: int = 0,
        device: str = "auto",
        require: bool = False,
        observable: bool = False,
        progress: Callable[[int, int], None] | None = None,
        requested: str = "onnx",
    ) -> None:
        """Raises: BackendUnavailableError, DoesNotFitError, UnsupportedFormatError, ModelFileError."""
        found = providers.find(device)
        a = self.architecture = describe(file)
        _check(file, a)
        self.n_vocab, self.n_ctx, self.n_seq_max = a.n_vocab, n_ctx or a.n_ctx_train, n_seq_max
        self.n_batch = min(n_batch, self.n_ctx)
        n_threads = probe.default_threads() if n_threads is None else probe.check_threads(n_threads)
        self.n_cached = n_cached or self.n_ctx * n_seq_max
        _check_fit(file, a, self.n_ctx, self.n_cached, found.provider.profile == "fused")
        folder = ModelFolder(file, a)
        arguments = folder, a, Embedding(file, a), found, self.n_ctx, n_seq_max, n_threads
        fused = found.provider.profile == "fused"
        if observable and not fused:
            raise BackendUnavailableError(f"What products read on {found.name} stays there: choose --device cpu.")
        runner = FusedRunner(*arguments, observable=observable) if fused else StaticRunner(*arguments)
        self._runner: Runner | None = runner
        self._weights_bytes = folder.weights.n_bytes
        self._lengths = [0] * n_seq_max
        self._logits = np.empty((1, self.n_vocab), np.float32)
        # Of a single token, the usual step: the same memory each time, which stays bound.
        self._token, self._first = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._one = np.empty((1, self.n_vocab), np.float32)
        self.capabilities = frozenset({"fork", "truncate", "batch", "session"})
        if observable:
            self.capabilities |= {"observe"}
        self._session_facts = {"backend": "onnx", "model": folder.path.name}
        self.shares_pages = False  # each sequence has room for a whole context
        self.verdict = self._judge(found, requested, n_threads)
        if require:
            _check_required(found, self._runner)

    def _judge(self, device: Device, requested: str, n_threads: int) -> Verdict:
        assert self._runner is not None
        opened = self._runner.sessions
        assignment = next(iter(opened.values())).assignment
        ran = assignment.products.get(device.provider.ep, 0.0)
        left = assignment.left_behind
        if assignment.nodes and not ran:
            where, reason = "cpu", f"{device.label} took no product of the model; ONNX Runtime's CPU provider runs it"
        else:
            where, reason = device.label, f"ONNX Runtime {device.version}, {n_threads} threads"
            if left:
                reason += f"; {', '.join(left[:5])} stay on the CPU"
        caches = [entry.cache for entry in opened.values() if entry.cache]
        return Verdict(
            requested,
            "onnx",
            where,
            reason,
            {
                "device": device.name,
                "profile": device.provider.profile,
                "assignment": str(assignment),
                "weights": "exact",
                "compile_seconds": f"{sum(entry.seconds for entry in opened.values()):.2f}",
                **({"compiled": ", ".join(caches)} if caches else {}),
                "threads": str(n_threads),
                "n_ubatch": str(self.n_batch),
            },
        )

    def extend(self, tokens: Sequence[int], position: int, sequence: int) -> NDArray[np.float32]:
        fits = len(tokens) == 1 and 0 <= sequence < self.n_seq_max and position == self._lengths[sequence] < self.n_ctx
        if not fits or not 0 <= tokens[0] < self.n_vocab or sum(self._lengths) >= self.n_cached:
            return super().extend(tokens, position, sequence)  # or its error
        # The usual step, in few calls: after the weights have passed, nothing of this is in the processor's caches.
        self._token[0] = tokens[0]
        self._open().run(sequence, self._token, position, self._first, self._one)
        self._lengths[sequence] = position + 1
        return self._one

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        runner, n = self._open(), len(batch)
        runs = self._runs(batch)
        n_wanted = int(np.count_nonzero(batch.wanted))
        if len(self._logits) < n_wanted or len(self._logits) > 64:
            self._logits = np.empty((max(n_wanted, 1), self.n_vocab), np.float32)
        logits = self._logits[:n_wanted]
        row_of = np.cumsum(batch.wanted) - 1  # of the result, by place in the batch
        for sequence, places in runs.items():
            tokens = batch.tokens[places].astype(np.int64)
            wanted = np.flatnonzero(batch.wanted[places])
            whole = len(places) == n
            out = logits if whole else np.empty((len(wanted), self.n_vocab), np.float32)
            runner.run(sequence, tokens, self._lengths[sequence], wanted, out)
            self._lengths[sequence] += len(places)
            if not whole:
                logits[row_of[places[wanted]]] = out
        return logits

    def observe(self, batch: Batch, on_input: OnInput) -> None:
        runner = self._open()
        if "observe" not in self.capabilities or not isinstance(runner, FusedRunner):
            raise NotImplementedError("the backend was not loaded with observable")
        self._runs(batch)
        for part, one in batch.whole(WHOLE):
            for sequence, places in self._runs(one).items():
                tokens = one.tokens[places].astype(np.int64)
                seen = runner.observe(sequence, tokens, self._lengths[sequence])
                self._lengths[sequence] += len(places)
                see = of_wanted(on_input, batch.wanted[part][places])
                for group, rows in seen.items():
                    see(members(self.architecture, group), rows)

    def _check(self, n: int, low_token: int, high_token: int, low_sequence: int, high_sequence: int) -> None:
        if not 0 < n <= self.n_batch:
            raise ValueError(f"a batch holds 1 to {self.n_batch} tokens, not {n}")
        if low_token < 0 or high_token >= self.n_vocab:
            raise ValueError(f"token ids run from 0 to {self.n_vocab - 1}")
        if low_sequence < 0 or high_sequence >= self.n_seq_max:
            raise ValueError(f"sequences run from 0 to {self.n_seq_max - 1}")

    def _check_room(self, longest: int, n: int) -> None:
        """longest: positions of the longest sequence after the step; n: tokens of the step."""
        if longest > self.n_ctx:
            raise ValueError(f"positions run from 0 to {self.n_ctx - 1}")
        if sum(self._lengths) + n > self.n_cached:
            raise DoesNotFitError(
                f"The cache of {self.n_cached} positions has no room for {n} more tokens: "
                "free a sequence or load the model with a larger -c/--ctx-size."
            )

    def _gap(self, sequence: int) -> ValueError:
        return ValueError(f"the positions of sequence {sequence} do not follow its {self._lengths[sequence]} tokens")

    def _runs(self, batch: Batch) -> dict[int, NDArray[np.int64]]:
        """The places of each sequence's tokens in the batch. Raises: ValueError for what cannot be."""
        n = len(batch)
        tokens, sequences = batch.tokens, batch.sequences
        bounds = [int(bound) for x in (tokens, sequences) for bound in (x.min(initial=0), x.max(initial=0))]
        self._check(n, *bounds)
        if not (n == len(sequences) == len(batch.positions) == len(batch.wanted)):
            raise ValueError("tokens, sequences, positions and wanted differ in length")
        runs, longest = {}, 0
        for sequence in dict.fromkeys(batch.sequences.tolist()):
            places = np.flatnonzero(batch.sequences == sequence)
            start = self._lengths[sequence]
            if not np.array_equal(batch.positions[places], np.arange(start, start + len(places))):
                raise self._gap(sequence)
            runs[sequence], longest = places, max(longest, start + len(places))
        self._check_room(longest, n)
        return runs

    def length(self, sequence: int) -> int:
        self._open()
        return self._lengths[sequence]

    def fork(self, source: int, target: int, length: int) -> None:
        runner = self._open()
        if self._lengths[target]:
            raise ValueError(f"sequence {target} is not empty")
        if not 0 <= length <= self._lengths[source]:
            raise ValueError(f"sequence {source} has {self._lengths[source]} positions, not {length}")
        if length:
            runner.copy(source, target, length)
        self._lengths[target] = length

    def truncate(self, sequence: int, length: int) -> None:
        self._open()
        if not 0 <= length <= self._lengths[sequence]:
            raise ValueError(f"sequence {sequence} has {self._lengths[sequence]} positions, not {length}")
        self._lengths[sequence] = length

    def free(self, sequence: int) -> None:
        super().free(sequence)
        self._open().clear(sequence)

    def fill(self, sequence: int, length: int) -> None:
        """Repeats what is cached, which costs next to nothing."""
        super().fill(sequence, min(length, self.n_batch, REPEATED))
        done = self._lengths[sequence]
        if length > done:
            self._check_room(length, length - done)
            self._open().repeat(sequence, done, length)
            self._lengths[sequence] = length

    def save(self, sequence: int, length: int) -> tuple[dict[str, Any], list[NDArray[np.uint8]]]:
        runner = self._open()
        if not 0 < length <= self._lengths[sequence]:
            raise ValueError(f"sequence {sequence} has {self._lengths[sequence]} positions, not {length}")
        parts = [np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in runner.cached(sequence, length)]
        return {**self._session_facts, "length": length}, parts

    def check_saved(self, facts: Mapping[str, Any], n_tokens: int, n_bytes: int) -> None:
        check_facts(self._session_facts, facts, n_tokens, self.n_ctx)
        if n_bytes != self._open().kv_bytes([n_tokens]):
            raise SessionError("The session's data are not as long as they were.")

    def restore(self, sequence: int, facts: Mapping[str, Any], data: NDArray[np.uint8]) -> None:
        runner, length = self._open(), int(facts["length"])
        self.check_saved(facts, length, data.nbytes)
        if self._lengths[sequence]:
            raise ValueError(f"sequence {sequence} is not empty")
        if self.free_positions() < length:
            raise DoesNotFitError(f"The cache has no room for the session's {length} positions: end a sequence.")
        start, floats = 0, np.frombuffer(data.tobytes(), np.float32)
        for part in runner.cached(sequence, length):
            part[:] = floats[start : start + part.size].reshape(part.shape)
            start += part.size
        self._lengths[sequence] = length

    def memory(self) -> dict[str, int]:
        runner = self._open()
        return {
            "weights": self._weights_bytes,
            "kv": runner.kv_bytes(self._lengths),
            "buffers": self._logits.nbytes,
        }

    def close(self) -> None:
        self._runner = None

    def _open(self) -> Runner:
        if self._runner is None:
            raise ValueError("the backend is closed")
        return self._runner


def _check(file: GGUFFile, a: Architecture) -> None:
    """What the graphs take for granted. Raises: UnsupportedFormatError that names what they lack."""
    tensors = {name for layer in a.layers for name in layer.tensors} | set(a.outer)
    biases = sorted(name for name in tensors if name.endswith(".bias") and not name.startswith(QKV))
    lacks = {
        "layer norms": a.norm != "rms",
        f"the activation {a.activation}": a.activation not in ("silu", "gelu"),
        f"biases ({', '.join(biases[:3])})": bool(biases),
        "fused tensors": "attn_qkv.weight" in tensors or any(layer.gate_is_fused for layer in a.layers),
        "feed-forward blocks without a gate": "ffn_gate.weight" not in tensors,
        "blocks side by side": any(layer.parallel for layer in a.layers),
        "a mixture of experts": any(layer.experts for layer in a.layers),
        "blocks without a norm before them": not {"attn_norm.weight", "ffn_norm.weight"} <= tensors,
        "heads of several sizes": any(layer.head_dim not in (0, a.head_dim) for layer in a.layers),
        "layers that share keys and values": any(layer.kv_layer is not None for layer in a.layers),
        "vectors of tokens for each layer": a.n_embd_per_layer > 0,
        "norms of values": a.value_norm,
        "norms of whole rows of q and k": any(
            layer.tensors.get("attn_q_norm.weight", (a.head_dim,)) != (a.head_dim,) for layer in a.layers
        ),
        "heads that are rotated in part": any(layer.rope.n_dims != a.head_dim for layer in a.layers),
        "scaled rotations": any(layer.rope.magnitude != 1.0 for layer in a.layers),
        "convolutions": any(layer.n_taps for layer in a.layers),
        "norms behind the rotation": a.rope_first,
        "queries that grow with their positions": any(layer.rope.temperature for layer in a.layers),
        "a table of positions": "position_embd.weight" in tensors,
        "scaled logits": a.logit_scale != 1.0,
        "layers of different sizes": len({(x.n_head, x.n_head_kv, x.n_ff, *x.tensors) for x in a.layers}) > 1,
    }
    if reasons := [reason for reason, holds in lacks.items() if holds]:
        raise UnsupportedFormatError(f"{file.path} ({a.name}) has {', '.join(reasons)}, which the onnx backend lacks.")


def _check_fit(file: GGUFFile, a: Architecture, n_ctx: int, n_positions: int, fused: bool) -> None:
    """Refuses what could not be filled."""
    available = probe.probe().memory_available

    def needed(n: int) -> int:
        found = footprint(file, a, n, n_positions / n_ctx, fused=fused)
        return found.total - found.program

    if needed(n_ctx) > available:
        what = f"{file.path} with {n_positions} cached positions in ONNX Runtime"
        missing = fitting.missing(needed(n_ctx), available)
        raise DoesNotFitError(f"{what} {missing}; {fitting.remedy(needed, {}, n_ctx, available)}.")


def _check_required(device: Device, runner: Runner) -> None:
    """Raises: BackendUnavailableError when a part of the model is not where it was required."""
    for name, opened in runner.sessions.items():
        found = opened.assignment
        if device.provider.ep != CPU and not found.nodes:
            continue  # a version that does not tell
        if found.products.get(device.provider.ep, 0.0) < 1.0:
            share = 100 * found.products.get(device.provider.ep, 0.0)
            raise BackendUnavailableError(
                f"{device.label} was required and runs {share:.0f} % of the products of {name}; the CPU would run "
                f"{', '.join(found.left_behind[:5]) or 'the rest'}: choose another device, or do without require."
            )
