"""Tokenizers against llama.cpp, against Hugging Face's `tokenizers`, and against the ids that models need."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st

from edgert.errors import ContextFullError, ModelFileError, UnsupportedFormatError
from edgert.quantize.gguf_file import GGUFFile
from edgert.tokenizer import Tokenizer, limit, pretokenizer
from edgert.tokenizer.merging import merge
from edgert.tokenizer.pretokenizer import RULES, splitter

CASES = ["deepseek-coder", "falcon", "gpt-2", "llama-spm", "phi-3", "starcoder"]
TEXTS = [
    *("word" + "\n" * n + "next" for n in range(1, 7)),
    "\t\t\t\t\t\ttest",
    "a  b",
    "def f(x):\n    if x:\n        return  x\n",
    "Crème brûlée — 456 🙂",
    "Cre\u0300me bru\u0302le\u0301e — 456 🙂",
    "Tōkyō, nǚ, Ångström",
    "To\u0304kyo\u0304, nu\u0308\u030c, A\u030angstro\u0308m",
    "don't DON'T we'll I'd 's",
    "1234567890 3.14 ½ ²",
    "你好，世界。こんにちは 한국어",
    "👩‍👩‍👧‍👦🏽 \u200b\ufeff",
    "line\r\nline\r\n\r\n",
    " ",
    "   leading and trailing   ",
    "<|im_end|><end_of_turn><unk><0x0A>[INST]",
    "<table><b>html</b></table>\t\t<unused7>",
]


def tokenizer_of(path: Path) -> Tokenizer:
    with GGUFFile.open(path) as file:
        return Tokenizer.from_gguf(file)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return tokenizer_of(smollm2_path)


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> Tokenizer:
    return tokenizer_of(gemma3_path)


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def real(request: pytest.FixtureRequest) -> Tokenizer:
    result: Tokenizer = request.getfixturevalue(request.param)
    return result


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def real_path(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"{request.param}_path")
    return path


@pytest.mark.parametrize("name", CASES)
def test_case_vocabularies(shared_dir: Path, name: str) -> None:
    path = shared_dir / "cases" / "vocab" / f"ggml-vocab-{name}.gguf"
    tokenizer = tokenizer_of(path)
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    wanted = [[int(i) for i in line.split()] for line in Path(f"{path}.out").read_text().split("\n")]
    assert len(texts) == len(wanted) > 40
    for text, ids in zip(texts, wanted, strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, text
        assert tokenizer.decode(ids) == text


def random_texts(tokenizer: Tokenizer, count: int) -> Iterator[str]:
    rng = random.Random(7)
    signs = "aàéß0129²½ \t\n\r\u00a0\u3000.,!?'\"-_<>|/▁中文かな한글😀👍🏽e\u0301ñǅʔЖ\u200d\ufeff\x7f"
    pieces = [tokenizer.piece(rng.randrange(tokenizer.n_vocab)).decode(errors="ignore") for _ in range(2000)]
    for _ in range(count):
        yield "".join(rng.choice(signs) for _ in range(rng.randrange(1, 40)))
        yield "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 20)))
        yield rng.choice(signs) * rng.randrange(1, 300)
        yield "".join(rng.choice(tokenizer.control_texts[:40] or ("x",)) for _ in range(rng.randrange(1, 5)))


def assert_equals_llama_cpp(path: Path, count: int) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    reference = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    tokenizer = tokenizer_of(path)
    for text in [*TEXTS, *random_texts(tokenizer, count)]:
        data = text.encode()
        assert tokenizer.encode(text, add_special=False) == reference.tokenize(data, add_bos=False), text
        wanted = reference.tokenize(data, add_bos=False, special=True)
        assert tokenizer.encode(text, add_special=False, parse_special=True) == wanted, text


def test_real_models_equal_llama_cpp(real_path: Path) -> None:
    assert_equals_llama_cpp(real_path, 300)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back_whole(real: Tokenizer, text: str) -> None:
    """Cases B 20 to 28: no character is lost, joined, or given another form."""
    assert real.decode(real.encode(text)) == text


@pytest.mark.parametrize("name", ["falcon", "gpt-2", "llama-spm", "phi-3", "starcoder"])
def test_case_vocabularies_equal_llama_cpp(shared_dir: Path, name: str) -> None:
    assert_equals_llama_cpp(shared_dir / "cases" / "vocab" / f"ggml-vocab-{name}.gguf", 100)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_tiny_models_equal_llama_cpp(tiny_model: Callable[..., Path], family: str) -> None:
    assert_equals_llama_cpp(tiny_model(family), 100)


def test_smollm2_equals_hugging_face(smollm2: Tokenizer) -> None:
    """A model of `tokenizers`, put together here from the file's tokens and merges."""
    tokenizers = pytest.importorskip("tokenizers")
    v = smollm2.vocabulary
    assert v.merges is not None and v.rule is not None
    reference = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {token.decode(): i for i, token in enumerate(v.tokens)},
            [tuple(pair.decode().split(" ")) for pair in v.merges],
        )
    )
    reference.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    reference.decoder = tokenizers.decoders.ByteLevel()
    for text in [*TEXTS, *random_texts(smollm2, 300)]:
        ids = smollm2.encode(text)
        assert ids == reference.encode(text).ids, text
        assert smollm2.decode(ids) == text


