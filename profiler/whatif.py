"""Counterfactuals: run real steps without the suspected cause, interleaved with ordinary ones, and see what it gives.

A share of the time says where the time is, not what would be won: work may overlap, and what is removed may uncover
another wait. So a suspicion is tried. Each counterfactual switches one thing at a step boundary; blocks with and
without it are interleaved and judged as a trial is.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accel.profiler import update_path
from accel.profiler.phases import Measurement
from accel.profiler.probes import Patches
from accel.profiler.recorder import Recorder
from accel.profiler.report import Experiment, Saving
from accel.profiler.trial import Outcome, Trial, TrialConfig
from accel.profiler.update_path import Paths

ALONE = TrialConfig(block_steps=4, looks=(6, 12), min_pairs=4)
TOGETHER = TrialConfig(block_steps=4, looks=(8,), min_pairs=8)
"""For several ranks: always eight pairs, since all must switch at the same steps."""


class Counterfactual(Protocol):
    """One thing that can be switched between two steps."""

    name: str
    what: str
    changes_learning: bool

    def enable(self) -> None:
        """Remove the suspected cause."""

    def disable(self) -> None:
        """Put it back."""


class FetchedAhead:
    """The batch is fetched while the step's clock stands: what a loader that is never late would give."""

    name = "batch fetched ahead"
    what = "each batch was fetched between two steps, off the clock"
    changes_learning = False

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def enable(self) -> None:
        """Fetch off the clock."""
        self._recorder.ahead = True

    def disable(self) -> None:
        """Fetch on the clock."""
        self._recorder.ahead = False


class NoCollector:
    """`gc.collect` does nothing and the collector is off."""

    name = "no garbage collection"
    what = "the garbage collector was off and gc.collect() did nothing"
    changes_learning = False

    def __init__(self) -> None:
        self._found: Callable[..., int] = gc.collect
        self._was_on = True

    def enable(self) -> None:
        """Switch it off."""
        self._was_on = gc.isenabled()
        gc.disable()
        gc.collect = lambda *args, **kwargs: 0

    def disable(self) -> None:
        """Switch it on again."""
        gc.collect = self._found
        if self._was_on:
            gc.enable()


class NoAnomalyMode:
    """Anomaly detection is off."""

    name = "no anomaly detection"
    what = "torch.autograd.set_detect_anomaly was False"
    changes_learning = False

    def __init__(self) -> None:
        self._found = torch.is_anomaly_enabled()

    def enable(self) -> None:
        """Switch it off."""
        torch.autograd.set_detect_anomaly(False)

    def disable(self) -> None:
        """Leave it as it was."""
        torch.autograd.set_detect_anomaly(self._found)


class Unchanged:
    """Nothing is switched: what a rank does while the others try something that it has not."""

    name = "nothing"
    what = "nothing"
    changes_learning = False

    def enable(self) -> None:
        """Do nothing."""

    def disable(self) -> None:
        """Do nothing."""


class AllThreads:
    """Computation uses all usable cores."""

    changes_learning = False

    def __init__(self, cores: int) -> None:
        self.name = f"{cores} threads"
        self.what = f"torch.set_num_threads({cores})"
        self._cores = cores
        self._found = torch.get_num_threads()

    def enable(self) -> None:
        """Use all."""
        torch.set_num_threads(self._cores)

    def disable(self) -> None:
        """Use as many as before."""
        torch.set_num_threads(self._found)


class OneUpdate:
    """The optimizer updates all parameters in one fused or foreach call."""

    name = "multi-tensor optimizer"
    what = "the optimizer took its fused path, or foreach where it has none"
    changes_learning = False

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [optimizer for optimizer in optimizers if can_update_at_once(optimizer)]
        self._paths = Paths()

    def enable(self) -> None:
        """Take the other path."""
        for optimizer in self._optimizers:
            self._paths.switch([optimizer], fused=update_path.has_fused(optimizer))

    def disable(self) -> None:
        """Take the loop's own path."""
        self._paths.restore()


def can_update_at_once(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer has another path, and is not on it."""
    return not update_path.refusal(optimizer) and not update_path.updates_at_once(optimizer)


class StaleReads:
    """`Tensor.item` on the device returns what the same line read the last time, without waiting for the device.

    Args:
        waits: tells whether reading a tensor waits; default: it lies on a CUDA device.
    """

    name = "no waiting for values"
    what = "Tensor.item() returned the value that the same line had read before, without waiting for the device"
    changes_learning = True

    def __init__(self, waits: Callable[[Tensor], bool] = lambda tensor: tensor.is_cuda) -> None:
        self._waits = waits
        self._known: dict[tuple[Any, int], Any] = {}
        self._patches = Patches()

    def enable(self) -> None:
        """Read nothing that is known."""
        self._patches.replace(Tensor, "item", self._reading)

    def disable(self) -> None:
        """Read everything."""
        self._patches.remove()

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def item(tensor: Tensor) -> Any:
            if not self._waits(tensor):
                return original(tensor)
            frame = sys._getframe(1)
            line = (frame.f_code, frame.f_lineno)
            if line not in self._known:
                self._known[line] = original(tensor)
            return self._known[line]

        return item


class NoExchange:
    """Gradients are not exchanged between ranks; the state from before is put back afterwards."""

    name = "no gradient exchange"
    what = "the ranks did not exchange gradients (no_sync)"
    changes_learning = True

    def __init__(self, models: Sequence[DistributedDataParallel]) -> None:
        self._models = list(models)

    def enable(self) -> None:
        """Exchange nothing."""
        for model in self._models:
            model.require_backward_grad_sync = False

    def disable(self) -> None:
        """Exchange."""
        for model in self._models:
            model.require_backward_grad_sync = True


class Snapshot:
    """Parameters, buffers and optimizer state, to put back in place.

    Args:
        models: what is trained.
        optimizers: their state comes back too.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        tensors += [v for o in optimizers for state in o.state.values() for v in state.values() if _is_tensor(v)]
        self._pairs = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for tensor, saved in self._pairs:
                tensor.copy_(saved)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def experiment(
    counterfactual: Counterfactual, *, config: TrialConfig, snapshot: Callable[[], Snapshot]
) -> Generator[None, Measurement, Experiment]:
    """Run one counterfactual; each `yield` lets one step pass.

    Args:
        counterfactual: what is switched.
        config: statistics of the trial.
        snapshot: saves what is put back afterwards; asked only of one that changes what the model learns.
    """
    before = snapshot() if counterfactual.changes_learning else None
    # The mean of a block, not its median: workers deliver in bursts, and a burst is time too.
    trial = Trial(config, reduce=statistics.fmean)
    on = False
    try:
        while trial.verdict is None:
            wanted = trial.arm == "B"
            if wanted != on:
                counterfactual.enable() if wanted else counterfactual.disable()
                on = wanted
                yield  # the first step after a switch finds what the one before it left
            block: list[float] = []
            while len(block) < config.block_steps:
                measured = yield
                block.append(measured.seconds)
            trial.record(block)
    finally:
        if on:
            counterfactual.disable()
        if before is not None:
            before.restore()
    return _told(counterfactual, trial.outcome())


def _told(counterfactual: Counterfactual, outcome: Outcome) -> Experiment:
    return Experiment(
        name=counterfactual.name,
        what=counterfactual.what,
        before_ms=outcome.before_ms,
        after_ms=outcome.after_ms,
        saving=Saving(value=1 - 1 / outcome.gain, low=1 - 1 / outcome.low, high=1 - 1 / outcome.high),
        pairs=outcome.pairs,
        verdict=outcome.verdict,
        changes_learning=counterfactual.changes_learning,
    )
