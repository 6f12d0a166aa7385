"""What the ranks of the tests with GradScaler do. Nothing here asserts: ranks return what they found."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
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
from tests.comm.cases import (
    SECONDS,
    Given,
    backward,
    flat,
    gradients,
    make,
    mean_gradient,
    message,
    residual,
)

COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "bf16": Half,
    "fp16": lambda: Half(torch.float16),
    "int8": lambda: Int8(64),
    "1-bit": lambda: OneBit(64),
    "PowerSGD": lambda: PowerSGD(2),
}
STEPS, VOID = 40, 12


class Loop:
    """A training loop as in PyTorch's manual on mixed precision."""

    def __init__(self, compressor: Compressor | None) -> None:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 20))
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
        self.sgd = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=10)
        self.state: CommState | None = None
        if compressor is not None:
            self.state = CommState(self.ddp, compressor, error_feedback=True, timeout=SECONDS, scaler=self.scaler)
            self.ddp.register_comm_hook(self.state, hook)

    def step(self, rank: int, step: int, infinite: bool = False) -> float:
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(32, 24, generator=generator)
        loss = (self.ddp(x) - torch.sin(x[:, :20] + x[:, 4:])).square().mean()
        self.sgd.zero_grad()
        self.scaler.scale(loss * float("inf") if infinite else loss).backward()
        self.scaler.step(self.sgd)
        self.scaler.update()
        return loss.item()

    def weights(self) -> torch.Tensor:
        return flat([one.detach() for one in self.ddp.parameters()])

    def residual(self) -> torch.Tensor:
        assert self.state is not None
        own = self.state.state_dict()["own"]["residual"]
        return torch.cat([values for name in sorted(own) for _, values in sorted(own[name], key=lambda one: one[0])])


def as_if_it_had_not_been(rank: int, world: int, names: Sequence[str]) -> dict[str, dict[str, bool]]:
    """Compare a run that meets an infinity with one that never saw that batch, and whose scale was halved by hand."""
    found = {}
    for name in names:
        void, without = Loop(COMPRESSORS[name]()), Loop(COMPRESSORS[name]())
        for step in range(VOID + 4):
            void.step(rank, step, infinite=rank == 1 and step == VOID)
            if step == VOID:
                without.scaler.update(without.scaler.get_scale() / 2)
            else:
                without.step(rank, step)
        found[name] = {
            "weights": torch.equal(void.weights(), without.weights()),
            "residual": torch.equal(void.residual(), without.residual()) and bool(void.residual().any()),
        }
        for run in (void, without):
            assert run.state is not None
            run.state.close()
    return found


def _state(ddp: DistributedDataParallel, kind: str, hierarchical: bool, scaler: torch.amp.GradScaler) -> Any:
    """Return the state of a hook on `ddp`."""
    if kind == "of the catalogue":
        engine = GradientEngine(timeout=SECONDS, scaler=scaler)
        engine.bind(ddp)
        engine.use(Scheme("1-bit"))
        ddp.register_comm_hook(engine, hook)
        return engine
    compressor = COMPRESSORS[kind]()
    state = CommState(ddp, compressor, hierarchical=hierarchical, error_feedback=True, timeout=SECONDS, scaler=scaler)
    ddp.register_comm_hook(state, hook)
    return state


LAWS = {f"{name}, flat": (name, False) for name in (*COMPRESSORS, "of the catalogue")} | {
    f"{name}, hosts": (name, True) for name in ("int8", "PowerSGD")
}
"""A compressor, or a scheme of the catalogue, and whether by hosts."""


