"""State that only some models have: random generators of their own, and parameters that their own call writes to."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from accel.dataio.batches import leaves
from accel.guard.nested_state import MOST_BYTES

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

States = list[tuple[Any, Any]]
"""Generators with their states."""


def generators_of(model: nn.Module) -> list[Any]:
    """Return the random generators that stand among the attributes of modules, also in lists, tuples and dicts."""
    kinds = _kinds()
    values = [value for module in model.modules() for each in vars(module).values() for value in _values(each)]
    return list({id(each): each for each in values if _is_generator(each, kinds)}.values())


def generators_given(*arguments: Any) -> list[Any]:
    """Return the random generators among the arguments of a call."""
    kinds = _kinds()
    return [leaf for leaf in leaves(arguments) if _is_generator(leaf, kinds)]


def _values(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def _is_generator(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy.random")
    others = () if numpy is None else (numpy.Generator, numpy.RandomState)
    return (torch.Generator, random.Random, *others)


def states_of(generators: Iterable[Any]) -> States:
    """Return the generators with their present states."""
    return [(each, _read(each)) for each in generators]


def put_back(states: States) -> None:
    """Put generators back into the states that they were in."""
    for generator, state in states:
        _write(generator, state)


def _read(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state(legacy=False)


def _write(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def without_gradient(model: nn.Module) -> list[Tensor]:
    """Return the parameters that no gradient has come to, as none does to a codebook that calls write to.

    The smallest first, and as many as copies are made of: most of them may be a frozen model.

    Args:
        model: after a backward pass, before its gradients are cleared.
    """
    small, bytes_left = list[Tensor](), MOST_BYTES
    plain = (p for p in model.parameters() if p.grad is None and _has_plain_memory(p))
    for parameter in sorted(plain, key=lambda each: each.nbytes):
        bytes_left -= parameter.nbytes
        if bytes_left < 0:
            break
        small.append(parameter)
    return small


class WrittenParameters:
    """Finds the parameters that a call of the model writes to, as a codebook that is a moving average is written.

    By a sum over the bits: `.data` is written past the version counter.

    Args:
        model: whose parameters are looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._before = self._sums()

    def found(self) -> list[Tensor]:
        """Return those that have been written to since this was made."""
        pairs = zip(self._parameters, self._before, self._sums(), strict=True)
        return [parameter for parameter, before, now in pairs if before != now]

    def _sums(self) -> list[int]:
        """Read all sums at once: on a GPU the host waits once."""
        sums = [_sum_of_bits(parameter) for parameter in self._parameters]
        by_device: dict[torch.device, list[Tensor]] = {}
        for each in sums:
            by_device.setdefault(each.device, []).append(each)
        values = {device: iter(torch.stack(group).tolist()) for device, group in by_device.items()}
        return [next(values[each.device]) for each in sums]


def _sum_of_bits(parameter: Tensor) -> Tensor:
    """Return the sum of a parameter's elements, taken as integers; 0 of one whose memory is not plain."""
    if not _has_plain_memory(parameter):
        return torch.zeros((), dtype=torch.int64)
    data = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
    aligned = data.nbytes % 8 == 0 and data.storage_offset() * data.element_size() % 8 == 0
    if aligned and data.is_contiguous():
        return data.view(-1).view(torch.int64).sum()  # other integers would be copied to these first
    return data.view(_INTEGERS[data.element_size()]).sum(dtype=torch.int64)


def _has_plain_memory(parameter: Tensor) -> bool:
    plain = type(parameter) in (Tensor, nn.Parameter) and parameter.layout == torch.strided
    return plain and not (parameter.is_quantized or parameter.is_meta)
