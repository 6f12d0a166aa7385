"""Training of Swin, in the small and on a CPU: the fused row is fused, and eager again is a control."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import swin_training as bench
from tests.kernels.hosts import MODELS, OfficialWindowAttention, serve_cpu


@pytest.fixture(autouse=True)
def _serves_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_cpu(monkeypatch)


def trainer(model: nn.Module) -> bench.Trainer:
    return bench.Trainer(model, 2, 64, "cpu")


def test_every_block_and_attention_is_fused_and_trains() -> None:
    torch.manual_seed(0)
    model = bench.fused(MODELS["timm v1"](64, 4))
    made = trainer(model)
    made.labels = [labels % 5 for labels in made.labels]
    losses = made.losses(8)
    assert sum(losses[4:]) < sum(losses[:4])


class WindowAttention(OfficialWindowAttention):
    """A namesake that computes something else."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, mask) * 1.1


def test_a_model_that_is_fused_in_part_is_no_row() -> None:
    model = nn.Sequential(WindowAttention(32, (4, 4), 2))
    with pytest.raises(RuntimeError, match="1 of 1 blocks and attentions are not on the fused op: 0: it computes some"):
        bench.fused(model)
    with pytest.raises(RuntimeError, match=r"0 of 0 .* they were not recognised"):
        bench.fused(nn.Linear(2, 2))


def test_the_control_starts_one_rounding_off() -> None:
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.load_state_dict(one.state_dict())
    bench.nudge(other)
    assert not torch.equal(one.weight, other.weight)
    torch.testing.assert_close(one.weight, other.weight, rtol=3e-7, atol=0)


def test_ratios_are_of_the_same_turn() -> None:
    times = {"eager": [10.0, 20.0, 30.0], "fused": [5.0, 5.0, 10.0]}
    assert bench.ratios(times, "eager", "fused") == [3.0, 2.0, 4.0]
