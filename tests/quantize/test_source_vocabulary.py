"""Tokenizers of checkpoints: the GGUF file cuts text as tokenizer.json does, in edgert and in llama.cpp."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import sentencepiece_model, write_checkpoint, write_tokenizer

from edgert.errors import EdgertError, ModelFileError, UnsupportedFormatError
from edgert.quantize.checkpoint import pretokenizer
from edgert.quantize.checkpoint.sentencepiece import read_pieces
from edgert.quantize.checkpoint.vocabulary import vocabulary_keys
from edgert.quantize.convert import convert
from edgert.quantize.gguf_file import GGUFFile
from edgert.tokenizer import Tokenizer
from edgert.tokenizer.pretokenizer import RULES, splitter

tokenizers = pytest.importorskip("tokenizers")

SIGNS = "aàéß0129 \t\n\r\u00a0.,!?'\"-_<>|/中文かな한글😀👍🏽ñǅʔЖ"
WORDS = [
    *(
        "the",
        "lighthouse",
        "keeper",
        "counted",
        "ships",
        "I'll",
        "WE'VE",
        "don't",
        "12",
        "345",
        "6789",
        "1,000.50",
        "x+=1",
        "def",
        "f(x):",
        "//",
        "end",
        "Hello",
    ),
    *("\n\n", "\n", "\t", "", "  ", "    ", "two words", "<tool>", "<|im_end|>", "<end_of_turn>"),
    *("👩‍👩‍👧‍👦", "naïve", "Привет", "你好", "안녕"),
]


def texts(n: int = 400) -> Iterator[str]:
    rng = random.Random(5)
    for _ in range(n // 4):
        yield " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 12)))
        yield "".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 6)))
        yield "".join(rng.choice(SIGNS) for _ in range(rng.randrange(1, 30)))
        yield rng.choice(SIGNS + "  ") * rng.randrange(1, 40) + rng.choice(WORDS)


def tokenizer_of(path: Path) -> Tokenizer:
    with GGUFFile.open(path) as file:
        return Tokenizer.from_gguf(file)


def differences(gguf_path: Path, reference: Any, samples: list[str]) -> list[str]:
    tokenizer = tokenizer_of(gguf_path)
    return [
        text
        for text in samples
        if tokenizer.encode(text, parse_special=True, add_special=False)
        != reference.encode(text, add_special_tokens=False).ids
    ]


def test_the_draft_cuts_text_as_its_tokenizer_json(shared_dir: Path, tmp_path: Path) -> None:
    """Chats, prose and noise: every text gives the same ids."""
    folder = shared_dir / "models" / "smollm2-draft"
    convert(folder, tmp_path / "m.gguf")
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    prose = (shared_dir / "data" / "wikitext2-test.txt").read_text("utf-8").split("\n")[:500]
    with open(shared_dir / "data" / "heldout_chats.jsonl", encoding="utf-8") as lines:
        chats = [line for _, line in zip(range(100), lines, strict=False)]
    mixed = [*texts(), *prose, *chats]
    assert len(mixed) == 1000
    assert differences(tmp_path / "m.gguf", reference, mixed) == []


@pytest.mark.parametrize("name", ["llama", "qwen2", "smollm"])
def test_byte_level_tokenizers(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", tokenizer=name)
    convert(tmp_path / "hf", tmp_path / "m.gguf")
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    assert differences(tmp_path / "m.gguf", reference, list(texts())) == []
    with GGUFFile.open(tmp_path / "m.gguf") as file:
        assert file.get("tokenizer.ggml.pre", str) == {"llama": "llama-bpe"}.get(name, name)
        adds = file.get("tokenizer.ggml.add_bos_token", bool)
    assert adds == (name == "llama")
    ids = tokenizer_of(tmp_path / "m.gguf").encode("the ships")
    assert ids == reference.encode("the ships").ids  # with what is put around


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer.model", "both"])
@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_sentencepiece_tokenizers(name: str, file: str, tmp_path: Path) -> None:
    """From the merges alone, from the scores alone, or from both: the same ids."""
    folder = tmp_path / "hf"
    write_checkpoint(folder, tokenizer=name)
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if file != "tokenizer.json":
        (folder / "tokenizer.model").write_bytes(sentencepiece_model(384, add_space_prefix=name == "mistral"))
    if file == "tokenizer.model":
        document = json.loads((folder / "tokenizer.json").read_text())
        added = {token["content"]: token["id"] for token in document["added_tokens"] if not token["special"]}
        (folder / "added_tokens.json").write_text(json.dumps(added))
        (folder / "tokenizer.json").unlink()
    convert(folder, tmp_path / "m.gguf")
    # HF's Prepend puts its space before every stretch between special tokens, SentencePiece's way only before text
    samples = [text for text in texts() if "<" not in text and "▁" not in text and (name == "gemma" or text[:1] != " ")]
    assert len(samples) > 100
    assert differences(tmp_path / "m.gguf", reference, samples) == []
    with GGUFFile.open(tmp_path / "m.gguf") as opened:
        assert opened.get("tokenizer.ggml.add_space_prefix", bool) == (name == "mistral")
        types = opened.get("tokenizer.ggml.token_type", np.ndarray)
    assert np.bincount(types[6:262]).tolist() == [0, 0, 0, 0, 0, 0, 256]
    assert types[3] == 2


@pytest.mark.parametrize("tokenizer", ["llama", "qwen2", "smollm", "gemma", "mistral"])
def test_llama_cpp_cuts_text_the_same(tokenizer: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    write_checkpoint(tmp_path / "hf", tokenizer=tokenizer)
    convert(tmp_path / "hf", tmp_path / "m.gguf")
    theirs = llama_cpp.Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)
    ours = tokenizer_of(tmp_path / "m.gguf")
    for text in texts(200):
        wanted = theirs.tokenize(text.encode(), add_bos=True, special=True)
        assert ours.encode(text, parse_special=True) == wanted, text


def test_every_rule_has_its_fingerprint() -> None:
    """The table's names are those of edgert's rules that cut the sample that way, and no two rules share one."""
    found = {}
    for name, rule in RULES.items():
        found[name] = (pretokenizer.fingerprint(splitter(rule)), rule.whole_words)
    for key, name in pretokenizer.NAMES.items():
        assert found[name] == key
    patterns: dict[str, set[tuple[str, ...]]] = {}
    for name, (cuts, _) in found.items():
        patterns.setdefault(cuts, set()).add(RULES[name].patterns)
    alike = [rules for rules in patterns.values() if len(rules) > 1]
    for rules in alike:  # spelt differently, but cutting alike: on more than the sample
        cutters = [splitter(rule) for rule in RULES.values() if rule.patterns in rules]
        for text in texts():
            assert len({repr(cutter.pre_tokenize_str(text)) for cutter in cutters}) == 1
    assert len(alike) <= 1


def test_an_unknown_rule_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tokenizer="smollm")
    change(tmp_path / "tokenizer.json", pre_tokenizer={"type": "Whitespace"})
    with pytest.raises(UnsupportedFormatError, match="a rule that GGUF has no name for"):
        keys_of(tmp_path)
    change(tmp_path / "tokenizer.json", pre_tokenizer={"type": "Nonsense"})
    with pytest.raises(ModelFileError, match="its pre_tokenizer is not understood"):
        keys_of(tmp_path)


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def keys_of(
    folder: Path, n_vocab: int = 384, config: dict[str, Any] | None = None, notices: list[str] | None = None
) -> dict[str, Any]:
    keys = vocabulary_keys(folder, config or {}, n_vocab, [] if notices is None else notices)
    return {key.removeprefix("tokenizer.").removeprefix("ggml."): value.decode() for key, value in keys.items()}


def test_special_ids_and_ends(tmp_path: Path) -> None:
    """By the tokenizer's settings, then by config.json; the ends of a turn and of a message from generation_config."""
    write_tokenizer(tmp_path, "smollm")
    keys = keys_of(tmp_path, config={"bos_token_id": 7, "sep_token_id": 9, "cls_token_id": -1})
    assert {key: keys[key] for key in keys if key.endswith("_id")} == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 0,
        "seperator_token_id": 9,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0, 374]}))
    assert keys_of(tmp_path)["eot_token_id"] == 0
    change(
        tmp_path / "tokenizer.json", added_tokens=[*_specials(), {"id": 375, "content": "<|eom_id|>", "special": True}]
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 375, 374]}))
    keys = keys_of(tmp_path)
    assert (keys["eot_token_id"], keys["eom_token_id"]) == (374, 375)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert keys_of(tmp_path)["eos_token_id"] == 2
    (tmp_path / "special_tokens_map.json").unlink()
    assert keys_of(tmp_path)["eos_token_id"] == 2  # the first that generation_config names


