"""The learning rate of a step follows its batch size, while the user's base rate stays where it is.

    scaler = LearningRateScaler(optimizer)
    scaler.update(BatchScale(512, 128, noise=900.0))    # whenever batch size or noise change

An optimizer's step then runs at base rate × multiplier, by the rules of `accel.elastic.scaling_rules`: the groups'
values are multiplied before the step, in the optimizer's pre-hook, and restored after it, in its post-hook.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import torch
from torch.optim import LBFGS, Optimizer

from accel.elastic.scaling_rules import AdaScale, BatchScale, Linear, Multipliers, NoScaling, Rule, Sqrt, rule_for
from accel.errors import InvalidArgument, InvalidState
from accel.goodput.efficiency import NoiseInterval
from accel.profiler.loop.optimizers import Optimizers
from accel.profiler.loop.steps import is_capturing

_VERSION = 1
_ONE = Multipliers()


class LearningRateScaler:
    """Run an optimizer's steps at the learning rate of their batch size, and count progress.

    A step at S = 1 is the optimizer's own, bit for bit. At any other it computes what it would with the multiplied
    values set by hand. Steps that `torch.amp.GradScaler` leaves out are not counted.

    Progress is the number of steps of M0 samples that the steps so far were worth: each counts AdaScale's gain r,
    1 ≤ r ≤ S, whichever rule gives the rate; a rule that leaves the rate as it is gets less out of a step than that.

    Capturing a step as a CUDA graph, or compiling it, is refused at S > 1. Within the step, closures and hooks that
    were registered later see the multiplied values. After a step that raised they are restored by whatever comes first:
    the next step, `optimizer.state_dict()`, `update` or `close`.

    Args:
        optimizer: any but LBFGS, which searches along a line and takes several batches' worth of calls in a step.
        rule: how rates follow the batch; default `rule_for(optimizer)`.

    Attributes:
        progress, steps: counts of the optimizer's steps so far.
        multipliers, gain: of the next step: by which its values are multiplied, and what it counts as progress.

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
        self._batch: BatchScale | None = None
        self.multipliers, self.gain = _ONE, 1.0
        self._optimizer = optimizer
        self._base_values: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """During a step: each scaled group, and the user's values in it."""
        self._is_stepping = self._is_closed = False
        self._handles = [
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_state_dict_pre_hook(self._restore),
        ]
        _warn_of_inner(optimizer)

    def update(self, batch: BatchScale) -> None:
        """Set the batch of the steps to come.

        Raises:
            InvalidArgument: if it is no `BatchScale`, or the rule returns what is no positive number; nothing has been
                changed then.
        """
        if not isinstance(batch, BatchScale):
            raise InvalidArgument(
                f"the batch must be one BatchScale for all parameter groups, got a {type(batch).__name__}; give "
                "optimizers of their own to parameters whose noise differs"
            )
        self._restore()
        multipliers = _multipliers(self.rule, batch)
        self.multipliers = _ONE if multipliers == _ONE else multipliers
        self._batch, self.gain = batch, batch.bounded_gain

    def close(self, *, counts: bool = False) -> None:
        """Leave the optimizer as it was; the count stays.

        Args:
            counts: its steps are still counted, each as one of the base batch.
        """
        self._restore()
        self.multipliers, self.gain, self._is_closed = _ONE, 1.0, True
        for handle in self._handles[counts:]:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the count and the batch, as plain numbers."""
        batches = [] if self._batch is None else [asdict(self._batch)]
        return {"version": _VERSION, "progress": self.progress, "steps": self.steps, "batches": batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            InvalidArgument: if it is not a state of this class, or has a batch for each parameter group.
        """
        if state.get("version") != _VERSION:
            raise InvalidArgument(
                f"the state of a LearningRateScaler must have version {_VERSION}, got {state.get('version')!r}"
            )
        batches = state["batches"]
        if len(batches) > 1:
            raise InvalidArgument(f"a state must have one batch for all parameter groups, got {len(batches)}")
        self._batch, self.multipliers, self.gain = None, _ONE, 1.0
        for batch in batches:
            bounds = batch["noise_bounds"]
            self.update(BatchScale(**{**batch, "noise_bounds": None if bounds is None else tuple(bounds)}))
        self.progress, self.steps = float(state["progress"]), int(state["steps"])

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._base_values:  # the step before has raised, or this is that of a base class within it
            self._restore()
        self._is_stepping = True
        if self.multipliers is _ONE:
            return
        if torch.compiler.is_compiling() or is_capturing():
            raise InvalidState(
                "a step at a scaled learning rate can't be captured as a CUDA graph or compiled, which would keep that "
                "rate; capture it at the base batch size, or step outside of it"
            )
        for group in self._optimizer.param_groups:
            scaled = scaled_values(self._optimizer, group, self.multipliers)
            self._base_values.append((group, {name: group[name] for name in scaled}))
            group.update(scaled)

    def _after_step(self, *_: Any) -> None:
        if not (self._is_stepping or self._is_closed):
            return  # a class that calls its base's step: that one has been counted
        if self._base_values:
            self._restore()
        self._is_stepping = False
        self.steps += 1
        self.progress += self.gain

    def _restore(self, *_: Any) -> None:
        """Put the user's values back."""
        while self._base_values:
            group, values = self._base_values.pop()
            group.update(values)


