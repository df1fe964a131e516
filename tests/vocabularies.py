"""Small vocabularies trained on the spot, written as GGUF files, and random texts to try them on."""

from __future__ import annotations

import json
import random
import struct
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tiny import write_gguf

SIGNS = "aàéß0129²½ \t\n\r\u00a0\u3000.,!?'\"-_<>|/▁中文かな한글😀👍🏽e\u0301ñǅʔЖ\u200d\ufeff\x7f"
_TEXT = (
    "Hello world don't I'LL 123456 3.14 12 x1y foo_bar CamelCase HTTPServer Привет мир 你好世界 नमस्ते สวัสดี مرحبا "
    "== += // naïve e\u0301te\u0301 Ｆｕｌｌ ﬁ ﬂ ① ㍿ ½ ² 한국어 🇩🇪 👩‍👩‍👧 Straße ǅungla 1,234,567 «—» … /path \\n"
)
WORDS = _TEXT.split()
SPACES = ["", "", " ", " ", "  ", "\n", "\r\n", "\t", "    ", "\n\n\n", "\u00a0", "\u3000"]
_PLANES = [(0x20, 0x250), (0x250, 0x3000), (0x3000, 0x10000), (0x10000, 0x20000), (0x20, 0x110000)]


def any_character(rng: random.Random) -> str:
    """An assigned character or one for private use, of any plane."""
    while True:
        character = chr(rng.randrange(*rng.choice(_PLANES)))
        if unicodedata.category(character) not in ("Cn", "Cs"):
            return character


def random_texts(count: int, pieces: Sequence[str] = WORDS, seed: int = 7) -> Iterator[str]:
    """`count` texts of five kinds in turn: signs, pieces, one sign many times, all of Unicode, words with spaces."""
    rng = random.Random(seed)
    for i in range(count):
        match i % 5:
            case 0:
                yield "".join(rng.choice(SIGNS) for _ in range(rng.randrange(1, 40)))
            case 1:
                yield "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 20)))
            case 2:
                yield rng.choice(SIGNS) * rng.randrange(1, 300)
            case 3:
                yield "".join(any_character(rng) for _ in range(rng.randrange(1, 30)))
            case _:
                yield "".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(rng.randrange(1, 30)))


def write_vocabulary(path: Path, metadata: dict[str, Any], architecture: str = "llama") -> Path:
    return write_gguf(path, architecture, {}, metadata)


def pairs_across_words(n_vocab: int = 3000) -> dict[str, Any]:
    """A byte-level vocabulary whose merges cross spaces, digits and signs, so that every cut shows in the ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(random_texts(3000, seed=1), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }


def word_pieces(lowercase: bool, n_vocab: int = 600) -> tuple[Any, dict[str, Any]]:
    """A tokenizer of `tokenizers` as BERT has it, and the same as GGUF keys."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=n_vocab, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([*WORDS * 3, *random_texts(200, seed=2)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.decoder = decoders.WordPiece()
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    metadata = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "jina-v2-en",
        "tokenizer.ggml.tokens": [
            token if i < len(special) else token[2:] if token.startswith("##") else "▁" + token
            for i, token in enumerate(tokens)
        ],
        "tokenizer.ggml.token_type": [3] * len(special) + [1] * (len(tokens) - len(special)),
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.normalizer.lowercase": lowercase,
        "tokenizer.ggml.token_type_count": 2,
    }
    return tokenizer, metadata


@cache
def _trained_unigrams(n_vocab: int) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=n_vocab, special_tokens=special, unk_token="<unk>", show_progress=False, shrinking_factor=0.5
    )
    texts = [text for i, text in enumerate(random_texts(200, seed=3)) if i % 5 in (1, 4)]
    tokenizer.train_from_iterator([*WORDS * 3, *texts], trainer)
    trained = json.loads(tokenizer.to_str())
    for entry in trained["model"]["vocab"]:
        entry[1] = float(np.float32(entry[1]))  # what a GGUF file can hold
    return json.dumps(trained)


def unigrams(merge_spaces: bool, rules: dict[str, str] | None = None, n_vocab: int = 500) -> tuple[Any, dict[str, Any]]:
    """A tokenizer of `tokenizers` as XLM-R has it, and the same as GGUF keys; `rules` are for the keys alone."""
    from tokenizers import Regex, Tokenizer, normalizers

    tokenizer = Tokenizer.from_str(_trained_unigrams(n_vocab))
    if merge_spaces:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r"\A | \z"), "")]
        )
    entries = json.loads(tokenizer.to_str())["model"]["vocab"]
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, _ in entries],
        "tokenizer.ggml.scores": [float(score) for _, score in entries],
        "tokenizer.ggml.token_type": [3, 3, 3, 2] + [1] * (len(entries) - 4),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": merge_spaces,
    }
    if rules:
        metadata["tokenizer.ggml.precompiled_charsmap"] = charsmap(rules)
    return tokenizer, metadata


def charsmap(rules: dict[str, str]) -> bytes:
    """Sentencepiece's precompiled_charsmap: a double array placed first fit, and the pool of right sides."""
    pool, places = b"", {}
    for left, right in rules.items():
        places[left.encode()] = len(pool)
        pool += right.encode() + b"\0"
    units = np.zeros(1 << 14, np.uint32)
    taken, bases = {0}, set()

    def place(node: int, prefix: bytes) -> None:
        longer = {left[len(prefix)] for left in places if len(left) > len(prefix) and left.startswith(prefix)}
        labels = sorted(longer | ({0} if prefix in places else set()))
        base = next(b for b in range(1, 1 << 14) if b not in bases and not any(b ^ label in taken for label in labels))
        bases.add(base)
        taken.update(base ^ label for label in labels)
        units[node] |= np.uint32((node ^ base) << 10 | (prefix in places) << 8)
        if prefix in places:
            units[base] = 1 << 31 | places[prefix]
        for label in sorted(longer):
            units[base ^ label] |= label
            place(base ^ label, prefix + bytes([label]))

    place(0, b"")
    return struct.pack("<I", units.nbytes) + units.tobytes() + pool
