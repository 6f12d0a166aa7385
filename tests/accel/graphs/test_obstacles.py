"""What can't be captured is named with its line, before anybody has a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.graphs import why_not_capturable

WAITING: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "item": (lambda x: x.sum().item(), "_local_scalar_dense"),
    "float": (lambda x: float(x[0]), "_local_scalar_dense"),
    "if": (lambda x: 1 if x.sum() > 0 else 2, "_local_scalar_dense"),
    "mask": (lambda x: x[x > 0], "index"),
    "masked assignment": (lambda x: x.clone().index_put_((x > 0,), torch.zeros(())), "index_put_"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "where": (lambda x: torch.where(x > 0), "nonzero"),
    "masked_select": (lambda x: x.masked_select(x > 0), "masked_select"),
    "unique": (lambda x: x.unique(), "_unique2"),
    "unique_dim": (lambda x: x.unique(dim=0), "unique_dim"),
    "unique_consecutive": (lambda x: x.unique_consecutive(), "unique_consecutive"),
    "bincount": (lambda x: x.long().abs().bincount(), "bincount"),
    "equal": (lambda x: torch.equal(x, x), "equal"),
    "allclose": (lambda x: torch.allclose(x, x), "allclose"),
    "one_hot": (lambda x: nn.functional.one_hot(x.long().abs()), "_local_scalar_dense"),
    "repeats": (lambda x: torch.repeat_interleave(torch.ones(4, dtype=torch.int64)), "repeat_interleave"),
}


@pytest.mark.parametrize("name", WAITING)
def test_an_operator_that_waits_is_named(name: str) -> None:
    function, operator = WAITING[name]
    obstacles = why_not_capturable(function, torch.randn(4))
    assert operator in {obstacle.operator.removeprefix("aten.") for obstacle in obstacles}
    assert all(__file__ in obstacle.line and obstacle.remedy for obstacle in obstacles)
    assert str(obstacles[0]).startswith(__file__)


def test_torch_may_be_reached_through_a_link(tmp_path: Path) -> None:
    """Of an environment in a linked folder, torch's own lines were named in place of the user's."""
    link = tmp_path / "torch"
    link.symlink_to(Path(torch.__file__).resolve().parent)
    names: dict[str, Any] = {}
    exec(compile("def read(x): return x.item()", str(link / "reading.py"), "exec"), names)
    (obstacle,) = why_not_capturable(lambda x: names["read"](x[0]), torch.randn(4))
    assert obstacle.line.startswith(__file__)


def test_a_training_step_without_any() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    assert why_not_capturable(step, torch.randn(3, 4)) == []
    assert why_not_capturable(lambda x: x[torch.tensor([0, 1])], torch.randn(3)) == []


def test_a_copy_from_host_to_device_is_named() -> None:
    (obstacle,) = why_not_capturable(lambda x: x.to("meta"), torch.randn(3))
    assert obstacle.operator == "aten._to_copy"
    assert "pinned memory" in obstacle.remedy
    assert why_not_capturable(lambda x: x.to("meta", non_blocking=True), torch.randn(3)) == []


def test_the_same_line_is_named_once() -> None:
    def step(x: Tensor) -> None:
        for each in x:
            each.item()

    assert len(why_not_capturable(step, torch.randn(5))) == 1
