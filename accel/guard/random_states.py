"""The random states that a model may draw from: torch on each device, Python, numpy, generators that it is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from accel.dataio.batches import tensors
from accel.dataio.fetching.randomness import Stream, streams
from accel.guard import own_state

_WITHOUT_STATE = {"cpu", "meta"}
"""The CPU's is among the host's streams; a meta tensor draws nothing."""


def devices_of(model: nn.Module, device: torch.device, *given: Any) -> list[torch.device]:
    """Return the devices that a call may draw on: those of parameters, buffers and the tensors that it is given.

    Args:
        model: what is called.
        device: where it is said to live.
        given: the arguments of the call.
    """
    places = [device, *(tensor.device for tensor in (*model.parameters(), *model.buffers(), *tensors(given)))]
    return list(dict.fromkeys(place for place in places if place.type not in _WITHOUT_STATE))


class RandomStates:
    """The present random states.

    Args:
        devices: where the model may draw, beside the host.
        given: the arguments of the call.
    """

    def __init__(self, devices: Iterable[torch.device], *given: Any) -> None:
        self._given = own_state.states_of(own_state.generators_given(*given))
        self._host = [(stream, stream.read()) for stream in streams()]
        self._devices = [
            (module, at, module.get_rng_state(*at)) for module, at in map(_generator_of, devices) if module
        ]

    def drawn_from(self) -> list[Stream]:
        """Return the generators of the host that have been drawn from since."""
        return [stream for stream, state in self._host if stream.read() != state]

    def restore(self) -> None:
        """Restore the states that have changed; the others are not written, since other threads may draw from them."""
        for stream, state in self._host:
            if stream.read() != state:
                stream.write(state)
        for module, at, state in self._devices:
            module.set_rng_state(state, *at)
        own_state.put_back(self._given)


def _generator_of(device: torch.device) -> tuple[Any, tuple[torch.device, ...]]:
    """Return torch's module for a device, None if it has no random state, and what tells it which device is meant."""
    module: Any = torch.get_device_module(device.type)
    if not hasattr(module, "get_rng_state"):
        return None, ()
    return module, () if device.type == "mps" else (device,)  # there is one of these only
