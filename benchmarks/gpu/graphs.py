"""Training steps of small models, with a fused AdamW: eager, in torch's own graphs, and captured by `accel.graphs`.

    python -m benchmarks.gpu.sections graphs FILE

| way | what is captured |
|---|---|
| `eager` | nothing |
| `captured`, `model` | by `accel.graphs`: the whole step, or the model's forward and backward |
| `reduce-overhead` | by `torch.compile`: model and loss, forward and backward; the optimizer is eager |
| `step, reduce-overhead` | by `torch.compile` of the whole step; the optimizer not fused, which isn't traced |
| `graph by hand` | by `torch.cuda.graph`: the whole step |

Nothing is timed whose losses differ from those of eager steps; a rival may fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accel.graphs import capture
from benchmarks.gpu.device_times import launched
from benchmarks.gpu.rows import Figures, growing, tried
from benchmarks.render import Row

STEPS = 24
"""Of which losses are compared."""
TOLERANCE = 1e-3
"""Of a loss: kernels that a compiler has written add up in another order."""
Step = Callable[[Tensor, Tensor], Tensor]

OWN_GRAPHS, WHOLE, BY_HAND = "reduce-overhead", "step, reduce-overhead", "graph by hand"
RIVALS = (OWN_GRAPHS, WHOLE, BY_HAND)
WAYS = ("eager", "captured", "model", *RIVALS)


def mlp() -> tuple[nn.Module, Tensor]:
    """Return four layers of 512, and a batch."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10)), torch.randn(64, 512)


class Transformer(nn.Module):
    """Four small layers over 64 tokens; their mean is classified."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, 10] of [B, 64, 128]."""
        logits: Tensor = self.head(self.layers(x).mean(1))
        return logits


def transformer() -> tuple[nn.Module, Tensor]:
    """Return it, and a batch of 8."""
    return Transformer(), torch.randn(8, 64, 128)


MODELS = {"mlp": mlp, "transformer": transformer}


def trained(model: str, device: str, way: str) -> tuple[Callable[[], Any], Tensor]:
    """Return a step of a new model in one of `WAYS`, and its first losses."""
    torch.manual_seed(0)
    network, x = MODELS[model]()
    network, x = network.to(device), x.to(device)
    target = torch.arange(len(x), device=device) % 10
    kind = {"fused": True} if way != WHOLE else {"foreach": True}
    capturable = {"capturable": True, "lr": torch.tensor(1e-3, device=device)} if device == "cuda" else {}
    optimizer = torch.optim.AdamW(network.parameters(), **kind, **capturable)  # type: ignore[arg-type]
    if way == "model":
        capture(network, strict=True)

    def loss_of(x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(network(x), target)

    loss: Any = torch.compile(loss_of, mode="reduce-overhead") if way == OWN_GRAPHS else loss_of

    def step(x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        found = loss(x, target)
        found.backward()
        optimizer.step()
        return found.detach()  # type: ignore[no-any-return]

    run = wrapped(step, way, (x, target))
    losses = torch.stack([run(x, target).clone() for _ in range(STEPS)])
    return lambda: run(x, target), losses


def wrapped(step: Step, way: str, batch: tuple[Tensor, Tensor]) -> Step:
    """Return the step as a way runs it."""
    if way == "captured":
        return capture(step, strict=True)
    if way == WHOLE:
        return torch.compile(step, mode="reduce-overhead")
    return by_hand(step, batch) if way == BY_HAND else step


def by_hand(step: Step, batch: tuple[Tensor, Tensor]) -> Step:
    """Return a step that runs three times and is replayed from then on, as torch's notes on CUDA graphs have it."""
    replays: list[tuple[torch.cuda.CUDAGraph, Tensor]] = []
    done = 0

    def run(*_: Tensor) -> Tensor:
        nonlocal done
        done += 1
        if done <= 3:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = step(*batch)
            torch.cuda.current_stream().wait_stream(side)
            return loss
        if not replays:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = step(*batch)
            replays.append((graph, loss))
        replays[0][0].replay()
        return replays[0][1]

    return run


def rows(device: str = "cuda") -> Iterator[Row]:
    """Yield a row for each model."""
    for model in MODELS:
        yield tried({"model": model}, partial(measured, model, device))


def measured(model: str, device: str, time: Callable[[Callable[[], Any]], Any] = launched) -> Row:
    """Time all ways on one model."""
    medians: dict[str, float] = {}
    losses: dict[str, Tensor] = {}
    failed: dict[str, str] = {}
    for way in WAYS:
        try:
            step, losses[way] = trained(model, device, way)
            apart = float((losses[way] - losses["eager"]).abs().max())
            if apart > TOLERANCE:
                raise RuntimeError(f"{way}: losses are {apart:.1e} apart: nothing is timed")
            medians[way] = time(step).median
        except Exception as error:
            if way not in RIVALS:
                raise
            failed[way] = f"{type(error).__name__}: {str(error)[:200]}"
        torch.compiler.reset()
    return {
        "ms": medians,
        "speedup": {name: ms / medians["captured"] for name, ms in medians.items() if name != "captured"},
        "loss_apart": float((losses["captured"] - losses["eager"]).abs().max()),
        **({"failed_rivals": failed} if failed else {}),
    }


def everything() -> Figures:
    """Measure; yield the rows so far."""
    yield from growing("rows", rows())
