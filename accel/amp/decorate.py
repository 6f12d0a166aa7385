"""`decorate`: train a model in mixed precision, with the loop as it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel.amp import undecorate, weights
from accel.amp.border import Border, border_of
from accel.amp.bypass import BypassCheck
from accel.amp.checkpoint import Float32Checkpoint
from accel.amp.loss_scale import DynamicLossScale
from accel.amp.master_option import MasterOption, leave_no_masters
from accel.amp.masters import MasterWeights, masters_of
from accel.amp.moments import MomentDtypes
from accel.amp.ranks import SharedMasters
from accel.amp.step_checks import keeps_own_lists
from accel.errors import InvalidArgument

LossScale = DynamicLossScale | float | Literal["dynamic"] | None


class Level(NamedTuple):
    """What a level does."""

    casts_weights: bool = False
    keeps_norms: bool = False
    """Batch normalisation stays in float32."""
    keeps_masters: bool = False
    autocasts: bool = False


LEVELS = {
    "O0": Level(),
    "O1": Level(autocasts=True),
    "O2": Level(casts_weights=True, keeps_norms=True, keeps_masters=True),
    "O3": Level(casts_weights=True),
}


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

    | level | weights | computes in | batch norm | master weights |
    |---|---|---|---|---|
    | O0 | float32 | float32 | float32 | - |
    | O1 | float32 | autocast | autocast | - |
    | O2 | 16-bit | 16-bit | float32 | float32, in the optimizer's state |
    | O3 | 16-bit | 16-bit | 16-bit | none |

    Inputs are cast at the model's border, outputs are float32. With float16, gradients are multiplied by a loss scale
    where they enter the model, at its output, and divided in the optimizer's step; a step that overflows is skipped.
    `state_dict` of the model is float32 under the usual names, and master weights lose nothing by it.

    Args:
        models: one or several, trained together; they are changed in place. One in `DistributedDataParallel` too.
        optimizers: one or several, of nothing but these models' parameters. Those of `accel.optim` do all in one pass.
            Without any, models are for evaluation.
        level: "O0" to "O3"; default "O2".
        dtype: torch.float16 or torch.bfloat16; default float16 on CUDA, bfloat16 elsewhere.
        keep_fp32: at O2, classes and names of modules that stay in float32 beside batch normalisation.
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
        >>> model.weight.dtype, model.state_dict()["weight"].dtype
        (torch.bfloat16, torch.float32)

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018; the levels are those of NVIDIA's apex.amp.
    """
    given, chosen = _listed(models), [] if optimizers is None else _listed(optimizers)
    plain = [each.module if isinstance(each, DistributedDataParallel) else each for each in given]
    what = _level(level)
    _check(given, plain, chosen, what.keeps_masters)
    dtype = _dtype(dtype, plain)
    scale = _scale(loss_scale, dtype)
    if level != "O0":
        for each in chosen if _changes_steps(what, dtype, scale) else ():
            _check_hooks(each)
        kept = [_kept(model, what, keep_fp32) for model in plain]
        if what.casts_weights:
            weights.check(plain, [module for each in kept for module in each])
        _decorate(given, plain, chosen, what, dtype, scale, kept)
    else:
        for each in chosen:
            leave_no_masters(each)
    if optimizers is None:
        return given if isinstance(models, Sequence) else given[0]
    return (
        given if isinstance(models, Sequence) else given[0],
        chosen if isinstance(optimizers, Sequence) else chosen[0],
    )


def _decorate(
    given: list[nn.Module],
    plain: list[nn.Module],
    optimizers: list[Optimizer],
    what: Level,
    dtype: torch.dtype,
    scale: DynamicLossScale | None,
    kept: list[list[nn.Module]],
) -> None:
    values: dict[torch.Tensor, torch.Tensor] = {}
    casts: dict[nn.Module, weights.Casts] = {}
    if what.casts_weights:
        for whole, model, own in zip(given, plain, kept, strict=True):
            if isinstance(whole, DistributedDataParallel):
                del whole.reducer  # its hooks wait for float32 gradients
            casts[model] = weights.cast(model, dtype, own)
            values |= casts[model].values
            if isinstance(whole, DistributedDataParallel):
                _reduce_anew(whole)
    masters: list[MasterWeights] = []
    if _changes_steps(what, dtype, scale):
        masters += [MasterWeights(each, values, scale, keeps=what.keeps_masters) for each in optimizers]
    options = [MasterOption(each, what.keeps_masters) for each in optimizers]
    moments = [MomentDtypes(each, _cast_by(casts)) for each in optimizers if not what.keeps_masters]
    for own_moments in moments:
        own_moments.follow()
    handles: list[RemovableHandle] = []
    borders = [Border(dtype, scale if optimizers else None, what.autocasts) for _ in plain]
    for model, border in zip(plain, borders, strict=True):
        handles += border.register(model)
        if what.casts_weights:
            handles += Float32Checkpoint(masters).register(model)
    for each in casts.values():
        each.values.clear()  # those of an optimizer are kept in its state, and those of none are let go
    check = _check_of(plain, scale) if scale is not None and optimizers else None
    for whole, model, border in zip(given, plain, borders, strict=True):
        border.decoration = undecorate.Decoration(handles, casts, masters, options, moments, check, given != plain)
        border.on_call += [each.begin_call for each in masters]
        if what.keeps_masters and whole is model:
            border.on_call.append(SharedMasters(masters).begin_call)


