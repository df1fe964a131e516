"""A quantized model stays as close to its source late in a long conversation, or in a long prompt, as early in it."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.quantize import quantize
from edgert.quantize.divergence import log_softmax
from edgert.quantize.engine import Engine, open_engine

pytest.importorskip("tokenizers", reason="it reads tokenizer.json: pip install tokenizers")
pytestmark = pytest.mark.slow

N_CTX = 2048
# Measured by quarters: 0.078, 0.077, 0.064, 0.066 in the conversation, 0.028, 0.019, 0.022, 0.023 in the log book.
LARGEST = 0.15
WORSE = 1.5  # times the first quarter's divergence that the last one may have
# What is asked, the tool, its arguments, its result, and what is answered.
ROUNDS = [
    ("Is it raining in Lisbon right now?", "weather", {"city": "Lisbon"}, {"sky": "clear", "degrees": 24},
     "No, the sky over Lisbon is clear and it is 24 degrees warm."),
    ("And in Bergen?", "weather", {"city": "Bergen"}, {"sky": "rain", "degrees": 9},
     "Yes, in Bergen it rains at 9 degrees, so take a coat."),
    ("How far is it from one to the other?", "distance", {"from": "Lisbon", "to": "Bergen"}, {"km": 2739},
     "The two cities are 2739 kilometres apart as the crow flies."),
    ("What would a train ticket cost?", "tickets", {"from": "Lisbon", "to": "Bergen", "by": "train"}, {"euro": 412},
     "The cheapest connection by train costs 412 euros."),
    ("That is too much. By bus?", "tickets", {"from": "Lisbon", "to": "Bergen", "by": "bus"}, {"euro": 198},
     "By bus it is 198 euros, less than half of the price of the train."),
    ("Write down that I want to leave on Friday.", "note", {"text": "leave on Friday"}, {"saved": True},
     "I have written down that you want to leave on Friday."),
    ("Which notes do I have?", "notes", {}, {"notes": ["buy milk", "leave on Friday"]},
     "You have two notes: buy milk, and leave on Friday."),
    ("Delete the one about the milk.", "delete_note", {"text": "buy milk"}, {"deleted": 1},
     "The note about the milk is gone; the one about Friday is left."),
    ("What is 198 euros in crowns?", "convert", {"amount": 198, "to": "NOK"}, {"amount": 2275.5},
     "198 euros are about 2275 Norwegian crowns today."),
    ("Find me a room near the harbour.", "rooms", {"city": "Bergen", "near": "harbour"}, {"rooms": ["Fisher", "Quay"]},
     "There are two places near the harbour: the Fisher and the Quay."),
    ("What does the Quay cost a night?", "price", {"room": "Quay"}, {"euro": 88},
     "A night in the Quay costs 88 euros with breakfast."),
    ("And the Fisher?", "price", {"room": "Fisher"}, {"euro": 71},
     "The Fisher is cheaper: 71 euros a night, without breakfast."),
    ("Book the Fisher for three nights.", "book", {"room": "Fisher", "nights": 3}, {"number": "F-3381"},
     "The Fisher is booked for three nights; the number is F-3381."),
    ("How much is that altogether?", "sum", {"numbers": [71, 71, 71]}, {"sum": 213},
     "Three nights in the Fisher are 213 euros altogether."),
    ("With the bus there and back?", "sum", {"numbers": [213, 198, 198]}, {"sum": 609},
     "With the bus in both directions it comes to 609 euros."),
    ("When does the bus leave on Friday?", "times", {"from": "Lisbon", "day": "Friday"}, {"times": ["06:40", "21:15"]},
     "On Friday a bus leaves at 6:40 in the morning and another at 21:15."),
    ("Wake me an hour before the first one.", "alarm", {"time": "05:40"}, {"set": True},
     "The alarm is set for 5:40, an hour before the bus leaves."),
    ("Tell my sister about it.", "message", {"to": "sister", "text": "I go to Bergen on Friday"}, {"sent": True},
     "I have told your sister that you go to Bergen on Friday."),
    ("Has she answered?", "inbox", {"from": "sister"}, {"messages": ["Bring a warm coat!"]},
     "Yes. She writes that you should bring a warm coat."),
    ("Then put a coat on my list.", "note", {"text": "warm coat"}, {"saved": True},
     "The warm coat is on your list, next to the bus on Friday."),
]  # fmt: skip


def conversation(engine: Engine) -> NDArray[np.int32]:
    """Twenty rounds of question, call, result and answer, in the model's own template: int32 (n,)."""
    messages = [{"role": "system", "content": "You are a travel assistant. Call tools as JSON, then answer shortly."}]
    for question, tool, arguments, result, answer in ROUNDS:
        call = json.dumps({"name": tool, "arguments": arguments})
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
            {"role": "tool", "content": json.dumps(result)},
            {"role": "assistant", "content": answer},
        ]
    return engine.render(messages)


