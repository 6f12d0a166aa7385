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
from torch import Tensor
from torch.optim import Optimizer

from accel.amp.gradients import Seen, unscale
from accel.amp.loss_scale import DynamicLossScale
from accel.amp.master_option import without_bare_masters
from accel.errors import InvalidArgument
from accel.optim import MultiTensorOptimizer

_NAME = "master"
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
    return masters.unscaled(None if scaler is None else scaler._scale)


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
        self._swapped: list[tuple[dict[str, Any], list[Tensor]]] = []
        """Groups, and the parameters that masters stand in for."""
        self._set_aside: list[tuple[Tensor, Tensor]] = []
        self._ready: Tensor | None = None
        """Whether gradients overflowed, once masters have theirs; None before that."""
        self._ready_for: dict[Tensor, Seen] = {}
        """The gradients that they are made of."""
        self._versions: dict[Tensor, Seen] = {}
        """The gradients that the last scaled backward pass has left."""
        self._rounded: dict[Tensor, int] = {}
        """Version of each parameter when it was last what its master weights round to."""
        self._passed_on: dict[str, Any] = {}
        """What torch.amp.GradScaler has set for this step."""
        self._hands_over = False
        """The optimizer has been given a scale, or whether gradients overflowed, for this step."""
        own = [p for p in self._params() if keeps and p in values]
        for p in own:
            optimizer.state[p][_NAME] = values[p]
        self.agree(own)
        if not self._fused:
            # torch.amp.GradScaler then passes its scale on, in place of refusing 16-bit gradients.
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._add_scale),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        self._kept: dict[Tensor, Tensor] = {}
        self._bare: dict[Tensor, Tensor] = {}
        self._unfitting: dict[Tensor, Tensor] = {}
        """Master weights of a loaded state that don't round to the parameters; these may be loaded later."""
        self._loaded_scale: Any = None
        if scale is not None:
            scale.on_backward.append(self._begin_backward)
            scale.holds.append(self._holds)
        _all[optimizer] = self

    def remove(self) -> dict[Tensor, Tensor]:
        """Let the optimizer step as it did, without master weights, and return these."""
        optimizer = self._optimizer()
        masters = {p: master for p in self._params() if (master := self.follow(p)) is not None}
        for handle in self._handles:
            handle.remove()
        if self._scale is not None:
            self._scale.on_backward.remove(self._begin_backward)
            self._scale.holds.remove(self._holds)
        if optimizer is None:
            return masters
        for p in masters:
            del optimizer.state[p][_NAME]
            if not optimizer.state[p]:
                del optimizer.state[p]  # many optimizers take any state for one they have made
        if not self._fused and not self._skips_itself:
            vars(optimizer).pop("_step_supports_amp_scaling", None)
        _all.pop(optimizer, None)
        return masters

    @property
    def is_between_steps(self) -> bool:
        """False while gradients are scaled, and wait for their step."""
        return self._scale is None or not self._holds()

    def _params(self) -> list[Tensor]:
        optimizer = self._optimizer()
        return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]

    def of(self, p: Tensor) -> Tensor | None:
        """Return the master weights of a parameter, None if it has none."""
        optimizer = self._optimizer()
        if optimizer is None or p not in optimizer.state:
            return None
        master: Tensor | None = optimizer.state[p].get(_NAME)
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
        for p in self._params():
            self.follow(p)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _holds(self) -> bool:
        return any(p.grad is not None and p in self._versions for p in self._params())

    def _begin_backward(self) -> None:
        if self._ready is not None:
            # A loop that skips a step clears the gradients. This waits for the device, where it would raise otherwise.
            if any(p.grad is not None and bool(p.grad.any()) for p in self._params()):
                raise InvalidArgument("master_params() must be called after the last backward pass of a step.")
            self._skip(self._ready)
        # After what DistributedDataParallel does at the end of the pass, which it will ask for only now.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(self._end_backward))

    def _end_backward(self) -> None:
        self._versions = self._seen()

    def _skip(self, overflow: Tensor) -> None:
        """Take a step that the loop has left out for done: the scale must fall where it did so for an overflow."""
        if self._scale is not None:
            self._versions = {}  # no gradient waits for its step, though zeros may stand there
            self._scale.note(overflow)
            self._scale.settle()
            self._scale.came_through = True  # it does, at this moment
        self._ready, self._ready_for = None, {}
        for p in self._params():
            if (master := self.of(p)) is not None:
                master.grad = None

    def _seen(self) -> dict[Tensor, Seen]:
        """Return which gradients there are, and how often each has been written to."""
        return {p: Seen(weakref.ref(p.grad), p.grad._version) for p in self._params() if p.grad is not None}

    def _are_ready(self) -> bool:
        """Return whether masters have their gradients, of the ones that are there now."""
        there = {p for p in self._params() if p.grad is not None and self.of(p) is not None}
        as_they_were = all(seen.is_still(p) for p, seen in self._ready_for.items())
        return self._ready is not None and as_they_were and there == set(self._ready_for)

    def _seen_of_halves(self) -> dict[Tensor, Seen]:
        return {p: seen for p, seen in self._seen().items() if self.of(p) is not None}

    def _check_unchanged(self, optimizer: Optimizer) -> None:
        """Raise if the gradients of this step are not those that a scaled backward pass has left."""
        assert self._scale is not None
        grads = {p: p.grad for p in self._params() if p.grad is not None}
        if grads and not self._scale.came_through and not self._versions:
            raise InvalidArgument(
                "the gradients must come through the output of the decorated model, where the loss scale is applied. "
                "Found: gradients of a step in which nothing did. Decorate the module that the loop calls, or scale "
                "the loss by torch.amp.GradScaler and pass loss_scale=None."
            )
        for p, grad in grads.items():
            seen = self._versions.get(p)
            if seen is not None and seen.gradient() is grad and seen.version != grad._version:
                raise InvalidArgument(
                    f"gradients must not be changed while they are scaled, by {float(self._scale.value):g} now. Found: "
                    "one that was, between backward and step. Clip or change those of "
                    f"accel.amp.master_params({type(optimizer).__name__.lower()}), which are not scaled."
                )

    @torch.no_grad()
    def unscaled(self, value: Tensor | None = None) -> list[Tensor]:
        """Give the masters their gradients, unscaled, and return all that the step updates.

        Args:
            value: the scale of a GradScaler; None for this one's own.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        if self._scale is not None:
            if not self._versions and not self._scale.came_through:  # no backward pass since the last step
                return self._updated()
            value = self._scale.value
        if not self._are_ready():
            if self._scale is not None:
                self._check_unchanged(optimizer)
            self._move()
            for p in self._params():
                master = self.of(p)
                if master is not None:
                    master.grad = None if p.grad is None else p.grad.float()
            grads = [each.grad for each in self._updated() if each.grad is not None]
            self._ready = torch.zeros(()) if value is None else unscale(grads, value)
            self._ready_for = self._seen_of_halves()
        return self._updated()

    def _updated(self) -> list[Tensor]:
        return [p if (master := self.follow(p)) is None else master for p in self._params()]

    # -- the step ------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._swap_out(optimizer)  # where the step before has failed
        native = hasattr(optimizer, "found_inf")
        if native and self._scale is not None:
            raise InvalidArgument(
                "one loss scale is enough. Found: torch.amp.GradScaler beside that of decorate; pass loss_scale=None."
            )
        closure = next((each for each in (*args[1:2], kwargs.get("closure")) if each is not None), None)
        in_its_pass = self._fused and self._ready is None
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
            self._ready, self._ready_for = None, {}
            others = {name: value for name, value in kwargs.items() if name != "closure"}
            return (args[0], self._on_parameters(optimizer, closure)), others
        if native:
            self._passed_on = {name: vars(optimizer).pop(name, None) for name in ("grad_scale", "found_inf")}
            self.unscaled(self._passed_on["grad_scale"])
            overflow = self._passed_on["found_inf"]
        else:
            if self._scale is not None and self._ready is None:
                self._check_unchanged(optimizer)
            self.unscaled()
            overflow = self._ready if self._scale is not None else None
        if overflow is not None and self._skips_itself:
            self._hand_over(optimizer, grad_scale=None, found_inf=overflow)
        elif overflow is not None and bool(overflow.to("cpu") != 0):  # this waits for the device
            self._hide_gradients()
            return None
        self._swap_in(optimizer)
        return None

    def _on_parameters(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure for the optimizer, which updates masters: the loop's own knows the model's parameters."""

        def run() -> Any:
            self._swap_out(optimizer)
            loss = closure()
            self._ready, self._ready_for = None, {}
            self.unscaled()
            self._swap_in(optimizer)
            return loss

        return run

    def _hand_over(self, optimizer: Optimizer, **values: Any) -> None:
        vars(optimizer).update(values)
        self._hands_over = True

    def _hide_gradients(self) -> None:
        """Let the step find no gradient, so that it changes nothing."""
        for p in self._params():
            if p.grad is not None:
                self._set_aside.append((p, p.grad))
                p.grad = None

    def _swap_in(self, optimizer: Optimizer) -> None:
        """Put masters, with the state of their parameters, in the place of these.

        A parameter's own data must not be replaced by one of another dtype: torch then gives it another accumulator,
        of which DistributedDataParallel knows nothing.
        """
        for group in optimizer.param_groups:
            self._swapped.append((group, group["params"]))
            group["params"] = [self._stand_in(optimizer, p) for p in group["params"]]

    def _stand_in(self, optimizer: Optimizer, p: Tensor) -> Tensor:
        own = optimizer.state.get(p, {})
        if _NAME not in own:
            return p
        del optimizer.state[p]
        master: Tensor = own.pop(_NAME)
        if own:  # many optimizers take any state for one they have made
            optimizer.state[master] = own
        return master

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._swap_out(optimizer)
        for p, grad in self._set_aside:
            p.grad = grad
        self._set_aside.clear()
        overflow: Tensor | None = self._ready
        if self._fused and overflow is None and self._scale is not None:
            overflow = optimizer.overflow  # type: ignore[attr-defined]
        if self._hands_over:
            self._hands_over = False
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)
        vars(optimizer).update(self._passed_on)
        if self._scale is not None:
            self._scale.note(torch.zeros(()) if overflow is None else overflow)
        self._passed_on, self._ready, self._ready_for, self._versions = {}, None, {}, {}
        self._unfitting.clear()

    @torch.no_grad()
    def _swap_out(self, optimizer: Optimizer) -> None:
        """Put the parameters back, as their masters round."""
        for group, params in self._swapped:
            for p, master in zip(params, group["params"], strict=True):
                if master is not p:
                    # A state of its own is there where a capture has failed within the step, and was undone.
                    own = {**optimizer.state.get(p, {}), **optimizer.state.pop(master, {})}
                    optimizer.state[p] = {**own, _NAME: master}
                    p.copy_(master)
                    master.grad = None
                    self.agree([p])
            group["params"] = params
        self._swapped.clear()

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
                optimizer.state[p][_NAME] = master.to(p.device)
            self.follow(p)
        if self._scale is not None and self._params() and self._scale.value.device != self._params()[0].device:
            self._scale.to(self._params()[0].device)

    def _adopt(self, p: Tensor) -> None:
        """Give a 16-bit parameter that was added later its master weights."""
        optimizer = self._optimizer()
        if self._keeps and not self._fused and p.dtype in _HALF and optimizer is not None:
            optimizer.state[p][_NAME] = p.detach().float()
            self.agree([p])

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _add_scale(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        return None if self._scale is None else {**state_dict, "loss_scale": self._scale.state_dict()}

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        self._kept = {p: master for p in self._params() if (master := self.follow(p)) is not None}
        self._loaded_scale = state_dict.get("loss_scale")
        # Of weights that were never updated: an optimizer takes any state for one it has made, and misses its own.
        state_dict, self._bare = without_bare_masters(optimizer, state_dict)
        if self._fused:
            return state_dict
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        halves = {key for key, p in zip(keys, self._params(), strict=False) if p in self._kept}
        sealed = {
            key: {name: value if name == "step" else _Unrounded(value) for name, value in own.items()}
            if key in halves
            else own
            for key, own in state_dict["state"].items()
        }
        return {**state_dict, "state": sealed}

    @torch.no_grad()
    def _after_load(self, optimizer: Optimizer) -> None:
        for p, kept in self._kept.items():
            own = optimizer.state[p]
            for name, value in own.items():
                own[name] = value.opened(kept) if isinstance(value, _Unrounded) else value
            loaded = own.get(_NAME, self._bare.get(p, kept)).to(kept.device, kept.dtype)
            own[_NAME] = kept
            if torch.equal(loaded.to(p.dtype), p):
                kept.copy_(loaded)
            else:  # the model is loaded later, or has gone on in float32, where nobody updates master weights
                self._unfitting[p] = loaded
        self.agree(self._kept)
        self._kept, self._bare = {}, {}
        if self._scale is not None and self._loaded_scale is not None:
            self._scale.load_state_dict(self._loaded_scale)
        self._loaded_scale, self._ready, self._ready_for, self._versions = None, None, {}, {}


class _Unrounded:
    """Holds a value that torch would round to the parameter's dtype while it loads a state."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def opened(self, like: Tensor) -> Any:
        """Return it, for master weights `like`."""
        if not isinstance(self._value, Tensor):
            return self._value
        dtype = like.dtype if self._value.is_floating_point() else self._value.dtype
        return self._value.to(like.device, dtype, copy=True)
