"""The sampling kernel, called from Python: what lies between two forward steps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu import compiler
from edgert.backends.cpu.isa import Isa, select

NAMES = (compiler.name_of("sample"),)
_Function = ctypes.PYFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)  # too short to let go of the GIL

# Places of the kernel's arguments (8 bytes each).
ARGUMENTS = (
    "logits",  # float32 (n,), changed while the kernel runs and put back
    "history",  # int32 (n_history,), the prompt and what was generated
    "n_history",
    "n",
    "seed",
    "n_last",  # how many latest tokens the penalties see; -1: all
    "n_bias",
    "bias_ids",  # int64 (n_bias,)
    "bias",  # float64 (n_bias,)
    "top_k",  # 0: off
    "temperature",  # float64, as the next six; 0: greedy
    "top_p",
    "log_min_p",  # -inf: off
    "log_rest",  # log(n / (1 - top_p))
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "peaks",  # scratch, int64 (n_blocks,)
    "masses",  # scratch, float64 (n_blocks,)
    "ranks",  # scratch, int64 (n,)
    "counts",  # scratch, int64 (n,), zeros before and after
    "undo",  # scratch, int64 (2 * (n_bias + distinct tokens),)
    "ids",  # int64 (n,), the tokens whose logits are given where these are some of the vocabulary; 0: all are
    "places",  # int32 (n_vocab,), the reverse: places among the logits, or -1; 0: all are
    "want_share",  # whether a greedy choice gets its share as well
    "n_rows",  # rows of logits at most: each further one follows the token that stands in the history after n_history
    "stride",  # bytes from one row to the next
    "chosen",  # result: how many rows a token was chosen for, up to the first other than the one that stands there
    "tokens",  # result, int64 (n_rows,): places among the logits, or NOT_FINITE, or ALL_FORBIDDEN
    "share",  # result, float64: the token's probability among those kept; greedy: among all at temperature 1
)
PLACE = {name: place for place, name in enumerate(ARGUMENTS)}
NOT_FINITE, ALL_FORBIDDEN = -1, -2
BLOCK = 64  # logits that are skipped together
RACE_DEPTH = 5.0  # logits further below the best one, in units of the temperature, are drawn as one
_LOGITS, _HISTORY, _N_HISTORY, _WANT_SHARE, _SHARE, _N_ROWS, _STRIDE, _CHOSEN, _TOKENS = (
    PLACE[x] for x in ("logits", "history", "n_history", "want_share", "share", "n_rows", "stride", "chosen", "tokens")
)
MOST_ROWS = 64  # that are sampled in one call


class Some:
    """Some tokens of a vocabulary: those whose logits a draft computes.

    ids:     int64 (n,), ascending
    places:  int32 (n_vocab,), where each token is in `ids`, or -1
    """

    def __init__(self, ids: NDArray[np.int64], n_vocab: int) -> None:
        self.ids = ids
        self.places = np.full(n_vocab, -1, np.int32)
        self.places[ids] = np.arange(len(ids))


class SampleKernel:
    """The kernel, compiled or loaded. Its chains share their scratch: one of them samples at a time."""

    def __init__(self, isa: Isa | None = None, progress: compiler.Progress | None = None) -> None:
        chosen = isa or select()
        self._function = _Function(compiler.addresses(NAMES, chosen, progress)[NAMES[0]])
        self._scratch: dict[int, dict[str, NDArray[np.int64]]] = {}  # by how many logits there are

    def bind(
        self,
        n: int,
        *,
        seed: int,
        bias_ids: NDArray[np.int64],
        bias: NDArray[np.float64],
        some: Some | None = None,
        **arguments: float,
    ) -> Chain:
        """A chain for one request over `n` tokens; the other arguments by the kernel's names.

        seed:  below 2**64
        some:  the tokens that the logits are of; None: all
        """
        if some is not None:
            n, places = len(some.ids), some.places[bias_ids]
            bias_ids, bias = places[places >= 0].astype(np.int64), bias[places >= 0]
        given = {"n": n, "seed": seed - (seed >> 63 << 64), "n_bias": len(bias)} | arguments
        arrays: dict[str, NDArray[Any]] = {"bias_ids": bias_ids, "bias": bias} | self._scratch_for(n)
        if some is not None:
            arrays |= {"ids": some.ids, "places": some.places}
        return Chain(self._function, given, arrays)

    def _scratch_for(self, n: int) -> dict[str, NDArray[np.int64]]:
        """What the kernel writes while it runs over n logits: megabytes, which hundreds of waiting requests share."""
        if n not in self._scratch:
            n_blocks = -(-n // BLOCK)
            sizes = {"peaks": n_blocks, "masses": n_blocks, "ranks": n, "counts": n, "undo": 4 * n}
            self._scratch[n] = {name: np.zeros(size, np.int64) for name, size in sizes.items()}
        return self._scratch[n]


class Chain:
    """Samples for one request; see SampleKernel."""

    def __init__(
        self,
        function: Callable[[int, int, int], None],
        arguments: Mapping[str, float],
        arrays: Mapping[str, NDArray[Any]],
    ) -> None:
        self._function = function
        self._arrays = arrays
        words = np.zeros(len(ARGUMENTS), np.int64)
        tokens = np.zeros(MOST_ROWS, np.int64)
        doubles = words.view(np.float64)
        for name, value in arguments.items():
            (words if isinstance(value, int) else doubles)[PLACE[name]] = value
        for name, array in arrays.items():
            words[PLACE[name]] = array.ctypes.data
        words[_TOKENS] = tokens.ctypes.data
        self._address = words.ctypes.data
        # What is touched between two steps is read from memory: the little code of memoryviews counts.
        self._words, self._tokens = words.data, tokens.data
        self._doubles: memoryview[float] = doubles.data  # type: ignore[assignment]
        self._history: NDArray[np.int32] | None = None

    @property
    def share(self) -> float:
        """The probability of the token chosen last; of a greedy one where it was wanted."""
        return self._doubles[_SHARE]

    @property
    def address(self) -> int:
        """Of the kernel's arguments, for kernels that sample themselves."""
        return self._address

    def prepare(self, logits: int, history: NDArray[np.int32], length: int, n_rows: int = 1) -> None:
        """Sets what the kernel is given, where others call it.

        logits:   their address
        history:  int32, which the kernel may write to
        """
        words = self._words
        if history is not self._history:
            self._history = history
            words[_HISTORY] = history.ctypes.data
        words[_LOGITS], words[_N_HISTORY], words[_WANT_SHARE], words[_N_ROWS] = logits, length, 1, n_rows

    def __call__(
        self, logits: NDArray[np.float32], history: NDArray[np.int32], length: int, want_share: bool = False
    ) -> int:
        """A token id, or NOT_FINITE, or ALL_FORBIDDEN.

        logits:   float32 (n_vocab,); the same afterwards
        history:  int32, ids within the vocabulary, of which the first `length` count
        """
        if logits.strides != (4,) or not logits.flags.writeable:
            logits = logits.copy()
        if history is not self._history:
            history = np.ascontiguousarray(history)
        self.prepare(logits.__array_interface__["data"][0], history, length)
        self._words[_WANT_SHARE] = want_share
        self._function(0, 1, self._address)
        return self._tokens[0]

    def follow(self, logits: NDArray[np.float32], history: NDArray[np.int32], length: int) -> list[int]:
        """Token ids, for each row as long as the one before gave the token that stands in the history.

        logits:   float32 (n, n_vocab), the rows after `length` tokens, after one more ...
        history:  int32, C order, of which the first `length` and n - 1 guesses behind them count
        returns:  1 to n ids, the last NOT_FINITE or ALL_FORBIDDEN where nothing could be chosen
        """
        self.prepare(logits.__array_interface__["data"][0], history, length, min(len(logits), MOST_ROWS))
        self.rows_of(logits)
        self._function(0, 1, self._address)
        return self.chosen

    def rows_of(self, logits: NDArray[np.float32]) -> None:
        """Makes ready for several rows, as far apart as in `logits`, whose shares nobody wants."""
        self._words[_WANT_SHARE], self._words[_STRIDE] = 0, logits.strides[0]

    @property
    def chosen(self) -> list[int]:
        """What `follow` gave, or another call of the kernel."""
        return self._tokens[: self._words[_CHOSEN]].tolist()
