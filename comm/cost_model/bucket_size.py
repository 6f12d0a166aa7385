"""Which size of bucket suits a way best.

Small buckets begin to move early and pay α each time; large ones begin late. Compressed, little is left to overlap, so
that larger ones win.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from accel.comm.catalogue import CATALOGUE, Scheme
from accel.comm.cost_model.choice import WORTH
from accel.comm.cost_model.cost import Network, Profile, Stages, between, plain, simulate

CAPS_MB = (1.0, 5.0, 25.0, 50.0, 100.0)


class Size(NamedTuple):
    """A size of buckets and what the model says of it."""

    cap_mb: float
    """As `bucket_cap_mb` of DDP."""
    step_s: float


def rebucketed(profile: Profile, cap_bytes: float) -> tuple[Profile, list[float]]:
    """Return the profile with buckets of at most `cap_bytes` (the first 1 MB, as DDP makes it), and these.

    Gradients are taken to become ready evenly between the times at which buckets were.
    """
    total, ends = sum(profile.bytes), []
    at = min(float(1 << 20), cap_bytes)
    while at < total:
        ends.append(at)
        at += cap_bytes
    ends.append(float(total))
    known = [0.0]
    for one in profile.bytes:
        known.append(known[-1] + one)
    # The first bucket became ready at 0, at the pace of the others its gradients began before.
    pace = profile.ready_s[-1] / max(known[-1] - known[1], 1.0)
    times = [-pace * known[1], *profile.ready_s]
    ready = np.interp(ends, known, times).tolist()
    sizes = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    first = ready[0]
    moved = Profile(
        tuple(round(one) for one in sizes),
        tuple(one - first for one in ready),
        max(profile.rest_s + first, 0.0),
        profile.threads,
        profile.copy_byte_s,
        profile.core_s,
    )
    return moved, sizes


def better_size(
    way: Scheme | None,
    profile: Profile,
    network: Network,
    costs: Mapping[Scheme, Sequence[Stages]],
    cap_mb: float = 25.0,
) -> Size | None:
    """Return the size of buckets under which a way is predicted to be fastest.

    Args:
        way: of all buckets; None is DDP's own all-reduce.
        profile: of the backward pass.
        network: links and cores.
        costs: of each bucket on each way.
        cap_mb: the present size, MiB.

    Returns:
        None unless it is better by more than `WORTH`, and where nothing can be said: what a compressor does with other
        shapes in a bucket is known only by running it.
    """
    if way is not None and not CATALOGUE[way.compressor].linear:
        return None
    ends = sorted(range(len(profile.bytes)), key=lambda i: profile.bytes[i])
    small, large = ends[0], ends[-1]
    steps = {}
    for cap in {cap_mb, *CAPS_MB}:
        moved, sizes = rebucketed(profile, cap * (1 << 20))
        cost = [plain(size) for size in sizes]
        if way is not None:
            known = [(profile.bytes[end], costs[way][end]) for end in (small, large)]
            cost = [between(known[0], known[1], size) for size in sizes]
        steps[cap] = simulate(moved, cost, network, [way] * len(sizes)).step_s
    best = min(steps, key=lambda cap: steps[cap])
    return Size(best, steps[best]) if steps[best] < steps[cap_mb] * (1 - WORTH) else None
