"""Float32 master weights of an optimizer: where they are kept, and what its step does with them.

The optimizers of `accel.optim` know master weights and loss scales: unscaling, the look for overflow and the skipped
step are part of their one pass, and nothing waits for the device. In the groups of any other optimizer masters, with
float32 gradients, stand in for their parameters while the step runs. Either way masters are kept in the optimizer's
state, so they are saved with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel.amp.gradients import HiddenGradients, ScaledGradients, take_memory, values_of
from accel.amp.hook_order import put_first, put_last
from accel.amp.loss_scale import DynamicLossScale
from accel.amp.master_option import without_bare_masters
from accel.amp.moments import begins_momentum
from accel.amp.ready import ReadyGradients
from accel.amp.stand_ins import NAME, StandIns
from accel.amp.step_checks import check_came_through, check_not_written, check_unchanged
from accel.amp.unrounded import opened, sealed
from accel.errors import InvalidArgument
from accel.optim import MultiTensorOptimizer

_HALF = frozenset({torch.float16, torch.bfloat16})

_all: weakref.WeakKeyDictionary[Optimizer, MasterWeights] = weakref.WeakKeyDictionary()


def master_params(optimizer: Optimizer, scaler: torch.amp.GradScaler | None = None) -> list[Tensor]:
    """Return the float32 weights that a decorated optimizer updates, each with its unscaled float32 gradient.

    Call it after the last backward pass of a step, to clip gradients or look at them. The step then takes these.

    Args:
        optimizer: as `decorate` returned it; of another one its parameters are returned.
        scaler: of the loop, where it uses one of torch; not after `scaler.unscale_`.

    Returns:
        In the order of the parameter groups: master weights of 16-bit parameters, other parameters themselves.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> model, optimizer = decorate(model, optimizer, dtype=torch.bfloat16)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> norm = torch.nn.utils.clip_grad_norm_(master_params(optimizer), max_norm=1.0)
        >>> optimizer.step()
    """
    masters = _all.get(optimizer)
    if masters is None:
        return [p for group in optimizer.param_groups for p in group["params"]]
    return masters.unscaled(getattr(scaler, "_scale", None))  # one that is not enabled has none


def masters_of(optimizer: Optimizer) -> MasterWeights | None:
    """Return what is known of a decorated optimizer's masters; None if it is not decorated."""
    return _all.get(optimizer)


