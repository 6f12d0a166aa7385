"""Several of the loop's steps become one of its optimizer, which gets the mean of their gradients.

    batch        1             2             …    n
    backward     f₁·g₁ kept    f₂·g₂ kept         fₙ·gₙ + what was kept
    step()       left out      left out           the optimizer's own

The loop stays as it is: it clears gradients, calls `backward` and `step` for each batch. What a backward pass brings is
kept when it ends, so that clearing and clipping change nothing of it; it is there again when the last backward pass
begins, so that clipping and DistributedDataParallel see the gradient of the whole. Each batch weighs as many samples as
it has.

That is right of loops that take one batch, one backward pass and one step in turn; others are refused, by what is seen
of them. Batches are counted by what all ranks do alike: a rank may leave a `step` out by itself.

    at work ──the loop does something else──▶ refused: the ranks go on until they have agreed on it
       └──close──▶ closed: a step under way is dropped

    a step:  begun ──batch, backward, step left out──▶ … ──last batch, backward──▶ the optimizer's own step ──▶ begun
               ▲                                      └──the loop leaves the pass, or a step that is not its own──┐
               └────────────────────────────────────────────────dropped──────────────────────────────────────────┘

PyTorch leaves all this to the loop (`no_sync`, and a step every n batches). AdaptDL takes the place of `zero_grad` and
`step` too, and a loop that clips its gradients clips partial sums there.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accel.profiler.loop import backward
from accel.profiler.loop.update_hooks import UPDATES

Step = Callable[..., Any]

_LOOKED_AT = 8
"""Steps in which a GradScaler is looked for."""
_FRAMES = 10
"""Callers of a step among which it is looked for: schedulers wrap it, too."""
_SCALES = "its GradScaler may change its scale between two batches"
_SCALERS = {torch.amp.GradScaler.step.__code__, torch.amp.GradScaler._maybe_opt_step.__code__}


class AccumulatedStep:
    """The step under way: its number of `batches`, of which `taken` have ended, and the one in hand."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        """Samples of each batch, over all ranks; none until the step has begun."""
        self.batches = 1
        self.taken = self.passes = 0
        self.has_batch = False

    @property
    def samples(self) -> int:
        return sum(self._sizes)

    @property
    def is_last(self) -> bool:
        return self.taken + 1 >= len(self._sizes)

    @property
    def share(self) -> float:
        return self._sizes[self.taken] / self.samples

    def begin_batch(self, sizes: Sequence[int]) -> None:
        if not self.has_batch and not self.taken:  # else the loop may have called the model with the one before
            self._sizes, self.batches = [*sizes], len(sizes) or 1
        self.has_batch, self.passes = True, 0

    def end_batch(self) -> None:
        self.taken, self.has_batch, self.passes = self.taken + 1, False, 0

    def begin_again(self) -> None:
        """The loop has left out the whole step."""
        self.taken, self.has_batch, self.passes = 0, False, 0

    def drop(self) -> None:
        self._sizes, self.batches = [], 1
        self.begin_again()


class GradientSums:
    """The weighted sum of the gradients that earlier batches of a step have brought."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kept: dict[Tensor, Tensor] = {}
        self._is_brought = self._is_divided = False
        """The sum is among the gradients of the last batch, and these are still to be weighed."""

    @property
    def gradients(self) -> dict[Tensor, Tensor]:
        return {p: p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None}

    @torch.no_grad()
    def keep(self, share: float) -> None:
        """Add so many times the gradients to what was kept."""
        brought = self.gradients
        known = [p for p in brought if p in self._kept]
        if known:
            torch._foreach_add_([self._kept[p] for p in known], [brought[p] for p in known], alpha=share)
        self._kept |= {p: gradient * share for p, gradient in brought.items() if p not in self._kept}

    @torch.no_grad()
    def bring_back(self, share: float) -> None:
        """Put the sum where the last batch's gradient adds to it, before `weigh` multiplies by its share."""
        gradients = [*self.gradients.values()]
        norms = torch._foreach_norm(gradients) if gradients and self._is_brought else []
        if any(float(norm) != 0 for norm in norms):
            if not self._is_divided:  # a further pass of the batch
                torch._foreach_mul_(gradients, 1 / share)
        else:  # perhaps cleared since a pass that has raised
            for parameter, kept in self._kept.items():
                if parameter.grad is None:
                    parameter.grad = kept / share
                else:
                    parameter.grad.add_(kept, alpha=1 / share)
        self._is_brought = self._is_divided = True

    @torch.no_grad()
    def weigh(self, share: float) -> None:
        """Multiply the last batch's gradients, with those brought back, by its share."""
        if gradients := [*self.gradients.values()]:
            torch._foreach_mul_(gradients, share)
        self._is_divided = False

    def clear(self) -> None:
        self._kept, self._is_brought, self._is_divided = {}, False, False


