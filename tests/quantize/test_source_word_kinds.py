"""WordPiece and Unigram of checkpoints: the GGUF file's tokenizer gives the ids of tokenizer.json."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vocabularies
from vocabularies import random_texts, write_vocabulary

from edgert.errors import EdgertError, ModelFileError, UnsupportedFormatError
from edgert.quantize.checkpoint.vocabulary import vocabulary_keys
from edgert.quantize.gguf_file import GGUFFile
from edgert.tokenizer import Tokenizer

tokenizers = pytest.importorskip("tokenizers")


def converted(folder: Path, n_vocab: int) -> Tokenizer:
    """The tokenizer of a folder as a GGUF file has it."""
    values = vocabulary_keys(folder, {}, n_vocab, [])
    metadata: dict[str, Any] = {}
    for key, value in values.items():
        plain = value.decode()
        if isinstance(plain, np.ndarray):
            plain = plain.tobytes() if plain.dtype == np.uint8 else plain.tolist()
        metadata[key] = plain.to_str() if key.endswith(".tokens") else plain
    with GGUFFile.open(write_vocabulary(folder / "v.gguf", metadata, "bert")) as file:
        return Tokenizer.from_gguf(file)


def assert_same(tokenizer: Tokenizer, reference: Any, texts: list[str]) -> None:
    for text in texts:
        assert tokenizer.encode_whole(text) == reference.encode(text).ids, ascii(text)


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("form", ["tokenizer.json", "vocab.txt"])
def test_word_pieces(tmp_path: Path, form: str, lowercase: bool) -> None:
    reference, metadata = vocabularies.word_pieces(lowercase)
    n_vocab = len(metadata["tokenizer.ggml.tokens"])
    special = {f"{name.lower()}_token": f"[{name}]" for name in ("UNK", "CLS", "SEP", "PAD", "MASK")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special | {"do_lower_case": lowercase}))
    if form == "tokenizer.json":
        reference.save(str(tmp_path / form))
    else:
        words = [reference.id_to_token(i) for i in range(n_vocab)]
        (tmp_path / form).write_text("\n".join(words) + "\n", encoding="utf-8")
    assert_same(converted(tmp_path, n_vocab), reference, list(random_texts(300)))


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("model", "continuing_subword_prefix", "@@"),
        ("model", "max_input_chars_per_word", 20),
        ("normalizer", "clean_text", False),
        ("normalizer", "handle_chinese_chars", False),
        ("pre_tokenizer", "type", "Whitespace"),
    ],
)
def test_word_pieces_that_gguf_cannot_say(tmp_path: Path, part: str, key: str, value: Any) -> None:
    reference, _ = vocabularies.word_pieces(True)
    document = json.loads(reference.to_str())
    document[part][key] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(UnsupportedFormatError, match=f"{part}.{key} is"):
        converted(tmp_path, 2000)


def test_a_word_list_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(b"[PAD]\n\xff\n")
    with pytest.raises(ModelFileError, match="not UTF-8 at byte 6"):
        converted(tmp_path, 2000)


RULES = {"ﬁ": "f", "\t": " ", "\n": " ", "\u3000": " "}


@pytest.mark.parametrize("rules", [None, RULES], ids=["plain", "rules"])
def test_unigrams(tmp_path: Path, rules: dict[str, str] | None) -> None:
    reference, metadata = vocabularies.unigrams(True)
    document = json.loads(reference.to_str())
    steps = [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]
    if rules:
        blob = base64.b64encode(vocabularies.charsmap(rules)).decode()
        steps.insert(0, {"type": "Precompiled", "precompiled_charsmap": blob})
    document["normalizer"] = {"type": "Sequence", "normalizers": steps}
    document["post_processor"] = {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    tokenizer = converted(tmp_path, len(metadata["tokenizer.ggml.tokens"]))
    # Spaces at the ends are taken off by the file's Strip or by sentencepiece; here by hand.
    texts = [text.replace("▁", "").strip(" \t\n\u3000") for text in random_texts(300)]
    if not rules:
        texts += ["ﬁne \u3000x"]
    assert_same(tokenizer, tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), list(filter(None, texts)))


@pytest.mark.parametrize(
    ("normalizer", "message", "kind"),
    [
        ({"type": "Precompiled", "precompiled_charsmap": "%"}, "is no Base64", ModelFileError),
        ({"type": "Lowercase"}, "the step Lowercase", UnsupportedFormatError),
    ],
)
def test_unigrams_that_gguf_cannot_say(tmp_path: Path, normalizer: Any, message: str, kind: type[EdgertError]) -> None:
    document = json.loads(vocabularies.unigrams(True)[0].to_str())
    document["normalizer"] = normalizer
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(kind, match=message):
        converted(tmp_path, 2000)
    with pytest.raises(ModelFileError, match="belong to different models"):
        document["normalizer"] = None
        (tmp_path / "tokenizer.json").write_text(json.dumps(document))
        converted(tmp_path, 100)
