"""With a worker_init_fn, workers are seeded and told of themselves as those of a `DataLoader`."""

from __future__ import annotations

import os
import pickle
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from accel.dataio.engine.engine import WorkerDied
from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes import tuner as module
from tests.dataio.numbers import Numbers, indices, seeded


class Told(Dataset[Tensor]):
    """Samples are the worker's number, its seed twice, and a random number; a table as a change can't be sent."""

    def __init__(self) -> None:
        self.table = torch.zeros(4)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        assert info is not None
        return torch.tensor([info.id, info.seed, torch.initial_seed(), int(torch.randint(1 << 40, ()))])


def init(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == number


def epochs(seed: int, wrap: dict[str, Any] | None, workers: int, *, change: bool = False) -> tuple[list[Any], Tensor]:
    """Return the batches of three epochs, and the loop's random state at their end."""
    torch.manual_seed(seed)
    data = Told()
    loader: Any = DataLoader(data, 4, num_workers=workers, worker_init_fn=init, persistent_workers=not change)
    if wrap is not None:
        loader = ContinuousLoader(loader, **wrap)
    seen = []
    for _ in range(3):
        seen.append([batch.clone() for batch in loader])
        if change:
            data.table += 1
    if wrap is not None:
        loader.close()
    return seen, torch.get_rng_state()


@pytest.mark.parametrize("seed", [1, 2])
def test_one_worker_draws_what_a_dataloaders_persistent_one_draws(seed: int) -> None:
    plain, state = epochs(seed, None, 1)
    made, own_state = epochs(seed, {"mode": "fork"}, 1)

    for one, other in zip(made, plain, strict=True):
        assert torch.equal(torch.cat(one), torch.cat(other))
    assert torch.equal(own_state, state)


class Opens(Dataset[Tensor]):
    """Its file is opened by the worker_init_fn."""

    file: int | None = None

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        assert self.file is not None
        time.sleep(0.0005)
        return torch.tensor([index, int(torch.randint(9, ()))])


def open_file(number: int) -> None:
    info: Any = get_worker_info()
    info.dataset.file = 100 + number


def test_auto_has_only_processes_make_batches() -> None:
    torch.manual_seed(3)
    loader = ContinuousLoader(DataLoader(Opens(), 4, worker_init_fn=open_file), num_workers=2)
    with loader:
        assert loader.setting.endswith("(1)")
        for _ in range(8):
            assert [int(row[0]) for batch in loader for row in batch] == list(range(40))
            assert loader.worker_processes
        told = loader.explain()

    assert "inline           not used: only processes call the loader's worker_init_fn" in told
    assert "threads          not used" in told
    end_state = torch.get_rng_state()
    torch.manual_seed(3)
    for _ in range(8):  # all that an epoch draws is its base seed
        torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), end_state)


def test_auto_says_what_keeps_processes_from_starting() -> None:
    class Local(Opens):
        pass

    plain = DataLoader(Local(), 4, worker_init_fn=open_file, num_workers=1, multiprocessing_context="spawn")
    with ContinuousLoader(plain) as loader, pytest.raises((AttributeError, pickle.PicklingError), match="Local"):
        next(iter(loader))


def refuse(number: int) -> None:
    raise LookupError("no licence")


def test_auto_hands_out_what_a_worker_init_fn_raises() -> None:
    loader = ContinuousLoader(DataLoader(Opens(), 4, worker_init_fn=refuse))
    with loader, pytest.raises(LookupError, match="no licence") as caught:
        next(iter(loader))

    assert "worker_init_fn" in str(caught.value.__cause__)


def end(number: int) -> None:
    os._exit(7)


def test_auto_does_not_go_on_for_ever_when_no_worker_starts() -> None:
    with ContinuousLoader(DataLoader(Opens(), 4, worker_init_fn=end), num_workers=2) as loader:
        for _ in range(2):
            with pytest.raises(WorkerDied, match="exit code 7 at its start"):
                next(iter(loader))


# Mode auto on a real loop: what it tries is bounded as requested, and it chooses again when the loop changes


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