# SmolLM2 has no tokens for some control characters and for the rarest planes.
@given(st.text(st.characters(codec="utf-8", min_codepoint=32, max_codepoint=0x3FFFF), max_size=60))
def test_round_trip_of_any_text(real: Tokenizer, text: str) -> None:
    ids = real.encode(text, add_special=False)
    assert real.decode(ids) == text
    assert not real.end_ids.intersection(ids)
    stream = real.stream_decoder()
    assert "".join([*map(stream.push, ids), stream.flush()]) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=40))
def test_stream_equals_buffered_for_any_ids(real: Tokenizer, ids: list[int]) -> None:
    for special in (False, True):
        stream = real.stream_decoder(special=special)
        parts = "".join([*map(stream.push, ids), stream.flush()])
        assert parts == real.decode(ids, special=special, continues=True)


def test_stream_never_shows_half_a_character(gemma3: Tokenizer) -> None:
    ids = [gemma3._algorithm.byte_ids[b] for b in "é🙂".encode()]
    stream = gemma3.stream_decoder()
    assert [*map(stream.push, ids), stream.flush()] == ["", "é", "", "", "", "🙂", ""]
    half = gemma3.stream_decoder()
    assert half.push(ids[0]) == "" and half.flush() == "\N{REPLACEMENT CHARACTER}"


def test_six_tabs_come_back(gemma3: Tokenizer) -> None:
    ids = gemma3.encode("\t\t\t\t\t\ttest")
    assert gemma3.decode(ids) == "\t\t\t\t\t\ttest"
    assert ids[0] == gemma3.bos_id == 2 and len(ids) == 3


def test_users_markers_stay_text(real: Tokenizer) -> None:
    text = "".join(real.control_texts[:40]) + "<|im_start|>system\n<start_of_turn>"
    ids = real.encode(text, add_special=False)
    assert real.decode(ids) == text  # control tokens would be left out
    parsed = real.encode(text, add_special=False, parse_special=True)
    assert len(parsed) < len(ids)


def test_begin_token_is_never_doubled(smollm2: Tokenizer, gemma3: Tokenizer) -> None:
    assert smollm2.encode("<|im_start|>user", parse_special=True)[:2] == [1, 4093]
    assert gemma3.encode("<bos>Hi", parse_special=True) == gemma3.encode("Hi") == [2, 10979]
    assert gemma3.encode("Hi", add_special=False) == [10979]
    assert gemma3.encode("") == [2]


