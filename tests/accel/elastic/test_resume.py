"""A training that is stopped after any of its steps and begun again in new objects equals one that was not stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel.dataio.elastic_sampler import ElasticSampler
from accel.elastic.checkpoint import Checkpoints
from accel.elastic.learning_rate import LearningRateScaler
from accel.elastic.scaling_rules import BatchScale
from accel.elastic.training_state import capture_state, restore_state

STEPS, EPOCH = 12, 5


class Training:
    """A small model with dropout and batch norm, shuffled data, Adam, a schedule, a rate that follows the batch."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=STEPS + 1)
        self.scaler = LearningRateScaler(self.optimizer)
        draw = torch.Generator().manual_seed(3)
        data = TensorDataset(torch.randn(19, 6, generator=draw), torch.randn(19, 1, generator=draw))
        self.sampler = ElasticSampler(data, batch_size=4, seed=1)
        # A generator of its own: each pass draws a seed for its workers, and a resumed epoch is one pass more.
        self.loader = DataLoader(data, batch_sampler=self.sampler, generator=torch.Generator())
        self.step = 0

    def more(self) -> dict[str, Any]:
        return {"sampler": self.sampler, "scaler": self.scaler}

    def run(self, until: int, checkpoints: Checkpoints | None = None) -> None:
        """Train up to a step, saving after each."""
        while self.step < until:
            for x, target in self.sampler.consumed(self.loader):
                self.scaler.update(BatchScale(4 * (1 + self.step % 3), 4, noise=30.0))
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(x), target).backward()
                self.optimizer.step()
                self.schedule.step()
                self.step += 1
                if checkpoints is not None:
                    state = capture_state(self.model, self.optimizer, self.schedule, step=self.step, **self.more())
                    checkpoints.save(state)
                if self.step == until:
                    return

    def end(self) -> str:
        torch.set_printoptions(precision=17, profile="full")
        try:
            parts = [self.model, self.optimizer, self.schedule, self.sampler, self.scaler]
            return repr([part.state_dict() for part in parts]) + repr(torch.rand(3))  # type: ignore[attr-defined]
        finally:
            torch.set_printoptions(profile="default")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The end of a training without a stop, and the checkpoints of all of its steps."""
    folder = tmp_path_factory.mktemp("whole")
    training = Training(seed=0)
    training.run(STEPS, Checkpoints(folder, keep=STEPS))
    return training.end(), folder


def test_saving_does_not_change_a_training(whole: tuple[str, Path]) -> None:
    training = Training(seed=0)
    training.run(STEPS)
    assert training.end() == whole[0]
    other = Training(seed=1)
    other.run(STEPS)
    assert other.end() != whole[0]


@pytest.mark.parametrize("stop", range(1, STEPS + 1))
def test_stopped_after_any_step(whole: tuple[str, Path], stop: int, tmp_path: Path) -> None:
    end, folder = whole
    (saved,) = folder.glob(f"*-step-{stop}")
    (tmp_path / saved.name).symlink_to(saved)
    state = Checkpoints(tmp_path).load_latest()
    assert state is not None
    training = Training(seed=5)
    assert restore_state(state, training.model, training.optimizer, training.schedule, **training.more()) == []
    training.step = state["step"]
    assert training.step == stop
    training.run(STEPS)
    assert training.end() == end
