"""Activation checkpointing: parts of the model run again within the backward pass, on the weights of the call."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from accel.amp import decorate
from accel.amp.decorate import calls_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x))) * self.gain


class Model(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant, self.fails, self.recurs = reentrant, False, True
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.lstm, self.tail = nn.LSTM(8, 8, batch_first=True), Block()

    def part(self, x: Tensor) -> Tensor:
        if self.fails and torch._C._current_graph_task_id() != -1:
            raise RuntimeError("within the backward pass")
        return self.lstm(x)[0] if self.recurs else self.tail(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        for run in (*self.blocks, self.part):
            x = run(x) if self.reentrant is None else checkpoint(run, x, use_reentrant=self.reentrant)
        return x


def make(reentrant: bool | None, **options: Any) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    decorate(model, optimizer, **options)
    return model, optimizer


OPTIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16, "loss_scale": 1024.0},
    "float16 at O1": {"dtype": torch.float16, "loss_scale": 1024.0, "level": "O1"},
    "some in float32": {"dtype": torch.bfloat16, "keep_fp32": [nn.LayerNorm]},
}


def test_selective_checkpointing_does_not_count_the_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch took them for operators of the part, of which it had saved nothing."""
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    monkeypatch.setitem(globals(), "checkpoint", partial(checkpoint, context_fn=contexts))
    gradients = []
    for reentrant in (None, False):
        model, _ = make(reentrant, dtype=torch.bfloat16)
        model.recurs = False
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
        model(x).square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for checkpointed, plain in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_trains_as_without_checkpointing(name: str, reentrant: bool) -> None:
    results = []
    for kind in (None, reentrant):
        model, optimizer = make(kind, **OPTIONS[name])
        model.recurs = "O1" not in name  # torch autocasts no LSTM to float16 on a CPU
        for step in range(3):
            for part in range(2):  # accumulated
                x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(10 * step + part)).requires_grad_()
                model(x).square().mean().backward()
            assert not calls_of(model).is_under_way
            assert {p.grad.dtype for p in model.blocks.parameters()} == {torch.float32}
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach() for p in model.parameters()])
    # Where a CPU has float16 products, oneDNN takes other ones without gradients, as a part's first pass is made.
    tolerance = 2e-3 if "float16" in name and reentrant else 0.0
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


class Gains(nn.Module):
    """Weights that no module of the checkpointed part holds, and a buffer that is replaced in each run."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.full((8,), 1.5))
        self.register_buffer("seen", torch.zeros(8))

    def part(self, x: Tensor) -> Tensor:
        self.seen = x.detach().mean(0)
        return x * self.gain + self.seen

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.part(x) if self.reentrant is None else checkpoint(self.part, x, use_reentrant=self.reentrant)
        y: Tensor = self.last(x)
        return y


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_weights_beside_modules_and_buffers_that_are_replaced(name: str, reentrant: bool) -> None:
    gradients = []
    for kind in (None, reentrant):
        torch.manual_seed(0)
        model = Gains(kind)
        decorate(model, **OPTIONS[name])
        for seed in range(2):
            model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
        assert model.seen.dtype == torch.float32 or "O1" in name
    assert all(map(torch.equal, *gradients))


def test_a_pass_that_fails_leaves_parameters_where_they_are() -> None:
    model, _ = make(False, dtype=torch.bfloat16)
    weight, x = model.lstm.weight_hh_l0, torch.randn(2, 5, 8)
    loss = model(x).mean()
    model.fails = True
    with pytest.raises(RuntimeError, match="within the backward pass"):
        loss.backward()
    model.fails = False
    assert model.lstm.weight_hh_l0 is weight
    assert {p.dtype for p in model.state_dict().values()} == {torch.float32}
    assert any(p is weight for p in model.parameters())
    model(x).mean().backward()
    assert model.lstm.weight_hh_l0 is weight and not calls_of(model).is_under_way
