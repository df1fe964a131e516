"""How byte-level BPE cuts a text into words before it merges: one rule for each name of tokenizer.ggml.pre.

Source: the `pre_tokenizer` of the models' own tokenizer.json; which model goes by which name is llama.cpp's
list. The expressions are Oniguruma's, as Hugging Face `tokenizers` runs them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CJK = r"[一-龥\u3040-\u309f\u30a0-\u30ff]+"
_HAN_OR_HANGUL = r"[一-龥\u0800-一가-\ud7ff]+"
# Letters with case that DeepSeek leaves out: small Armenian and Georgian ones, later Latin, mathematical.
_UNLISTED = (
    "\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2d\ua790-\uab6f"
    "\U00010570-\U000105bf\U00010d50-\U00010d85\U00016e40-\U0001dfff"
)


def _words(
    digits: str = r"\p{N}{1,3}",
    *,
    letters: str = r"[^\r\n\p{L}\p{N}]?\p{L}+",
    contraction: str = _CONTRACTION,
    symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    spaces: str = _SPACES,
) -> str:
    """The family of expressions that began with cl100k."""
    return "|".join(part for part in (contraction, letters, digits, symbols, spaces) if part)


def _cased(digits: str, *, contraction: str = "", symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n/]*") -> str:
    """o200k's way: a word ends where capitals begin again."""
    start, upper, lower = (
        r"[^\r\n\p{L}\p{N}]?",
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
    )
    tail = f"{contraction}?" if contraction else ""
    letters = f"{start}{upper}*{lower}+{tail}|{start}{upper}+{lower}*{tail}"
    return _words(digits, letters=letters, contraction="", symbols=symbols)


def _deepseek3(symbols: str = r" ?[\p{P}\p{S}]+[\r\n]*", spaces: str = _SPACES) -> str:
    ascii_marks = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    letters = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    return "|".join((ascii_marks, letters, symbols, spaces))


_HAN = r"\p{Han}"
_KIMI = "|".join(
    (
        rf"{_HAN}+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{_HAN}]]*"
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{_HAN}]]+{_CONTRACTION}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{_HAN}]]+"
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{_HAN}]]*{_CONTRACTION}?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        _SPACES,
    )
)


PART = 1 << 12  # characters of a long text that are cut into words at once, about
_LETTERS, _MARKS = "aZяЯ一龥かカ한", " \n。，、"
_BORDER = re.compile("(?<=[a-zA-Zа-яА-Я一-龥ぁ-んァ-ヶ가-힣])(?=[ \n。，、])")


