"""Run real steps without a suspected cause, interleaved with ordinary ones, and measure the saving.

A share of the time says where the time goes, not what would be saved: work may overlap, and removing a wait may uncover
another one. So a suspicion is tested, in blocks with and without it, as a trial is. Where the loop does something else
than steps, as evaluating or saving, nothing is switched, and what the model has learned in an experiment that changes
this is taken back.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel.profiler.experiments.counterfactuals import Counterfactual, counterfactual, unchanged
from accel.profiler.loop.device import Backlog, events_on
from accel.profiler.loop.patches import Patches
from accel.profiler.loop.recorder import Recorder
from accel.profiler.phases import Measurement
from accel.profiler.report import Experiment, Saving
from accel.profiler.trial import TrialConfig
from accel.profiler.trial_driver import Block, Steps, by_blocks, drive

MOST = 3
"""Most suspects that are tested in a run."""
ALONE = TrialConfig(block_steps=4, looks=(6, 12), min_pairs=4)
TOGETHER = TrialConfig(block_steps=4, looks=(8,), min_pairs=8)
"""For several ranks: always eight pairs, since all must switch at the same steps."""
_LEAST = 1e-3
"""Of the host's time for a block is left by a correction that is itself measured, for a trial takes logarithms."""
_STATE_CALLS = ((torch, "save"), (nn.Module, "state_dict"), (nn.Module, "load_state_dict"))
"""Where a script saves what it has learned, or puts something else in its place."""
STUCK = 50
"""A loop that calls its model so many times as often as in the step before, and makes no update, is stuck with what it
has learned: as one that leaves out each batch whose loss is NaN, once its weights are."""


class Snapshot:
    """A copy of parameters, buffers and optimizer state, to be restored in place."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Iterable[Optimizer]) -> None:
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        self._pairs = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Put everything back; a backward pass may be outstanding, so autograd does not count it as a change."""
        with torch.no_grad():
            for tensor, saved in self._pairs:
                tensor.data.copy_(saved)


class Switch:
    """Switches a counterfactual in the steps, and only there: nothing is switched while the loop pauses.

    Attributes:
        is_stuck: the loop got stuck: everything has been put back, and nothing is switched any more.
    """

    def __init__(self, tried: Counterfactual, recorder: Recorder) -> None:
        self.is_stuck = False
        self._tried, self._recorder, self._entered = tried, recorder, ExitStack()
        self._saved = Snapshot(recorder.roots.modules, recorder.optimizers) if tried.changes_learning else None
        self._patches = Patches()
        self._calls = self._usual_calls = 0
        self._on = self._away = self._has_learned = False
        self._paused = False
        """Whether the loop has left its steps since the last of them ended."""

    def watch(self) -> None:
        """Listen for pauses; where the model learns something else, saving is one too."""
        delivery = self._recorder.delivery
        delivery.pauses.watch(lambda: self.leave(is_between=delivery.pauses.is_between), self.back)
        if self._saved is not None:
            self._recorder.calls.on_call = lambda: delivery.guarded(self.called)
            for owner, name in _STATE_CALLS:
                self._patches.replace(owner, name, functools.partial(_after, delivery.pauses.begin))

    def end(self) -> None:
        """Put everything back for good."""
        self._patches.remove()
        self._recorder.delivery.pauses.unwatch()
        if self._saved is not None:
            self._recorder.calls.on_call = None
        self.leave(is_between=True)

    def set(self, on: bool) -> bool:
        """Switch between two steps; return whether anything was to be switched."""
        changes, self._on = on != self._on, on
        if changes and not self._away:
            self._enter()
        return changes

    def _enter(self) -> None:
        self._entered.close()
        if self._on:
            self._entered.enter_context(self._tried.off())

    def leave(self, *, is_between: bool) -> None:
        """Put everything back while the loop does something else; the state only if no step is under way."""
        self._paused = self._away = True
        self._entered.close()
        if is_between and self._saved is not None and self._has_learned:
            self._saved.restore()
            self._has_learned = False

    def back(self) -> None:
        """Switch as before."""
        if not self.is_stuck:
            self._away, self._has_learned = False, True
            self._enter()

    def called(self) -> None:
        """The model is called for training: put everything back for good if no update comes of that."""
        self._calls += 1
        if 0 < STUCK * self._usual_calls < self._calls and not self.is_stuck:
            self.is_stuck = True
            self.leave(is_between=True)

    def passed(self) -> bool:
        """Return whether the step that has ended was one without a pause."""
        self._calls, self._usual_calls = 0, max(1, self._calls)
        paused, self._paused, self._has_learned = self._paused or self._away, False, not self.is_stuck
        return not paused


