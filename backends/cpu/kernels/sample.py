"""Chooses a token: penalties, top-k, top-p, min-p, temperature and the draw, in a few passes over the logits.

The logits are seen in blocks of 64 whose maxima are found first: later passes skip every block that holds nothing
above their threshold. Nothing is sorted: each rule is a bar, the lowest (logit, id) that it keeps, found by
quickselect among the few logits that can matter. The draw is a race: each kept token has a random time of its own,
drawn from the seed, the place in the text and the token alone. Equal logits rank by id, lower first.
`edgert/sampler.py` says the same in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.sampling import ALL_FORBIDDEN, BLOCK, NOT_FINITE, PLACE, RACE_DEPTH
from edgert.backends.cpu.simd import F32, I32, I64, Emitter, Value, emitted, word

_LOWEST = -(1 << 63)  # the bar that keeps all
_ID_MASK = 0xFFFFFFFF
_KEY_OF_MINUS_INFINITY = -0x7F800000


def build(isa: Isa) -> Callable[[int, int, int], None]:
    """The kernel; one thread does all."""
    call = chooser(isa, "sample")
    put = emitted(isa, 3, _store_word)
    TOKEN = PLACE["token"]

    def sample(thread, n_threads, a):
        if thread == 0:
            put(a, TOKEN, call(a))

    sample.__qualname__ = f"{isa.name}.{sample.__qualname__}"
    return sample


def chooser(isa: Isa, owner: str) -> Any:
    """A Numba function (address of the arguments) that chooses a token.

    owner:  the kernel that it is for; kernels are loaded together, and their symbols must differ
    """
    scan = emitted(isa, 3, _scan, types.int64)
    block_peak = emitted(isa, 1, _block_peak, types.int64)
    block_mass = emitted(isa, 6, _block_mass, types.float64)
    exp = emitted(isa, 1, _exp, types.float64)
    logit_at = emitted(isa, 2, _load_float, types.float64)
    double_at = emitted(isa, 2, _load_double, types.float64)
    bits_at = emitted(isa, 2, _load_int, types.int64)
    put = emitted(isa, 3, _store_word)

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__qualname__ = f"{isa.name}.{owner}.{function.__qualname__}"  # symbols of two sets must not meet
        return function

    def helper(function: Callable[..., Any]) -> Any:
        return numba.njit(error_model="numpy", forceinline=True)(named(function))

    LOGITS, N, SEED, IDS, PLACES = (PLACE[x] for x in ("logits", "n", "seed", "ids", "places"))
    HISTORY, N_HISTORY, N_LAST = PLACE["history"], PLACE["n_history"], PLACE["n_last"]
    BIAS_IDS, BIAS, N_BIAS, TOP_K = PLACE["bias_ids"], PLACE["bias"], PLACE["n_bias"], PLACE["top_k"]
    TEMPERATURE, TOP_P, LOG_MIN_P = PLACE["temperature"], PLACE["top_p"], PLACE["log_min_p"]
    REPEAT, PRESENCE, FREQUENCY = (PLACE[f"{x}_penalty"] for x in ("repeat", "presence", "frequency"))
    LOG_REST, PEAKS, MASSES = PLACE["log_rest"], PLACE["peaks"], PLACE["masses"]
    WANT_SHARE, SHARE = PLACE["want_share"], PLACE["share"]
    RANKS, COUNTS, UNDO = PLACE["ranks"], PLACE["counts"], PLACE["undo"]

    @helper
    def key_at(logits, i):
        bits = bits_at(logits, i)
        sign = bits >> 31
        return (bits ^ (sign & 0x7FFFFFFF)) - sign  # an integer that orders as the float does

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
    def place_of(a, token):
        return bits_at(word(a, PLACES), token) if word(a, PLACES) else token

    @helper
    def id_of(a, place):
        return word(word(a, IDS), place) if word(a, IDS) else place

    @helper
    def bend(a, logits):
        """Bias and penalties; returns how many (id, former value) pairs lie in undo."""
        undo, n_undo = word(a, UNDO), 0
        for j in range(word(a, N_BIAS)):
            token = word(word(a, BIAS_IDS), j)
            value = logit_at(logits, token)
            put(undo, 2 * n_undo, token)
            put(undo, 2 * n_undo + 1, bits_at(logits, token))
            n_undo += 1
            put_logit(logits, token, value + double_at(word(a, BIAS), j))
        history, n_history, counts = word(a, HISTORY), word(a, N_HISTORY), word(a, COUNTS)
        n_last = word(a, N_LAST)
        begin = max(0, n_history - n_last) if n_last >= 0 else 0
        for j in range(begin, n_history):
            token = place_of(a, bits_at(history, j))
            if token >= 0:
                put(counts, token, word(counts, token) + 1)
        for j in range(begin, n_history):
            token = place_of(a, bits_at(history, j))
            count = word(counts, token) if token >= 0 else 0
            if count:
                put(counts, token, 0)
                value = logit_at(logits, token)
                put(undo, 2 * n_undo, token)
                put(undo, 2 * n_undo + 1, bits_at(logits, token))
                n_undo += 1
                repeat = double_at(a, REPEAT)
                value = value / repeat if value > 0 else value * repeat
                put_logit(logits, token, value - count * double_at(a, FREQUENCY) - double_at(a, PRESENCE))
        return n_undo

    @helper
    def gather(logits, n, peaks, floor, ranks):
        """Writes the ranks of all logits whose key is at least floor; returns how many."""
        count = 0
        for block in range((n + BLOCK - 1) // BLOCK):
            if word(peaks, block) >= floor:
                for i in range(block * BLOCK, min(n, block * BLOCK + BLOCK)):
                    key = key_at(logits, i)
                    if key >= floor:
                        put(ranks, count, (key << 32) | (_ID_MASK - i))
                        count += 1
        return count

    @helper
    def weight(rank, weighted, peak):
        return exp(bits_of(value_of(rank >> 32) - peak)) if weighted else 1.0

    @helper
    def select(ranks, n, goal, weighted, peak):
        """The highest bar above which the weights reach the goal; _LOWEST if all together do not."""
        low, high, above = 0, n, 0.0
        while low < high:
            first, middle, last = word(ranks, low), word(ranks, (low + high) // 2), word(ranks, high - 1)
            pivot = max(min(first, middle), min(max(first, middle), last))
            i, j = low, high - 1
            while True:  # ranks differ, so i and j meet at the pivot
                while word(ranks, i) > pivot:
                    i += 1
                while word(ranks, j) < pivot:
                    j -= 1
                if i >= j:
                    break
                left = word(ranks, i)
                put(ranks, i, word(ranks, j))
                put(ranks, j, left)
            mass = above
            for m in range(low, i):
                mass += weight(word(ranks, m), weighted, peak)
            if i > low and mass >= goal:
                high = i
            else:
                above = mass + weight(pivot, weighted, peak)
                if above >= goal:
                    return pivot
                low = i + 1
        return _LOWEST

    @helper
    def mass_of(logits, n, block, peak, scale, bar):
        """Sum of exp((logit - peak) * scale) of a block's tokens that rank at the bar or above."""
        start = block * BLOCK
        if start + BLOCK <= n:
            return block_mass(
                logits + 4 * start, start, bits_of(peak), bits_of(scale), bar >> 32, _ID_MASK - (bar & _ID_MASK)
            )
        mass = 0.0
        for i in range(start, n):
            if ((key_at(logits, i) << 32) | (_ID_MASK - i)) >= bar:
                mass += exp(bits_of((logit_at(logits, i) - peak) * scale))
        return mass

    @helper
    def bar_of(a, logits, n, peak, floor):
        """The highest bar of top-k, top-p and min-p; floor is the key that min-p asks for."""
        peaks, ranks, top_k, top_p = word(a, PEAKS), word(a, RANKS), word(a, TOP_K), double_at(a, TOP_P)
        n_blocks = (n + BLOCK - 1) // BLOCK
        bar = floor << 32
        if 0 < top_k < n:
            least = _KEY_OF_MINUS_INFINITY
            if top_k <= n_blocks:  # so many blocks have a logit as high as the top_k-th of their peaks
                for block in range(n_blocks):
                    put(ranks, block, (word(peaks, block) << 32) | (_ID_MASK - block))
                least = select(ranks, n_blocks, float(top_k), False, peak) >> 32
            count = gather(logits, n, peaks, least, ranks)
            best = select(ranks, count, float(top_k), False, peak)
            bar = max(bar, best)
            if top_p < 1:
                total, kept = 0.0, 0
                for j in range(count):
                    rank = word(ranks, j)
                    if rank >= best:
                        put(ranks, kept, rank)
                        kept += 1
                        total += weight(rank, True, peak)
                bar = max(bar, select(ranks, kept, top_p * total, True, peak))
        elif top_p < 1:
            total = 0.0
            for block in range(n_blocks):
                total += mass_of(logits, n, block, peak, 1.0, _LOWEST)
            depth, half = double_at(a, LOG_REST), total
            while half >= 2:  # what lies deeper has together less than 1 - top_p of the total
                depth -= 0.693147
                half *= 0.5
            count = gather(logits, n, peaks, max(floor, key_of(peak - depth)), ranks)
            bar = max(bar, select(ranks, count, top_p * total, True, peak))
        return bar

    @helper
    def shifted(z, bits):
        return (z >> bits) & ((1 << (64 - bits)) - 1)  # as an unsigned number

    @helper
    def mixed(z):
        z = (z ^ shifted(z, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
        z = (z ^ shifted(z, 27)) * (0x94D049BB133111EB - (1 << 64))
        return z ^ shifted(z, 31)

    @helper
    def state_of(seed, counter):
        """As `_state` of edgert/sampler.py."""
        return mixed(mixed(seed ^ 0x5851F42D4C957F2D) + counter * (0x9E3779B97F4A7C15 - (1 << 64)))

    @helper
    def log_of(u):
        """Natural logarithm of a float64 in (0, 1)."""
        bits = double_bits(u)
        exponent = (bits >> 52) - 1022
        m = double_of((bits & ((1 << 52) - 1)) | (1022 << 52))  # 0.5 to 1
        if m < 0.7071067811865476:
            m *= 2
            exponent -= 1
        s = (m - 1) / (m + 1)
        z, series = s * s, 0.0
        for i in range(10, 0, -1):
            series = (series + 1.0 / (2 * i + 1)) * z
        return exponent * 0.6931471805599453 + 2 * s * (1 + series)

    @helper
    def time_of(state, token):
        """A token's exponentially distributed time; -1: of all tokens far from the best together."""
        z = mixed(state + (token + 1) * (0xD1342543DE82EF95 - (1 << 64)))
        return -log_of((shifted(z, 11) + 0.5) * 2.0**-53)

    @helper
    def draw(a, logits, n, peak, bar):
        """The first to arrive, a token's time being divided by its share."""
        peaks, masses, n_blocks = word(a, PEAKS), word(a, MASSES), (n + BLOCK - 1) // BLOCK
        temperature = double_at(a, TEMPERATURE)
        scale, state = 1.0 / temperature, state_of(word(a, SEED), word(a, N_HISTORY))
        near = max(bar, key_of(peak - RACE_DEPTH * temperature) << 32)
        total, rest, last, token, speed, won = 0.0, 0.0, 0, -1, 0.0, 0.0
        for block in range(n_blocks):
            far = 0.0
            if word(peaks, block) >= near >> 32:
                for i in range(block * BLOCK, min(n, block * BLOCK + BLOCK)):
                    rank = (key_at(logits, i) << 32) | (_ID_MASK - i)
                    if rank >= bar:
                        share = exp(bits_of((logit_at(logits, i) - peak) * scale))
                        if rank >= near:
                            total += share
                            time = time_of(state, id_of(a, i))
                            if share > speed * time:
                                speed, token, won = share / time, i, share
                        else:
                            far += share
            elif word(peaks, block) >= bar >> 32:
                far = mass_of(logits, n, block, peak, scale, bar)
            if far > 0:
                last = block
            rest += far
            put(masses, block, double_bits(far))
        if rest > 0 and rest > speed * time_of(state, -1):
            goal, block = shifted(state, 11) * 2.0**-53 * rest, 0
            while block < last and goal >= double_at(masses, block):
                goal -= double_at(masses, block)
                block += 1
            for i in range(block * BLOCK, min(n, block * BLOCK + BLOCK)):
                rank = (key_at(logits, i) << 32) | (_ID_MASK - i)
                if bar <= rank < near:
                    share = exp(bits_of((logit_at(logits, i) - peak) * scale))
                    if share > 0:
                        token, won = i, share
                        goal -= share
                        if goal < 0:
                            break
        put(a, SHARE, double_bits(won / (total + rest)))
        return token

    @helper
    def share_of_best(a, logits, n, peak):
        """The best token's probability at temperature 1; what is far below it counts as nothing."""
        peaks, total, floor = word(a, PEAKS), 0.0, key_of(peak - 16.0)
        for block in range((n + BLOCK - 1) // BLOCK):
            if word(peaks, block) >= floor:
                total += mass_of(logits, n, block, peak, 1.0, _LOWEST)
        put(a, SHARE, double_bits(1.0 / total))

    @helper
    def choose(a, logits, n):
        peaks, n_blocks = word(a, PEAKS), (n + BLOCK - 1) // BLOCK
        best = _LOWEST
        for block in range(n_blocks):
            best = max(best, (word(peaks, block) << 32) | (_ID_MASK - block))
        key, block = best >> 32, _ID_MASK - (best & _ID_MASK)
        if key == _KEY_OF_MINUS_INFINITY:
            return ALL_FORBIDDEN
        if double_at(a, TEMPERATURE) == 0 or word(a, TOP_K) == 1:
            token = block * BLOCK
            while key_at(logits, token) != key:
                token += 1
            if word(a, WANT_SHARE):
                share_of_best(a, logits, n, value_of(key))
            return token
        peak = value_of(key)
        return draw(a, logits, n, peak, bar_of(a, logits, n, peak, key_of(peak + double_at(a, LOG_MIN_P))))

    @named
    def result_of(a):
        logits, n, peaks = word(a, LOGITS), word(a, N), word(a, PEAKS)
        n_blocks = n // BLOCK
        magnitude = scan(logits, n_blocks, peaks)
        for i in range(n_blocks * BLOCK, n):
            magnitude = max(magnitude, bits_at(logits, i) & 0x7FFFFFFF)
        if magnitude >= 0x7F800000:
            return NOT_FINITE
        if n_blocks * BLOCK < n:
            put(peaks, n_blocks, peak_of(logits, n, n_blocks))
        n_undo, undo = bend(a, logits), word(a, UNDO)
        for j in range(n_undo):
            block = word(undo, 2 * j) // BLOCK
            put(peaks, block, peak_of(logits, n, block))
        token = choose(a, logits, n)
        for j in range(n_undo - 1, -1, -1):
            put_bits(logits, word(undo, 2 * j), word(undo, 2 * j + 1))
        return token

    @intrinsic
    def call(_context: Any, a: Any) -> Any:
        """Calls result_of as C would: Numba's own call brings code for exceptions, and with it CPython's symbols."""
        signature = types.int64(types.int64)

        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            compiled = context.compile_subroutine(builder, result_of, signature)
            _, value = context.call_internal_no_propagate(builder, compiled.fndesc, signature, values)
            return value

        return signature, generate

    return call


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
    """Stores each block's highest key; returns the largest magnitude of all, as bits."""
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


# Scalars


def _float(e: Emitter, bits: Value) -> Value:
    return e.b.bitcast(e.b.trunc(bits, I32), F32)


def _exp(e: Emitter, bits: Value) -> Value:
    """exp of the float32 with these bits, by the same code as the vectors'."""
    value = e.b.extract_element(e.exp(e.splat(_float(e, bits))), ir.Constant(I32, 0))
    return e.b.fpext(value, ir.DoubleType())


def _load_float(e: Emitter, address: Value, index: Value) -> Value:
    return e.b.fpext(e.load(F32, address, e.mul(index, 4)), ir.DoubleType())


def _load_double(e: Emitter, address: Value, index: Value) -> Value:
    return e.load(ir.DoubleType(), address, e.mul(index, 8))


def _load_int(e: Emitter, address: Value, index: Value) -> Value:
    return e.b.sext(e.load(I32, address, e.mul(index, 4)), I64)


def _store_word(e: Emitter, address: Value, index: Value, value: Value) -> None:
    e.store(value, address, e.mul(index, 8))


@intrinsic
def put_bits(_context: Any, address: Any, index: Any, bits: Any) -> Any:
    """Stores the low 32 bits at place `index` (of four bytes)."""

    def generate(context: Any, builder: Any, _s: Any, values: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(values[0], I32.as_pointer()), [values[1]])
        builder.store(builder.trunc(values[2], I32), pointer)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def put_logit(_context: Any, address: Any, index: Any, value: Any) -> Any:
    """Stores a float64 as the float32 at place `index`."""

    def generate(context: Any, builder: Any, _s: Any, values: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(values[0], F32.as_pointer()), [values[1]])
        builder.store(builder.fptrunc(values[2], F32), pointer)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float64), generate


@intrinsic
def bits_of(_context: Any, value: Any) -> Any:
    """The bits of a float64 rounded to float32, in an int64."""

    def generate(_c: Any, builder: Any, _s: Any, values: Any) -> Any:
        return builder.sext(builder.bitcast(builder.fptrunc(values[0], F32), I32), I64)

    return types.int64(types.float64), generate


@intrinsic
def double_bits(_context: Any, value: Any) -> Any:
    """The bits of a float64."""

    def generate(_c: Any, builder: Any, _s: Any, values: Any) -> Any:
        return builder.bitcast(values[0], I64)

    return types.int64(types.float64), generate


@intrinsic
def double_of(_context: Any, bits: Any) -> Any:
    """The float64 with these bits."""

    def generate(_c: Any, builder: Any, _s: Any, values: Any) -> Any:
        return builder.bitcast(values[0], ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic
def value_of(_context: Any, key: Any) -> Any:
    """The float32 whose key this is, as float64."""

    def generate(_c: Any, builder: Any, _s: Any, values: Any) -> Any:
        key = builder.trunc(values[0], I32)
        sign = builder.ashr(key, ir.Constant(I32, 31))
        bits = builder.xor(builder.add(key, sign), builder.and_(sign, ir.Constant(I32, 0x7FFFFFFF)))
        return builder.fpext(builder.bitcast(bits, F32), ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic
def key_of(_context: Any, value: Any) -> Any:
    """The key of the least float32 that is not below a float64."""

    def generate(_c: Any, builder: Any, _s: Any, values: Any) -> Any:
        rounded = builder.fptrunc(values[0], F32)
        bits = builder.bitcast(rounded, I32)
        sign = builder.ashr(bits, ir.Constant(I32, 31))
        key = builder.sub(builder.xor(bits, builder.and_(sign, ir.Constant(I32, 0x7FFFFFFF))), sign)
        key = builder.sext(key, I64)
        below = builder.fcmp_ordered("<", builder.fpext(rounded, ir.DoubleType()), values[0])
        return builder.add(key, builder.zext(below, I64))

    return types.int64(types.float64), generate
