"""Random states of each device of a model are put back, and those of no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accel.guard import guard, random_states
from accel.guard.random_states import RandomStates, devices_of

CPU = torch.device("cpu")


class Chip:
    """Stands in for torch's module of a kind of device."""

    def __init__(self, devices: list[str]) -> None:
        self.states = dict.fromkeys(devices, 0)

    def get_rng_state(self, device: Any = "mps") -> int:
        return self.states[str(device)]

    def set_rng_state(self, state: int, device: Any = "mps") -> None:
        self.states[str(device)] = state


@pytest.fixture
def chips(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with two of NVIDIA's, one of Intel's and of Apple's, and one kind that has no random state."""
    made = {
        "cuda": Chip(["cuda:0", "cuda:1"]),
        "xpu": Chip(["xpu:0"]),
        "mps": Chip(["mps"]),
        "hpu": SimpleNamespace(),
    }
    monkeypatch.setattr(torch, "get_device_module", lambda kind: made[kind])
    return made


class Spread(nn.Module):
    """Claims to have parameters on devices."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.places = devices

    def parameters(self, recurse: bool = True) -> Any:
        return iter([SimpleNamespace(device=torch.device(place)) for place in self.places])


@pytest.mark.parametrize("place", ["cuda:0", "cuda:1", "xpu:0", "mps"])
def test_the_state_of_each_device_is_put_back(place: str, chips: dict[str, Any]) -> None:
    devices = devices_of(Spread("cpu", "cuda:0", "cuda:1", "xpu:0", "mps", "hpu:0", "meta"), CPU)
    states = RandomStates(devices)
    chip = chips[place.split(":")[0]]
    chip.states[place] = 7
    states.restore()
    assert chip.states[place] == 0


def test_devices_are_those_of_parameters_buffers_and_what_is_given() -> None:
    model = Spread("cpu", "cuda:1")
    model.register_buffer("kept", torch.ones(1))
    assert devices_of(model, torch.device("xpu:0"), [torch.ones(1)]) == [torch.device("xpu:0"), torch.device("cuda:1")]
    assert devices_of(nn.Linear(2, 2, device="meta"), CPU) == []


def test_a_replay_puts_back_what_a_second_device_drew(monkeypatch: pytest.MonkeyPatch, chips: dict[str, Any]) -> None:
    monkeypatch.setattr(guard, "devices_of", lambda *arguments: [torch.device("cuda:1")])
    model = nn.Linear(2, 2)
    with guard.untouched(model, CPU):
        chips["cuda"].states["cuda:1"] = 5
    assert chips["cuda"].states["cuda:1"] == 0
    assert random_states.devices_of(model, CPU) == []
