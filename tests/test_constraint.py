"""Replies that follow a grammar: always valid, whatever the model would say, and refused where that cannot be had."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake import FakeTokenizer, fake_model, says
from hypothesis import given, settings
from hypothesis import strategies as st
from test_speculation import Chancy, speculating

from edgert.constraint import MAX_DEPTH, Constrainer, Grammar
from edgert.errors import RequestError
from edgert.model import Model
from edgert.options import SamplingParams

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model() -> Any:
    """A model that would say anything but what is asked for."""
    with Model(
        Chancy(n_ctx=4096),
        FakeTokenizer(),  # type: ignore[arg-type]
        None,
        SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    ) as found:
        yield found


@pytest.mark.parametrize("seed", range(20))
def test_a_schema_is_followed(model: Model, seed: int) -> None:
    reply = model.generate("x", json_schema=PERSON, seed=seed, max_tokens=200)
    assert reply.finish_reason == "stop"
    value = json.loads(reply.text)
    assert set(value) == {"name", "age"}
    assert len(value["name"]) <= 8
    assert 0 <= value["age"] <= 150
    assert not re.search(r"[ \t]{20}", reply.text)


@pytest.mark.parametrize(
    "request_, pattern",
    [
        ({"regex": r"\d{4}-(0[1-9]|1[0-2])-\d{2}"}, r"\d{4}-(0[1-9]|1[0-2])-\d{2}"),
        ({"response_format": {"type": "regex", "pattern": "(yes|no)!"}}, "(yes|no)!"),
        ({"grammar": 'root ::= greeting " " [a-c]{3}\ngreeting ::= "hi" | "hé"'}, "(hi|hé) [a-c]{3}"),
        ({"json_schema": {"enum": ["red", "blue", 7]}}, '"red"|"blue"|7'),
        ({"json_schema": '{"type": "boolean"}'}, "true|false"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 5}}}}, "5"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_kinds(model: Model, request_: dict[str, Any], pattern: str, temperature: float) -> None:
    for seed in range(5):
        reply = model.generate("x", seed=seed, temperature=temperature, max_tokens=100, **request_)
        assert re.fullmatch(pattern, reply.text)
        assert reply.finish_reason == "stop"


def test_any_object(model: Model) -> None:
    reply = model.generate("x", response_format={"type": "json_object"}, seed=3, max_tokens=2000)
    if reply.finish_reason == "stop":
        assert isinstance(json.loads(reply.text), dict)
    assert reply.text.startswith("{")


def test_a_limit_is_said_so(model: Model) -> None:
    reply = model.generate("x", json_schema=PERSON, seed=1, max_tokens=3)
    assert reply.finish_reason == "length"
    assert len(reply.tokens) == 3


def test_it_ends_when_nothing_may_follow() -> None:
    with fake_model(says("no end", end=ord("z"))) as model:
        reply = model.generate("\n", regex="no")
        assert (reply.text, reply.finish_reason) == ("no", "stop")
        assert model.generate("\n", regex="no", ignore_eos=True).text == "no"


def test_it_may_end_where_the_grammar_lets_it() -> None:
    with fake_model(says("aaa")) as model:
        assert model.generate("\n", regex="a+").text == "aaa"
        assert model.generate("\n", regex="a{5}").text == "aaaaa"


def test_log_probabilities_are_the_models_own() -> None:
    with fake_model(says("no")) as model:
        free = model.generate("\n", logprobs=True, max_tokens=1, logit_bias={ord("y"): 100})
        bound = model.generate("\n", logprobs=True, max_tokens=1, regex="yes")
        assert bound.text == free.text == "y"
        assert bound.logprobs[0].logprob == free.logprobs[0].logprob


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["draft", "ngram"])
def test_guessing_ahead_changes_nothing(kind: str, temperature: float) -> None:
    """Also that some guesses were right, and that the cache holds only what was chosen."""
    schema = {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 8, "maxItems": 8}
    wide = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    accepted = 0
    for seed in range(2):
        with Model(Chancy(n_ctx=256), FakeTokenizer(), None) as plain:  # type: ignore[arg-type]
            expected = plain.generate("x", json_schema=schema, seed=seed, **wide)  # type: ignore[call-overload]
        draft = Chancy(n_ctx=256) if kind == "draft" else None
        backend = Chancy(n_ctx=256)
        with speculating(backend, draft, least=3, ngram=kind == "ngram") as model:
            for _ in range(2):
                reply = model.generate("x", json_schema=schema, seed=seed, **wide)  # type: ignore[call-overload]
                assert reply.text == expected.text
                accepted += reply.stats.draft_n_accepted
        assert len(json.loads(expected.text)) == 8
    assert accepted > 0 or kind == "draft"  # an unbound draft seldom guesses what a grammar wants


def test_many_at_once(model: Model) -> None:
    streams = [model.generate("x", True, json_schema=PERSON, seed=seed, max_tokens=200) for seed in range(8)]
    texts = [stream.reply().text for stream in streams]
    assert texts == [model.generate("x", json_schema=PERSON, seed=seed, max_tokens=200).text for seed in range(8)]


@settings(max_examples=40)
@given(words=st.lists(st.text("ab{}[]()|*+?.\\\"' é", min_size=1, max_size=6), min_size=1, max_size=4, unique=True))
def test_any_words(model: Model, words: list[str]) -> None:
    pattern = "|".join(re.sub(r"([^\w\s])", r"\\\1", word) for word in words)
    assert model.generate("x", regex=f"({pattern})", max_tokens=50).text in words


# What is refused


@pytest.mark.parametrize(
    "field, value",
    [
        ("regex", "("),
        ("regex", "(?=a)b"),
        ("regex", r"\bfoo\b"),
        ("regex", "a(?!b)"),
        ("regex", 5),
        ("grammar", "not a grammar"),
        ("grammar", "root ::= missing"),
        ("grammar", 'root ::= root "a"'),
        ("grammar", 'other ::= "a"'),
        ("json_schema", {"type": "strong"}),
        ("json_schema", {"type": "string", "pattern": "[unclosed"}),
        ("json_schema", {"type": "string", "pattern": "(?=a)"}),
        ("json_schema", {"type": "string", "format": "no-such-format"}),
        ("json_schema", {"not": {"type": "string"}}),
        ("json_schema", {"$ref": "http://example.com/schema"}),
        ("json_schema", {"$ref": "#/nowhere"}),
        ("json_schema", {"type": "array", "uniqueItems": True}),
        ("json_schema", {"type": "string", "minLength": 10**9, "maxLength": 10**9}),
        ("json_schema", "not json"),
        ("json_schema", False),
        ("json_schema", 5),
        ("json_schema", {"enum": []}),
        ("json_schema", {"type": "integer", "minimum": 5, "maximum": 4}),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("response_format", {}),
        ("response_format", "json"),
    ],
)
def test_what_cannot_be_enforced_is_refused(model: Model, field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        model.generate("x", max_tokens=5, **{field: value})
    assert caught.value.field.startswith(field)


def test_only_one_grammar(model: Model) -> None:
    with pytest.raises(RequestError, match="together"):
        model.generate("x", regex="a", grammar='root ::= "a"')


def test_everything_allowed_may_be_banned(model: Model) -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        model.generate("x", regex="a", logit_bias={ord("a"): False})


DEEP = """
import json, sys
sys.path.insert(0, sys.argv[1])
from fake import FakeTokenizer
from edgert.constraint import Constrainer, Grammar
from edgert.errors import RequestError
import numpy as np

