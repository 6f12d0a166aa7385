"""Random numbers that the host draws while a function is recorded: each replay would go on with the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from accel.dataio.fetching.randomness import Stream, streams
from accel.errors import AccelError

_T = TypeVar("_T")
_NAMES = {"python": "random", "numpy": "numpy.random", "torch": "torch, on the CPU"}


class HostDraws(AccelError):
    """A recorded function has drawn random numbers on the host."""


def without_draws(run: Callable[[], _T], device: torch.device) -> _T:
    """Run, and return the result. Where it fails the host's generators are put back: an eager call draws the same.

    Args:
        run: records a function.
        device: that it is recorded for; torch's generator of another one is the host's.

    Raises:
        HostDraws: if random numbers were drawn on the host. Generators that the function has made are not seen.
    """
    before = [(stream, stream.read()) for stream in _of_the_host(device)]
    try:
        result = run()
        for stream, state in before:
            if stream.read() != state:
                raise HostDraws(
                    f"it draws random numbers on the host ({_NAMES[stream.name]}), and each replay would go on with "
                    "the same ones; draw them on the device, or pass them as arguments"
                )
    except BaseException:
        for stream, state in before:
            stream.write(state)
        raise
    return result


def _of_the_host(device: torch.device) -> list[Stream]:
    return [stream for stream in streams() if stream.name != "torch" or device.type != "cpu"]
