"""Replicas: what ranks agree on is what one process computes from all their batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

from accel.goodput import noise_gradients
from accel.goodput.noise_gradients import (
    _SKETCH,
    GradientSketch,
    PartSums,
    ShardedSample,
    Unmeasurable,
    step_sums,
)
from accel.goodput.noise_scale import NoiseSums
from accel.guard.together import fsdp_parameters
from tests.accel.goodput.noise_loops import OPTIMIZERS, Kept, Regression, averaged, meter_for, sums_of_parts
from tests.comm.ranks import run_ranks
from tests.process_group import exchange, group_of_one, parallel

STEPS, SIZE = 24, 8


def net(width: int = 160) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 120), nn.Tanh(), nn.Linear(120, 5))


def batch(number: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(SIZE, 12, generator=torch.Generator().manual_seed(number))
    return x, x[:, :5].argmax(1)


def zeros(state, bucket):  # type: ignore[no-untyped-def]  # torch checks annotations, and takes no strings
    """A communication hook that loses everything."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(torch.zeros_like(bucket.buffer()))
    return future


def gather(own: Any) -> list[Any]:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def hooks(model: nn.Module) -> bool:
    """Tell whether any are on a parameter, or on the whole weight that FSDP2 has gathered."""
    leaves = [each._unsharded_param for each in fsdp_parameters(model) if hasattr(each, "_unsharded_param")]
    return any(p._backward_hooks for p in [*model.parameters(), *leaves])


