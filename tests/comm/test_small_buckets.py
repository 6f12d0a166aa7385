"""Every compressor on buckets of nothing, of one element and of less than a block: means, and no wait for a device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.comm import dgc
from accel.comm.catalogue import SchemeSettings
from accel.comm.compressor import RESIDUAL, Compressor, Exact
from accel.comm.compressor_memory import Memory
from accel.comm.cost_model.dry_run import DryChannel
from accel.comm.dgc import DGC
from accel.comm.engine.pipeline import BucketJob
from accel.comm.engine.reduction import Arrangement, arranged, pipeline_stages
from accel.comm.half import Half
from accel.comm.int8 import Int8
from accel.comm.layout import Layout
from accel.comm.one_bit import OneBit
from accel.comm.powersgd import PowerSGD
from accel.comm.ranks.topology import Topology
from tests.comm.cases import OneBitTwice
from tests.comm.threaded_ranks import World

COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "exact": Exact,
    "bf16": Half,
    "fp16": lambda: Half(torch.float16),
    "int8": Int8,
    "int8, small blocks": lambda: Int8(8),
    "1-bit": OneBit,
    "1-bit of all": lambda: OneBit(8, exact_below=0),
    "1-bit twice": lambda: OneBitTwice(8, exact_below=0),
    "1-bit after a start": lambda: OneBit(8, exact_below=0, start_step=1),
    "1-bit with momentum": lambda: OneBit(8, exact_below=0, momentum=True),
    "1-bit twice with momentum": lambda: OneBitTwice(8, exact_below=6, momentum=True, start_step=1),
    "powersgd": lambda: PowerSGD(2, min_compression=0),
    "powersgd of none": lambda: PowerSGD(1, min_compression=100),
    "acp-sgd": lambda: PowerSGD(1, min_compression=0, alternate=True),
    "dgc": lambda: DGC(0.1, momentum=False, exact_below=0),
    "dgc of none": lambda: DGC(0.1, momentum=False),
    "dgc with momentum": lambda: DGC(0.1, masking=True, exact_below=4),
    "dgc of all": lambda: DGC(1.0, exact_below=0),
}
# (hosts, ranks of each): even ones; one rank, one host, one rank a host, more ranks than a direct exchange takes.
TOPOLOGIES = [(2, 2), (1, 1), (1, 3), (3, 1), (2, 3), (3, 2), (5, 1)]
# Nothing, one element, fewer than ranks, fewer than a block; with what is sent as it is and what is not in one bucket.
LAYOUTS = [
    [()],
    [(0,)],
    [(0, 3), (2, 0)],
    [(1,)],
    [(1, 1)],
    [(3,)],
    [(1, 2), (1,), (0,)],
    [(3, 3), (), (2, 1)],
    [(7,), (5, 13), (1, 40)],
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
STEPS = 3


class Source:
    """An optimizer's momentum."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def coefficients(self, name: str) -> tuple[float, bool]:
        return 0.9, False

    def loss_scale(self) -> float:
        return self.scale

    def begin_pass(self) -> None:
        """Take every pass."""


def _buckets(every: int = 1) -> list[Layout]:
    """Return each layout in each dtype, or in one of `every` of them."""
    cases = [
        (shapes, dtype) for i, dtype in enumerate(DTYPES) for j, shapes in enumerate(LAYOUTS) if (i + j) % every == 0
    ]
    return [
        Layout(
            index,
            tuple(f"{index}.{i}" for i in range(len(shapes))),
            tuple(torch.Size(shape) for shape in shapes),
            dtype,
            index == len(cases) - 1,
        )
        for index, (shapes, dtype) in enumerate(cases)
    ]


def _gradient(layout: Layout, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * layout.index + rank)
    return torch.randn(layout.numel, generator=generator).to(layout.dtype)


def _train(
    rank: int,
    world: World,
    per_host: int,
    hierarchical: bool,
    compressor: Compressor,
    feedback: bool,
    buckets: Sequence[Layout],
) -> dict[str, Any]:
    if getattr(compressor, "momentum", False):
        compressor._bind(Source())  # type: ignore[attr-defined]
    topology = Topology(tuple(tuple(range(low, low + per_host)) for low in range(0, world.size, per_host)))
    memory = Memory()
    stages = pipeline_stages(
        SchemeSettings(compressor, hierarchical, feedback),
        arranged(topology, rank, hierarchical),
        memory,
        lambda name, ranks: world.channel(name, ranks, rank),
    )
    found: dict[str, Any] = {"means": [], "residual": None}
    for step in range(1, STEPS + 1):
        memory.settle()
        for layout in buckets:
            compressor.check(layout)
            buffer = _gradient(layout, rank, step)
            job = BucketJob(step, layout, buffer, memory.slot(layout))
            for stage in stages:
                stage.run(job, stage.channel)
            found["means"].append(buffer)
    found["residual"] = memory.state_dict()["own"].get(RESIDUAL, {})
    return found


