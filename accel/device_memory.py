"""Memory of the device: how much there is, and what an attempt has taken and does not need any more."""

from __future__ import annotations

import contextlib
import os

import torch

from accel.profiler import host


def give_memory_back() -> None:
    """Give the device what the caching allocator holds unused, after an attempt that may have run out of memory.

    For after the exception's handler: the exception holds frames, and they the tensors. Without CUDA nothing is done.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # First the wait: an expandable segment waits for its own stream alone, not for a graph that is replayed.
        for give_back in (torch.cuda.synchronize, torch.cuda.empty_cache):
            with contextlib.suppress(RuntimeError):  # a capture that has failed may be under way
                give_back()


def available_memory(device: torch.device) -> int:
    """Return the bytes that tensors can still get on a CUDA device, with what the caching allocator holds unused."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def idle_in_graphs(device: torch.device) -> int:
    """Return the bytes that the allocator of a CUDA device keeps for captured graphs, unused."""
    snapshot = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    segments = [each for each in snapshot if each["segment_pool_id"] != (0, 0)]
    own = [each for each in segments if each["device"] == (device.index or 0)]
    return sum(each["total_size"] - each["allocated_size"] for each in own)


def has_room(device: torch.device, needed: int) -> bool:
    """Return whether tensors can still get so many bytes; a CPU is not asked."""
    return device.type != "cuda" or available_memory(device) >= needed


def total_memory(device: torch.device) -> int:
    """Return the bytes that a device has for this rank, used or not; 0 if that is not known.

    On a CPU the ranks of a host share what the machine and the control groups leave them.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return (host.total_memory() or 0) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
