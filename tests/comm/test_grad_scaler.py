"""GradScaler's loop with compressed gradients: an infinity amid training, and scales that change."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel.amp import DynamicLossScale, decorate
from accel.comm.catalogue import Scheme
from accel.comm.compressor import Compressor
from accel.comm.dgc import DGC
from accel.comm.engine.gradient_engine import GradientEngine
from accel.comm.half import Half
from accel.comm.hooks import CommState, hook
from accel.comm.int8 import Int8
from accel.comm.one_bit import OneBit
from accel.comm.powersgd import PowerSGD
from accel.comm.selection.planner import Planner
from tests.comm.cases import SECONDS, Given, backward, flat, gradients, lacks, mean_gradient, message, residual
from tests.comm.few import few
from tests.comm.ranks import on_ranks

COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "bf16": Half,
    "fp16": lambda: Half(torch.float16),
    "int8": lambda: Int8(64),
    "1-bit": lambda: OneBit(64),
    "PowerSGD": lambda: PowerSGD(2),
}
VOID = 12
"""The step that is void."""


class Loop:
    """A training loop as in PyTorch's manual on mixed precision."""

    def __init__(self, compressor: Compressor) -> None:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 20))
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
        self.sgd = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=10)
        self.state = CommState(self.ddp, compressor, error_feedback=True, timeout=SECONDS, scaler=self.scaler)
        self.ddp.register_comm_hook(self.state, hook)

    def step(self, rank: int, step: int, infinite: bool = False) -> None:
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(32, 24, generator=generator)
        loss = (self.ddp(x) - torch.sin(x[:, :20] + x[:, 4:])).square().mean()
        self.sgd.zero_grad()
        self.scaler.scale(loss * float("inf") if infinite else loss).backward()
        self.scaler.step(self.sgd)
        self.scaler.update()

    def weights(self) -> Tensor:
        return flat([one.detach() for one in self.ddp.parameters()])

    def residual(self) -> Tensor:
        own = self.state.state_dict()["own"]["residual"]
        return torch.cat([values for name in sorted(own) for _, values in sorted(own[name], key=lambda one: one[0])])


@few(COMPRESSORS, ("PowerSGD",))
@on_ranks(2)
def test_a_void_step_is_as_if_it_had_not_been(rank: int, world: int, names: tuple[str, ...]) -> None:
    """The other run never sees that batch, and its scale is halved by hand."""
    for name in names:
        void, without = Loop(COMPRESSORS[name]()), Loop(COMPRESSORS[name]())
        for step in range(VOID + 4):
            void.step(rank, step, infinite=rank == 1 and step == VOID)
            if step == VOID:
                without.scaler.update(without.scaler.get_scale() / 2)
            else:
                without.step(rank, step)
        assert torch.equal(void.weights(), without.weights()), name
        assert torch.equal(void.residual(), without.residual()), name
        assert void.residual().any(), name
        void.state.close()
        without.state.close()


def scaler_of(scale: float) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))  # makes the scale
    return scaler


def given_module() -> DistributedDataParallel:
    return DistributedDataParallel(Given(torch.float64), bucket_cap_mb=0.004)


