"""ONNX Runtime's execution providers: a table of what each wants, and the truth about what each ran.

A session whose provider is missing, finds no device or refuses every node is created without an error and runs on
the CPU; so nothing here believes a session before it has read which provider each node was given to.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from edgert.backends.onnx.style import Style
from edgert.devices import accelerators
from edgert.errors import BackendUnavailableError

log = logging.getLogger(__name__)

INSTALL = "pip install 'edgert[npu]'"
CPU = "CPUExecutionProvider"


@dataclass(frozen=True)
class Provider:
    """A row of the table.

    name:       how `device` names it: "openvino", or with a kind of device, "openvino:npu"
    ep:         ONNX Runtime's name
    makers:     of the processors that it can use
    plugin:     a module whose get_library_path() is a plug-in to register, "" when it is built in
    install:    the command that brings it
    kinds:      devices that it may run on, the first is taken when none is named
    simulated:  what a kind is called when it is no such processor
    options:    of the provider, by kind
    blobs:      whether a compiled graph can be kept and loaded again
    """

    name: str
    ep: str
    profile: Literal["fused", "static"]
    style: Style
    install: str
    kinds: tuple[str, ...]
    makers: tuple[str, ...] = ()
    plugin: str = ""
    simulated: dict[str, str] = field(default_factory=dict)
    options: dict[str, dict[str, str]] = field(default_factory=dict)
    blobs: bool = False

    def lack(self, kind: str) -> tuple[str, str]:
        """Why this machine has no processor of the kind for it, and what helps; empty where it may have one."""
        return accelerators.lack(kind, self.makers) if kind in accelerators.MAKERS else ("", "")


PROVIDERS: dict[str, Provider] = {
    row.name: row
    for row in (
        Provider("cpu", CPU, "fused", Style(), INSTALL, ("cpu",)),
        Provider(
            "openvino",
            "OpenVINOExecutionProvider",
            "static",
            Style(accuracy_level=0, outside=False),
            # It brings an onnxruntime of its own, which replaces the plain one.
            "python -m venv openvino && openvino/bin/pip install edgert onnx onnxruntime-openvino",
            ("npu", "gpu", "cpu"),
            makers=("intel",),
            simulated={"cpu": "OpenVINO's CPU device, no NPU"},
            options={kind: {"device_type": kind.upper()} for kind in ("npu", "gpu", "cpu")},
        ),
        Provider(
            "qnn",
            "QNNExecutionProvider",
            "static",
            # MatMulNBits is refused for an unknown chip; with one named, plans for it are made anywhere.
            Style(accuracy_level=0),
            "pip install onnx onnxruntime onnxruntime-qnn",
            ("npu", "simulator"),
            makers=("qualcomm",),
            plugin="onnxruntime_qnn",
            simulated={"simulator": "Qualcomm's HTP simulator on the CPU, no NPU"},
            options={
                "npu": {"backend_type": "htp", "htp_performance_mode": "burst"},
                "simulator": {"backend_type": "htp", "soc_model": "60"},
            },
            blobs=True,
        ),
    )
}


@dataclass(frozen=True)
class Device:
    """A provider on one kind of device, and whether it is here.

    obstacle:  why it cannot be used, "" when it can; remedy is the command that would change that
    """

    provider: Provider
    kind: str
    obstacle: str = ""
    remedy: str = ""
    version: str = ""

    @property
    def name(self) -> str:
        return self.provider.name if self.kind == self.provider.kinds[0] else f"{self.provider.name}:{self.kind}"

    @property
    def label(self) -> str:
        """What it truly is."""
        return self.provider.simulated.get(self.kind) or f"{self.kind.upper()} by {self.provider.ep}"


@dataclass(frozen=True)
class Assignment:
    """Which provider each node of a session was given to.

    nodes:       by provider; partitions: runs of nodes that a provider took as one
    products:    share of the multiplications by weights, by provider
    left_behind: operators that the CPU provider got although another was asked for
    """

    nodes: dict[str, int]
    partitions: dict[str, int]
    products: dict[str, float]
    left_behind: tuple[str, ...]

    def __str__(self) -> str:
        parts = [
            f"{ep}: {n} nodes in {self.partitions[ep]} partitions, {100 * self.products.get(ep, 0):.0f} % of products"
            for ep, n in self.nodes.items()
        ]
        return "; ".join(parts) or "not told by this version of ONNX Runtime"


def runtime() -> ModuleType:
    """onnxruntime, once both packages are known to be here.

    Raises: BackendUnavailableError that says the command.
    """
    for name in ("onnx", "onnxruntime"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise BackendUnavailableError(f"The package {error.name} is not installed: {INSTALL}") from error
        except (ImportError, OSError) as error:
            raise BackendUnavailableError(
                f"The package {name} is installed but does not load ({error}): {INSTALL} --force-reinstall"
            ) from error
    module.set_default_logger_severity(4)  # what it has to say of a failure is in the exception as well
    return module


def open_runtime(device: str) -> ModuleType:
    """onnxruntime, for a device as `find` takes its name.

    Raises: BackendUnavailableError, which speaks of the packages only where the machine could use them.
    """
    try:
        return runtime()
    except BackendUnavailableError as error:
        name, _, kind = device.strip().lower().partition(":")
        provider = PROVIDERS.get(name)
        reason, remedy = provider.lack(kind or provider.kinds[0]) if provider else ("", "")
        if name in accelerators.MAKERS:
            reason, remedy = accelerators.lack(name)
        if not reason:
            raise
        raise BackendUnavailableError(f"ONNX Runtime reaches no {device} here, since {reason}: {remedy}") from error


def devices() -> list[Device]:
    """Every device of every provider of the table, usable or not. Raises: BackendUnavailableError."""
    ort = runtime()
    return [device for provider in PROVIDERS.values() for device in _devices_of(ort, provider)]


def find(name: str) -> Device:
    """The device that a name like "qnn" or "openvino:cpu" means; "auto" is the first NPU, or else the CPU;
    "npu" and "gpu" are the first such.

    Raises: BackendUnavailableError when it cannot be used; its message says why and what would help.
    """
    found = devices()
    npus = [device for device in found if device.kind == "npu"]
    usable = [device for device in npus if not device.obstacle]
    if name == "auto":
        return usable[0] if usable else next(device for device in found if device.kind == "cpu")
    if name.lower() == "npu" and not usable:
        reasons = "; ".join(f"{device.name}: {device.obstacle}: {device.remedy}" for device in npus)
        raise BackendUnavailableError(f"ONNX Runtime reaches no NPU here ({reasons})")
    if name.lower() in ("npu", "gpu"):
        name = usable[0].name if name.lower() == "npu" else "openvino:gpu"
    for device in found:
        if name in (device.name, f"{device.provider.name}:{device.kind}"):
            if device.obstacle:
                raise BackendUnavailableError(f"{device.name} cannot be used: {device.obstacle}: {device.remedy}")
            return device
    names = ", ".join(device.name for device in found)
    raise BackendUnavailableError(f"ONNX Runtime has no device {name!r} that edgert knows: choose auto, {names}.")


def _devices_of(ort: ModuleType, provider: Provider) -> list[Device]:
    version = str(ort.__version__)
    if provider.ep == CPU:
        return [Device(provider, "cpu", version=version)]
    if provider.plugin:
        try:
            version, found = _plugin(ort, provider)
        except BackendUnavailableError as error:
            return _absent(provider, str(error))
    else:
        if provider.ep not in ort.get_available_providers():
            return _absent(provider, f"this build of onnxruntime {version} has no {provider.ep}")
        found = {"CPU"} | _openvino_devices()
    result = []
    for kind in provider.kinds:
        here = kind == "simulator" or kind.upper() in found
        obstacle, remedy = ("", "") if here else provider.lack(kind)
        if not here and not obstacle:
            obstacle = f"{provider.ep} finds no {kind.upper()} on this machine"
            remedy = f"install the driver of the {kind.upper()} and look again with `edgert devices`"
        result.append(Device(provider, kind, obstacle, remedy, version))
    return result


def _absent(provider: Provider, reason: str) -> list[Device]:
    """The devices of a provider that is not installed: what to install only where the machine could use it."""
    found = []
    for kind in provider.kinds:
        lacking, remedy = provider.lack(kind)
        install = f"{provider.install} (of use for tests alone)" if kind in provider.simulated else provider.install
        found.append(Device(provider, kind, lacking or reason, remedy or install))
    return found


def _openvino_devices() -> set[str]:
    """The kinds of processors that Linux has drivers of Intel's for."""
    found = set()
    if any(Path("/dev/accel").glob("accel*")):
        found.add("NPU")
    if any(Path("/dev/dri").glob("renderD*")):
        found.add("GPU")
    return found


