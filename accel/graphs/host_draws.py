"""Random numbers that the host draws while a function is recorded: each replay would go on with the same ones."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from accel.errors import AccelError

_T = TypeVar("_T")


class HostDraws(AccelError):
    """A recorded function has drawn random numbers on the host."""


class _Source(NamedTuple):
    """A generator of the host."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    comparable: Callable[[Any], Any]


def without_draws(run: Callable[[], _T], device: torch.device) -> _T:
    """Run, and return the result. Where it fails the host's generators are put back: an eager call draws the same.

    Args:
        run: records a function.
        device: that it is recorded for; torch's generator of another one is the host's.

    Raises:
        HostDraws: if random numbers were drawn on the host. Generators that the function has made are not seen.
    """
    sources = _sources(device)
    before = [source.get() for source in sources]
    try:
        result = run()
        for source, state in zip(sources, before, strict=True):
            if source.comparable(source.get()) != source.comparable(state):
                raise HostDraws(
                    f"it draws random numbers on the host ({source.name}), and each replay would go on with the same "
                    "ones; draw them on the device, or pass them as arguments"
                )
    except Exception:
        for source, state in zip(sources, before, strict=True):
            source.put(state)
        raise
    return result


def _sources(device: torch.device) -> list[_Source]:
    sources = [_Source("random", random.getstate, random.setstate, lambda state: state)]
    if (numpy := sys.modules.get("numpy.random")) is not None:
        sources.append(_Source("numpy.random", numpy.get_state, numpy.set_state, lambda state: repr(_plain(state))))
    if device.type != "cpu":
        sources.append(_Source("torch, on the CPU", torch.get_rng_state, torch.set_rng_state, lambda s: s.tolist()))
    return sources


def _plain(state: Any) -> tuple[Any, ...]:
    kind, keys, *rest = state
    return kind, keys.tolist(), *rest
