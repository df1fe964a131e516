"""Every rule that cuts words, WordPiece and Unigram, against llama.cpp and Hugging Face's `tokenizers`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vocabularies
from vocabularies import random_texts, write_vocabulary

from edgert.errors import ModelFileError
from edgert.quantize.gguf_file import GGUFFile
from edgert.tokenizer import Tokenizer
from edgert.tokenizer.charsmap import Charsmap
from edgert.tokenizer.pretokenizer import RULES

pytest.importorskip("tokenizers")

SHARED = ("deepseek-coder", "falcon", "gpt-2", "llama-spm", "phi-3", "starcoder")
SOURCE = ("bert-bge", "command-r", "deepseek-llm", "gemma-4", "llama-bpe", "mpt", "qwen2", "qwen35", "refact")
WITHOUT_CASES = ("aquila", "baichuan", "gpt-neox", "nomic-bert-moe")
# llama.cpp writes these expressions in another way, which differs where letters are not ASCII, where accents
# stand alone (the first), or between white space of other scripts (the second). Ours are the models' own.
CASED = ("tekken", "gpt-4o", "granite-embed-multi-97m", "kimi-k2", "youtu", "tiny_aya")
WIDE_SPACES = ("deepseek-llm", "deepseek-coder")
# What the models' own tokenizer.json say, for rules that llama.cpp writes in another way.
O200K_LETTERS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+X"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*X"
)
O200K_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ORIGINAL = {
    "gpt-4o": f"{O200K_LETTERS}|\\p{{N}}{{1,3}}|{O200K_REST}".replace("X", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),
    "tekken": f"{O200K_LETTERS}|\\p{{N}}|{O200K_REST}".replace("X", ""),
}


def tokenizer_of(path: Path) -> Tokenizer:
    with GGUFFile.open(path) as file:
        return Tokenizer.from_gguf(file)


def llama_cpp_of(path: Path) -> Any:
    return pytest.importorskip("llama_cpp").Llama(str(path), vocab_only=True, verbose=False)


def distinct_rules() -> list[str]:
    names = {rule: name for name, rule in reversed(RULES.items()) if not rule.raw}
    return sorted(names.values())


def assert_equal(texts: Iterable[str], ours: Callable[[str], list[int]], theirs: Callable[[str], list[int]]) -> None:
    for text in texts:
        assert ours(text) == theirs(text), ascii(text)


def assert_equals_llama_cpp(path: Path, texts: Iterable[str]) -> None:
    tokenizer, reference = tokenizer_of(path), llama_cpp_of(path)
    assert_equal(
        texts,
        lambda text: tokenizer.encode(text, add_special=False),
        lambda text: list(reference.tokenize(text.encode(), add_bos=False)),
    )


@pytest.mark.parametrize("name", SOURCE)
def test_cases_of_the_source_package(llama_cpp_source: Path, name: str) -> None:
    path = llama_cpp_source / "models" / f"ggml-vocab-{name}.gguf"
    tokenizer = tokenizer_of(path)
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    wanted = [[int(i) for i in line.split()] for line in Path(f"{path}.out").read_text().split("\n")]
    if name == "gemma-4":  # its last line ends, the others' do not
        assert wanted.pop() == []
    assert len(texts) == len(wanted) > 40
    for text, ids in zip(texts, wanted, strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, ascii(text)


@cache
def across_words() -> dict[str, Any]:
    return vocabularies.pairs_across_words()


def rule_file(folder: Path, name: str) -> Path:
    return write_vocabulary(folder / f"{name}.gguf", across_words() | {"tokenizer.ggml.pre": name})


@pytest.mark.parametrize("name", sorted(set(distinct_rules()) - {*CASED, *WIDE_SPACES}))
def test_rules_equal_llama_cpp(tmp_path: Path, name: str) -> None:
    assert_equals_llama_cpp(rule_file(tmp_path, name), random_texts(60))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(distinct_rules()) - set(CASED)))
def test_rules_equal_llama_cpp_on_ten_thousand_texts(tmp_path: Path, name: str) -> None:
    texts = random_texts(10_000)
    if name in WIDE_SPACES:
        texts = (text for text in texts if not any(c.isspace() and c > "\x7f" for c in text))
    assert_equals_llama_cpp(rule_file(tmp_path, name), texts)


def assert_equals_original(path: Path, name: str, texts: Iterable[str]) -> None:
    from tokenizers import Regex, models, pre_tokenizers
    from tokenizers import Tokenizer as HFTokenizer

    tokens = across_words()["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in across_words()["tokenizer.ggml.merges"]]
    reference = HFTokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=RULES[name].whole_words)
    )
    split = pre_tokenizers.Split(Regex(ORIGINAL[name]), "isolated")
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer = tokenizer_of(path)
    assert_equal(
        texts, lambda text: tokenizer.encode(text, add_special=False), lambda text: list(reference.encode(text).ids)
    )


@pytest.mark.parametrize("name", ORIGINAL)
def test_cased_rules_equal_the_originals(tmp_path: Path, name: str) -> None:
    assert_equals_original(rule_file(tmp_path, name), name, random_texts(300))


@pytest.mark.slow
@pytest.mark.parametrize("name", ORIGINAL)
def test_cased_rules_equal_the_originals_on_ten_thousand_texts(tmp_path: Path, name: str) -> None:
    assert_equals_original(rule_file(tmp_path, name), name, random_texts(10_000))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHARED, *SOURCE, *WITHOUT_CASES])
def test_real_vocabularies_on_ten_thousand_texts(request: pytest.FixtureRequest, name: str) -> None:
    if name == "bert-bge":
        pytest.skip("llama.cpp drops Hangul's vowels and has no longest word: see the test with `tokenizers`")
    if name in SHARED:
        folder = request.getfixturevalue("shared_dir") / "cases" / "vocab"
    else:
        folder = request.getfixturevalue("llama_cpp_source") / "models"
    path = folder / f"ggml-vocab-{name}.gguf"
    tokenizer = tokenizer_of(path)
    pieces = [tokenizer.piece(i * 7919 % tokenizer.n_vocab).decode(errors="ignore") for i in range(3000)]
    texts = random_texts(10_000, pieces)
    if name in WIDE_SPACES:
        texts = (text for text in texts if not any(c.isspace() and c > "\x7f" for c in text))
    assert_equals_llama_cpp(path, texts)


def word_pieces(folder: Path, lowercase: bool) -> tuple[Path, Any]:
    reference, metadata = vocabularies.word_pieces(lowercase)
    return write_vocabulary(folder / "word-pieces.gguf", metadata, "bert"), reference


def assert_word_pieces(folder: Path, lowercase: bool, texts: Iterable[str]) -> None:
    path, reference = word_pieces(folder, lowercase)
    tokenizer = tokenizer_of(path)
    assert_equal(texts, tokenizer.encode_whole, lambda text: list(reference.encode(text).ids))


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_pieces_equal_hugging_face(tmp_path: Path, lowercase: bool) -> None:
    assert_word_pieces(tmp_path, lowercase, random_texts(500))


@pytest.mark.slow
@pytest.mark.parametrize("lowercase", [True, False])
def test_word_pieces_equal_hugging_face_on_ten_thousand_texts(tmp_path: Path, lowercase: bool) -> None:
    assert_word_pieces(tmp_path, lowercase, random_texts(10_000))


def test_word_pieces_equal_llama_cpp(tmp_path: Path) -> None:
    path, _ = word_pieces(tmp_path, True)
    texts = [
        "Hello World, don't  panic!\n\n12 x1y",
        "Straße naïve CamelCase",
        "你好世界 Привет мир",
        "<[MASK]> [CLS]",
        "",
    ]
    assert_equals_llama_cpp(path, texts)
    reference = llama_cpp_of(path)
    assert tokenizer_of(path).encode_whole("Hello") == reference.tokenize(b"Hello", add_bos=True, special=False)


def test_word_pieces_come_back(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(word_pieces(tmp_path, True)[0])
    ids = tokenizer.encode_whole("Hello  WORLD don't")
    assert ids[0] == 2 and ids[-1] == 3 and 1 not in ids
    assert tokenizer.decode(ids) == "hello world don ' t"


def unigrams(folder: Path, merge_spaces: bool, rules: dict[str, str] | None = None) -> tuple[Path, Any]:
    reference, metadata = vocabularies.unigrams(merge_spaces, rules)
    return write_vocabulary(folder / "unigrams.gguf", metadata, "bert"), reference


def assert_unigrams(folder: Path, merge_spaces: bool, texts: Iterable[str]) -> None:
    path, reference = unigrams(folder, merge_spaces)
    tokenizer = tokenizer_of(path)
    # `tokenizers` puts no space before a text that begins with its mark, sentencepiece does.
    texts = (text.replace("▁", "") if merge_spaces else text.strip(" ▁") for text in texts)
    assert_equal(
        filter(str.strip, texts),
        lambda text: tokenizer.encode(text, add_special=False),
        lambda text: list(reference.encode(text).ids),
    )


@pytest.mark.parametrize("merge_spaces", [True, False])
def test_unigrams_equal_hugging_face(tmp_path: Path, merge_spaces: bool) -> None:
    assert_unigrams(tmp_path, merge_spaces, random_texts(500))


@pytest.mark.slow
@pytest.mark.parametrize("merge_spaces", [True, False])
def test_unigrams_equal_hugging_face_on_ten_thousand_texts(tmp_path: Path, merge_spaces: bool) -> None:
    assert_unigrams(tmp_path, merge_spaces, random_texts(10_000))


RULES_OF_TEXT = {pair[:-1]: pair[-1] for pair in ("①1", "e\u0301é", "\t ", "\n ", "\u3000 ", "ＡＢa", "ＡA", "ﬁf")} | {
    "\x7f": ""
}


@pytest.mark.parametrize("rules", [None, RULES_OF_TEXT], ids=["plain", "rules"])
@pytest.mark.parametrize("merge_spaces", [True, False])
def test_unigrams_equal_llama_cpp(tmp_path: Path, merge_spaces: bool, rules: dict[str, str] | None) -> None:
    path, _ = unigrams(tmp_path, merge_spaces, rules)
    texts = ["ﬁe\u0301e\u0301\u0301\tＡＢＡＡＢ①", "", " ", "   a  b ", *random_texts(300)]
    assert_equals_llama_cpp(path, texts)


@pytest.mark.slow
@pytest.mark.parametrize("rules", [None, RULES_OF_TEXT], ids=["plain", "rules"])
@pytest.mark.parametrize("merge_spaces", [True, False])
def test_unigrams_equal_llama_cpp_on_ten_thousand_texts(
    tmp_path: Path, merge_spaces: bool, rules: dict[str, str] | None
) -> None:
    path, _ = unigrams(tmp_path, merge_spaces, rules)
    assert_equals_llama_cpp(path, random_texts(10_000))


def test_unigrams_without_scores_are_refused(tmp_path: Path) -> None:
    _, metadata = vocabularies.unigrams(True)
    path = write_vocabulary(tmp_path / "model.gguf", metadata | {"tokenizer.ggml.scores": None}, "bert")
    with pytest.raises(ModelFileError, match=r"lacks the key 'tokenizer\.ggml\.scores'"):
        tokenizer_of(path)


def test_rules_that_lead_in_circles_end() -> None:
    units = np.zeros(1024, "<u4")
    units[0] = 256 << 10
    units[256 ^ ord("a")] = ord("a") << 10 | ord("a")  # a's children are where a is
    rules = Charsmap(units.nbytes.to_bytes(4, "little") + units.tobytes() + b"x\0")
    started = time.process_time()
    assert rules.normalize("a" * 20_000) == "a" * 20_000
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "damage",
    [
        *(b"", b"\x04\0\0\0", b"\xff\xff\xff\xff1234", b"\x04\0\0\0\xff\xff\xff\xff\0"),
        b"\x04\0\0\0\0\0\0\0" + b"a" * 1025 + b"\0",
    ],
)
def test_damaged_rules_of_unigrams_are_refused(tmp_path: Path, damage: bytes) -> None:
    _, metadata = vocabularies.unigrams(True, RULES_OF_TEXT)
    metadata["tokenizer.ggml.precompiled_charsmap"] = damage or b"\0"
    path = write_vocabulary(tmp_path / "damaged.gguf", metadata, "bert")
    with pytest.raises(ModelFileError, match="precompiled_charsmap is damaged"):
        tokenizer_of(path)


HOSTILE = [
    *("\n" * 50_000, "\r\n" * 25_000, " " * 100_000, "a" * 200_000),
    *("1" * 200_000, "中" * 100_000, "e\u0301" * 50_000),
]


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_hostile_texts_are_quick(tmp_path: Path, kind: str) -> None:
    path = (word_pieces(tmp_path, True) if kind == "bert" else unigrams(tmp_path, True, RULES_OF_TEXT))[0]
    tokenizer = tokenizer_of(path)
    started = time.process_time()
    for text in HOSTILE:
        tokenizer.encode(text)
    assert time.process_time() - started < 10


@pytest.mark.slow
@pytest.mark.parametrize("name", distinct_rules())
def test_a_million_characters_without_spaces(tmp_path: Path, name: str) -> None:
    tokenizer = tokenizer_of(rule_file(tmp_path, name))
    started = time.process_time()
    for sign in ("ab", "1", "\n", "="):
        tokenizer.encode(sign * (1_000_000 // len(sign)))
    assert time.process_time() - started < 60
