"""Which bucket size suits a scheme best.

Small buckets are sent early and pay α each time; large ones are sent late. With compression little is left to overlap,
so larger ones win.
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
    """A bucket size and its prediction."""

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
    boundaries = [0.0]
    for nbytes in profile.bytes:
        boundaries.append(boundaries[-1] + nbytes)
    # The first bucket became ready at 0, at the pace of the others its gradients began before.
    pace = profile.ready_s[-1] / max(boundaries[-1] - boundaries[1], 1.0)
    times = [-pace * boundaries[1], *profile.ready_s]
    ready = np.interp(ends, boundaries, times).tolist()
    sizes = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    first = ready[0]
    moved = Profile(
        tuple(round(size) for size in sizes),
        tuple(ready_s - first for ready_s in ready),
        max(profile.rest_s + first, 0.0),
        profile.threads,
        profile.copy_byte_s,
        profile.core_s,
    )
    return moved, sizes


def better_size(
    scheme: Scheme | None,
    profile: Profile,
    network: Network,
    costs: Mapping[Scheme, Sequence[Stages]],
    cap_mb: float = 25.0,
) -> Size | None:
    """Return the bucket size with which a scheme is predicted to be fastest.

    Args:
        scheme: of all buckets; None is DDP's own all-reduce.
        profile: of the backward pass.
        network: links and cores.
        costs: of each bucket by each scheme.
        cap_mb: the present size, MiB.

    Returns:
        None unless it is better by more than `WORTH`, and where nothing can be predicted: what a compressor does with
        other shapes in a bucket is known only by running it.
    """
    if scheme is not None and not CATALOGUE[scheme.compressor].linear:
        return None
    ends = sorted(range(len(profile.bytes)), key=lambda i: profile.bytes[i])
    small, large = ends[0], ends[-1]
    steps = {}
    for cap in {cap_mb, *CAPS_MB}:
        moved, sizes = rebucketed(profile, cap * (1 << 20))
        cost = [plain(size) for size in sizes]
        if scheme is not None:
            anchors = [(profile.bytes[end], costs[scheme][end]) for end in (small, large)]
            cost = [between(anchors[0], anchors[1], size) for size in sizes]
        steps[cap] = simulate(moved, cost, network, [scheme] * len(sizes)).step_s
    best = min(steps, key=lambda cap: steps[cap])
    return Size(best, steps[best]) if steps[best] < steps[cap_mb] * (1 - WORTH) else None
