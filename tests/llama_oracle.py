"""llama.cpp as a judge: its logits and its tokens for a GGUF file; tests that ask skip without llama-cpp-python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest


def llama_cpp_logits(path: Path, tokens: Sequence[int]) -> np.ndarray:
    """llama.cpp's logits with plain kernels (no repacking) and a float32 cache."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is the oracle: pip install llama-cpp-python")
    n = len(tokens)
    model_params = llama_cpp.llama_model_default_params()
    model_params.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    assert model, f"llama.cpp does not load {path}"
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    params.flash_attn_type = 0
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(n, 0, 1)
    batch.n_tokens = n
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    assert llama_cpp.llama_decode(context, batch) == 0
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (n, n_vocab)).copy()
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return logits


def llama_cpp_states(path: Path, tokens: Sequence[int]) -> np.ndarray:
    """llama.cpp's last hidden states of an encoder, float32 (n, n_embd)."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is the oracle: pip install llama-cpp-python")
    n = len(tokens)
    model_params = llama_cpp.llama_model_default_params()
    model_params.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    assert model, f"llama.cpp does not load {path}"
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.embeddings, params.pooling_type, params.flash_attn_type = True, 0, 0
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(n, 0, 1)
    batch.n_tokens = n
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    assert llama_cpp.llama_encode(context, batch) == 0
    n_embd = llama_cpp.llama_model_n_embd(model)
    states = np.ctypeslib.as_array(llama_cpp.llama_get_embeddings(context), (n, n_embd)).copy()
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return states


def llama_cpp_tokens(path: Path, text: str) -> list[int]:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is the oracle: pip install llama-cpp-python")
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    out = (ctypes.c_int32 * 256)()
    data = text.encode()
    vocab = llama_cpp.llama_model_get_vocab(model)
    n = llama_cpp.llama_tokenize(vocab, data, len(data), out, len(out), True, False)
    llama_cpp.llama_model_free(model)
    return list(out[:n])