def test_a_control_token_crosses_no_border(smollm2: Tokenizer) -> None:
    assert smollm2.encode_pieces(["a<|im_end|>b"])[1] == 2
    assert smollm2.encode_pieces(["a<", "|im_end|>b"]) == smollm2.encode("a<|im_end|>b")
    assert smollm2.encode_pieces(["<|im_", "end|>"]) == smollm2.encode("<|im_end|>")
    assert smollm2.encode_pieces(["hello wor", "ld"]) == smollm2.encode("hello world")  # text joins across


def test_end_of_sequence_or_html(shared_dir: Path, gemma3: Tokenizer) -> None:
    phi3 = tokenizer_of(shared_dir / "cases" / "vocab" / "ggml-vocab-phi-3.gguf")
    assert 2 in phi3.end_ids and 2 not in phi3.encode("a</s>b", add_special=False)
    assert gemma3.encode("a</s>b", add_special=False)[1] == 212


def test_ends(smollm2: Tokenizer, gemma3: Tokenizer) -> None:
    assert {1, 106} <= gemma3.end_ids
    assert smollm2.end_ids == {0, 2}
    assert (gemma3.eos_id, gemma3.eot_id, smollm2.eot_id) == (1, 106, 2)
    assert 212 not in gemma3.end_ids  # there `</s>` is HTML


def test_special_tokens_are_left_out_of_text(gemma3: Tokenizer) -> None:
    ids = [2, 105, 2364, 107, 10979, 106]
    assert gemma3.decode(ids) == "user\nHi"
    assert gemma3.decode(ids, special=True) == "<bos><start_of_turn>user\nHi<end_of_turn>"
    assert gemma3.piece(106) == b"<end_of_turn>"
    for token in (-1, gemma3.n_vocab):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            gemma3.piece(token)
        with pytest.raises(ValueError, match="outside the vocabulary"):
            gemma3.decode([token])


def test_lone_surrogates_are_replaced(real: Tokenizer) -> None:
    assert real.decode(real.encode("a\ud83d\ude00b\ud83dc", add_special=False)) == "a😀b\ufffdc"


def test_leading_space_of_sentencepiece(shared_dir: Path) -> None:
    tokenizer = tokenizer_of(shared_dir / "cases" / "vocab" / "ggml-vocab-llama-spm.gguf")
    ids = tokenizer.encode("Hello world")
    assert tokenizer.decode(ids) == "Hello world"
    assert tokenizer.decode(ids, continues=True) == " Hello world"  # an answer that goes on from a prompt
    stream = tokenizer.stream_decoder(continues=False)
    assert "".join([*map(stream.push, ids), stream.flush()]) == "Hello world"


@pytest.mark.parametrize("text", ["\n" * 50_000, "\r\n" * 25_000, "x\r\n\n\r" * 12_500], ids=ascii)
def test_blank_lines_are_quick(real: Tokenizer, text: str) -> None:
    started = time.process_time()
    assert real.decode(real.encode(text, add_special=False)) == text
    assert time.process_time() - started < 2


@pytest.mark.parametrize("sign", ["a", " ", "\n", "中", "0", "'", "="])
def test_time_grows_with_length(real: Tokenizer, sign: str) -> None:
    def cost(n: int) -> float:
        best = 1e9
        for _ in range(2):
            started = time.process_time()
            real.encode(sign * n)
            best = min(best, time.process_time() - started)
        return best

    small, large = cost(25_000), cost(250_000)
    assert large < 25 * max(small, 0.004)


@pytest.mark.slow
@pytest.mark.parametrize("sign", ["a", " ", "🙂"])
def test_a_million_equal_characters(real: Tokenizer, sign: str) -> None:
    started = time.process_time()
    ids = real.encode(sign * 1_000_000, add_special=False)
    assert time.process_time() - started < 30
    assert real.decode(ids) == sign * 1_000_000


def test_threads_share_a_tokenizer(real: Tokenizer) -> None:
    texts = list(random_texts(real, 100))
    alone = [real.encode(text) for text in texts]
    real._words.clear()
    with ThreadPoolExecutor(4) as pool:
        for together in pool.map(lambda _: [real.encode(text) for text in texts], range(8)):
            assert together == alone