class StepRates:
    """Scale the learning rates of a run's optimizers by the batch of the step.

    Attributes:
        by_epoch: the rule may depend on the epoch.
        adopted: optimizers that were known when they were adopted last, those that are gone too.
        progress_before: steps of the user's batch that earlier processes of this training were worth.
    """

    def __init__(self, rule: Rule | None, optimizers: Sequence[Optimizer], say: Callable[[str], None]) -> None:
        self._rule, self.optimizers, self._say = rule, cast("Optimizers", optimizers), say
        self.by_epoch = rule is not None and type(rule) not in (AdaScale, Linear, NoScaling, Sqrt)
        self.adopted = 0
        self.progress_before = 0.0
        self._scalers: list[tuple[Optimizer, LearningRateScaler]] = []
        self._scale: BatchScale | None = None

    @property
    def progress(self) -> float:
        """Steps of the user's batch that the steps so far were worth."""
        return self.progress_before + max((scaler.progress for _, scaler in self._scalers), default=0.0)

    def adopt(self) -> None:
        adopted = self.optimizers.appended
        known = {id(optimizer) for optimizer, _ in self._scalers}
        for optimizer in list(self.optimizers):  # which the run does not keep alive
            if id(optimizer) in known:
                continue
            scaler = LearningRateScaler(optimizer, self._rule)
            if isinstance(scaler.rule, NoScaling) and scaler.rule.reason:
                self._say(scaler.rule.reason)
            if self._scale is not None:
                scaler.update(self._scale)
            self._scalers.append((optimizer, scaler))
        self.adopted = adopted  # not before: Ctrl-C may come in between

    def follow(self, samples: int, base: int, noise: NoiseInterval | None, epoch: float) -> None:
        """Take the batch of the step in hand; a smaller one than the user's, as an epoch's last, counts as that.

        The epoch comes in steps of 0.01, since a rule is asked at each.
        """
        size = max(samples, base)
        if size == base and (self._scale is None or self._scale.batch_size == base):
            return  # as the optimizers' own
        self._update(
            BatchScale(
                batch_size=size,
                base_batch_size=base,
                noise=None if noise is None else noise.at(size),
                noise_bounds=None if noise is None else (noise.at(size, "low"), noise.at(size, "high")),
                epoch=epoch,
            )
        )

    def follow_no_more(self) -> None:
        """Let steps be the optimizers' own from now on; each counts as one of the user's."""
        if self._scale is not None:
            base = self._scale.base_batch_size
            self._update(BatchScale(base, base, epoch=self._scale.epoch))  # which a rule may need

    def close(self) -> None:
        """Leave the optimizers as they were; their steps are still counted, each as one of the user's."""
        for _, scaler in self._scalers:
            scaler.close(counts=True)

    def _update(self, scale: BatchScale) -> None:
        if scale != self._scale:  # a rule is asked again only when something changes
            self._scale = scale
            for _, scaler in self._scalers:
                scaler.update(scale)


def scaled_values(optimizer: Optimizer, group: Mapping[str, Any], by: Multipliers) -> dict[str, Any]:
    """Return the values that a group has during a step in place of its own."""
    values = {} if by.lr == 1 else {"lr": group["lr"] * by.lr}
    if by.averages != 1:
        if "betas" in group:
            values["betas"] = tuple(_shorter(beta, by.averages) for beta in group["betas"])
        elif isinstance(optimizer, torch.optim.RMSprop):
            values["alpha"] = _shorter(group["alpha"], by.averages)
    if by.eps != 1 and isinstance(group.get("eps"), float | int | torch.Tensor):
        values["eps"] = group["eps"] * by.eps
    return values


def _shorter(beta: Any, factor: float) -> Any:
    shorter = 1 - factor * (1 - beta)
    return shorter.clamp(min=0) if isinstance(shorter, torch.Tensor) else max(0.0, shorter)


def _warn_of_inner(optimizer: Optimizer) -> None:
    """Warn of an optimizer whose step is that of another one inside it, which has other groups."""
    own = {id(group) for group in optimizer.param_groups}
    inner = [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]
    if any(id(group) not in own for each in inner for group in each.param_groups):
        warnings.warn(
            f"{type(optimizer).__name__} steps another optimizer, which has groups of its own, so its learning rate is "
            "not scaled; give LearningRateScaler the optimizer that it steps",
            stacklevel=4,
        )


def _multipliers(rule: Rule, batch: BatchScale) -> Multipliers:
    by = rule.multipliers(batch) if hasattr(rule, "multipliers") else rule(batch)
    by = by if isinstance(by, Multipliers) else Multipliers(lr=float(by))
    if not all(0 < factor < math.inf for factor in by):
        raise InvalidArgument(
            f"a learning-rate rule must return positive numbers, got {by} from {rule!r} at scale {batch.scale:g}"
        )
    return by
