"""Logits as the kernels that choose tokens read them: in blocks, by keys that order as the floats do.

A block is 64 logits; its *peak* is the highest key in it, so that later passes skip every block that holds nothing
above their threshold. A *rank* is (key, id) in one integer, key in the upper half: equal logits rank by id, lower
first. Logits are float32 (n,) by address; scalars are float64, and handed to vector code as the bits of a float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.sampling import BLOCK
from edgert.backends.cpu.simd import (
    F32,
    I32,
    I64,
    Emitter,
    Value,
    bits_of_real,
    emitted,
    int32_at,
    put_word,
    real_of_bits,
)

LOWEST = -(1 << 63)  # the rank that all others reach
KEY_OF_MINUS_INFINITY = -0x7F800000
ID_MASK = 0xFFFFFFFF

inlined = numba.njit(error_model="numpy", inline="always")


@dataclass(frozen=True)
class Logits:
    """Numba functions over logits, compiled for an instruction set.

    named:    gives a function a symbol of its own
    helper:   a decorator that makes another such function
    exp:      (bits) -> e to the float32 with these bits, by the same code as in the vectors
    scan:     (logits, n_blocks, peaks): stores the peaks of whole blocks, returns the largest magnitude as bits
    peak_of:  (logits, n, block) -> the block's peak; the last one may have fewer than 64
    mass_of:  (logits, n, block, peak, scale, bar) -> the sum of exp((logit - peak) * scale) of a block's tokens that
              rank at the bar or above
    """

    named: Callable[[Callable[..., Any]], Callable[..., Any]]
    helper: Callable[[Callable[..., Any]], Any]
    exp: Any
    scan: Any
    peak_of: Any
    mass_of: Any


def reader(isa: Isa, owner: str) -> Logits:
    """The functions for a kernel.

    owner:  the kernel's name; kernels are loaded together, and their symbols must differ
    """
    block_peak = emitted(isa, 1, _block_peak, types.int64)
    block_mass = emitted(isa, 6, _block_mass, types.float64)
    exp = emitted(isa, 1, _exp, types.float64)

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__qualname__ = f"{isa.name}.{owner}.{function.__qualname__}"
        return function

    def helper(function: Callable[..., Any]) -> Any:
        return numba.njit(error_model="numpy", forceinline=True)(named(function))

    @helper
    def peak_of(logits, n, block):
        start = block * BLOCK
        if start + BLOCK <= n:
            return block_peak(logits + 4 * start)
        peak = key_at(logits, start)
        for i in range(start + 1, n):
            peak = max(peak, key_at(logits, i))
        return peak

    @helper
    def mass_of(logits, n, block, peak, scale, bar):
        start = block * BLOCK
        if start + BLOCK <= n:
            return block_mass(
                logits + 4 * start, start, bits_of(peak), bits_of(scale), bar >> 32, ID_MASK - (bar & ID_MASK)
            )
        mass = 0.0
        for i in range(start, n):
            if rank_at(logits, i) >= bar:
                mass += exp(bits_of((logit_at(logits, i) - peak) * scale))
        return mass

    return Logits(named, helper, exp, emitted(isa, 3, _scan, types.int64), peak_of, mass_of)


# Vector passes


def _keys(e: Emitter, bits: Value) -> Value:
    """Integers that order as the floats with these bits do."""
    sign = e.b.ashr(bits, e.const(e.vi, 31))
    return e.b.sub(e.b.xor(bits, e.b.and_(sign, e.const(e.vi, 0x7FFFFFFF))), sign)


def _most(e: Emitter, a: Value, b: Value) -> Value:
    return e.b.select(e.b.icmp_signed(">", a, b), a, b)


def _block_peak(e: Emitter, address: Value) -> Value:
    peak = None
    for offset in range(0, 4 * BLOCK, 4 * e.lanes):
        keys = _keys(e, e.load(e.vi, address, offset))
        peak = keys if peak is None else _most(e, peak, keys)
    return e.b.sext(e.reduce(peak, lambda a, b: _most(e, a, b)), I64)


def _scan(e: Emitter, logits: Value, n_blocks: Value, peaks: Value) -> Value:
    largest = e.var(e.zero(e.vi))
    with e.loop(0, n_blocks) as block:
        address = e.add(logits, e.mul(block, 4 * BLOCK))
        magnitude = largest.get()
        for offset in range(0, 4 * BLOCK, 4 * e.lanes):
            bits = e.b.and_(e.load(e.vi, address, offset), e.const(e.vi, 0x7FFFFFFF))
            magnitude = _most(e, magnitude, bits)
        largest.set(magnitude)
        e.store(_block_peak(e, address), e.add(peaks, e.mul(block, 8)))
    return e.b.sext(e.reduce(largest.get(), lambda a, b: _most(e, a, b)), I64)


def _block_mass(
    e: Emitter, address: Value, start: Value, peak: Value, scale: Value, key: Value, last_id: Value
) -> Value:
    """Sum of exp((logit - peak) * scale) where the key is higher, or equal and the id at most last_id."""
    peak, scale = (e.splat(_float(e, bits)) for bits in (peak, scale))
    bar = e.splat(e.b.trunc(key, I32))
    room = e.splat(e.b.trunc(e.b.sub(last_id, start), I32))  # a block's ids count from 0
    some = e.b.icmp_signed(">=", last_id, start)
    total = None
    for offset in range(0, BLOCK, e.lanes):
        values = e.load(e.vf, address, 4 * offset)
        keys = _keys(e, e.b.bitcast(values, e.vi))
        ids = ir.Constant(e.vi, [ir.Constant(I32, offset + lane) for lane in range(e.lanes)])
        tie = e.b.and_(e.b.icmp_unsigned("<=", ids, room), e.splat(some))
        kept = e.b.or_(e.b.icmp_signed(">", keys, bar), e.b.and_(e.b.icmp_signed("==", keys, bar), tie))
        share = e.exp(e.b.fmul(e.b.fsub(values, peak), scale))
        share = e.b.select(kept, share, e.zero(e.vf))
        total = share if total is None else e.b.fadd(total, share)
    return e.b.fpext(e.sum(total), ir.DoubleType())


def _exp(e: Emitter, bits: Value) -> Value:
    value = e.b.extract_element(e.exp(e.splat(_float(e, bits))), ir.Constant(I32, 0))
    return e.b.fpext(value, ir.DoubleType())


def _float(e: Emitter, bits: Value) -> Value:
    return e.b.bitcast(e.b.trunc(bits, I32), F32)


# Scalars


@inlined
def put(address, index, value):
    """Stores an int64 at place `index`."""
    put_word(address + 8 * index, value)


@inlined
def logit_at(logits, i):
    """A logit as float64."""
    return np.float64(real_of_bits(int32_at(logits, i)))


@inlined
def bits_of(value):
    """The bits of a float64 rounded to float32."""
    return bits_of_real(np.float32(value))


@inlined
def _ordered(bits):
    """A float32's key by its bits, which come as a signed integer."""
    sign = bits >> 31
    return (bits ^ (sign & 0x7FFFFFFF)) - sign


@inlined
def key_at(logits, i):
    """A logit's key."""
    return _ordered(int32_at(logits, i))


@inlined
def rank_at(logits, i):
    """A logit's rank."""
    return (key_at(logits, i) << 32) | (ID_MASK - i)


@inlined
def value_of(key):
    """The float32 whose key this is, as float64."""
    sign = key >> 31
    return np.float64(real_of_bits((key + sign) ^ (sign & 0x7FFFFFFF)))


@inlined
def key_of(value):
    """The key of the least float32 that is not below a float64."""
    rounded = np.float32(value)
    bits = (bits_of_real(rounded) ^ 0x80000000) - 0x80000000  # with its sign
    return _ordered(bits) + (1 if np.float64(rounded) < value else 0)


def _bitcast(source: Any, target: Any, kind: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], kind)

    return intrinsic(lambda _context, value: (target(source), generate))


double_bits = _bitcast(types.float64, types.int64, I64)
double_of = _bitcast(types.int64, types.float64, ir.DoubleType())
