"""Whether there is room for graphs, by given numbers."""

from __future__ import annotations

import pytest
import torch

from accel.strategies.cuda_graphs import DeviceMemory, memory_of, why_no_room

GIB = 2**30


def test_a_step_needs_what_is_above_what_stays() -> None:
    memory = DeviceMemory(free=10 * GIB, reserved=8 * GIB, allocated=3 * GIB, peak=7 * GIB)
    assert memory.of_a_step == 4 * GIB
    assert memory.available == 15 * GIB  # with what the allocator holds unused


def test_a_peak_that_the_user_has_reset_is_no_negative_need() -> None:
    assert DeviceMemory(free=0, reserved=0, allocated=3, peak=2).of_a_step == 0


@pytest.mark.parametrize(("free", "has_room"), [(4 * GIB, True), (4 * GIB - 1, False)])
def test_there_is_room_for_two_sets_of_activations(free: int, has_room: bool) -> None:
    memory = DeviceMemory(free=free, reserved=7 * GIB, allocated=3 * GIB, peak=7 * GIB)
    why = why_no_room(memory, memory.of_a_step)
    assert (why == "") == has_room
    if not has_room:
        assert why == (
            "there is no room for graphs beside a step of the loop's own: both need up to 8.0 GiB, and 8.0 GiB are left"
        )


def test_torch_is_asked_and_its_statistics_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (11, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocated_bytes.all.peak": 6})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", None)
    assert memory_of(torch.device("cuda", 0)) == DeviceMemory(free=11, reserved=7, allocated=3, peak=6)
