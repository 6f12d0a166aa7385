"""NVML telemetry of this process's GPUs, sampled four times a second in a thread of its own.

Utilisation says how long any kernel was resident, not how full the device was; power against its limit, clocks against
their maximum and the reasons for throttling say more. Nothing here raises because of a missing package, driver or
permission: `Nvml.unseen` says what could not be read.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel.profiler.evidence import GpuShare

# Reasons that slow a busy GPU down. Idle, application clocks, sync boost and display settings are choices, not trouble.
_THROTTLE = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "heat (driver)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
_HARDWARE, _HARDWARE_CAUSES = 0x08, 0x40 | 0x80

# Codes of nvmlReturn_t, as the driver's interface fixes them.
_ERRORS = {
    3: "this GPU or driver does not support it",
    4: "this user has no permission",
    9: "no NVIDIA driver is loaded",
    12: "no NVIDIA driver is installed",
    13: "the driver is too old for it",
    18: "the driver and its library have different versions",
}
_PERMANENT = {3, 4, 13}  # not worth asking again

_SM_CLOCK, _PCIE_TX, _PCIE_RX = 1, 0, 1
_GIB = 1024**3
_JOIN_TIMEOUT_S = 5.0

# Field of GpuShare → its name in messages, its query.
_QUERIES: dict[str, tuple[str, Callable[[Any, Any], float]]] = {
    "utilisation": ("utilisation", lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
    "memory_used_gib": ("memory in use", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / _GIB),
    "memory_total_gib": ("memory", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total / _GIB),
    "power_w": ("power", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),
    "power_limit_w": ("power limit", lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3),
    "clock_mhz": ("clock", lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, _SM_CLOCK)),
    "clock_max_mhz": ("maximum clock", lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, _SM_CLOCK)),
    # KB/s over 20 ms, in which the call sleeps, without the GIL.
    "pcie_rx_mb_per_s": ("PCIe receipt", lambda nvml, gpu: nvml.nvmlDeviceGetPcieThroughput(gpu, _PCIE_RX) / 1e3),
    "pcie_tx_mb_per_s": ("PCIe sending", lambda nvml, gpu: nvml.nvmlDeviceGetPcieThroughput(gpu, _PCIE_TX) / 1e3),
    # The name before "event reasons"; new drivers still have it.
    "throttled": ("throttling", lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
}


@dataclass
class _Gpu:
    """One GPU's handle and its samples."""

    index: int
    handle: Any
    name: str
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    refused: dict[str, int] = field(default_factory=dict)
    """Query → NVML's code for why it failed."""

    def sample(self, nvml: Any) -> None:
        for query, (_, ask) in _QUERIES.items():
            if self.refused.get(query) in _PERMANENT:
                continue
            try:
                self.samples[query].append(ask(nvml, self.handle))
            except nvml.NVMLError as error:
                self.refused[query] = _code(error)

    def share(self) -> GpuShare:
        medians = {query: statistics.median(values) for query, values in self.samples.items() if values}
        medians.pop("throttled", None)
        for required in ("utilisation", "memory_used_gib", "memory_total_gib"):
            medians.setdefault(required, 0.0)
        return GpuShare(index=self.index, name=self.name, throttled=reasons(self.samples["throttled"]), **medians)


