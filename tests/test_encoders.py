"""Encoders: tiny random BertModels of transformers, converted, against transformers and llama.cpp; embeddings of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vocabularies
from numpy.typing import NDArray

import edgert
from edgert.errors import ContextFullError, RequestError
from edgert.quantize.convert import convert

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXTS = [
    "Hello world",
    "don't panic: 123456 is 3.14",
    "Привет мир, 你好世界 naïve",
    "a",
    "",
    "Hello " * 40 + "world",
    "foo_bar CamelCase x1y " * 30,
]


def checkpoint(folder: Path, pooling: str = "", seed: int = 0) -> tuple[Any, Any]:
    """A tiny BertModel with its tokenizer in a folder; returns both."""
    tokenizer, metadata = vocabularies.word_pieces(True)
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=512,
        hidden_act="gelu",
        initializer_range=0.2,
    )
    model = transformers.BertModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "LayerNorm" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {f"{name.lower()}_token": f"[{name}]" for name in ("UNK", "CLS", "SEP", "PAD", "MASK")}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    if pooling:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return model, tokenizer


def states(model: Any, ids: list[int]) -> NDArray[np.float32]:
    with torch.no_grad():
        found: NDArray[np.float32] = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    return found


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("bert")
    model, tokenizer = checkpoint(folder / "hf", "cls_token")
    convert(folder / "hf", folder / "bert.gguf", "F32")
    return folder / "bert.gguf", model, tokenizer


def test_equals_transformers(bert: tuple[Path, Any, Any]) -> None:
    path, reference, tokenizer = bert
    with edgert.load(path, n_threads=1, backend="cpu") as model:
        assert model.pooling == "cls"
        for text in TEXTS:
            ids = tokenizer.encode(text).ids
            wanted = states(reference, ids)
            for pooling, row in (("cls", wanted[0]), ("last", wanted[-1]), ("mean", wanted.mean(0))):
                found = model.embed(text, pooling, normalize=False)  # type: ignore[arg-type]
                assert np.abs(found - row).max() < 5e-3, text
                cosine = found @ row / np.linalg.norm(found) / np.linalg.norm(row)
                assert cosine > 1 - 1e-5, text
