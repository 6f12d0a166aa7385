"""The learning rate of a step follows its batch size, while the user's base rate stays where it is.

    scaler = LearningRateScaler(optimizer)
    scaler.update(BatchScale(512, 128, noise=900.0))    # whenever batch size or noise change

An optimizer's step then runs at base rate × multiplier, by the rules of `accel.elastic.scaling_rules`. It runs on a
stand-in (`accel.elastic.scaled_step`), so that the optimizer's groups hold the base values at any time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from accel.elastic.scaled_step import ScaledStep
from accel.elastic.scaling_rules import BatchScale, Multipliers, Rule, rule_for
from accel.errors import InvalidArgument

_VERSION = 1
_ONE = Multipliers()


class LearningRateScaler:
    """Run an optimizer's steps at the learning rate of their batch size, and count progress.

    A step at S = 1 is the optimizer's own, bit for bit. At any other it computes what it would with the multiplied
    values set by hand. Steps that `torch.amp.GradScaler` leaves out are not counted.

    Progress is the number of steps of M0 samples that the steps so far were worth: each counts AdaScale's gain r,
    1 ≤ r ≤ S, whichever rule gives the rate; a rule that leaves the rate as it is gets less out of a step than that.

    A step that is replayed from a CUDA graph calls no hooks: it keeps the rate it was captured with. Capturing at
    S > 1 is refused, and a step under `torch.compile` fails there. An optimizer that hands its step on to another one
    inside it (Lookahead, SAM) reads its rate there: give the inner one; there is a warning if not.

    Args:
        optimizer: any but LBFGS, which searches along a line and takes several batches' worth of calls in a step.
        rule: how rates follow the batch; default `rule_for(optimizer)`.

    Raises:
        InvalidArgument: if `optimizer` is none, or LBFGS.

    Example:
        >>> w = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([w], lr=0.5)
        >>> scaler = LearningRateScaler(optimizer)
        >>> scaler.update(BatchScale(256, 64, gain=3.0))
        >>> w.grad = torch.ones(1)
        >>> optimizer.step()
        >>> w.item(), optimizer.param_groups[0]["lr"], scaler.progress
        (-1.5, 0.5, 3.0)
    """

    def __init__(self, optimizer: Optimizer, rule: Rule | None = None) -> None:
        if not isinstance(optimizer, Optimizer):
            raise InvalidArgument(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise InvalidArgument(
                f"optimizer must be one that steps by itself, got a {type(optimizer).__name__}, which wraps one; "
                "give the optimizer inside it"
            )
        if isinstance(optimizer, LBFGS):
            raise InvalidArgument(
                "a learning rate can't follow the batch size with LBFGS, whose step evaluates the loss many times on "
                "one batch, got LBFGS; use SGD or Adam, or keep the batch size"
            )
        self.rule = rule_for(optimizer) if rule is None else rule
        self.progress = 0.0
        self.steps = 0
        self._batches: tuple[BatchScale, ...] = ()
        self._multipliers: tuple[Multipliers, ...] = (_ONE,)
        self._gain, self._scales = 1.0, False
        self._optimizer = optimizer
        self._scaled_step = ScaledStep(optimizer, self._of_each_group)
        self._is_stepping = self._warned = False
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def update(self, batch: BatchScale | Sequence[BatchScale]) -> None:
        """Set the batch of the steps to come.

        Args:
            batch: for all parameter groups, or one for each of them, where their noise differs; progress then counts
                the mean of their gains.

        Raises:
            InvalidArgument: if there are not as many as groups, or the rule returns what is no positive number.
        """
        batches = (batch,) if isinstance(batch, BatchScale) else tuple(batch)
        if not isinstance(batch, BatchScale):
            _check_count(len(batches), len(self._optimizer.param_groups))
        # Both are computed before either is set: a rule that raises changes nothing.
        multipliers = tuple(_multipliers(self.rule, one) for one in batches)
        gain = math.fsum(one.bounded_gain for one in batches) / len(batches)
        self._batches, self._multipliers, self._gain = batches, multipliers, gain
        self._scales = any(one != _ONE for one in multipliers)

    @property
    def multipliers(self) -> tuple[Multipliers, ...]:
        """Those of the next step, one for each parameter group."""
        return tuple(self._of_each_group())

    @property
    def gain(self) -> float:
        """What the next step counts as progress."""
        return self._gain

    def close(self) -> None:
        """Leave the optimizer as it was; the count stays."""
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the count and the batch, as plain numbers."""
        batches = [asdict(batch) for batch in self._batches]
        return {"version": _VERSION, "progress": self.progress, "steps": self.steps, "batches": batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            InvalidArgument: if it is not a state of this class, or of an optimizer with other groups.
        """
        if state.get("version") != _VERSION:
            raise InvalidArgument(
                f"the state of a LearningRateScaler must have version {_VERSION}, got {state.get('version')!r}"
            )
        batches = [BatchScale(**{**batch, "noise_bounds": _pair(batch["noise_bounds"])}) for batch in state["batches"]]
        if batches:
            self.update(batches[0] if len(batches) == 1 else batches)
        else:
            self._batches, self._multipliers, self._gain, self._scales = (), (_ONE,), 1.0, False
        self.progress, self.steps = float(state["progress"]), int(state["steps"])

    def _of_each_group(self) -> Iterable[Multipliers]:
        count = len(self._optimizer.param_groups)
        if len(self._multipliers) == 1:
            return self._multipliers * count
        _check_count(len(self._multipliers), count)
        return self._multipliers

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._is_stepping = True
        if not self._scales or self._scaled_step.is_one(optimizer):
            return None
        if _is_capturing():
            raise RuntimeError(
                "a step at a scaled learning rate can't be captured as a CUDA graph, which would keep that rate; "
                "capture it at the base batch size, or step outside of the graph"
            )
        # torch passes the optimizer as the first argument of its own step.
        return (self._scaled_step.make(), *args[1:]), kwargs

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_stepping:
            return  # a class that calls its base's step: that one has been counted
        self._is_stepping = False
        self.steps += 1
        self.progress += self._gain
        if not self._scales or self._scaled_step.was_read or self._warned:
            return
        if any(one.lr != 1 for one in self._multipliers):
            self._warned = True
            warnings.warn(
                f"{type(self._optimizer).__name__} did not read the learning rate of its own param_groups in its step, "
                "so it was not scaled; give LearningRateScaler the optimizer that it steps",
                stacklevel=3,
            )


def _is_capturing() -> bool:
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()


def _multipliers(rule: Rule, batch: BatchScale) -> Multipliers:
    by = rule.multipliers(batch) if hasattr(rule, "multipliers") else rule(batch)
    by = by if isinstance(by, Multipliers) else Multipliers(lr=float(by))
    if not all(0 < factor < math.inf for factor in by):
        raise InvalidArgument(
            f"a learning-rate rule must return positive numbers, got {by} from {rule!r} at scale {batch.scale:g}"
        )
    return by


def _check_count(got: int, groups: int) -> None:
    if got != groups:
        raise InvalidArgument(f"there must be one batch for all parameter groups or {groups}, one for each, got {got}")


def _pair(bounds: Any) -> tuple[float, float] | None:
    return None if bounds is None else (bounds[0], bounds[1])