def trained(
    rank: int,
    world: int,
    accumulation: int,
    lossy: bool,
    faults: str,
    kind: str = "ddp",
    width: int = 160,
    make: str = "",
) -> dict[str, Any]:
    """Train a replica, and return what its meter says."""
    whole = net(width)
    model: Any = parallel(whole, kind)
    if lossy:
        model.register_comm_hook(None, zeros)
    optimizer = OPTIMIZERS[make](model.parameters()) if make else torch.optim.SGD(model.parameters(), 0.0)
    noise = Kept()
    meter = meter_for(model, optimizer, noise=noise, replicas=world, gather=gather)
    due = []
    for step in range(STEPS):
        meter.begin_step()
        due.append(hooks(model))
        optimizer.zero_grad()
        for micro in range(accumulation):
            x, y = batch((step * world + rank) * accumulation + micro)
            meter.begin_batch(0 if faults == "unknown" and rank == 1 else SIZE)
            exchange(model, kind, micro == accumulation - 1)
            assert not meter.wants_call
            loss = F.cross_entropy(model(x), y) / accumulation
            (loss * math.nan if faults == "nan" and rank == 1 and step == 8 else loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        # Each rank has a speed of its own.
        meter.clock.now += 1 + rank  # type: ignore[attr-defined]
        before = [p.detach().clone() for p in model.parameters()]
        if faults != "left out" or step > 16 or rank == 0:
            meter.before_update(optimizer)
        if faults != "nan":  # NaN times a rate of 0 is NaN
            optimizer.step()
        assert make or all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        meter.end_step()
        assert not hooks(model)
    return {
        "sums": [tuple(each) for each in noise.all],
        "due": due,
        "skipped": noise.skipped,
        "refusal": meter.refusal,
        "estimate": tuple(noise.estimate()),
    }


def alone(step: int, world: int, accumulation: int) -> NoiseSums:
    """What one process computes from the same batches, in float64."""
    model, count = net().double(), world * accumulation
    gradients = []
    for part in range(count):
        x, y = batch(step * count + part)
        own = torch.autograd.grad(F.cross_entropy(model(x.double()), y), list(model.parameters()))
        gradients.append(torch.cat([g.flatten() for g in own]))
    mean_square = float(torch.stack(gradients).mean(0).square().sum())
    return sums_of_parts([float(g.square().sum()) for g in gradients], mean_square, [SIZE] * count)


@pytest.mark.parametrize(("accumulation", "lossy"), [(1, False), (1, True), (2, False)])
def test_two_ranks_measure_what_one_process_computes(accumulation: int, lossy: bool) -> None:
    """Also where gradients are clipped, and the hook loses them; the model is longer than its sketch."""
    assert sum(p.numel() for p in net().parameters()) > _SKETCH
    first, second = run_ranks(trained, 2, accumulation, lossy, "")
    assert first == second
    steps = [step for step, is_due in enumerate(first["due"]) if is_due]
    assert len(steps) == len(first["sums"]) > 5
    for step, found in zip(steps, first["sums"], strict=True):
        expected = alone(step, 2, accumulation)
        assert found[0] == pytest.approx(expected.part_square, rel=0.1)
        assert found[1] == pytest.approx(expected.mean_square, rel=0.1)
        assert NoiseSums(*found).variance == pytest.approx(expected.variance, rel=0.1)
        assert found[2:] == pytest.approx((SIZE, 2 * accumulation * SIZE))


@pytest.mark.sample(3)
@pytest.mark.parametrize("make", ["momentum", "adam", "adamw"])
@pytest.mark.parametrize(("kind", "accumulation"), [("fsdp2", 1), ("fsdp2", 2), ("hsdp", 2)])
def test_sharded_model_has_the_noise_of_its_replicas(kind: str, accumulation: int, make: str) -> None:
    """The exchange is put off to the last batch of a step. The sample has all coordinates, so only rounding differs."""
    width = 80
    assert sum(p.numel() for p in net(width).parameters()) < _SKETCH
    expected, _ = run_ranks(trained, 2, accumulation, False, "", "ddp", width, make)
    first, second = run_ranks(trained, 2, accumulation, False, "", kind, width, make)
    assert first == second
    assert first["due"] == expected["due"]
    assert len(first["sums"]) > 5
    for found, wanted in zip(first["sums"], expected["sums"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("make", [pytest.param("", marks=pytest.mark.slow), "adam"])
def test_sample_of_a_sharded_model_has_the_noise_of_the_whole_on_average(make: str) -> None:
    """Of one weight in five; each step has another sample."""
    width = 600
    assert sum(p.numel() for p in net(width).parameters()) > 4 * _SKETCH
    (first, _), (expected, _) = (run_ranks(trained, 2, 1, False, "", kind, width, make) for kind in ("fsdp2", "ddp"))
    assert len(first["sums"]) == len(expected["sums"]) > 5
    for number in (0, 1):
        found, wanted = (sum(sums[number] for sums in each["sums"]) for each in (first, expected))
        assert found == pytest.approx(wanted, rel=0.05)


def test_model_that_is_spread_in_another_way_is_refused(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        mesh = init_device_mesh("cpu", (1,))
        model = parallelize_module(net(), mesh, {"0": ColwiseParallel()})
        with pytest.raises(Unmeasurable, match=r"in another way than by FSDP2 \(fully_shard\) alone"):
            ShardedSample(model, 0)
        partly = nn.Sequential(fully_shard(net(), mesh=mesh), nn.Linear(5, 5))
        with pytest.raises(Unmeasurable, match="in another way than by FSDP2"):
            ShardedSample(partly, 0)
        meter = meter_for(model, torch.optim.SGD(model.parameters(), 0.1))
        meter._schedule.steps_left = 0
        meter.begin_step()
        assert meter.refusal == "the parameters are sharded (DTensor), and there is one rank alone"


def test_error_of_the_sample_does_not_reach_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_torch(model: nn.Module) -> bool:
        raise AttributeError("fsdp_params")

    monkeypatch.setattr("accel.goodput.noise_meter.is_sharded", other_torch)
    model = net()
    meter = meter_for(model, torch.optim.SGD(model.parameters(), 0.1))
    meter._schedule.steps_left = 0
    assert not meter.begin_step()
    assert meter.refusal == "the measurement failed: AttributeError: fsdp_params"


def test_value_that_is_not_finite_on_one_rank_skips_the_step_on_all() -> None:
    first, second = run_ranks(trained, 2, 1, False, "nan")
    assert (first["skipped"], second["skipped"]) == (1, 1)
    assert first["estimate"] == second["estimate"]
    assert not first["refusal"]


def test_step_that_one_ranks_grad_scaler_leaves_out_is_skipped_on_all() -> None:
    first, second = run_ranks(trained, 2, 1, False, "left out")
    assert repr(first) == repr(second)  # NaN among them
    assert first["skipped"] > 3
    assert len(first["sums"]) > first["skipped"]
    assert not first["refusal"]


def test_rank_that_can_not_measure_ends_it_on_all_alike() -> None:
    first, second = run_ranks(trained, 2, 1, False, "unknown")
    assert first["due"] == second["due"]
    assert first["refusal"] == "another rank could not measure"
    assert second["refusal"] == "the number of samples in a batch is not known"
    assert not first["sums"]


# Simulated: parts in one process


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_replicas_have_the_closed_form_of_a_regression(parts: int) -> None:
    problem = Regression(dimensions=40, noise=1.0, seed=parts)
    weights = problem.model(1.5).weight.detach()[0]
    steps = []
    for _ in range(150):
        sums = PartSums()
        for _ in range(parts):
            x, y = problem.batch(16)
            sums.add(x.T @ (x @ weights - y) / 16 / parts, 16)
        steps.append(step_sums([sums]))
    noise = averaged(steps)
    mean, variance = problem.truth(weights)
    assert noise.variance == pytest.approx(variance, rel=0.1)
    assert noise.squared_norm == pytest.approx(mean, rel=0.1)
    assert noise.phi == pytest.approx(variance / mean, rel=0.1)


@pytest.mark.sample(8)
@pytest.mark.parametrize("accumulation", [1, 2, 4, 8])
@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_on_replicas_that_accumulate_is_within_ten_percent(
    name: str, replicas: int, accumulation: int
) -> None:
    """The truth moves with the weights, so sums are compared: mean measured ÷ mean true, over all steps."""
    parts, size = replicas * accumulation, 8
    problem = Regression(dimensions=40, noise=1.0, seed=parts)
    model = problem.model(3.0)
    optimizer = OPTIMIZERS[name](model.parameters())
    measured, true = [], []
    for _ in range(30):  # until Adam's coordinates are those of more than a few gradients
        x, y = problem.batch(size * parts)
        model.weight.grad = (x.T @ (x @ model.weight.detach()[0] - y) / len(x))[None]
        optimizer.step()
    for _ in range(max(60, 2400 // parts)):
        weights = model.weight.detach()[0].clone()
        scales = noise_gradients.denominators([model.weight], [optimizer])
        scales = None if scales is None else scales.clone()
        sums, total = PartSums(), torch.zeros(40)
        for _ in range(parts):
            x, y = problem.batch(size)
            own = x.T @ (x @ weights - y) / size / parts
            sums.add(own if scales is None else own / scales, size)
            total += own
        step = step_sums([sums])
        if step is not None:
            measured.append((step.squared_norm, step.variance))
            true.append(problem.truth(weights, scales))
        model.weight.grad = total[None]
        optimizer.step()
    if parts == 1:
        assert not measured  # one gradient has no variance: a replay of its half has (test_noise_meter)
        return
    squared_norm, variance = (sum(row[i] for row in measured) / sum(row[i] for row in true) for i in (0, 1))
    assert variance == pytest.approx(1, rel=0.1)
    assert squared_norm == pytest.approx(1, rel=0.1)
    assert variance / squared_norm == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("sizes", [(1, 15), (4, 8, 20)])
def test_parts_of_different_sizes_that_count_alike(sizes: tuple[int, ...]) -> None:
    """The last batches of an epoch differ from rank to rank, and DistributedDataParallel weighs them alike."""
    problem = Regression(dimensions=40, noise=1.0, seed=1)
    weights = problem.model(1.5).weight.detach()[0]
    steps = []
    for _ in range(800):
        sums = PartSums()
        for size in sizes:
            x, y = problem.batch(size)
            sums.add(x.T @ (x @ weights - y) / size / len(sizes), size)
        steps.append(step_sums([sums]))
    noise = averaged(steps)
    mean, variance = problem.truth(weights)
    assert noise.variance == pytest.approx(variance, rel=0.1)
    assert noise.squared_norm == pytest.approx(mean, rel=0.2)


def test_one_part_says_nothing() -> None:
    sums = PartSums()
    sums.add(torch.ones(3), 4)
    assert step_sums([sums]) is None


# The sketch


@pytest.mark.parametrize("length", [1, 100, 16384])
def test_short_vector_is_its_own_sketch(length: int) -> None:
    x = torch.randn(length)
    assert GradientSketch().of(x) is x


@pytest.mark.parametrize("size", [16385, 50_000, 200_001])
def test_sketch_is_linear_and_keeps_lengths(size: int) -> None:
    sketch = GradientSketch()
    x, y = (torch.randn(size, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    both = sketch.of(2 * x - 3 * y)
    assert both.shape == (16384,)
    assert torch.allclose(both, 2 * sketch.of(x) - 3 * sketch.of(y), atol=1e-3)
    assert float(both.square().sum()) == pytest.approx(float((2 * x - 3 * y).square().sum()), rel=0.06)
    constant = torch.ones(size)  # as gradients of one sign are, which any fixed pattern of signs gets wrong
    assert float(sketch.of(constant).square().sum()) == pytest.approx(size, rel=0.06)


def test_ranks_draw_the_same_signs_whatever_has_been_drawn_before() -> None:
    x = torch.randn(20_000)
    torch.manual_seed(5)
    first = GradientSketch().of(x)
    state = torch.get_rng_state()
    torch.manual_seed(6)
    assert torch.equal(GradientSketch().of(x), first)
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state)


def test_expected_length_of_a_sketch_is_the_vectors() -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(0)).double()
    squares = [float(GradientSketch(length=64, seed=seed).of(x).square().sum()) for seed in range(400)]
    assert sum(squares) / 400 == pytest.approx(float(x.square().sum()), rel=0.03)
