"""Tokenizers in other files than tokenizer.json: text is cut as by the tokenizer that their ranks were taken from."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint, write_tokenizer
from test_source_vocabulary import differences, keys_of, texts, tokenizer_of

from edgert.errors import EdgertError, ModelFileError, UnsupportedFormatError
from edgert.quantize.convert import convert
from edgert.quantize.gguf_file import GGUFFile

tokenizers = pytest.importorskip("tokenizers")
slow_tokenizers = pytest.importorskip("transformers.convert_slow_tokenizer", reason="it names the signs of bytes")

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def learned(folder: Path) -> tuple[dict[str, Any], list[bytes]]:
    """tokenizer.json of a folder without its special tokens, and the bytes of its tokens by rank."""
    document = json.loads((folder / "tokenizer.json").read_text())
    bytes_of = {sign: byte for byte, sign in slow_tokenizers.bytes_to_unicode().items()}
    vocab = {text: id - len(SPECIAL) for text, id in document["model"]["vocab"].items() if text not in SPECIAL}
    document["model"]["vocab"], document["added_tokens"] = vocab, []
    ordered = sorted(vocab, key=vocab.__getitem__)
    return document, [bytes(bytes_of[sign] for sign in text) for text in ordered]


def write_ranks(path: Path, ranks: list[bytes]) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
    path.write_text("".join(lines))


def test_ranks_of_hunyuan(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    write_checkpoint(folder, tokenizer="qwen2", vocab_size=390)
    document, ranks = learned(folder)
    reference = tokenizers.Tokenizer.from_str(json.dumps(document))
    write_ranks(folder / "hy.tiktoken", ranks)
    (folder / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "HYTokenizer", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    convert(folder, tmp_path / "m.gguf")
    assert differences(tmp_path / "m.gguf", reference, [text for text in texts() if "<" not in text]) == []
    with GGUFFile.open(tmp_path / "m.gguf") as file:
        assert file.get("tokenizer.ggml.pre", str) == "qwen2"
        assert file.get("tokenizer.ggml.eos_token_id", int) == len(ranks) + 3
        assert file.get("tokenizer.ggml.padding_token_id", int) == len(ranks) + 4
    ends = tokenizer_of(tmp_path / "m.gguf").encode("a<|bos|><|extra_2|>", parse_special=True, add_special=False)
    assert ends[1:] == [len(ranks) + 2, len(ranks) + 7]


def test_tekken(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    write_checkpoint(folder, tokenizer="qwen2")
    document, ranks = learned(folder)
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": TEKKEN}
    document["model"] |= {"vocab": {text: id + 2 for text, id in document["model"]["vocab"].items()}}
    document["model"]["ignore_merges"] = True
    reference = tokenizers.Tokenizer.from_str(json.dumps(document))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    entries = [{"rank": i, "token_bytes": base64.b64encode(token).decode()} for i, token in enumerate(ranks)]
    spare = [{"rank": len(ranks) + i, "token_bytes": base64.b64encode(b"never%d" % i).decode()} for i in range(3)]
    config = {"pattern": TEKKEN, "default_vocab_size": len(ranks) + 2, "default_num_special_tokens": 2}
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(("<s>", "</s>"))]
    whole = {"config": config, "vocab": entries + spare, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(whole))
    convert(folder, tmp_path / "m.gguf")
    assert differences(tmp_path / "m.gguf", reference, [text for text in texts() if "<" not in text]) == []
    assert tokenizer_of(tmp_path / "m.gguf").encode("</s>", parse_special=True, add_special=False) == [1]
    for damage in ({"config": []}, {"vocab": entries[1:]}, {"vocab": 7}, {"special_tokens": [3]}):
        (folder / "tekken.json").write_text(json.dumps(whole | damage))
        with pytest.raises(ModelFileError, match=r"tekken\.json"):
            keys_of(folder)


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_pairs_in_two_files(kind: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "qwen2")
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    before = keys_of(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(document["model"]["vocab"]))
    merges = [" ".join(pair) for pair in document["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": kind}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text(json.dumps({t["content"]: t["id"] for t in document["added_tokens"]}))
    found = keys_of(tmp_path)
    assert found["pre"] == {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}[kind]
    assert found["eos_token_id"] == before["eos_token_id"]
    for key in ("tokens", "merges"):
        assert found[key].to_bytes() == before[key].to_bytes()


def test_what_is_in_code_alone_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "qwen2")
    _, ranks = learned(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    for name in ("qwen.tiktoken", "tokenizer.model"):
        write_ranks(tmp_path / name, ranks)
        with pytest.raises(UnsupportedFormatError, match=r"Python code.*TikTokenConverter") as caught:
            keys_of(tmp_path)
        assert name in str(caught.value)
        (tmp_path / name).unlink()
    settings = {"tokenizer_class": "MyTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(UnsupportedFormatError, match="make the first with transformers"):
        keys_of(tmp_path)


@pytest.mark.parametrize("content", [b"", b"AA==\n", b"AA== 0\n", b"!! 0\n", b"\xff 0\n", b"AA== 0 0\n"])
def test_damaged_ranks(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "hy.tiktoken").write_bytes(content)
    with pytest.raises(EdgertError, match=r"hy\.tiktoken"):
        keys_of(tmp_path)
