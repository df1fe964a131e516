"""A backend and a tokenizer small enough to know what must come out."""

from __future__ import annotations

import codecs
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Backend, Batch, Verdict
from edgert.model import Model
from edgert.options import SamplingParams

BOS, EOS, END_OF_TURN = 256, 257, 258
N_VOCAB = 260
PATIENCE = 120.0  # seconds after which something is held not to come any more, on the busiest machine

Rule = Callable[[list[int]], int]
"""From all tokens of a sequence to the next one."""


def hashed(tokens: list[int]) -> int:
    """A letter that depends on every token before it, so a wrong cache gives another text."""
    value = 17
    for token in tokens:
        value = (value * 31 + token) % 1_000_003
    return ord("a") + value % 26


def told(prompt: list[int], n: int) -> list[int]:
    """What `hashed` says after a prompt."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(hashed(tokens))
    return tokens[len(prompt) :]


def prompt_of(seed: int, n: int) -> list[int]:
    """Token ids that no other seed begins with."""
    return np.random.default_rng(seed).integers(0, 250, n).tolist()  # type: ignore[no-any-return]


def says(reply: str | Sequence[int], end: int = EOS, after: str = "\n") -> Rule:
    """A model that answers every prompt that ends with `after` with this reply."""
    ids = [*(reply.encode() if isinstance(reply, str) else reply), end]

    def rule(tokens: list[int]) -> int:
        marks = [i for i, token in enumerate(tokens) if token == ord(after)]
        said = len(tokens) - (marks[-1] + 1 if marks else len(tokens))
        return ids[min(said, len(ids) - 1)]

    return rule


class FakeBackend(Backend):
    """Keeps the tokens of each sequence and applies a rule to them; it checks what it is given."""

    def __init__(
        self,
        rule: Rule = hashed,
        *,
        n_ctx: int = 256,
        n_batch: int = 32,
        n_seq_max: int = 4,
        delay: float = 0,
    ) -> None:
        self.n_vocab, self.n_ctx, self.n_batch, self.n_seq_max = N_VOCAB, n_ctx, n_batch, n_seq_max
        self.capabilities = frozenset({"fork", "truncate"})
        self.verdict = Verdict("auto", "fake", "none", "a test asked for it")
        self.rule = rule
        self.delay = delay
        self.cells: dict[int, list[int]] = {i: [] for i in range(n_seq_max)}
        self.batches: list[Batch] = []
        self.before_forward: Callable[[Batch], None] | None = None
        self.bend: Callable[[NDArray[np.float32]], None] | None = None
        self.closed = False
        self._busy = threading.Lock()

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        assert self._busy.acquire(blocking=False), "two threads in the backend at once"
        try:
            assert not self.closed
            assert 0 < len(batch) <= self.n_batch
            if self.before_forward:
                self.before_forward(batch)
            time.sleep(self.delay)
            self.batches.append(Batch(*(a.copy() for a in vars(batch).values())))
            rows = []
            fields = zip(batch.tokens, batch.sequences, batch.positions, batch.wanted, strict=True)
            for token, sequence, position, wanted in fields:
                cells = self.cells[int(sequence)]
                assert position == len(cells) < self.n_ctx
                cells.append(int(token))
                if wanted:
                    rows.append(self._logits(cells))
            return np.stack(rows) if rows else np.empty((0, N_VOCAB), np.float32)
        finally:
            self._busy.release()

    def _logits(self, cells: list[int]) -> NDArray[np.float32]:
        logits = -0.01 * np.arange(N_VOCAB, dtype=np.float32)
        logits[self.rule(cells)] = 8
        if self.bend:
            self.bend(logits)
        return logits

    def length(self, sequence: int) -> int:
        return len(self.cells[sequence])

    def fork(self, source: int, target: int, length: int) -> None:
        assert not self.cells[target] and length <= len(self.cells[source])
        self.cells[target] = self.cells[source][:length]

    def truncate(self, sequence: int, length: int) -> None:
        del self.cells[sequence][length:]

    def memory(self) -> dict[str, int]:
        return {"kv": sum(map(len, self.cells.values()))}

    def close(self) -> None:
        self.closed = True

    @property
    def n_evaluated(self) -> int:
        return sum(map(len, self.batches))


class FakeTokenizer:
    """One token a byte, and three control tokens."""

    bos_id: int | None = BOS
    end_ids = frozenset({EOS, END_OF_TURN})
    control_ids = frozenset({BOS, EOS, END_OF_TURN})
    n_vocab = END_OF_TURN + 1

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return [*([BOS] if add_special else []), *text.encode()]

    def encode_whole(self, text: str) -> list[int]:
        return [*self.encode(text), EOS]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else {BOS: b"<s>", EOS: b"</s>"}.get(token, b"<end>")

    def stream_decoder(self, *, special: Collection[int] = ()) -> FakeDecoder:
        return FakeDecoder(self, special)

    @property
    def control_names(self) -> dict[str, int]:
        return {self.piece(token).decode(): token for token in self.control_ids}


class FakeDecoder:
    def __init__(self, tokenizer: FakeTokenizer, special: Collection[int]) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokenizer, self._special = tokenizer, special

    def push(self, token: int) -> str:
        return self._utf8.decode(self._tokenizer.piece(token) if token < 256 or token in self._special else b"")

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class FakeTemplate:
    """role: content, a line for each message."""

    def encode(self, tokenizer: FakeTokenizer, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return tokenizer.encode(text)


def fake_model(rule: Rule = hashed, defaults: SamplingParams | None = None, **options: Any) -> Model:
    """A Model on a FakeBackend; greedy unless `defaults` say otherwise."""
    greedy = SamplingParams(temperature=0)
    backend: Any = FakeBackend(rule, **options)
    tokenizer: Any = FakeTokenizer()
    template: Any = FakeTemplate()
    return Model(backend, tokenizer, template, defaults or greedy)


def backend_of(model: Model) -> FakeBackend:
    """The fake that a model runs on."""
    assert isinstance(model.backend, FakeBackend)
    return model.backend


@contextlib.contextmanager
def held(backend: FakeBackend, after: int = 0) -> Iterator[threading.Event]:
    """Stops a backend within the block, after so many steps: what a test does there comes before the next one.

    Yields what is set when it has stopped. However busy the machine is, nothing is missed and nothing comes too early.
    """
    stopped, go_on, usual, left = threading.Event(), threading.Event(), backend.before_forward, iter(range(after))

    def hold(batch: Batch) -> None:
        if next(left, None) is None:
            stopped.set()
            go_on.wait(PATIENCE)
        if usual:
            usual(batch)

    backend.before_forward = hold
    try:
        yield stopped
    finally:
        backend.before_forward = usual
        go_on.set()


def wait_for(condition: Any, seconds: float = PATIENCE) -> None:
    """Until the condition holds; what never does is told after a time that no busy machine takes."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.001)


def soon(seconds: float, work: Callable[[], object], tries: int = 100) -> bool:
    """Whether work takes no longer: on a busy machine one try may be held up, not all."""
    for _ in range(tries):
        began = time.perf_counter()
        work()
        if time.perf_counter() - began < seconds:
            return True
    return False
