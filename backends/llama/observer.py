"""What llama.cpp's matrix products read, taken from its graph while it is computed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import OnInput
from edgert.backends.llama.library import ggml_function
from edgert.errors import BackendUnavailableError
from edgert.quantize.engine import Expert

F32, I32 = 0, 26  # of ggml_type
Dims = ctypes.c_int64 * 4


class Tensor(ctypes.Structure):
    """ggml_tensor as ggml.h has it; `check_layout` looks whether the installed build agrees."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", Dims),
        ("nb", Dims),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    ]


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def check_layout() -> dict[int, str]:
    """The numbers of ggml's two products, once a tensor is known to lie in memory as `Tensor` says.

    Raises: BackendUnavailableError for a build with other tensors.
    """
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    context = ggml_function("ggml_init", pointer, _InitParams)(_InitParams(1 << 16, None, True))
    try:
        make = ggml_function("ggml_new_tensor_2d", pointer, pointer, ctypes.c_int, long, long)
        a, b = make(context, F32, 3, 5), make(context, F32, 3, 7)
        product = ggml_function("ggml_mul_mat", pointer, pointer, pointer, pointer)(context, a, b)
        ggml_function("ggml_set_name", pointer, pointer, ctypes.c_char_p)(product, b"product")
        found = Tensor.from_address(product)
        name = ggml_function("ggml_op_name", ctypes.c_char_p, ctypes.c_int)
        seen = list(found.ne), list(found.nb), list(found.src[:3]), found.name, name(found.op), found.type
        if seen != ([5, 7, 1, 1], [4, 20, 140, 140], [a, b, None], b"product", b"MUL_MAT", F32):
            raise BackendUnavailableError(
                "The installed llama.cpp keeps its tensors otherwise than edgert knows, so that what they read "
                "cannot be observed: choose --backend cpu, or another version of llama-cpp-python."
            )
        following = name(found.op + 1)
        return {found.op: "MUL_MAT"} | ({found.op + 1: "MUL_MAT_ID"} if following == b"MUL_MAT_ID" else {})
    finally:
        ggml_function("ggml_free", None, pointer)(context)


class Observer:
    """The callback of a context: while `on_input` is set it is told of every product with a tensor of these names."""

    def __init__(self, callback_type: Any, names: Collection[str]) -> None:
        """Raises: BackendUnavailableError when the build's tensors cannot be read."""
        self._names = {name.encode(): name for name in names}
        self._operators = check_layout()
        self._n_bytes = ggml_function("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
        arguments = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
        self._get = ggml_function("ggml_backend_tensor_get", None, *arguments)
        self.on_input: OnInput | None = None
        self.error: BaseException | None = None
        self.callback = callback_type(lambda address, ask, _: self._see(address, ask))

    def watch(self, on_input: OnInput, work: Callable[[], object]) -> None:
        """Does the work while on_input sees. Raises: what on_input raised, once the work is done."""
        self.on_input, self.error = on_input, None
        try:
            work()
        finally:
            self.on_input = None
        if self.error is not None:
            raise self.error

    def _see(self, address: int, ask: bool) -> bool:
        """Whether the tensor's sources are wanted, or, when it has been computed, whether to go on."""
        if self.on_input is None or self.error is not None:
            return not ask
        tensor = Tensor.from_address(address)
        if tensor.op not in self._operators:
            return not ask
        name = self._names.get(Tensor.from_address(tensor.src[0]).name)
        if name is None or ask:
            return name is not None or not ask
        try:  # an exception cannot pass through llama.cpp
            self._tell(name, tensor)
        except BaseException as error:
            self.error = error
        return self.error is None

    def _tell(self, name: str, tensor: Tensor) -> None:
        assert self.on_input is not None
        rows = self._values(tensor.src[1], F32, np.float32)
        width = rows.shape[-1]
        if self._operators[tensor.op] == "MUL_MAT":
            self.on_input((name,), rows.reshape(-1, width))
            return
        chosen = self._values(tensor.src[2], I32, np.int32)[0, 0]  # (n_tokens, n_used)
        rows = np.broadcast_to(rows[0], (*chosen.shape, width))  # one for all, or one for each
        n_expert = int(Tensor.from_address(tensor.src[0]).ne[2])
        for expert in np.unique(chosen).tolist():
            self.on_input((name,), rows[chosen == expert], Expert(expert, n_expert))

    def _values(self, address: int, kind: int, dtype: Any) -> NDArray[Any]:
        """A tensor's values (ne3, ne2, ne1, ne0), copied from wherever they are."""
        tensor = Tensor.from_address(address)
        if tensor.type != kind:
            raise BackendUnavailableError(
                f"{tensor.name.decode()} is of ggml's type {tensor.type}, not {kind}: choose --backend cpu."
            )
        data = np.empty(self._n_bytes(address), np.uint8)
        self._get(address, data.ctypes.data, 0, data.nbytes)
        shape, strides = list(tensor.ne)[::-1], list(tensor.nb)[::-1]
        return np.ascontiguousarray(np.ndarray(shape, dtype, data.data, strides=strides))
