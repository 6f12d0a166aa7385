"""DGC: dense SGD at ratio 1, the published algorithm below it, what is remembered, and momentum handed over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.dgc import DGC
from accel.comm.hooks import CommState, hook
from accel.comm.sgd_momentum import take_momentum
from tests.comm.cases import SECONDS, buckets, flat, lacks, message, same_everywhere
from tests.comm.dgc_training import (
    DENSE_BELOW,
    SGD,
    Net,
    Published,
    Training,
    apart,
    check_law,
    check_void_steps,
    dense_step,
    groups,
    held,
    loss,
)
from tests.comm.few import few
from tests.comm.ranks import on_ranks


@pytest.mark.slow
@on_ranks(4, per_host=2)
def test_ratio_one_is_dense_sgd_with_momentum(rank: int, world: int) -> None:
    cases: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
        "momentum": ({"momentum": 0.9}, None),
        "weight decay": ({"momentum": 0.9, "weight_decay": 0.02}, None),
        "nesterov": ({"momentum": 0.9, "weight_decay": 0.02, "nesterov": True}, None),
        "groups": ({"momentum": 0.9, "weight_decay": 0.02}, {"momentum": 0.5, "lr": 0.02, "nesterov": True}),
        "group without momentum": ({"momentum": 0.9, "weight_decay": 0.02}, {"momentum": 0.0}),
        "maximize": ({"momentum": 0.9, "weight_decay": 0.02, "lr": 1e-3, "maximize": True}, None),
    }
    for name, (given, second) in cases.items():
        for hierarchical in (False, True) if name in ("momentum", "groups") else (False,):
            sgd = {**SGD, **given}
            run = Training(DGC(1.0, exact_below=DENSE_BELOW), sgd, second, hierarchical=hierarchical)
            plain = Net()
            other = torch.optim.SGD(groups(plain, sgd, second), lr=0.1)
            # Both momentum and rate move at every step.
            schedules = [
                torch.optim.lr_scheduler.CyclicLR(one, 0.01, 0.1, step_size_up=3, base_momentum=0.5, max_momentum=0.9)
                if name == "momentum"
                else torch.optim.lr_scheduler.StepLR(one, 3, 0.5)
                for one in (run.sgd, other)
            ]
            for step in range(6):
                got = run.step(rank, step)
                dense_step(plain, other, world, step)
                # float64: sums in another order.
                assert lacks(got, flat([one.detach() for one in plain.parameters()])) < 1e-13, (name, hierarchical)
                for one in schedules:
                    one.step()
            run.close()


PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "plain": ({}, {}, None),
    "decay": ({}, {"weight_decay": 0.02}, None),
    "nesterov": ({}, {"nesterov": True, "weight_decay": 0.02}, None),
    "groups": ({}, {"weight_decay": 0.02}, {"momentum": 0.5, "lr": 0.02}),
    "masking": ({"masking": True}, {}, None),
    "clipped": ({"max_grad_norm": 0.016}, {}, None),
    "warm-up": ({"warmup_steps": 2, "warmup": (0.5, 0.25, 0.0625, 0.001)}, {}, None),
}
"""Settings of DGC, of SGD, and of a second group."""


@few(PUBLISHED, ("nesterov", "masking", "clipped"))
@on_ranks(3)
def test_small_ratios_are_the_published_algorithm(rank: int, world: int, names: tuple[str, ...]) -> None:
    """Over 8 steps, at 2 %: as many as the warm-up has."""
    for name in names:
        settings, given, second = PUBLISHED[name]
        compressor, sgd = DGC(**{"ratio": 0.02, "exact_below": DENSE_BELOW, **settings}), {**SGD, **given}
        run, want = Training(compressor, sgd, second), Published(world, compressor, sgd, second)
        for step in range(8):
            got = run.step(rank, step)
            assert same_everywhere(got), name
            assert lacks(got, want.step(step)) < 1e-13, name
        name_of = {id(p): name for name, p in want.net.named_parameters()}
        for field, theirs in (("velocity", want.u[rank]), ("residual", want.v[rank])):
            mine = run.own(field)
            for p, value in theirs.items():
                if p.dim() > 1 and p.numel() >= DENSE_BELOW:
                    assert (mine[name_of[id(p)]] - value).abs().max() < 1e-13, (name, field)
        assert buckets(run.state) >= 4
        run.close()


LAWS: dict[str, dict[str, Any]] = {
    "flat": {},
    "hosts": {"hierarchical": True},
    "rebuilt": {"find_unused_parameters": False},
    "clipped, views": {"max_grad_norm": 0.0125, "gradient_as_bucket_view": True},
    "static": {"find_unused_parameters": False, "static_graph": True},
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16, "bucket_cap_mb": 0.001},
    "float16": {"dtype": torch.float16, "hierarchical": True, "bucket_cap_mb": 0.001},
}
"""The norm that DGC clips by, and options of DDP and of its state."""


@few(LAWS, ("clipped, views", "float16"))
@on_ranks(4, per_host=2)
def test_what_was_decoded_and_what_is_left_are_the_sum_of_velocities(
    rank: int, world: int, names: tuple[str, ...]
) -> None:
    # Halves round what is decoded, and their gradients differ more from each other.
    bounds = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}
    for name in names:
        options = dict(LAWS[name])
        limit = options.pop("max_grad_norm", None)
        run = Training(DGC(0.01, exact_below=DENSE_BELOW, max_grad_norm=limit), SGD, **options)
        assert check_law(run, rank, world, 4, bounds.get(name, 1e-13), limit) >= 2, name
        assert buckets(run.state) >= 3, name
        run.close()


VOID: dict[str, tuple[dict[str, float], bool]] = {
    "sparse, flat": ({}, False),
    "sparse, hosts": ({}, True),
    "dense, flat": ({"ratio": 1.0}, False),
    "clipped, hosts": ({"max_grad_norm": 0.025}, True),
}
"""Settings of DGC, and whether by hosts."""


@few(VOID, ("sparse, flat", "clipped, hosts"))
@on_ranks(4, per_host=2)
def test_a_void_step_arrives_and_leaves_velocity_and_residual_alone(
    rank: int, world: int, names: tuple[str, ...]
) -> None:
    for settings, hierarchical in map(VOID.__getitem__, names):
        compressor = DGC(**{"ratio": 0.01, "exact_below": DENSE_BELOW, **settings})  # type: ignore[arg-type]
        check_void_steps(Training(compressor, SGD, hierarchical=hierarchical), rank)


@on_ranks(3)
def test_accumulated_passes_are_one_step(rank: int, world: int) -> None:
    run, once = (Training(DGC(0.02, exact_below=DENSE_BELOW), SGD) for _ in range(2))
    for step in range(4):
        run.sgd.zero_grad()
        with run.ddp.no_sync():
            loss(run.ddp, rank, 2 * step).backward()
        loss(run.ddp, rank, 2 * step + 1).backward()
        run.sgd.step()
        once.sgd.zero_grad()
        (loss(once.ddp, rank, 2 * step) + loss(once.net, rank, 2 * step + 1)).backward()
        once.sgd.step()
        assert (run.weights() - once.weights()).abs().max() < 1e-13
    assert same_everywhere(run.weights())
    run.close()
    once.close()


@on_ranks(2)
def test_clipping_does_not_depend_on_the_loss_scale(rank: int, world: int) -> None:
    """The scale comes from the state where the optimizer keeps its momentum, else from what was handed over."""
    for momentum in (False, True):
        settings: dict[str, Any] = {"exact_below": DENSE_BELOW, "max_grad_norm": 0.05, "momentum": momentum}
        worst = apart(
            lambda given: Training(DGC(0.02, **settings), SGD, take=settings["momentum"], scaler=given),  # noqa: B023
            rank,
        )
        assert worst < 1e-15


@on_ranks(2)
def test_momentum_is_applied_once_for_each_step(rank: int, world: int) -> None:
    run, clean = (Training(DGC(0.02, exact_below=DENSE_BELOW), SGD) for _ in range(2))
    for step in range(4):
        run.sgd.zero_grad()
        (float("inf") * loss(run.ddp, rank, step)).backward()  # GradScaler would make no step of it
        run.step(rank, step)
        clean.step(rank, step)
    assert torch.equal(run.weights(), clean.weights())
    clean.close()
    loss(run.ddp, rank, 1).backward()
    said = message(lambda: loss(run.ddp, rank, 2).backward())
    assert said.startswith("InvalidArgument: with its momentum taken over, the optimizer must make a step")
    assert said.endswith("accumulate gradients under ddp.no_sync()")
    run.close()
    run = Training(DGC(0.02, exact_below=DENSE_BELOW), SGD)
    for _ in range(2):
        with run.ddp.join():
            for step in range(2 + rank):
                run.step(rank, step)
    assert run.state.step == 6
    run.close()


class Pictures(nn.Module):
    """A convolution whose weights lie with channels last, or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.conv = nn.Conv2d(6, 8, 3, dtype=torch.float64)
        self.turned = nn.Parameter(torch.randn(8, 20, dtype=torch.float64).T)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.conv(x)).mean((2, 3)) @ self.turned.T).square().mean()


