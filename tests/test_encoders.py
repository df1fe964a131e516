"""Encoders against transformers and llama.cpp: a tiny random BertModel, converted, and a tiny nomic-bert."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vocabularies
from llama_oracle import llama_cpp_states
from numpy.typing import NDArray
from tiny import write_gguf

import edgert
from edgert.backends.base import Batch
from edgert.errors import ContextFullError, ModelFileError, RequestError, UnsupportedFormatError
from edgert.generation import Reading
from edgert.quantize.convert import convert
from edgert.quantize.gguf_file import GGUFFile

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXTS = [
    "Hello world",
    "don't panic: 123456 is 3.14",
    "Привет мир, 你好世界 naïve",
    "a",
    "",
    "Hello " * 40 + "world",
    "foo_bar CamelCase x1y " * 20,
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
    write_word_pieces(folder, tokenizer)
    if pooling:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return model, tokenizer


def write_word_pieces(folder: Path, tokenizer: Any) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {f"{name.lower()}_token": f"[{name}]" for name in ("UNK", "CLS", "SEP", "PAD", "MASK")}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def states(model: Any, ids: list[int]) -> NDArray[np.float32]:
    with torch.no_grad():
        found: NDArray[np.float32] = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    return found


def embedded(path: Path, text: str, pooling: str) -> NDArray[np.float32]:
    with edgert.load(path, n_threads=1, backend="cpu") as model:
        return model.embed(text, pooling, normalize=False)  # type: ignore[arg-type]


def assert_close(found: NDArray[np.float32], wanted: NDArray[np.float32], most: float, cosine: float) -> None:
    assert np.abs(found - wanted).max() < most
    assert found @ wanted / np.linalg.norm(found) / np.linalg.norm(wanted) > 1 - cosine


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("bert")
    model, tokenizer = checkpoint(folder / "hf", "cls_token")
    convert(folder / "hf", folder / "bert.gguf", "F32")
    return folder / "bert.gguf", model, tokenizer


def test_bert_equals_transformers(bert: tuple[Path, Any, Any]) -> None:
    """Keys and values are held in half precision, all else in float32."""
    path, reference, tokenizer = bert
    with edgert.load(path, n_threads=1, backend="cpu") as model:
        assert model.pooling == "cls"
        for text in TEXTS:
            wanted = states(reference, tokenizer.encode(text).ids)
            for pooling, row in (("cls", wanted[0]), ("last", wanted[-1]), ("mean", wanted.mean(0))):
                found = model.embed(text, pooling, normalize=False)  # type: ignore[arg-type]
                assert_close(found, row, 5e-3, 1e-5)


def test_texts_of_one_call_share_steps_and_equal_transformers(bert: tuple[Path, Any, Any]) -> None:
    path, reference, tokenizer = bert
    texts = [*TEXTS[:5], "Hello " * 40, TEXTS[6]]
    with edgert.load(path, n_threads=1, backend="cpu", n_parallel=7, n_cached=4096, window=10.0) as model:
        usual, sizes = model.backend.states, []

        def counted(batch: Batch) -> NDArray[np.float32]:
            sizes.append(np.unique(batch.sequences, return_counts=True)[1].tolist())
            return usual(batch)

        model.backend.states = counted  # type: ignore[method-assign]
        found = model.embed(texts, "mean", normalize=False)
    lengths = [len(tokenizer.encode(text).ids) for text in texts]
    assert sum(lengths) > 512 >= sum(lengths[:-1])  # what a step takes
    assert sizes == [lengths[:-1], lengths[-1:]]
    for text, row in zip(texts, found, strict=True):
        assert_close(row, states(reference, tokenizer.encode(text).ids).mean(0), 5e-3, 1e-5)


def test_a_text_that_fails_leaves_the_others(bert: tuple[Path, Any, Any]) -> None:
    with edgert.load(bert[0], n_threads=1, backend="cpu", n_parallel=3, n_cached=4096, window=10.0) as model:
        ids = [model.tokenizer.encode_whole(text) for text in TEXTS[:3]]
        usual = model.backend.states

        def failing(batch: Batch) -> NDArray[np.float32]:
            if ids[1][1] in batch.tokens:
                raise OSError("fault")
            return usual(batch)

        model.backend.states = failing  # type: ignore[method-assign]
        tasks = [Reading(np.array(one, np.int32)) for one in ids]
        for task in tasks:
            model._engine.submit(task)
        first, second, third = (task.output.get() for task in tasks)
        assert isinstance(second, OSError)
    for text, found in ((TEXTS[0], first), (TEXTS[2], third)):
        assert isinstance(found, np.ndarray)
        wanted = states(bert[1], bert[2].encode(text).ids).mean(0)
        assert_close(found.mean(0), wanted, 5e-3, 1e-5)


def test_bert_equals_llama_cpp(bert: tuple[Path, Any, Any]) -> None:
    """Its gelu is the tanh form, where BERT's is the exact one."""
    path, _, tokenizer = bert
    with edgert.load(path, n_threads=1, backend="cpu") as model:
        for text in TEXTS[:4]:
            wanted = llama_cpp_states(path, tokenizer.encode(text).ids)
            assert_close(model.embed(text, "mean", normalize=False), wanted.mean(0), 2e-2, 1e-4)


