"""What a request may ask for, checked at the door and frozen."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypedDict

from edgert.errors import RequestError, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgert.constraint import Grammar


MOST_STOPS = 256  # texts of one request; each is looked for after every token, while all others wait


def real(name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """The value as a finite float in [low, high], or in (low, high] if `above`. Raises: RequestError."""
    accepted = f"a number above {low:g} and at most {high:g}" if above else f"a number from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RequestError.wrong(name, accepted, value)
    try:
        number = float(value)
    except OverflowError:
        number = -math.inf if value < 0 else math.inf
    if not (low < number if above else low <= number) or not number <= high or not math.isfinite(number):
        raise RequestError.wrong(name, accepted, value if math.isfinite(number) else number)
    return number


def integer(name: str, value: object, low: int, high: int) -> int:
    """The value as an int in [low, high]. Raises: RequestError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise RequestError.wrong(name, f"an integer from {low} to {high}", value)
    return int(value)


def string(name: str, value: object) -> str:
    """The value, which must be a text. Raises: RequestError."""
    if not isinstance(value, str):
        raise RequestError.wrong(name, "a text", value)
    return value


def named(name: str, value: object) -> Mapping[str, Any]:
    """The value, which must map names to something. Raises: RequestError."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise RequestError.wrong(name, "an object, which gives names values", value)
    return value


def function(name: str, value: object) -> None:
    """Raises: RequestError for a value that can neither be called nor is None."""
    if value is not None and not callable(value):
        raise RequestError.wrong(name, "a function", value)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen from the logits; names and defaults are llama.cpp's, ranges OpenAI's.

    temperature:        0 is greedy: the highest logit, the lowest id among equals
    top_k:              the k highest logits stay; 0: all
    top_p:              the smallest set of tokens whose probability reaches top_p stays; 1: all
    min_p:              tokens less probable than min_p times the best are dropped; 0: none
    repeat_penalty:     divides the positive and multiplies the negative logits of tokens seen, once each
    repeat_last_n:      how many latest tokens (prompt included) the penalties see; 0: none, -1: all
    presence_penalty:   subtracted from the logit of a token seen
    frequency_penalty:  subtracted for each time that the token was seen
    logit_bias:         added to the logits of these ids; False forbids the token
    seed:               the same seed, request and build give the same text; None or -1: a new one each time

    Raises: RequestError naming the field.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("temperature", real("temperature", self.temperature, 0, 100))
        put("top_k", integer("top_k", self.top_k, 0, 2**31 - 1))
        put("top_p", real("top_p", self.top_p, 0, 1))
        put("min_p", real("min_p", self.min_p, 0, 1))
        put("repeat_penalty", real("repeat_penalty", self.repeat_penalty, 0, 100, above=True))
        put("repeat_last_n", integer("repeat_last_n", self.repeat_last_n, -1, 2**31 - 1))
        put("presence_penalty", real("presence_penalty", self.presence_penalty, -2, 2))
        put("frequency_penalty", real("frequency_penalty", self.frequency_penalty, -2, 2))
        put("logit_bias", Bias.of(self.logit_bias))
        if self.seed is not None:
            seed = integer("seed", self.seed, -1, 2**64 - 1)
            put("seed", None if seed == -1 else seed)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> SamplingParams:
        """The defaults, changed by what the file's `general.sampling.*` keys recommend.

        Raises: RequestError naming the key's field.
        """
        keys = {
            "temp": "temperature",
            "top_k": "top_k",
            "top_p": "top_p",
            "min_p": "min_p",
            "penalty_repeat": "repeat_penalty",
            "penalty_last_n": "repeat_last_n",
        }
        given = {
            name: metadata[f"general.sampling.{key}"]
            for key, name in keys.items()
            if metadata.get(f"general.sampling.{key}") is not None
        }
        if isinstance(top_k := given.get("top_k"), int) and top_k < 0:
            given["top_k"] = 0
        return cls(**given)

    def changed(self, values: Mapping[str, Any]) -> SamplingParams:
        """The same with other values for some fields. Raises: RequestError naming the field."""
        if unknown := next((name for name in values if name not in _SAMPLING), None):
            raise RequestError(unknown, "is not a parameter of sampling; known are " + ", ".join(_SAMPLING))
        return replace(self, **{name: value for name, value in values.items() if value is not None})


class Bias(dict[int, float]):
    """What is added to the logits of some ids; -inf forbids the token. Checked, and changed no more."""

    @classmethod
    def of(cls, value: object) -> Self:
        """What a request gave. Raises: RequestError."""
        return value if isinstance(value, cls) else cls(_logit_bias(value))

    @cached_property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The ids and what is added to each."""
        import numpy as np

        return np.fromiter(self.keys(), np.int64, len(self)), np.fromiter(self.values(), np.float32, len(self))


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError.wrong("logit_bias", "an object, which gives token ids numbers", value)
    bias = {}
    for key, number in value.items():
        try:
            if isinstance(key, bool) or not isinstance(key, str | numbers.Integral):
                raise ValueError
            if isinstance(key, str) and not (key.isascii() and key.removeprefix("-").isdigit()):
                raise ValueError
            token = int(key)
        except ValueError:
            raise RequestError("logit_bias", f"has the key {shown(key)}, which is not a token id") from None
        banned = number is False or number == -math.inf
        bias[token] = -math.inf if banned else real(f"logit_bias[{token}]", number, -100, 100)
    return bias


