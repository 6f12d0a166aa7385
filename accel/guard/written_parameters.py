"""Parameters that a model's own call writes to, such as a codebook that is a moving average, or a momentum encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from accel.guard.snapshot import MOST_BYTES, has_plain_memory

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def without_gradient(model: nn.Module) -> list[Tensor]:
    """Return the parameters that no gradient has come to, as none does to a codebook that calls write to.

    The smallest first, and as many as copies are made of: most of them may be a frozen model.

    Args:
        model: after a backward pass, before its gradients are cleared.
    """
    small, bytes_left = list[Tensor](), MOST_BYTES
    plain = (p for p in model.parameters() if p.grad is None and has_plain_memory(p))
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
    if not has_plain_memory(parameter):
        return torch.zeros((), dtype=torch.int64)
    data = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
    aligned = data.nbytes % 8 == 0 and data.storage_offset() * data.element_size() % 8 == 0
    if aligned and data.is_contiguous():
        return data.view(-1).view(torch.int64).sum()  # other integers would be copied to these first
    return data.view(_INTEGERS[data.element_size()]).sum(dtype=torch.int64)
