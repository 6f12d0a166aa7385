"""Mode auto on a real loop: what it tries is bounded as requested, and it chooses again when the loop changes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes import tuner as module
from tests.dataio.numbers import Numbers, indices, seeded


class Slow(Numbers):
    """Sample i takes `seconds`."""

    seconds = 0.0

    def __getitem__(self, index: int) -> Tensor:
        if self.seconds:  # sleep(0) lets others have the core, for milliseconds on a busy machine
            time.sleep(self.seconds)
        return super().__getitem__(index)


def epoch(loader: Any) -> list[int]:
    seen = []
    for batch in loader:
        seen += indices(batch)
        time.sleep(0.003)
    return seen


def test_workers_is_the_most_that_is_tried() -> None:
    data = Slow()
    data.seconds = 0.002
    with ContinuousLoader(DataLoader(data, 4), num_workers=2) as loader:
        for _ in range(3):
            epoch(loader)
        told = loader.explain()

    assert "threads(1)" in told
    assert "threads(2)" in told
    assert all(f"({count})" not in told for count in range(3, 17))


@pytest.mark.slow  # by the machine's clock: beside others a quick dataset looks slow too
def test_a_dataset_that_becomes_slow_is_given_another_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """So short are the windows here that a few epochs suffice."""
    monkeypatch.setattr(module, "_WINDOW_S", 0.05)
    monkeypatch.setattr(module, "_WINDOW", 13)
    monkeypatch.setattr(module, "_REST", 0.0)
    monkeypatch.setattr(module, "_NEGLIGIBLE", 0.5)  # so that a busy machine is no slow dataset
    data = Slow()
    plain = DataLoader(Numbers(), 4, shuffle=True, generator=seeded())
    with ContinuousLoader(DataLoader(data, 4, shuffle=True, generator=seeded()), num_workers=2) as loader:
        for _ in range(3):
            assert epoch(loader) == torch.cat(list(plain))[:, 0].int().tolist()
        assert loader.setting == "inline"
        data.seconds = 0.003
        for _ in range(30):
            assert epoch(loader) == torch.cat(list(plain))[:, 0].int().tolist()
            tuner = loader._core.tuner
            assert tuner is not None
            if tuner.decided and loader.setting != "inline":
                break
        assert loader.setting != "inline", loader.explain()