@dataclass(frozen=True)
class Options:
    """One request's sampling and limits.

    max_tokens:    None or -1: until the model ends its turn or the context is full
    stop:          texts that end the reply and are not part of it; empty ones are ignored
    ignore_eos:    the model's end tokens are forbidden
    logprobs:      whether each token comes with its log probability (before penalties and temperature)
    top_logprobs:  and with those of so many best tokens
    user:          who asks, "" for nobody in particular: users get equal parts of the machine, and each has a part of
                   the prefix cache for himself
    priority:      a higher number begins first; one step is worth half a minute of waiting
    timeout:       seconds from the request to its end; the reply then stops with finish_reason "timeout"
    queue_timeout: seconds that it may wait for its turn
    cache_prompt:  whether what is cached of earlier prompts may serve
    grammar:       what the reply must look like; requests give it as `grammar` (GBNF), `json_schema`, `regex` or
                   `response_format`
    visible:       control tokens whose names are part of the text, such as marks of calls
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    user: str = ""
    priority: int = 0
    timeout: float | None = None
    queue_timeout: float | None = None
    cache_prompt: bool = True
    grammar: Grammar | None = None
    visible: frozenset[int] = frozenset()

    @classmethod
    def of(cls, defaults: SamplingParams, **request: Any) -> Options:
        """The options of a request over the model's defaults; a field that is None counts as not given.

        Raises: RequestError naming the field.
        """
        given = {name: value for name, value in request.items() if value is not None}
        sampling = {name: given.pop(name) for name in _SAMPLING if name in given}
        if unknown := next((name for name in given if name not in _LIMITS), None):
            raise RequestError(unknown, "is not a parameter; known are " + ", ".join(_SAMPLING + _LIMITS))
        limits: dict[str, Any] = {}
        if asked := {name: given[name] for name in _GRAMMARS if name in given}:
            from edgert.constraint import Grammar

            known = asked.get("grammar")
            limits["grammar"] = known if isinstance(known, Grammar) else Grammar.of(**asked)
        if "max_tokens" in given:
            count = integer("max_tokens", given["max_tokens"], -1, 2**63 - 1)
            limits["max_tokens"] = None if count == -1 else count
        if "stop" in given:
            limits["stop"] = _stop(given["stop"])
        for name, usual in (("ignore_eos", False), ("logprobs", False), ("cache_prompt", True)):
            if name in given and not isinstance(given[name], bool):
                raise RequestError.wrong(name, "true or false", given[name])
            limits[name] = given.get(name, usual)
        if "user" in given:
            limits["user"] = string("user", given["user"])
        if "priority" in given:
            limits["priority"] = integer("priority", given["priority"], -100, 100)
        for name in ("timeout", "queue_timeout"):
            if name in given:
                limits[name] = real(name, given[name], 0, 1e9, above=True)
        if "top_logprobs" in given:
            limits["top_logprobs"] = integer("top_logprobs", given["top_logprobs"], 0, 20)
            limits["logprobs"] = limits["logprobs"] or limits["top_logprobs"] > 0
        if "visible" in given:
            tokens = given["visible"]
            if isinstance(tokens, str) or not isinstance(tokens, Iterable):
                raise RequestError.wrong("visible", "a list of token ids", tokens)
            limits["visible"] = frozenset(integer("visible", token, 0, 2**31 - 1) for token in tokens)
        return cls(sampling=replace(defaults, **sampling), **limits)


def _stop(value: object) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
        raise RequestError.wrong("stop", "a text or a list of texts", value)
    if len(stops) > MOST_STOPS:
        raise RequestError("stop", f"has more than {MOST_STOPS} texts")
    return tuple(text for text in stops if text)


_GRAMMARS = ("grammar", "json_schema", "regex", "response_format")
_SAMPLING = tuple(f.name for f in fields(SamplingParams))
_LIMITS = tuple(f.name for f in fields(Options) if f.name != "sampling") + _GRAMMARS[1:]


class Params(TypedDict, total=False):
    """The keywords of `Model.chat` and `Model.generate`: the fields of SamplingParams and Options."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repeat_penalty: float | None
    repeat_last_n: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    ignore_eos: bool | None
    logprobs: bool | None
    top_logprobs: int | None
    user: str | None
    priority: int | None
    timeout: float | None
    queue_timeout: float | None
    cache_prompt: bool | None
    grammar: str | Grammar | None
    json_schema: Mapping[str, Any] | str | bool | None
    regex: str | None
    response_format: Mapping[str, Any] | None
    visible: Iterable[int] | None