def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema

def chain(n):
    links = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i+1}"}} for i in range(n)}
    return {"$defs": links | {f"d{n}": {"type": "string"}}, "$ref": "#/$defs/d0"}

text = json.dumps(nested(40))
cases = [{"regex": "(" * n + "a" + ")" * n} for n in (90, 1000, 13000, 60000)]
cases += [{"grammar": "root ::= " + "(" * n + '"a"' + ")" * n} for n in (90, 1000, 60000)]
cases += [{"json_schema": nested(n)} for n in (40, 90)]
cases += [{"json_schema": '{"items":' * 5000 + "{}" + "}" * 5000}, {"json_schema": {"allOf": [{}] * 30000}}]
cases += [{"json_schema": chain(n)} for n in (400, 3000)]
cases += [{"json_schema": {"type": "string", "pattern": "(" * 5000 + ")" * 5000}}]
cases += [{"regex": "[" * 5000}, {"regex": "(a{1000}){1000}"}, {"regex": "a|" * 50000}]
cases += [{"grammar": chr(10).join(f'r{i} ::= r{i+1} "a"' for i in range(5000)) + '\\nr5000 ::= "b"\\nroot ::= r0'}]
cases += [{"grammar": "root ::= " + '"a" ' * 20000}, {"grammar": 'root ::= "a"{1000000}'}]
constrainer = Constrainer(FakeTokenizer(), 260)
refused = 0
for case in cases:
    try:
        constraint = constrainer.compile(Grammar.of(**case))
        for _ in range(3):
            row = constraint.masked(np.zeros(260, np.float32))
            constraint.take(int(row.argmax()))
    except RequestError:
        refused += 1
