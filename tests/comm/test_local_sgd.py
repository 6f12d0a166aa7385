"""Post-local SGD against DDP and against the algorithm as published, on two ranks and on two hosts of two."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel.amp import DynamicLossScale, decorate
from accel.comm.compressor import Exact
from accel.comm.dgc import DGC
from accel.comm.half import Half
from accel.comm.hooks import CommState, hook
from accel.comm.local_sgd import LocalSGD
from accel.comm.one_bit import OneBit
from accel.optim import FusedSGD
from tests.comm.cases import SECONDS, lacks, message, same_everywhere
from tests.comm.local_sgd_training import Net, Optimizer, Published, Run, loss, two_groups, values
from tests.comm.ranks import on_ranks
from tests.comm.tcp_bytes import sent_to, sockets

# float64, a dozen steps of a small network: sums over ranks in another order.
ROUNDING = 1e-12
TWO_OR_FOUR = pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
"""Two hosts, of one rank each or of two."""

OPTIMIZERS: dict[str, Optimizer] = {
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "nesterov": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "groups": lambda model: two_groups(model, momentum=0.9),
    # The bias before the normalisation has no gradient but rounding, which a small eps would make a step of.
    "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3),
}


def hosts_of(world: int, per_host: int, within: str) -> list[range]:
    size = per_host if within == "host" else 1
    return [range(low, low + size) for low in range(0, world, size)]


def withins(per_host: int) -> tuple[str, ...]:
    """Return where gradients may be averaged; the same thing on hosts of one rank."""
    return ("host", "rank") if per_host > 1 else ("rank",)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    (loss(ddp, rank, step) * factor).backward()
    optimizer.step()


@TWO_OR_FOUR
@on_ranks(per_host=None)
def test_averaging_at_every_step_is_dense_sgd(rank: int, world: int) -> None:
    for name, within in (("plain", "rank"), ("nesterov", withins(world // 2)[0]), ("groups", "rank")):
        run = Run(OPTIMIZERS[name], 2, 1, within=within, average_momentum=True)
        ddp = DistributedDataParallel(Net())
        optimizer = OPTIMIZERS[name](ddp)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        for step in range(8):
            run.step(rank, step)
            train(ddp, optimizer, rank, step)
            schedule.step()
            assert lacks(flat(run.ddp), flat(ddp)) < ROUNDING, name
        run.local.close()


PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "plain": ("plain", {}, 1),
    "own momentum": ("momentum", {}, 1),
    "mean momentum": ("nesterov", {"average_momentum": True}, 1),
    "groups": ("groups", {"average_momentum": True}, 1),
    "adam": ("adam", {"average_momentum": True}, 1),
    "accumulation": ("momentum", {}, 3),
    "exact state": ("momentum", {"dense": True}, 1),
}
"""An optimizer, options of LocalSGD, and passes to a step."""
BY_RANK = ("own momentum", "accumulation")
"""Of these averaging within a rank is run beside that within a host; the others are as on hosts of one rank."""


@pytest.mark.parametrize(
    ("world", "hosts", "names"),
    [
        pytest.param(2, 2, tuple(PUBLISHED), id="2 ranks"),
        pytest.param(4, 2, ("own momentum",), id="2 hosts of 2"),
        pytest.param(4, 2, tuple(PUBLISHED), id="2 hosts of 2, all", marks=pytest.mark.slow),
        pytest.param(2, 1, tuple(PUBLISHED), id="1 host of 2", marks=pytest.mark.slow),
    ],
)
@on_ranks(per_host=None)
def test_every_four_steps_is_the_published_algorithm(rank: int, world: int, hosts: int, names: tuple[str, ...]) -> None:
    per_host = world // hosts
    os.environ.update(GROUP_RANK=str(rank // per_host), LOCAL_WORLD_SIZE=str(per_host))
    for name, within in itertools.product(names, withins(per_host)):
        if within == "rank" and per_host > 1 and name not in BY_RANK:
            continue
        kind, options, parts = PUBLISHED[name]
        run = (
            _with_dense(OPTIMIZERS[kind], within)
            if "dense" in options
            else Run(OPTIMIZERS[kind], 3, 4, within=within, **options)
        )
        momentum = options.get("average_momentum", False)
        other = Published(world, OPTIMIZERS[kind], 3, 4, hosts_of(world, per_host, within), momentum)
        for step in range(11):
            got = run.step(rank, step, parts)
            assert lacks(got, other.step(step, parts)[rank]) < ROUNDING, (name, within)
            # Dense up to step 3; averaged at steps 7 and 11.
            alike = step < 3 or step in (6, 10) or (hosts == 1 and within == "host")
            assert same_everywhere(flat(run.ddp)) == alike, (name, within)
            assert step not in (6, 10) or same_everywhere(got), (name, within)
        by_hosts = run.local._weights.arrangement(run.local._weights.scheme).hierarchical
        assert by_hosts == (hosts > 1 and per_host > 1)
        run.local.close()
        if run.local._dense is not None:
            run.local._dense.close()


def _with_dense(optimizer: Optimizer, within: str) -> Run:
    """Return a run whose first phase goes through a CommState by hosts."""
    run = Run.__new__(Run)
    run.ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.002)
    run.optimizer = optimizer(run.ddp)
    run.schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 3, 0.7)
    dense = CommState(run.ddp, Exact(), hierarchical=True, timeout=SECONDS)
    run.local = LocalSGD(run.ddp, run.optimizer, 3, 4, within=within, dense=dense, timeout=SECONDS)
    return run


@on_ranks(2)
def test_ranks_that_skip_different_steps_are_told(rank: int, world: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run = Run(OPTIMIZERS["plain"], 0, 3, within="rank")

    def train() -> None:
        for step in range(5):
            run.optimizer.zero_grad()
            scaler.scale(loss(run.ddp, rank, step) * (float("inf") if rank == step == 1 else 1)).backward()
            scaler.step(run.optimizer)
            scaler.update()

    (mine, backwards), theirs = ((3, 3), (3, 4)) if rank == 0 else ((3, 4), (3, 3))
    assert message(train) == (
        "InvalidArgument: ranks must come to an averaging after as many steps and backward passes, got "
        f"{mine} and {backwards} here and {theirs[0]} and {theirs[1]} on rank {1 - rank}; where a GradScaler "
        "skips steps of single ranks, train in bfloat16, or with accel.amp"
    )
    run.local.close(average=False)


# Saving, and the end


@TWO_OR_FOUR
@on_ranks(per_host=None)
def test_resuming_equals_not_stopping(rank: int, world: int) -> None:
    """With a checkpoint of each rank amid local steps, and with that of rank 0 after `average()`."""
    for within in withins(world // 2):
        whole = Run(OPTIMIZERS["momentum"], 2, 4, within=within)
        for step in range(10):
            whole.step(rank, step)
        whole.local.close(average=False)
        first = Run(OPTIMIZERS["momentum"], 2, 4, within=within)
        for step in range(4):
            first.step(rank, step)
        saved = pickle.loads(pickle.dumps(_checkpoint(first)))
        first.local.close(average=False)
        second = _load(saved, within)
        for step in range(4, 10):
            second.step(rank, step)
        assert torch.equal(values(whole.ddp), values(second.ddp)), within
        second.local.close(average=False)

    straight = Run(OPTIMIZERS["momentum"], 2, 4, within="rank", average_momentum=True)
    for step in range(4):
        straight.step(rank, step)
    straight.local.average()
    one: list[Any] = [pickle.dumps(_checkpoint(straight)) if rank == 0 else None]
    dist.broadcast_object_list(one)
    again = _load(pickle.loads(one[0]), "rank", average_momentum=True)
    for step in range(4, 10):
        straight.step(rank, step)
        again.step(rank, step)
    assert torch.equal(values(straight.ddp), values(again.ddp))
    straight.local.close()
    again.local.close()


def _checkpoint(run: Run) -> dict[str, Any]:
    parts = {"model": run.ddp.module, "optimizer": run.optimizer, "schedule": run.schedule, "local": run.local}
    return {name: copy.deepcopy(one.state_dict()) for name, one in parts.items()}


def _load(saved: dict[str, Any], within: str, **options: Any) -> Run:
    run = Run(OPTIMIZERS["momentum"], 2, 4, within=within, **options)
    run.ddp.module.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    run.schedule.load_state_dict(saved["schedule"])
    run.local.load_state_dict(saved["local"])
    return run


@on_ranks(2)
def test_closing_averages_and_gives_back_what_was_there(rank: int, world: int) -> None:
    for name in ("own", "state"):
        ddp = DistributedDataParallel(Net())
        optimizer = OPTIMIZERS["plain"](ddp)
        dense = CommState(ddp, Half(), timeout=SECONDS) if name == "state" else None
        with LocalSGD(ddp, optimizer, 1, 5, within="rank", dense=dense, timeout=SECONDS) as local:
            for step in range(3):
                train(ddp, optimizer, rank, step)
            assert (local.local, ddp.broadcast_buffers) == (True, False)
            assert not same_everywhere(values(ddp))
        assert same_everywhere(values(ddp))
        for step in range(3, 5):
            train(ddp, optimizer, rank, step)
        assert same_everywhere(flat(ddp))
        hooks = len(ddp._comm_hooks), len(optimizer._optimizer_step_post_hooks)
        assert (local.step, hooks, ddp.broadcast_buffers) == (3, (0 if name == "own" else 1, 0), True)
        local.close()
        if dense is not None:
            dense.close()
    ddp = DistributedDataParallel(Net())
    optimizer = OPTIMIZERS["plain"](ddp)

    def broken() -> None:
        with LocalSGD(ddp, optimizer, 0, 5, within="rank", timeout=timedelta(seconds=5)):
            train(ddp, optimizer, rank, 0)
            raise KeyError("of the user") if rank == 0 else RuntimeError("of another user")

    assert message(broken) == ("KeyError: 'of the user'" if rank == 0 else "RuntimeError: of another user")


class Codes(torch.optim.Optimizer):
    """Momentum kept as 8 bits with a scale, and a step size that it finds by itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "found": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                old = (state["codes"] * state["scale"]).view_as(parameter) if state else 0.0
                new = 0.9 * old + parameter.grad
                state["scale"] = new.abs().amax().view(1) / 127
                state["codes"] = (new / state["scale"]).round().to(torch.int8)
                group["found"] = 0.9 * group["found"] + 0.1 / (1 + float(parameter.grad.norm()))
                parameter.sub_(new * group["lr"] * group["found"])


