"""Walking a tape: what each thread of the team runs.

A tape is int64 (n_ops, 3): kernel address, argument address, and whether all threads meet after it (1), or meet and
leave if the kernel has ended the tape (2), for another one if it named one. The team's shared
state is an int64 array; words that threads poll stand on cache lines of their own (places below).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.simd import I32, I64, put_word, word

GENERATION = 0  # how many tapes were posted
ARRIVALS = 16  # how often threads have reached a meeting point, over all time
TAPE = 32  # address, ops, arrivals before this tape; then whether to stop, and addresses and numbers of system calls
N_OPS, BASE, STOP, YIELD, SYSCALL, FUTEX = 33, 34, 35, 36, 37, 38
ENDED = 39  # the last tape that a kernel has ended before its end, by its generation, lest a late thread miss it
LEAVE = 2
SLEEPERS = 40  # threads that sleep in the kernel until a word above grows
N_THREADS = 41
NEXT, N_NEXT = 42, 43  # the tape that follows one which a kernel has ended, and its ops; 0: none does
PARKED = 48  # one cache line a thread: 1 while it sleeps outside; then the tapes that it has seen
LINE = 8

# A thread that polls for a partner which the system has put aside burns its own turn, and is put aside when the
# partner returns: beside other programs hardly anything gets done. So it polls for about as long as an uneven
# share of work lasts, and then sleeps until the partner wakes it, with its turn unspent.
SPINS = 2500  # polls with a pause between, about 0.1 ms
IDLE_SPINS = 20_000  # polls of a worker between tapes, about a millisecond
YIELDS = 20  # offers of the core before an idle worker parks, where threads cannot sleep in the kernel
PATIENCE = 400_000  # polls between two offers inside a tape, where threads cannot sleep in the kernel


@intrinsic
def _load(_context: Any, address: Any) -> Any:
    def generate(_c: Any, builder: Any, _s: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def _exchange(_context: Any, address: Any, value: Any) -> Any:
    def generate(_c: Any, builder: Any, _s: Any, values: Any) -> Any:
        return builder.atomic_rmw("xchg", builder.inttoptr(values[0], I64.as_pointer()), values[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _add(_context: Any, address: Any, value: Any) -> Any:
    def generate(_c: Any, builder: Any, _s: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(values[0], I64.as_pointer()), values[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _call(_context: Any, function: Any, thread: Any, n_threads: Any, arguments: Any) -> Any:
    def generate(context: Any, builder: Any, _s: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def _call_yield(_context: Any, function: Any) -> Any:
    def generate(context: Any, builder: Any, _s: Any, values: Any) -> Any:
        builder.call(builder.inttoptr(values[0], ir.FunctionType(I32, []).as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _pause(isa: Isa) -> Any:
    """A Numba function that tells the processor that this thread is polling, and takes some ten nanoseconds."""

    def generate(context: Any, builder: Any, _s: Any, _values: Any) -> Any:
        # ARM's own hint takes no time; emptying the pipeline does.
        name, arguments = {
            "x86_64": ("llvm.x86.sse2.pause", []),
            "aarch64": ("llvm.aarch64.isb", [ir.Constant(I32, 15)]),
        }.get(isa.machine, ("", []))
        if name:
            kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)
        return context.get_dummy_value()

    return intrinsic(lambda _context: (types.void(), generate))


def ticks(isa: Isa) -> Any:
    """A Numba function that reads a counter which grows evenly; 0 where there is none."""

    def generate(_context: Any, builder: Any, _s: Any, _values: Any) -> Any:
        if isa.machine == "x86_64":
            name, arguments = "llvm.readcyclecounter", []
        elif isa.machine == "aarch64":  # whose cycle counter is not for programs
            name, arguments = "llvm.read_volatile_register.i64", [builder.module.add_metadata(["cntvct_el0"])]
        else:
            return ir.Constant(I64, 0)
        kind = ir.FunctionType(I64, [argument.type for argument in arguments])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

    return intrinsic(lambda _context: (types.int64(), generate))


@intrinsic
def _call_futex(_context: Any, function: Any, number: Any, address: Any, operation: Any, value: Any) -> Any:
    """Linux's futex through the C library's variadic `syscall`."""

    def generate(context: Any, builder: Any, _s: Any, values: Any) -> Any:
        kind = ir.FunctionType(I64, [I64], var_arg=True)
        none = ir.Constant(I64, 0)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [*values[1:], none, none, none])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


WAIT, WAKE, EVERYBODY = 128, 129, 0x7FFFFFFF  # private to the process


@numba.njit(error_model="numpy", forceinline=True)
def _sleep(state, place, target):
    """Sleeps until the word at `place` changes, unless it has reached the target."""
    _add(state + 8 * SLEEPERS, 1)
    seen = _load(state + 8 * place)
    if seen < target:
        _call_futex(word(state, SYSCALL), word(state, FUTEX), state + 8 * place, WAIT, seen & 0xFFFFFFFF)
    _add(state + 8 * SLEEPERS, -1)


@numba.njit(error_model="numpy", forceinline=True)
def _wake(state, place):
    """Wakes those who sleep on the word at `place`, which has just grown."""
    if _load(state + 8 * SLEEPERS) > 0:
        _call_futex(word(state, SYSCALL), word(state, FUTEX), state + 8 * place, WAKE, EVERYBODY)


@numba.njit(error_model="numpy", forceinline=True)
def _post(tape, n_ops, state):
    """Announces a tape to the workers, who have all left the one before."""
    put_word(state + 8 * TAPE, tape)
    put_word(state + 8 * N_OPS, n_ops)
    put_word(state + 8 * BASE, _load(state + 8 * ARRIVALS))
    _add(state + 8 * GENERATION, 1)
    _wake(state, GENERATION)


def build(isa: Isa, role: str) -> Callable[[int, int, int], None]:
    """Roles: "lead" walks a tape, "worker" waits for tapes until it parks, "post" announces a tape.

    The third argument is the address of the state. The first two are a worker's number and that of all threads; for
    the others the tape and how many ops it has. Where workers sleep in the kernel, who leads announces the tape as
    well: between two tapes caches are cold, and a call from Python more would be felt.
    """
    leads = role == "lead"
    pause = _pause(isa)

    def post(tape, n_ops, state):
        _post(tape, n_ops, state)

    if role == "post":
        return post

    def walk(first, second, state):
        thread, n_threads = first, second
        if leads:
            thread, n_threads = 0, word(state, N_THREADS)
            if word(state, SYSCALL):
                _post(first, second, state)
        while True:
            mine = state + 8 * (PARKED + LINE * thread)
            if not leads:
                seen = word(mine, 1)
                tries = 0
                while _load(state + 8 * GENERATION) == seen:
                    tries += 1
                    if tries < IDLE_SPINS:
                        pause()
                    elif word(state, SYSCALL):
                        _sleep(state, GENERATION, seen + 1)
                    elif tries < IDLE_SPINS + YIELDS:
                        _call_yield(word(state, YIELD))
                    else:
                        _exchange(mine, 1)
                        if _load(state + 8 * GENERATION) == seen:
                            return  # the caller sleeps until it is woken, and calls again
                        _exchange(mine, 0)
                put_word(mine + 8, seen + 1)
                if _load(state + 8 * STOP):
                    return
            tape, n_ops, target = word(state, TAPE), word(state, N_OPS), word(state, BASE)
            generation = word(state, GENERATION) if leads else word(mine, 1)
            i = 0
            while i < n_ops:
                op = tape + 24 * i
                i += 1
                _call(word(op, 0), thread, n_threads, word(op, 1))
                if word(op, 2):
                    target += n_threads
                    if _add(state + 8 * ARRIVALS, 1) + 1 == target:
                        _wake(state, ARRIVALS)
                    tries = 0
                    while _load(state + 8 * ARRIVALS) < target:
                        tries += 1
                        if tries < SPINS or not word(state, SYSCALL):
                            pause()
                            if tries % PATIENCE == 0:
                                _call_yield(word(state, YIELD))
                        else:
                            _sleep(state, ARRIVALS, target)
                    if word(op, 2) == LEAVE and _load(state + 8 * ENDED) >= generation:
                        tape, n_ops, i = word(state, NEXT), word(state, N_NEXT), 0
            if leads:
                return

    return walk