print("refused", refused, "of", len(cases))
"""


def test_deep_and_large_grammars_do_not_end_the_process() -> None:
    tests = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", DEEP, tests], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    refused = int(done.stdout.split()[1])
    assert refused >= 10


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 5000])
def test_depth_is_refused_quickly(depth: int) -> None:
    began = time.process_time()
    schema: Any = {}
    for _ in range(depth):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="deep"):
        Grammar.of(json_schema=schema)
    with pytest.raises(RequestError, match="deep"):
        Grammar.of(regex="(" * depth + ")" * depth)
    assert time.process_time() - began < 1


def test_compiled_grammars_are_kept() -> None:
    constrainer = Constrainer(FakeTokenizer(), 260)  # type: ignore[arg-type]
    grammar = Grammar("regex", "ab", "regex")
    first, second = constrainer.compile(grammar), constrainer.compile(grammar)
    row = np.zeros(260, np.float32)
    for constraint in (first, second):  # what one does is nothing to the other
        assert int(constraint.masked(row).argmax()) == ord("a")
        constraint.take(ord("a"))
    assert int(first.masked(row).argmax()) == ord("b")


# On a real vocabulary


def test_control_tokens_are_never_text(smollm2_path: Path) -> None:
    from edgert.quantize.gguf_file import GGUFFile
    from edgert.tokenizer import Tokenizer

    with GGUFFile.open(smollm2_path) as file:
        tokenizer = Tokenizer.from_gguf(file)
    constrainer = Constrainer(tokenizer, tokenizer.n_vocab)
    constraint = constrainer.compile(Grammar("regex", r"<\|im_end\|>x*", "regex"))
    row = constraint.masked(np.zeros(tokenizer.n_vocab, np.float32))
    assert not tokenizer.control_ids & set(np.flatnonzero(row > -1).tolist())


@pytest.mark.parametrize("options", [{}, {"spec": "ngram", "spec_min": 3}])
def test_a_real_model_fills_in_a_form(smollm2_path: Path, options: dict[str, Any]) -> None:
    import edgert

    schema = PERSON | {"properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    texts = set()
    with edgert.load(smollm2_path, n_threads=1, **options) as model:
        for seed in range(4):
            messages = [{"role": "user", "content": "Who are you? Answer in JSON with your name and age."}]
            reply = model.chat(messages, json_schema=schema, seed=seed, max_tokens=300)
            assert reply.finish_reason == "stop"
            assert set(json.loads(reply.text)) == {"name", "age"}
            assert not re.search(r"\s{4}", reply.text)
            texts.add(reply.text)
    assert len(texts) > 1


@pytest.mark.slow
def test_fifty_forms_end_by_themselves(smollm2_path: Path) -> None:
    import edgert

    schema = {"type": "object", "properties": {"city": {"type": "string"}, "population": {"type": "integer"}}}
    schema |= {"required": ["city", "population"], "additionalProperties": False}
    messages = [{"role": "user", "content": "Name a city and its population, as JSON."}]
    with edgert.load(smollm2_path, n_threads=1, n_parallel=8) as model:
        asked = {"json_schema": schema, "max_tokens": 300}
        streams = [model.chat(messages, True, seed=seed, **asked) for seed in range(50)]  # type: ignore[call-overload]
        replies = [stream.reply() for stream in streams]
    for reply in replies:
        assert reply.finish_reason == "stop"
        assert set(json.loads(reply.text)) == {"city", "population"}
        assert not re.search(r"\s{18}", reply.text)


@pytest.mark.parametrize(
    "kind, first",
    [
        ({"type": "integer", "maximum": 10}, "-"),
        ({"type": "integer"}, "9"),
        ({"type": "number", "minimum": 0, "maximum": 10}, "1."),
        ({"type": "number"}, "1e"),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, "[5"),
    ],
)
def test_a_number_comes_to_an_end(kind: dict[str, Any], first: str) -> None:
    """The model would write digits for ever, where the schema lets it."""

    def rule(tokens: list[int]) -> int:
        said = bytes(token for token in tokens if token < 256).rpartition(b":")
        return ord((first + "9" * 400)[len(said[2].lstrip())] if said[1] else "9")

    schema = {"type": "object", "properties": {"n": kind}, "required": ["n"], "additionalProperties": False}
    with fake_model(rule, n_ctx=2000) as model:
        reply = model.generate("\n", json_schema=schema, max_tokens=300, temperature=0)
        assert reply.finish_reason == "stop"
        assert set(json.loads(reply.text)) == {"n"}
        assert max(map(len, re.findall(r"\d+", reply.text))) == 20
        if kind == {"type": "integer"}:
            whole = model.generate("\n", json_schema=kind, max_tokens=300, temperature=0)
            assert (whole.text, whole.finish_reason) == ("9" * 20, "stop")


def test_digits_in_a_text_are_not_counted() -> None:
    with fake_model(lambda tokens: ord("9"), n_ctx=2000) as model:
        for kind in ({"pattern": r"^a\\?9{50}$"}, {"maxLength": 60}):
            schema = {"type": "object", "properties": {"n": {"type": "string"} | kind}, "required": ["n"]}
            closed = schema | {"additionalProperties": False}
            value = json.loads(model.generate("\n", json_schema=closed, max_tokens=400, temperature=0).text)["n"]
            assert value.endswith("9" * 50)


@pytest.mark.parametrize("blank", [" ", "\n", "\t"])
def test_white_space_comes_to_an_end(blank: str) -> None:
    """The model would say nothing else, before, within and after an object, where the schema lets it."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    with fake_model(lambda tokens: ord(blank), n_ctx=2000) as model:
        reply = model.generate("x", max_tokens=300, temperature=0, json_schema=schema)
    assert reply.finish_reason == "stop" and json.loads(reply.text) == {"a": 1}
    assert not re.search(r"\s{18}", reply.text)
