"""Which layers of a model go to GPUs, and the load that puts them there."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgert.backends.llama import amx, devices
from edgert.backends.llama.library import library, system_info

log = logging.getLogger(__name__)

FITTING = -2  # of n_gpu_layers: as many as fit
SPLIT_MODES = {"none": 0, "layer": 1, "row": 2}


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
    split_mode: int = 1
    main_gpu: int = 0

    @property
    def whole(self) -> bool:
        return 0 < self.total <= self.n_layers

    @classmethod
    def plan(
        cls,
        path: str,
        wished: int,
        gpu_memory: int,
        n_ctx: int,
        n_seq_max: int,
        kv_bytes: float,
        n_ubatch: int,
    ) -> Offload:
        """What fits on the GPUs that this build sees."""
        from edgert.quantize.architecture import describe
        from edgert.quantize.gguf_file import GGUFFile

        found = devices.gpus()
        if not found or wished == 0:
            why_not = "llama.cpp sees none" if not found else "-ngl 0 keeps all layers on the CPU"
            why = "no GPU in this build" if wished != 0 and wished != FITTING and not found else ""
            remedy = devices.BUILDS["nvidia"] if not found else "leave -ngl out"
            return cls(0, 0, "CPU", why, why_not, remedy)
        with GGUFFile.open(path) as file:
            a = describe(file)
            total = a.n_layer + 1
            free = [min(gpu.memory_free, gpu_memory or gpu.memory_free) for gpu in found]
            n_positions = (n_ctx or a.n_ctx_train) * n_seq_max
            fit = devices.layers_that_fit(file, a, free, n_positions, kv_bytes, n_ubatch)
        n = fit if wished == FITTING else total if wished < 0 else min(wished, total)
        names = ", ".join(f"{gpu.name} ({gpu.description})" for gpu in found)
        room = ", ".join(f"{size >> 20} MiB" for size in free)
        why = f"{n} of {total} layers on the GPU" + (f", {fit} fit into {room}" if fit < total or n != fit else "")
        why_not = f"{n} of {total} layers fit into {room}"
        return cls(n, total, names if n else "CPU", why, why_not, "choose a smaller -c/--ctx-size or model")


# AMX kernels: None before the first load, then "fine", "fails" (and must not be chosen), "refused" for good.
_amx: str | None = None


def amx_unused() -> bool:
    """Whether AMX kernels are kept from being chosen because they fail here."""
    return _amx in ("fails", "refused")


def load_model(path: str, use_extra_bufts: bool | None, offload: Offload) -> Any:
    """llama.cpp's handle of the model, null when it cannot; AMX kernels that fail are kept from being chosen."""
    global _amx
    llama = library()
    params = llama.llama_model_default_params()
    params.n_gpu_layers = offload.n_layers
    params.split_mode, params.main_gpu = offload.split_mode, offload.main_gpu
    params.use_extra_bufts = use_extra_bufts is not False

    def load() -> Any:
        return llama.llama_model_load_from_file(path.encode(), params)

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
    kernels = Path(library().__file__ or "").parent / "lib" / "libggml-cpu.so"
    works = amx.works(kernels, model) if kernels.exists() else True
    return None if works is None else "fine" if works else "fails"
