"""Rules: the loop itself: update, own code, gradient exchange, and work between steps."""

from __future__ import annotations

from accel.profiler.diagnose.anatomy import COMPUTING, Anatomy
from accel.profiler.diagnose.findings import (
    NEAR,
    collected,
    finding,
    ms_of,
    of_phases,
    of_share,
    scaled,
    tagged,
    top_lines,
)
from accel.profiler.evidence import Evidence
from accel.profiler.report import Finding, Saving

_MANY_BUCKETS, _SMALL_BUCKET = 8, 2**20
"""From so many buckets of less than so many bytes on the mean, latencies may be what is waited for."""


def collector(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    share = collected(evidence, anatomy)
    if share < NEAR:
        return None
    why = [f"the garbage collector ran for {ms_of(anatomy, share)}"]
    return finding("host.gc", share, why, Saving(value=share, low=0.9 * share, high=min(1.0, 1.1 * share)))


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
    predicted = Saving(value=share, low=0.7 * share, high=min(1.0, 1.1 * share))
    return finding("communication.exposed", share, why, predicted)


def unused_search(evidence: Evidence, anatomy: Anatomy) -> Finding | None:
    share = evidence.unused_search_share
    if share < NEAR:
        return None
    why = [f"find_unused_parameters=True takes {ms_of(anatomy, share)} after each forward pass, and finds none"]
    return finding("communication.unused_search", share, why, Saving(value=share, low=0.7 * share, high=1.3 * share))


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
    saves = Saving(value=share, low=0.8 * share, high=min(1.0, 1.2 * share))
    name = "outside.checkpoint" if tagged(evidence, ["outside"], "checkpoint") >= 0.5 else "outside.periodic"
    return finding(name, share, why + top_lines(evidence, ["outside"]), saves)


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