CLOSED: dict[str, Optimizer] = {
    **OPTIMIZERS,
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3, amsgrad=True),
    "fused adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3, fused=True),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01, eps=1e-3),
    "radam": lambda model: torch.optim.RAdam(model.parameters(), lr=0.01, eps=1e-3),
    "asgd": lambda model: torch.optim.ASGD(model.parameters(), lr=0.01),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.001),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9, centered=True, eps=1e-3),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "codes": lambda model: Codes(model.parameters()),
}


@pytest.mark.parametrize(
    ("world", "names"),
    [
        # Moments, counts of steps that differ, and a state that has no mean.
        pytest.param(2, ["momentum", "fused adam", "codes"], id="2 ranks"),
        pytest.param(3, list(CLOSED), marks=pytest.mark.slow, id="3 ranks on one host"),
        pytest.param(4, list(CLOSED), marks=pytest.mark.slow, id="2 hosts of 2"),
    ],
)
@on_ranks(per_host=None)
def test_ranks_stay_the_same_under_ddp_alone_after_closing(rank: int, world: int, names: list[str]) -> None:
    """Close after 4 to 6 steps of which one was dense, and train on."""
    for number, name in enumerate(names):
        options: dict[str, Any] = {"average_momentum": True} if name == "nesterov" else {}
        where = withins(world // 2)
        run, apart = Run(CLOSED[name], 1, 2, within=where[number % len(where)], **options), False
        for at in range(4 + number % 3):
            train(run.ddp, run.optimizer, rank, at)
            apart |= not all_same(run)
        if name == "fused adam":  # as where steps were skipped
            run.optimizer.state[run.ddp.module.first.weight]["step"] += rank
        assert apart, name
        run.ddp.module.norm.num_batches_tracked += rank
        run.local.close()
        assert all_same(run), name
        assert same_everywhere(torch.cat([one.double().reshape(-1) for one in run.ddp.buffers()])), name
        for at in range(10, 14):
            train(run.ddp, run.optimizer, rank, at)
        assert all_same(run), name


def all_same(run: Run) -> bool:
    """Tell whether all ranks have the same weights and optimizer, to the bit."""
    state = run.optimizer.state_dict()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [[one.tolist() for one in run.ddp.parameters()], repr(_plain(state))])
    return all(one == parts[0] for one in parts)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value


