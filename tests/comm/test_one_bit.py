"""Signs with the optimizer's momentum: dense SGD where all is sent, the law where it is not, and what is remembered."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.hooks import CommState, hook
from accel.comm.one_bit import OneBit
from tests.comm.cases import SECONDS, OneBitTwice, flat, lacks, same_everywhere
from tests.comm.dgc_training import SGD, Net, Training, apart, check_law, check_void_steps, dense_step, groups
from tests.comm.few import few
from tests.comm.ranks import on_ranks

BELOW = 40
WAYS: dict[str, tuple[type[OneBit], bool]] = {
    "direct": (OneBit, False),
    "twice": (OneBitTwice, False),
    "hosts": (OneBit, True),
}


def train(way: str, sgd: dict[str, Any] = SGD, momentum: bool = True, **options: Any) -> Training:
    kind, hierarchical = WAYS[way]
    compressor = kind(8, exact_below=BELOW, momentum=momentum, start_step=options.pop("start_step", 0))
    return Training(compressor, sgd, hierarchical=hierarchical, take=momentum, **options)


@pytest.mark.slow
@on_ranks(4, per_host=2)
def test_dense_steps_are_those_of_sgd_with_momentum(rank: int, world: int) -> None:
    for way in WAYS:
        for nesterov in (False, True):
            sgd = {**SGD, "weight_decay": 0.02, "nesterov": nesterov}
            run, plain = train(way, sgd, start_step=100), Net()
            other = torch.optim.SGD(groups(plain, sgd, None), lr=0.1)
            for step in range(6):
                got = run.step(rank, step)
                dense_step(plain, other, world, step)
                # float64: sums in another order.
                assert lacks(got, flat([p.detach() for p in plain.parameters()])) < 1e-13, (way, nesterov)
            run.close()


@few(WAYS, ("hosts",))
@on_ranks(4, per_host=2)
def test_what_was_decoded_and_what_is_left_are_the_sum_of_velocities(
    rank: int, world: int, names: tuple[str, ...]
) -> None:
    for way in names:
        run = train(way, start_step=2)
        # Magnitudes of blocks are float32, and so is what they lost of the sum.
        assert check_law(run, rank, world, 6, 1e-13) >= 2, way
        run.close()


@few(WAYS, ("hosts",))
@on_ranks(4, per_host=2)
def test_a_void_step_arrives_and_leaves_velocity_and_residual_alone(
    rank: int, world: int, names: tuple[str, ...]
) -> None:
    for way in names:
        check_void_steps(train(way), rank)


@pytest.mark.slow
@on_ranks(4, per_host=2)
def test_a_parameter_that_no_rank_used_stands_still(rank: int, world: int) -> None:
    for way in WAYS:
        for name, momentum, start_step in (("momentum", True, 0), ("dense", True, 9), ("without", False, 0)):
            run = train(way, momentum=momentum, start_step=start_step)
            if not momentum:
                run.sgd.param_groups[0]["momentum"] = 0.0  # that of the optimizer goes on, as in any SGD
            for step in range(2):
                run.step(rank, step)
            fields = ("velocity", "residual") if name == "momentum" else ("velocity",) if momentum else ("residual",)
            before, weights = [run.own(one)["extra.weight"] for one in fields], run.net.extra.weight.detach().clone()
            run.step(rank, 2, extra=False)
            assert torch.equal(weights, run.net.extra.weight), (way, name)
            for field, kept in zip(fields, before, strict=True):
                assert torch.equal(kept, run.own(field)["extra.weight"]), (way, name)
                assert kept.any()
            assert same_everywhere(run.step(rank, 3, extra=rank == 0)), (way, name)
            assert not torch.equal(before[0], run.own(fields[0])["extra.weight"])
            run.close()


@pytest.mark.slow
@on_ranks(4, per_host=2)
def test_resuming_equals_not_stopping(rank: int, world: int) -> None:
    for way in WAYS:
        run = train(way, start_step=2)
        whole = [run.step(rank, step) for step in range(8)]
        run.close()
        run = train(way, start_step=2)
        for step in range(4):
            run.step(rank, step)
        saved = pickle.loads(pickle.dumps([run.state.state_dict(), run.sgd.state_dict(), run.net.state_dict()]))
        run.close()
        after = train(way, start_step=2)
        for one, state in zip((after.state, after.sgd, after.net), saved, strict=True):
            one.load_state_dict(state)
        assert all(torch.equal(whole[step], after.step(rank, step)) for step in range(4, 8)), way
        after.close()


@pytest.mark.slow
@on_ranks(4, per_host=2)
def test_memory_does_not_depend_on_the_loss_scale(rank: int, world: int) -> None:
    for way in WAYS:  # scales are powers of 2: nothing rounds
        assert apart(lambda given, way=way: train(way, scaler=given, start_step=1), rank) < 1e-15  # type: ignore[misc]


class Mixed(nn.Module):
    """A model in half precision but for one small parameter, whose bucket holds less than one block for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).float()[:, :3] * self.gain).sum()


@on_ranks(4, per_host=2)
def test_a_small_parameter_of_another_dtype_crosses_hosts(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(Mixed())
    state = CommState(ddp, OneBit(), hierarchical=True, timeout=SECONDS)
    ddp.register_comm_hook(state, hook)
    given = torch.Generator().manual_seed(rank)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.randn(2, 64, generator=given).bfloat16()).backward()
    state.close()
    for name, one in ddp.module.named_parameters():
        assert one.grad is not None
        assert same_everywhere(one.grad), name
        assert one.grad.isfinite().all(), name
