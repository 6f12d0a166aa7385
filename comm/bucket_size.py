"""Which size of bucket suits a way best.

DDP takes `bucket_cap_mb` when it is made, so this is advice for the next run. Small buckets begin to move early and pay
α each time; large ones begin late. Compressed, little is left to overlap, so that larger ones win.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from accel.comm.catalogue import CATALOGUE, Way
from accel.comm.choice import WORTH
from accel.comm.cost import Network, Profile, Stages, between, plain, simulate

CAPS_MB = (1, 5, 25, 50, 100)


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


def bucket_cap_mb(way: Way | None, profile: Profile, network: Network, costs: Mapping[Way, Sequence[Stages]]) -> int:
    """Return the bucket_cap_mb under which a way is predicted to be fastest; DDP takes it when it is made.

    25, which is DDP's own, unless another is better by more than `WORTH`, or nothing can be said: what a compressor
    does with other shapes in a bucket is known only by running it.
    """
    if way is not None and not CATALOGUE[way.compressor].linear:
        return 25
    ends = sorted(range(len(profile.bytes)), key=lambda i: profile.bytes[i])
    small, large = ends[0], ends[-1]
    steps = {}
    for cap in CAPS_MB:
        moved, sizes = rebucketed(profile, cap * float(1 << 20))
        cost = [plain(size) for size in sizes]
        if way is not None:
            known = [(profile.bytes[end], costs[way][end]) for end in (small, large)]
            cost = [between(known[0], known[1], size) for size in sizes]
        steps[cap] = simulate(moved, cost, network, [way] * len(sizes)).step_s
    best = min(steps, key=lambda cap: steps[cap])
    return best if steps[best] < steps[25] * (1 - WORTH) else 25
