"""Whether a device has room for graphs: they keep their activations, and an eager call needs its own beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SETS = 2
"""Of activations: the graph's own, which stay as long as it is kept, and those of an eager call beside it. The loop
makes such calls in the blocks of a trial without graphs, and whenever inputs are of another kind."""
_GIB = 2**30


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device, bytes."""

    free: int
    """What no process has."""
    reserved: int
    """What the caching allocator of this process has."""
    allocated: int
    """What tensors have of that."""
    peak: int
    """The most that tensors have had since the process began, or since the user has reset it."""

    @property
    def available(self) -> int:
        """What tensors can still get."""
        return self.free + self.reserved - self.allocated

    @property
    def of_a_step(self) -> int:
        """At a step boundary: what a step needs at most above what is always there."""
        return max(0, self.peak - self.allocated)


def memory_of(device: torch.device) -> DeviceMemory:
    """Return what a CUDA device has now; the user's peak statistics are read, and not reset."""
    free, _ = torch.cuda.mem_get_info(device)
    peak = torch.cuda.memory_stats(device).get("allocated_bytes.all.peak", 0)
    return DeviceMemory(free, torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device), peak)


def why_no_room(memory: DeviceMemory, step: int) -> str:
    """Say why graphs of a step that needs so many bytes should not be captured; '' if there is room for them."""
    needed = _SETS * step
    if memory.available >= needed:
        return ""
    return (
        "there is no room for graphs beside a step of the loop's own: both need up to "
        f"{needed / _GIB:.1f} GiB, and {memory.available / _GIB:.1f} GiB are left"
    )
