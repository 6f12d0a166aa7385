"""The loss scale: it keeps small gradients of float16 from becoming zero, and learns from steps that overflowed.

    scale ← scale · backoff   after `hysteresis` overflows in a row,   scale · growth   after `interval` good steps

It multiplies gradients where they enter the model, at its outputs, and is divided out where they leave it, at weights
and inputs (`casts.py`), so the loop's loss and its gradients stay as they are. It is computed on the device: nothing
waits.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018; the hysteresis is Megatron-LM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accel.errors import InvalidArgument
from accel.profiler import renamed


class DynamicLossScale:
    """A factor on gradients that halves when they overflow, and doubles when they haven't for long.

    Args:
        init_scale: the first scale, a power of two; default 2¹⁶.
        growth_factor: factor after `growth_interval` steps without overflow, ≥ 1; default 2. 1 keeps it from growing.
        backoff_factor: factor after an overflow, in (0, 1]; default 0.5. 1 keeps it from falling.
        growth_interval: steps without overflow before it grows; default 2000.
        min_scale: the smallest scale; default 1.
        max_scale: the largest; default 2²⁴.
        hysteresis: overflows in a row before it falls; default 1.

    Raises:
        InvalidArgument: if a number is out of its range.

    Example:
        >>> scale = DynamicLossScale(init_scale=1024.0, growth_interval=500)
        >>> scale.update(torch.tensor(1.0))
        >>> float(scale.value)
        512.0
    """

    @renamed.arguments(
        **{"initial": "init_scale", "growth": "growth_factor", "backoff": "backoff_factor"},
        **{"interval": "growth_interval", "least": "min_scale", "most": "max_scale"},
    )
    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        hysteresis: int = 1,
    ) -> None:
        if not 0 < min_scale <= init_scale <= max_scale:
            raise InvalidArgument(
                "0 < min_scale <= init_scale <= max_scale must hold. Found: "
                f"{min_scale:g}, {init_scale:g}, {max_scale:g}."
            )
        if growth_factor < 1 or not 0 < backoff_factor <= 1:
            raise InvalidArgument(
                "growth_factor must be at least 1 and backoff_factor in (0, 1]. Found: "
                f"{growth_factor:g}, {backoff_factor:g}."
            )
        if growth_interval < 1 or hysteresis < 1:
            raise InvalidArgument(
                f"growth_interval and hysteresis must be at least 1. Found: {growth_interval}, {hysteresis}."
            )
        self._growth, self._backoff, self._interval = growth_factor, backoff_factor, growth_interval
        self._least, self._most, self._hysteresis = min_scale, max_scale, hysteresis
        self.value = torch.tensor(float(init_scale))
        """The scale now, float32 of no dimension, on the model's device."""
        self._good_steps = torch.tensor(0)
        self._overflows_left = torch.tensor(hysteresis)
        # On the device, as all that decides: a captured step notes its overflow where no Python runs.
        self._noted, self._overflow = torch.tensor(False), torch.tensor(False)
        self._may_be_noted = False

    def to(self, device: torch.device) -> None:
        """Move it to a device."""
        for name in ("value", "_good_steps", "_overflows_left", "_noted", "_overflow"):
            setattr(self, name, getattr(self, name).to(device))

    @torch.no_grad()
    def of_call(self) -> Tensor:
        """Take the steps into account that were noted, and return the scale of a call of the model that begins.

        A copy: the call's gradients are multiplied and divided by the same number, whatever is noted until then.
        """
        # A captured call is followed by steps that no Python of it sees.
        if self._may_be_noted or (self.value.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.settle()
        return self.value.clone()

    @torch.no_grad()
    def note(self, overflow: Tensor) -> None:
        """Note whether a step overflowed, != 0 if so; taken into account when the next call of the model begins.

        Several are taken for one, as those of several optimizers in one step of the loop.
        """
        self._overflow.logical_or_(overflow.detach().to(self.value.device).reshape(()) != 0)
        self._noted.fill_(True)
        self._may_be_noted = True

    @torch.no_grad()
    def update(self, overflow: Tensor) -> None:
        """Take a step into account.

        Args:
            overflow: of one element; != 0 if its gradients were not finite.
        """
        self._become(self._after(overflow.to(self.value.device).reshape(()) != 0))

    def _after(self, bad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scale, good steps and overflows left after a step."""
        left = torch.where(bad, self._overflows_left - 1, self._hysteresis)
        good_steps = torch.where(bad, 0, self._good_steps + 1)
        grows = good_steps >= self._interval
        factor = torch.where(bad & (left <= 0), self._backoff, torch.where(grows, self._growth, 1.0))
        return (self.value * factor).clamp(self._least, self._most), torch.where(grows, 0, good_steps), left

    def _become(self, values: tuple[Tensor, Tensor, Tensor]) -> None:
        # In place: optimizers and captured graphs hold these tensors.
        for own, value in zip((self.value, self._good_steps, self._overflows_left), values, strict=True):
            own.copy_(value)

    def _settled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return scale, good steps and overflows left with what was noted taken into account, if anything was."""
        before = self.value, self._good_steps, self._overflows_left
        after = self._after(self._overflow)
        scale, good_steps, left = (torch.where(self._noted, b, a) for a, b in zip(before, after, strict=True))
        return scale, good_steps, left

    @torch.no_grad()
    def settle(self) -> None:
        """Take the steps into account that were noted."""
        self._become(self._settled())
        self._forget()

    def _forget(self) -> None:
        self._noted.fill_(False)
        self._overflow.fill_(False)
        self._may_be_noted = False

    def state_dict(self) -> dict[str, float]:
        """Return what it has learnt, as numbers; this waits for the device, and changes nothing."""
        scale, good_steps, left = self._settled()
        return {"scale": float(scale), "good_steps": int(good_steps), "overflows_left": int(left)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            InvalidArgument: if it is something else; nothing has been changed then.
        """
        try:
            scale, good, left = float(state["scale"]), int(state["good_steps"]), int(state["overflows_left"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(f"a loss scale's state has three numbers. Found: {state!r} ({error}).") from None
        if not 0 < scale < float("inf") or good < 0:
            raise InvalidArgument(f"a loss scale must be finite and > 0, and its counts >= 0. Found: {state!r}.")
        self.value.fill_(scale)
        self._good_steps.fill_(good)
        self._overflows_left.fill_(left)
        self._forget()
