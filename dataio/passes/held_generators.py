"""Random generators that a sampler of the user's holds: index lists drawn early move them, and an early end shows.

| held by | kinds |
|---|---|
| the batch sampler, what it draws from, and what these keep in attributes, lists and dicts | torch, numpy, `random` |
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from accel.dataio.dataset.reach import attributes, is_code

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DEPTH, _MOST, _LOOKED = 5, 256, 64


def held_generators(sampler: Any) -> list[Any]:
    """Return the generators that a sampler holds; what is indexed, as a dataset is, isn't looked into.

    Example:
        >>> class Shuffled:
        ...     def __init__(self): self.random = random.Random(0)
        >>> len(held_generators(Shuffled()))
        1
    """
    waiting, seen, held = deque([(sampler, 0)]), set[int](), []
    while waiting and len(seen) < _MOST:
        thing, depth = waiting.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, _KINDS):
            if not isinstance(thing, random.SystemRandom):
                held.append(thing)
        elif depth < _DEPTH:
            waiting.extend((part, depth + 1) for part in _parts(thing))
    return held


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, dict):
        return [*thing.values()][:_LOOKED]
    if isinstance(thing, list | tuple):
        return thing[:_LOOKED]
    if is_code(thing) or hasattr(type(thing), "__getitem__"):
        return ()
    return [value for _, value in attributes(thing)]


def read_state(generator: Any) -> Any:
    """Return a generator's state, to be compared by `same_state`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    return generator.getstate()


def write_state(generator: Any, state: Any) -> None:
    """Set a generator to what `read_state` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = pickle.loads(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(pickle.loads(state))
    else:
        generator.setstate(state)


def same_state(state: Any, other: Any) -> bool:
    """Return whether two states are equal."""
    if isinstance(state, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(state, other)
    return type(state) is type(other) and bool(state == other)
