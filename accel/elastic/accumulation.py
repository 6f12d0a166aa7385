"""Several of the loop's steps become one of its optimizer, which gets the mean of their gradients.

    batch        1             2             …    n
    backward     f₁·g₁ kept    f₂·g₂ kept         fₙ·gₙ + what was kept
    step()       left out      left out           the optimizer's own

The loop stays as it is: it clears gradients, calls `backward` and `step` for each batch. What a backward pass brings is
kept when it ends, so that clearing and clipping change nothing of it; it is there again when the last backward pass
begins, so that clipping and DistributedDataParallel see the gradient of the whole. Each batch weighs as many samples as
it has.

Batches are counted by their backward passes, which all ranks make alike; a rank may leave a `step` out by itself.

PyTorch leaves all this to the loop (`no_sync`, and a step every n batches). AdaptDL takes the place of `zero_grad` and
`step` too, and a loop that clips its gradients clips partial sums there.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accel.amp.border import border_of
from accel.run import backward

Step = Callable[..., Any]

_LOOKED_AT = 8
"""Steps in which it is looked for what can't be accumulated."""
_FRAMES = 10
"""Callers of a step among which a GradScaler is looked for: schedulers wrap it, too."""
_SCALES = "its GradScaler may change its scale between two batches"
_SCALERS = {torch.amp.GradScaler.step.__code__, torch.amp.GradScaler._maybe_opt_step.__code__}
_AHEAD = 2
"""Most batches that are taken to be delivered and not trained on."""