def _plugin(ort: ModuleType, provider: Provider) -> tuple[str, set[str]]:
    """Registers a provider's library: its version, and the kinds of devices that it finds."""
    if not hasattr(ort, "get_ep_devices"):
        raise BackendUnavailableError(f"onnxruntime {ort.__version__} is too old to take plug-ins")
    try:
        module = importlib.import_module(provider.plugin)
    except ImportError as error:
        raise BackendUnavailableError(f"the package {provider.plugin} is not installed") from error
    if not _plugin_devices(ort, provider):
        try:
            ort.register_execution_provider_library(provider.ep, module.get_library_path())
        except Exception as error:  # ONNX Runtime has an exception of its own for each status
            raise BackendUnavailableError(f"its library does not load ({_first_line(error)})") from error
    kinds = {device.device.type.name for device in _plugin_devices(ort, provider)}
    return f"{ort.__version__}, {provider.plugin} {getattr(module, '__version__', '?')}", kinds


def _plugin_devices(ort: ModuleType, provider: Provider) -> list[Any]:
    return [device for device in ort.get_ep_devices() if device.ep_name == provider.ep]


def session_options(device: Device, n_threads: int) -> Any:
    """Options with the provider in them, CPU as what is left."""
    ort = runtime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = n_threads
    options.log_severity_level = 4
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    provider = device.provider
    if provider.plugin:
        options.add_provider_for_devices(_plugin_devices(ort, provider)[:1], provider.options.get(device.kind, {}))
    return options


