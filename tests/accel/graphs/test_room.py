"""Whether there is room for graphs, by given numbers."""

from __future__ import annotations

import pytest
import torch

from accel.device_memory import idle_in_graphs
from accel.strategies.cuda_graphs import DeviceMemory, memory_of, why_no_room

GIB = 2**30


@pytest.mark.parametrize(("free", "has_room"), [(4 * GIB, True), (4 * GIB - 1, False)])
def test_there_is_room_for_two_sets_of_activations(free: int, has_room: bool) -> None:
    why = why_no_room(free + 4 * GIB, 4 * GIB)
    assert (why == "") == has_room
    if not has_room:
        assert why == (
            "there is no room for graphs beside a step of the loop's own: both need up to 8.0 GiB, and 8.0 GiB are left"
        )


def test_without_peaks_nothing_is_captured() -> None:
    assert why_no_room(4 * GIB, 0).startswith("what a step needs of memory is not known")


def test_what_graphs_hold_unused_is_no_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [
        {"device": device, "segment_pool_id": pool, "total_size": 9, "allocated_size": 2}
        for device, pool in ((0, (0, 0)), (0, (0, 1)), (1, (0, 2)))
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert idle_in_graphs(torch.device("cuda", 0)) == 7


@pytest.mark.parametrize(("peak", "of_a_step"), [(6, 3), (2, 0)])
def test_torch_is_asked_and_its_statistics_stay(peak: int, of_a_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (11, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocated_bytes.all.peak": peak})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", None)
    assert memory_of(torch.device("cuda", 0)) == DeviceMemory(available=15, of_a_step=of_a_step)