class GradientAccumulation:
    """Accumulate the gradients of a loop that does not.

    A step that is left out returns None and calls none of the optimizer's hooks, as if it had not been called.

    Args:
        model: that the loop trains, perhaps in DistributedDataParallel.
        optimizers: that update it.
        scaler: the loop's GradScaler, if it has one that is known.

    Attributes:
        refusal: why gradients can't be accumulated here; "" while nothing speaks against it. It is for the caller to
            begin no more steps of several batches then, on all ranks at once.

    Example:
        >>> weight = nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> accumulation = GradientAccumulation(nn.ParameterList([weight]), [optimizer])
        >>> for batch in (1.0, 3.0):
        ...     accumulation.begin_batch([1, 1])  # two batches of one sample
        ...     optimizer.zero_grad()
        ...     (weight * batch).sum().backward()
        ...     optimizer.step()
        >>> weight.item()
        -2.0
        >>> accumulation.close()
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], scaler: torch.amp.GradScaler | None = None
    ) -> None:
        self._syncs = model if isinstance(model, DistributedDataParallel) else None
        self.refusal = _refusal(model, optimizers, scaler)
        self._sizes: list[int] = []
        """Samples of each batch of the step under way, over all ranks; none until it has begun."""
        self._planned: list[int] = []
        """The same of a step that begins with the batch delivered last."""
        self._taken = 0
        """Batches of it that have ended."""
        self._kept: dict[Tensor, Tensor] = {}
        """Of each parameter, the weighted sum of what its batches have brought."""
        self._pending = 0
        """Batches that were delivered and have not ended."""
        self._passes = 0
        """Backward passes of the batch in hand that have reached the parameters."""
        self._before: list[tuple[int, int]] = []
        self._after: list[tuple[int, int]] = []
        """What the gradients were before the last backward pass, and after it."""
        self._is_brought = False
        """What was kept is among the gradients of the last batch."""
        self._is_delivered = False
        """A batch was delivered since the last backward pass."""
        self._fetches_early = False
        """The loop asks for the next batch between a backward pass and its step."""
        self._alone_with = 0
        """Batches of each step, once nobody says of how many one is; 0 before."""
        self._looked_at = 0
        self._holds_sync = self._is_stepping = False
        self._gate: Any = None
        if self.refusal:
            return
        (self._optimizer,) = optimizers
        if (earlier := _AT_WORK.get(self._optimizer)) is not None:
            earlier.close()
        _AT_WORK[self._optimizer] = self
        self._replaced: Any = self._optimizer.__dict__.get("step")
        self._gate = _wrapped(self._optimizer, self._step)
        self._optimizer.step = self._gate  # type: ignore[method-assign]
        self._hook = self._optimizer.register_step_post_hook(self._stepped)
        backward.listen(self)

    @property
    def is_open(self) -> bool:
        """True between two batches of one step."""
        return self._taken > 0

    @property
    def batches(self) -> int:
        """Batches of the step under way, at least one."""
        return max(1, len(self._sizes))

    @property
    def samples(self) -> int:
        """Samples of the step under way, over all ranks; 0 if none has begun."""
        return sum(self._sizes)

    def begin_batch(self, sizes: Sequence[int]) -> None:
        """A batch has been delivered; if a step begins with it, that is of so many batches.

        Args:
            sizes: samples of each batch of the step, over all ranks, the one in hand first. One of them makes the step
                the optimizer's own, bit for bit.
        """
        is_known = len(self._sizes) > 1 or self._looked_at >= _LOOKED_AT
        if self._passes and is_known and not self._fetches_early:
            self._pass_over()
        self._pending, self._is_delivered = min(self._pending + 1, _AHEAD), True
        self._planned = [*sizes]
        if not self.is_open and not self._passes:
            self._sizes = self._planned
        self._set_sync()

    def drop(self) -> None:
        """Forget the step under way: the loop has left its pass over the data."""
        self._sizes, self._kept, self._taken, self._pending = [], {}, 0, 0
        self._end_batch()
        self._set_sync()

    def go_on(self, batches: int) -> None:
        """Take so many batches for a step from the next one on, without being told of them.

        Args:
            batches: at least 1.
        """
        self._alone_with = batches
        if not self._sizes:
            self._sizes = [1] * batches
            self._set_sync()

    def close(self) -> None:
        """Accumulate no more; what a step under way has of batches before is left out."""
        self.drop()
        self._leave()

    # -- the backward pass (backward.BackwardListener) -----------------------------------------------------------------

    def backward_begins(self, roots: list[Tensor]) -> None:
        """With the last batch come those before it, so that what is exchanged is the whole."""
        if len(self._sizes) < 2 or not self._has_batch:
            return
        if not self._is_last:
            self._keep(-self._share if self._passes else 0.0)  # it comes again, with what this pass adds
        elif self._is_brought and not self._is_cleared():
            self._multiply(1 / self._share)  # as it was before the pass that ended
        else:
            self._bring_back()
            self._is_brought = True
        self._before = self._state()

    def backward_ended(self, roots: list[Tensor]) -> None:
        """Let the batch weigh what it should."""
        if not self._has_batch:
            return  # after the step of its batch: another model's, which goes through this one
        self._is_delivered = False
        if len(self._sizes) < 2:
            self._passes += 1
            return
        self._passes += self._state() != self._before  # else it was another model's
        if self._is_last:
            self._multiply(self._share)
            self._after = self._state()
        elif self._passes:
            self._keep(self._share)

    # -- a step --------------------------------------------------------------------------------------------------------

    @property
    def _has_batch(self) -> bool:
        return self._pending > 0 or self._alone_with > 0

    @property
    def _is_last(self) -> bool:
        return self._taken + 1 >= len(self._sizes)

    @property
    def _share(self) -> float:
        """Of the batch in hand, of the samples of the step."""
        return self._sizes[self._taken] / self.samples

    def _step(self, own: Step, *args: Any, **kwargs: Any) -> Any:
        if self._looked_at < _LOOKED_AT or len(self._sizes) > 1:
            self._look(args, kwargs)
        if not self._is_last:
            if not self._passes:  # gradients that the loop has set without a backward pass
                self._keep(self._share)
            self._taken += 1
            self._end_batch()
            self._set_sync()
            return None
        if len(self._sizes) > 1 and not self._passes and not (self._is_brought and self._state() == self._after):
            self._bring_back()
            self._multiply(self._share)
        try:
            self._is_stepping = True
            return own(*args, **kwargs)
        finally:
            self._is_stepping = False
            self._end_step()

    def _end_step(self) -> None:
        self._end_batch()
        self._taken = 0
        self._sizes, self._kept = self._planned if self._pending else [1] * self._alone_with, {}
        self._set_sync()
        if self.refusal and self._syncs is None:
            self._leave()

    def _end_batch(self) -> None:
        self._passes, self._is_brought = 0, False
        self._pending = max(0, self._pending - 1)

    def _pass_over(self) -> None:
        """End a batch whose step the loop has left out; with a step's last one it has left out the whole step."""
        if self._is_last:
            self._taken, self._kept = 0, {}
        else:
            self._taken += 1
        self._end_batch()

    def _stepped(self, *_: Any) -> None:
        """Refuse if the optimizer has stepped without being asked through its attribute."""
        if not self._is_stepping:
            self.refusal = self.refusal or "it has got hold of the optimizer's own step, which can't be left out"

    @torch.no_grad()
    def _keep(self, share: float) -> None:
        """Add so many times the gradients to what was kept."""
        brought = {p: p.grad for p in self._parameters() if p.grad is not None} if share else {}
        known = [p for p in brought if p in self._kept]
        if known:
            torch._foreach_add_([self._kept[p] for p in known], [brought[p] for p in known], alpha=share)
        self._kept |= {p: gradient * share for p, gradient in brought.items() if p not in self._kept}

    @torch.no_grad()
    def _bring_back(self) -> None:
        """Put what was kept where the last batch's gradient adds to it; the sum is multiplied by that one's share."""
        for parameter, kept in self._kept.items():
            if parameter.grad is None:
                parameter.grad = kept / self._share
            else:
                parameter.grad.add_(kept, alpha=1 / self._share)

    @torch.no_grad()
    def _multiply(self, factor: float) -> None:
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def _is_cleared(self) -> bool:
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        return not gradients or all(float(norm) == 0 for norm in torch._foreach_norm(gradients))

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _state(self) -> list[tuple[int, int]]:
        """Return by what a change of the gradients is seen."""
        return [(id(p.grad), p.grad._version) for p in self._parameters() if p.grad is not None]

    def _set_sync(self) -> None:
        """Let DistributedDataParallel exchange gradients in a step's last batch only; a loop's `no_sync` is its own."""
        if self._syncs is not None and (len(self._sizes) > 1 or self._holds_sync):
            self._syncs.require_backward_grad_sync = self._is_last
            self._holds_sync = not self._is_last

    # -- what can't be accumulated -------------------------------------------------------------------------------------

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._looked_at += 1
        self._fetches_early = self._fetches_early or (self._passes > 0 and self._is_delivered)
        self.refusal = self.refusal or self._seen(args, kwargs)

    def _seen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if any(callable(each) for each in (*args, *kwargs.values())):
            return "its step takes a closure, which makes a backward pass of its own"
        if not self._has_batch:
            return "it takes several steps with one batch"
        if _is_called_by_scaler():
            return _SCALES
        return ""

    def _leave(self) -> None:
        self._alone_with = 0
        if self._gate is None:
            return
        backward.forget(self)
        self._hook.remove()
        if _AT_WORK.get(self._optimizer) is self:
            del _AT_WORK[self._optimizer]
        if self._optimizer.__dict__.get("step") is self._gate:
            if self._replaced is None:
                del self._optimizer.step
            else:
                self._optimizer.step = self._replaced  # type: ignore[method-assign]
        self._gate = None


_AT_WORK: weakref.WeakKeyDictionary[Optimizer, GradientAccumulation] = weakref.WeakKeyDictionary()
"""Whose step has been put in its place: another one of the same optimizer takes over."""


def _wrapped(optimizer: Optimizer, around: Callable[..., Any]) -> Any:
    """Return a method that calls `around` with the optimizer's own step; schedulers wrap it as they would that."""
    own = optimizer.step

    @functools.wraps(own)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return own(*args, **kwargs)  # which is then refused
        return around(own, *args, **kwargs)

    return types.MethodType(step, optimizer)


def _refusal(model: nn.Module, optimizers: Sequence[Optimizer], scaler: torch.amp.GradScaler | None) -> str:
    if scaler is not None and scaler.is_enabled():
        return _SCALES
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if len(optimizers) != 1:
        return f"it has {len(optimizers)} optimizers"
    if border_of(model) is not None or border_of(inner) is not None:
        return "accel.amp changes the loss scale between two batches"
    config = getattr(model, "_join_config", None)
    if config is not None and config.enable:
        return "within join() ranks may have ended before others"
    return ""


def _is_called_by_scaler() -> bool:
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code in _SCALERS:
            return bool(frame.f_locals["self"].is_enabled())
    return False
