"""NVML through a stand-in for pynvml: what is read, which GPUs, and why nothing is."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from accel.profiler.nvml import Nvml, reasons

GIB = 1024**3
UUID = "3a5d3e3c-0000-1111-2222-333344445533"


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"code {value}")


class FakePynvml(ModuleType):
    """As much of pynvml as is used: one GPU, and a code for each function that is to fail."""

    NVMLError = NVMLError

    def __init__(self, *, fails: dict[str, int] | None = None, masks: list[int] | None = None) -> None:
        super().__init__("pynvml")
        self.fails = fails or {}
        self.masks = iter(masks or [])
        self.calls: list[str] = []
        self.sampled = threading.Semaphore(0)
        answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetHandleByUUID": {b"GPU-" + UUID.encode(): 0}.__getitem__,
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=80 + gpu, memory=5),
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=3 * GIB, total=80 * GIB),
            "nvmlDeviceGetPowerUsage": lambda gpu: 650_000,
            "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
            "nvmlDeviceGetClockInfo": lambda gpu, clock: {1: 1755}[clock],
            "nvmlDeviceGetMaxClockInfo": lambda gpu, clock: {1: 1980}[clock],
            "nvmlDeviceGetPcieThroughput": lambda gpu, counter: {0: 2_000, 1: 12_000}[counter],
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: next(self.masks, 0),
        }
        for name, answer in answers.items():
            setattr(self, name, self._call(name, answer))

    def _call(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            if name == "nvmlDeviceGetCurrentClocksThrottleReasons":  # the last query of a sample
                self.sampled.release()
            if name in self.fails:
                raise NVMLError(self.fails[name])
            return answer(*args)

        return call


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(name="NVIDIA H100", uuid=UUID)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: known)


DEVICE = torch.device("cuda", 2)


def sampled(pynvml: FakePynvml, monkeypatch: pytest.MonkeyPatch, samples: int = 1) -> tuple[Nvml, Any]:
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    nvml = Nvml(interval_s=0.001)
    nvml.start(DEVICE)
    for _ in range(samples):
        assert pynvml.sampled.acquire(timeout=10)
    return nvml, nvml.stop()


def test_medians_in_the_units_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, gpus = sampled(FakePynvml(), monkeypatch, samples=3)

    (gpu,) = gpus
    assert (gpu.index, gpu.name, gpu.utilisation) == (2, "NVIDIA H100", 0.8)
    assert (gpu.memory_used_gib, gpu.memory_total_gib) == (3, 80)
    assert (gpu.power_w, gpu.power_limit_w, gpu.clock_mhz, gpu.clock_max_mhz) == (650, 700, 1755, 1980)
    assert (gpu.pcie_rx_mb_per_s, gpu.pcie_tx_mb_per_s) == (12, 2)
    assert (gpu.throttled, nvml.unseen) == ([], "")


def test_nvml_is_shut_down_and_the_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = FakePynvml()
    sampled(pynvml, monkeypatch)

    assert pynvml.calls[-1] == "nvmlShutdown"
    assert "accel-nvml" not in {thread.name for thread in threading.enumerate()}


# -- what cannot be seen -----------------------------------------------------------------------------------------------


def unseen(pynvml: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return why nothing is seen; `pynvml` is the module, or None for no such module."""
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    nvml = Nvml()
    nvml.start(DEVICE)
    assert nvml.stop() == []
    return nvml.unseen


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nvidia-ml-py is not installed (pip install 'accel-train[gpu]'" in unseen(None, monkeypatch)


def test_without_a_driver_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = FakePynvml(fails={"nvmlInit": 12})
    assert unseen(pynvml, monkeypatch) == "GPU telemetry is missing: NVML failed (code 12)."


def test_a_driver_that_fails_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = FakePynvml(fails={"nvmlDeviceGetHandleByUUID": 4, "nvmlShutdown": 1})

    assert unseen(pynvml, monkeypatch) == "GPU telemetry is missing: NVML failed (code 4)."
    assert pynvml.calls[-1] == "nvmlShutdown"


def test_queries_that_are_refused_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = {"nvmlDeviceGetPowerUsage": 3, "nvmlDeviceGetMemoryInfo": 3, "nvmlDeviceGetPcieThroughput": 4}
    nvml, gpus = sampled(FakePynvml(fails=fails), monkeypatch, samples=3)

    (gpu,) = gpus
    assert (gpu.power_w, gpu.power_limit_w, gpu.pcie_rx_mb_per_s, gpu.memory_total_gib) == (None, 700, None, 0)
    assert nvml.unseen == (
        "NVML does not show memory in use (code 3), memory (code 3), power (code 3), PCIe receipt (code 4), "
        "PCIe sending (code 4)."
    )


def test_a_query_that_fails_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = FakePynvml()
    codes = iter([15, 999])
    answer = pynvml.nvmlDeviceGetPowerUsage

    def shaky(gpu: int) -> Any:
        code = next(codes, 0)
        if code:
            raise NVMLError(code)
        return answer(gpu)

    pynvml.nvmlDeviceGetPowerUsage = shaky
    nvml, gpus = sampled(pynvml, monkeypatch, samples=4)

    assert (gpus[0].power_w, nvml.unseen) == (650, "")


def test_a_driver_that_hangs_does_not_hang_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = FakePynvml()
    release = threading.Event()
    pynvml.nvmlInit = lambda: release.wait(30)
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setattr("accel.profiler.nvml._JOIN_TIMEOUT_S", 0.05)
    nvml = Nvml()
    nvml.start(DEVICE)
    try:
        assert nvml.stop() == []
        assert re.search(r"did not answer within 0\.05 s", nvml.unseen)
    finally:
        release.set()


def test_a_sampler_may_stop_unstarted() -> None:
    assert Nvml().stop() == []


# -- pure parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        pytest.param([], [], id="no sample"),
        pytest.param([0x1, 0x2, 0x10, 0x100], [], id="idle, set clocks and the like are no trouble"),
        pytest.param([0x4] * 10, ["power limit"], id="power"),
        pytest.param([0x4] + [0] * 9, [], id="no more than a tenth"),
        pytest.param([0x4] * 2 + [0x24] * 3 + [0] * 5, ["power limit", "heat (driver)"], id="the most frequent first"),
        pytest.param([0x48] * 10, ["heat (hardware)"], id="the general bit adds nothing to its cause"),
        pytest.param([0x8] * 10, ["hardware slowdown"], id="the general bit alone"),
    ],
)
def test_reasons_for_throttling(masks: list[int], expected: list[str]) -> None:
    assert reasons(masks) == expected


def test_throttling_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    _, gpus = sampled(FakePynvml(masks=[0x4] * 1000), monkeypatch, samples=3)

    assert gpus[0].throttled == ["power limit"]
