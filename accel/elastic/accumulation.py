"""Several of the loop's steps become one of its optimizer, which gets the mean of their gradients.

    batch        1                     2                     …    n
    backward     g₁                    g₂                         fₙ·gₙ + what was kept
    step()       f₁·g₁ kept, left out  f₂·g₂ kept, left out       the optimizer's own

The loop stays as it is: it clears gradients, calls `backward` and `step` for each batch. What a step that is left out
would have used is kept, so that clearing loses nothing; it is there again when the last backward pass begins, so that
clipping and DistributedDataParallel see the gradient of the whole. Each batch weighs as many samples as it has.

PyTorch leaves this to the loop (`no_sync`, and a step every n batches). AdaptDL takes the place of `zero_grad` and
`step` too, and a loop that clips its gradients clips partial sums there.
"""

from __future__ import annotations

import functools
import sys
import types
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
_FRAMES = 6
"""Callers of a step among which a GradScaler is looked for: schedulers wrap it, too."""
_SCALES = "its GradScaler may change its scale between two batches"
_SCALERS = {torch.amp.GradScaler.step.__code__, torch.amp.GradScaler._maybe_opt_step.__code__}


class GradientAccumulation:
    """Accumulate the gradients of a loop that does not.

    A step that is left out returns None and calls none of the optimizer's hooks, as if it had not been called.

    Args:
        model: that the loop trains, perhaps in DistributedDataParallel.
        optimizers: that update it.
        scaler: the loop's GradScaler, if it has one that is known.

    Attributes:
        refusal: why gradients can't be accumulated here; "" while nothing speaks against it.

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
        self._taken = 0
        """Batches of it whose step was left out."""
        self._kept: dict[Tensor, Tensor] = {}
        """Of each parameter, the sum of what they brought."""
        self._of_batch: dict[Tensor, Tensor] | None = None
        """What the batch in hand has brought, if the loop changes gradients before its step."""
        self._passes = 0
        """Backward passes of the batch in hand that have reached the parameters."""
        self._before: list[tuple[int, int]] = []
        self._after: list[tuple[int, int]] = []
        """What the gradients were before the last of them, and after it."""
        self._is_brought = False
        """What was kept is among the gradients of the last batch."""
        self._changes_gradients = True
        """The loop clips them, say: what a backward pass has brought is copied when it ends; so it is until a step has
        shown that it need not be."""
        self._looked_at = self._steps_of_batch = 0
        self._closes = self._holds_sync = self._is_stepping = False
        self._gate: Any = None
        if self.refusal:
            return
        (self._optimizer,) = optimizers
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
        """A batch has been delivered; if a step begins with it, it is of so many batches.

        Args:
            sizes: samples of each batch of the step, over all ranks, the one in hand first. One of them makes the step
                the optimizer's own, bit for bit.
        """
        self._steps_of_batch = 0
        if self.refusal:
            return
        if not self.is_open:
            self._sizes = [*sizes]
        self._set_sync()

    def close(self) -> None:
        """Accumulate no more; what a step under way has of batches before goes into the loop's next step."""
        self._closes = True
        if self.is_open:
            self._shorten()
        else:
            self._leave()

    # -- the backward pass (backward.BackwardListener) -----------------------------------------------------------------

    def backward_begins(self, roots: list[Tensor]) -> None:
        """With the last batch come those before it, so that what is exchanged is the whole."""
        if len(self._sizes) < 2:
            return
        if (self._passes or self._is_brought) and self._is_cleared():
            self._passes, self._is_brought = 0, False  # the loop has left out the step of the batch before
        if self._is_last:
            if self._is_brought:
                self._multiply(1 / self._share)  # as it was before the pass that ended
            else:
                self._bring_back()
            self._is_brought = True
        self._before = self._state()

    def backward_ended(self, roots: list[Tensor]) -> None:
        """Let the batch weigh what it should, and note what the gradients are, by which a change of theirs is seen."""
        is_several = len(self._sizes) > 1
        if not is_several or self._state() != self._before:  # else it was another model's
            self._passes += 1
        if is_several and self._is_last:
            self._multiply(self._share)
        if self._is_looked_at:
            self._after = self._state()
        if self._changes_gradients and not self._is_last:
            with torch.no_grad():
                self._of_batch = {p: p.grad.clone() for p in self._parameters() if p.grad is not None}

    # -- a step --------------------------------------------------------------------------------------------------------

    @property
    def _is_last(self) -> bool:
        return self._taken + 1 >= len(self._sizes)

    @property
    def _share(self) -> float:
        """Of the batch in hand, of the samples of the step."""
        return self._sizes[self._taken] / self.samples

    def _step(self, own: Step, *args: Any, **kwargs: Any) -> Any:
        self._steps_of_batch += 1
        if self._is_looked_at and not self._closes:
            self._look(args, kwargs)
        if not self._is_last:
            self._keep()
            self._taken += 1
            self._end_batch()
            self._shorten() if self.refusal else self._set_sync()
            return None
        if len(self._sizes) > 1 and not self._passes and not (self._is_brought and self._state() == self._after):
            self._take_in_given()
        try:
            self._is_stepping = True
            return own(*args, **kwargs)
        finally:
            self._is_stepping = False
            self._end_batch()
            self._taken = 0
            if len(self._sizes) > 1:
                self._sizes, self._kept = [], {}
                self._set_sync()
            if self._closes or self.refusal:
                self._leave()

    def _stepped(self, *_: Any) -> None:
        """Refuse if the optimizer has stepped without being asked through its attribute."""
        if not self._is_stepping:
            self.refusal = self.refusal or "it has got hold of the optimizer's own step, which can't be left out"
            self._leave()

    def _end_batch(self) -> None:
        self._passes, self._of_batch, self._is_brought = 0, None, False

    @torch.no_grad()
    def _keep(self) -> None:
        """Add what the batch in hand has brought to what the others have, by its share."""
        brought = self._of_batch
        if brought is None:
            brought = {p: p.grad for p in self._parameters() if p.grad is not None}
        known = [p for p in brought if p in self._kept]
        if known:
            torch._foreach_add_([self._kept[p] for p in known], [brought[p] for p in known], alpha=self._share)
        self._kept |= {p: gradient * self._share for p, gradient in brought.items() if p not in self._kept}

    @torch.no_grad()
    def _bring_back(self) -> None:
        """Put what was kept where the last batch's gradient adds to it; the sum is multiplied by that one's share."""
        for parameter, kept in self._kept.items():
            # A copy: a loop that leaves its step out brings the next batch as the last one.
            if parameter.grad is None:
                parameter.grad = kept / self._share
            else:
                parameter.grad.add_(kept, alpha=1 / self._share)

    def _take_in_given(self) -> None:
        """Make the sum with gradients that the loop has set without a backward pass."""
        self._bring_back()
        self._multiply(self._share)

    @torch.no_grad()
    def _multiply(self, factor: float) -> None:
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def _is_cleared(self) -> bool:
        """Return whether the loop has cleared the gradients since the last backward pass."""
        if self._state() == self._after:
            return False
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        return not gradients or all(float(norm) == 0 for norm in torch._foreach_norm(gradients))

    @torch.no_grad()
    def _shorten(self) -> None:
        """Make the next batch the last one, and let all weights add up to 1 again."""
        sizes = self._sizes[: self._taken + 1]
        for kept in self._kept.values():
            kept.mul_(self.samples / sum(sizes))
        self._sizes = sizes
        self._set_sync()

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

    @property
    def _is_looked_at(self) -> bool:
        return self._looked_at < _LOOKED_AT or len(self._sizes) > 1

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look for what a loop does that can't be accumulated; a step under way then ends with the next batch."""
        self._looked_at += 1
        has_changed = self._passes > 0 and self._state() != self._after
        self._changes_gradients = has_changed or (self._changes_gradients and self._looked_at > 1)
        self.refusal = self.refusal or self._seen(args, kwargs)

    def _seen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if any(callable(each) for each in (*args, *kwargs.values())):
            return "its step takes a closure, which makes a backward pass of its own"
        if self._steps_of_batch > 1:
            return "it takes several steps with one batch"
        if _is_called_by_scaler():
            return _SCALES
        return ""

    def _leave(self) -> None:
        self._sizes = []
        if self._gate is None:
            return
        backward.forget(self)
        self._hook.remove()
        if self._optimizer.__dict__.get("step") is self._gate:
            if self._replaced is None:
                del self._optimizer.step
            else:
                self._optimizer.step = self._replaced  # type: ignore[method-assign]
        self._gate = None


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
    for _ in range(_FRAMES + 4):  # those of this module
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code in _SCALERS:
            return True
    return False
