"""`decorate`: train a model in mixed precision, with the loop as it is."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel.amp.loss_scale import DynamicLossScale
from accel.amp.mixed_call import Float32Island, MixedCall
from accel.errors import InvalidArgument

LossScale = DynamicLossScale | float | Literal["dynamic"] | None

_LEVELS = ("O0", "O1", "O2")
_CALLS = "_accel_mixed_call"
"""The attribute of a decorated model that makes its calls: it goes along in copies and pickles."""
_KEY = "loss_scale"
"""Of a loss scale, in the state of an optimizer."""
_of_optimizers: weakref.WeakKeyDictionary[Any, list[RemovableHandle]] = weakref.WeakKeyDictionary()
"""What takes the hooks off the optimizers that were decorated with a model."""
_classes: weakref.WeakKeyDictionary[type[Any], weakref.ref[type[Any]]] = weakref.WeakKeyDictionary()
"""The classes of decorated models, by their own."""


def decorate(
    models: Any,
    optimizers: Any = None,
    /,
    *,
    level: str = "O2",
    dtype: torch.dtype | None = None,
    keep_fp32: Collection[type[nn.Module] | str] = (),
    loss_scale: LossScale = "dynamic",
) -> Any:
    """Train models in mixed precision; the loop stays `loss.backward(); optimizer.step()`.

    | level | computes in | batch norm |
    |---|---|---|
    | O0 | float32 | float32 |
    | O1 | `torch.autocast` | autocast |
    | O2 | 16 bits, by copies of the weights that a call makes | float32 |

    Parameters, their gradients and the optimizer stay as they are, in float32: the parameters are the master weights.
    Inputs are cast at the model's border, outputs are float32. With float16, gradients are multiplied by a loss scale
    where they enter the model, at its output, and divided where they leave it; a step that overflows is skipped.

    Args:
        models: one or several, trained together; they are changed in place. One in `DistributedDataParallel` too.
        optimizers: one or several, whose `state_dict` is to have the loss scale; nothing else is done to them.
        level: "O0" to "O2"; default "O2".
        dtype: torch.float16 or torch.bfloat16; default float16 on CUDA, bfloat16 elsewhere.
        keep_fp32: at O2, classes and names of modules that compute in float32 beside batch normalisation.
        loss_scale: "dynamic" (default; none for bfloat16), a number that stays, a `DynamicLossScale`, or None for none:
            where the loop has a `torch.amp.GradScaler`.

    Returns:
        What was passed: models, and optimizers unless they were left out; in lists where sequences were passed.

    Raises:
        InvalidArgument: if an argument is wrong; nothing has been changed then.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = decorate(model, optimizer, level="O2", dtype=torch.bfloat16)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> model.weight.dtype, model.weight.grad.dtype
        (torch.float32, torch.float32)

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018; the levels are those of NVIDIA's apex.amp, float32
    parameters those of FSDP2's `MixedPrecisionPolicy`.
    """
    given, chosen = _listed(models), [] if optimizers is None else _listed(optimizers)
    plain = list({id(each): each for each in map(_inner, given)}.values())
    if level not in _LEVELS:
        raise InvalidArgument(f"level must be one of {', '.join(_LEVELS)}. Found: {level!r}.")
    _check(plain, chosen)
    dtype = _dtype(dtype, plain)
    scale = _scale(loss_scale, dtype)
    kept = [_kept(model, level, keep_fp32) for model in plain]
    if level != "O0":
        if scale is not None:
            scale.to(next((p.device for model in plain for p in model.parameters()), torch.device("cpu")))
        for model, own in zip(plain, kept, strict=True):
            _decorate(model, MixedCall(dtype, scale, own, autocast=level == "O1"))
        if scale is not None:
            handles = [handle for each in chosen for handle in _with_scale(each, scale)]
            _of_optimizers.update((vars(model)[_CALLS], handles) for model in plain)
    if optimizers is None:
        return given if isinstance(models, Sequence) else given[0]
    return (
        given if isinstance(models, Sequence) else given[0],
        chosen if isinstance(optimizers, Sequence) else chosen[0],
    )


def undecorate(models: Any) -> Any:
    """Take off what `decorate` has put on models, at any time, and return what was passed.

    Weights, gradients and optimizers are left as they are.

    Args:
        models: one, or several; those that are not decorated are left as they are.

    Example:
        >>> model = decorate(nn.Linear(4, 2), dtype=torch.bfloat16)
        >>> type(undecorate(model)) is nn.Linear
        True
    """
    for model in map(_inner, _listed(models)):
        calls = calls_of(model)
        if calls is None:
            continue
        for module in calls.kept:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in [key for key, hook in hooks.items() if _is_island(hook, calls)]:
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
        for handle in _of_optimizers.pop(calls, ()):
            handle.remove()
        model.__class__ = type(model).__mro__[1]
        del vars(model)[_CALLS]
    return models


def master_params(optimizer: Optimizer) -> list[Tensor]:
    """Return the float32 weights that an optimizer updates, to clip gradients or look at them: its parameters.

    Args:
        optimizer: of a decorated model.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> model, optimizer = decorate(model, optimizer, dtype=torch.bfloat16)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> norm = torch.nn.utils.clip_grad_norm_(master_params(optimizer), max_norm=1.0)
        >>> optimizer.step()
    """
    return [p for group in optimizer.param_groups for p in group["params"]]


def calls_of(model: nn.Module) -> MixedCall | None:
    """Return what makes the calls of a decorated model; None if it is not decorated."""
    calls: MixedCall | None = vars(model).get(_CALLS)
    return calls


# -- the class of a decorated model ------------------------------------------------------------------------------------


def _decorate(model: nn.Module, calls: MixedCall) -> None:
    for module in calls.kept:
        Float32Island(calls).register(module)
    vars(model)[_CALLS] = calls
    model.__class__ = _decorated(type(model))


def _decorated(kind: type[Any]) -> type[Any]:
    """Return a subclass that makes calls in mixed precision, under the name of the class itself.

    A subclass and no function on the object, so that copies and pickles of the model call themselves.
    """
    known = _classes.get(kind)
    made = None if known is None else known()
    if made is None:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        made = type(kind.__name__, (kind,), {**names, "forward": _forward(kind), "__reduce_ex__": _reduced(kind)})
        _classes[kind] = weakref.ref(made)
    return made


def _forward(kind: type[Any]) -> Callable[..., Any]:
    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain, calls = functools.partial(kind.forward, self), calls_of(self)
        return plain(*args, **kwargs) if calls is None else calls(self, plain, *args, **kwargs)

    around: Any = torch.compiler.disable
    uncompiled: Callable[..., Any] = around(forward, recursive=False)  # the model's own code may be compiled
    return uncompiled


def _reduced(kind: type[Any]) -> Callable[..., tuple[Any, ...]]:
    def reduced(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        plain: Any = kind.__reduce_ex__
        _, (_, *rest), *others = plain(self, max(2, protocol))
        return (_anew, (kind, *rest), *others)

    return reduced


def _anew(kind: type[Any], *rest: Any) -> Any:
    made = _decorated(kind)
    return made.__new__(made, *rest)


def _is_island(hook: Any, calls: MixedCall) -> bool:
    owner = getattr(hook, "__self__", None)
    return isinstance(owner, Float32Island) and owner.calls is calls


# -- the loss scale in checkpoints -------------------------------------------------------------------------------------


def _with_scale(optimizer: Optimizer, scale: DynamicLossScale) -> list[RemovableHandle]:
    def save(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, _KEY: scale.state_dict()}

    def load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if _KEY in state_dict:
            scale.load_state_dict(state_dict[_KEY])

    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):  # one around another, that has no hooks of its own
        return []
    return [
        optimizer.register_state_dict_post_hook(save),
        optimizer.register_load_state_dict_pre_hook(load),
    ]


# -- arguments ---------------------------------------------------------------------------------------------------------


def _inner(model: Any) -> Any:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Sequence) else [given]


def _dtype(dtype: torch.dtype | None, models: list[nn.Module]) -> torch.dtype:
    if dtype is None:
        on_cuda = any(p.is_cuda for model in models for p in model.parameters())
        return torch.float16 if on_cuda else torch.bfloat16
    if dtype not in (torch.float16, torch.bfloat16):
        raise InvalidArgument(f"dtype must be torch.float16 or torch.bfloat16. Found: {dtype}.")
    return dtype


def _scale(given: LossScale, dtype: torch.dtype) -> DynamicLossScale | None:
    if isinstance(given, DynamicLossScale):
        return given
    if given == "dynamic":
        return DynamicLossScale() if dtype == torch.float16 else None
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < float("inf"):
        raise InvalidArgument(
            f'loss_scale must be "dynamic", a number > 0, a DynamicLossScale or None. Found: {given!r}.'
        )
    number = float(given)
    return DynamicLossScale(
        init_scale=number, growth_factor=1.0, backoff_factor=1.0, min_scale=number, max_scale=number
    )


def _kept(model: nn.Module, level: str, keep: Collection[type[nn.Module] | str]) -> list[nn.Module]:
    """Return the modules that are to compute in float32, without those inside of them."""
    if isinstance(keep, str | type):
        raise InvalidArgument(f"keep_fp32 must be a list of classes and names. Found: {keep!r}.")
    if keep and level != "O2":
        raise InvalidArgument("keep_fp32 is for level O2: the others keep all weights in float32.")
    names = {entry for entry in keep if isinstance(entry, str)}
    types = tuple(entry for entry in keep if not isinstance(entry, str))
    modules = dict(model.named_modules())
    if unknown := sorted(names - set(modules)):
        raise InvalidArgument(f"keep_fp32 must name modules of the model. Found: {unknown[0]!r}.")
    kept: dict[str, nn.Module] = {}
    for name, module in modules.items():
        within = any(name.startswith(f"{outer}.") or outer == "" for outer in kept)
        if not within and (name in names or (types and isinstance(module, types))):
            kept[name] = module
    return list(kept.values())


def _check(models: list[Any], optimizers: list[Any]) -> None:
    """Raise InvalidArgument if a model can't be decorated, or an argument is something else."""
    for model in models:
        if not isinstance(model, nn.Module):
            raise InvalidArgument(f"models must be nn.Module. Found: {type(model).__name__}.")
        name = type(model).__name__
        if any(calls_of(part) is not None for part in model.modules()):
            raise InvalidArgument(f"the model {name} is decorated already, or a part of it is.")
        if any(model is part for other in models if other is not model for part in other.modules()):
            raise InvalidArgument(f"models must not be parts of each other. Found: {name} in another.")
        if isinstance(model, torch.jit.ScriptModule) or "forward" in vars(model):
            raise InvalidArgument(f"a model must have its forward in its class. Found: {name}, which has it elsewhere.")
        for own, p in model.named_parameters():
            if is_lazy(p):
                raise InvalidArgument(f"lazy modules must have seen a batch. Found: {own} of {name} without a shape.")
            if hasattr(p, "device_mesh"):
                raise InvalidArgument(f"{own} of {name} is sharded. Use fully_shard's MixedPrecisionPolicy instead.")
            if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16):
                raise InvalidArgument(
                    f"weights must be float32: they are what the optimizer updates. Found: {own} {p.dtype}; call "
                    "float() on the model."
                )
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise InvalidArgument(f"optimizers must be torch.optim.Optimizer. Found: {type(optimizer).__name__}.")