@on_ranks(2)
def test_momentum_goes_back_to_weights_as_they_lie_in_memory(rank: int, world: int) -> None:
    def pictures(r: int, step: int) -> Tensor:
        return torch.randn(4, 6, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + r))

    net, plain = Pictures().to(memory_format=torch.channels_last), Pictures()
    ddp = DistributedDataParallel(net)
    state = CommState(ddp, DGC(1.0, exact_below=DENSE_BELOW), timeout=SECONDS)
    ddp.register_comm_hook(state, hook)
    sgd, other = (torch.optim.SGD(one.parameters(), **SGD) for one in (net, plain))
    momentum = take_momentum(state, sgd)
    for step in range(3):
        sgd.zero_grad()
        ddp(pictures(rank, step)).backward()
        sgd.step()
        other.zero_grad()
        (sum(plain(pictures(r, step)) for r in range(world)) / world).backward()
        other.step()
    momentum.close()
    state.close()
    for own, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        apart = sgd.state[own]["momentum_buffer"] - other.state[theirs]["momentum_buffer"]
        assert apart.abs().max() < 1e-15, own.shape


@on_ranks(3)
def test_momentum_comes_and_goes_back(rank: int, world: int) -> None:
    """Train densely, under DGC at ratio 1, and densely again, beside dense training throughout."""
    for nesterov in (False, True):
        sgd = {**SGD, "weight_decay": 0.02, "nesterov": nesterov}
        run, plain = Training(DGC(1.0, exact_below=DENSE_BELOW), sgd, take=False), Net()
        other = torch.optim.SGD(plain.parameters(), **sgd)
        for step in range(9):
            if step == 3:
                run.momentum = take_momentum(run.state, run.sgd)
            if step == 6:
                assert run.momentum is not None
                run.momentum.close()
                run.momentum.close()
            dense_step(plain, other, world, step)
            if 3 <= step < 6:
                run.step(rank, step)
                group = run.sgd.param_groups[0]
                assert {name: group[name] for name in sgd} == sgd
                gradient = run.net.layers[0].bias.grad
                assert gradient is not None
                assert gradient.any()
            else:
                dense_step(run.net, run.sgd, world, step)
            assert (run.weights() - flat([p.detach() for p in plain.parameters()])).abs().max() < 1e-13
        assert not held(run).any()
        assert "was not handed over" in message(lambda: loss(run.ddp, rank, 0).backward())  # noqa: B023
        run.close()


