"""What the ranks of the gradient strategies' tests do. Nothing here asserts: ranks return what they found."""

from __future__ import annotations

import contextlib
import io
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import accel
from accel import entry, strategies
from accel.comm.cost_model.choice import Choice
from accel.comm.selection import offers
from accel.comm.selection.offers import known_offers
from accel.comm.selection.planner import Planner
from accel.strategies.base import NothingHelps
from accel.strategies.gradients import GradientCompression, GradientHalf, GradientStrategy
from tests.comm.cases import same_everywhere
from tests.comm.played_search import SLOW_S, play_catalogue, played_network, slow_plain

MOST_STEPS = 600


def _play(entries: dict[str, tuple[float, str]], slow: bool) -> None:
    """Let there be these compressors, and, if `slow`, a network that DDP's own all-reduce is slow on."""
    GradientStrategy.measuring_s = 0.0  # a run this short would not pay for it
    play_catalogue(entries)
    if slow:
        slow_plain()
        # Only the hook is slow here: without one, trials would compare with a fast network.
        Planner.take_off = lambda self: bool(self.use(None))  # type: ignore[method-assign]
    byte_s = SLOW_S / 50_000 if slow else 1e-12
    offers.probe = lambda topology, device: played_network(topology.size, byte_s)  # type: ignore[assignment]


class Loop:
    """A model, its loader and its optimizer on one rank."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 2))
        self.model = DistributedDataParallel(self.net)
        data = TensorDataset(torch.randn(320, 32), torch.randn(320, 2))
        self.loader: Any = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def batches(self) -> Any:
        for epoch in itertools.count():
            if isinstance(self.loader, DataLoader):
                self.loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            yield from self.loader

    def train(self, steps: int, stop: bool) -> int:
        """Train, and stop once the search is over, if asked; return the steps."""
        batches = self.batches()
        for done in range(steps):
            if stop and done % 10 == 9 and _settled(self.model):
                return done
            x, target = next(batches)
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), target).backward()
            self.optimizer.step()
        return steps

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.net.parameters()])


def _settled(model: nn.Module) -> bool:
    box = [accel.explain(model).state != "searching"]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def optimized(rank: int, world: int, entries: dict[str, tuple[float, str]], slow: bool, allow: str) -> dict[str, Any]:
    """Train under accel with the gradient strategies alone, take it back, and train on."""
    _play(entries, slow)
    mine = [name for name in strategies.names() if name.startswith("gradient_")]
    others = [name for name in strategies.names() if name not in mine]
    loop = Loop(rank)
    options: dict[str, Any] = {"allow": allow, "disable": others, "budget": 60}
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        _, loop.loader, _ = accel.optimize(loop.model, loop.loader, loop.optimizer, **options)
        steps = loop.train(MOST_STEPS, stop=True)
    report = accel.explain(loop.model)
    known = known_offers(loop.model)
    scheme = None if known is None else known.scheme
    session = entry.MODELS[loop.model].session
    found = {
        "steps": steps,
        "rows": {row.name: (row.status, row.why, row.setting) for row in report.rows if row.name in mine},
        "plan": report.plan,
        "active": session.active,
        "way": str(scheme or "plain"),
        "same": same_everywhere(loop.weights()),
        "hooks": len(loop.model._comm_hooks),
        "printed": told.getvalue(),
    }
    accel.undo(loop.model)
    loop.train(3, stop=False)
    found["same after undo"] = same_everywhere(loop.weights())
    found["hooks after undo"] = len(loop.model._comm_hooks)
    found["plan after undo"] = None if known is None else known.scheme
    found["open after undo"] = known is not None and known.is_open
    return found


def by_hand(rank: int, world: int) -> dict[str, Any]:
    """Switch two strategies on and off as trials do, with what the guard does in between, against a plain twin."""
    _play({"quick": (0.0, "reduced"), "small": (0.0, "lossy")}, slow=False)
    Choice.candidates = property(lambda self: [one for one in self.options if one.scheme is not None])  # type: ignore[assignment]
    loop, twin = Loop(rank), Loop(rank)
    run: Any = type("Run", (), {"model": loop.model, "world_size": world, "cuda": False})()
    half, lossy = GradientHalf(), GradientCompression()
    ways = []

    def steps(count: int) -> None:
        for _ in range(count):
            loop.train(1, stop=False)
            known = known_offers(loop.model)
            ways.append("none" if not loop.model._comm_hooks else str((known and known.scheme) or "plain"))

    found: dict[str, Any] = {"refused": [half.refusal(run), lossy.refusal(run)]}
    for _ in range(2):  # as the guard's two checks
        half.enable(run, 0)
        half.disable(run)
        steps(1)
    steps(5)
    twin.train(1, stop=False)
    half.enable(run, 0)
    steps(2)
    found["described"] = half.describe(0)
    lossy.enable(run, 0)
    steps(2)
    found["refused then"] = [half.refusal(run), lossy.refusal(run)]
    lossy.disable(run)
    steps(2)
    half.disable(run)
    steps(2)
    # A look at the model that puts attributes back, while the strategy is on: the reducer with the hook comes back.
    half.enable(run, 0)
    before = {name: vars(loop.model)[name] for name in ("reducer", "logger")}
    half.disable(run)
    vars(loop.model).update(before)
    half.enable(run, 0)
    steps(2)
    half.disable(run)
    found["bits before"] = same_everywhere(loop.weights())
    for strategy in (half, lossy):
        strategy.close(run)
    steps(2)
    found["ways"] = ways
    found["same"] = same_everywhere(loop.weights())
    # Once closed, it can be taken up again.
    half.enable(run, 0)
    steps(1)
    found["again"] = ways[-1]
    half.disable(run)
    half.close(run)
    return found


def off_is_plain(rank: int, world: int) -> dict[str, bool]:
    """Compare a loop whose strategy was on in no step with one that never had it, bit by bit."""
    _play({"quick": (0.0, "reduced")}, slow=False)
    loop, twin = Loop(rank), Loop(rank)
    run: Any = type("Run", (), {"model": loop.model, "world_size": world, "cuda": False})()
    strategy = GradientHalf()
    found = {}
    for name in ("watched", "chosen", "closed"):
        with contextlib.suppress(NothingHelps):
            strategy.enable(run, 0)
        strategy.disable(run)
        if name == "closed":
            strategy.close(run)
        loop.train(7, stop=False), twin.train(7, stop=False)
        found[name] = torch.equal(loop.weights(), twin.weights())
    return found