def _specials() -> list[dict[str, Any]]:
    return [{"id": i, "content": text, "special": True} for i, text in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))]  # fmt: skip  # noqa: E501


def test_ids_beyond_the_table(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "smollm")
    added = [*_specials(), {"id": 400, "content": "<image>", "special": True}]
    change(tmp_path / "tokenizer.json", added_tokens=added)
    notices: list[str] = []
    keys = keys_of(tmp_path, config={"mask_token_id": 400}, notices=notices)
    assert "mask_token_id" not in keys
    assert len(keys["tokens"]) == 384
    assert any("'<image>'" in notice for notice in notices)
    with pytest.raises(ModelFileError, match=r"has a token with the id \d+, and the table of tokens has 300 rows"):
        keys_of(tmp_path, n_vocab=300)


def test_types_of_tokens(tmp_path: Path) -> None:
    """Special ones and those that look special steer; other added ones are text; unused ids are marked."""
    write_tokenizer(tmp_path, "smollm")
    extra = {375: "<|think|>", 376: "<pad>", 377: "plain▁text", 378: "<unused7>"}
    added = [{"id": id, "content": text, "special": False} for id, text in extra.items()]
    change(tmp_path / "tokenizer.json", added_tokens=[*_specials(), *added])
    keys = keys_of(tmp_path)
    types = keys["token_type"]
    assert [int(types[i]) for i in (0, 1, 2, 3, 375, 376, 377, 378, 379, 383)] == [3, 3, 3, 1, 3, 3, 4, 3, 5, 5]
    assert keys["tokens"].to_str()[377:380] == ["plain text", "<unused7>", "[PAD379]"]


