"""Which layers of a model go to GPUs, and the load that puts them there."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgert import ending
from edgert.backends.llama import amx, devices
from edgert.backends.llama.library import library, system_info
from edgert.devices import probe
from edgert.errors import BackendUnavailableError, DoesNotFitError, RequestError

if TYPE_CHECKING:
    from edgert.quantize.gguf_file import GGUFFile

log = logging.getLogger(__name__)

FITTING = -2  # of n_gpu_layers: as many as fit
SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
REGISTER = "GGML_CUDA_REGISTER_HOST"  # asks llama.cpp to pin the mapped file for its GPUs


@dataclass
class Offload:
    """Which layers go to GPUs, and the words for it.

    total:    layers of the model and its head
    why_not:  what keeps it from being whole
    """

    n_layers: int
    total: int
    device: str
    why: str = ""
    why_not: str = ""
    remedy: str = ""
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    names: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        return 0 < self.total <= self.n_layers

    @classmethod
    def plan(
        cls,
        file: GGUFFile,
        wished: int,
        n_positions: int,
        kv_bytes: float,
        *,
        device: str = "",
        gpu_memory: int = 0,
        n_ubatch: int = 512,
        split_mode: str = "layer",
        tensor_split: Sequence[float] = (),
        main_gpu: int = 0,
    ) -> Offload:
        """What fits on the GPUs that this build sees.

        wished:       layers, -1 for all, FITTING
        n_positions:  of the cache
        kv_bytes:     of one element of the cache
        device:       "" or "gpu": all GPUs; "cpu": none; else their names between commas

        Raises: BackendUnavailableError for a device that is not here; RequestError for shares or a number of none.
        """
        from edgert.quantize.architecture import describe

        shares = tuple(tensor_split)
        numbers = all(isinstance(share, int | float) and 0 <= share < math.inf for share in shares)
        if shares and not (numbers and sum(shares) > 0):
            raise RequestError("tensor_split", f"must be shares from 0 on, not all of them 0, and is {shares}")
        device = device.strip()
        wished = 0 if device.lower() == "cpu" else wished
        names = () if device.lower() in ("", "cpu", "gpu") else tuple(name.strip() for name in device.split(","))
        found = devices.gpus(names)
        reason, remedy = devices.unreached() if not found and wished != 0 else ("", "")
        if device.lower() == "gpu" and not found:
            raise BackendUnavailableError(f"llama.cpp sees no GPU, since {reason}: {remedy}")
        if reason:
            why = "" if wished == FITTING else f"no GPU: {reason}"
            return cls(0, 0, "CPU", why, f"llama.cpp sees none, since {reason}", remedy)
        if wished == 0:
            chosen = "-ngl 0 keeps all layers on the CPU" if not device else "the device is the CPU"
            return cls(0, 0, "CPU", "", chosen, "leave -ngl and --device out")
        if split_mode == "none":
            found = found[main_gpu : main_gpu + 1]
            if not found:
                raise RequestError("main_gpu", f"is {main_gpu}; there is no such GPU")
            shares = ()
        if len(shares) > len(found):
            raise RequestError("tensor_split", f"has {len(shares)} shares; there are {len(found)} GPUs")
        shares += (0.0,) * (len(found) - len(shares) if shares else 0)
        a = describe(file)
        total = a.n_layer + 1
        free = [min(gpu.memory_free, gpu_memory or gpu.memory_free) for gpu in found]
        fit = devices.layers_that_fit(file, a, free, n_positions, kv_bytes, n_ubatch, shares)
        if device and wished == FITTING and not fit:
            raise DoesNotFitError(
                f"Not one layer of {file.path} fits beside {n_positions} cached positions into "
                f"{', '.join(f'{size >> 20} MiB' for size in free)} of GPU memory: choose a smaller -c/--ctx-size."
            )
        n = fit if wished == FITTING else total if wished < 0 else min(wished, total)
        if split_mode == "row" and n and not all(map(devices.splits_rows, found)):
            raise BackendUnavailableError(
                f"This build of llama.cpp cannot split rows among {found[0].name} and its like: choose layer or tensor."
            )
        described = ", ".join(f"{gpu.name} ({gpu.description})" for gpu in found)
        room = ", ".join(f"{size >> 20} MiB" for size in free)
        why = f"{n} of {total} layers on the GPU" + (f", {fit} fit into {room}" if fit < total or n != fit else "")
        why_not = f"{n} of {total} layers fit into {room}"
        remedy = "choose a smaller -c/--ctx-size or model"
        return cls(n, total, described if n else "CPU", why, why_not, remedy, split_mode, shares, main_gpu, names)


# AMX kernels: None before the first load, then "fine", "fails" (and must not be chosen), "refused" for good.
_amx: str | None = None


def amx_unused() -> bool:
    """Whether AMX kernels are kept from being chosen because they fail here."""
    return _amx in ("fails", "refused")


def amx_known_to_fail() -> bool:
    """Whether AMX kernels would not be chosen, by what has been found out; nothing is tried for it."""
    kernels = _kernels()
    return amx_unused() or (kernels.exists() and amx.known(kernels) is False)


def load_model(path: str, use_extra_bufts: bool | None, offload: Offload) -> Any:
    """llama.cpp's handle of the model, null when it cannot; AMX kernels that fail are kept from being chosen.

    Raises: Stopped, or KeyboardInterrupt, between two tensors.
    """
    global _amx
    llama = library()
    params = llama.llama_model_default_params()
    params.n_gpu_layers = offload.n_layers
    params.split_mode, params.main_gpu = SPLIT_MODES[offload.split_mode], offload.main_gpu
    chosen = devices.pointers(offload.names)  # read during the load
    if offload.names:
        params.devices = ctypes.addressof(chosen)
    shares = (ctypes.c_float * llama.llama_max_devices())(*offload.tensor_split)  # read during the load
    if offload.tensor_split:
        params.tensor_split = shares
    params.use_extra_bufts = use_extra_bufts is not False
    if 0 < offload.n_layers < offload.total and Path(path).stat().st_size < probe.probe().memory_available / 2:
        os.environ.setdefault(REGISTER, "1")  # prompts send the CPU's layers there: from pinned memory that is faster

    stop = ending.current()
    ended: list[BaseException] = []

    def go_on(share: float, data: Any) -> bool:
        try:
            stop.check()
        except BaseException as error:  # Ctrl+C as well, which Python sees to in here
            ended.append(error)
        return not ended

    params.progress_callback = type(params.progress_callback)(go_on)

    def load() -> Any:
        model = llama.llama_model_load_from_file(path.encode(), params)
        if ended and not model:
            raise ended[0]
        return model

    if use_extra_bufts is not None:
        return load()
    if _amx is None:
        _amx = _amx_state(path)
        if _amx == "fails":
            try:
                with amx.refused():
                    model = load()
                _amx = "refused"
                return model
            except OSError as error:
                log.info("AMX cannot be refused (%s): llama.cpp keeps the file's own layouts.", error)
    # Without layouts of its own it does not come to AMX either.
    params.use_extra_bufts = _amx != "fails"
    return load()


def _amx_state(model: str) -> str | None:
    """What is known of llama.cpp's AMX kernels before a load: "fine" (or not there), "fails", None: not tried yet."""
    if sys.platform != "linux" or "AMX_INT8 = 1" not in system_info():
        return "fine"
    kernels = _kernels()
    works = amx.works(kernels, model) if kernels.exists() else True
    return None if works is None else "fine" if works else "fails"


def _kernels() -> Path:
    """The file of llama.cpp's kernels for the processor."""
    return Path(library().__file__ or "").parent / "lib" / "libggml-cpu.so"
