"""Memory of the device: how much there is, and what an attempt has taken and does not need any more."""

from __future__ import annotations

import contextlib
import os

import torch


def give_memory_back() -> None:
    """Give the device what the caching allocator holds unused, after an attempt that may have run out of memory.

    For after the exception's handler: the exception holds frames, and they the tensors. Without CUDA nothing is done.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):  # a capture that has failed may be under way in the allocator
            torch.cuda.empty_cache()


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory that a device has, used or not; of a CPU, those of the machine; 0 if not known."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on Linux
        return 0
