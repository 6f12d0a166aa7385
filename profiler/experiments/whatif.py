"""Counterfactuals: run real steps without the suspected cause, interleaved with ordinary ones, and measure the saving.

A share of the time says where the time goes, not what would be saved: work may overlap, and removing a wait may uncover
another one. So a suspicion is tested. Each counterfactual switches one thing at a step boundary; blocks with and
without it are interleaved and judged as a trial is.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Generator, Iterator, Sequence
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accel.profiler.diagnose.causes import switched_with
from accel.profiler.experiments import exchanges, process_modes, update_path
from accel.profiler.experiments.stale_reads import StaleReads, no_waiting
from accel.profiler.experiments.switch import Counterfactual, Switch
from accel.profiler.experiments.update_path import Paths
from accel.profiler.loop.device import Backlog, events_on
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


def counterfactual(cause: str, recorder: Recorder, local_ranks: int = 1, passes: int = 1) -> Counterfactual | None:
    """Return what switches a cause off in this run, None if nothing does.

    Args:
        cause: its name.
        recorder: of the loop.
        local_ranks: that share the cores of this host.
        passes: backward passes with an exchange before each update.
    """
    if cause in switched_with("input.cpu") and recorder.loaders.loader is not None:
        return fetched_ahead(recorder)
    if cause == "sync.read":
        return no_waiting(StaleReads())
    if cause == "host.gc":
        return process_modes.no_collector(lambda: recorder.probes.collector.seconds)
    if cause == "compute.anomaly":
        return process_modes.no_anomaly_mode()
    if cause == "compute.threads":
        return process_modes.all_threads(local_ranks)
    if cause.startswith("optimizer.") and any(can_update_at_once(o) for o in recorder.optimizers):
        return one_update(recorder.optimizers)
    ddp = [module for module in recorder.roots.modules if isinstance(module, DistributedDataParallel)]
    return exchanges.counterfactual(cause, ddp, passes) if ddp else None


def fetched_ahead(recorder: Recorder) -> Counterfactual:
    """Fetch batches while the step's clock is stopped: as if the loader were never late."""
    fetched = 0

    @contextlib.contextmanager
    def off() -> Iterator[None]:
        nonlocal fetched
        recorder.loaders.ahead, before = True, recorder.loaders.fetched
        try:
            yield
        finally:
            recorder.loaders.ahead = False
            fetched += recorder.loaders.fetched - before

    what = "each batch was fetched between two steps, off the clock"
    return Counterfactual("batch fetched ahead", what, off, lambda: fetched > 0)


def one_update(optimizers: Sequence[Optimizer]) -> Counterfactual:
    """Let the optimizers update all parameters in one fused or foreach call."""
    optimizers, switched = [each for each in optimizers if can_update_at_once(each)], 0

    @contextlib.contextmanager
    def off() -> Iterator[None]:
        nonlocal switched
        paths = Paths()
        for optimizer in optimizers:
            paths.switch([optimizer], fused=update_path.has_fused(optimizer))
        try:
            yield
        finally:
            switched += sum(map(update_path.updates_at_once, optimizers))
            paths.restore()

    what = "the optimizer took its fused path, or foreach where it has none"
    return Counterfactual("multi-tensor optimizer", what, off, lambda: switched > 0)


def can_update_at_once(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has another path, and is not on it."""
    return not update_path.refusal(optimizer) and not update_path.updates_at_once(optimizer)


def unchanged() -> Counterfactual:
    """Switch nothing, on a rank that can't switch what the others try: what is measured is what those do."""
    return Counterfactual("nothing", "nothing", contextlib.nullcontext, lambda: True)


def backlog_of(recorder: Recorder) -> Backlog | None:
    """Return what corrects the host's times for a block, None without a GPU."""
    device = recorder.trained.device
    if device.type != "cuda":
        return None
    return Backlog(recorder.clock.now, partial(torch.cuda.synchronize, device), events_on(device))


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
