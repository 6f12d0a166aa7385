"""Training steps of small models: eager, compiled with its own graphs, and captured by `accel.graphs`, as a whole step
and as a model alone.

    python3 -m benchmarks.gpu.graphs [--out FILE]

Nothing is timed whose losses differ from those of eager steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accel.graphs import capture
from benchmarks.gpu.device_times import launched
from benchmarks.gpu.rows import Figures, command, growing, tried
from benchmarks.render import Row

STEPS = 24
"""Of which losses are compared."""
TOLERANCE = 1e-3
"""Of a loss: kernels that a compiler has written add up in another order."""
Step = Callable[[Tensor, Tensor], Tensor]


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


def trained(model: str, device: str, wrap: Callable[[Step], Step], call: str = "") -> tuple[Callable[[], Any], Tensor]:
    """Return a step of a new model, whose call is eager, "compiled" or "captured", and its first losses."""
    torch.manual_seed(0)
    network, x = MODELS[model]()
    network, x = network.to(device), x.to(device)
    target = torch.arange(len(x), device=device) % 10
    capturable = {"capturable": True, "lr": torch.tensor(1e-3, device=device)} if device == "cuda" else {}
    optimizer = torch.optim.AdamW(network.parameters(), **capturable)  # type: ignore[arg-type]
    called: Any = torch.compile(network, mode="reduce-overhead") if call == "compiled" else network
    if call == "captured":
        capture(network, strict=True)

    def step(x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(called(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    run = wrap(step)
    losses = torch.stack([run(x, target).clone() for _ in range(STEPS)])
    return lambda: run(x, target), losses


def rows(device: str = "cuda") -> Iterator[Row]:
    """Yield a row for each model."""
    for model in MODELS:
        yield tried({"model": model}, partial(measured, model, device))


def measured(model: str, device: str, time: Callable[[Callable[[], Any]], Any] = launched) -> Row:
    """Time the three on one model."""
    ways: dict[str, tuple[Callable[[Step], Step], str]] = {
        "eager": (lambda step: step, ""),
        "captured": (partial(capture, strict=True), ""),
        "model": (lambda step: step, "captured"),
        "reduce-overhead": (lambda step: step, "compiled"),
    }
    medians, losses = {}, {}
    for name, (wrap, call) in ways.items():
        try:
            step, losses[name] = trained(model, device, wrap, call)
            apart = float((losses[name] - losses["eager"]).abs().max())
            if apart > TOLERANCE:
                return {"failed": f"{name}: losses are {apart:.1e} apart: nothing is timed"}
            medians[name] = time(step).median
        except RuntimeError:
            if name != "reduce-overhead":  # the rival may fail
                raise
        torch.compiler.reset()
    return {
        "ms": medians,
        "speedup": {name: ms / medians["captured"] for name, ms in medians.items() if name != "captured"},
        "loss_apart": float((losses["captured"] - losses["eager"]).abs().max()),
    }


def everything() -> Figures:
    """Measure; yield the rows so far."""
    yield from growing("rows", rows())


main = command(everything, __doc__ or "")

if __name__ == "__main__":
    main()