def _after(first: Callable[[], None], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    return marked


def can_switch_off(cause: str, recorder: Recorder) -> bool:
    """Return whether something switches a cause off in this run."""
    return counterfactual(cause, recorder) is not None


def try_without(
    cause: str, recorder: Recorder, local_ranks: int, passes: int, *, together: bool
) -> Generator[None, Measurement, Experiment]:
    """Run real steps with and without a cause; a rank that can't switch what the others try measures what those do.

    Args:
        cause: its name.
        recorder: of the loop.
        local_ranks: that share the cores of this host.
        passes: backward passes with an exchange before each update.
        together: with other ranks, which switch at the same steps.
    """
    tried = counterfactual(cause, recorder, local_ranks, passes) or unchanged()
    return (yield from experiment(tried, recorder, backlog_of(recorder), together=together))


def backlog_of(recorder: Recorder) -> Backlog | None:
    """Return what corrects the host's times for a block, None without a GPU."""
    device = recorder.trained.device
    if device.type != "cuda":
        return None
    return Backlog(recorder.clock.now, functools.partial(torch.cuda.synchronize, device), events_on(device))


def experiment(
    tried: Counterfactual, recorder: Recorder, backlog: Backlog | None = None, *, together: bool = False
) -> Generator[None, Measurement, Experiment]:
    """Run one counterfactual; each `yield` lets one step pass, also on ranks whose loop pauses while others go on.

    Args:
        tried: what is switched.
        recorder: of the loop; it tells when the loop leaves its steps.
        backlog: of the GPU that the model is on, None without one. A host that runs ahead of it refills its queue after
            each switch, and a block of four steps would be timed by how fast they are launched.
        together: with other ranks, which switch at the same steps.
    """
    switch = Switch(tried, recorder)
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

    switch.watch()
    try:
        # The mean of a block, not its median: workers deliver in bursts, and a burst is time too.
        result = yield from drive(by_blocks(TOGETHER if together else ALONE, reduce=statistics.fmean), run)
    finally:
        switch.end()
    outcome = result.outcome
    assert outcome is not None
    has_worked = tried.worked() and all(whole.values()) and not switch.is_stuck
    return Experiment(
        name=tried.name,
        what=tried.what,
        before_ms=outcome.before_ms,
        after_ms=outcome.after_ms,
        saving=Saving(value=1 - 1 / outcome.gain, low=1 - 1 / outcome.low, high=1 - 1 / outcome.high),
        pairs=outcome.pairs,
        verdict=outcome.verdict if has_worked else "void",
        changes_learning=tried.changes_learning,
    )


def _by_device(block: Sequence[tuple[float, bool]], more_s: float) -> list[tuple[float, bool]]:
    """Return the steps of a block, scaled to the time that the device took for it, `more_s` longer than the host."""
    # By addition, quick steps became negative where a value is read in some of them only: 8 of 60 ms beside 232.
    host_s = sum(seconds for seconds, _ in block)
    factor = max(host_s + more_s, _LEAST * host_s) / host_s
    return [(seconds * factor, was_whole) for seconds, was_whole in block]
