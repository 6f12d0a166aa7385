"""Search once, keep the plan, and start the next run with it.

    python -m examples.replay_plan

The first run searches and leaves a folder with report.json, report.html and plan.json. The second takes the plan over:
each strategy still has to pass the guard, but no trial is run.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


def job() -> tuple[nn.Module, DataLoader[Any], torch.optim.Optimizer]:
    """Make model, loader and optimizer as a training script would, from the same seed each time."""
    torch.manual_seed(0)
    features = torch.randn(4096, 32)
    loader = DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=32, shuffle=True)
    layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 1))
    return model, loader, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Train for some epochs."""
    for _ in range(epochs):
        for inputs, target in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), target).backward()
            optimizer.step()


def main() -> None:
    """Run both."""
    torch.set_num_threads(1)  # the operators are tiny: a second thread only waits, for seconds on a busy machine
    with tempfile.TemporaryDirectory() as folder:
        model, loader, optimizer = accel.optimize(*job(), report=folder)
        train(model, loader, optimizer, epochs=12)
        accel.undo(model)  # writes the files with the last numbers; at the end of a script that happens by itself
        plan = accel.Plan.load(Path(folder) / "plan.json")

    print(f"the search chose {plan.strategies or 'nothing: no strategy was faster here'}", flush=True)

    model, loader, optimizer = accel.optimize(*job(), plan=plan)
    train(model, loader, optimizer, epochs=2)
    print(f"the second run took over {accel.explain(model).plan}")


if __name__ == "__main__":
    main()
