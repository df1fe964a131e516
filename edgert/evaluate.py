"""Runs a text through a model, or through two, to see how well it predicts: perplexity, KL divergence.

Chunks, begin token and scored half are those of llama.cpp's llama-perplexity, so that figures compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Backend, Batch
from edgert.errors import EdgertError, RequestError
from edgert.quantize.divergence import Evaluation, Tally

if TYPE_CHECKING:
    from edgert.tokenizer import Tokenizer

Floats = NDArray[np.float32]

STEP_LOGITS = 1 << 24  # logits that one forward step may return: 64 MiB


def chunks_of(tokenizer: Tokenizer, text: str, n_ctx: int, limit: int | None = None) -> NDArray[np.int32]:
    """The text's tokens as int32 (n_chunks, n_ctx); each chunk's first is the begin token if the file wants one.

    Raises: RequestError when the text does not fill one chunk, or n_ctx is too small.
    """
    if n_ctx < 4:
        raise RequestError("ctx_size", f"must be at least 4 to score the second half of a chunk, not {n_ctx}")
    ids = np.asarray(tokenizer.encode(text, add_special=True), np.int32)
    n_chunks = len(ids) // n_ctx
    if limit is not None:
        n_chunks = min(n_chunks, limit)
    if n_chunks < 1:
        raise RequestError("text", f"has {len(ids)} tokens and a chunk takes {n_ctx}: give more text or a smaller -c")
    chunks = ids[: n_chunks * n_ctx].reshape(n_chunks, n_ctx).copy()
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        chunks[:, 0] = tokenizer.bos_id
    return chunks


def scored(backend: Backend, chunk: NDArray[np.int32], step: int) -> Iterator[tuple[slice, Floats]]:
    """Runs a chunk in sequence 0 and yields (places, logits) of its second half, `step` places at a time.

    Logits are valid until the next step. The last place has no next token in the chunk, so it is not computed.
    """
    n = len(chunk) - 1
    first = len(chunk) // 2
    backend.free(0)
    for start in range(0, first, backend.n_batch):
        backend.forward(_batch(chunk, start, min(first, start + backend.n_batch), wanted="none"))
    for start in range(first, n, step):
        stop = min(n, start + step)
        yield slice(start, stop), backend.forward(_batch(chunk, start, stop, wanted="all"))


def _batch(chunk: NDArray[np.int32], start: int, stop: int, wanted: str) -> Batch:
    return Batch.of(chunk[start:stop].tolist(), start, wanted=wanted)


def evaluate(
    backend: Backend,
    chunks: NDArray[np.int32],
    against: Backend | None = None,
    on_chunk: Callable[[int, float], object] | None = None,
) -> Evaluation:
    """Perplexity of a model on chunks of tokens, and its distance from another model.

    chunks:    int32 (n_chunks, n_ctx), as chunks_of gives them
    against:   the base that it is compared with
    on_chunk:  called after each chunk with the number of chunks done and the perplexity so far

    Raises: EdgertError for vocabularies of different sizes, or logits that are no numbers.
    """
    both = [backend] if against is None else [backend, against]
    _check_sizes([one.n_vocab for one in both])
    step = max(1, min(STEP_LOGITS // backend.n_vocab, *(one.n_batch for one in both), chunks.shape[1]))
    tally = Tally()
    for i, chunk in enumerate(chunks):
        for results in zip(*(scored(one, chunk, step) for one in both), strict=True):
            places, logits = results[0]
            base = results[1][1] if against is not None else None
            tally.add(logits, chunk[places.start + 1 : places.stop + 1], base)
        if on_chunk:
            on_chunk(i + 1, tally.perplexity)
    return tally.result(*chunks.shape)


def _check_sizes(sizes: Sequence[int]) -> None:
    if len(set(sizes)) > 1:
        raise EdgertError(
            f"The vocabularies have {sizes[0]} and {sizes[1]} tokens: "
            "only models with the same vocabulary can be compared."
        )


def check_same_vocabulary(a: Tokenizer, b: Tokenizer) -> None:
    """Raises: EdgertError when ids of one tokenizer mean something else in the other."""
    _check_sizes([a.n_vocab, b.n_vocab])
    for i, (x, y) in enumerate(zip(a.vocabulary.tokens, b.vocabulary.tokens, strict=True)):
        if x != y:
            raise EdgertError(
                f"Both vocabularies have {a.n_vocab} tokens, and token {i} is {x!r} in one, {y!r} in the other: "
                "only models with the same vocabulary can be compared."
            )
