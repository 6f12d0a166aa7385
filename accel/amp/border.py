"""The border of a model in mixed precision: casts on the way in and out, autocast within, the loss scale at both ends.

As hooks, so that copies and pickles of the model work, and a model within `DistributedDataParallel` does.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from accel.amp.loss_scale import DynamicLossScale

_calls = threading.local()


class Call(NamedTuple):
    """A call of a decorated model that is under way."""

    owner: object
    """The border through which it went."""
    dtype: torch.dtype
    autocast: Any
    """The context to leave when it ends, None if there is none."""


def current() -> Call | None:
    """Return the innermost call under way in this thread."""
    stack: list[Call] = getattr(_calls, "stack", [])
    return stack[-1] if stack else None


class Border:
    """Hooks of a decorated model.

    Args:
        dtype: of the model's weights, or of autocast.
        scale: multiplies the gradients of what leaves the model; None for no scale.
        autocast: whether the model's calls run under autocast; else its inputs are cast.
    """

    def __init__(self, dtype: torch.dtype, scale: DynamicLossScale | None, autocast: bool) -> None:
        self._dtype, self._scale, self._autocast = dtype, scale, autocast
        self.decoration: Any = None
        """What to undo together with it; a copy has none."""
        self.on_call: list[Callable[[nn.Module], None]] = []
        """Called when a call of the model begins; a copy has none."""

    @property
    def loss_scale(self) -> DynamicLossScale | None:
        """What multiplies the gradients of the model's outputs; None if nothing does."""
        return self._scale

    @property
    def is_capturable(self) -> bool:
        """True if the hooks compute with tensors only: a loss scale notes what comes through it."""
        return self._scale is None

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is not what the optimizer trains: its gradients are not scaled.
        return type(self), (self._dtype, None, self._autocast)

    def register(self, model: nn.Module) -> list[RemovableHandle]:
        """Put the hooks on a model, and return what takes them off."""
        return [
            model.register_forward_pre_hook(self.enter, with_kwargs=True),
            model.register_forward_hook(self.leave, always_call=True),
        ]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast what goes in."""
        for listener in self.on_call:
            listener(module)
        context = None
        if self._autocast:
            device = next((p.device.type for p in module.parameters()), "cpu")
            context = torch.autocast(device, dtype=self._dtype)
            context.__enter__()  # type: ignore[no-untyped-call]
        if not hasattr(_calls, "stack"):
            _calls.stack = []
        _calls.stack.append(Call(self, self._dtype, context))  # `leave` takes it away, also where the call fails
        into = None if self._autocast else self._dtype
        result: tuple[Any, Any] = mapped(lambda tensor: self._inwards(tensor, into), (args, kwargs))
        return result

    def _inwards(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        if self._scale is not None and tensor.requires_grad and torch.is_grad_enabled():
            tensor = self._scale.divide(tensor)
        return tensor if dtype is None else tensor.to(dtype)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Cast what comes out to float32."""
        call = current()
        if call is None or call.owner is not self:  # it failed in a hook before `enter`
            return output
        _calls.stack.pop()
        if call.autocast is not None:
            call.autocast.__exit__(None, None, None)
            # Within autocast(enabled=False) of the loop's own torch keeps the casts of weights past the next update.
            torch.clear_autocast_cache()
        return mapped(self._outwards, output)

    def _outwards(self, tensor: Tensor) -> Tensor:
        dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
        if self._scale is not None and tensor.requires_grad and torch.is_grad_enabled():
            return self._scale.multiply(tensor, dtype)
        return tensor.to(dtype)


class Float32Island:
    """Hooks of a module that stays in float32 within a 16-bit model.

    Args:
        dtype: of the model around it.
    """

    is_capturable = True

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def register(self, module: nn.Module) -> list[RemovableHandle]:
        """Put the hooks on a module, and return what takes them off."""
        return [
            module.register_forward_pre_hook(self.enter, with_kwargs=True),
            module.register_forward_hook(self.leave),
        ]

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast what goes in to float32."""
        result: tuple[Any, Any] = mapped(lambda tensor: tensor.float(), (args, kwargs))
        return result

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Cast what comes out to the dtype around it."""
        return mapped(lambda tensor: tensor.to(self._dtype), output)


def border_of(model: nn.Module) -> Border | None:
    """Return the border of a decorated model, or of a copy of one; None if it has none."""
    owners = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, Border)), None)


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a structure with a function applied to its floating-point tensors; what it can't look into stays."""

    def leaf(part: Any) -> Any:
        if isinstance(part, Tensor):
            return function(part) if part.is_floating_point() else part
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            fields = [field.name for field in dataclasses.fields(part) if field.init]
            return dataclasses.replace(part, **{name: mapped(function, getattr(part, name)) for name in fields})
        return part

    return pytree.tree_map(leaf, value)
