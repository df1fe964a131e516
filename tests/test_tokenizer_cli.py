"""`edgert tokenize`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edgert.cli.verbs.tokenize import command


def tokenize(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(command, arguments, input=stdin)


def test_ids_on_one_line(smollm2_path: Path) -> None:
    assert tokenize("-m", str(smollm2_path), "-p", "Hi <|im_end|>").output == "26843 216 2\n"
    plain = tokenize("-m", str(smollm2_path), "-p", "Hi <|im_end|>", "--no-special").output
    assert plain == "26843 2067 108 306 79 486 108 46\n"


def test_the_begin_token_comes_first_where_wanted(gemma3_path: Path) -> None:
    assert tokenize("-m", str(gemma3_path), "-p", "Hi").output == "2 10979\n"
    assert tokenize("-m", str(gemma3_path), "-p", "Hi", "--no-special").output == "10979\n"


def test_standard_input_is_taken_byte_by_byte(gemma3_path: Path) -> None:
    same = tokenize("-m", str(gemma3_path), "-p", "a\r\nb\n").output
    assert tokenize("-m", str(gemma3_path), stdin=b"a\r\nb\n").output == same
    assert same.endswith(" 107\n")


def test_a_byte_order_mark_is_no_text(gemma3_path: Path) -> None:
    """Editors on Windows begin files with one; within a text it stays."""
    same = tokenize("-m", str(gemma3_path), "-p", "Hello").output
    assert tokenize("-m", str(gemma3_path), stdin=b"\xef\xbb\xbfHello").output == same
    assert len(tokenize("-m", str(gemma3_path), stdin="Hello\ufeff".encode()).output.split()) > len(same.split())


def test_json_has_pieces(gemma3_path: Path) -> None:
    facts = json.loads(tokenize("-m", str(gemma3_path), "-p", "Hi \U00040000", "--json").output)
    assert facts["n_tokens"] == len(facts["tokens"]) == 7
    assert facts["tokens"][:2] == [{"id": 2, "piece": "<bos>"}, {"id": 10979, "piece": "Hi"}]
    assert [t["piece"] for t in facts["tokens"][3:]] == [[0xF1], [0x80], [0x80], [0x80]]


def test_vocabulary_only_files(shared_dir: Path) -> None:
    path = shared_dir / "cases" / "vocab" / "ggml-vocab-gpt-2.gguf"
    assert tokenize("-m", str(path), "-p", "Hello world").output == "15496 995\n"


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ((), b"caf\xe9", "not UTF-8 at byte 3"),
        (("-p", "a", "--nonsense"), None, "--nonsense"),
    ],
)
def test_errors_say_what_is_wrong(
    tiny_model: Callable[..., Path], arguments: tuple[str, ...], stdin: bytes | None, message: str
) -> None:
    result: Any = tokenize("-m", str(tiny_model("llama")), *arguments, stdin=stdin)
    assert result.exit_code != 0
    assert message in result.output + str(result.exception)
