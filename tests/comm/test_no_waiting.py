"""On a GPU no stage makes the host wait for the device: here one without values, so that none can be read."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from accel.comm import dgc
from accel.comm.catalogue import SchemeSettings
from accel.comm.compressor import Compressor
from accel.comm.cost_model.dry_run import DryChannel
from accel.comm.engine.pipeline import BucketJob
from accel.comm.engine.reduction import arranged, pipeline_stages
from accel.comm.layout import Layout
from accel.comm.memory import Memory
from accel.comm.ranks.topology import Topology
from tests.comm.test_small_buckets import COMPRESSORS, Source

TOPOLOGIES = {"flat": Topology(((0,), (1,))), "5 ranks": Topology(((0,), (1,), (2,), (3,), (4,))), "by hosts": None}
FOUR = Topology(((0, 1), (2, 3)))
SHAPES = [(7,), (5, 13), (), (40, 40)]


def _named(kind: Compressor) -> Compressor:
    if getattr(kind, "momentum", False):
        kind._bind(Source())  # type: ignore[attr-defined]
    return kind


@pytest.mark.sample(3)
@pytest.mark.parametrize("where", ["flat", "5 ranks", "by hosts"])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_nobody_asks_the_device_for_a_value(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Which are the largest decides how many there are, and the host waits for that: docs/comm.md says so.
    some: Callable[[Tensor, int], Tensor] = lambda values, count: torch.zeros(  # noqa: E731
        min(count, values.numel()), dtype=torch.int64, device=values.device
    )
    monkeypatch.setattr(dgc, "largest", some)
    kind = _named(COMPRESSORS[name]())
    topology, hierarchical = TOPOLOGIES[where] or FOUR, where == "by hosts"
    memory = Memory()
    stages = pipeline_stages(
        SchemeSettings(kind, hierarchical, kind.takes_feedback),
        arranged(topology, 0, hierarchical),
        memory,
        lambda _, ranks: DryChannel(ranks, topology, time.perf_counter),
    )
    layout = Layout(0, tuple(map(str, range(len(SHAPES)))), tuple(map(torch.Size, SHAPES)), torch.float32, is_last=True)
    with torch.no_grad():
        for step in (1, 2, 3):
            buffer = torch.randn(layout.numel, device="meta")
            job = BucketJob(step, layout, buffer, memory.slot(layout))
            job.slot.agreed = True  # asked for once, when buckets are new
            for stage in stages:
                stage.run(job, stage.channel)  # raises where a value is asked for
            memory._settle(finite=True)  # read once a step