class Nvml:
    """Samples this process's GPUs between `start` and `stop`.

    Args:
        devices: CUDA ordinals to sample; default all that the process sees. A rank should name its own: a sample takes
            about 40 ms per GPU, nearly all of it asleep in the two PCIe queries.
        interval_s: pause between samples, s.

    Attributes:
        unseen: one sentence on what could not be read and why, '' if nothing; final once `stop` has returned.

    Example:
        >>> nvml = Nvml()
        >>> nvml.start()
        >>> gpus = nvml.stop()
    """

    def __init__(self, devices: Sequence[int] | None = None, *, interval_s: float = 0.25) -> None:
        self.unseen = ""
        self._devices = devices
        self._interval_s = interval_s
        self._gpus: list[_Gpu] = []
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start sampling; the import and NVML's start happen in the thread, so this takes about 0.1 ms.

        Raises:
            RuntimeError: if it has been started before.
        """
        if self._thread is not None:
            raise RuntimeError("this sampler has been started; make another one")
        # CUDA reads the variable once, when it starts; a later change must not move this process's devices.
        setting = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._thread = threading.Thread(target=self._run, args=(setting,), name="accel-nvml", daemon=True)
        self._thread.start()

    def stop(self) -> list[GpuShare]:
        """Stop sampling and return the medians, GPU by GPU; an empty list if nothing was sampled."""
        self._halt.set()
        if self._thread is not None:
            self._thread.join(timeout=_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                self.unseen = f"GPU telemetry is missing: NVML did not answer within {_JOIN_TIMEOUT_S:g} s."
                return []
        return [gpu.share() for gpu in self._gpus]

    def _run(self, setting: str | None) -> None:
        try:
            import pynvml
        except ImportError:
            self.unseen = (
                "GPU telemetry is missing: nvidia-ml-py is not installed (pip install 'accel-train[gpu]' brings it)."
            )
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.unseen = f"GPU telemetry is missing: {_why(error)}."
            return
        try:
            self._watch(pynvml, setting)
        except pynvml.NVMLError as error:
            self.unseen = f"GPU telemetry is missing: {_why(error)}."
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def _watch(self, nvml: Any, setting: str | None) -> None:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        indices = visible([_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles], setting)
        gpus = [
            _Gpu(ordinal, handles[index], _text(nvml.nvmlDeviceGetName(handles[index])))
            for ordinal, index in enumerate(indices)
            if self._devices is None or ordinal in self._devices
        ]
        if not gpus:
            set_to = "is not set" if setting is None else f"is {setting!r}"
            self.unseen = (
                f"GPU telemetry is missing: NVML shows none of this process's GPUs (CUDA_VISIBLE_DEVICES {set_to})."
            )
            return
        self._gpus = gpus
        while True:
            for gpu in gpus:
                gpu.sample(nvml)
            if self._halt.wait(self._interval_s):
                break
        self.unseen = _refusals(gpus)


def visible(uuids: Sequence[str], setting: str | None) -> list[int]:
    """Return NVML's indices of the GPUs that are visible to CUDA, in CUDA's order.

    As CUDA does it: entries are numbers or the beginnings of UUIDs, the first one that names no GPU ends the list, and
    a GPU named twice leaves none. MIG slices are left out: NVML has no utilisation for them. In a machine with unlike
    GPUs, CUDA's numbers are NVML's only with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Args:
        uuids: UUID of each GPU, by NVML's index.
        setting: CUDA_VISIBLE_DEVICES, None if it is not set.
    """
    if setting is None:
        return list(range(len(uuids)))
    indices: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.startswith("GPU-"):
            matches = [index for index, uuid in enumerate(uuids) if uuid.lower().startswith(entry.lower())]
        else:
            matches = [int(entry)] if entry.isdecimal() and int(entry) < len(uuids) else []
        if len(matches) != 1:
            break
        indices += matches
    return indices if len(set(indices)) == len(indices) else []


def reasons(masks: Sequence[float]) -> list[str]:
    """Return the reasons for throttling in more than a tenth of the samples, the most frequent first."""
    counts: Counter[str] = Counter()
    for mask in map(int, masks):
        if mask & _HARDWARE_CAUSES:
            mask &= ~_HARDWARE  # the general bit says nothing beside its cause
        counts.update(text for bit, text in _THROTTLE.items() if mask & bit)
    return [text for text, count in counts.most_common() if count > len(masks) / 10]


def _refusals(gpus: Sequence[_Gpu]) -> str:
    by_code: dict[int, list[str]] = defaultdict(list)
    for query, (name, _) in _QUERIES.items():
        codes = [gpu.refused[query] for gpu in gpus if query in gpu.refused and not gpu.samples[query]]
        if codes:
            by_code[codes[0]].append(name)
    parts = [f"{', '.join(names)} ({_ERRORS.get(code, f'error {code}')})" for code, names in sorted(by_code.items())]
    return f"NVML does not show {' and '.join(parts)}." if parts else ""


def _code(error: Exception) -> int:
    return int(getattr(error, "value", 0))


def _why(error: Exception) -> str:
    return _ERRORS.get(_code(error)) or f"NVML failed ({error})"


def _text(value: str | bytes) -> str:
    # pynvml before 11.5 returns bytes.
    return value.decode() if isinstance(value, bytes) else value
