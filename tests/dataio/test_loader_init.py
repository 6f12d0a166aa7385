"""With a worker_init_fn, workers are seeded and told of themselves as those of a `DataLoader`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from accel.dataio.loader import ContinuousLoader


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


def workers_of(seen: list[Any]) -> set[tuple[int, ...]]:
    return {tuple(row) for epoch in seen for batch in epoch for row in batch[:, :3].tolist()}


@pytest.mark.parametrize("seed", [1, 2])
def test_one_worker_draws_what_a_dataloaders_persistent_one_draws(seed: int) -> None:
    plain, state = epochs(seed, None, 1)
    made, own_state = epochs(seed, {"mode": "fork"}, 1)

    for one, other in zip(made, plain, strict=True):
        assert torch.equal(torch.cat(one), torch.cat(other))
    assert torch.equal(own_state, state)


def test_two_workers_have_the_seeds_of_a_dataloaders() -> None:
    made = workers_of(epochs(5, {"mode": "fork"}, 2)[0])

    assert len(made) == 2  # both made a batch
    assert made == workers_of(epochs(5, None, 2)[0])


def test_workers_started_anew_have_the_seed_of_that_epoch() -> None:
    plain, state = epochs(5, None, 1, change=True)
    made, own_state = epochs(5, {"mode": "fork"}, 1, change=True)

    assert len(workers_of(plain)) == 3
    assert workers_of(made) == workers_of(plain)
    assert torch.equal(own_state, state)
