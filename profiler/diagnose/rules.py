"""The rules: each looks for one cause in the evidence, and returns a finding or None."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass

from accel.profiler.diagnose.anatomy import COMPUTING, OVERHEAD, Anatomy
from accel.profiler.diagnose.findings import (
    NEAR,
    SURE,
    about,
    collected,
    finding,
    ms_of,
    of_phases,
    of_share,
    scaled,
    tagged,
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
    predicted = about(share, 0.85, 1.1)
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


SMALL_BATCH_FACTOR = 8
"""How much larger a batch the prediction for small operations assumes."""


LAUNCH_S = 40e-6
"""What launching an operation takes a slow host at most; a device that idles for longer waits for something else."""


@dataclass(frozen=True, kw_only=True)
class _Device:
    """What a GPU does in the traced steps, as shares of an untraced step: a trace makes steps longer, and no kernel."""

    busy: float
    copies: float
    """Host-to-device copies that nothing hides."""
    reads: float
    """In the model's phases it has run dry while the host waited to read from it. A loader that is late after that, or
    the loop's own code, counts as what it is."""
    launches: float
    """It waits for the host to launch the next operation."""


def _device(evidence: Evidence, anatomy: Anatomy) -> _Device | None:
    """Return what the GPU does; None without one, or without a trace of it."""
    trace = evidence.trace
    if trace is None or trace.busy_ms is None or anatomy.step_s <= 0:
        return None
    step_ms, model = anatomy.step_s * 1e3, anatomy.computing + anatomy.shares["optimizer"]
    busy, copies = min(1.0, trace.busy_ms / step_ms), max(anatomy.shares["copy"], trace.copy_ms / step_ms)
    reads = min(trace.read_ms / step_ms, max(0.0, model - busy))
    idle = max(0.0, min(model, 1.0 - copies) - busy - reads)
    launches = min(idle, trace.launch_ms / step_ms, LAUNCH_S * trace.ops_per_step / anatomy.step_s)
    return _Device(busy=busy, copies=copies, reads=reads, launches=launches)


