"""Grammars that a reply must follow: which tokens may come next, by llguidance."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgert.errors import RequestError
from edgert.options import string

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from edgert.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

FORBIDDEN = np.float32(-1e30)  # finite, so that the sampler still finds out when the model's own logits are not
MAX_TEXT = 1 << 19  # characters of a grammar
MAX_DEPTH = 96  # of brackets, objects and lists in a grammar: deeper ones would end the process in the compiler
MAX_VALUES = 20_000  # in a schema
MAX_REFERENCES = 500  # in a schema, since each may stand within another
STACK = 64 << 20  # bytes, of the thread that compiles: a stack that is too small ends the process
MAX_REPEAT = 10_000  # in x{n} and minItems, maxLength and so on
KEPT = 32  # compiled grammars
MAX_DIGITS = 20  # in a row in a number of JSON, which has no end of its own and a small model may find none
# No run of white space without end: a small model may fall into one.
WHITESPACE = r"( |\n {0,16})?"
ANY_OBJECT = '{"type":"object"}'

Result = TypeVar("Result")
Kind = Literal["json_schema", "regex", "gbnf", "lark"]


@dataclass(frozen=True)
class Grammar:
    """What a reply must look like; raises RequestError for what is too large or too deep to be compiled.

    text:   GBNF, a regular expression for the whole reply, or a JSON schema as JSON text
    field:  the field of the request that it came in
    """

    kind: Kind
    text: str
    field: str

    def __post_init__(self) -> None:
        if len(self.text) > MAX_TEXT:
            raise RequestError(self.field, f"has more than {MAX_TEXT} characters")
        if self.kind == "json_schema":
            _check_schema(json.loads(self.text), self.field)
        elif self.kind != "lark":
            _check_brackets(self.text, self.field)

    @classmethod
    def of(
        cls,
        grammar: object = None,
        json_schema: object = None,
        regex: object = None,
        response_format: object = None,
    ) -> Grammar | None:
        """The grammar of a request; None where it has none.

        grammar:          GBNF
        json_schema:      a schema, as a mapping or JSON text
        regex:            a regular expression
        response_format:  OpenAI's: {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ...}}

        Raises: RequestError naming the field.
        """
        found = []
        if grammar is not None and grammar != "":
            found.append(cls("gbnf", string("grammar", grammar), "grammar"))
        if regex is not None and regex != "":
            found.append(cls("regex", string("regex", regex), "regex"))
        if json_schema is not None:
            found.append(cls("json_schema", schema_text("json_schema", json_schema), "json_schema"))
        if response_format is not None and (shape := _of_format(response_format)):
            found.append(shape)
        if len(found) > 1:
            raise RequestError(found[1].field, f"cannot be had together with {found[0].field}")
        return found[0] if found else None

    @classmethod
    def schema(cls, schema: Mapping[str, Any], field: str) -> Grammar:
        """The grammar of a schema, which may have options of llguidance's under "x-guidance"."""
        return cls("json_schema", schema_text(field, schema, trusted=True), field)

    @classmethod
    def lark(cls, text: str, field: str, schema: Mapping[str, Any]) -> Grammar:
        """A grammar in llguidance's own language, written by us around somebody's schema."""
        _check_schema(json.loads(schema_text(field, schema)), field)
        return cls("lark", text, field)


def _of_format(value: object) -> Grammar | None:
    if not isinstance(value, Mapping):
        raise RequestError.wrong("response_format", "an object with a type", value)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema, field = value.get("schema"), "response_format.schema"
        return Grammar("json_schema", ANY_OBJECT if schema is None else schema_text(field, schema), field)
    if kind == "json_schema":
        inner = value.get("json_schema", value)
        if not isinstance(inner, Mapping) or "schema" not in inner:
            raise RequestError.wrong("response_format.json_schema", "an object with a schema", inner)
        field = "response_format.json_schema.schema"
        return Grammar("json_schema", schema_text(field, inner["schema"]), field)
    if kind == "regex":
        field = "response_format.pattern"
        return Grammar("regex", string(field, value.get("pattern")), field)
    if kind == "grammar":
        field = "response_format.grammar"
        return Grammar("gbnf", string(field, value.get("grammar")), field)
    raise RequestError.wrong("response_format.type", "text, json_object, json_schema, regex or grammar", kind)


