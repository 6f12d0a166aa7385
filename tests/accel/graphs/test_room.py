"""Whether there is room for graphs, by given numbers."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.parametrize(("peak", "of_a_step"), [(6, 3), (2, 0)])
def test_torch_is_asked_and_its_statistics_stay(peak: int, of_a_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (11, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocated_bytes.all.peak": peak})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", None)
    assert memory_of(torch.device("cuda", 0)) == DeviceMemory(available=15, of_a_step=of_a_step)
