"""What an optimizer refuses, each in one sentence, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from accel.errors import InvalidArgument
from accel.kernels.optimizers import DTYPES

_LAYOUT, _DTYPE = attrgetter("layout"), attrgetter("dtype")
_DENSE = {torch.strided}
_DTYPES = frozenset(DTYPES)


def number(
    owner: str, name: str, value: Any, least: float = 0.0, below: float = math.inf, *, above: bool = False
) -> None:
    """Check a hyperparameter, a number or a tensor of one: at least `least`, or `above` it, and `below` another.

    Raises:
        InvalidArgument: if it is something else.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise InvalidArgument(f"{owner}: {name} must be a number or a tensor of one. Found: {list(value.shape)}.")
    if not hasattr(value, "__float__"):  # nor a string, which float() would take
        raise InvalidArgument(f"{owner}: {name} must be a number. Found: {value!r}.")
    try:
        plain = float(value)
    except (TypeError, ValueError):  # an array of several
        raise InvalidArgument(f"{owner}: {name} must be a number. Found: {value!r}.") from None
    if plain < least or plain >= below or math.isnan(plain) or (above and plain == least):
        sign = "larger than" if above else "at least"
        limit = "" if below == math.inf else f" and smaller than {below:g}"
        raise InvalidArgument(f"{owner}: {name} must be {sign} {least:g}{limit}. Found: {plain:g}.")


def options(owner: str, group: Mapping[str, Any]) -> None:
    """Check the options of a parameter group.

    Raises:
        InvalidArgument: if one does not fit.
    """
    for name in ("lr", "eps", "weight_decay"):
        if name in group:
            number(owner, name, group[name])
    for name in ("trust_coefficient", "max_grad_norm"):
        if group.get(name) is not None:
            number(owner, name, group[name], above=True)
    if "betas" in group:
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise InvalidArgument(f"{owner}: betas must be two numbers. Found: {betas!r}.")
        for index in (0, 1):
            number(owner, f"betas[{index}]", betas[index], below=1.0)
        return
    number(owner, "momentum", group["momentum"])
    number(owner, "dampening", group["dampening"], least=-math.inf)
    if group["nesterov"] and (float(group["momentum"]) == 0 or float(group["dampening"]) != 0):
        raise InvalidArgument(
            f"{owner}: Nesterov momentum needs a momentum, and no dampening. "
            f"Found: momentum {float(group['momentum']):g}, dampening {float(group['dampening']):g}."
        )


def listed(param_group: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return a new group, whose parameters are read once if a generator gives them, and these without their names."""
    given = param_group["params"]
    if not isinstance(given, Tensor | set):
        given = list(given)
        param_group = {**param_group, "params": given}
    return param_group, [given] if isinstance(given, Tensor) else [p[1] if isinstance(p, tuple) else p for p in given]


def parameters(owner: str, params: Iterable[Any], device: torch.device | None) -> None:
    """Check the parameters of a new group; what is no tensor is left to torch.

    Raises:
        InvalidArgument: if one can't be updated here, or is not on the device, if there is one.
    """
    for param in params:
        if not isinstance(param, Tensor):
            continue
        device = param.device if device is None else device
        if hasattr(param, "to_local"):
            raise InvalidArgument(
                f"{owner}: parameters must be ordinary tensors. Found: {type(param).__name__}, a part of which is on "
                "other ranks. Use torch.optim with fused=True."
            )
        if param.dtype not in DTYPES:
            raise InvalidArgument(
                f"{owner}: parameters must be float32, float16, bfloat16 or float64. Found: {_name(param.dtype)} "
                f"{list(param.shape)}. Give it to torch.optim in a second optimizer."
            )
        if param.layout is not torch.strided:
            raise InvalidArgument(f"{owner}: parameters must be dense. Found: {param.layout}.")
        if param.device != device:
            raise InvalidArgument(
                f"{owner}: all parameters must be on one device. Found: {device} and {param.device}. "
                "Make an optimizer for each device."
            )
        if _overlaps(param):
            raise InvalidArgument(
                f"{owner}: each element of a parameter must have memory of its own. Found: {list(param.shape)} with "
                f"strides {param.stride()}. Clone it."
            )


def _overlaps(tensor: Tensor) -> bool:
    """Return whether elements share memory: a step along a dimension must go past all that smaller steps reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return tensor.numel() > 0
        reach += (size - 1) * stride
    return False


def gradients(owner: str, grads: Sequence[Tensor]) -> None:
    """Check the gradients of a step.

    Raises:
        InvalidArgument: if one is sparse, or of another kind.
    """
    # Of all at once, without a look at each: this is done at every step.
    if set(map(_LAYOUT, grads)) <= _DENSE and _DTYPES.issuperset(map(_DTYPE, grads)):
        return
    for grad in grads:
        if grad.layout is not torch.strided:
            raise InvalidArgument(
                f"{owner}: gradients must be dense. Found: {grad.layout} {list(grad.shape)}. Make the embedding with "
                "sparse=False, or give its weight to torch.optim.SparseAdam."
            )
        if grad.dtype not in DTYPES:
            raise InvalidArgument(
                f"{owner}: gradients must be float32, float16, bfloat16 or float64. Found: {_name(grad.dtype)}."
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