def test_few_bits(bert: tuple[Path, Any, Any], tmp_path: Path) -> None:
    from edgert.quantize.quantizer import quantize

    path, reference, tokenizer = bert
    quantize(path, tmp_path / "q8.gguf", budget="Q8_0", calibration=())
    with GGUFFile.open(tmp_path / "q8.gguf") as file:  # llama.cpp can add no other type
        assert file.tensor("token_types.weight").format.name == "F32"
    wanted = states(reference, tokenizer.encode(TEXTS[2]).ids).mean(0)
    assert_close(embedded(tmp_path / "q8.gguf", TEXTS[2], "mean"), wanted, 0.2, 2e-3)


def test_xlm_roberta_equals_transformers(tmp_path: Path) -> None:
    """BERT whose table of positions begins with two rows of padding (BGE-M3, multilingual E5)."""
    tokenizer, metadata = vocabularies.word_pieces(True)
    torch.manual_seed(2)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    n_vocab = len(metadata["tokenizer.ggml.tokens"])
    config = transformers.XLMRobertaConfig(
        vocab_size=n_vocab, max_position_embeddings=130, type_vocab_size=1, initializer_range=0.2, **sizes
    )
    model = transformers.XLMRobertaModel(config).eval()
    model.save_pretrained(tmp_path / "hf")
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    convert(tmp_path / "hf", tmp_path / "m.gguf", "F32")
    ids = np.random.default_rng(6).integers(5, n_vocab, 128).tolist()  # none is padding, which has no position
    with edgert.load(tmp_path / "m.gguf", n_threads=1, backend="cpu") as loaded:
        assert loaded.n_ctx == 128
        for n in (3, 70, 128):
            assert_close(loaded.embed(ids[:n], "last", normalize=False), states(model, ids[:n])[-1], 5e-3, 1e-5)


def test_what_an_encoder_does_not_do(bert: tuple[Path, Any, Any]) -> None:
    with edgert.load(bert[0], n_threads=1, backend="cpu") as model:
        with pytest.raises(RequestError, match="is an encoder"):
            model.generate("Hello")
        with pytest.raises(RequestError, match="is an encoder"):
            model.logits("Hello")
        with pytest.raises(ContextFullError):
            model.embed("Hello " * 600)
        for odd in (None, 3, float("nan"), {"a": 1}):
            with pytest.raises(RequestError, match="must be a text, a list of texts or a list of ids"):
                model.embed(odd)  # type: ignore[arg-type]
        together = model.embed(["Hello", "world"])
        assert np.allclose(together[1], model.embed("world"), atol=1e-6)


def test_nomic_bert_equals_llama_cpp(tmp_path: Path) -> None:
    """Rotation, a gate, fused q, k and v, no biases."""
    tokenizer, metadata = vocabularies.word_pieces(True)
    n_vocab, n_embd, n_ff = len(metadata["tokenizer.ggml.tokens"]), 64, 128
    rng = np.random.default_rng(3)

    def noise(*shape: int) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) / 8).astype(np.float32)

    weights = {"token_embd.weight": noise(n_vocab, n_embd), "token_types.weight": noise(2, n_embd)}
    norms = ["token_embd_norm"]
    for i in range(2):
        weights |= {
            f"blk.{i}.attn_qkv.weight": noise(3 * n_embd, n_embd),
            f"blk.{i}.attn_output.weight": noise(n_embd, n_embd),
            f"blk.{i}.ffn_gate.weight": noise(n_ff, n_embd),
            f"blk.{i}.ffn_up.weight": noise(n_ff, n_embd),
            f"blk.{i}.ffn_down.weight": noise(n_embd, n_ff),
        }
        norms += [f"blk.{i}.attn_output_norm", f"blk.{i}.layer_output_norm"]
    for name in norms:
        weights |= {f"{name}.weight": 1 + noise(n_embd), f"{name}.bias": noise(n_embd)}
    sizes = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "attention.head_count": 4,
        "attention.layer_norm_epsilon": 1e-12,
        "attention.causal": False,
        "pooling_type": 1,
        "rope.freq_base": 1000.0,
    }
    metadata |= {f"nomic-bert.{key}": value for key, value in sizes.items()}
    path = write_gguf(tmp_path / "nomic.gguf", "nomic-bert", weights, metadata)
    for text in TEXTS[:3]:
        wanted = llama_cpp_states(path, tokenizer.encode(text).ids)
        assert_close(embedded(path, text, "last"), wanted[-1], 1e-2, 1e-4)