def test_chat_templates(tmp_path: Path) -> None:
    """A file of its own wins over the settings, as in transformers; others keep their names."""
    write_tokenizer(tmp_path, "smollm")
    assert "im_start" in keys_of(tmp_path)["chat_template"]
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    change(tmp_path / "tokenizer_config.json", chat_template=templates)
    keys = keys_of(tmp_path)
    assert (keys["chat_template"], keys["chat_template.tool_use"]) == ("D", "T")
    assert keys["chat_templates"].to_str() == ["tool_use"]
    (tmp_path / "chat_template.jinja").write_bytes("grüße\r\n{{ x }}\n".encode())
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    keys = keys_of(tmp_path)
    assert (keys["chat_template"], keys["chat_template.rag"]) == ("grüße\r\n{{ x }}\n", "R")
    change(tmp_path / "tokenizer_config.json", chat_template=7)
    (tmp_path / "chat_template.jinja").unlink()
    assert "chat_template" not in keys_of(tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}')
    change(tmp_path / "tokenizer_config.json", chat_template=None)
    assert keys_of(tmp_path)["chat_template"] == "J"


def test_transformers_takes_the_same_template(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, "smollm")
    (tmp_path / "chat_template.jinja").write_text("other")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).chat_template
    assert keys_of(tmp_path)["chat_template"] == theirs


@pytest.mark.parametrize(
    ("model", "message", "kind"),
    [
        (
            {"type": "WordLevel", "vocab": {"a": 0}},
            "of the kind WordLevel.*BPE, WordPiece",
            UnsupportedFormatError,
        ),
        ({"type": "WordPiece", "vocab": {"a": 0}}, "normalizer.type is None", UnsupportedFormatError),
        ({"type": "WordPiece", "vocab": [["a", 0.0]]}, "no model with a vocabulary", ModelFileError),
        ({"type": "Unigram", "vocab": [["a", 0.0]], "byte_fallback": True}, "byte_fallback", UnsupportedFormatError),
        ({"type": "Unigram", "vocab": [["a"]]}, "no pair of text and score", ModelFileError),
        (None, "no model with a vocabulary", ModelFileError),
        ({"type": "BPE", "vocab": {"a": "0"}, "merges": []}, "the token 'a' has the id '0'", ModelFileError),
        ({"type": "BPE", "vocab": {"a": 0}, "merges": ["a"]}, "the merge 'a' is no pair", ModelFileError),
        ({"type": "BPE", "vocab": {"a": 0}, "merges": [["a", 3]]}, "is no pair", ModelFileError),
        ({"type": "BPE", "vocab": {"a": 0}, "merges": [["a b", "c"]]}, "merges spaces", UnsupportedFormatError),
    ],
)
def test_other_models_are_refused(tmp_path: Path, model: Any, message: str, kind: type[EdgertError]) -> None:
    write_tokenizer(tmp_path, "smollm")
    change(tmp_path / "tokenizer.json", model=model)
    with pytest.raises(kind, match=message):
        keys_of(tmp_path)


def test_merges_as_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "smollm")
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    before = keys_of(tmp_path)["merges"].to_bytes()
    document["model"]["merges"] = [" ".join(pair) for pair in document["model"]["merges"]]
    change(tmp_path / "tokenizer.json", **document)
    assert keys_of(tmp_path)["merges"].to_bytes() == before


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormatError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        keys_of(tmp_path)


def test_sentencepiece_files(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    whole = sentencepiece_model(384, True)
    path.write_bytes(whole)
    pieces = read_pieces(path)
    assert pieces.tokens[:4] == [b"<pad>", b"<eos>", b"<bos>", b"<unk>"]
    assert pieces.types[:7] == [3, 3, 3, 2, 3, 3, 6]
    assert pieces.scores[262:265] == [0.0, -1.0, -2.0]
    assert pieces.add_space_prefix
    path.write_bytes(sentencepiece_model(384, True, kind=1))
    with pytest.raises(UnsupportedFormatError, match="of the kind unigram"):
        read_pieces(path)
    for damaged in (b"", b"\n\x05abc", whole[:-3], b"\x0a" * 50, b"{}", whole[:100] + b"\xff" * 12 + whole[100:]):
        path.write_bytes(damaged)
        with pytest.raises(EdgertError):
            read_pieces(path)
