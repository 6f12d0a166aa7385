"""The same on CUDA's own graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from accel import optim
from accel.graphs import capture

pytestmark = pytest.mark.gpu

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw, capturable": lambda params: torch.optim.AdamW(
        params, lr=torch.tensor(1e-2, device="cuda"), capturable=True
    ),
    "adamw, fused": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2, device="cuda"), fused=True),
    "ours": lambda params: optim.FusedAdamW(params, lr=1e-2),
}


def train(kind: str, captured: bool, steps: int = 24, sizes: tuple[int, ...] = (16,)) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.GELU(), nn.Linear(32, 4)).cuda()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = StepLR(optimizer, 8, 0.5)

    def step(x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run: Any = capture(step, strict=True) if captured else step
    generator, losses = torch.Generator().manual_seed(1), []
    torch.cuda.manual_seed(2)
    for number in range(steps):
        rows = sizes[number % len(sizes)]
        x = torch.randn(rows, 16, generator=generator).cuda()
        losses.append(run(x, torch.randint(4, (rows,), generator=generator).cuda()))
        scheduler.step()
    return [*losses, *model.state_dict().values()], run


@pytest.mark.parametrize("sizes", [(16,), (16, 7)])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_trains_as_eager_steps_do(kind: str, sizes: tuple[int, ...]) -> None:
    expected, _ = train(kind, captured=False, sizes=sizes)
    outcome, step = train(kind, captured=True, sizes=sizes)
    for one, other in zip(outcome, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert step.replays > 0


def test_a_step_with_a_scaler_skips_on_the_device() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2, device="cuda"), fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    run = capture(step, strict=True)
    for _ in range(8):
        run(torch.randn(4, 8, device="cuda"))
    weights, scale = model.weight.detach().clone(), scaler.get_scale()
    run(torch.full((4, 8), float("inf"), device="cuda"))
    assert torch.equal(model.weight, weights)
    assert scaler.get_scale() == scale / 2
    assert run.replays > 4


def test_a_step_that_waits_goes_on_eagerly() -> None:
    run = capture(lambda x: x * x.sum().item(), warmup=1)
    x = torch.arange(3.0, device="cuda")
    assert torch.equal(run(x), x * x.sum())
    with pytest.warns(RuntimeWarning, match="could not be captured"):
        assert torch.equal(run(2 * x), 4 * x * x.sum())
    assert torch.equal(run(x), x * x.sum())
    after = capture(lambda x: x + 1, warmup=0, strict=True)
    assert torch.equal(after(torch.ones(3, device="cuda")), torch.full((3,), 2.0, device="cuda"))