@on_ranks(2)
def test_closing_with_a_state_that_is_missing_or_unlike(rank: int, world: int) -> None:
    right = "{'momentum_buffer': 'torch.float64 of shape (37, 12)'} on rank 1; pass the same to LocalSGD everywhere"
    for own in ({}, {"momentum_buffer": torch.zeros(3)}):
        run = Run(OPTIMIZERS["momentum"], 0, 9, within="rank")
        run.step(rank, 0)
        first = run.optimizer.state[run.ddp.module.first.weight]
        if rank == 0:
            first.clear()
            first.update(own)
        wrong = "{'momentum_buffer': 'torch.float32 of shape (3,)'}" if own else "{}"
        assert message(run.local.close) == (
            f"InvalidArgument: all ranks must have the same optimizer state of 'first.weight', got {wrong} on rank 0 "
            f"and {right}"
        )
        run.local.close(average=False)


# Bytes


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(6, marks=pytest.mark.slow)])
@on_ranks(per_host=None)
def test_bytes_are_those_of_the_formula(rank: int, world: int) -> None:
    """Through sockets, of each host to others and within hosts, per byte of weights, in each phase."""
    hosts, per_host = 2, world // 2
    for within, momentum, copies in (("host", False, 1), ("rank", True, 2)):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(512, 1023))
        weight_bytes = sum(p.nbytes for p in ddp.parameters())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        local = LocalSGD(ddp, optimizer, 3, 3, within=within, average_momentum=momentum, timeout=SECONDS)

        def phase(times: int, ddp: nn.Module = ddp, optimizer: Any = optimizer, nbytes: int = weight_bytes) -> Any:
            """Take steps; return what each host has sent to others, and within, for each."""
            dist.barrier()
            before = sockets()
            for _ in range(times):
                optimizer.zero_grad()
                ddp(torch.ones(1, 512)).sum().backward()
                optimizer.step()
            dist.barrier()  # on a busy machine some of it waits in the kernel until the peer reads
            both: list[Any] = [None] * world
            dist.all_gather_object(both, (before, sockets()))
            shares = torch.zeros(2, hosts)
            for r in range(world):
                for to, count in sent_to(r, [one[0] for one in both], [one[1] for one in both]).items():
                    shares[int(to // per_host == r // per_host), r // per_host] += count / nbytes / times
            return shares.tolist()

        phase(2)
        between, _ = phase(1)
        assert between == pytest.approx([2 * (world - 1) / world] * hosts, rel=0.01)
        phase(3)  # the first averaging is at step 6: pipelines have met by then
        between, inside = phase(2)
        assert max(between + inside) < 1e-3  # a barrier; within a host sums go through memory
        between, _ = phase(1)
        assert between == pytest.approx([copies * 2 * (hosts - 1) / hosts] * hosts, rel=0.01)
        local.close()


# What is refused


@on_ranks(2)
def test_what_cannot_work_is_refused(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(Net())
    sgd = OPTIMIZERS["momentum"](ddp)

    def refuses(
        text: str, model: Any = ddp, optimizer: Any = sgd, start: int = 0, every: int = 2, **options: Any
    ) -> None:
        said = message(lambda: LocalSGD(model, optimizer, start, every, timeout=SECONDS, **options))
        assert said.startswith("InvalidArgument: "), said
        assert text in said, said

    refuses("start_step must be at least 0, got -1", start=-1)
    refuses("every must be at least 1 step, got 0", every=0)
    refuses('within must be "host" or "rank", got \'node\'', within="node")
    refuses("LocalSGD needs a DistributedDataParallel module, got Net; sharded weights differ", Net())
    refuses("optimizer must be a torch.optim.Optimizer, got str", optimizer="sgd")
    refuses("dense must be a CommState, got str", dense="int8")
    foreign = torch.optim.SGD(Net().parameters(), lr=0.1)
    refuses("parameters must all be of the DDP module, got one of shape () that is not", optimizer=foreign)
    some = torch.optim.SGD(ddp.module.first.parameters(), lr=0.1)
    refuses("must have all parameters that require gradients, got none of 'gain'", optimizer=some)
    refuses("all ranks must have the same every, got 2 on rank 0 and 3 on rank 1; pass the same to", every=2 + rank)
    phase = nn.ParameterDict({"phase": nn.Parameter(torch.ones(2, dtype=torch.complex64))})
    turned = DistributedDataParallel(phase)
    dense = "LocalSGD averages dense, real floating point, got torch.complex64 in 'phase'"
    refuses(dense, turned, torch.optim.SGD(turned.parameters(), lr=0.1))
    for compressor in (DGC(), OneBit(momentum=True)):
        with_momentum = CommState(ddp, compressor, timeout=SECONDS)
        refuses("with momentum takes it from the optimizer, which local steps need", dense=with_momentum)
        with_momentum.close()
    from torch.distributed.optim import ZeroRedundancyOptimizer

    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    refuses("ZeroRedundancyOptimizer can't take local steps", optimizer=zero)
    hooked = DistributedDataParallel(Net())
    state = CommState(hooked, timeout=SECONDS)
    hooked.register_comm_hook(state, hook)
    refuses(
        "must have no communication hook yet; pass its CommState as dense= instead", hooked, OPTIMIZERS["plain"](hooked)
    )
    state.close()

    local = LocalSGD(ddp, sgd, 0, 2, within="rank", timeout=SECONDS)
    assert "the state's version must be 1, got None" in message(lambda: local.load_state_dict({}))
    if rank:
        sgd.state[next(ddp.parameters())]["momentum_buffer"] = torch.zeros((), dtype=torch.float64)
    local.average_momentum = True
    said = message(local.average)
    assert "ranks must have the same parameters and optimizer state at an averaging, got others on rank" in said
    local.close(average=False)


# What is averaged beside plain weights, and what is left alone


def masters(optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Return 16-bit parameters and their master weights."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    return [(p, optimizer.state[p]["master"]) for p in own if "master" in optimizer.state[p]]


def flat_masters(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([master.reshape(-1) for _, master in masters(optimizer)]).clone()


@on_ranks(2)
def test_master_weights_are_averaged_in_place_of_what_they_round_to(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(Net(torch.bfloat16))
    # Steps are so short that most weights of 16 bits stay what they were.
    optimizer = FusedSGD(ddp.parameters(), lr=1e-4, momentum=0.9)
    local = LocalSGD(ddp, optimizer, 0, 9, within="rank", average_momentum=True, timeout=SECONDS)
    for step in range(3):
        train(ddp, optimizer, rank, step)
    before = flat_masters(optimizer)
    assert len(masters(optimizer)) >= 5
    assert not same_everywhere(before)
    mean = before.double()
    dist.all_reduce(mean)
    local.average()
    after = flat_masters(optimizer)
    # Sums of two in float32, of weights below 2.
    assert (after - mean / world).abs().max() < 2**-22
    assert all(torch.equal(master.to(p.dtype), p) for p, master in masters(optimizer))
    train(ddp, optimizer, rank, 3)
    # A step goes on from the mean: had the rounding been taken over, weights would move by 2⁻⁹ of their size.
    assert 0 < (flat_masters(optimizer) - after).abs().max() < 2e-4
    local.close()
    assert same_everywhere(flat_masters(optimizer))
    for step in range(4, 7):
        train(ddp, optimizer, rank, step)
    assert same_everywhere(flat_masters(optimizer))


ENDS: dict[str, Callable[[LocalSGD], Any]] = {
    "averaging": lambda local: None,
    "average()": lambda local: local.average(),
    "close()": lambda local: local.close(),
    "resumed": lambda local: (local.load_state_dict(pickle.loads(pickle.dumps(local.state_dict()))), local.average()),
}
"""What comes after steps with a frozen layer, whose last averaging was before it was frozen."""


@on_ranks(2)
def test_a_parameter_that_is_frozen_between_two_averagings_is_the_same_on_all_ranks(rank: int, world: int) -> None:
    """As where the head is trained first, or last."""
    for how, end in ENDS.items():
        ddp = DistributedDataParallel(Net(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        local = LocalSGD(ddp, optimizer, 0, 4 if how == "averaging" else 9, within="rank", timeout=SECONDS)
        for step in range(2):
            train(ddp, optimizer, rank, step)
        weight = ddp.module.first.weight
        before = weight.detach().clone()
        assert not same_everywhere(before)
        weight.requires_grad_(False)
        ddp.module.first.bias.requires_grad_(False)
        for step in range(2, 4 if how == "averaging" else 3):
            train(ddp, optimizer, rank, step)
        end(local)
        assert same_everywhere(flat(ddp)), how
        after = weight.detach().clone()
        if how == "close()":
            assert not torch.equal(before, after)
            continue
        local.average()
        assert torch.equal(after, weight.detach()), how
        local.close()


@on_ranks(2)
def test_what_ddp_was_told_to_ignore_stays_each_ranks_own(rank: int, world: int) -> None:
    net = Net()
    own = ["gain", "norm.running_mean", "norm.num_batches_tracked"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, own)  # type: ignore[no-untyped-call]
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    with torch.no_grad():
        net.gain.fill_(rank + 1)
        net.norm.num_batches_tracked.fill_(10 * rank)

    def ignored() -> list[Tensor]:
        assert net.norm.running_mean is not None
        return [net.gain.detach(), optimizer.state[net.gain]["momentum_buffer"], net.norm.running_mean]

    with LocalSGD(ddp, optimizer, 0, 9, within="rank", average_momentum=True, timeout=SECONDS) as local:
        for step in range(2):
            train(ddp, optimizer, rank, step)
        before = [one.clone() for one in ignored()]
        local.average()
    assert all(map(torch.equal, before, ignored()))
    assert int(net.norm.num_batches_tracked) == 10 * rank + 2
    assert same_everywhere(torch.cat([net.first.weight.detach().view(-1), net.norm.running_var]))
    assert same_everywhere(optimizer.state[net.first.weight]["momentum_buffer"])


@on_ranks(2)
def test_a_decorated_model_with_a_loss_scale_takes_local_steps(rank: int, world: int) -> None:
    """Each rank finds infinities of its own."""
    ddp = DistributedDataParallel(Net(torch.float32))
    scale = DynamicLossScale(init_scale=2.0**10, growth_interval=100)
    optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    ddp, optimizer = decorate(ddp, optimizer, dtype=torch.float16, loss_scale=scale)
    infinite = {0: {1}, 1: {0, 2}}
    with LocalSGD(ddp, optimizer, 0, 9, within="rank", timeout=SECONDS):
        for step in range(4):
            train(ddp, optimizer, rank, step, float("inf") if step in infinite[rank] else 1.0)
        assert scale.state_dict()["scale"] == (512.0, 256.0)[rank]
    for step in range(4, 8):
        train(ddp, optimizer, rank, step)
    assert same_everywhere(flat(ddp))
    assert flat(ddp).isfinite().all()
