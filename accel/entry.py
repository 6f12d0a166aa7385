"""The public calls: `optimize`, `undo`, `disabled`, `explain`."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from torch import nn
from torch.optim import Optimizer

from accel import startup
from accel.dataio.passes.proxy import LoaderProxy, is_proxy
from accel.errors import InvalidArgument
from accel.optimized import MODELS, Optimized, conclude, elastic_proxy_of
from accel.profiler import renamed
from accel.report import Report
from accel.run.ranks import are_several
from accel.settings import OptimizeSettings, check_objects, check_settings
from accel.starting import start

if TYPE_CHECKING:
    from accel.elastic.options import Elastic
    from accel.search.plan import Plan

M = TypeVar("M", bound=nn.Module)
L = TypeVar("L")
O = TypeVar("O", bound="Optimizer | None")  # noqa: E741  (the name that reads best beside M and L)

_switched_off = 0
"""Depth of `disabled()` blocks."""


class _LeftOut(Enum):
    """Default of an argument that was not passed, since None is a valid value."""

    OPTIMIZER = "detected at its first step"


def _elastic(**old: Any) -> Elastic:
    from accel.elastic.options import Elastic

    return Elastic(**old)


@overload
def optimize(
    model: M,
    loader: L,
    *,
    allow: str = ...,
    enable: Iterable[str] = ...,
    disable: Iterable[str] = ...,
    plan: str | os.PathLike[str] | Plan | None = ...,
    report: str | os.PathLike[str] | None = ...,
    budget: float | str = ...,
    cache: bool = ...,
    elastic: Elastic | None = ...,
    steps: int | None = ...,
    epochs: float | None = ...,
) -> tuple[M, L]: ...


@overload
def optimize(
    model: M,
    loader: L,
    optimizer: O,
    *,
    allow: str = ...,
    enable: Iterable[str] = ...,
    disable: Iterable[str] = ...,
    plan: str | os.PathLike[str] | Plan | None = ...,
    report: str | os.PathLike[str] | None = ...,
    budget: float | str = ...,
    cache: bool = ...,
    elastic: Elastic | None = ...,
    steps: int | None = ...,
    epochs: float | None = ...,
) -> tuple[M, L, O]: ...


@renamed.gathered("elastic", _elastic, "max_batch_size", "scaling_rule", "checkpoint")
def optimize(
    model: nn.Module,
    loader: Any,
    optimizer: Optimizer | Literal[_LeftOut.OPTIMIZER] | None = _LeftOut.OPTIMIZER,
    *,
    allow: str = "reordered",
    enable: Iterable[str] = (),
    disable: Iterable[str] = (),
    plan: str | os.PathLike[str] | Plan | None = None,
    report: str | os.PathLike[str] | None = None,
    budget: float | str = "3%",
    cache: bool = True,
    elastic: Elastic | None = None,
    steps: int | None = None,
    epochs: float | None = None,
) -> tuple[Any, ...]:
    """Make the training loop around `model` and `loader` faster, and show what was done.

    The loop stays as it is. While it runs, accel measures its steps, tries one strategy at a time on some real steps,
    interleaved with plain ones, and keeps what is faster and computes the same. The model and the optimizer come back
    as the same objects; the loader as a thin proxy, which the loop must iterate.

    It may be called for each model of a loop (a GAN's two, say) with the same loader or the one that came back, and for
    each loader of a model. A call with the same model and settings goes on; with other settings the search starts over.

    Args:
        model: the module whose calls are training steps; on its device already.
        loader: the training loader, usually a `torch.utils.data.DataLoader`; any iterable of batches works.
        optimizer: the optimizer of `model`. If left out or None, it is detected at its first step.
        allow: how far the numbers may move: "exact" (same bits), "reordered" (same precision, other order of
            summation; default), "reduced" (bfloat16, TF32), "float8" (8-bit products), "lossy" (compressed gradients).
        enable: names of strategies to try although they are opt-in or beyond `allow`.
        disable: names of strategies not to try.
        plan: a plan or its file, replayed without a search; refused if made for another model.
        report: where the report goes: a `.json` or `.html` file, or a folder for report.json, report.html and
            plan.json. Its outcome is printed to stderr when the search ends.
        budget: what the search may cost in guards, one-off work and slower trial steps: seconds (60), "90s", "2m", or a
            share of the run ("3%", default).
        cache: whether what is found is remembered for the next run of this kind, and what was remembered is tried
            first; default True. The folder is `$ACCEL_CACHE`, or accel's in the user's cache; `ACCEL_CACHE=0` means
            False.
        elastic: `accel.Elastic(max_batch_size=…, checkpoint=…)`: the batch size grows while training, the training is
            saved and goes on from what is saved, or both. None (default) does neither. It changes what is trained,
            which `allow` never does.
        steps: steps of the optimizer that the run will have, from this call on, as far as you know: the search then
            spends its share of the whole run early, and on nothing that the rest of it would not pay back. None
            (default) spends it by and by, and so does a run that says neither this nor `epochs`.
        epochs: the same in passes over the loader. `remaining_epochs` and the frameworks' callbacks say it themselves.

    Returns:
        What was passed, in order: `(model, loader)`, or `(model, loader, optimizer)`, also where that is None.

    Raises:
        InvalidArgument: if an argument is wrong; the message says how to correct it.
        PlanError: if the plan can't be read or was made for another model.
        CheckpointError: if the newest checkpoint is one of another training; nothing has been changed then.

    Example:
        >>> model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="reduced")
        >>> for batch, target in loader:
        ...     optimizer.zero_grad()
        ...     loss(model(batch), target).backward()
        ...     optimizer.step()
        >>> print(accel.explain(model))
    """
    arguments = (model, loader) if isinstance(optimizer, _LeftOut) else (model, loader, optimizer)
    if startup.is_off() or _switched_off:
        if elastic is not None:
            from accel.elastic.left_alone import leave_alone

            leave_alone(model, loader, optimizer)
        return arguments
    optimizer_if_passed = None if isinstance(optimizer, _LeftOut) else optimizer
    check_objects(model, loader, optimizer_if_passed)
    settings = check_settings(model, allow, enable, disable, plan, budget, report, cache, elastic, steps, epochs)
    if settings.checkpoint is not None and optimizer_if_passed is None:
        raise InvalidArgument(
            "elastic.checkpoint needs the optimizer, whose state it holds. Found: none; pass it as the third argument"
        )
    proxy = _proxy_of(loader)

    optimized = MODELS.get(model)
    if optimized is not None and optimized.elastic is not None:
        settings = optimized.elastic.settings_for(proxy, settings)
    # A checkpoint is read, and other ranks are waited for, by the script's wish.
    with contextlib.nullcontext() if settings.is_elastic else startup.counted():
        if optimized is None or optimized.settings != settings or optimized.session.was_interrupted:
            _close_ended(model, proxy, settings)
            if settings.is_elastic:
                from accel.elastic.left_alone import take_back

                take_back(model, loader)
                proxy = elastic_proxy_of(model, proxy)
            optimized = MODELS[model] = start(model, proxy, optimizer_if_passed, settings, optimized)
        optimized.follow(proxy)
    return model, proxy, *arguments[2:]


def _proxy_of(loader: Any) -> LoaderProxy:
    if is_proxy(loader):
        return loader  # type: ignore[no-any-return]
    proxies = (proxy for optimized in MODELS.values() for proxy in optimized.proxies)
    for proxy in proxies:
        own = proxy._accel_loader
        if own is loader or getattr(own, "plain_loader", None) is loader:
            return proxy
    return LoaderProxy(loader)


def _close_ended(model: nn.Module, proxy: LoaderProxy, settings: OptimizeSettings) -> None:
    """Close other sessions whose optimizers are gone and whose loader or place of the report is the new model's.

    Where a cell of a notebook was run again they would keep these from it. A script may go on with them. What has been
    trained with checkpoints in the same folder holds its optimizer, and is closed all the same.
    """
    if not MODELS or not startup.is_interactive() or are_several():
        return
    gc.collect()  # an optimizer with a scheduler is in a circle
    report = settings.report
    folder: Any = getattr(settings.checkpoint, "folder", settings.checkpoint)
    for key, other in list(MODELS.items()):
        is_in_its_way = id(proxy) in other.followed or (report is not None and report == other.settings.report)
        optimizers = other.session.run.optimizers
        is_over = is_in_its_way and optimizers and not len(optimizers)
        if other.session.steps and folder is not None and other.elastic is not None and other.elastic.saves_in(folder):
            is_over = True
        if key is not model and is_over:
            undo(key)


def undo(model: nn.Module) -> None:
    """Restore `model` and its loader as they were before `optimize`; the loop may go on with the same objects.

    Args:
        model: a model that was passed to `optimize`; any other is left alone.

    Raises:
        InvalidArgument: if it is no model.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"undo takes the model that optimize got, got a {type(model).__name__}; pass the model")
    optimized = MODELS.pop(model, None)
    if optimized is not None:
        optimized.close()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Run the block plainly: strategies are off, nothing is measured, and `optimize` returns its arguments.

    Example:
        >>> with accel.disabled():
        ...     loss(model(batch), target).backward()
    """
    global _switched_off
    _switched_off += 1
    with contextlib.ExitStack() as stack:
        if _switched_off == 1:
            for optimized in list(MODELS.values()):
                stack.enter_context(optimized.session.suspended())
        try:
            yield
        finally:
            _switched_off -= 1


def explain(model: nn.Module) -> Report:
    """Return the present report of a model that was passed to `optimize`.

    Args:
        model: the model.

    Raises:
        InvalidArgument: if accel holds no report for it.

    Example:
        >>> print(accel.explain(model))
        >>> accel.explain(model).save("report.html")
    """
    record = optimized(model)
    if record is None:
        raise InvalidArgument(
            "the model must have been passed to accel.optimize (and not undone); accel holds no report for this "
            f"{type(model).__name__}. Pass the object that optimize got or returned"
        )
    return record.journal.report()


def optimized(model: nn.Module) -> Optimized | None:
    """Return the session, journal and loaders of a model that was passed to `optimize`, None for any other."""
    return MODELS.get(model) if isinstance(model, nn.Module) else None


@atexit.register
def _at_exit() -> None:
    """Write the reports, and let a process that Ctrl-C has ended end by SIGINT, as Python has it by itself.

    A shell's loop then ends too. CPython remembers what the last source text that it ran ended with, not the script.
    Imports for the report run some: dataclasses and named tuples are made from text.
    """
    conclude()
    if getattr(sys, "last_type", None) is KeyboardInterrupt and not startup.is_interactive():
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")