def _left(layout: Layout, ranks: list[dict[str, Any]]) -> Tensor:
    """Return the sum of all ranks' residuals of a bucket."""
    total = torch.zeros(layout.numel, dtype=torch.float64)
    for one in layout.extents(0, layout.numel):
        for rank in ranks:
            for skipped, values in rank["residual"].get(one.name, []):
                total[one.begin + skipped : one.begin + skipped + values.numel()] += values
    return total


@pytest.mark.parametrize("make", [lambda: DGC(0.1), lambda: OneBit(8, momentum=True)], ids=["dgc", "1-bit"])
@pytest.mark.parametrize("used", [True, False])
def test_a_residual_of_what_is_sent_as_it_is_follows_gradients_with_a_loss_scale(
    make: Callable[[], Compressor], used: bool
) -> None:
    # Three small elements with a residual of 2 on each rank, from a scheme before; momentum's residuals have no scale.
    layout = Layout(0, ("a",), (torch.Size([3]),), torch.float32, True)
    world = World(2)

    def train(rank: int) -> tuple[Tensor, Tensor]:
        compressor: Any = make()
        compressor._bind(Source(8.0))
        memory = Memory()
        memory.load_state_dict({"version": 1, "own": {RESIDUAL: {"a": [(0, torch.full((3,), 2.0))]}}, "shared": {}})
        settings, arrangement = SchemeSettings(compressor, False, True), Arrangement(False, (rank,), (0, 1), 2)
        stages = pipeline_stages(settings, arrangement, memory, lambda name, ranks: world.channel(name, ranks, rank))
        buffer = torch.full((3,), 8.0 * used)
        job = BucketJob(1, layout, buffer, memory.slot(layout))
        for stage in stages:
            stage.run(job, stage.channel)
        return buffer, memory.state_dict()["own"][RESIDUAL]["a"][0][1]

    for mean, left in world.run(train):
        assert mean.tolist() == ([8.0 + 8.0 * 4.0] * 3 if used else [0.0] * 3)
        assert left.tolist() == ([0.0] * 3 if used else [2.0] * 3)


# Of each kind one by default, and what sends nothing or all of a bucket.
VARIANTS = {
    *("fp16", "int8, small blocks", "1-bit of all", "1-bit after a start", "1-bit twice with momentum"),
    *("acp-sgd", "dgc", "dgc of all"),
}


@pytest.mark.sample(2, every_value=False)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in VARIANTS else []) for name in COMPRESSORS]
)
def test_small_buckets_are_averaged(name: str) -> None:
    check(name, TOPOLOGIES[0], (True,), _buckets(2))


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda one: "x".join(map(str, one)))
@pytest.mark.parametrize("name", COMPRESSORS)
def test_small_buckets_are_averaged_everywhere(name: str, topology: tuple[int, int]) -> None:
    check(name, topology, (False, True), _buckets())


def check(name: str, topology: tuple[int, int], hierarchical_ways: Sequence[bool], buckets: Sequence[Layout]) -> None:
    """Look at the mean that arrives on each rank, and at the residuals."""
    hosts, per_host = topology
    kind = COMPRESSORS[name]()
    for hierarchical, feedback in itertools.product(hierarchical_ways, {kind.takes_feedback, kind.feedback}):
        world = World(hosts * per_host)
        ranks = world.run(
            lambda rank: _train(rank, world, per_host, hierarchical, COMPRESSORS[name](), feedback, buckets)  # noqa: B023
        )
        count = len(buckets)
        for number, mean in enumerate(ranks[0]["means"]):
            where = (hierarchical, feedback, number // count, buckets[number % count])
            assert torch.isfinite(mean).all(), where
            assert all(torch.equal(mean, one["means"][number]) for one in ranks), where
        if kind.fields or not (feedback or kind.lossless):
            continue  # what momentum makes of gradients, or what was lost for good
        for layout in buckets:
            applied = sum(ranks[0]["means"][step * count + layout.index].double() for step in range(STEPS))
            wanted = sum(
                _gradient(layout, rank, step).double() for rank in range(world.size) for step in range(1, STEPS + 1)
            )
            error = applied + _left(layout, ranks) - wanted / world.size
            # Gradients are divided by the number of ranks, sent and kept in their dtype, at values of up to 8.
            most = 8 * (STEPS + 1) * (hosts + 1) * max(torch.finfo(layout.dtype).eps, 1e-7)
            assert (error.abs() < most).all(), (hierarchical, layout)


WHERE = {"flat": Topology(((0,), (1,))), "5 ranks": Topology(((0,), (1,), (2,), (3,), (4,))), "by hosts": None}
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
    topology, hierarchical = WHERE[where] or FOUR, where == "by hosts"
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
