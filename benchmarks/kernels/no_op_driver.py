"""A driver for Triton that compiles as for an H100 and launches nothing: what a call costs the host, without a GPU.

The binder, the keys and the compiled kernels are Triton's own. Only in a process where TRITON_INTERPRET is not set.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

ARCHITECTURE = 90
_SHARED_BYTES = 227 * 1024


class _Launch:
    """Takes what a launch takes and does nothing."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        pass


class NoOpDriver:
    """Stands in for `triton.backends.nvidia.driver.CudaDriver`."""

    launcher_cls = _Launch
    utils = SimpleNamespace(
        load_binary=lambda name, kernel, shared, device: (object(), 1, 64, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": _SHARED_BYTES, "multiprocessor_count": 132},
    )

    @staticmethod
    def get_current_device() -> int:
        """Return the only device."""
        return 0

    @staticmethod
    def get_current_stream(device: int) -> int:
        """Return the default stream."""
        return 0

    @staticmethod
    def get_current_target() -> GPUTarget:
        """Return what to compile for."""
        return GPUTarget("cuda", ARCHITECTURE, 32)


def install() -> None:
    """Launch nothing from now on, on tensors of the CPU.

    Raises:
        RuntimeError: if kernels are interpreted in this process.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET must not be set before kernels are imported; found it set")
    triton.runtime.driver.set_active(NoOpDriver())
