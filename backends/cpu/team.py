"""A team of threads that walk tapes of kernels together."""

from __future__ import annotations

import ctypes
import platform
import sys
import threading

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu import compiler
from edgert.backends.cpu.isa import Isa

# Places in the shared state; as in `kernels/walk.py`, which cannot be imported without Numba (a test compares them).
GENERATION, ARRIVALS, TAPE, N_OPS, BASE, STOP = 0, 16, 32, 33, 34, 35
YIELD, SYSCALL, FUTEX, ENDED, N_THREADS, NEXT, N_NEXT, PARKED, LINE = 36, 37, 38, 39, 41, 42, 43, 48, 8
LEAVE = 2  # after an op: all meet, and leave the tape if its kernel has ended it
KERNELS = ("walk.role=lead", "walk.role=worker", "walk.role=post")

_Kernel = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def _yield_address() -> int:
    """The address of the system's call that offers the core to other threads."""
    if sys.platform == "win32":
        function = ctypes.WinDLL("kernel32").SwitchToThread
    else:
        function = ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _futex() -> tuple[int, int]:
    """The address of the C library's `syscall` and futex's number, by which threads sleep; zeros without."""
    number = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
    return (ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value or 0, number) if number else (0, 0)


class Team:
    """The calling thread and n_threads - 1 workers; who waits polls for a moment and then sleeps."""

    def __init__(self, n_threads: int, isa: Isa) -> None:
        self.n_threads = n_threads
        found = compiler.addresses(KERNELS, isa)
        self._lead, self._work, self._announce = (_Kernel(found[name]) for name in KERNELS)
        raw = np.zeros(PARKED + LINE * (n_threads + 2), np.int64)
        skip = -raw.ctypes.data % 64 // 8
        self._state: NDArray[np.int64] = raw[skip:]
        self._address = self._state.ctypes.data
        self._state[YIELD] = _yield_address()
        self._state[SYSCALL], self._state[FUTEX] = _futex()
        self._state[N_THREADS] = n_threads
        self._parks = not self._state[SYSCALL]  # workers wait outside the kernels, and are woken from here
        self._wake = [threading.Semaphore(0) for _ in range(n_threads)]
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"edgert-{i}", daemon=True)
            for i in range(1, n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, thread: int) -> None:
        parked = PARKED + LINE * thread
        while True:
            self._work(thread, self.n_threads, self._address)
            if self._state[STOP]:
                return
            self._wake[thread].acquire()
            self._state[parked] = 0

    @property
    def address(self) -> int:
        """Of the shared state, for kernels that end a tape."""
        return self._address

    def run(self, tape: NDArray[np.int64]) -> None:
        """Walks a tape, int64 (n_ops, 3); the last op must be a meeting point. Returns when all threads are done."""
        self.walk(tape.ctypes.data, len(tape))

    def walk(self, tape: int, n_ops: int) -> None:
        """The same by the tape's address."""
        if self._parks:
            self._announce(tape, n_ops, self._address)
            self._release()
        self._lead(tape, n_ops, self._address)

    def _release(self) -> None:
        """Wakes the workers that wait outside, after a tape was announced."""
        for thread in range(1, self.n_threads):
            if self._state[PARKED + LINE * thread]:
                self._state[PARKED + LINE * thread] = 0
                self._wake[thread].release()

    def close(self) -> None:
        """Ends the workers."""
        self._state[STOP] = 1
        self._announce(0, 0, self._address)
        self._release()
        for thread in self._threads:
            thread.join()
        self._threads = []
