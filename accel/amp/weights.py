"""Which of a model's weights become 16-bit, and the float32 values that they had."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accel.amp.border import Float32Island
from accel.errors import InvalidArgument

# Its operators take 16-bit images beside float32 weights and statistics.
MIXED = nn.modules.batchnorm._BatchNorm
_HALF = frozenset({torch.float16, torch.bfloat16})
_KNOWN = frozenset({torch.float32, torch.float16, torch.bfloat16})


def kept_modules(model: nn.Module, keep: Collection[type[nn.Module] | str]) -> list[nn.Module]:
    """Return the modules that stay in float32, without those inside of them.

    Args:
        model: to look through.
        keep: classes and names of modules, each with all that is inside.

    Raises:
        InvalidArgument: if the model has no module of such a name.
    """
    names = {entry for entry in keep if isinstance(entry, str)}
    types = tuple(entry for entry in keep if not isinstance(entry, str))
    modules = dict(model.named_modules())
    if unknown := sorted(names - set(modules)):
        raise InvalidArgument(f"keep_fp32 must name modules of the model. Found: {unknown[0]!r}.")
    kept: list[tuple[str, nn.Module]] = []
    for name, module in modules.items():
        within = any(name.startswith(f"{outer}.") or outer == "" for outer, _ in kept)
        if not within and (name in names or (types and isinstance(module, types))):
            kept.append((name, module))
    return [module for _, module in kept]


def check(models: Iterable[nn.Module], kept: Iterable[nn.Module]) -> None:
    """Raise InvalidArgument if a weight can't be cast: of another dtype, or in two modules one of which is kept."""
    inside = {id(module) for outer in kept for module in outer.modules()}
    owners: dict[Tensor, bool] = {}
    for model in models:
        for name, module in model.named_modules():
            for own, weight in module.named_parameters(name, recurse=False):
                if weight.is_floating_point() and weight.dtype not in _KNOWN:
                    raise InvalidArgument(f"weights must be float32, float16 or bfloat16. Found: {own} {weight.dtype}.")
                if owners.setdefault(weight, id(module) in inside) != (id(module) in inside):
                    raise InvalidArgument(f"{own} is in a module that keep_fp32 names and in another. Name both.")


class CastBuffer(NamedTuple):
    """A buffer that was cast."""

    module: nn.Module
    name: str
    before: Tensor

    def undo(self) -> None:
        """Put the buffer back; one that was written to since is float32 as it is now."""
        now = self.module._buffers[self.name]
        if now is None or now.dtype not in _HALF:
            return
        unchanged = now.shape == self.before.shape and torch.equal(now, self.before.to(now.device, now.dtype))
        self.module._buffers[self.name] = self.before.to(now.device) if unchanged else now.to(self.before.dtype)


class Casts(NamedTuple):
    """What was cast in a model."""

    values: dict[Tensor, Tensor]
    """16-bit parameter → the float32 value that it had."""
    dtypes: dict[Tensor, torch.dtype]
    """Parameter → the dtype that it had."""
    buffers: list[CastBuffer]
    handles: list[RemovableHandle]
    """They take off the hooks of modules that stay in float32."""


@torch.no_grad()
def cast(model: nn.Module, dtype: torch.dtype, kept: Collection[nn.Module]) -> Casts:
    """Cast a model's weights in place, and return what they were.

    Args:
        model: whose floating-point parameters and buffers are cast.
        dtype: float16 or bfloat16.
        kept: modules that stay in float32.
    """
    inside = {id(module) for outer in kept for module in outer.modules()}
    casts = Casts({}, {}, [], [])
    for module in model.modules():
        target = torch.float32 if id(module) in inside else dtype
        for weight in _floating(module._parameters.values()):
            if weight.dtype == target:
                if target is dtype:
                    casts.values.setdefault(weight, weight.detach().float())
                continue
            if target is dtype:
                casts.values[weight] = weight.detach().to(torch.float32, copy=True)
            casts.dtypes[weight] = weight.dtype
            weight.data = weight.data.to(target)
            weight.grad = None if weight.grad is None else weight.grad.to(target)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype in _KNOWN:
                if buffer.dtype != target:
                    casts.buffers.append(CastBuffer(module, name, buffer))
                module._buffers[name] = buffer.to(target)
        _flatten(module)
    for module in kept:
        if not isinstance(module, MIXED):
            casts.handles.extend(Float32Island(dtype).register(module))
    return casts


@torch.no_grad()
def uncast(model: nn.Module, casts: Casts, masters: Mapping[Tensor, Tensor]) -> None:
    """Give weights the dtype back that they had.

    Args:
        model: the same as for `cast`.
        casts: what that returned.
        masters: 16-bit parameter → its master weights, for those that have some.
    """
    for weight, dtype in casts.dtypes.items():
        if weight.dtype in _HALF or dtype in _HALF:
            master = masters.get(weight)
            weight.data = (weight.data if master is None else master.to(weight.device)).to(dtype)
            weight.grad = None if weight.grad is None else weight.grad.to(dtype)
    for buffer in casts.buffers:
        buffer.undo()
    for handle in casts.handles:
        handle.remove()
    for module in model.modules():
        _flatten(module)


def _flatten(module: nn.Module) -> None:
    """Put the weights of a recurrent layer together again, as its kernels want them."""
    flatten: Any = getattr(module, "flatten_parameters", None)
    if flatten is not None:
        flatten()


def _floating(tensors: Iterable[Tensor | None]) -> Iterator[Tensor]:
    return (tensor for tensor in tensors if tensor is not None and tensor.is_floating_point())