class Sums:
    """What was applied, and the mean gradients: with the residual both are the same."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.applied, self.wanted = torch.zeros(()).double(), torch.zeros(()).double()

    def step(self, ddp: DistributedDataParallel, step: int, scale: float) -> None:
        got = backward(ddp, [scale * one for one in gradients(self.rank, step, torch.float64)])
        self.applied, self.wanted = (
            self.applied + got / scale,
            self.wanted + mean_gradient(self.world, step, torch.float64),
        )

    def check(self, state: Any, scale: float, what: str = "") -> None:
        left = residual(state) / scale
        assert lacks(self.applied + left, self.wanted) < 1e-13, what
        assert left.norm() / self.wanted.norm() > 1e-5, what


LAWS = {f"{name}, flat": (name, False) for name in (*COMPRESSORS, "of the catalogue")} | {
    f"{name}, hosts": (name, True) for name in ("int8", "PowerSGD")
}
"""A compressor, or a scheme of the catalogue, and whether by hosts."""


@few(LAWS, ("PowerSGD, hosts", "of the catalogue, flat"))
@on_ranks(4, per_host=2)
def test_residuals_follow_the_scale(rank: int, world: int, names: tuple[str, ...]) -> None:
    for name in names:
        (kind, hierarchical), scaler, ddp = LAWS[name], scaler_of(2.0), given_module()
        if kind in COMPRESSORS:
            options: dict[str, Any] = {"hierarchical": hierarchical, "error_feedback": True, "scaler": scaler}
            state: GradientEngine = CommState(ddp, COMPRESSORS[kind](), timeout=SECONDS, **options)
        else:
            state = GradientEngine(timeout=SECONDS, scaler=scaler)
            state.bind(ddp)
            state.use(Scheme("1-bit"))
        ddp.register_comm_hook(state, hook)
        sums = Sums(rank, world)
        for step, scale in enumerate((2.0, 4.0, 4.0, 1.0, 8.0, 0.5)):
            scaler.update(scale)
            sums.step(ddp, step, scale)
            if step == 3:  # a checkpoint keeps the scale that it was written at
                state.load_state_dict(state.state_dict())
        sums.check(state, scaler.get_scale(), name)
        state.close()
    refused = message(lambda: CommState(nn.Linear(2, 2), DGC(), scaler=scaler_of(1.0)))
    assert refused.startswith("InvalidArgument: DGC(")
    assert "takes the scaler from take_momentum" in refused


@on_ranks(2)
def test_a_pickle_asks_for_its_scaler_and_goes_on_with_it(rank: int, world: int) -> None:
    for kind in ("state", "planner"):
        scaler, ddp, sums = scaler_of(4.0), given_module(), Sums(rank, world)
        if kind == "state":
            state: Any = CommState(ddp, Int8(64), error_feedback=True, timeout=SECONDS, scaler=scaler)
        else:
            state = Planner(ddp, timeout=SECONDS, scaler=scaler)
            state.use(Scheme("int8"))
        ddp.register_comm_hook(state, hook)
        for step in range(4):
            if step == 2:
                copy = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(state))))
                state.close()
                ddp = given_module()
                forgotten = message(lambda: copy.bind(ddp))  # noqa: B023
                assert forgotten.startswith("InvalidArgument: this "), kind
                assert forgotten.endswith("give it back, state.bind(model, scaler=scaler)"), kind
                copy.bind(ddp, scaler=scaler)
                if kind == "planner":
                    copy.use(Scheme("int8"))
                ddp.register_comm_hook(copy, hook)
                state = copy
                scaler.update(32.0)
            sums.step(ddp, step, scaler.get_scale())
        sums.check(state, scaler.get_scale(), kind)
        state.close()


@on_ranks(2)
def test_gradients_of_a_decorated_model_have_no_scale(rank: int, world: int) -> None:
    scale = DynamicLossScale(init_scale=4.0, growth_interval=2)
    ddp: Any = given_module()
    sgd: Any = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp, sgd = decorate(ddp, sgd, level="O1", dtype=torch.float16, loss_scale=scale)
    refused = message(lambda: CommState(ddp, Int8(64), timeout=SECONDS, scaler=scale))
    assert "gradients of a model that is decorated by accel.amp have no scale" in refused
    state = CommState(ddp, Int8(64), error_feedback=True, timeout=SECONDS)
    ddp.register_comm_hook(state, hook)
    sums, scales = Sums(rank, world), []
    for step in range(7):
        if step == 4:
            given = gradients(rank, step, torch.float64)
            given[2] = torch.full_like(given[2], float("inf") if rank == 1 else 0.0)
            backward(ddp, given)
        else:
            sums.step(ddp, step, 1.0)
        scales.append(float(scale.value))
        sgd.step()
    # Two good steps each double it, the fifth overflows.
    assert scales == [4.0, 4.0, 8.0, 8.0, 16.0, 8.0, 8.0]
    sums.check(state, 1.0)
    state.close()


@on_ranks(2)
def test_a_run_without_a_scaler_goes_on_from_one_with_a_scaler(rank: int, world: int) -> None:
    """Residuals were once added as they had been saved, too large by the scale."""
    scaler, sums, saved = scaler_of(2.0**10), Sums(rank, world), None
    for given, steps in ((scaler, (0, 1)), (None, (2, 3))):
        ddp = given_module()
        state = CommState(ddp, Int8(64), error_feedback=True, timeout=SECONDS, scaler=given)
        ddp.register_comm_hook(state, hook)
        if saved is not None:
            state.load_state_dict(saved)
        for step in steps:
            sums.step(ddp, step, 1.0 if given is None else scaler.get_scale())
        saved = state.state_dict()
        if given is None:
            assert saved["scale"] == 1.0
            sums.check(state, 1.0)
        state.close()
