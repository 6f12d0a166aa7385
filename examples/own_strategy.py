"""Write a strategy for a slow module of one's own, and let accel decide whether it helps.

    python -m examples.own_strategy

The module multiplies each group of features by a matrix of its own, in a Python loop. The strategy replaces the loop by
one batched product. It only says what it does and how to switch it; measuring, checking and deciding is accel's part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import strategies
from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.strategies import Exactness, Strategy


class GroupedLinear(nn.Module):
    """Multiply each group of features by its own matrix, one after the other."""

    def __init__(self, groups: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(groups, width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, groups, width) to the same shape."""
        return torch.stack([x[:, g] @ self.weight[g] for g in range(len(self.weight))], dim=1)


class BatchedLinear(GroupedLinear):
    """The same parameters and the same sums, in one call."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, groups, width) to the same shape."""
        return torch.einsum("bgi,gij->bgj", x, self.weight)


class BatchedGroups(Strategy):
    """Turn every `GroupedLinear` into a `BatchedLinear` in place: the objects and their parameters stay."""

    name = "batched_groups"
    summary = "one batched product instead of one per group"
    treats = frozenset({Bottleneck.COMPUTE, Bottleneck.LAUNCH})
    exactness = Exactness.REORDERED

    def __init__(self) -> None:
        self._changed: list[nn.Module] = []

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: there is no such module."""
        return "" if run.has_module(GroupedLinear) else "the model has no GroupedLinear"

    def enable(self, run: Run, setting: Any) -> None:
        """Change the class of each module."""
        self._changed = [module for module in run.model.modules() if type(module) is GroupedLinear]
        for module in self._changed:
            module.__class__ = BatchedLinear

    def disable(self, run: Run) -> None:
        """Change it back."""
        for module in self._changed:
            module.__class__ = GroupedLinear
        self._changed = []


def main() -> None:
    """Train a small model and print what became of the strategy."""
    strategies.REGISTRY.insert(0, BatchedGroups)  # before the calls of optimize that should know it

    torch.set_num_threads(1)  # the operators are tiny: a second thread only waits, for seconds on a busy machine
    torch.manual_seed(0)
    inputs = torch.randn(2048, 32, 16)
    loader = DataLoader(TensorDataset(inputs, inputs.mean((1, 2))), batch_size=32, shuffle=True)
    model = nn.Sequential(GroupedLinear(32, 16), nn.ReLU(), GroupedLinear(32, 16), nn.Flatten(), nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    # Nothing else is tried here, and from the first step on: the run is short.
    others = [name for name in strategies.names() if name != BatchedGroups.name]
    model, loader, optimizer = accel.optimize(model, loader, optimizer, disable=others, budget="30s")
    for _ in range(10):
        for batch, target in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch).squeeze(1), target).backward()
            optimizer.step()

    row = next(row for row in accel.explain(model).rows if row.name == BatchedGroups.name)
    print(f"{row.name}: {row.status}; {row.why}")


if __name__ == "__main__":
    main()
