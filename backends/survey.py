"""Which backends can be used on which devices of this machine; for each that cannot, why and the command that helps."""

from __future__ import annotations

from dataclasses import dataclass

from edgert.devices import accelerators
from edgert.devices.gpus import Gpu
from edgert.errors import EdgertError


@dataclass(frozen=True)
class Use:
    """A backend on a device.

    obstacle:  why it cannot be used, "" when it can
    remedy:    the command that would change that
    """

    backend: str
    device: str
    obstacle: str = ""
    remedy: str = ""
    version: str = ""

    @property
    def usable(self) -> bool:
        return not self.obstacle


def survey(gpus: list[Gpu]) -> list[Use]:
    """Every backend with every device that it could use; nothing is loaded but the packages' libraries."""
    return [*_cpu(), *_llama(gpus), *_onnx()]


def _cpu() -> list[Use]:
    from edgert.backends.cpu import isa

    try:
        return [Use("cpu", f"cpu ({isa.select(None).name})")]
    except (EdgertError, ImportError, OSError) as error:
        return [Use("cpu", "cpu", str(error), "pip install --force-reinstall edgert")]


def _llama(gpus: list[Gpu]) -> list[Use]:
    from edgert.backends.llama import devices, library

    try:
        library.library()
        found = devices.devices()
    except EdgertError as error:
        reason, _, command = str(error).rpartition(": ")
        lacking = accelerators.lack("gpu")[0]
        if lacking:  # llama.cpp on the processor is no gain
            command = f"{accelerators.NOTHING}, since {lacking}"
        uses = [Use("llama", "cpu", reason, command)]
        return uses + [Use("llama", gpu.name, reason, devices.BUILDS[gpu.maker]) for gpu in gpus]
    version = f"llama-cpp-python {library.version()}"
    uses = [Use("llama", f"{device.name} ({device.description})", version=version) for device in found]
    if not any(device.kind in ("gpu", "igpu") for device in found):
        reason, remedy = devices.unreached()
        uses += [Use("llama", gpu.name, reason, remedy, version) for gpu in gpus]
    return uses


def _onnx() -> list[Use]:
    from edgert.backends.onnx import providers

    try:
        found = providers.devices()
    except EdgertError as error:
        reason, _, command = str(error).rpartition(": ")
        return [
            Use("onnx", row.name, lacking or reason, remedy or command)
            for row in providers.PROVIDERS.values()
            for lacking, remedy in [row.lack(row.kinds[0])]
        ]
    return [
        Use("onnx", f"{device.name} ({device.label})", device.obstacle, device.remedy, device.version)
        for device in found
    ]
