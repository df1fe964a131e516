"""The one door to Numba in this package: `jit` compiles a kernel once and keeps its code in edgert's cache folder.

Importing this module imports Numba (half a second), so whoever only perhaps needs a kernel imports on use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

from edgert.quantize.jit import cache_folder, sources

logger = logging.getLogger(__name__)


class _Locator(_CacheLocator):
    def __init__(self, function: Any) -> None:
        self._module = function.__module__
        self._py_file = function.__code__.co_filename

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator:
        return cls(py_func)

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> tuple[str, str]:
        return numba.__version__, sources(self._module)

    def get_disambiguator(self) -> str:
        return self._module.removeprefix("edgert.quantize.")


class _Files(CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012 - Numba's name


class _Cache(FunctionCache):
    """Keyed by the kernel's name, the sources and the processor; a cache that cannot be used is no error."""

    _impl_class = _Files

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return sig, codegen.magic_tuple()  # a closure's contents are told by its name

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # damaged: compile again
            logger.debug("%s cannot be read: %s", self.cache_path, error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            logger.debug("%s cannot be written: %s", self.cache_path, error)


def jit(name: str = "") -> Callable[[Callable[..., Any]], Any]:
    """Compiles a kernel that callers enter from Python: no GIL, C's division, code kept in the cache.

    name: must tell kernels apart that one closure makes, with all that the closure holds
    """

    def decorate(function: Callable[..., Any]) -> Any:
        if name:
            function.__qualname__ = function.__name__ = name
        kernel = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)
        if sources(function.__module__):  # else old code could meet new sources
            kernel._cache = _Cache(function)
        return kernel

    return decorate


# A helper that becomes part of every kernel that calls it; it is not kept by itself. Without what would let Python
# and C call it, it takes a third less time to compile.
inline = numba.njit(nogil=True, error_model="numpy", forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def object_code(function: Callable[[Any], Any], name: str) -> tuple[str, bytes]:
    """The symbol and the object code of a kernel for `objects`: int64 (int64 address of its arguments).

    It must allocate nothing and raise nothing.
    """
    function.__qualname__ = function.__name__ = name  # Numba makes a symbol of it
    compiled = numba.cfunc(types.int64(types.int64), error_model="numpy")(function)
    return compiled.native_name, compiled._library._get_compiled_object()
