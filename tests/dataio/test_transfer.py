"""Batches that are copied one ahead arrive whole, in order, in their structure."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel.dataio.batches import equal
from accel.dataio.engine.transfer import AheadCopier, pin
from accel.dataio.loader import ContinuousLoader

Pair = namedtuple("Pair", "image label")


def batch(number: int) -> Any:
    return {
        "pair": Pair(torch.full((3, 4), float(number)), [torch.tensor(number)]),
        "name": f"batch {number}",
        "n": None,
    }


def test_on_a_cpu_batches_are_handed_through() -> None:
    copier = AheadCopier(torch.device("cpu"))
    first, second = batch(1), batch(2)
    copier.start(first)
    copier.start(second)

    assert len(copier) == 2
    assert copier.finish() is first
    assert copier.finish() is second


def test_pinning_leaves_alone_what_can_not_be_pinned() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA to pin memory")
    pinned = pin(batch(1))

    assert equal(pinned, batch(1))
    assert pinned["pair"].image.is_pinned()


@pytest.mark.gpu
def test_on_a_gpu_batches_arrive_whole_and_in_order() -> None:
    copier = AheadCopier(torch.device("cuda"))
    copier.start(batch(0))
    for number in range(200):
        copier.start(batch(number + 1))
        got = copier.finish()
        assert got["pair"].image.is_cuda
        assert got["name"] == f"batch {number}"
        # Read on the device before the next copy may reuse memory that this batch gave back.
        assert float(got["pair"].image.sum()) == 12.0 * number
        del got


@pytest.mark.gpu
def test_memory_of_a_batch_is_not_handed_out_while_the_step_uses_it() -> None:
    # Whole numbers whose sums fp32 holds, in any order of adding.
    data = TensorDataset(torch.arange(64 * 1024.0).remainder(1021).view(64, 1024))
    work = torch.randn(2048, 2048, device="cuda")
    with ContinuousLoader(DataLoader(data, 1), mode="threads", num_workers=2, device="cuda") as loader:
        sums = []
        for (row,) in loader:
            for _ in range(20):
                work = (work @ work).clamp(-1, 1)  # the device is behind the host by now
            sums.append(row.sum() + 0 * work[0, 0])
            del row

    assert torch.equal(torch.stack(sums).cpu(), data.tensors[0].sum(1))


@pytest.mark.gpu
def test_a_loader_with_pin_memory_hands_over_pinned_batches() -> None:
    data = TensorDataset(torch.arange(12.0))
    with ContinuousLoader(DataLoader(data, 4, pin_memory=True), mode="fork", num_workers=1) as loader:
        assert all(values.is_pinned() for (values,) in loader)
