"""NVML telemetry of the GPU that a model is on, sampled four times a second in a thread of its own.

Utilisation says how long any kernel was resident, not how full the device was; power against its limit, clocks against
their maximum and the reasons for throttling say more. Nothing here raises because of a missing package, driver or
permission: `Nvml.unseen` says what could not be read.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

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


class Nvml:
    """Samples one GPU between `start` and `stop`.

    Args:
        interval_s: pause between samples, s. A sample takes about 40 ms, nearly all of it asleep in the two PCIe
            queries.

    Attributes:
        unseen: one sentence on what could not be read and why, '' if nothing; final once `stop` has returned.
    """

    def __init__(self, interval_s: float = 0.25) -> None:
        self.unseen = ""
        self._interval_s = interval_s
        self._gpu: GpuShare | None = None
        self._samples: dict[str, list[float]] = defaultdict(list)
        self._refused: dict[str, str] = {}
        """Query → NVML's words for why it failed."""
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, device: torch.device) -> None:
        """Start sampling a CUDA device that is in use; the import and NVML's start happen in the thread."""
        known: Any = torch.cuda.get_device_properties(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        gpu = GpuShare(index=index, name=known.name, utilisation=0.0, memory_used_gib=0.0, memory_total_gib=0.0)
        self._thread = threading.Thread(
            target=self._run, args=(gpu, f"GPU-{known.uuid}"), name="accel-nvml", daemon=True
        )
        self._thread.start()

    def stop(self) -> list[GpuShare]:
        """Stop sampling and return the medians; an empty list if nothing was sampled."""
        self._halt.set()
        if self._thread is not None:
            self._thread.join(timeout=_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                self.unseen = f"GPU telemetry is missing: NVML did not answer within {_JOIN_TIMEOUT_S:g} s."
                return []
        if self._gpu is None:
            return []
        for query, values in self._samples.items():
            if values and query != "throttled":
                setattr(self._gpu, query, statistics.median(values))
        self._gpu.throttled = reasons(self._samples["throttled"])
        return [self._gpu]

    def _run(self, gpu: GpuShare, uuid: str) -> None:
        try:
            import pynvml
        except ImportError:
            self.unseen = (
                "GPU telemetry is missing: nvidia-ml-py is not installed (pip install 'accel-train[gpu]' brings it)."
            )
            return
        try:
            pynvml.nvmlInit()
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
                self._gpu = gpu
                while True:
                    self._sample(pynvml, handle)
                    if self._halt.wait(self._interval_s):
                        break
                self.unseen = self._refusals()
            finally:
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            self.unseen = f"GPU telemetry is missing: NVML failed ({error})."

    def _sample(self, nvml: Any, handle: Any) -> None:
        for query, (_, ask) in _QUERIES.items():
            try:
                self._samples[query].append(ask(nvml, handle))
            except nvml.NVMLError as error:
                self._refused[query] = str(error)

    def _refusals(self) -> str:
        parts = [f"{_QUERIES[query][0]} ({why})" for query, why in self._refused.items() if not self._samples[query]]
        return f"NVML does not show {', '.join(parts)}." if parts else ""


def reasons(masks: Sequence[float]) -> list[str]:
    """Return the reasons for throttling in more than a tenth of the samples, the most frequent first."""
    counts: Counter[str] = Counter()
    for mask in map(int, masks):
        if mask & _HARDWARE_CAUSES:
            mask &= ~_HARDWARE  # the general bit says nothing beside its cause
        counts.update(text for bit, text in _THROTTLE.items() if mask & bit)
    return [text for text, count in counts.most_common() if count > len(masks) / 10]
