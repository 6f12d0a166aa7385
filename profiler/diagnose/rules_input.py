"""Rules: the step waits for its batches."""

from __future__ import annotations

import dataclasses

from accel.profiler.diagnose.anatomy import Anatomy
from accel.profiler.diagnose.findings import (
    NEAR,
    SURE,
    finding,
    ms_of,
    of_phases,
    of_share,
    thread_text,
    top_lines,
)
from accel.profiler.evidence import Evidence, ThreadShare, are_shared
from accel.profiler.report import Finding, Saving

HANDOVER_S = 0.5e-3
"""Handing a batch over from a worker process takes this long: a loop that needed 0.15 ms took 0.78 ms with one."""
_ASLEEP = 0.4
"""Share of the wait spent asleep from which the cause is storage. Each of many short reads wakes the thread, which
takes time on a core: with reads of 0.2 ms and nothing else it was 46 to 85 % asleep, depending on the load then."""
_AT_WORK = 0.5, 0.65
"""Share of the wait in which the training thread works from which it does not wait for workers, and the same beside
neighbours. With workers that slept it was 0.33, and 0.54 to 0.59."""
_WHERE = {
    "loss": "between the forward and the backward pass, where the clock of the loss runs",
    "host": "between the backward pass and the update",
    "forward": "before the loss, where the clock of the forward pass runs: no call of the model was seen",
}
WHOLE_BATCHES = (
    "take whole batches at once: a dataset with __getitems__, or its tensors indexed by the batch; worker processes "
    "would cost more than they take over"
)


def _starts_epochs(evidence: Evidence, anatomy: Anatomy) -> float:
    """Return the share of the step in which workers start an epoch."""
    # Without workers, what begins an epoch is the dataset's own work, as filling a shuffle buffer is.
    return anatomy.epoch_start if evidence.loader.workers else 0.0


def epoch_start(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    restarted = not evidence.loader.persistent
    share = anatomy.epoch_start + (anatomy.epoch_slow if restarted else 0.0)
    starting = _starts_epochs(evidence, anatomy)
    if starting < NEAR:
        return None
    firsts = sum(m.first for m in evidence.steps)
    why = [
        f"{firsts} of {anatomy.steps} steps begin an epoch; beyond an ordinary wait they wait "
        f"{ms_of(anatomy, anatomy.epoch_start)} of the mean step",
        f"the loader has {evidence.loader.workers} workers"
        + ("" if evidence.loader.persistent else ", started again for each epoch"),
    ]
    if restarted and anatomy.epoch_slow >= 0.02:
        why.append(f"the model's own phases are slower in these steps, by {ms_of(anatomy, anatomy.epoch_slow)}")
    predicted = Saving(value=share, low=0.85 * share, high=min(1.0, 1.1 * share))
    return finding("input.epoch_start", share if starting >= SURE else starting, why, predicted)


def loader(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    share = anatomy.shares["data"] - _starts_epochs(evidence, anatomy)
    if share < NEAR:
        return None
    whole = of_phases(evidence, "data")
    predicted = of_share(whole, share)
    why = [f"the loop waits for its loader for {ms_of(anatomy, share)}"]
    if evidence.loader.workers:
        return _from_workers(evidence, share, why, predicted)
    thread = evidence.data_thread
    if evidence.collate_share >= 0.5:
        why.append(f"{evidence.collate_share:.0%} of that is the collate function")
        return finding("input.collate", share, why, predicted)
    if thread is not None:
        why.append(f"in the meantime the training thread is {thread_text(thread)}")
    why += top_lines(evidence, ["data"])
    blocked = thread is not None and _own(thread, evidence).blocked >= _ASLEEP
    if not blocked and share * anatomy.step_s < HANDOVER_S:
        why.append(f"handing a batch over from a worker process takes some {HANDOVER_S * 1e3:.1g} ms, which is more")
        return dataclasses.replace(finding("input.cpu", share, why, predicted), remedy=WHOLE_BATCHES, strategy="")
    return finding("input.storage" if blocked else "input.cpu", share, why, predicted)


def _from_workers(evidence: Evidence, share: float, why: list[str], predicted: Saving) -> Finding:
    shares = [worker.share for worker in evidence.workers]
    thread = evidence.data_thread
    at_work = _AT_WORK[are_shared(evidence.foreign_cores, evidence.cores)]
    if thread is not None and _own(thread, evidence).run >= at_work:
        why.append(f"in the meantime the training thread is {thread_text(thread)}: it does not wait for a worker")
        return finding("input.handover", share, why, predicted)
    if not shares:
        why.append("what the workers do could not be seen")
        return finding("input.workers", share, why, predicted)
    mean = ThreadShare(
        run=sum(s.run for s in shares) / len(shares),
        wait=sum(s.wait for s in shares) / len(shares),
        blocked=sum(s.blocked for s in shares) / len(shares),
    )
    why.append(f"{len(shares)} workers are {thread_text(mean)}")
    # While the loop waits, all work has been handed out: a worker that sleeps does so inside its task.
    return finding(
        "input.worker_storage" if _own(mean, evidence).blocked >= 0.5 else "input.workers", share, why, predicted
    )


def _own(thread: ThreadShare, evidence: Evidence) -> ThreadShare:
    """Return a thread's time, without what it waited for cores that others held."""
    awake = thread.run + thread.blocked
    if not are_shared(evidence.foreign_cores, evidence.cores) or awake <= 0:
        return thread
    return ThreadShare(run=thread.run / awake, wait=0.0, blocked=thread.blocked / awake)


def iterator(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    share, phases = sum(anatomy.batches.values()), list(anatomy.batches)
    if share < NEAR:
        return None
    rows = [row for row in evidence.lines if row.phase in phases and "next batch" in row.tags]
    seconds = sum(row.seconds for row in rows)
    off_core = sum(row.seconds * row.blocked for row in rows) / seconds
    most = max(phases, key=lambda phase: anatomy.batches[phase])
    why = [
        f"the loop makes its batches itself, which takes {ms_of(anatomy, share)}, {off_core:.0%} of it not on a core",
        *([f"it does so {_WHERE[most]}"] if most in _WHERE else []),
        *top_lines(evidence, phases, "next batch"),
    ]
    whole = of_phases(evidence, *phases)
    return finding("input.iterator", share, why, of_share(whole, share))
