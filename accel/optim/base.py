"""What all optimizers here share: parameters, state, the step, and its two ways to mixed precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from operator import attrgetter, is_, itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from accel.errors import InvalidArgument, InvalidState
from accel.kernels.optimizers import Batch, Hypers, Kind, Scaling, UpdateOutcome, Updater, work_dtype
from accel.kernels.support import runs_triton
from accel.optim import checks
from accel.optim.apex import ApexStep

_HALF = frozenset({torch.float16, torch.bfloat16})
_GRAD, _DTYPE, _VERSION = attrgetter("grad"), attrgetter("dtype"), attrgetter("_version")
_IS_NONE = partial(is_, None)
_BACKENDS = ("accel", "apex")
_NO_OPTIONS = frozenset({"self", "__class__", "params", "backend"})


def given(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the options among the arguments of a constructor, by name: the defaults of parameter groups.

    With torch's own switches, so that a checkpoint is read by torch.optim; nothing here reads them.
    """
    options = {name: value for name, value in arguments.items() if name not in _NO_OPTIONS}
    return {**options, "foreach": None, "fused": None, "differentiable": False}


class MultiTensorOptimizer(Optimizer):
    """Base of the optimizers: one update for all parameters, kernels on a GPU, torch's own operators elsewhere.

    Mixed precision works in two ways. `torch.amp.GradScaler` gives the loss scale, and whether gradients are finite, to
    the step, as it does for torch's fused optimizers: nothing waits for the device. Whoever sets `grad_scale` alone has
    the step look for infinity and NaN itself, in the pass that finds the norm, and reads the answer from `overflow`.
    A skipped step changes nothing, step counters included. `p.grad` stays as backward left it, scaled and not clipped.

    Attributes:
        grad_norm: norm of all gradients of the last step, unscaled and before clipping, on the device; None where it
            was not needed. The next step overwrites it.
        overflow: 1 if the last step was skipped, else 0, on the device; None where nobody looked.
    """

    kind: ClassVar[Kind]
    switches: ClassVar[dict[str, str]] = {}
    """Options that are on or off → the column of `Hypers` that says so."""
    _step_supports_amp_scaling = True
    _apex: ApexStep | None

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], backend: str = "accel") -> None:
        if backend not in _BACKENDS:
            owner = type(self).__name__
            raise InvalidArgument(f"{owner}: backend must be one of {', '.join(_BACKENDS)}. Found: {backend!r}.")
        self._start()
        super().__init__(params, defaults)
        if backend == "apex":
            _use_apex(self)

    def _start(self) -> None:
        self._updater = Updater(self.kind)
        self._outcome = UpdateOutcome(None, None)
        self._rounded = Rounded()
        self._apex = None

    # What torch.optim.Optimizer asks.

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients of the last step."""
        return self._outcome.norm

    @property
    def overflow(self) -> Tensor | None:
        """Whether the last step was skipped."""
        return self._outcome.overflow

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss and its gradients again; None (default) takes the gradients that are there.

        Returns:
            What the closure returned.

        Raises:
            InvalidArgument: if a gradient is sparse; nothing has been changed then.
            InvalidState: within the capture of a CUDA graph: given a closure, or if no step has been run before.
        """
        loss = None
        if closure is not None:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise InvalidState(
                    f"{type(self).__name__}: a captured step takes no closure. Found: one. Compute loss and gradients "
                    "before step(), within the capture."
                )
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, or of torch's or apex's of the same kind.

        Args:
            state_dict: moments keep float32, whatever the parameters' dtype; tensors are not copied where they are of
                the right dtype and device, as torch does.

        Raises:
            InvalidArgument: if it is of another optimizer or of other parameters; nothing has been changed then.
        """
        # Last of the hooks, so that it sees what those of the user made of it.
        handle = self.register_load_state_dict_pre_hook(lambda _, state: self._checked(state))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: `params`, and options other than the optimizer's.

        Raises:
            InvalidArgument: if a parameter can't be updated here, or an option does not fit.
        """
        param_group, tensors = checks.listed(param_group)
        first = next((p for group in self.param_groups for p in group["params"]), None)
        checks.parameters(type(self).__name__, tensors, None if first is None else first.device)
        self._check_options({**self.defaults, **param_group}, tensors)
        if any(p.is_cuda for p in tensors if isinstance(p, Tensor)):
            # torch's loop would wait for step counters on a device. On a CPU its fused kernels ignore strides.
            param_group = {**param_group, "fused": True}
        super().add_param_group(param_group)

    def _check_options(self, group: dict[str, Any], params: list[Any]) -> None:
        checks.options(type(self).__name__, group)

    def _multi_tensor_groups(self) -> list[dict[str, Any]]:
        """Return the groups that are updated here."""
        return self.param_groups

    @torch._disable_dynamo  # type: ignore[attr-defined]  # addresses and step counters break its graphs, one by one
    def _update(self) -> None:
        groups = self._multi_tensor_groups()
        chosen = [list(group["params"]) for group in groups]
        grads = [list(map(_GRAD, params)) for params in chosen]
        for number, each in enumerate(grads):
            if any(map(_IS_NONE, each)):
                chosen[number] = [p for p, g in zip(chosen[number], each, strict=True) if g is not None]
                grads[number] = [g for g in each if g is not None]
        for each in grads:
            checks.gradients(type(self).__name__, each)
        if self._apex is not None:
            self._apex.step()
            return
        batches = [_batch(self, n, *own) for n, own in enumerate(zip(groups, chosen, grads, strict=True))]
        scaling = Scaling(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        self._outcome = self._updater(batches, scaling)
        for number, batch in enumerate(batches):
            self._rounded.remember(number, batch.params, batch.masters)

    def refresh(self) -> None:
        """Bring what changed on the host to the device, for the replay of a captured step.

        That is learning rates and other numbers, and 16-bit weights that someone else wrote. A step that is not
        captured does so itself, and `accel.graphs.capture` before each replay. Tensors on the device need no refresh.
        """
        groups = self._multi_tensor_groups()
        params = [p for group in groups for p in group["params"]]
        if params:
            self._updater.send([numbers(group, self.switches) for group in groups], params[0])
        for number, group in enumerate(groups):
            updated = [p for p in group["params"] if "master" in self.state.get(p, {})]
            own = [self.state[p] for p in updated]
            self._rounded.remember(number, updated, _masters(self._rounded, number, group, updated, own))

    def frozen_options(self, group: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return what a captured step of a group does not read from the device; None if that is all.

        Args:
            group: one of `param_groups`.
        """
        if self._apex is not None or not any(map(runs_triton, group["params"])):
            return None
        # Tensors are copied from where they lie.
        on_device = [number for number in numbers(group, self.switches) if isinstance(number, Tensor)]
        options = (group.get(name) for name in ("nesterov", "amsgrad", "master_weights"))
        clips = group.get("max_grad_norm") is not None
        return (*on_device, *options, clips, state_names(group), counts_steps(group))

    # Checkpoints and copies.

    def _checked(self, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Return a state as it is to be loaded, None for as it is; raise InvalidArgument if it is of another one."""
        return checked(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_uses_apex": self._apex is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        uses_apex = state.pop("_uses_apex", False)
        if "_updater" not in self.__dict__:
            self._start()
        before = self.__dict__.get("param_groups", [])
        super().__setstate__(state)
        for group, own in zip_longest(self.param_groups, before[: len(self.param_groups)], fillvalue=self.defaults):
            # Options that torch has not, and its state says nothing of, stay as they are.
            for name, value in self.defaults.items():
                group.setdefault(name, own.get(name, value))
            step = float(group.get("step", 1)) if counts_steps(group) else None
            for p in group["params"]:
                if p in self.state:
                    self.state[p] = taken_in(p, self.state[p], step)
        # Weights that have gone on since the loaded state was saved stay; its master weights follow them.
        self._rounded.clear()
        if uses_apex:
            _use_apex(self)
        elif self._apex is not None:
            self._apex.read_steps()


def _use_apex(optimizer: MultiTensorOptimizer) -> None:
    optimizer._apex = step = ApexStep(optimizer)
    optimizer._step_supports_amp_scaling = False  # GradScaler unscales, and skips the step itself
    optimizer.register_state_dict_pre_hook(lambda _: step.write_steps())


def numbers(group: dict[str, Any], switches: dict[str, str]) -> Hypers:
    """Return the numbers of a group, for the kernels.

    Args:
        group: one of `param_groups`.
        switches: of its optimizer.
    """
    first, second = group["betas"] if "betas" in group else (group["momentum"], group["dampening"])
    return Hypers(
        group["lr"],
        first,
        second,
        group.get("eps", 0.0),
        group["weight_decay"],
        math.inf if group["max_grad_norm"] is None else group["max_grad_norm"],
        group.get("trust_coefficient", 1.0),
        -1.0 if group["maximize"] else 1.0,
        **{column: float(group[option]) for option, column in switches.items()},
    )


def state_names(group: dict[str, Any]) -> tuple[str, ...]:
    """Return the tensors that are kept for each parameter of a group."""
    if "betas" in group:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group.get("amsgrad") else ()))
    return ("momentum_buffer",) if isinstance(group["momentum"], Tensor) or group["momentum"] != 0 else ()


def counts_steps(group: dict[str, Any]) -> bool:
    """Return whether updates of each parameter of a group are counted.

    Adam's corrections depend on the step. Dampening spares the first one; without it nothing depends on the step, and
    torch keeps no counter.
    """
    dampening = group.get("dampening", 0)
    return bool(state_names(group)) and ("betas" in group or isinstance(dampening, Tensor) or dampening != 0)


def _batch(
    optimizer: MultiTensorOptimizer, number: int, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
) -> Batch:
    names, counts = state_names(group), counts_steps(group)
    has_masters = group["master_weights"] and not _HALF.isdisjoint(map(_DTYPE, params))
    # Looked up once: the hash of a tensor is a function in Python.
    own = [optimizer.state[p] for p in params] if names or counts or has_masters else []
    # First, while it can be seen which parameters were updated before anyone counted.
    steps = column_of(params, own, "step") if counts else []
    return Batch(
        numbers(group, optimizer.switches),
        params,
        grads,
        [column_of(params, own, name) for name in names],
        _masters(optimizer._rounded, number, group, params, own),
        steps,
        nesterov=bool(group.get("nesterov")),
        amsgrad=bool(group.get("amsgrad")),
    )


class Rounded:
    """Which 16-bit parameters are what their master weights round to, group by group.

    A step looks at all of a group at once, since each look at a tensor takes 0.1 µs.
    """

    def __init__(self) -> None:
        self._groups: dict[int, tuple[list[Tensor], list[Tensor | None], list[int], list[int]]] = {}
        """Number of a group → parameters, master weights, versions and addresses after its last step."""

    def clear(self) -> None:
        """Forget all."""
        self._groups.clear()

    def remember(self, group: int, params: Sequence[Tensor], masters: Sequence[Tensor | None]) -> None:
        """Note that a group's parameters are what their master weights round to."""
        if masters:
            versions, addresses = list(map(_VERSION, params)), list(map(Tensor.data_ptr, params))
            self._groups[group] = list(params), list(masters), versions, addresses

    def holds(self, group: int, params: list[Tensor], masters: list[Tensor | None]) -> bool:
        """Return whether nobody has written to a group's parameters since its last step, which had the same ones."""
        known = self._groups.get(group)
        if known is None or not (_are_same(known[0], params) and _are_same(known[1], masters)):
            return False
        return known[2] == list(map(_VERSION, params)) and known[3] == list(map(Tensor.data_ptr, params))


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


@torch.no_grad()
def _masters(
    rounded: Rounded, number: int, group: dict[str, Any], params: list[Tensor], own: list[dict[str, Any]]
) -> list[Tensor | None]:
    """Return the master weights of 16-bit parameters, after taking over what others wrote to a parameter."""
    if not group["master_weights"] or _HALF.isdisjoint(map(_DTYPE, params)):
        return []
    masters: list[Tensor | None] = [state.get("master") for state in own]
    if rounded.holds(number, params, masters):
        return masters
    for i, (p, state) in enumerate(zip(params, own, strict=True)):
        if p.dtype not in _HALF:
            masters[i] = None
        elif "master" not in state:
            masters[i] = state["master"] = _fresh(p).copy_(p)
        else:
            master = state["master"]
            # What still rounds to the parameter is kept: it has the bits that the parameter has not.
            master.copy_(torch.where(master.to(p.dtype) == p, master, p.to(master.dtype)))
    return masters


def column_of(params: list[Tensor], own: list[dict[str, Any]], name: str) -> list[Tensor]:
    """Return one state of all parameters, made where there is none yet."""
    try:
        return list(map(itemgetter(name), own))
    except KeyError:
        for p, state in zip(params, own, strict=True):
            if name not in state:
                state[name] = _counter(p, state) if name == "step" else _fresh(p)
        return list(map(itemgetter(name), own))


def _counter(param: Tensor, state: dict[str, Any]) -> Tensor:
    """Return a new counter of a parameter's updates, which has missed some where momentum is there already."""
    return torch.full((), float("momentum_buffer" in state), dtype=torch.float32, device=param.device)


def _fresh(param: Tensor) -> Tensor:
    """Return a new state of a parameter."""
    return torch.zeros_like(param, dtype=work_dtype(param.dtype), memory_format=torch.preserve_format)


# -- state that comes from a checkpoint --------------------------------------------------------------------------------


_MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})
_BESIDE = frozenset({"step", "master"})
_ACCEPTED: dict[Kind, frozenset[str]] = {
    "adam": _BESIDE | _MOMENTS | {"max_exp_avg_sq"},
    "lamb": _BESIDE | _MOMENTS,
    "sgd": _BESIDE | {"momentum_buffer"},
    "lars": _BESIDE | {"momentum_buffer"},
}
_ADAPTIVE = frozenset({"adam", "lamb"})
_ADAPTIVE_OPTIONS = ("lr", "betas", "eps", "weight_decay")
_MOMENTUM_OPTIONS = ("lr", "momentum", "weight_decay")
_MARKS: dict[Kind, tuple[frozenset[str], frozenset[str]]] = {
    "adam": (frozenset({"amsgrad", "bias_correction"}), frozenset({"grad_averaging"})),
    "lamb": (frozenset({"grad_averaging"}), frozenset()),
    "sgd": (frozenset({"nesterov"}), frozenset({"trust_coefficient"})),
    "lars": (frozenset({"trust_coefficient"}), frozenset()),
}
"""Options of which a group has one, here, in torch or in apex, and those that it has not: RAdam's state has the names
of Adam's, and LAMB's too."""