@on_ranks(2)
def test_bad_hand_overs_are_refused(rank: int, world: int) -> None:
    run = Training(DGC(0.01), SGD, take=False)
    said = message(lambda: loss(run.ddp, rank, 0).backward())
    assert "take_momentum(state, optimizer) first, or use DGC(momentum=False)" in said
    run.close()
    run = Training(DGC(0.01), SGD, take=False, dtype=torch.float32)
    for optimizer, text in (
        (
            torch.optim.Adam(run.net.parameters()),
            "the momentum of torch.optim.SGD alone can be taken over, got Adam; use DGC(momentum=False) with others",
        ),
        (torch.optim.SGD(run.net.parameters(), lr=0.1, momentum=0.9, dampening=0.1), "dampening=0.1"),
        (torch.optim.SGD(run.net.parameters(), lr=0.1, momentum=0.9, fused=True), "fused=True"),
        (torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1), "got one of shape (2, 3) that is not"),
    ):
        assert text in message(lambda: take_momentum(run.state, optimizer))  # noqa: B023
    take_momentum(run.state, run.sgd)
    assert "has taken an optimizer's momentum already" in message(lambda: take_momentum(run.state, run.sgd))
    assert "takes no closure" in message(lambda: run.sgd.step(lambda: 0.0))
    run.close()
    other = Training(DGC(0.01, momentum=False), SGD, take=False)
    assert "must have a compressor with momentum" in message(lambda: take_momentum(other.state, other.sgd))
    adam = torch.optim.Adam(other.net.parameters())
    loss(other.ddp, rank, 0).backward()
    adam.step()
    assert same_everywhere(other.weights())
    other.close()


# Without ranks


@pytest.mark.parametrize(
    ("step", "ratio"), [(1, 0.25), (10, 0.25), (11, 0.0625), (21, 0.015625), (31, 0.004), (41, 0.001), (9999, 0.001)]
)
def test_warm_up_goes_down_in_stages(step: int, ratio: float) -> None:
    assert DGC(0.001, warmup_steps=10).ratio_at(step) == ratio
    assert DGC(0.001).ratio_at(step) == 0.001
    assert DGC(0.05, warmup_steps=10).ratio_at(step) == max(ratio, 0.05)


def clipped(gradient: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return a rank's gradient, not divided yet, after clipping to the norm 1."""
    DGC(momentum=False, max_grad_norm=1.0).whole_step([gradient], ranks, 1.0)
    return gradient


def test_the_mean_of_ranks_that_differ_by_noise_is_held_to_the_norm() -> None:
    """Each was once held to the norm by √ranks before it was divided by the ranks, so the mean to a sixteenth."""
    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(10_000, generator=draw) for _ in range(16)]
    mean = torch.stack([clipped(one, 16) for one in gradients]).mean(0)
    assert float(mean.norm()) == pytest.approx(1.0, rel=0.05)
    assert torch.equal(clipped(torch.full((4,), 1.9), 16), torch.full((4,), 1.9))  # a norm of 3.8; √16 is the limit
