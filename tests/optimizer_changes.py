"""What a loop may change of its weights, of their states and of its optimizer's options between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Change = Callable[[list[nn.Parameter], Any], None]
"""Takes the parameters, a list that it may change too, and their optimizer."""


def turned(tensor: Tensor) -> Tensor:
    """Return a copy with its dimensions in another order in memory."""
    order = tuple(range(tensor.dim()))[::-1]
    return tensor.permute(order).contiguous().permute(order) if tensor.is_contiguous() else tensor.contiguous()


def weights(to: Callable[[Tensor], Tensor]) -> Change:
    """Put something else in the place of each weight's data."""

    def change(parameters: list[nn.Parameter], optimizer: Any) -> None:
        for p in parameters:
            p.data = to(p.data)

    return change


def states_turned(parameters: list[nn.Parameter], optimizer: Any) -> None:
    for state in optimizer.state.values():
        state |= {name: turned(value) for name, value in state.items()}


def states_turned_in_place(parameters: list[nn.Parameter], optimizer: Any) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.data = turned(value.data)


def options(**given: Any) -> Change:
    """Set options of all groups."""

    def change(parameters: list[nn.Parameter], optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group |= given

    return change


def another_group(parameters: list[nn.Parameter], optimizer: Any) -> None:
    parameters.append(nn.Parameter(torch.ones(5, 4).T))
    optimizer.add_param_group({"params": parameters[-1:]})


def another_parameter(parameters: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state.pop(parameters[0], None)  # a state that is saved may name parameters of groups only
    parameters[0] = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(5, 4).T)


CHANGES: dict[str, Change] = {
    "weights turned": weights(turned),
    "weights with gaps": weights(lambda data: torch.stack((data, data), -1)[..., 0]),
    "states turned": states_turned,
    "states turned in place": states_turned_in_place,
    "float64": weights(Tensor.double),
    "bfloat16": weights(Tensor.bfloat16),
    "float16": weights(Tensor.half),
    "a rate that is a tensor": options(lr=torch.tensor(0.02)),
    "a rate": options(lr=0.02),
    "another group": another_group,
    "another parameter": another_parameter,
}
"""Those that any optimizer goes on after."""
