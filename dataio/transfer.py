"""Host to device: page-locked memory, and copies on a stream of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.dataio.batches import map_tensors


def pin(batch: Any) -> Any:
    """Return `batch` with its CPU tensors in page-locked memory; other leaves and the structure stay."""
    return map_tensors(_pin_tensor, batch)


def _pin_tensor(tensor: Tensor) -> Tensor:
    movable = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_pinned()
    return tensor.pin_memory() if movable else tensor


class SideStreamCopier:
    """Copy batches to `device` on a side stream while the compute stream goes on.

    The compute stream waits for the copy by an event, not the host, and each copied tensor is recorded on the compute
    stream so that its memory is not handed out again too early.

    Args:
        device: CUDA device to copy to.

    Example:
        >>> copier = SideStreamCopier(torch.device("cuda"))
        >>> batch = copier(batch)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, batch: Any) -> Any:
        """Start the copy and return the device batch; work queued after it on the current stream sees it whole."""
        pinned = pin(batch)
        with torch.cuda.stream(self.stream):
            moved = map_tensors(lambda t: t.to(self.device, non_blocking=True), pinned)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        map_tensors(lambda t: _record(t, current), moved)
        return moved


def _record(tensor: Tensor, stream: Any) -> Tensor:
    if tensor.is_cuda:
        tensor.record_stream(stream)
    return tensor