class Sealed:
    """Holds a value that torch would round to the parameter's dtype while it loads a state."""

    def __init__(self, value: Any) -> None:
        self.value = value


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter with its values sealed."""
    return {name: Sealed(value) for name, value in state.items() if value is not None}


def checked(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with its tensors sealed.

    Raises:
        InvalidArgument: if it is not one of this kind of optimizer, for these parameters.
    """
    owner, kind = type(optimizer).__name__, optimizer.kind  # type: ignore[attr-defined]
    if not {"state", "param_groups"} <= set(state_dict):
        raise InvalidArgument(f"{owner}: a state has `state` and `param_groups`. Found: {sorted(state_dict)}.")
    options = _ADAPTIVE_OPTIONS if kind in _ADAPTIVE else _MOMENTUM_OPTIONS
    groups, saved = optimizer.param_groups, state_dict["param_groups"]
    sizes, saved_sizes = ([len(group["params"]) for group in some] for some in (groups, saved))
    if sizes != saved_sizes:
        raise InvalidArgument(
            f"{owner}: the state must be of as many parameters in each group, {sizes}. Found: {saved_sizes}."
        )
    for group in saved:
        if missing := [name for name in options if name not in group]:
            raise InvalidArgument(f"{owner}: the state is of another optimizer: its groups have no {missing[0]!r}.")
        own_states = [state_dict["state"].get(key, {}) for key in group["params"]]
        counted = "step" in group or all("step" in state for state in own_states if _was_updated(state))
        if kind in _ADAPTIVE and not counted:
            raise InvalidArgument(f"{owner}: the state must say how many steps were done. Found: no 'step'.")
    params = [p for group in groups for p in group["params"]]
    places = dict(zip((key for group in saved for key in group["params"]), params, strict=True))
    states: dict[Any, Any] = {}
    for key, own in state_dict["state"].items():
        if key in places:
            _check(owner, kind, places[key], own)
            own = sealed(own)
        states[key] = own
    one_of, none_of = _MARKS[kind]
    for group in saved:
        if one_of.isdisjoint(group) or not none_of.isdisjoint(group):
            others = ", ".join(sorted(set(group) - {"params", *options}))
            raise InvalidArgument(f"{owner}: the state is of another optimizer: its groups have {others}.")
    return {**state_dict, "state": states}