def transfer(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    device = _device(evidence, anatomy)
    share = anatomy.shares["copy"] if device is None else device.copies
    if evidence.device == "cpu" or share < NEAR:
        return None
    why = [f"copies from the host that nothing hides take {ms_of(anatomy, share)}"]
    why.append("the loader pins its memory" if evidence.loader.pinned else "the loader does not pin its memory")
    return finding("transfer.pageable", share, why, about(share, 0.5, 1.0))


def sync(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    device = _device(evidence, anatomy)
    reads = [point for point in evidence.trace.syncs if not point.copies] if evidence.trace is not None else []
    # A wait for a device that is busy anyway costs nothing: only idle time of the device can be saved.
    if device is None or not reads or device.reads < NEAR:
        return None
    share = device.reads
    top = max(reads, key=lambda point: point.ms)
    why = [
        f"the host waits {sum(p.ms for p in reads):.3g} ms a step to read from the device, which then has nothing to "
        f"do for {ms_of(anatomy, share)}",
        f"most of it in {top.name} at {os.path.basename(top.file)}:{top.line}, {top.calls:.3g} times a step",
    ]
    return finding("sync.read", share, why, about(share, 0.0, 1.0))


def anomaly(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    if not evidence.anomaly_mode:
        return None
    why = [
        "torch.is_anomaly_enabled() is true: each operation records its stack and each gradient is searched for NaN",
        f"forward and backward take {ms_of(anatomy, anatomy.computing)}",
    ]
    return finding("compute.anomaly", anatomy.computing, why, None)


def double(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    share = anatomy.computing + anatomy.shares["optimizer"]
    if evidence.dtype != "float64" or share < NEAR:
        return None
    why = [f"most parameters are float64; forward, backward and update take {ms_of(anatomy, share)}"]
    ratio = 0.5
    if evidence.roofline is not None and {"float32", "float64"} <= set(evidence.roofline.gflops):
        limits = evidence.roofline.gflops
        ratio = limits["float64"] / limits["float32"]
        if evidence.device == "cpu":  # a vector register and a cache line hold twice as many float32, no more
            ratio = max(ratio, 0.5)
        elif evidence.trace is not None:  # an H100 multiplies both alike; the rest moves twice the bytes
            products = evidence.trace.matmul_share
            ratio = products * min(ratio, 1.0) + (1.0 - products) * 0.5
        why.append(
            f"this device reaches {limits['float32']:.3g} GFLOP/s in float32, {limits['float64']:.3g} in float64"
        )
    value = share * (1 - min(ratio, 1.0))
    if evidence.device != "cpu" and value < NEAR:
        return None
    if evidence.device != "cpu" and value < SURE:
        share = value  # little of it is the format's doing
    return finding("compute.float64", share, why, Saving(value=value, low=0.7 * value, high=min(share, 1.2 * value)))


IDLE = 0.4
"""Share of idle cores from which more threads are worthwhile: one core of two, less what the system itself takes."""


def idle_cores(evidence: Evidence) -> float:
    """Return the cores of this host that the run leaves idle."""
    workers = sum(worker.share.run + worker.share.wait for worker in evidence.workers)
    threads = evidence.loop_threads or evidence.threads
    return evidence.cores - evidence.local_world_size * threads - workers - (evidence.foreign_cores or 0.0)


def threads(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    small = evidence.trace is not None and evidence.trace.small_share >= 0.5
    if evidence.device != "cpu" or small or anatomy.computing < 0.5 or idle_cores(evidence) < IDLE * evidence.cores:
        return None
    why = [f"{evidence.threads} of {evidence.cores} cores compute, {idle_cores(evidence):.2g} are idle"]
    value = anatomy.computing * (1 - evidence.threads / evidence.cores)
    return finding("compute.threads", anatomy.computing, why, Saving(value=0.8 * value, low=0.0, high=value))


def small_ops(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    trace, device = evidence.trace, _device(evidence, anatomy)
    if trace is None or (device is None and trace.small_share < 0.5):
        return None
    # An update of many tensors at once costs the same for a batch of any size; one parameter at a time is a cause
    # of its own.
    update = anatomy.shares["optimizer"] if not evidence.optimizer.one_by_one else 0.0
    share = anatomy.computing * trace.small_share + update
    if trace.operators_ms is not None:
        share = min(share, OVERHEAD * trace.operators_ms / 1e3 / anatomy.step_s)
    if device is not None:
        share = device.launches
    if share < NEAR:
        return None
    why = [
        f"{trace.ops_per_step:.0f} operations a step, {trace.small_share:.0%} of their time in calls too short for "
        f"their launch",
        f"the prediction is per sample, for a batch {SMALL_BATCH_FACTOR} times as large",
    ]
    if device is not None:
        why.append(f"the device runs a kernel {device.busy:.0%} of the time")
    value = share * (1 - 1 / SMALL_BATCH_FACTOR)
    return finding("launch.small_ops", share, why, Saving(value=value, low=0.7 * value, high=share))


_MOSTLY = 0.5
"""Share of the operators' time: 0.61 to 0.82 where element-wise work was the fault, up to 0.2 in healthy loops, on two
cores; a trace of two steps resolves no finer."""


def bandwidth(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    trace = evidence.trace
    if trace is None or trace.elementwise_share < _MOSTLY or trace.small_share >= 0.5:
        return None
    device = _device(evidence, anatomy)
    computing = anatomy.computing if device is None else min(anatomy.computing, device.busy)
    share = computing * trace.elementwise_share
    if share < 0.3:
        return None
    why = [f"{trace.elementwise_share:.0%} of the operators' time is element-wise work on large tensors"]
    limit = evidence.roofline.gb_per_s if evidence.roofline is not None else 0.0
    # What is faster than a copy lies in a cache, and says nothing about memory.
    top = next((op for op in trace.ops if op.kind == "elementwise" and op.gb_per_s and op.gb_per_s <= limit), None)
    if top is not None:
        why.append(f"{top.name} moves {top.gb_per_s:.3g} GB/s; a large copy here moves {limit:.3g}")
    return finding("memory.bound", share, why, None)


_MANY_BUCKETS, _SMALL_BUCKET = 8, 2**20
"""From so many buckets of less than so many bytes on the mean, latencies may be what is waited for."""


def collector(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    share = collected(evidence, anatomy)
    if share < NEAR:
        return None
    why = [f"the garbage collector ran for {ms_of(anatomy, share)}"]
    return finding("host.gc", share, why, about(share, 0.9, 1.1))


def step_code(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    beside = anatomy.shares["host"] - _collected_in(evidence, anatomy, "host") - anatomy.batches.get("host", 0.0)
    inside = sum(anatomy.own_code.values()) + anatomy.own_unplaced
    share = max(0.0, beside) + inside
    if share < NEAR:
        return None
    phases = [*(["host"] if beside > 0 else []), *(COMPUTING if anatomy.own_unplaced else anatomy.own_code)]
    why = [f"the loop's own code between the batch and the update takes {ms_of(anatomy, share)}"]
    if anatomy.own_unplaced:
        why.append(f"{ms_of(anatomy, inside)} of it in forward, loss and backward together, in no operator of torch's")
    elif inside:
        why.append(f"{ms_of(anatomy, inside)} of it in {', '.join(anatomy.own_code)}, in no operator of torch's")
    why += top_lines(evidence, phases)
    whole = of_phases(evidence, *phases)
    return finding("host.step_code", share, why, of_share(whole, share))


def _collected_in(evidence: Evidence, anatomy: Anatomy, phase: str) -> float:
    """Return the part of a phase that the garbage collector explains: it is booked to the largest of the two."""
    largest = max(("host", "outside"), key=lambda name: anatomy.shares[name])
    return min(anatomy.shares[phase], collected(evidence, anatomy)) if phase == largest else 0.0


def communication(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    share = anatomy.shares["communication"]
    if evidence.world_size < 2 or share < NEAR:
        return None
    why = [f"{ms_of(anatomy, share)} are spent exchanging gradients that no computation hides"]
    if evidence.leaves_out_last and not anatomy.shares["evaluation"]:
        why = ["the pass before the update is under no_sync, others are not: ranks update by gradients of their own"]
        return finding("communication.inverted_no_sync", share, why, None)
    if (exchanges := round(evidence.exchanges)) > 1:
        why.append(f"they are exchanged {exchanges} times before an update, and once suffices")
        saved = share * (1 - 1 / exchanges)
        return finding("communication.each_micro_step", share, why, Saving(value=saved, low=0.7 * saved, high=share))
    buckets = evidence.bucket_bytes
    if len(buckets) >= _MANY_BUCKETS and sum(buckets) < len(buckets) * _SMALL_BUCKET:
        why.append(f"in {len(buckets)} buckets of {sum(buckets) / len(buckets) / 2**10:.3g} KiB: each has a latency")
        return finding("communication.small_buckets", share, why, Saving(value=0.5 * share, low=0.0, high=share))
    return finding("communication.exposed", share, why, about(share, 0.7, 1.1))


def unused_search(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    share = evidence.unused_search_share
    if share < NEAR:
        return None
    why = [f"find_unused_parameters=True takes {ms_of(anatomy, share)} after each forward pass, and finds none"]
    return finding("communication.unused_search", share, why, about(share, 0.7, 1.3))


def optimizer(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    share, facts = anatomy.shares["optimizer"], evidence.optimizer
    if share < 1.5 * NEAR:
        return None
    why = [f"{facts.name or 'the optimizer'} takes {ms_of(anatomy, share)} to update {facts.tensors} tensors"]
    whole = of_phases(evidence, "optimizer")
    if facts.one_by_one:
        why.append("parameter by parameter, in Python")
        return finding("optimizer.per_parameter", share, why, scaled(whole, 0.7))
    why += top_lines(evidence, ["optimizer"])
    # Can't be saved: reading and writing parameters, gradients and two moments once.
    ideal_s = 28.0 * facts.elements / (evidence.roofline.gb_per_s * 1e9) if evidence.roofline else 0.0
    left = min(0.9, ideal_s / (share * anatomy.step_s)) if anatomy.step_s else 0.0
    return finding("optimizer.update", share, why, scaled(whole, 1.0 - left))


def evaluation(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    share = anatomy.shares["evaluation"]
    if share < NEAR:
        return None
    why = [f"forward passes without gradients between two updates take {ms_of(anatomy, share)}"]
    if anatomy.stall_every:
        why.append(f"every {anatomy.stall_every:.0f} steps")
    return finding("outside.evaluation", share, why, of_phases(evidence, "evaluation"))


def stalls(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    share = anatomy.stalls - anatomy.shares["evaluation"]
    if share < NEAR or share < anatomy.stalls / 2:
        return None
    every = f"every {anatomy.stall_every:.0f} steps" if anatomy.stall_every else "once"
    why = [f"work between two steps stops the training {every}: {ms_of(anatomy, share)} of the mean step"]
    name = "outside.checkpoint" if tagged(evidence, ["outside"], "checkpoint") >= 0.5 else "outside.periodic"
    return finding(name, share, why + top_lines(evidence, ["outside"]), about(share, 0.8, 1.2))


def each_step(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    evaluating = max(0.0, anatomy.shares["evaluation"] - anatomy.stalls)
    share = (
        anatomy.each - evaluating - anatomy.batches.get("outside", 0.0) - _collected_in(evidence, anatomy, "outside")
    )
    if share < NEAR:
        return None
    why = [f"work between each update and the next batch takes {ms_of(anatomy, share)}"]
    whole = of_phases(evidence, "outside")
    return finding("outside.step", share, why + top_lines(evidence, ["outside"]), of_share(whole, share))


RULES: tuple[Callable[[Evidence, Anatomy], Finding | None], ...] = (
    collector,
    epoch_start,
    loader,
    iterator,
    transfer,
    sync,
    anomaly,
    double,
    threads,
    small_ops,
    bandwidth,
    communication,
    unused_search,
    optimizer,
    step_code,
    evaluation,
    stalls,
    each_step,
)
