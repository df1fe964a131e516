"""A small model on the processor that guesses for a larger one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Round, Stakes
from edgert.backends.cpu import compiler
from edgert.backends.cpu.backend import ONE, CpuBackend
from edgert.backends.cpu.check import Check
from edgert.backends.cpu.guessing import PLACE, ROUNDS, ROWS, Guessing
from edgert.backends.cpu.layouts import WINDOW
from edgert.backends.cpu.memory import aligned
from edgert.backends.cpu.sampling import Chain, Some
from edgert.backends.cpu.step import SPARE, Shape
from edgert.backends.cpu.tape import Tape
from edgert.backends.cpu.team import LEAVE
from edgert.backends.cpu.together import Asked, Together
from edgert.backends.cpu.weights import Packer
from edgert.errors import DoesNotFitError
from edgert.quantize.gguf_file import Model


class CpuDraft(CpuBackend):
    """A CpuBackend that can guess several tokens in one call.

    n_guesses:  most tokens of a guess
    common:     int64, ascending: the tokens that it guesses, whose logits alone are computed; None: all
    """

    def __init__(
        self, file: Model[Any], *, n_guesses: int, common: NDArray[np.int64] | None = None, **options: Any
    ) -> None:
        super().__init__(file, **options)
        self.capabilities |= {"guess"}
        self.some = None if common is None else Some(common, self.n_vocab)
        output = self._graph.weights.output
        if common is not None:
            name = "token_embd.weight" if self.architecture.tied_head else "output.weight"
            output = [Packer(file, self.isa, self._team).pack_some(name, common)]
        columns = sum(matrix.n_panels * self.isa.lanes for matrix in output)
        sequences = self.n_seq_max if self.n_seq_max > 1 else 0  # for which it guesses together
        rows = aligned((max(1, sequences) + SPARE) * columns * 4).view(np.float32).reshape(-1, columns)
        self._guessed_logits, self._logits_address = rows, rows.ctypes.data
        self._output = output
        names = ["again", "guess", *["guess_together"] * bool(sequences)]
        found = compiler.addresses(names, self.isa, self._progress)
        again, guess = found["again"], found["guess"]
        words = self._graph.arena.integers(len(PLACE))
        # An op's arguments are given by address, so that one step's words serve all steps.
        steps = [self._step(n, 1, guess, words.ctypes.data) for n in range(1, ROWS + 1)]
        graph = self._graph
        inputs = {"tokens": graph.tokens, "positions": graph.positions, "slots": graph.slots,
                  "wanted": graph.wanted, "header": graph.header}  # fmt: skip
        for name, array in (inputs | {"one": ONE}).items():
            words[PLACE[name]] = array.ctypes.data
        words[PLACE["n_header"]], words[PLACE["team"]] = len(ONE), self._team.address
        beside = options.get("beside")
        ratio = self.memory()["weights"] / beside.memory()["weights"] if isinstance(beside, CpuBackend) else 1.0
        self._guessing = Guessing(words, steps, n_guesses, ratio)
        self._together: Together | None = None
        if sequences:
            step, team = partial(self._step, last=found["guess_together"]), self._team.address
            self._together = Together(sequences, n_guesses, inputs, rows, team, step)
            self.capabilities |= {"guess together"}
        self.times: list[tuple[float, float]] = []  # seconds of guessing and of checking in each of the latest rounds
        interrupted = np.zeros(1, np.int64)
        self.interrupted = interrupted.data
        words[PLACE["interrupted"]] = interrupted.ctypes.data
        self._check: Check | None = None
        if isinstance(beside, CpuBackend) and beside._team is self._team and Check.serves(beside, n_guesses):
            self._check = check = Check(beside, n_guesses, (again, words.ctypes.data, LEAVE))
            self.capabilities |= {"check"}
            for name, array in check.inputs().items():
                words[PLACE[f"target_{name}"]] = array.ctypes.data

    def _step(self, n_rows: int, n_wanted: int, last: int, arguments: int) -> NDArray[np.int64]:
        """The words of a step of so many rows and logits of them, with a kernel behind it that may end the walk."""
        graph = self._graph
        ops = graph.ops(graph.shape(0, n_rows, n_wanted), self._output)
        graph.set_logits(ops, self._guessed_logits, self._output)
        tape = Tape(ops, compiler.addresses([op.kernel for op in ops], self.isa, self._progress), graph.arena)
        return np.concatenate([tape.words, [[last, arguments, LEAVE]]])

    def _tape(self, shape: Shape) -> Tape:
        """Of what it reads besides, all takes the kernels of many tokens, compiled at the start: nobody shall wait."""
        if shape.narrow > ROWS:
            shape = replace(shape, narrow=self._graph.shape(0, WINDOW, 0).narrow)
        return super()._tape(shape)

    def truncate(self, sequence: int, length: int) -> None:
        """As the backend's; where it is a guess that is taken back, its pages are kept for the next one."""
        if length and 0 < self._cache.lengths[sequence] - length <= self._guessing.most:
            self._check_reach(sequence, length)
            self._cache.shorten(sequence, length)
        else:
            super().truncate(sequence, length)

    def guess(
        self,
        sequence: int,
        pending: list[int],
        chain: Chain,
        history: NDArray[np.int32],
        n: int,
        stakes: Stakes,
    ) -> NDArray[np.float64]:
        """Reads 1 or 2 tokens more of a sequence, and goes on by what it guesses.

        chain:    of a sampler over `some`
        history:  int32, of which n tokens are known; guesses are written behind them
        returns:  float64, the guesses' probabilities; valid until the next call

        Raises: DoesNotFitError when the cache is full.
        """
        cache, guessing = self._cache, self._guessing
        length, rows = cache.lengths[sequence], len(pending)
        most = self._most(sequence, pending, stakes)
        if cache.missing({sequence: length + rows + most - 1}):
            raise DoesNotFitError("The draft's cache is full.")
        self._guess(sequence, pending, chain, history, n, stakes, most, length + rows + most - 1)
        cache.shorten(sequence, length + rows + guessing.steps - 1)
        return guessing.shares[: guessing.count]

    def guess_together(
        self, arguments: Sequence[tuple[int, list[int], Chain, NDArray[np.int32], int, Stakes]]
    ) -> list[NDArray[np.float64]]:
        """`guess` for several sequences at once, with the arguments of each, whose chains are different ones.

        Raises: DoesNotFitError when the cache is full.
        """
        cache, together, asked = self._cache, self._together, [Asked(*one) for one in arguments]
        assert together is not None
        lengths = [cache.lengths[one.sequence] for one in asked]
        most = [self._most(one.sequence, one.pending, one.stakes) for one in asked]
        read = [length + len(one.pending) for one, length in zip(asked, lengths, strict=True)]
        growth = {one.sequence: end + n - 1 for one, end, n in zip(asked, read, most, strict=True)}
        if cache.missing(growth):
            raise DoesNotFitError("The draft's cache is full.")
        for one in asked:
            cache.grow(one.sequence, growth[one.sequence])
            one.chain.prepare(self._logits_address, one.history, one.n)
        self._team.walk(*together.begin(asked, lengths, most))
        found = []
        for i, one in enumerate(asked):
            shares, steps = together.result(i)
            cache.shorten(one.sequence, read[i] + steps - 1)
            found.append(shares)
        return found

    def _most(self, sequence: int, pending: list[int], stakes: Stakes) -> int:
        """Guesses, as many as the context has room for."""
        return min(stakes.most, self._guessing.most, self.n_ctx - self._cache.lengths[sequence] - len(pending) + 1)

    def _guess(
        self,
        sequence: int,
        pending: list[int],
        chain: Chain,
        history: NDArray[np.int32],
        n: int,
        stakes: Stakes,
        most: int,
        end: int,
    ) -> None:
        """Walks, with pages for a sequence of length `end`, which there are."""
        length, rows = self._cache.lengths[sequence], len(pending)
        self._cache.grow(sequence, end)
        self._graph.few.lay_out(pending, length, sequence, 1)
        chain.prepare(self._logits_address, history, n)
        self._guessing.set(chain, stakes, most, length + rows - 1)
        self._team.walk(*self._guessing.tape(rows, most))

    def rounds(
        self,
        sequence: int,
        pending: list[int],
        chain: Chain,
        history: NDArray[np.int32],
        n: int,
        stakes: Stakes,
        target: Chain,
        most_rounds: int,
        reach: int,
    ) -> list[Round] | None:
        """`guess`, then the step of the model beside it that checks as many guesses as pay, and the choice of tokens;
        then the same for the text with these tokens, until a token of `stakes.ends` is chosen or `interrupted` set.

        All in one walk, since what lies between two is done with cold caches.

        history:      int32, of which n tokens are known; behind them are written the tokens of all rounds but the
                      last, and the last one's guesses
        target:       of the model's own sampler, over all tokens
        most_rounds:  up to ROUNDS
        reach:        tokens that may be guessed behind the first n in all rounds together
        returns:      None where the cache of the model beside it lacks room

        Raises: DoesNotFitError when this one's cache is full.
        """
        check, cache, guessing, words = self._check, self._cache, self._guessing, self._guessing.words
        assert check is not None
        most, read = self._most(sequence, pending, stakes), cache.lengths[sequence] + len(pending)
        for rounds in dict.fromkeys((min(most_rounds, ROUNDS), 1)):
            # The last guess of a round is not read by the draft.
            ahead = min(reach, rounds * (most + 1) - 1, self.n_ctx + 1 - read) if rounds > 1 else most
            room = ahead >= most and not cache.missing({sequence: read + ahead - 1})
            if room and check.begin(sequence, n, target, history, n + ahead):
                break
        else:
            if cache.missing({sequence: read + most - 1}):
                raise DoesNotFitError("The draft's cache is full.")
            return None
        words[PLACE["tapes"]], words[PLACE["sequence"]] = check.tapes_address, sequence
        words[PLACE["target_chain"]], words[PLACE["target_logits"]] = target.address, check.logits_address
        guessing.set_rounds(rounds, most, n + ahead)
        found: list[Round] = []
        try:
            began = perf_counter()
            self._guess(sequence, pending, chain, history, n, stakes, most, read + ahead - 1)
            self.times = guessing.times(began, perf_counter())
            found = [Round(*one) for one in guessing.rounds()]
        finally:
            words[PLACE["tapes"]] = self.interrupted[0] = 0
            end = n + sum(len(one.chosen) for one in found) - 1  # the last token is not read
            check.end(sequence, end)
            # Of the last guesses those hold that were chosen; the last one may not have been read either.
            cache.shorten(sequence, min(end + read - n, words[PLACE["position"]] + 1) if found else 0)
        return found
