"""Rules: computation, copies or launches take longer than they have to."""

from __future__ import annotations

import os
from dataclasses import dataclass

from accel.profiler.diagnose.anatomy import Anatomy
from accel.profiler.diagnose.findings import NEAR, SURE, finding, ms_of
from accel.profiler.diagnose.phase_contents import OVERHEAD
from accel.profiler.evidence import Evidence
from accel.profiler.report import Finding, Saving

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
    return finding("transfer.pageable", share, why, Saving(value=share, low=0.5 * share, high=share))


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
    return finding("sync.read", share, why, Saving(value=share, low=0.0, high=share))


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