def schema_text(field: str, schema: object, *, trusted: bool = False) -> str:
    """A schema as JSON text, without options of llguidance's unless it is trusted. Raises: RequestError."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if value is True:
            return "{}"
        if not isinstance(value, Mapping):
            raise ValueError
        return json.dumps({name: item for name, item in value.items() if trusted or name != "x-guidance"})
    except RecursionError:
        raise RequestError(field, "is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise RequestError(field, f"is no JSON: {error}") from None
    except (ValueError, TypeError):
        raise RequestError.wrong(field, "a JSON schema, which is an object", schema) from None


def _check_schema(schema: object, field: str) -> None:
    """Raises: RequestError for a schema that is too deep or too large."""
    left, count, references = [(schema, 1, "")], 0, 0
    while left:
        value, depth, key = left.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise RequestError(field, f"is nested more than {MAX_DEPTH} levels deep")
        if count > MAX_VALUES:
            raise RequestError(field, f"has more than {MAX_VALUES} values")
        if isinstance(value, dict):
            for name in value if key == "patternProperties" else ():
                _check_brackets(name, field)
            left += [(item, depth + 1, name) for name, item in value.items()]
        elif isinstance(value, list):
            left += [(item, depth + 1, "") for item in value]
        elif isinstance(value, str) and key == "pattern":
            _check_brackets(value, field)
        elif key in ("$ref", "$dynamicRef"):
            references += 1
            if references > MAX_REFERENCES:
                raise RequestError(field, f"has more than {MAX_REFERENCES} references")
        elif isinstance(value, int | float) and key in _COUNTS and value > MAX_REPEAT:
            raise RequestError(field, f"has a {key} above {MAX_REPEAT}")


_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def _check_brackets(text: str, field: str) -> None:
    """Raises: RequestError for brackets that are nested too deeply, wherever they stand."""
    depth = 0
    for sign in text:
        if sign in "([{":
            depth += 1
            if depth > MAX_DEPTH:
                raise RequestError(field, f"is nested more than {MAX_DEPTH} levels deep")
        elif sign in ")]}":
            depth = max(0, depth - 1)


class _Numbers:
    """Sees to it that numbers in a JSON text end where they may.

    piece:   the bytes of a token
    digits:  bool (n_vocab,), the tokens that begin with a digit
    """

    def __init__(self, piece: Callable[[int], bytes], digits: NDArray[np.bool_]) -> None:
        self._piece, self._digits = piece, digits
        self._run = 0  # digits, up to here
        self._quoted = self._escaped = False

    def narrowed(self, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The tokens that are allowed, without digits where a number has enough of them and may end."""
        if self._run < MAX_DIGITS or self._quoted:
            return allowed
        others = allowed & ~self._digits
        return others if others.any() else allowed

    def take(self, token: int) -> None:
        """Goes on by a token."""
        for byte in self._piece(token):
            self._run = self._run + 1 if 48 <= byte <= 57 else 0
            if byte == 34 and not self._escaped:
                self._quoted = not self._quoted
            self._escaped = byte == 92 and not self._escaped