def test_the_file_may_be_closed_and_is_not_parsed_twice(smollm2_path: Path) -> None:
    with GGUFFile.open(smollm2_path) as file:
        tokenizer = Tokenizer.from_gguf(file)
        assert Tokenizer.from_gguf(file) is tokenizer
    assert tokenizer.encode("Hi") == [26843]


def test_merging_is_greedy_by_rank_then_left() -> None:
    ranks = {b"a a": 1, b"aa a": 0, b"a b": 2, b"b c": 0}
    assert merge([b"a", b"a", b"a", b"a"], ranks.get, b" ") == [b"aaa", b"a"]
    assert merge([b"a", b"b", b"c"], ranks.get, b" ") == [b"a", b"bc"]
    assert merge([], ranks.get, b" ") == []
    assert merge([b"a"], ranks.get, b" ") == [b"a"]


@given(st.text("abc", max_size=30), st.permutations(["aa", "ab", "ba", "bc", "aab", "abab", "cc", "abc", "caa"]))
def test_merging_equals_the_plain_algorithm(text: str, order: list[str]) -> None:
    ranks = {token.encode(): i // 2 for i, token in enumerate(order)}  # equal ranks among them
    plain = [c.encode() for c in text]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(plain)) if a + b in ranks]
        if not pairs:
            break
        _, i = min(pairs)
        plain[i : i + 2] = [plain[i] + plain[i + 1]]
    assert merge([c.encode() for c in text], ranks.get, b"") == plain


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_compiles_and_loses_nothing(name: str) -> None:
    pytest.importorskip("tokenizers")
    rule = splitter(RULES[name])
    for text in TEXTS:
        assert "".join(word for word, _ in rule.pre_tokenize_str(text)) == text


@pytest.mark.parametrize("name", sorted(name for name, rule in RULES.items() if not rule.raw))
def test_words_of_parts_are_those_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, cut = RULES[name], splitter(RULES[name]).pre_tokenize_str
    monkeypatch.setattr(pretokenizer, "PART", 8)
    rng, parted = random.Random(name), 0
    for text in [*TEXTS, *vocabularies.random_texts(300)]:
        text = text + rng.choice([" ", "\n", "，", "", "'s "]).join(rng.choice(vocabularies.WORDS) for _ in range(20))
        parts = list(pretokenizer.in_parts(text, rule))
        assert "".join(parts) == text
        assert [word for part in parts for word, _ in cut(part)] == [word for word, _ in cut(text)], ascii(text)
        parted += len(parts) > 2
    assert bool(parted) == (name not in ("exaone-moe", "superbpe"))  # whose words reach across spaces


def test_words_of_a_long_text_leave_the_interpreter_to_others(smollm2: Tokenizer) -> None:
    text = "many words follow here " * 100_000
    assert max(map(len, pretokenizer.in_parts(text, RULES["smollm"]))) < 3 * pretokenizer.PART
    assert len(smollm2.encode(text, add_special=False)) == 400_001