NOMIC = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
# As the repository of nomic-embed-text-v1.5 calls them; it was trained on 2,048 positions.
HUB_NOMIC = {
    "architectures": ["NomicBertModel"],
    "model_type": "nomic_bert",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 128,
    "n_positions": 8192,
    "max_trained_positions": 2048,
    "activation_function": "swiglu",
    "layer_norm_epsilon": 1e-12,
    "causal": False,
    "prenorm": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "type_vocab_size": 2,
    "moe_every_n_layers": 0,
}


@pytest.fixture(scope="module")
def nomic(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """The folder of a tiny NomicBertModel, the model and its tokenizer; the table of tokens is longer than the list."""
    folder = tmp_path_factory.mktemp("nomic") / "hf"
    tokenizer, metadata = vocabularies.word_pieces(True)
    torch.manual_seed(4)
    n_vocab = len(metadata["tokenizer.ggml.tokens"]) + 6
    config = transformers.NomicBertConfig(vocab_size=n_vocab, initializer_range=0.2, **NOMIC)
    model = transformers.NomicBertModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name.lower():
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    write_word_pieces(folder, tokenizer)
    return folder, model, tokenizer


@pytest.mark.parametrize("spelling", ["transformers", "hub"])
def test_nomic_bert_equals_transformers(nomic: tuple[Path, Any, Any], spelling: str, tmp_path: Path) -> None:
    folder, reference, tokenizer = nomic
    source = tmp_path / "hf"
    shutil.copytree(folder, source)
    if spelling == "hub":
        n_vocab = reference.config.vocab_size
        (source / "config.json").write_text(json.dumps({**HUB_NOMIC, "vocab_size": n_vocab}))
    convert(source, tmp_path / "m.gguf", "F32")
    with edgert.load(tmp_path / "m.gguf", n_threads=1, backend="cpu") as model:
        assert model.n_ctx == 2048
        for text in TEXTS[:3]:
            ids = tokenizer.encode(text).ids
            wanted = states(reference, ids)
            assert_close(model.embed(text, "mean", normalize=False), wanted.mean(0), 5e-3, 1e-5)
            assert_close(wanted[-1], llama_cpp_states(tmp_path / "m.gguf", ids)[-1], 1e-2, 1e-4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rotary_emb_interleaved": True}, "rotary_emb_interleaved is True"),
        ({"rotary_emb_fraction": 0.5}, "rotates a part of each head"),
        ({"activation_function": "geglu"}, "the activation is 'geglu'"),
        ({"prenorm": True}, "prenorm is True"),
        ({"moe_every_n_layers": 2}, "moe_every_n_layers is 2"),
    ],
)
def test_other_encoders_of_that_class_are_refused(
    nomic: tuple[Path, Any, Any], change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Such as nomic-embed-text-v2-moe."""
    shutil.copytree(nomic[0], tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(HUB_NOMIC | change))
    with pytest.raises(UnsupportedFormatError, match=says):
        convert(tmp_path / "hf", tmp_path / "m.gguf", "F32")


def test_a_decoder_that_embeds_reads_its_end_token(tmp_path: Path, tiny_model: Any) -> None:
    """As Qwen3-Embedding wants it: the state of the end token, which the tokenizer puts there."""
    metadata = {"qwen3.pooling_type": 3, "tokenizer.ggml.add_eos_token": True}
    with edgert.load(tiny_model("qwen3", metadata=metadata), n_threads=1, backend="cpu") as model:
        ids = model.tokenizer.encode("hello world")
        assert model.pooling == "last"
        assert np.array_equal(model.embed("hello world"), model.embed([*ids, model.tokenizer.eos_id], "last"))
        assert model.tokenize("hello world") == ids


def test_a_pooling_that_nobody_knows_is_refused(tiny_model: Any) -> None:
    with pytest.raises(ModelFileError, match=r"qwen3\.pooling_type is 9, and must be 0 to 4"):
        edgert.load(tiny_model("qwen3", metadata={"qwen3.pooling_type": 9}), n_threads=1, backend="cpu")