def open_session(device: Device, path: Path, n_threads: int) -> tuple[Any, Assignment]:
    """A session, and what each provider runs of it.

    Raises: BackendUnavailableError when the provider refuses the graph or fails on it.
    """
    ort, provider = runtime(), device.provider
    options = session_options(device, n_threads)
    arguments: dict[str, Any] = {}
    if not provider.plugin:
        arguments["providers"] = [provider.ep] if provider.ep == CPU else [(provider.ep, _options(device)), CPU]
    try:
        session = ort.InferenceSession(str(path), options, **arguments)
    except MemoryError as error:
        raise BackendUnavailableError(f"{device.label} has not enough memory for the model") from error
    except Exception as error:
        raise BackendUnavailableError(f"{device.label} does not load the model: {_first_line(error)}") from error
    return session, assignment(session, provider.ep)


def _options(device: Device) -> dict[str, str]:
    return device.provider.options.get(device.kind, {})


def assignment(session: Any, wanted: str) -> Assignment:
    """Reads which provider each node was given to; empty where this version of ONNX Runtime does not tell."""
    try:
        subgraphs = session.get_provider_graph_assignment_info()
        products = json.loads(session.get_modelmeta().custom_metadata_map.get("edgert.products", "{}"))
    except (AttributeError, RuntimeError, ValueError):
        return Assignment({}, {}, {}, ())
    nodes: Counter[str] = Counter()
    partitions: Counter[str] = Counter()
    shares: Counter[str] = Counter()
    left: Counter[str] = Counter()
    total, compiled = sum(products.values()) or 1, ""
    for subgraph in subgraphs:
        partitions[subgraph.ep_name] += 1
        for node in subgraph.get_nodes():
            nodes[subgraph.ep_name] += 1
            shares[subgraph.ep_name] += products.pop(node.name, 0)
            compiled = subgraph.ep_name if node.op_type == "EPContext" else compiled
            if subgraph.ep_name != wanted:
                left[node.op_type] += 1
    if compiled:  # one node holds all that is not named
        shares[compiled] += sum(products.values())
    return Assignment(
        dict(nodes),
        dict(partitions),
        {ep: share / total for ep, share in shares.items()},
        tuple(op for op, _ in left.most_common()),
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
