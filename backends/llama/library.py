"""The door to llama-cpp-python: its library loaded once, its log taken in."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import re
import sys
from types import ModuleType
from typing import Any

from edgert.errors import BackendUnavailableError

log = logging.getLogger("edgert.backends.llama")
log.addHandler(logging.NullHandler())

INSTALL = "pip install 'edgert[gpu]'"

# ggml's levels debug, info, warn, error; 5 continues the previous line. Its warnings are no failures.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
_BUFFER = re.compile(r"(\S+)\s+(model|KV|compute|output|RS) buffer size\s*=\s*([\d.]+) MiB")


class Log:
    """Receives llama.cpp's log, passes it to `logging` line by line and keeps what a load reported."""

    def __init__(self) -> None:
        self.pending = ""
        self.level = logging.DEBUG
        self.lines: list[str] = []
        self.errors: list[str] = []

    def write(self, level: int, text: bytes) -> None:
        if level != 5:
            self.level = _LEVELS.get(level, logging.DEBUG)
        self.pending += text.decode("utf-8", "replace")
        *lines, self.pending = self.pending.split("\n")
        for line in filter(None, lines):
            if self.level >= logging.ERROR:
                self.errors.append(line)
            self.lines.append(line)
            log.log(self.level, "%s", line)
        del self.lines[:-2000]

    def clear(self) -> None:
        self.lines.clear()
        self.errors.clear()

    @property
    def reason(self) -> str:
        """What went wrong last, in llama.cpp's words."""
        told = [line for line in self.errors if not line.endswith("failed to load model")] or self.errors
        return told[-1] if told else "no reason in its log"

    def buffers(self) -> list[tuple[str, str, str]]:
        """(device, what it is for, MiB) of the memory that the load reported."""
        return [match.groups() for line in self.lines if (match := _BUFFER.search(line))]  # type: ignore[misc]


# What this door's users call, but for what every version has had for long.
NEEDED = (
    "llama_get_memory",
    "llama_init_from_model",
    "llama_memory_can_shift",
    "llama_memory_seq_add",
    "llama_memory_seq_cp",
    "llama_memory_seq_pos_max",
    "llama_memory_seq_pos_min",
    "llama_memory_seq_rm",
    "llama_model_load_from_file",
    "llama_model_n_params",
    "llama_set_embeddings",
    "llama_state_seq_get_data",
    "llama_state_seq_set_data",
    "llama_supports_rpc",
    "llama_vocab_n_tokens",
)

messages = Log()
_complaints: list[str] = []  # of drivers, when the library looked for devices
_library: ModuleType | None = None
_callback: Any = None  # llama.cpp keeps a bare pointer to it


def library() -> ModuleType:
    """llama_cpp's low-level module, initialised once.

    Raises: BackendUnavailableError when the package is absent or its library cannot be loaded.
    """
    global _library, _callback
    if _library is None:
        _load_libstdcxx()
        try:
            module = importlib.import_module("llama_cpp.llama_cpp")
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("llama_cpp"):
                raise
            raise BackendUnavailableError(f"llama-cpp-python is not installed: {INSTALL}") from error
        except (OSError, RuntimeError) as error:
            raise BackendUnavailableError(
                f"llama-cpp-python is installed but its library does not load ({error}): "
                f"build it again with {INSTALL} --force-reinstall --no-binary llama-cpp-python"
            ) from error
        if missing := [name for name in NEEDED if not hasattr(module, name)]:
            found = getattr(sys.modules.get("llama_cpp"), "__version__", "")
            raise BackendUnavailableError(
                f"llama-cpp-python {found} is too old or too new for edgert, since it has no {missing[0]}: "
                f"{INSTALL} --upgrade --force-reinstall"
            )
        _callback = module.llama_log_callback(lambda level, text, _: messages.write(level, text))
        module.llama_log_set(_callback, ctypes.c_void_p(0))
        module.llama_backend_init()
        _complaints[:] = messages.errors
        _library = module
    return _library


def complaint() -> str:
    """What the library said when it found no device that it was built for, such as that a driver is too old."""
    return _complaints[-1].strip() if _complaints else ""


def function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of llama.cpp with types of our own: the package's wrap what they return in objects, call by call."""
    prototype = ctypes.CFUNCTYPE(result, *arguments)
    return prototype((name, library()._lib))


def ggml_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the ggml below llama.cpp, which the package declares none of."""
    function = getattr(importlib.import_module("llama_cpp._ggml").libggml, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


def _load_libstdcxx() -> None:
    """A CUDA build carries pieces of another libstdc++, which its regular expressions must not meet: SIGSEGV."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)


def version() -> str:
    """The version of llama-cpp-python."""
    library()
    return str(sys.modules["llama_cpp"].__version__)


def system_info() -> str:
    """What llama.cpp was compiled for and found here."""
    return str(library().llama_print_system_info().decode()).strip(" |")
