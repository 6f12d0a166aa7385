"""Models, noise scales and limits drawn at random, for the laws of the goodput room."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from accel.goodput.efficiency import NoiseInterval
from accel.goodput.throughput import MOST, SYNC_TERMS, ThroughputModel

# Times from a microsecond to ten seconds, and none at all.
times = st.floats(-6, 1).map(lambda exponent: 10.0**exponent)
exponents = st.floats(1.0, MOST)


@st.composite
def models(draw: Any) -> ThroughputModel:
    sync = {name: draw(st.just(0.0) | times) for name in SYNC_TERMS}
    return ThroughputModel(
        compute_fixed_s=draw(st.just(0.0) | times),
        compute_sample_s=draw(times),
        compute_exponent=draw(exponents),
        overlap_exponent=draw(exponents),
        **sync,
    )


@st.composite
def noises(draw: Any) -> NoiseInterval:
    low, phi, high = sorted(draw(st.tuples(*[st.floats(0, 1e6) | st.just(math.inf)] * 3)))
    return NoiseInterval(low=low, phi=phi, high=high, batch=draw(st.floats(1, 1e4)), share=draw(st.floats(0, 0.99)))


@st.composite
def placements(draw: Any) -> tuple[int, int]:
    """(nodes, replicas), at most 16 hosts of 8."""
    nodes = draw(st.integers(1, 16))
    return nodes, draw(st.integers(nodes, 8 * nodes))


TYPICAL = ThroughputModel(
    compute_fixed_s=0.02,
    compute_sample_s=0.0008,
    compute_exponent=2.0,
    local_ring_s=0.02,
    local_latency_s=0.003,
    ring_s=0.1,
    two_nodes_s=0.03,
    shared_link_s=0.04,
    latency_s=0.01,
    overlap_exponent=2.5,
)
"""About ResNet-18 on machines of four T4."""