class GradientSync:
    """Has DistributedDataParallel exchange gradients in a step's last batch only."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model if isinstance(model, DistributedDataParallel) else None
        self._is_held = self._is_local = False

    def follow(self, step: AccumulatedStep) -> None:
        if self.model is not None and (step.batches > 1 or self._is_held):
            self.model.require_backward_grad_sync = step.is_last
            self._is_held = not step.is_last

    def backward_ended(self) -> None:
        self._is_local = self._is_held

    def average(self, gradients: Iterable[Tensor]) -> None:
        """Let all ranks have the mean of gradients that were not exchanged; they all come here at the same step."""
        if self.model is not None and self._is_local:
            ranks = dist.get_world_size(self.model.process_group)
            for gradient in gradients:
                dist.all_reduce(gradient, group=self.model.process_group)
                gradient.div_(ranks)
        self._is_local = False


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
        present: the step under way.

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
        self._sync, self.present = GradientSync(model), AccumulatedStep()
        self.refusal = _refusal(model, optimizers, scaler)
        self._looked_at = 0
        self._is_stepping = False
        self._strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._gate: Any = None
        """In the place of the optimizer's step; None where that was refused, and after `close`."""
        if self.refusal:
            return
        (self._optimizer,) = optimizers
        self._sums = GradientSums(self._optimizer)
        self._replaced = vars(self._optimizer).get("step")  # None if it is the method of its class
        self._gate = _wrapped(self._optimizer, self._step)
        self._optimizer.step = self._gate  # type: ignore[method-assign]
        self._forget_updates = UPDATES.add(before=self._steps)
        backward.listen(self, first=True)  # others are to see what it brings back

    def begin_batch(self, sizes: Sequence[int]) -> None:
        """Take a batch in hand; a step that begins with it has batches of so many samples, over all ranks."""
        if self._gate is None:
            return
        step = self.present
        if step.has_batch and step.passes:  # its step was left out; with the last batch's the whole step was
            if step.is_last:
                step.begin_again()
                self._sums.clear()
            else:
                step.end_batch()
        step.begin_batch(sizes)
        self._sync.follow(step)

    def drop(self) -> None:
        """Forget the step under way: the loop has left its pass over the data."""
        if self._gate is not None:
            self.present.drop()
            self._sync.follow(self.present)
            self._sums.clear()

    def close(self) -> None:
        """Accumulate no more; what a step under way has of batches before is left out."""
        if self._gate is None:
            return
        self.drop()
        backward.forget(self)
        self._forget_updates()
        if vars(self._optimizer).get("step") is self._gate:  # else a scheduler, say, has put its own around it
            if self._replaced is None:
                del self._optimizer.step
            else:
                self._optimizer.step = self._replaced  # type: ignore[method-assign]
        self._gate = None

    # -- the backward pass (backward.BackwardListener) -----------------------------------------------------------------

    def backward_begins(self, roots: list[Tensor]) -> None:
        """With the last batch come those before it, so that what is exchanged is the whole."""
        step = self.present
        if step.batches == 1 or not step.has_batch:
            return
        if step.is_last:
            self._sums.bring_back(step.share)
        elif step.passes:
            self._sums.keep(-step.share)  # it comes again, with what this pass adds

    def backward_ended(self, roots: list[Tensor]) -> None:
        step = self.present
        self._sync.backward_ended()
        if not step.has_batch:
            self.refusal = self.refusal or "it makes a backward pass that no batch of its own comes before"
            return
        step.passes += 1
        if step.passes > 1:
            self.refusal = self.refusal or "it makes several backward passes with one batch"
        if step.batches > 1:
            self._sums.weigh(step.share) if step.is_last else self._sums.keep(step.share)

    # -- a step --------------------------------------------------------------------------------------------------------

    def _step(self, own: Step, *args: Any, **kwargs: Any) -> Any:
        step = self.present
        if not self.refusal and (self._looked_at < _LOOKED_AT or step.batches > 1):
            self._looked_at += 1
            self.refusal = self._seen(args, kwargs)
        if not step.has_batch:
            self._give_up()
        elif step.batches > 1 and not step.is_last:
            step.end_batch()
            self._sync.follow(step)
            return None
        try:
            self._is_stepping = True
            return own(*args, **kwargs)
        finally:
            self._is_stepping = False
            self.drop()

    def _steps(self, optimizer: Optimizer, *_: Any) -> None:
        """Give up if these parameters are about to be updated in another way."""
        if self._is_stepping or optimizer in self._strangers:
            return
        if optimizer is self._optimizer:
            self.refusal = self.refusal or "it has got hold of the optimizer's own step, which can't be left out"
        elif not _ids(self._optimizer).isdisjoint(_ids(optimizer)):
            self.refusal = self.refusal or "another optimizer updates the same parameters"
        else:
            self._strangers.add(optimizer)
            return
        self._give_up()

    def _give_up(self) -> None:
        """Drop the step under way, and let all ranks have the same gradients; they all come here at the same step."""
        self._sync.average(self._sums.gradients.values())
        self.drop()

    # -- what can't be accumulated -------------------------------------------------------------------------------------

    def _seen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if any(callable(each) for each in (*args, *kwargs.values())):
            return "its step takes a closure, which makes a backward pass of its own"
        if not self.present.has_batch:
            return "it takes a step that no batch of its own comes before"
        if not self.present.passes:
            return "it sets gradients without a backward pass"
        return _SCALES if _is_called_by_scaler() else ""


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


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
    if len(optimizers) != 1:
        return f"it has {len(optimizers)} optimizers"
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
