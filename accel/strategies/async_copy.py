"""async_copy: copy batches to the GPU on a stream of their own, so that the loop's `.to(device)` finds them there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.strategies.base import Exactness, Strategy, needs_cuda

if TYPE_CHECKING:
    from accel.dataio.engine.transfer import AheadCopier


_SEEN = "the loop would see batches on the GPU, which code that reads them on the CPU can't take"


class AsyncCopy(Strategy):
    """Hand over batches that are on the device already: pinned, copied on a side stream, ordered by an event.

    Source: PyTorch notes, CUDA semantics, "Use pinned memory buffers".
    """

    name = "async_copy"
    summary = "host-to-device copies on a side stream"
    treats = frozenset({Bottleneck.TRANSFER})
    exactness = Exactness.EXACT
    touches = frozenset({"input"})

    def __init__(self) -> None:
        self._copier: AheadCopier | None = None

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: no CUDA, or nobody has asked for it."""
        if why := needs_cuda(run):
            return why
        return "" if self.name in run.enabled else f"{_SEEN}; enable=({self.name!r},) tries it"

    def enable(self, run: Run, setting: Any) -> None:
        """Copy from the next batch on."""
        from accel.dataio.engine.transfer import AheadCopier

        if self._copier is None:
            self._copier = AheadCopier(run.device)
        run.fetching.transforms[self.name] = self._copier

    def disable(self, run: Run) -> None:
        """Hand batches over on the CPU."""
        run.fetching.transforms.pop(self.name, None)
