"""The global random states of Python, torch (CPU) and numpy: read, seeded, put back."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_state() -> tuple[Any, ...]:
    """Return the global random states, so that two of them can be compared."""
    numpy = sys.modules.get("numpy")
    drawn: tuple[Any, ...] = ()
    if numpy is not None:
        _, keys, position, *rest = numpy.random.get_state()
        drawn = (keys.tobytes(), position, *rest)
    return (torch.get_rng_state().numpy().tobytes(), random.getstate(), drawn)


def global_states() -> tuple[Any, ...]:
    """Return the global random states for `restore_states`."""
    numpy = sys.modules.get("numpy")
    return (torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state())


def restore_states(states: tuple[Any, ...]) -> None:
    """Put back what `global_states` returned."""
    of_torch, of_python, of_numpy = states
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def seed_everything(seed: int) -> None:
    """Seed Python, torch (CPU) and, if it is loaded, numpy."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def derived_seed(base_seed: int, number: int) -> int:
    """Return the seed of batch `number` of an epoch: splitmix64 of both, 0 to 2**63 - 1."""
    z = (base_seed + (number + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1
