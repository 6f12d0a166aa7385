"""Counterfactuals: run real steps without the suspected cause, interleaved with ordinary ones, and measure the saving.

A share of the time says where the time goes, not what would be saved: work may overlap, and removing a wait may uncover
another one. So a suspicion is tested. Each counterfactual switches one thing at a step boundary; blocks with and
without it are interleaved and judged as a trial is. Where the loop does something else than steps, as evaluating or
saving, nothing is switched, and what the model has learned in an experiment that changes this is taken back.
"""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accel.profiler.experiments import update_path
from accel.profiler.experiments.update_path import Paths
from accel.profiler.loop.device import Backlog
from accel.profiler.loop.patches import Patches
from accel.profiler.loop.pauses import Pauses
from accel.profiler.loop.recorder import Recorder
from accel.profiler.phases import Measurement
from accel.profiler.report import Experiment, Saving
from accel.profiler.trial import Outcome, TrialConfig
from accel.profiler.trial_driver import Block, Steps, by_blocks, drive

ALONE = TrialConfig(block_steps=4, looks=(6, 12), min_pairs=4)
TOGETHER = TrialConfig(block_steps=4, looks=(8,), min_pairs=8)
"""For several ranks: always eight pairs, since all must switch at the same steps."""
_LEAST = 1e-3
"""Of the host's time for a block is left by a correction that is itself measured, for a trial takes logarithms."""


class Counterfactual(Protocol):
    """One thing that can be switched between two steps."""

    name: str
    what: str
    changes_learning: bool

    def enable(self) -> None:
        """Remove the suspected cause."""

    def disable(self) -> None:
        """Put it back."""

    def worked(self) -> bool:
        """Return, after the last `disable`, whether it has removed anything; the experiment is void if it has not."""


class FetchedAhead:
    """The batch is fetched while the step's clock is stopped: as if the loader were never late."""

    name = "batch fetched ahead"
    what = "each batch was fetched between two steps, off the clock"
    changes_learning = False

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._before = self._fetched = 0

    def enable(self) -> None:
        """Fetch off the clock."""
        self._recorder.ahead = True
        self._before = self._recorder.fetched

    def disable(self) -> None:
        """Fetch on the clock."""
        self._recorder.ahead = False
        self._fetched += self._recorder.fetched - self._before

    def worked(self) -> bool:
        """Return whether batches were fetched off the clock."""
        return self._fetched > 0


class NoCollector:
    """`gc.collect` does nothing and the collector is off.

    Args:
        spent: returns the seconds that the collector has run for so far.
    """

    name = "no garbage collection"
    what = "the garbage collector was off and gc.collect() did nothing"
    changes_learning = False

    def __init__(self, spent: Callable[[], float]) -> None:
        self._spent = spent
        self._at = spent()
        self._ran = {True: 0.0, False: 0.0}
        self._was_on = True
        self._patches = Patches()

    def enable(self) -> None:
        """Switch it off."""
        self._count(off=False)
        self._was_on = gc.isenabled()
        gc.disable()
        self._patches.replace(gc, "collect", self._collecting)

    def disable(self) -> None:
        """Switch it on again."""
        self._count(off=True)
        self._patches.remove()
        if self._was_on:
            gc.enable()

    def worked(self) -> bool:
        """Return whether it ran for less than half as long: a function that was imported by name goes on."""
        return self._ran[True] < 0.5 * self._ran[False]

    def _collecting(self, original: Callable[..., int]) -> Callable[..., int]:
        return lambda *args, **kwargs: 0 if self._patches.on else original(*args, **kwargs)

    def _count(self, *, off: bool) -> None:
        """Book the time since the last switch."""
        now = self._spent()
        self._ran[off] += now - self._at
        self._at = now


