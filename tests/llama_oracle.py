"""llama.cpp as a judge: its logits and its tokens for a GGUF file; tests that ask skip without llama-cpp-python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def _imported() -> Any:
    """llama-cpp-python; the test that asks skips without it."""
    return pytest.importorskip("llama_cpp", reason="llama.cpp is the oracle: pip install llama-cpp-python")


def llama_cpp_logits(path: Path, tokens: Sequence[int]) -> np.ndarray:
    """llama.cpp's logits with plain kernels (no repacking) and a float32 cache."""
    llama_cpp = _imported()
    f32 = llama_cpp.GGML_TYPE_F32
    settings = {"type_k": f32, "type_v": f32, "flash_attn_type": 0}
    with _read(path, tokens, llama_cpp.llama_decode, n_ctx=256, **settings) as (model, context):
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (len(tokens), n_vocab)).copy()


def llama_cpp_states(path: Path, tokens: Sequence[int]) -> np.ndarray:
    """llama.cpp's last hidden states of an encoder, float32 (n, n_embd)."""
    llama_cpp = _imported()
    settings = {"embeddings": True, "pooling_type": 0, "flash_attn_type": 0}
    with _read(path, tokens, llama_cpp.llama_encode, n_ctx=512, **settings) as (model, context):
        n_embd = llama_cpp.llama_model_n_embd(model)
        return np.ctypeslib.as_array(llama_cpp.llama_get_embeddings(context), (len(tokens), n_embd)).copy()


@contextmanager
def _read(
    path: Path, tokens: Sequence[int], run: Callable[[Any, Any], int], *, n_ctx: int, **settings: Any
) -> Iterator[tuple[Any, Any]]:
    """llama.cpp's model and context after `run` has read the tokens; settings: the context's parameters."""
    llama_cpp = _imported()
    n = len(tokens)
    model_params = llama_cpp.llama_model_default_params()
    model_params.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    assert model, f"llama.cpp does not load {path}"
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
    for name, value in settings.items():
        setattr(params, name, value)
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(n, 0, 1)
    batch.n_tokens = n
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    assert run(context, batch) == 0
    yield model, context
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)


def llama_cpp_tokens(path: Path, text: str) -> list[int]:
    llama_cpp = _imported()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    out = (ctypes.c_int32 * 256)()
    data = text.encode()
    vocab = llama_cpp.llama_model_get_vocab(model)
    n = llama_cpp.llama_tokenize(vocab, data, len(data), out, len(out), True, False)
    llama_cpp.llama_model_free(model)
    return list(out[:n])
