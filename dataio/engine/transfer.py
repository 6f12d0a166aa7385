"""Host to device: page-locked memory, and copies on a stream of their own."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from accel.profiler.interruptions import ours
from accel.profiler.trees import map_tensors, tensors


def pin(batch: Any) -> Any:
    """Return `batch` with its CPU tensors in page-locked memory; other leaves and the structure stay.

    So do tensors with attributes or gradients, which a copy would not have. What can't be pinned stays as it is, for
    its structure, an expanded tensor or the host's limit of locked memory: pageable memory is only slower.
    """
    try:
        return map_tensors(_pin_tensor, batch)
    except ours(AttributeError, RuntimeError, TypeError, ValueError):
        return batch


def _pin_tensor(tensor: Tensor) -> Tensor:
    is_plain = not tensor.requires_grad and not tensor.__dict__
    movable = is_plain and tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_pinned()
    return tensor.pin_memory() if movable else tensor


class AheadCopier:
    """Copy each batch to `device` while the one before it is used.

    Call it with the batches in order: `start` begins a copy, `finish` makes the compute stream wait
    for the oldest one by an event, and returns it. On a CPU both do nothing to the batch.

    Args:
        device: where to copy to.

    Example:
        >>> copier = AheadCopier(torch.device("cpu"))
        >>> copier.start([torch.ones(2), "label"])
        >>> copier.finish()
        [tensor([1., 1.]), 'label']
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._under_way: deque[tuple[Any, Any]] = deque()

    def start(self, batch: Any) -> None:
        if self._stream is None:
            self._under_way.append((batch, None))
            return
        pinned = pin(batch)
        with torch.cuda.stream(self._stream):
            # Sparse ones can't be told which stream uses them: they are copied when they are used.
            moved = map_tensors(
                lambda t: t.to(self.device, non_blocking=True) if t.layout == torch.strided else t, pinned
            )
            # An event, not wait_stream: the batch after this one may be on its way by the time this one is used.
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        # The pinned batch is kept until the copy was waited for; its memory then goes back to torch's pinned cache,
        # which records the stream of the copy itself.
        self._under_way.append((moved, (event, pinned)))

    def finish(self) -> Any:
        """Return the oldest batch; work queued on the current stream from now on sees it whole."""
        batch, pending = self._under_way.popleft()
        if pending is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(pending[0])
            batch = map_tensors(lambda t: _used_on(t.to(self.device, non_blocking=True), current), batch)
        return batch

    @property
    def holds_graph(self) -> bool:
        return any(tensor.grad_fn is not None for tensor in tensors(self._under_way[0][0]))

    def __call__(self, batch: Any) -> Any:
        """Copy one batch and return it: what is queued before the step's own work overlaps the copy."""
        self.start(batch)
        return self.finish()

    def __len__(self) -> int:
        return len(self._under_way)


def _used_on(tensor: Tensor, stream: Any) -> Tensor:
    """Have the memory of a tensor made on the side stream handed out again only once this one is done, too."""
    if tensor.layout == torch.strided:
        tensor.record_stream(stream)
    return tensor