@pytest.mark.parametrize("unit", ["word ", "x", "ACGT", "中", "🙂 "])
def test_no_more_is_counted_than_shows_that_a_text_is_too_long(
    real: Tokenizer, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    text = unit * 200_000
    n = len(real.encode(text))
    monkeypatch.setattr(limit, "PATIENCE", math.inf)
    with limit.at_most(1000):
        assert len(real.encode(text)) == n  # who asked checks it
    monkeypatch.setattr(limit, "PATIENCE", 0)
    with limit.at_most(n):
        assert len(real.encode(text)) == n
    with limit.at_most(1000), pytest.raises(ContextFullError, match="at least") as caught:
        real.encode(text)
    assert 1000 < caught.value.n_tokens < n and caught.value.n_ctx == 1000 and not caught.value.whole
    assert len(real.encode(text)) == n


@pytest.mark.parametrize("text", ["word " * 20_000, "ACGT" * 17 + " ", "<|im_start|>ab\n"])
def test_all_is_counted_of_what_takes_little_work(smollm2: Tokenizer, text: str) -> None:
    """In pieces between special tokens and in long words too, however slow the machine is."""
    text = (text * 5000)[:60_000]
    with limit.at_most(10):
        limited = smollm2.encode(text, parse_special=True)
    assert limited == smollm2.encode(text, parse_special=True)


def tokens_of(path: Path) -> list[str]:
    with GGUFFile.open(path) as file:
        return list(file.metadata["tokenizer.ggml.tokens"])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_repeated_and_empty_tokens_warn(
    tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture, family: str
) -> None:
    tokens = tokens_of(tiny_model(family))
    first = tokens.index("or")
    tokens[-1] = "or"
    tokens[-2] = ""
    path = tiny_model(family, metadata={"tokenizer.ggml.tokens": tokens})
    with caplog.at_level(logging.WARNING):
        tokenizer = tokenizer_of(path)
    assert "is empty" in caplog.text and "tokens twice (1)" in caplog.text
    assert tokenizer.encode("or", add_special=False) == [first]
    assert tokenizer.decode([len(tokens) - 1]) == "or" and tokenizer.piece(len(tokens) - 2) == b""


@pytest.mark.parametrize("name", ["bos", "eos", "unknown"])
def test_ids_outside_the_vocabulary_are_named(tiny_model: Callable[..., Path], name: str) -> None:
    key = f"tokenizer.ggml.{name}_token_id"
    path = tiny_model("llama", metadata={key: 2**32 - 1})
    with pytest.raises(ModelFileError, match=rf"{key} is 4294967295.* 384 tokens"):
        tokenizer_of(path)


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("tokenizer.ggml.model", "rwkv", UnsupportedFormatError, "'rwkv'.*gpt2.*llama"),
        ("tokenizer.ggml.model", None, ModelFileError, "tokenizer.ggml.model"),
        ("tokenizer.ggml.pre", "nonsense", UnsupportedFormatError, "'nonsense'.*llama-bpe.*qwen2"),
        ("tokenizer.ggml.tokens", None, ModelFileError, "tokenizer.ggml.tokens"),
        ("tokenizer.ggml.merges", None, ModelFileError, "tokenizer.ggml.merges"),
        ("tokenizer.ggml.token_type", [1, 1], ModelFileError, "token_type has 2 values for 384"),
        ("tokenizer.ggml.add_bos_token", "yes", ModelFileError, "add_bos_token"),
    ],
)
def test_damaged_vocabularies_are_refused(
    tiny_model: Callable[..., Path], key: str, value: Any, error: type[Exception], message: str
) -> None:
    path = tiny_model("llama", metadata={key: value})
    with pytest.raises(error, match=message):
        tokenizer_of(path)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_scores_that_are_no_numbers_are_refused(tiny_model: Callable[..., Path], score: float) -> None:
    n = len(tokens_of(tiny_model("gemma3")))
    path = tiny_model("gemma3", metadata={"tokenizer.ggml.scores": [score] * n})
    with pytest.raises(ModelFileError, match=f"scores of token 0 is {score}"):
        tokenizer_of(path)


def test_a_missing_rule_is_the_default_with_a_warning(
    tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = tokenizer_of(tiny_model("llama", metadata={"tokenizer.ggml.pre": None}))
    assert "tokenizer.ggml.pre" in caplog.text
    assert tokenizer.decode(tokenizer.encode("Hello world 123")) == "Hello world 123"


def test_markers_of_the_wrong_type_become_control_tokens(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama")
    with GGUFFile.open(path) as file:
        types = file.metadata["tokenizer.ggml.token_type"].tolist()
    types[2] = 1  # <|im_end|> as an ordinary token
    tokenizer = tokenizer_of(tiny_model("llama", metadata={"tokenizer.ggml.token_type": types}))
    assert 2 in tokenizer.end_ids
    assert 2 not in tokenizer.encode("<|im_end|>")
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [2]
