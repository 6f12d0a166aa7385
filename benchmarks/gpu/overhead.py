"""What accel costs the host in each step once its search is over: a step of 1 to 2 ms, with and without it, in turns.

All ways train the same small network on batches that lie on the device, with a fused AdamW: `by hand`; under accel with
nothing kept; with the fused optimizer kept, in place of the user's; and on a GPU with captured graphs too.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import accel
from accel.search.plan import fingerprint
from benchmarks.gpu.graphs import mlp
from benchmarks.gpu.rows import Figures
from benchmarks.spread import fifths
from benchmarks.turn_clock import drain_device

BY_HAND = "by hand"
PLANS: dict[str, dict[str, Any]] = {
    "accel, nothing kept": {},
    "accel, fused_optimizer": {"fused_optimizer": "fused"},
    "accel, fused_optimizer and cuda_graphs": {"fused_optimizer": "fused", "cuda_graphs": None},
}
BATCHES = 8
MOST_TURNS = 10
"""Until a plan is on."""


@dataclass
class Loop:
    """A loop that goes on where it was left."""

    model: nn.Module
    steps: Iterator[None]
    times_us: list[float] = field(default_factory=list)
    """Of a step, by turns."""

    def turn(self, count: int) -> None:
        """Train so many steps, and note what one took."""
        drain_device()
        began = time.perf_counter()
        for _ in itertools.islice(self.steps, count):
            pass
        drain_device()
        self.times_us.append((time.perf_counter() - began) / count * 1e6)


def loop(way: str, device: str) -> Loop:
    """Return the loop of a way, before its first step."""
    torch.manual_seed(0)
    model, x = mlp()
    model, target = model.to(device), torch.arange(len(x), device=device) % 10
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True if not PLANS.get(way) else None)
    batches: Any = [(x.to(device) + number, target) for number in range(BATCHES)]
    if way != BY_HAND:
        plan = accel.Plan(fingerprint=fingerprint(model), model=type(model).__name__, strategies=PLANS[way])
        model, batches, optimizer = accel.optimize(model, batches, optimizer, plan=plan, cache=False)
    return Loop(model, trained(model, batches, optimizer))


def trained(model: Callable[[Tensor], Tensor], batches: Any, optimizer: Any) -> Iterator[None]:
    """Train for ever."""
    while True:
        for x, target in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), target).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            yield


def everything(device: str = "", turns: int = 8, steps: int = 200) -> Figures:
    """Train in turns; yield the ways so far."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    ways = [BY_HAND, *(way for way in PLANS if device == "cuda" or "cuda" not in way)]
    loops = {way: loop(way, device) for way in ways}
    for way, each in loops.items():
        warm_up(each, steps, is_accel=way != BY_HAND)
    for turn in range(turns):
        for each in list(loops.values())[:: 1 if turn % 2 else -1]:
            each.turn(steps)
        yield "rows", [row(way, loops) for way in loops]
    for way in ways[1:]:
        accel.undo(loops[way].model)


def warm_up(each: Loop, steps: int, *, is_accel: bool) -> None:
    """Train until kernels are loaded and the plan is on."""
    for _ in range(MOST_TURNS):
        each.turn(steps)
        if not is_accel or accel.explain(each.model).state != "searching":
            break
    each.times_us.clear()


def row(way: str, loops: dict[str, Loop]) -> dict[str, Any]:
    """Return the µs of a step of a way, and how many more than by hand."""
    median, low, high = fifths(loops[way].times_us)
    shown = {"way": way, "us": median, "low": low, "high": high}
    if way == BY_HAND:
        return shown
    kept = [each.name for each in accel.explain(loops[way].model).rows if each.status == "kept"]
    return {**shown, "kept": kept, "over_by_hand_us": median - fifths(loops[BY_HAND].times_us).median}