class Constraint:
    """One reply on its way through a grammar."""

    def __init__(self, matcher: LLMatcher, n_vocab: int, field: str, numbers: _Numbers | None = None) -> None:
        self._matcher, self._n_vocab, self._field, self._numbers = matcher, n_vocab, field, numbers
        self._allowed = np.ones(n_vocab, np.bool_)

    def masked(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits with those of all tokens lowered that may not come next: float32 (n_vocab,), a copy.

        Raises: RequestError when no token may.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._allowed = np.unpackbits(bits, count=self._n_vocab, bitorder="little").view(np.bool_)
        if self._matcher.is_error():
            raise RequestError(self._field, "became too complex for this reply: simplify it")
        if not self._allowed.any():
            raise RequestError(self._field, "allows no further token of this model")
        if self._numbers:
            self._allowed = self._numbers.narrowed(self._allowed)
        return np.where(self._allowed, logits, FORBIDDEN)

    def take(self, token: int) -> None:
        """Goes on by a token that was chosen from the masked logits.

        Raises: RequestError for one that is forbidden, which is when everything allowed was banned.
        """
        if not self._allowed[token]:
            raise RequestError("logit_bias", "forbids every token that the grammar allows")
        if not self._matcher.consume_token(token):
            raise RequestError(self._field, "became too complex for this reply: simplify it")
        if self._numbers:
            self._numbers.take(token)

    @property
    def complete(self) -> bool:
        """Whether the reply is whole and nothing may follow it."""
        return bool(self._matcher.is_stopped())


class Constrainer:
    """Compiles grammars for one vocabulary and keeps what was compiled last; any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        self._tokenizer, self._n_vocab = tokenizer, n_vocab
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def compile(self, grammar: Grammar) -> Constraint:
        """A constraint at its beginning. Raises: RequestError that names the grammar's field and says what is wrong."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer, self._n_vocab)
            matcher = self._compiled.get(grammar)
            if matcher is None:
                vocabulary = self._vocabulary
                matcher = self._compiled[grammar] = _with_room(lambda: _matcher(vocabulary, grammar))
                if len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            json_ = grammar.kind in ("json_schema", "lark")  # in the others, what is asked for is spelled out
            numbers = _Numbers(self._tokenizer.piece, self._digits) if json_ else None
            return Constraint(matcher.deep_copy(), self._n_vocab, grammar.field, numbers)

    @cached_property
    def _digits(self) -> NDArray[np.bool_]:
        pieces = (self._tokenizer.piece(token)[:1].isdigit() for token in range(self._tokenizer.n_vocab))
        digits = np.zeros(self._n_vocab, np.bool_)
        digits[: self._tokenizer.n_vocab] = list(pieces)
        return digits


def _vocabulary(tokenizer: Tokenizer, n_vocab: int) -> LLTokenizer:
    """The vocabulary as llguidance wants it; a control token stands for no text."""
    import llguidance

    control = tokenizer.control_ids

    class Wrapped:
        eos_token_id = min(tokenizer.end_ids)
        bos_token_id = tokenizer.bos_id
        tokens = tuple(
            b"\xff" + tokenizer.piece(i) if i in control else tokenizer.piece(i) for i in range(tokenizer.n_vocab)
        )

        def __call__(self, text: bytes | str) -> list[int]:
            text = text if isinstance(text, str) else text.decode("utf-8", "replace")
            return tokenizer.encode(text, add_special=False)

    wrapper = llguidance.TokenizerWrapper(Wrapped())
    return llguidance.LLTokenizer(wrapper, n_vocab=n_vocab, eos_token=sorted(tokenizer.end_ids))


_JSON: Any = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": True}


def _matcher(vocabulary: LLTokenizer, grammar: Grammar) -> LLMatcher:
    from llguidance import LLMatcher

    try:
        if grammar.kind == "json_schema":
            text = LLMatcher.grammar_from_json_schema(grammar.text, defaults=_JSON)
        elif grammar.kind == "lark":
            text = LLMatcher.grammar_from_lark(grammar.text)
        elif grammar.kind == "regex":
            text = LLMatcher.grammar_from_regex(grammar.text)
        else:
            from llguidance.gbnf_to_lark import gbnf_to_lark

            text = LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.text))
    except RecursionError:
        raise RequestError(grammar.field, "is nested too deeply") from None
    except Exception as error:  # of a converter that says what is wrong in errors of its own
        raise RequestError(grammar.field, f"cannot be read: {_line(str(error))}") from None
    matcher = LLMatcher(vocabulary, text, log_level=0)
    if matcher.is_error():
        raise RequestError(grammar.field, f"cannot be enforced: {_line(matcher.get_error())}")
    if warnings := matcher.get_grammar_warnings():
        raise RequestError(grammar.field, f"cannot be enforced: {_line(warnings[0])}")
    first = matcher.deep_copy()
    if not any(first.compute_bitmask()) or first.is_error():
        raise RequestError(grammar.field, "cannot be enforced: no text of this model follows it")
    return matcher


def _with_room(work: Callable[[], Result]) -> Result:
    """What `work` gives, in a thread with a large stack. Raises: what it raises."""
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    usual = threading.stack_size(STACK)
    try:
        thread = threading.Thread(target=run, name="edgert-grammar")
        thread.start()
    finally:
        threading.stack_size(usual)
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def _line(text: str) -> str:
    return " ".join(text.split())[:300] or "it is not understood"