class MasterWeights:
    """The master weights of one optimizer, and its steps.

    Args:
        optimizer: whose parameters have been cast.
        values: 16-bit parameter → its float32 value.
        scale: of the gradients; None where the loop scales, or nothing does.
        keeps: whether there are master weights; else there is only the scale.
    """

    def __init__(
        self, optimizer: Optimizer, values: Mapping[Tensor, Tensor], scale: DynamicLossScale | None, *, keeps: bool
    ) -> None:
        self._optimizer, self._scale, self._keeps = weakref.ref(optimizer), scale, keeps
        self._fused = isinstance(optimizer, MultiTensorOptimizer)
        self._skips_itself = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._stand_ins = StandIns()
        self._hidden = HiddenGradients()
        self._ready = ReadyGradients()
        self._scaled = ScaledGradients()
        self._rounded: dict[Tensor, int] = {}
        """Version of each parameter when it was last what its master weights round to."""
        self._passed_on: dict[str, Any] = {}
        """What torch.amp.GradScaler has set for this step."""
        self._hands_over = False
        """The optimizer has been given a scale, or whether gradients overflowed, for this step."""
        self.waits_to_begin = False
        """Its last step had to wait for the device, as none will once the optimizer's momentum has begun."""
        own = [p for p in self._params() if keeps and p in values]
        for p in own:
            optimizer.state[p][NAME] = values[p]
        self.agree(own)
        if not self._fused:
            # torch.amp.GradScaler then passes its scale on, in place of refusing 16-bit gradients.
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._begins = optimizer.register_step_pre_hook(self._before_step)
        ends = optimizer.register_step_post_hook(self._after_step)
        # Hooks of the user's after the step find the parameters in the groups, and may write to them.
        put_first(optimizer._optimizer_step_post_hooks, ends)
        self._handles = [
            *(self._begins, ends),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_state_dict_post_hook(self._after_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        self._kept: dict[Tensor, Tensor] = {}
        self._bare: dict[Tensor, Tensor] = {}
        self._puts_in = False
        self._unfitting: dict[Tensor, Tensor] = {}
        """Master weights of a loaded state that don't round to the parameters; these may be loaded later."""
        self._loaded_scale: Any = None
        if scale is not None:
            scale.on_backward.append(self._begin_backward)
            scale.waiting.append(self._scaled.waiting)
        _all[optimizer] = self

    def remove(self) -> dict[Tensor, Tensor]:
        """Let the optimizer step as it did, without master weights, and return these."""
        self.recover()
        optimizer = self._optimizer()
        masters = {p: master for p in self._params() if (master := self.follow(p)) is not None}
        for handle in self._handles:
            handle.remove()
        if self._scale is not None:
            self._scale.on_backward.remove(self._begin_backward)
            self._scale.waiting.remove(self._scaled.waiting)
        if optimizer is None:
            return masters
        for p in masters:
            del optimizer.state[p][NAME]
            if not optimizer.state[p]:
                del optimizer.state[p]  # many optimizers take any state for one they have made
        if not self._fused and not self._skips_itself:
            vars(optimizer).pop("_step_supports_amp_scaling", None)
        _all.pop(optimizer, None)
        return masters

    @property
    def is_between_steps(self) -> bool:
        """False while gradients are scaled, and wait for their step; to know this may wait for the device."""
        return not any(bool(values_of(gradient).any()) for gradient in self._scaled.waiting())

    def _params(self) -> list[Tensor]:
        optimizer = self._optimizer()
        return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]

    def of(self, p: Tensor) -> Tensor | None:
        """Return the master weights of a parameter, None if it has none."""
        optimizer = self._optimizer()
        if optimizer is None or p not in optimizer.state:
            return self._stand_ins.of(p)
        master: Tensor | None = optimizer.state[p].get(NAME)
        return master

    @torch.no_grad()
    def take(self, p: Tensor, value: Tensor) -> None:
        """Set a parameter and its master weights."""
        master = self.of(p)
        self._unfitting.pop(p, None)
        if master is not None:
            master.copy_(value)
            p.copy_(master)
            self.agree([p])

    def agree(self, params: Iterable[Tensor]) -> None:
        """Note that parameters are what their master weights round to."""
        self._known().update((p, p._version) for p in params)

    def _known(self) -> dict[Tensor, int]:
        """Return the versions of parameters; those optimizers of `accel.optim` note their own updates in."""
        optimizer = self._optimizer()
        return optimizer._versions if isinstance(optimizer, MultiTensorOptimizer) else self._rounded

    @torch.no_grad()
    def follow(self, p: Tensor) -> Tensor | None:
        """Take over what someone else has written to a parameter, and return its master weights, None if it has none.

        A write through `p.data` leaves no trace in torch's version of `p`, and is not seen.
        """
        master, known = self.of(p), self._known()
        if master is not None and known.get(p) != p._version and master.device == p.device and p.dtype in _HALF:
            loaded = self._unfitting.pop(p, None)
            if loaded is not None and torch.equal(loaded.to(p.dtype), p):
                master.copy_(loaded)
            # What still rounds to the parameter is kept: it has the bits that the parameter has not.
            master.copy_(torch.where(master.to(p.dtype) == p, master, p.to(master.dtype)))
            known[p] = p._version
        return master

    def follow_all(self) -> None:
        """Take over what someone else has written to parameters, before a captured step is replayed."""
        self.recover()
        for p in self._params():
            self.follow(p)

    def begin_call(self, model: nn.Module) -> None:
        """Be told that a call of the model begins."""
        self.recover()
        if self._scale is None and torch.is_grad_enabled():  # a scale tells when a backward pass begins
            self._ready.close()
        optimizer = self._optimizer()
        if optimizer is not None:
            # Hooks of the user's may change gradients, of which masters are given theirs.
            put_last(optimizer._optimizer_step_pre_hooks, self._begins)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        self.recover()
        if self._ready.overflow is not None:
            # A loop that skips a step clears the gradients. This waits for the device, where it would raise otherwise.
            if any(p.grad is not None and bool(values_of(p.grad).any()) for p in self._params()):
                raise InvalidArgument(
                    "master_params() must be called after the last backward pass of a step, and the gradients of a "
                    "step that failed must be cleared before the next. Found: another backward pass."
                )
            self._skip(self._ready.overflow)
        self._scaled.begin(self._params())
        # After what DistributedDataParallel does at the end of the pass, which it will ask for only now.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(self._end_backward))

    def _end_backward(self) -> None:
        self._scaled.end(self._params())

    def _skip(self, overflow: Tensor) -> None:
        """Take a step that the loop has left out for done: the scale must fall where it did so for an overflow."""
        self._scaled.take(self._params())  # no gradient waits for its step, though zeros may stand there
        if self._scale is not None:
            self._scale.note(overflow)
        self.forget_ready()

    def forget_ready(self) -> None:
        """Let go what was made ready for a step, as in a capture that failed, where it was never computed."""
        self.recover(goes_on=True)
        self._ready.forget()
        self._clear_masters()

    def _clear_masters(self) -> None:
        for p in self._params():
            if (master := self.of(p)) is not None:
                master.grad = None

    def _check_unchanged(self, optimizer: Optimizer) -> None:
        """Raise if the gradients of this step are not those that a scaled backward pass has left."""
        assert self._scale is not None
        there = [p for p in self._params() if p.grad is not None]
        check_came_through(there, self._scaled.came_through or bool(self._scaled))
        was_changed = any(self._scaled.was_changed(p) and not self._ready.has(p, self.of(p)) for p in there)
        check_unchanged(was_changed, self._scale.value, optimizer)

    @torch.no_grad()
    def unscaled(self, value: Tensor | None = None) -> list[Tensor]:
        """Give the masters their gradients, unscaled, and return all that the step updates.

        Args:
            value: the scale of a GradScaler; None for this one's own.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        if self._stand_ins.are_in:  # within a step, or after one that failed
            return [p for group in optimizer.param_groups for p in group["params"]]
        self.recover()
        if self._scale is not None:
            if not self._scaled and not self._scaled.came_through:  # no backward pass since the last step
                return self._updated()
            value = self._scale.value
        if value is not None and self._ready.are_scaled:
            self._ready.forget()  # they were looked at, by someone who had no scaler at hand
        if not self._ready.are_all(self._pairs()):
            if self._scale is not None:
                self._check_unchanged(optimizer)
            self._move()
            self._ready.make(self._pairs(), value)
        return self._updated()

    def _updated(self) -> list[Tensor]:
        return [own for _, own in self._pairs()]

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters, each with what the step updates."""
        return [(p, p if (master := self.follow(p)) is None else master) for p in self._params()]

    # -- the step ------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        passed_on = self._passed_on  # of this very step, where a class calls its base's, or it is tried again
        self.recover(goes_on=True)
        native = hasattr(optimizer, "found_inf")
        if native and self._scale is not None:
            self._take_passed_on(optimizer)
            raise InvalidArgument(
                "one loss scale is enough. Found: torch.amp.GradScaler beside that of decorate; pass loss_scale=None."
            )
        closure = next((each for each in (*args[1:2], kwargs.get("closure")) if each is not None), None)
        in_its_pass = self._fused and self._ready.overflow is None
        if closure is not None and (native or self._scale is not None):
            raise InvalidArgument(
                "an optimizer's step takes no closure where its gradients are scaled. Found: one. bfloat16 needs no "
                "scale."
            )
        if in_its_pass:
            if self._scale is not None:
                self._check_unchanged(optimizer)
                self._hand_over(optimizer, grad_scale=self._scale.value)
            self._move()
            return None
        if closure is not None:
            self._ready.forget()
            others = {name: value for name, value in kwargs.items() if name != "closure"}
            return (args[0], self._on_parameters(optimizer, closure)), others
        if native or passed_on:
            passed_on = self._take_passed_on(optimizer) if native else passed_on
            self._check_divided(passed_on["grad_scale"])
            self.unscaled(passed_on["grad_scale"])
            self._passed_on, overflow = passed_on, passed_on["found_inf"]
        else:
            if self._scale is not None and self._ready.overflow is None:
                self._check_unchanged(optimizer)
            self.unscaled()
            overflow = self._ready.overflow if self._scale is not None else None
        self.waits_to_begin = overflow is not None and self._skips_itself and begins_momentum(optimizer)
        if overflow is not None and self._skips_itself and not self.waits_to_begin:
            self._hand_over(optimizer, grad_scale=None, found_inf=overflow)
        elif overflow is not None and bool(overflow.to("cpu") != 0):  # this waits for the device
            self._hidden.hide(self._params())
            return None
        self.waits_to_begin = False
        self._stand_ins.put_in(optimizer)
        return None

    def _on_parameters(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure for the optimizer, which updates masters: the loop's own knows the model's parameters."""

        def run() -> Any:
            self._swap_out(optimizer)
            loss = closure()
            self._swap_out(optimizer)  # a class may give it to its base's step, which returns from one of its own
            self._ready.forget()
            self.unscaled()
            self._stand_ins.put_in(optimizer)
            return loss

        return run

    def _take_passed_on(self, optimizer: Optimizer) -> dict[str, Any]:
        """Take what torch.amp.GradScaler has set: the step of a master needs it no more, and one that is refused."""
        return {name: vars(optimizer).pop(name, None) for name in ("grad_scale", "found_inf")}

    def _check_divided(self, value: Tensor | None) -> None:
        if value is not None and self._ready.are_scaled and self._ready.are_all(self._pairs()):
            self._ready.forget()
            raise InvalidArgument(
                "master_params() must be given the scaler of the loop, or gradients stay scaled. Found: none. Call "
                "accel.amp.master_params(optimizer, scaler)."
            )

    def _hand_over(self, optimizer: Optimizer, **values: Any) -> None:
        vars(optimizer).update(values)
        self._hands_over = True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._swap_out(optimizer)
        self._hidden.show()
        overflow: Tensor | None = self._ready.overflow
        if self._fused and overflow is None and self._scale is not None:
            overflow = optimizer.overflow  # type: ignore[attr-defined]
        self._take_back(optimizer)
        vars(optimizer).update(self._passed_on)
        self._passed_on = {}
        self._finish(overflow)
        self._unfitting.clear()

    def _finish(self, overflow: Tensor | None) -> None:
        if self._scale is not None:
            self._scale.note(torch.zeros(()) if overflow is None else overflow)
        take_memory(self._params())
        self._scaled.take(self._params())
        self._ready.forget()

    def _take_back(self, optimizer: Optimizer) -> None:
        if self._hands_over:
            self._hands_over = False
            self._take_passed_on(optimizer)

    @torch.no_grad()
    def _swap_out(self, optimizer: Optimizer) -> None:
        """Put the parameters back, as their masters round."""
        masters = self._stand_ins.take_out(optimizer)
        known = self._known()
        written = next((p for p in masters if known.get(p) != p._version), None)
        for p, master in masters.items():
            p.copy_(master)
            master.grad = None
            self.agree([p])
        check_not_written(written, optimizer)

    @torch.no_grad()
    def recover(self, *, goes_on: bool = False) -> None:
        """Put back what a step has left that failed, of which torch tells nobody.

        Gradients stay, so that it may be tried again. Where the loop has cleared them, those of masters stood in for
        the model's.

        Args:
            goes_on: the step is tried again, or has called that of its base class. Gradients are not looked at then:
                that waits for the device.
        """
        optimizer = self._optimizer()
        if optimizer is None or not (self._stand_ins.are_in or self._hands_over or self._passed_on or self._hidden):
            return
        for p, master in self._stand_ins.take_out(optimizer).items():
            p.copy_(master)
            self.agree([p])
            if master.grad is None:
                p.grad = None
            elif not goes_on and p.grad is not None and not bool(values_of(master.grad).any()):
                p.grad.zero_()
        self._take_back(optimizer)
        self._passed_on = {}
        if self._hidden:  # a step that overflowed changes nothing, so it is done
            self._hidden.drop()
            self._finish(self._ready.overflow)
            self._clear_masters()

    def _move(self) -> None:
        """Follow a model that was moved to another device, and refuse one whose dtype was changed."""
        for p in self._params():
            master = self.of(p)
            if master is None:
                self._adopt(p)
                continue
            if p.dtype not in _HALF:
                raise InvalidArgument(f"a decorated model's weights must stay 16-bit. Found: a parameter of {p.dtype}.")
            if master.device != p.device:
                optimizer = self._optimizer()
                assert optimizer is not None
                optimizer.state[p][NAME] = master.to(p.device)
            self.follow(p)
        if self._scale is not None and self._params() and self._scale.value.device != self._params()[0].device:
            self._scale.to(self._params()[0].device)

    def _adopt(self, p: Tensor) -> None:
        """Give a 16-bit parameter that was added later its master weights."""
        optimizer = self._optimizer()
        if self._keeps and not self._fused and p.dtype in _HALF and optimizer is not None:
            optimizer.state[p][NAME] = p.detach().float()
            self.agree([p])

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        # Within a step, or after one that failed: who knows which, so they are put in again.
        self._puts_in = self._stand_ins.are_in
        self._stand_ins.take_out(optimizer)

    def _after_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if self._puts_in:
            self._stand_ins.put_in(optimizer)
        return None if self._scale is None else {**state_dict, "loss_scale": self._scale.state_dict()}

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        self.recover()
        self._kept = {p: master for p in self._params() if (master := self.follow(p)) is not None}
        self._loaded_scale = state_dict.get("loss_scale")
        # Of weights that were never updated: an optimizer takes any state for one it has made, and misses its own.
        state_dict, self._bare = without_bare_masters(optimizer, state_dict)
        if self._fused:
            return state_dict
        return sealed(state_dict, self._params(), self._kept)

    @torch.no_grad()
    def _after_load(self, optimizer: Optimizer) -> None:
        for p, kept in self._kept.items():
            own = optimizer.state[p]
            opened(own, kept)
            loaded = own.get(NAME, self._bare.get(p, kept)).to(kept.device, kept.dtype)
            own[NAME] = kept
            if torch.equal(loaded.to(p.dtype), p):
                kept.copy_(loaded)
            else:  # the model is loaded later, or has gone on in float32, where nobody updates master weights
                self._unfitting[p] = loaded
        self.agree(self._kept)
        self._kept, self._bare = {}, {}
        if self._scale is not None and self._loaded_scale is not None:
            self._scale.load_state_dict(self._loaded_scale)
        self._loaded_scale = None
        self._scaled.forget(self._params())
        self._ready.forget()