def law(rank: int, world: int, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Change the scale at each step; unscaled, applied gradients and residual add up to the sum of mean gradients."""
    found = {}
    for name in names:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        ddp, _ = make(None, torch.float64)
        _.close()
        ddp = DistributedDataParallel(ddp.module, bucket_cap_mb=0.004)
        state = _state(ddp, *LAWS[name], scaler)
        applied, wanted = torch.zeros(()).double(), torch.zeros(()).double()
        for step, scale in enumerate((2.0, 4.0, 4.0, 1.0, 8.0, 0.5)):
            scaler.scale(torch.ones(()))  # makes the scale
            scaler.update(scale)
            got = backward(ddp, [scale * one for one in gradients(rank, step, torch.float64)])
            applied, wanted = applied + got / scale, wanted + mean_gradient(world, step, torch.float64)
            if step == 3:  # a checkpoint keeps the scale that it was written at
                saved = state.state_dict()
                state.load_state_dict(saved)
        left = residual(state) / scaler.get_scale()
        found[name] = {
            "law": ((applied + left - wanted).abs().max() / wanted.abs().max()).item(),
            "residual": (left.norm() / wanted.norm()).item(),
        }
        state.close()
    model = nn.Linear(2, 2)
    refused = message(lambda: CommState(model, DGC(), scaler=torch.amp.GradScaler("cpu")))
    return {**found, "refused": refused}  # type: ignore[dict-item]


def resumed(rank: int, world: int) -> dict[str, dict[str, Any]]:
    """Pickle a state that has a scaler, give it back, and go on with another scale."""
    found = {}
    for kind in ("state", "planner"):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))  # makes the scale
        ddp = DistributedDataParallel(Given(torch.float64), bucket_cap_mb=0.004)
        if kind == "state":
            state: Any = CommState(ddp, Int8(64), error_feedback=True, timeout=SECONDS, scaler=scaler)
        else:
            state = Planner(ddp, timeout=SECONDS, scaler=scaler)
            state.use(Scheme("int8"))
        ddp.register_comm_hook(state, HOOKS[kind])
        applied, wanted = torch.zeros(()).double(), torch.zeros(()).double()
        for step in range(4):
            if step == 2:
                copy = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(state))))
                state.close()
                ddp = DistributedDataParallel(Given(torch.float64), bucket_cap_mb=0.004)
                forgotten = message(lambda: copy.bind(ddp))  # noqa: B023
                copy.bind(ddp, scaler=scaler)
                if kind == "planner":
                    copy.use(Scheme("int8"))
                ddp.register_comm_hook(copy, HOOKS[kind])
                state = copy
                scaler.update(32.0)
            scale = scaler.get_scale()
            got = backward(ddp, [scale * one for one in gradients(rank, step, torch.float64)])
            applied, wanted = applied + got / scale, wanted + mean_gradient(world, step, torch.float64)
        left = residual(state) / scaler.get_scale()
        found[kind] = {
            "forgotten": forgotten,
            "law": ((applied + left - wanted).abs().max() / wanted.abs().max()).item(),
            "residual": (left.norm() / wanted.norm()).item(),
        }
        state.close()
    return found


HOOKS: dict[str, Any] = {"state": hook, "planner": hook}


def by_loss_scale(rank: int, world: int) -> dict[str, Any]:
    """Decorate with a loss scale, which grows and falls and is in no gradient: these and the residual add up."""
    scale = DynamicLossScale(initial=4.0, interval=2)
    ddp: Any = DistributedDataParallel(Given(torch.float64), bucket_cap_mb=0.004)
    sgd: Any = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp, sgd = decorate(ddp, sgd, level="O1", dtype=torch.float16, loss_scale=scale)
    refused = message(lambda: CommState(ddp, Int8(64), timeout=SECONDS, scaler=scale))
    state = CommState(ddp, Int8(64), error_feedback=True, timeout=SECONDS)
    ddp.register_comm_hook(state, hook)
    applied, wanted = torch.zeros(()).double(), torch.zeros(()).double()
    scales = []
    for step in range(7):
        given = gradients(rank, step, torch.float64)
        if step == 4 and rank == 1:
            given[2] = torch.full_like(given[2], float("inf"))
        got = backward(ddp, given)
        scales.append(float(scale.value))
        if step != 4:
            applied, wanted = applied + got, wanted + mean_gradient(world, step, torch.float64)
        sgd.step()
    left = residual(state)
    state.close()
    return {
        "refused": refused,
        "scales": scales,
        "law": ((applied + left - wanted).abs().max() / wanted.abs().max()).item(),
        "residual": (left.norm() / wanted.norm()).item(),
    }


def without_scaler(rank: int, world: int) -> dict[str, float]:
    """Save a state that follows a scale, and go on from it without one, as from float16 to bfloat16."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.ones(()))  # makes the scale
    applied, wanted = torch.zeros(()).double(), torch.zeros(()).double()
    saved: Any = None
    for step in range(4):
        if step in (0, 2):
            ddp = DistributedDataParallel(Given(torch.float64), bucket_cap_mb=0.004)
            given = scaler if step == 0 else None
            state = CommState(ddp, Int8(64), error_feedback=True, timeout=SECONDS, scaler=given)
            ddp.register_comm_hook(state, hook)
            if saved is not None:
                state.load_state_dict(saved)
        scale = scaler.get_scale() if step < 2 else 1.0
        got = backward(ddp, [scale * one for one in gradients(rank, step, torch.float64)])
        applied, wanted = applied + got / scale, wanted + mean_gradient(world, step, torch.float64)
        if step in (1, 3):
            saved, left = state.state_dict(), residual(state)
            state.close()
    return {
        "law": ((applied + left - wanted).abs().max() / wanted.abs().max()).item(),
        "residual": (left.norm() / wanted.norm()).item(),
        "scale": saved["scale"],
    }
