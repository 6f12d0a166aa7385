"""The look-ahead follows the loop's wait, and is put back where it doesn't help."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes.tuner import LookAhead


def windows(ahead: LookAhead, wait: Callable[[int], float], workers: int = 2, count: int = 12) -> list[int]:
    """Return the batches ahead after each of `count` windows in a loop that waits as `wait` says."""
    seen = []
    for _ in range(count):
        ahead.saw(wait(ahead.batches), 0.003, workers)
        seen.append(ahead.batches)
    return seen


def test_no_wait_no_change() -> None:
    assert windows(LookAhead(2), lambda _: 0.00005) == [2] * 12


def test_bursts_are_bridged() -> None:
    assert windows(LookAhead(2), lambda batches: 0.002 / batches)[-1] == 32
    assert windows(LookAhead(2), lambda batches: 0.0 if batches > 4 else 0.002) == [8] * 12


def test_workers_that_are_too_slow_are_not_helped_by_a_longer_queue() -> None:
    assert windows(LookAhead(2), lambda _: 0.002) == [8] + [2] * 11


def test_a_second_step_that_brings_nothing_is_taken_back_alone() -> None:
    assert windows(LookAhead(2), lambda batches: 0.002 if batches < 8 else 0.001) == [8, 32] + [8] * 10


@pytest.mark.parametrize(("workers", "most"), [(1, 64), (4, 16), (16, 4), (40, 2)])
def test_the_queue_has_a_bound(workers: int, most: int) -> None:
    assert windows(LookAhead(2), lambda batches: 1 / batches, workers)[-1] == most


def test_a_requested_look_ahead_stays() -> None:
    assert windows(LookAhead(3, fixed=True), lambda batches: 1 / batches) == [3] * 12


def test_it_begins_again_with_another_way_to_make_batches() -> None:
    ahead = LookAhead(2)
    windows(ahead, lambda _: 0.002)
    ahead.reset()
    assert windows(ahead, lambda batches: 0.002 / batches)[-1] == 32


class Bursts(Dataset[Tensor]):
    """One sample in 64 takes 30 ms."""

    thread_safe = True

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Tensor:
        if index % 64 == 0:
            time.sleep(0.03)
        return torch.tensor(index)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_running_loop_gets_a_longer_queue_and_the_same_batches(prefetch: int | None) -> None:
    wrapped = DataLoader(Bursts(), 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    with ContinuousLoader(wrapped, mode="auto", prefetch_factor=prefetch) as loader:
        seen, told = [], []
        began = ends = time.perf_counter()
        # Settings that bursts make nearly equal are tried for up to 20 s; the look-ahead follows within 5.
        while not told or time.perf_counter() < ends:
            assert time.perf_counter() - began < 100, loader.explain()
            seen.append([])
            for batch in loader:
                seen[-1].append(batch)
                time.sleep(0.003)
            line = loader.explain().splitlines()[0]
            if not line.startswith("trying"):  # now and then the choice is made anew
                ends = ends if told else time.perf_counter() + 5
                told.append(line)
    plain = DataLoader(Bursts(), 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    for epoch in seen[:3]:
        assert [b.tolist() for b in epoch] == [b.tolist() for b in plain]
    assert all("each 2 batches ahead" in line for line in told) == (prefetch == 2), told


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pass_in_inference_mode_does_not_make_the_next_epochs_batches_so(workers: int) -> None:
    """They can't be saved for a backward pass, which torch said in the user's call of the model."""
    model = torch.nn.Linear(2, 1)
    plain = DataLoader(torch.utils.data.TensorDataset(torch.ones(24, 2)), 4)
    looked_at = []
    with ContinuousLoader(plain, mode="threads", num_workers=workers) as loader:
        for _ in range(3):
            for (x,) in loader:
                model(x).sum().backward()
            with torch.inference_mode():
                looked_at += [x.is_inference() for (x,) in loader]
    assert looked_at == [True] * 18
