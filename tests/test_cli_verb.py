"""Mistaken command lines: what is said of a verb, a flag or a word that was probably meant otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgert import cli
from edgert.cli.verb import FLAGS, VERBS


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("rnu", "No such command 'rnu'; did you mean 'run'?"),
        ("Chat", "did you mean 'chat'?"),
        ("list", "did you mean 'ls'?"),
        ("xyzzy", "`edgert --help` shows those there are."),
        ("help rnu", "did you mean 'run'?"),
        ("run --max-tokens 3", "No such option '--max-tokens'; did you mean '--n-predict'?"),
        ("run --tmep 0", "'--temp'"),
        ("ls --temperature 0", "No such option '--temperature'."),
        ("show -m smollm2", "the model has no flag here: it comes right behind the verb."),
        ("run hello", "Unexpected: 'hello'; give the model with -m and a text with -p."),
        ("chat smollm2", "Unexpected: 'smollm2'; give the model with -m."),
        ("ls all of them", "Unexpected: 'all of them'; `edgert ls --help` shows what it takes."),
    ],
)
def test_what_was_meant(line: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(line.split()) == 2
    out, err = capsys.readouterr()
    assert not out and err.splitlines()[-1].startswith("Error: ") and advice in err


@pytest.mark.parametrize(("line", "same"), [("help", "--help"), ("help run", "run --help")])
def test_help_is_a_word_too(line: str, same: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in (line, same):
        assert cli.call(words.split()) == 0
        shown.append(capsys.readouterr())
    assert shown[0] == shown[1] and shown[0].out.startswith("Usage: edgert")


def test_what_other_tools_say_is_said_here() -> None:
    assert set(VERBS.values()) <= set(cli.VERBS) and not set(VERBS) & set(cli.VERBS)
    commands = [cli.group.get_command(None, name) for name in cli.VERBS]  # type: ignore[arg-type]
    known = {option for command in commands if command for parameter in command.params for option in parameter.opts}
    assert set(FLAGS.values()) <= known


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--spec-max", "4000"], "Error: --spec-max must be an integer from 1 to "),
        (["--draft-max=4000"], "Error: --draft-max must be an integer from 1 to "),
        (["--spec-type", "never"], "Error: --spec-type must be one of auto, draft, ngram, off, not 'never'."),
        (["-n", "-7"], "Error: --n-predict must be an integer from -1 to "),
        (["-ctk", "q3"], "Error: --cache-type-k is 'q3'; "),
        (["--chat-template", "{{"], "Error: --chat-template is no Jinja template: "),
        ([], "Error: EDGERT_SPEC_MAX must be an integer from 1 to "),
    ],
)
def test_wrong_values_are_named_as_they_were_written(
    words: list[str],
    told: str,
    tiny_model: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not words:
        monkeypatch.setenv("EDGERT_SPEC_MAX", "999")
    model = str(tiny_model("llama"))
    assert cli.call(["run", "-m", model, "--backend", "cpu", "-t", "1", "-p", "hi", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.splitlines()[-1].startswith(told)
