"""pin_memory: hand batches over in page-locked memory, which the GPU copies faster."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.strategies.base import Exactness, Strategy, needs_cuda


class PinMemory(Strategy):
    """Pin each batch before the loop copies it."""

    name = "pin_memory"
    summary = "batches in page-locked memory"
    treats = frozenset({Bottleneck.TRANSFER})
    exactness = Exactness.EXACT
    touches = frozenset({"input"})

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: no CUDA, or pinned already."""
        if why := needs_cuda(run):
            return why
        if isinstance(run.loader, DataLoader) and run.loader.pin_memory:
            return "the loader pins its batches already"
        return ""

    def enable(self, run: Run, setting: Any) -> None:
        """Pin from the next batch on."""
        from accel.dataio.engine import transfer

        run.fetching.transforms[self.name] = transfer.pin

    def disable(self, run: Run) -> None:
        """Hand batches over as they come."""
        run.fetching.transforms.pop(self.name, None)
