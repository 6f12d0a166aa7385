"""SGD's momentum, taken over by a compressor so that it is not applied twice.

SGD is linear in what it is given: its momentum buffer is the sum of one that saw the gradients, one that saw weight
decay, and what was there before. The first is what the compressor (`accel.comm.compression.momentum`) accumulates on
each rank and sends late. The others are the same on every rank: they stay in the optimizer, in its `momentum_buffer`,
and move the weights at every step, unsent:

    b ← m b + λ w,  w ← w − lr b  (Nesterov: w ← w − lr (λ w + m b)),  then  w ← w − lr · what is delivered

So where there is no residual, as in DGC with ratio 1, the weights are those of dense SGD, and the buffer of a dense run
is continued, without a byte on the wire.

Nothing of the optimizer is changed outside of `step()`: `param_groups`, `state_dict()` and schedulers, also those of
momentum, see what they always saw. Inside, momentum and weight decay are 0.

Sources: momentum correction (Lin et al. 2018, arxiv.org/abs/1712.01887, section 3.2); weight decay kept in the
optimizer with its own momentum as in the authors' code (github.com/synxlin/deep-gradient-compression).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel.comm.compression.momentum import VELOCITY, MomentumCorrection
from accel.comm.hooks import CommState
from accel.comm.layout import as_laid_out
from accel.profiler.errors import InvalidArgument

BUFFER = "momentum_buffer"


def take_momentum(state: CommState, optimizer: torch.optim.Optimizer, scaler: Any = None) -> SGDMomentum:
    """Hand SGD's momentum over to the compressor of `state`, until `close()`.

    Call it on every rank, before the first step and after a pickled state was bound. Save the optimizer and the state;
    load both in any order. A step must follow each averaged backward pass; others go under `ddp.no_sync()`.

    Args:
        state: with a compressor that has momentum: `DGC()`, `OneBit(momentum=True)`.
        optimizer: torch.optim.SGD over parameters of the state's model; momentum, nesterov, weight_decay and lr are
            read from its groups at each step.
        scaler: the GradScaler in use, so that what is remembered does not depend on its scale; default None.

    Returns:
        What gives the momentum back.

    Raises:
        InvalidArgument: if the state has no such compressor, or the optimizer is another or has an option that isn't
            linear or not seen from outside: dampening, fused.

    Example:
        >>> optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        >>> momentum = take_momentum(state, optimizer)
        >>> train(ddp, optimizer)
        >>> momentum.close()
    """
    return SGDMomentum(state, optimizer, scaler)


class SGDMomentum:
    """A hand-over of momentum; `take_momentum` makes it."""

    def __init__(self, state: CommState, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        compressor = state.compressor
        if not isinstance(compressor, MomentumCorrection) or not compressor.momentum:
            raise InvalidArgument(
                "the state must have a compressor with momentum to hand it over to, DGC() or OneBit(momentum=True), "
                f"got {compressor!r}"
            )
        if compressor._source is not None:
            raise InvalidArgument("the state has taken an optimizer's momentum already; close() that hand-over first")
        if type(optimizer) is not torch.optim.SGD:
            raise InvalidArgument(
                f"the momentum of torch.optim.SGD alone can be taken over, got {type(optimizer).__name__}; "
                f"use {type(compressor).__name__}(momentum=False) with others"
            )
        self._optimizer, self._scaler = optimizer, scaler
        self._group_at_first, self._state = state.binding.group, weakref.ref(state)
        self._compressor, self._memory = compressor, state.memory  # not the state, which must be free to be dropped
        self._names = dict(state.binding.names)
        self._inside: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._due = False
        """Whether gradients of this rank have been averaged since the last step."""
        self._index()
        compressor._bind(self)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_state_dict_pre_hook(lambda _: self._restore()),
        ]

    def _index(self) -> None:
        """Note the group of each parameter by name, or raise InvalidArgument."""
        self._shape = self._shape_now()
        self._group: dict[str, int] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            for option in ("dampening", "fused"):
                if group.get(option):
                    raise InvalidArgument(
                        f"SGD's momentum can't be taken over with {option}={group[option]}; leave it out"
                    )
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    raise InvalidArgument(
                        "the optimizer's parameters must all be of the state's model, got one of shape "
                        f"{tuple(parameter.shape)} that is not; give it an optimizer of its own"
                    )
                self._group[self._names[id(parameter)]] = number

    def _shape_now(self) -> list[int]:
        return [len(group["params"]) for group in self._optimizer.param_groups]

    # -- what compressors ask ----------------------------------------------------------------------------------------

    def coefficients(self, name: str) -> tuple[float, bool]:
        """Return the momentum of a parameter and whether it is Nesterov's; none if the optimizer doesn't have it."""
        if self._inside:
            self._restore()  # a step raised an error
        if name not in self._group and self._shape != self._shape_now():
            self._index()
        if name not in self._group:
            return 0.0, False
        group = self._optimizer.param_groups[self._group[name]]
        return float(group["momentum"]), bool(group["nesterov"])

    def loss_scale(self) -> float:
        """Return the scale of this step's gradients."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def begin_pass(self) -> None:
        """Raise InvalidArgument if the last pass was finite, so that momentum was applied, and no step came after it.

        GradScaler makes no step of a pass that was not finite, nor does a rank within `join()` that has no more data.
        """
        own = torch._C._current_graph_task_id() != -1
        if own and self._due and self._memory.noted and self._memory.finite():
            raise InvalidArgument(
                "with its momentum taken over, the optimizer must make a step after each averaged backward pass, got "
                "another pass first, which would apply momentum twice; accumulate gradients under ddp.no_sync()"
            )
        self._due = own

    # -- around optimizer.step() -------------------------------------------------------------------------------------

    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Move the weights by the momentum that the optimizer has kept, and let `step` do the rest without any."""
        if len(args) > 1 or kwargs.get("closure") is not None:  # the first is the optimizer
            raise InvalidArgument("with its momentum taken over, step() takes no closure; call backward() before it")
        self._restore()
        self._due = False
        if self._shape != self._shape_now():
            self._index()
        for group in optimizer.param_groups:
            if group["momentum"] == 0:
                continue
            self._move([parameter for parameter in group["params"] if parameter.grad is not None], group)
            names = ("momentum", "weight_decay", "nesterov")
            self._inside.append((group, {name: group[name] for name in names}))
            group.update(momentum=0, weight_decay=0, nesterov=False)

    def _move(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Apply the momentum of weight decay, and what is left of earlier momentum."""
        decay, momentum, lr = group["weight_decay"], float(group["momentum"]), float(group["lr"])
        state = self._optimizer.state
        moving = [parameter for parameter in parameters if decay or state.get(parameter, {}).get(BUFFER) is not None]
        if not moving:
            return
        buffers = [self._buffer(parameter) for parameter in moving]
        weights = [parameter.detach() for parameter in moving]
        torch._foreach_mul_(buffers, momentum)
        if decay:
            torch._foreach_add_(buffers, weights, alpha=decay)
        if group["nesterov"]:
            torch._foreach_mul_(weights, 1 - lr * decay)
            torch._foreach_add_(weights, buffers, alpha=-lr * momentum)
        else:
            torch._foreach_add_(weights, buffers, alpha=-lr)

    def _buffer(self, parameter: nn.Parameter) -> Tensor:
        kept = self._optimizer.state[parameter]
        if kept.get(BUFFER) is None:
            kept[BUFFER] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        buffer: Tensor = kept[BUFFER]
        return buffer

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._restore()

    def _restore(self) -> None:
        """Undo what `_before` did to groups; after an error inside `step`, as soon as anyone asks."""
        for group, options in self._inside:
            group.update(options)
        self._inside = []

    # -- the end -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def close(self) -> None:
        """Give the momentum back: SGD continues with the sum of what the ranks have accumulated. Every rank takes part.

        Residuals stay in the state's memory.
        """
        if not self._hooks:
            return
        self._restore()
        saved, state = self._memory.state_dict(), self._state()  # which may have been bound again
        kept, ranks = saved["own"].pop(VELOCITY, {}), self._group_at_first if state is None else state.binding.group
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                kind = torch.promote_types(parameter.dtype, torch.float32)
                total = torch.zeros(parameter.numel(), dtype=kind, device=parameter.device)
                for skipped, values in kept.get(self._names[id(parameter)], []):
                    total[skipped : skipped + values.numel()] += values.to(total)
                dist.all_reduce(total, group=ranks)
                if group["momentum"]:
                    self._buffer(parameter).add_(as_laid_out(total, parameter), alpha=-1 if group["maximize"] else 1)
        self._memory.load_state_dict(saved)
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        self._compressor._bind(None)