def log_book(seed: int, n_days: int) -> str:
    """Prose of a kind, different on every day."""
    rng = random.Random(seed)
    ships = ["Aurora", "Northern Star", "Marianne", "Petrel", "Old Hope", "Swift"]
    cargo = ["timber", "salt", "wool", "copper", "oranges", "books", "glass"]
    weather = ["The fog lifted before noon.", "A storm came from the west.", "It was calm and cold.", "It rained."]
    events = ["the pilot came late", "two sailors fell ill", "a rope broke", "the captain bought a map",
              "nothing happened", "the cook played the fiddle", "a letter arrived from the owners"]  # fmt: skip
    days = (
        f"Day {day}. {rng.choice(weather)} The {rng.choice(ships)} came in with {rng.randrange(12, 480)} tons of "
        f"{rng.choice(cargo)}, and left after {rng.randrange(2, 30)} hours; {rng.choice(events)}."
        for day in range(1, n_days + 1)
    )
    return " ".join(days)


@dataclass
class Quarter:
    kld: float
    same_top: float


def quarters(base: Engine, model: Engine, tokens: NDArray[np.int32]) -> list[Quarter]:
    """How far the model is from its base in each quarter of a text that both read from the beginning."""
    found = []
    bounds = np.linspace(0, len(tokens), 5).astype(int).tolist()
    for first, stop in itertools.pairwise(bounds):
        log_p, log_q = (log_softmax(engine.logits(tokens[:stop], first)) for engine in (base, model))
        kld = (np.exp(log_p) * (log_p - log_q)).sum(axis=1, dtype=np.float64)
        found.append(Quarter(float(kld.mean()), float((log_p.argmax(1) == log_q.argmax(1)).mean())))
    return found


@pytest.fixture(scope="module")
def engines(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """The source, and what was made of it at 4.8 bits per weight, calibrated on pieces of 512 tokens."""
    source = shared_dir / "models" / "smollm2-draft"
    if not source.is_dir():
        pytest.skip(f"{source} is not here")
    folder = tmp_path_factory.mktemp("drift")
    (folder / "text.txt").write_text(log_book(seed=1, n_days=220))
    report = quantize(source, folder / "out.gguf", budget=4.8, calibration=[folder / "text.txt"], report=False)
    assert 4.6 <= report.bits_per_weight <= 4.8
    with (
        open_engine(source, n_ctx=N_CTX) as base,
        open_engine(folder / "out.gguf", n_ctx=N_CTX, weights_as=None) as model,
    ):
        yield base, model


def test_twenty_rounds_with_tools_do_not_drift(engines: tuple[Engine, Engine]):
    tokens = conversation(engines[0])
    assert 1500 < len(tokens) < N_CTX
    found = quarters(*engines, tokens)
    assert found[-1].kld < WORSE * found[0].kld
    assert all(quarter.kld < LARGEST and quarter.same_top > 0.8 for quarter in found)


def test_a_prompt_as_long_as_the_context_does_not_drift(engines: tuple[Engine, Engine]):
    tokens = engines[0].tokenize(log_book(seed=2, n_days=80))[: N_CTX - 8]
    assert len(tokens) == N_CTX - 8
    found = quarters(*engines, tokens)
    assert found[-1].kld < WORSE * found[0].kld
    assert all(quarter.kld < LARGEST and quarter.same_top > 0.8 for quarter in found)