class NoAnomalyMode:
    """Anomaly detection is off; what the script sets meanwhile takes effect afterwards."""

    name = "no anomaly detection"
    what = "autograd's anomaly detection was off, whatever the loop asked for"
    changes_learning = False

    def __init__(self) -> None:
        self._requested = (False, True)
        self._switched_off = 0
        self._patches = Patches()

    def enable(self) -> None:
        """Switch it off."""
        self._set(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        torch.set_anomaly_enabled(False)
        self._patches.replace(torch, "set_anomaly_enabled", self._setting)

    def disable(self) -> None:
        """Set what the script asked for."""
        self._patches.remove()
        torch.set_anomaly_enabled(*self._requested)

    def worked(self) -> bool:
        """Return whether it would have been on."""
        return self._switched_off > 0

    def _setting(self, original: Callable[..., None]) -> Callable[..., None]:
        def set_anomaly_enabled(mode: bool, check_nan: bool = True) -> None:
            (self._set if self._patches.on else original)(mode, check_nan)

        return set_anomaly_enabled

    def _set(self, mode: bool, check_nan: bool = True) -> None:
        self._requested = (mode, check_nan)
        self._switched_off += mode


class Unchanged:
    """Nothing is switched: for a rank that can't switch what the others test."""

    name = "nothing"
    what = "nothing"
    changes_learning = False

    def enable(self) -> None:
        """Do nothing."""

    def disable(self) -> None:
        """Do nothing."""

    def worked(self) -> bool:
        """Return True: what is measured is what the other ranks do."""
        return True


class AllThreads:
    """Computation uses all usable cores."""

    changes_learning = False

    def __init__(self, cores: int) -> None:
        self.name = f"{cores} threads"
        self.what = f"torch.set_num_threads({cores})"
        self._cores = cores
        self._own_threads = torch.get_num_threads()
        self._effective = 0

    def enable(self) -> None:
        """Use all."""
        torch.set_num_threads(self._cores)

    def disable(self) -> None:
        """Use as many as before."""
        self._effective += torch.get_num_threads() == self._cores != self._own_threads
        torch.set_num_threads(self._own_threads)

    def worked(self) -> bool:
        """Return whether the loop left the threads as they were set."""
        return self._effective > 0


class OneUpdate:
    """The optimizer updates all parameters in one fused or foreach call."""

    name = "multi-tensor optimizer"
    what = "the optimizer took its fused path, or foreach where it has none"
    changes_learning = False

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [optimizer for optimizer in optimizers if can_update_at_once(optimizer)]
        self._paths = Paths()
        self._switched = 0

    def enable(self) -> None:
        """Take the other path."""
        for optimizer in self._optimizers:
            self._paths.switch([optimizer], fused=update_path.has_fused(optimizer))

    def disable(self) -> None:
        """Take the loop's own path."""
        self._switched += sum(update_path.updates_at_once(optimizer) for optimizer in self._optimizers)
        self._paths.restore()

    def worked(self) -> bool:
        """Return whether an optimizer took the other path."""
        return self._switched > 0


def can_update_at_once(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has another path, and is not on it."""
    return not update_path.refusal(optimizer) and not update_path.updates_at_once(optimizer)


class NoExchange:
    """Gradients are not exchanged between ranks; the state from before is restored afterwards."""

    name = "no gradient exchange"
    what = "the ranks did not exchange gradients (no_sync)"
    changes_learning = True

    def __init__(self, models: Sequence[DistributedDataParallel]) -> None:
        self._models = list(models)
        self._effective = 0

    def enable(self) -> None:
        """Exchange nothing."""
        for model in self._models:
            model.require_backward_grad_sync = False

    def disable(self) -> None:
        """Exchange."""
        for model in self._models:
            self._effective += not model.require_backward_grad_sync
            model.require_backward_grad_sync = True

    def worked(self) -> bool:
        """Return whether the loop left the exchange off: a loop that sets it itself has gone on exchanging."""
        return self._effective > 0


class Snapshot:
    """A copy of parameters, buffers and optimizer state, to be restored in place.

    Args:
        models: what is trained.
        optimizers: their state is restored too.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        tensors += [v for o in optimizers for state in o.state.values() for v in state.values() if _is_tensor(v)]
        self._pairs = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Put everything back; a backward pass may be outstanding, so autograd does not count it as a change."""
        with torch.no_grad():
            for tensor, saved in self._pairs:
                tensor.data.copy_(saved)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


_STATE_CALLS = ((torch, "save"), (nn.Module, "state_dict"), (nn.Module, "load_state_dict"))
"""Where a script saves what it has learned, or puts something else in its place."""


_STUCK = 50
"""A loop that calls its model so many times as often as in the step before, and makes no update, is stuck with what it
has learned: as one that leaves out each batch whose loss is NaN, once its weights are."""


class _Switch:
    """Switches a counterfactual in the steps, and only there.

    Args:
        counterfactual: what is switched.
        saved: the state from before, if the model learns something else meanwhile.

    Attributes:
        is_stuck: the loop got stuck: everything has been put back, and nothing is switched any more.
    """

    def __init__(self, counterfactual: Counterfactual, saved: Snapshot | None) -> None:
        self.is_stuck = False
        self._counterfactual, self._saved = counterfactual, saved
        self._calls = self._usual_calls = 0
        self._on = self._away = self._has_learned = False
        self._paused = False
        """Whether the loop has left its steps since the last of them ended."""
        self._patches = Patches()

    def set(self, on: bool) -> bool:
        """Switch between two steps; return whether anything was to be switched."""
        changes = on != self._on
        if changes and not self._away:
            self._counterfactual.enable() if on else self._counterfactual.disable()
        self._on = on
        return changes

    def leave(self, is_between: bool) -> None:
        """Put everything back while the loop does something else; the state only if no step is under way."""
        if self._on and not self._away:
            self._counterfactual.disable()
        self._paused = self._away = True
        if is_between:
            self._restore()

    def called(self) -> None:
        """The model is called for training: put everything back for good if no update comes of that."""
        self._calls += 1
        if 0 < _STUCK * self._usual_calls < self._calls and not self.is_stuck:
            self.is_stuck = True
            self.leave(is_between=True)

    def back(self) -> None:
        """Switch as before."""
        if self.is_stuck:
            return
        self._away, self._has_learned = False, True
        if self._on:
            self._counterfactual.enable()

    def passed(self) -> bool:
        """Return whether the step that has ended was one without a pause."""
        self._calls, self._usual_calls = 0, max(1, self._calls)
        paused, self._paused, self._has_learned = self._paused or self._away, False, not self.is_stuck
        return not paused

    def watch(self, pauses: Pauses) -> None:
        """Listen for pauses; where the model learns something else, saving is one too."""
        pauses.watch(self.leave, self.back, self.called if self._saved is not None else lambda: None)
        if self._saved is not None:
            for owner, name in _STATE_CALLS:
                self._patches.replace(owner, name, functools.partial(_after, pauses.begin))

    def end(self, pauses: Pauses) -> None:
        """Put everything back for good."""
        self._patches.remove()
        pauses.unwatch()
        if not self._away:
            self.set(False)
        self._restore()

    def _restore(self) -> None:
        if self._saved is not None and self._has_learned:
            self._saved.restore()
        self._has_learned = False


def _after(first: Callable[[], None], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    return marked


def experiment(
    counterfactual: Counterfactual,
    *,
    config: TrialConfig,
    snapshot: Callable[[], Snapshot],
    pauses: Pauses,
    backlog: Backlog | None = None,
) -> Generator[None, Measurement, Experiment]:
    """Run one counterfactual; each `yield` lets one step pass, also on ranks whose loop pauses while others go on.

    Args:
        counterfactual: what is switched.
        config: statistics of the trial.
        snapshot: saves the state to restore afterwards; called only if the model learns something else.
        pauses: tells when the loop leaves its steps.
        backlog: of the GPU that the model is on, None without one. A host that runs ahead of it refills its queue after
            each switch, and a block of four steps would be timed by how fast they are launched.
    """
    switch = _Switch(counterfactual, snapshot() if counterfactual.changes_learning else None)
    whole = {"A": 0, "B": 0}

    def run(block: Block) -> Generator[None, Measurement, Steps]:
        changes = switch.set(block.arm == "B")
        if backlog is not None:
            backlog.drain()
        if changes or backlog is not None:
            yield  # the first step after a switch still depends on the one before it
            switch.passed()
        if backlog is not None:
            backlog.begin()
        steps: list[tuple[float, bool]] = []
        while len(steps) < block.steps:
            measured = yield
            steps.append((measured.seconds, switch.passed()))
        if backlog is not None:
            steps = _by_device(steps, backlog.end())
        undisturbed = [seconds for seconds, was_whole in steps if was_whole]
        whole[block.arm] += len(undisturbed)
        return Steps(seconds=undisturbed or [seconds for seconds, _ in steps])

    switch.watch(pauses)
    try:
        # The mean of a block, not its median: workers deliver in bursts, and a burst is time too.
        result = yield from drive(by_blocks(config, reduce=statistics.fmean), run)
    finally:
        switch.end(pauses)
    assert result.outcome is not None
    void = switch.is_stuck or not counterfactual.worked() or not all(whole.values())
    return _result(counterfactual, result.outcome, void=void)


def _by_device(block: Sequence[tuple[float, bool]], more_s: float) -> list[tuple[float, bool]]:
    """Return the steps of a block, scaled to the time that the device took for it, `more_s` longer than the host."""
    # By addition, quick steps became negative where a value is read in some of them only: 8 of 60 ms beside 232.
    host_s = sum(seconds for seconds, _ in block)
    factor = max(host_s + more_s, _LEAST * host_s) / host_s
    return [(seconds * factor, was_whole) for seconds, was_whole in block]


def _result(counterfactual: Counterfactual, outcome: Outcome, *, void: bool) -> Experiment:
    return Experiment(
        name=counterfactual.name,
        what=counterfactual.what,
        before_ms=outcome.before_ms,
        after_ms=outcome.after_ms,
        saving=Saving(value=1 - 1 / outcome.gain, low=1 - 1 / outcome.low, high=1 - 1 / outcome.high),
        pairs=outcome.pairs,
        verdict="void" if void else outcome.verdict,
        changes_learning=counterfactual.changes_learning,
    )
