"""Finds the name of tokenizer.ggml.pre: by how a tokenizer cuts a sample text into words, not by how it says so."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from edgert.errors import ModelFileError, UnsupportedFormatError

# Runs of white space and digits, contractions in both cases, scripts, marks, symbols: what the rules differ in.
SAMPLE = (
    "I'll, I'LL; he's HE'S we'Ve don't 'tis 'Twas it''s  two   three    four\tTab\t\tTabs\n new\n\n  lines \r\n\r\n"
    "1 12 123 1234 12345 123456 1234567 1,234,567.89 3.14 0x1F a1b2 v2.0 ²³ ½ ١٢٣ ４５６ 1st 22nd "
    "camelCase PascalCase HTTPServer ALLCAPS iPhone snake_case kebab-case x+=1; y<=2 && !z || #tag @me "
    '(brackets) [x] {y} "quoted" `code` $5 50% ^up ~tilde |pipe| ... !!! ??? ---- ==== ____ /path/to/file \\n '
    "http://a.b/c?d=e&f=g#h user@mail.com naïve café e\u0301te\u0301 Zürich ÇA ŽLUŤOUČKÝ "
    "Привет Мир ΑΒΓ αβγ שלום مرحبا नमस्ते दुनिया สวัสดี 你好世界 こんにちは カタカナ 안녕 하세요 ㄱㄴㄷ 漢字かな交じり文 "
    "中文123英文abc 。，！？「」、〜～·• “curly” ‘single’ – — … €£¥ ©®™ →⇒ ∑∫√ 😀😀 👩‍👩‍👧‍👦 🇩🇪 \u200b\ufeff\u00a0nbsp "
    "trailing  \n\n\n   indented\n\t\tdeep     spaces          wide                    "
    "\n1\n 2\n  3 x\n' s' 't ' d 'D 'Re \u3000全角\u3000空白"
    "we'llx it'sx they'Rey "
    "f(x);\ng() {\n}\r\n// end.\n\n#!\n\tab/cd  /ef\n/gh ./x ../y :// IMGIMGABCZ <sentinel:3> "
    "12 345 6789,012 ٣٤ Ǆ ǅ ʰ ª º"
)


# (fingerprint, whether a word that is a token stays whole) -> llama.cpp's name, of several equal ones the best known
NAMES = {
    ("846c602728b2467a", False): "gpt-2",
    ("85357f5b1e05a062", False): "smollm",
    ("1f6680e64ac05552", False): "smaug-bpe",
    ("775a5844e7041b59", False): "qwen2",
    ("4e8228140331749d", False): "qwen35",
    ("3ee08c280e78288d", False): "ufakzeka",
    ("f7f229848e52df59", False): "laguna",
    ("e1a0eb19d5859cc9", False): "seed-coder",
    ("91e167367a08500f", False): "exaone-moe",
    ("a0fb8df7c0db38f5", False): "jais-2",
    ("8732c1751ce3bf18", False): "deepseek-llm",
    ("765c0daab63fa083", False): "deepseek-coder",
    ("9f9e3a977886668f", False): "deepseek-v3",
    ("fe433a8c15365bd7", False): "spark2_5",
    ("1828ca7269d90973", False): "falcon",
    ("2149a7c2378ee0fc", False): "bloom",
    ("ed6f8e2af351c2ac", False): "viking",
    ("254eaa18df8c4f2a", False): "gpt-4o",
    ("7c70f2184fe6d173", False): "tiny_aya",
    ("faf5c66c93749825", False): "kimi-k2",
    ("1f6680e64ac05552", True): "llama-bpe",
    ("9428dedf57fab045", True): "minicpm5",
    ("68491b5b90b1b59f", True): "youtu",
    ("7353910eda1d0975", True): "tekken",
}


def pre_tokenizer_name(path: Path, tokenizer: dict[str, Any]) -> str:
    """The value of tokenizer.ggml.pre for a byte-level tokenizer.json.

    Raises: UnsupportedFormatError when it cuts words in a way that has no name; ModelFileError.
    """
    from tokenizers import Tokenizer

    shell: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": tokenizer.get("pre_tokenizer"),
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    try:
        pre_tokenizer = Tokenizer.from_str(json.dumps(shell)).pre_tokenizer
    except Exception as error:  # the library raises nothing narrower
        raise ModelFileError(f"{path}: its pre_tokenizer is not understood: {error}.") from None
    found = None if pre_tokenizer is None else fingerprint(pre_tokenizer)
    whole_words = bool(tokenizer["model"].get("ignore_merges"))
    name = NAMES.get((found or "", whole_words)) or NAMES.get((found or "", not whole_words))
    if name is None:
        raise UnsupportedFormatError(
            f"{path} cuts text into words by a rule that GGUF has no name for; edgert knows those of "
            f"{', '.join(NAMES.values())}."
        )
    return name


def fingerprint(pre_tokenizer: Any) -> str:
    """Of a pre-tokenizer of `tokenizers`: 16 hexadecimal digits that say where it cuts the sample."""
    cuts = [span for _, span in pre_tokenizer.pre_tokenize_str(SAMPLE)]
    return hashlib.sha256(repr(cuts).encode()).hexdigest()[:16]