@dataclass(frozen=True)
class Rule:
    """A way of cutting text into words.

    patterns:       applied one after another; what one leaves between its matches is a piece as well
    whole_words:    a word that is a token stays one, whatever the merges say (llama.cpp's ignore_merges)
    add_bos:        whether a text begins with the begin token when the file does not say
    raw:            words are UTF-8 with U+2581 for spaces, bytes that are no token are <0xXX>
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    raw: bool = False


def _rules() -> dict[str, Rule]:
    digit = r"\p{N}"
    gpt2 = Rule((GPT2,))
    digits_gpt2 = Rule((digit, GPT2))
    llama3 = Rule((_words(),), whole_words=True, add_bos=True)
    cl100k = Rule((_words(),))
    qwen2 = Rule((_words(digit),))
    deepseek3 = Rule((r"\p{N}{1,3}", _CJK, _deepseek3()))
    bloom = r" ?[^(\s|.,!?…。，、।۔،)]+"
    o200k = _cased(r"\p{N}{1,3}", contraction=_CONTRACTION)
    bailing = _words(
        digit,
        contraction=r"'(?i:[sdmt]|ll|ve|re)",
        letters=r"[^\r\n\p{L}\p{N}]?+\p{L}+",
        symbols=r" ?[^\s\p{L}\p{N}]++[\r\n]*",
        spaces=r"\s*[\r\n]|\s+(?!\S)|\s+",
    )
    runs = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
    named = {
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en "
        "jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling exaone4": gpt2,
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": digits_gpt2,
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": llama3,
        "dbrx smaug-bpe chatglm-bpe": cl100k,
        "glm4 glm5": Rule((_words(),), whole_words=True),
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": qwen2,
        "qwen35": Rule(
            (
                _words(
                    digit,
                    letters=r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
                    symbols=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
                ),
            )
        ),
        "ufakzeka": Rule((_words(digit, contraction=""),)),
        "laguna": Rule((r"[^\n]+|\n+", _words(digit))),
        "minicpm5": Rule((r"\p{N}{1,3}", _words(r"\p{N}+")), whole_words=True),
        "seed-coder": Rule((_words(digit, symbols=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
        "bailingmoe bailingmoe2 llada-moe": Rule((bailing,)),
        "exaone-moe": Rule(
            (
                _words(
                    digit,
                    letters=r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                    symbols=r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                    spaces=r"\s*[\r\n]|\s+(?!\S)|\s+",
                ),
            )
        ),
        "jais-2": Rule((_words(spaces=rf"\s*[\r\n]+|{runs}|\s{{1,2}}(?!\S)|\s{{1}}"),)),
        "deepseek-llm": Rule(
            (
                r"[\r\n]",
                rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_UNLISTED}]]+",
                r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
                r"\s+$",
                _HAN_OR_HANGUL,
                r"\p{N}+",
            )
        ),
        "deepseek-coder": Rule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_OR_HANGUL, digit)),
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4": deepseek3,
        "spark2_5": Rule(
            (
                r"\p{N}{1,3}",
                _CJK,
                _deepseek3(r" ?[\p{P}\p{S}]+", r"[\r\n]|\s+(?!\S)|\s+"),
                digit,
            )
        ),
        "youtu": Rule(
            (
                r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _CJK,
                _cased(digit, contraction=_CONTRACTION),
            ),
            whole_words=True,
        ),
        "falcon": Rule((r"[\p{P}$+<=>^~|`]+", GPT2, r"[0-9][0-9][0-9]")),
        "default": Rule((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
        "bloom poro-chat gpt3-finnish": Rule((bloom,)),
        "viking": Rule((bloom, digit)),
        "tekken": Rule((_cased(digit),), whole_words=True, add_bos=True),
        "gpt-4o llama4 kanana2 talkie minimax-m2": Rule((o200k,)),
        "granite-embed-multi-97m": Rule((o200k,), whole_words=True),
        # Threes from the right, of as many digits as numbers have: looking to the end of any run would take its square.
        "tiny_aya cohere2moe": Rule((r"\d{1,3}(?=(?:\d{3}){0,100}\b)", o200k)),
        "superbpe": Rule((r"\p{N}+", r"(?=(\d{3}){1,100}(?!\d))")),
        "kimi-k2": Rule((_KIMI,)),
        "gemma4 granite-embed-multi-311m": Rule((r"[^\n]+|\n+",), add_bos=True, raw=True),
        "chameleon": Rule(
            (
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                digit,
                r"[\p{P}!-/:-@\[-`{-~]",
                GPT2,
            ),
            add_bos=True,
        ),
    }
    return {name: rule for names, rule in named.items() for name in names.split()}


RULES = _rules()


def in_parts(text: str, rule: Rule) -> Iterator[str]:
    """A long text in parts whose words together are the text's own.

    `tokenizers` keeps the interpreter until all words are cut, and takes three times as long for each of them in a
    text of megabytes.
    """
    start = 0
    while len(text) - start > 2 * PART and _ends_words(rule) and (end := _BORDER.search(text, start + PART)):
        yield text[start : end.start()]
        start = end.start()
    yield text[start:]


@cache
def _ends_words(rule: Rule) -> bool:
    """Whether a border is where a word ends, which does not change with what stands on the other side: nearly every
    rule takes letters as long as there are some, and what follows for itself or with letters after it."""
    cut = splitter(rule).pre_tokenize_str
    texts = (before + mark + after for before in _LETTERS for after in _LETTERS for mark in _MARKS)
    return all(any(begin == 1 for _, (begin, _) in cut(text)) for text in texts)


def splitter(rule: Rule) -> Any:
    """The rule as a pre-tokenizer of `tokenizers`; pre_tokenize_str gives [(word, (start, end)), ...]."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Sequence, Split

    return Sequence([Split(Regex(pattern), "isolated") for pattern in rule.patterns])
