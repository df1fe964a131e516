"""Which format each tensor gets: the least predicted loss within a budget of bytes, as a knapsack of alternatives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgert.errors import DoesNotFitError, RequestError
from edgert.quantize.formats import FORMATS, WRITABLE, Format
from edgert.quantize.gguf_layout import DEFAULT_ALIGNMENT, tensor_bytes

Shapes = Mapping[str, tuple[int, ...]]  # of tensors by name, rows before columns

# The types to choose from. Where blocks of 256 divide the rows, K types err less than all others of no fewer bits (with
# IQ4_XS, a twentieth smaller than Q4_K and read more slowly, means fell by some percent on one model and rose on
# another, and the worst tokens of one text became worse); elsewhere Q4_0 takes the bytes of IQ4_NL and errs more, but
# for weights that lie on its grid.
WIDE_TYPES = ("Q4_K", "Q5_K", "Q6_K", "Q8_0")
NARROW_TYPES = ("IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
_ROUNDS = 100  # of bisection


@dataclass(frozen=True)
class Candidate:
    """One way to store a tensor: its bytes, padding included, and the loss that it is predicted to cost."""

    format: Format
    n_bytes: int
    loss: float


@dataclass(frozen=True)
class Allocation:
    """The chosen formats by tensor, the bytes of all of them, and the sum of their predicted losses."""

    types: dict[str, Format]
    n_bytes: int
    loss: float


def padded_bytes(name: str, shape: tuple[int, ...], format: Format, alignment: int = DEFAULT_ALIGNMENT) -> int:
    """Bytes that a tensor takes in a GGUF file. Raises: ModelFileError for rows that the format cannot hold."""
    return -(-tensor_bytes((name, shape, format)) // alignment) * alignment


def offered(shape: tuple[int, ...], types: Iterable[str | Format] | None = None, on_grid: bool = False) -> list[Format]:
    """Those of the types whose blocks divide the rows of a tensor; without types, those worth choosing from.

    on_grid:  the weights lie on a grid of Q4_0
    """
    if types is None:
        types = (*(("Q4_0",) if on_grid else ()), *(NARROW_TYPES if shape[-1] % 256 else WIDE_TYPES))
    formats = (FORMATS[str(one)] for one in types)
    return [one for one in formats if shape[-1] % one.block_size == 0]


def candidates(
    name: str, shape: tuple[int, ...], losses: Mapping[Format, float], alignment: int = DEFAULT_ALIGNMENT
) -> list[Candidate]:
    """The alternatives worth considering, by rising bytes and falling loss; dominated ones are dropped."""
    every = [Candidate(one, padded_bytes(name, shape, one, alignment), loss) for one, loss in losses.items()]
    kept: list[Candidate] = []
    for one in sorted(every, key=lambda c: (c.n_bytes, c.loss)):
        if not kept or one.loss < kept[-1].loss:
            kept.append(one)
    return kept


def allocate(options: Mapping[str, Sequence[Candidate]], budget: int) -> Allocation:
    """Chooses one candidate for each tensor, so that their bytes are at most `budget` and their losses least.

    Near the optimum: a price per byte is bisected, what is left is filled greedily. A tensor that holds much of the
    bytes makes coarse steps which no price can weigh, so each of its candidates is tried.

    Raises: DoesNotFitError when even the smallest candidates exceed the budget.
    """
    least = sum(min(c.n_bytes for c in every) for every in options.values())
    if least > budget:
        raise DoesNotFitError(
            f"The smallest types make {least:,} bytes of tensors and the budget leaves {budget:,}: "
            f"give {least - budget:,} bytes more, or allow smaller types."
        )
    if not options:
        return Allocation({}, 0, 0.0)
    largest = max(options, key=lambda name: min(c.n_bytes for c in options[name]))
    best: Allocation | None = None
    for fixed in options[largest]:
        rest = {name: every for name, every in options.items() if name != largest}
        room = budget - fixed.n_bytes
        if sum(min(c.n_bytes for c in every) for every in rest.values()) > room:
            continue
        chosen = _filled(rest, _priced(rest, room), room) | {largest: fixed}
        loss = sum(c.loss for c in chosen.values())
        if best is None or loss < best.loss:
            types = {name: chosen[name].format for name in options}
            best = Allocation(types, sum(c.n_bytes for c in chosen.values()), loss)
    assert best is not None
    return best


def _priced(options: Mapping[str, Sequence[Candidate]], room: int) -> dict[str, Candidate]:
    """The best choice at the lowest price per byte that keeps within `room`."""

    def at(price: float) -> dict[str, Candidate]:
        return {
            name: min(every, key=lambda c: (c.loss + price * c.n_bytes, c.n_bytes)) for name, every in options.items()
        }

    smallest = {name: min(every, key=lambda c: c.n_bytes) for name, every in options.items()}
    slopes = [
        (a.loss - b.loss) / (b.n_bytes - a.n_bytes)
        for every in options.values()
        for a in every
        for b in every
        if b.n_bytes > a.n_bytes and a.loss > b.loss
    ]
    if not slopes:
        return smallest
    low, high = min(slopes) / 2, max(slopes) * 2  # at the upper price all are at their smallest
    found = smallest
    for _ in range(_ROUNDS):
        price = low**0.5 * high**0.5  # whose product may be too small for a float
        chosen = at(price)
        if sum(c.n_bytes for c in chosen.values()) <= room:
            found, high = chosen, price
        else:
            low = price
        if high <= low * (1 + 1e-9):
            break
    return found


def _filled(
    options: Mapping[str, Sequence[Candidate]], chosen: dict[str, Candidate], room: int
) -> dict[str, Candidate]:
    """Spends what is left on the changes that save most per byte."""
    left = room - sum(c.n_bytes for c in chosen.values())
    while True:
        changes = [
            ((now.loss - c.loss) / (c.n_bytes - now.n_bytes), name, c)
            for name, now in chosen.items()
            for c in options[name]
            if 0 < c.n_bytes - now.n_bytes <= left and c.loss < now.loss
        ]
        if not changes:
            return chosen
        _, name, new = max(changes, key=lambda change: (change[0], change[1]))
        left -= new.n_bytes - chosen[name].n_bytes
        chosen = chosen | {name: new}


@dataclass(frozen=True)
class Pins:
    """Formats that the user insists on.

    tensor_types:    (regular expression, type), found anywhere in a tensor's name; the first that matches counts
    keep:            regular expressions of tensors that stay as the source has them
    output_type:     of output.weight, and of a tied embedding
    embedding_type:  of token_embd.weight
    """

    tensor_types: Sequence[tuple[str, str]] = ()
    keep: Sequence[str] = ()
    output_type: str | None = None
    embedding_type: str | None = None

    def resolve(self, shapes: Shapes, stored: Mapping[str, Format]) -> dict[str, Format]:
        """The pinned tensors among `shapes` and their formats; `stored` is how the source has them.

        Raises: RequestError for a pattern that is none or matches nothing, an unknown type, or rows that it does not
        divide.
        """
        pinned: dict[str, Format] = {}
        head = "output.weight" if "output.weight" in shapes else "token_embd.weight"
        for flag, name, type_ in (
            ("embedding_type", "token_embd.weight", self.embedding_type),
            ("output_type", head, self.output_type),
        ):
            if type_ is None:
                continue
            if name not in shapes:
                raise RequestError(flag, f"is for {name}, which the model does not have")
            format = _format(flag, type_)
            if pinned.setdefault(name, format) != format:
                raise RequestError(
                    flag, f"is {format}, and the embedding, which is the head too, is pinned to {pinned[name]}"
                )
        for pattern in self.keep:
            for name in _matches("keep", pattern, shapes):
                pinned.setdefault(name, stored[name])
        for pattern, type_ in self.tensor_types:
            format = _format("tensor_type", type_)
            for name in _matches("tensor_type", pattern, shapes):
                pinned.setdefault(name, format)
        for name, format in pinned.items():
            if shapes[name][-1] % format.block_size:
                raise RequestError(
                    "tensor_type",
                    f"pins {name} to {format}, whose blocks of {format.block_size} do not divide its rows of "
                    f"{shapes[name][-1]}",
                )
        return pinned


def _format(flag: str, name: str) -> Format:
    if name.upper() not in WRITABLE:
        raise RequestError(flag, f"names {name!r}, which is none of {', '.join(WRITABLE)}")
    return FORMATS[name.upper()]


def _matches(flag: str, pattern: str, shapes: Shapes) -> list[str]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise RequestError(flag, f"{pattern!r} is no regular expression: {error}") from None
    found = [name for name in shapes if expression.search(name)]
    if not found:
        examples = ", ".join(list(shapes)[:3])
        raise RequestError(flag, f"{pattern!r} matches no tensor that can be quantized; names are like {examples}")
    return found
