"""How often the compressors pass over a bucket's gradients, as an operator of each kind moves them through a cache.

Where cores are shared, memory is what a hook waits for. Counts don't depend on the machine; times do.
"""

from __future__ import annotations

import time

import pytest
import torch

from accel.comm.catalogue import SchemeSettings
from accel.comm.compressor import Compressor
from accel.comm.compressor_memory import Memory
from accel.comm.cost_model.dry_run import DryChannel
from accel.comm.engine.pipeline import BucketJob
from accel.comm.engine.reduction import arranged, pipeline_stages
from accel.comm.half import Half
from accel.comm.int8 import Int8
from accel.comm.layout import Layout
from accel.comm.powersgd import PowerSGD
from accel.comm.ranks.topology import Topology
from tests.comm.memory_traffic import Traffic

PAIR = Topology(((0,), (1,)))


def traffic(kind: Compressor, shapes: list[tuple[int, ...]], feedback: bool) -> tuple[float, Traffic]:
    """Return passes over a bucket of one rank of two at its third step, and what was counted."""
    memory = Memory()
    stages = pipeline_stages(
        SchemeSettings(kind, False, feedback),
        arranged(PAIR, 0, False),
        memory,
        lambda _, ranks: DryChannel(ranks, PAIR, time.perf_counter),
    )
    names = tuple(map(str, range(len(shapes))))
    layout = Layout(0, names, tuple(map(torch.Size, shapes)), torch.float32, is_last=True)
    buffer = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    for step in (1, 2, 3):
        with Traffic() as counted, torch.no_grad():
            memory.settle()
            job = BucketJob(step, layout, buffer, memory.slot(layout))
            for stage in stages:
                stage.run(job, stage.channel)
    return counted.read / buffer.nbytes, counted


@pytest.mark.parametrize(
    ("kind", "shapes", "feedback", "most"),
    [
        # The peer's half: values, residual, what is lost; the own half: these and the codes' sum; the mean written.
        pytest.param(Int8(), [(1024, 1024)] * 2, True, 7.5, id="int8"),
        pytest.param(Int8(), [(1024, 1024)] * 2, False, 5.3, id="int8 without feedback"),
        pytest.param(Half(), [(1024, 1024)] * 2, True, 10.9, id="half with feedback"),
        # Values, residual, their sum; twice projected; what is lost and the mean written as one product each.
        pytest.param(PowerSGD(4), [(2048, 1024)], True, 9.0, id="powersgd"),
        pytest.param(PowerSGD(16), [(2048, 1024)], True, 9.0, id="powersgd of rank 16"),
    ],
)
def test_passes_over_memory(kind: Compressor, shapes: list[tuple[int, ...]], feedback: bool, most: float) -> None:
    found, counted = traffic(kind, shapes, feedback)
    assert found < most
    assert counted.allocated == 0 or isinstance(kind, Half)  # codes of half precision are as large as a cache


def test_traffic_counts_passes_and_not_what_stays_in_the_cache() -> None:
    large, small = torch.zeros(4 << 20), torch.zeros(1 << 16)
    with Traffic() as counted:
        large.add_(1)
        large.mul_(2)
    assert counted.read == pytest.approx(2 * large.nbytes, rel=0.01)
    with Traffic() as counted:
        for _ in range(5):
            small.add_(1)
    assert counted.read == pytest.approx(small.nbytes, rel=0.1)
