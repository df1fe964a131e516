"""A small model on the processor that guesses for a larger one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Stakes
from edgert.backends.cpu import compiler
from edgert.backends.cpu.backend import ONE, CpuBackend
from edgert.backends.cpu.check import Check
from edgert.backends.cpu.guessing import PLACE, ROWS, Guessing
from edgert.backends.cpu.layouts import WINDOW
from edgert.backends.cpu.memory import aligned
from edgert.backends.cpu.sampling import Chain, Some
from edgert.backends.cpu.step import SPARE, Shape
from edgert.backends.cpu.tape import Tape
from edgert.backends.cpu.team import LEAVE
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
        rows = aligned((1 + SPARE) * columns * 4).view(np.float32).reshape(-1, columns)
        self._guessed_logits, self._logits_address = rows, rows.ctypes.data
        self._output = output
        guess = compiler.addresses(["guess"], self.isa, self._progress)["guess"]
        words = self._graph.arena.integers(len(PLACE))
        steps = []
        for n in range(1, ROWS + 1):
            shape = self._graph.shape(0, n, 1)
            ops = self._graph.ops(shape, output)
            self._graph.set_logits(ops, rows, output)
            tape = Tape(ops, compiler.addresses([op.kernel for op in ops], self.isa, self._progress), self._graph.arena)
            # An op's arguments are given by address, so that one step's words serve all steps.
            steps.append(np.concatenate([tape.words, [[guess, words.ctypes.data, LEAVE]]]))
        graph = self._graph
        for name, array in {"tokens": graph.tokens, "positions": graph.positions, "wanted": graph.wanted,
                            "header": graph.header, "one": ONE}.items():  # fmt: skip
            words[PLACE[name]] = array.ctypes.data
        words[PLACE["n_header"]], words[PLACE["team"]] = len(ONE), self._team.address
        self._guessing = Guessing(words, steps, n_guesses)
        beside = options.get("beside")
        self._check: Check | None = None
        if isinstance(beside, CpuBackend) and beside._team is self._team and Check.serves(beside, n_guesses):
            self._check = check = Check(beside, n_guesses)
            self.capabilities |= {"check"}
            for name, array in check.inputs().items():
                words[PLACE[f"target_{name}"]] = array.ctypes.data

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
        cache, graph, guessing = self._cache, self._graph, self._guessing
        length, rows = cache.lengths[sequence], len(pending)
        most = min(stakes.most, guessing.most, self.n_ctx - length - rows + 1)
        if cache.missing({sequence: length + rows + most - 1}):
            raise DoesNotFitError("The draft's cache is full.")
        cache.grow(sequence, length + rows + most - 1)
        graph.few.lay_out(pending, length, sequence, 1)
        chain.prepare(self._logits_address, history, n)
        guessing.set(chain, stakes, most, length + rows - 1)
        self._team.walk(*guessing.tape(rows, most))
        cache.shorten(sequence, length + rows + guessing.steps - 1)
        return guessing.shares[: guessing.count]

    def guess_and_check(
        self,
        sequence: int,
        pending: list[int],
        chain: Chain,
        history: NDArray[np.int32],
        n: int,
        stakes: Stakes,
        target: Chain,
    ) -> tuple[NDArray[np.float64], int, list[int]] | None:
        """`guess`, then the step of the model beside it that checks as many guesses as pay, and the choice of tokens:
        in one walk, since what lies between two is done with cold caches.

        target:   of the model's own sampler, over all tokens
        returns:  the guesses' probabilities, how many were checked, and the tokens chosen, none where nothing can be;
                  None where the cache of the model beside it lacks room

        Raises: DoesNotFitError when this one's cache is full.
        """
        check = self._check
        assert check is not None
        if not check.begin(sequence, n, target, history, stakes.most):
            return None
        words = self._guessing.words
        words[PLACE["tapes"]], words[PLACE["sequence"]] = check.tapes_address, sequence
        words[PLACE["target_chain"]], words[PLACE["target_logits"]] = target.address, check.logits_address
        chosen: list[int] = []
        try:
            shares = self.guess(sequence, pending, chain, history, n, stakes)
            chosen = [token for token in target.chosen if token >= 0]
        finally:
            words[PLACE["tapes"]] = 0
            check.end(sequence, n + len(chosen) - 1)
        return shares, words[PLACE["checked"]], chosen