def _was_updated(state: Mapping[str, Any]) -> bool:
    """Return whether a state is of a parameter that was updated; master weights are there before the first update."""
    return any(name != "master" and value is not None for name, value in state.items())


def _check(owner: str, kind: Kind, param: Tensor, state: Mapping[str, Any]) -> None:
    names = {name for name, value in state.items() if value is not None}
    needed = _MOMENTS if kind in _ADAPTIVE else frozenset()
    if (foreign := names - _ACCEPTED[kind]) or (_was_updated(state) and not needed <= names):
        raise InvalidArgument(
            f"{owner}: the state is of another optimizer: a parameter has {sorted(foreign or names)}, expected were "
            f"{sorted(needed or _ACCEPTED[kind])}. Begin without it."
        )
    for name, value in state.items():
        if isinstance(value, Tensor) and name != "step" and value.shape != param.shape:
            raise InvalidArgument(
                f"{owner}: the state is of other parameters: {name} is {list(value.shape)} for a parameter of "
                f"{list(param.shape)}."
            )


def taken_in(param: Tensor, state: Mapping[str, Any], step: float | None) -> dict[str, Any]:
    """Return the state of one parameter in the dtypes of updates; the next one brings it to the layout.

    Args:
        param: the parameter.
        state: of it, sealed or not.
        step: what its counter is where the state has none: apex counts by group, torch's SGD not at all. None if no
            steps are counted.
    """
    taken: dict[str, Any] = {}
    for name, held in state.items():
        value = held.value if isinstance(held, Sealed) else held
        if name == "step":
            counter = value if isinstance(value, Tensor) else torch.tensor(float(value))
            taken[name] = counter.to(device=param.device, dtype=torch.float32).reshape(())
        elif name != "master" or work_dtype(param.dtype) != param.dtype:
            taken[name] = value.to(device=param.device, dtype=work_dtype(param.dtype))
    if step is not None and _was_updated(taken) and "step" not in taken:
        taken["step"] = torch.tensor(step, device=param.device)
    return taken