def _changes_steps(what: Level, dtype: torch.dtype, scale: DynamicLossScale | None) -> bool:
    """Return whether optimizers get a scale or masters, as for a GradScaler: torch's own unscales no float16."""
    return what.keeps_masters or scale is not None or (what.casts_weights and dtype == torch.float16)


def _check_hooks(optimizer: Optimizer) -> None:
    """Raise InvalidArgument if a hook before the step moves weights: by scaled gradients, and past the masters."""
    owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
    if any(getattr(owner, "moves_weights", False) for owner in owners):
        raise InvalidArgument(
            "an optimizer must keep its momentum where it gets a loss scale or master weights. Found: one whose "
            "momentum a compressor has taken over; close() that, and use momentum=False, or bfloat16 at O1."
        )


def _cast_by(casts: dict[nn.Module, weights.Casts]) -> list[torch.Tensor]:
    return [p for each in casts.values() for p in each.dtypes]


def _check_of(models: list[nn.Module], scale: DynamicLossScale) -> BypassCheck:
    """Bring the scale to the device of the models, and look for gradients that take another way."""
    params = [p for model in models for p in model.parameters()]
    scale.to(params[0].device if params else torch.device("cpu"))
    return BypassCheck(params, scale)


def _reduce_anew(model: DistributedDataParallel) -> None:
    """Have the buckets of gradients made for the parameters as they are now."""
    whole: Any = model
    parameters, sparse = whole._build_params_for_reducer()
    names = whole._build_debug_param_to_name_mapping(parameters)
    whole._ddp_init_helper(parameters, sparse, names, whole.static_graph)


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Sequence) else [given]


def _level(level: str) -> Level:
    if level not in LEVELS:
        raise InvalidArgument(f"level must be one of {', '.join(LEVELS)}. Found: {level!r}.")
    return LEVELS[level]


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
    return DynamicLossScale(initial=number, growth=1.0, backoff=1.0, least=number, most=number)


def _kept(model: nn.Module, what: Level, keep: Collection[type[nn.Module] | str]) -> list[nn.Module]:
    if isinstance(keep, str | type):
        raise InvalidArgument(f"keep_fp32 must be a list of classes and names. Found: {keep!r}.")
    if keep and not what.keeps_norms:
        raise InvalidArgument("keep_fp32 is for level O2: the others keep all weights in one dtype.")
    return weights.kept_modules(model, [*keep, *([weights.MIXED] if what.keeps_norms else [])])


def _check(given: list[Any], models: list[Any], optimizers: list[Any], keeps_masters: bool) -> None:
    """Raise InvalidArgument if models and optimizers don't go together."""
    for whole, model in zip(given, models, strict=True):
        if not isinstance(model, nn.Module):
            raise InvalidArgument(f"models must be nn.Module. Found: {type(model).__name__}.")
        if border_of(model) is not None:
            raise InvalidArgument(f"the model {type(model).__name__} is decorated already.")
        if isinstance(whole, DistributedDataParallel) and whole._comm_hooks:
            raise InvalidArgument(
                "a communication hook must be registered after decorate. Found: one registered before."
            )
        if any(model is part for other in models if other is not model for part in other.modules()):
            raise InvalidArgument(f"models must not be parts of each other. Found: {type(model).__name__} in another.")
    own = {id(p) for model in models for p in model.parameters()}
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise InvalidArgument(f"optimizers must be torch.optim.Optimizer. Found: {type(optimizer).__name__}.")
        if keeps_masters and keeps_own_lists(optimizer):
            kind = type(optimizer).__name__
            raise InvalidArgument(f"{kind} can't have master weights: it keeps its own list of parameters. Use O1.")
        if masters_of(optimizer) is not None:
            raise InvalidArgument(f"the optimizer {type(optimizer).__name__} is decorated already.")
        if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            raise InvalidArgument(
                f"{type(optimizer).__name__} must update parameters of these models only. Found: another. Decorate all "
                "models that it trains in one call."
            )
