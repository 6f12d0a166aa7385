"""The public calls: `optimize`, `undo`, `disabled`, `explain`."""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from torch import nn
from torch.optim import Optimizer

from accel import startup, strategies
from accel.dataio.passes.proxy import LoaderProxy, is_proxy
from accel.errors import InvalidArgument
from accel.optimized import MODELS, Optimized
from accel.profiler import stderr
from accel.profiler.interruptions import ours
from accel.report import Report
from accel.run import Run, ranks
from accel.run.gate import Gate
from accel.search.controller import decisions
from accel.search.plan import Plan
from accel.search.state import Candidate, SearchState
from accel.session.journal import Announcer, Journal, own_place
from accel.session.session import Session
from accel.session.training_loader import free_fetching
from accel.settings import OptimizeSettings, check_objects, check_settings
from accel.strategies.base import Strategy

if TYPE_CHECKING:
    from accel.cache.remembered_plans import RememberedPlans
    from accel.elastic.checkpointing import Checkpointing
    from accel.elastic.run import ElasticRun
    from accel.elastic.scaling_rules import Rule

M = TypeVar("M", bound=nn.Module)
L = TypeVar("L")
O = TypeVar("O", bound="Optimizer | None")  # noqa: E741  (the name that reads best beside M and L)

_switched_off = 0
"""Depth of `disabled()` blocks."""


class _LeftOut(Enum):
    """Default of an argument that was not passed, since None is a valid value."""

    OPTIMIZER = "detected at its first step"


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
    max_batch_size: int | None = ...,
    scaling_rule: Rule | None = ...,
    checkpoint: str | os.PathLike[str] | Checkpointing | None = ...,
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
    max_batch_size: int | None = ...,
    scaling_rule: Rule | None = ...,
    checkpoint: str | os.PathLike[str] | Checkpointing | None = ...,
    steps: int | None = ...,
    epochs: float | None = ...,
) -> tuple[M, L, O]: ...


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
    max_batch_size: int | None = None,
    scaling_rule: Rule | None = None,
    checkpoint: str | os.PathLike[str] | Checkpointing | None = None,
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
            summation; default), "reduced" (bfloat16, TF32), "lossy" (compressed gradients).
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
        max_batch_size: let the batch size grow while training, by goodput, up to so many samples of a step over all
            ranks, never below the loader's; each sample still comes once an epoch, and the learning rate of each step
            follows its batch. None (default) keeps the batch. It changes what is trained, which `allow` never does.
        scaling_rule: how the learning rate follows the batch size, of `accel.elastic.scaling_rules` or a function;
            None (default) takes that of the optimizer: AdaScale for SGD, the square root for Adam.
        checkpoint: a folder, or `accel.elastic.checkpointing.Checkpointing`: the training is saved in it while it
            goes on and when the process is sent SIGTERM, and this call goes on from the newest one there, on any
            number of ranks. Loop over `remaining_epochs(loader, epochs)`. It needs `optimizer`.
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
    if os.environ.get("ACCEL") == "0" or _switched_off:
        if max_batch_size is not None or checkpoint is not None:
            from accel.elastic.left_alone import leave_alone

            leave_alone(model, loader, optimizer)
        return arguments
    optimizer_if_passed = None if isinstance(optimizer, _LeftOut) else optimizer
    check_objects(model, loader, optimizer_if_passed)
    settings = check_settings(
        model,
        allow,
        enable,
        disable,
        plan,
        budget,
        report,
        cache,
        max_batch_size,
        scaling_rule,
        checkpoint,
        steps,
        epochs,
    )
    if settings.checkpoint is not None and optimizer_if_passed is None:
        raise InvalidArgument("checkpoint needs the optimizer, whose state it holds; pass it as the third argument")
    proxy = _proxy_of(loader)

    optimized = MODELS.get(model)
    if optimized is not None and optimized.elastic is not None:
        settings = optimized.elastic.settings_for(proxy, settings)
    # A checkpoint is read, and other ranks are waited for, by the script's wish.
    with contextlib.nullcontext() if settings.is_elastic else startup.counted():
        if optimized is None or optimized.settings != settings:
            _close_ended(model, proxy, settings)
            if settings.is_elastic:
                from accel.elastic.left_alone import take_back

                take_back(model, loader)
                proxy = _elastic(model, proxy)
            optimized = MODELS[model] = _start(model, proxy, optimizer_if_passed, settings, optimized)
        optimized.follow(proxy)
    return model, proxy, *arguments[2:]


def is_interactive() -> bool:
    """Return whether the interpreter goes on after what was interrupted: a statement typed, or a script with -i."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _proxy_of(loader: Any) -> LoaderProxy:
    """Return the loader's proxy if it has one, or a new one."""
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
    if not MODELS or not is_interactive() or ranks.are_several():
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


def _elastic(model: nn.Module, proxy: LoaderProxy) -> LoaderProxy:
    """Return the proxy of a loader whose batches accel deals out."""
    from accel.elastic.run import elastic_proxy

    elastic = elastic_proxy(proxy)
    loader = elastic._accel_loader
    others = [other for key, other in MODELS.items() if key is not model]
    if any(other.elastic is not None and other.elastic.loader is loader for other in others):
        raise InvalidArgument(
            "max_batch_size and checkpoint must be given for one model of a loop, got a loader whose batches another "
            "model's call deals out; leave them out of this call"
        )
    return elastic


def _start(
    model: nn.Module,
    proxy: LoaderProxy,
    optimizer: Optimizer | None,
    settings: OptimizeSettings,
    previous: Optimized | None,
) -> Optimized:
    """Begin a search; a `previous` one with other settings ends, and hands over its loaders."""
    earlier_proxies = [] if previous is None else previous.proxies
    if previous is not None:
        previous.close()
        previous.announcer.say(
            f"{type(model).__name__} was passed with other settings than before: its search starts again"
        )
    chosen = {kind.name: kind() for kind in strategies.REGISTRY}
    gate = Gate(model, list(chosen))
    fetching = free_fetching(proxy)
    run = Run(model, proxy._accel_loader, [] if optimizer is None else [optimizer], gate, fetching)
    run.exact, run.enabled = settings.level.word == "exact", settings.enable
    run.planned_steps, run.planned_epochs = settings.steps, settings.epochs
    announcer = Announcer()
    taken = [other.journal.target for key, other in MODELS.items() if key is not model]
    fetching_in_use = fetching is not proxy._accel_fetching
    search = SearchState(
        offered=[
            Candidate(
                strategy=strategy,
                run=run,
                order=order,
                ruled_out=_ruled_out(strategy, settings, fetching_in_use),
                is_insisted=strategy.name in settings.enable,
            )
            for order, strategy in enumerate(chosen.values())
        ],
        budget=settings.budget,
        reduce=statistics.fmean if run.cuda else statistics.median,
        announce=announcer.announce,
        say=announcer.say,
        replay=None if settings.plan is None else settings.plan.strategies,
        memory=_memory(run, settings, fetching_in_use),
        startup_s=startup.charge,
        ran_s=(lambda: 0.0) if is_interactive() else startup.ran_s,
        device=run.device_kind,
        steps_in_all=run.steps_in_all,
    )
    session = Session(run, chosen, partial(decisions, search), say=announcer.say)
    journal = Journal(
        run,
        session,
        search,
        announcer,
        allow=settings.level.word,
        budget=settings.budget.text,
        report=own_place(settings.report, taken, type(model).__name__, announcer.say),
        replayed=settings.plan,
    )
    session.start(settled=journal.settled)
    if multiprocessing.parent_process() is not None:  # a forked one leaves without exit handlers
        Finalize(None, _conclude, exitpriority=0)
    elastic = _elastic_run(session, optimizer, settings, announcer, None if previous is None else previous.elastic)
    if elastic is not None:
        journal.batch = elastic.batch
    optimized = Optimized(session, journal, announcer, settings, elastic)
    for earlier_proxy in earlier_proxies:
        optimized.follow(earlier_proxy)
    return optimized


def _elastic_run(
    session: Session,
    optimizer: Optimizer | None,
    settings: OptimizeSettings,
    announcer: Announcer,
    previous: ElasticRun | None,
) -> ElasticRun | None:
    """Return what changes the batch size and saves the run; None if nothing does."""
    if not settings.is_elastic:
        return None
    from accel.elastic.run import ElasticRun

    try:
        return ElasticRun(
            session,
            optimizer,
            settings,
            announcer.say,
            restart=partial(restart, session.run.model),
            is_alone=lambda: len(MODELS) <= 1,
            previous=previous,
        )
    except BaseException:
        session.close()
        raise


def _memory(run: Run, settings: OptimizeSettings, fetching_in_use: bool) -> RememberedPlans | None:
    """Return what keeps the result for the next run; None if nothing does."""
    if not settings.cache or settings.plan is not None:
        return None
    from accel.cache.remembered_plans import RememberedPlans, conditions

    options = {**settings.conditions, "loader_is_shared": fetching_in_use}
    return RememberedPlans(lambda: conditions(run, options))


def _ruled_out(strategy: Strategy, settings: OptimizeSettings, fetching_in_use: bool) -> tuple[str, str] | None:
    if strategy.name in settings.disable:
        return "disabled", "left out by disable="
    if fetching_in_use and strategy.touches == {"input"}:
        return "not applicable", "the loader is another model's too: its report has the verdict"
    if strategy.name in settings.enable:
        return None
    if strategy.exactness > settings.level:
        return "not allowed", f"it is {strategy.exactness.word}; allow={strategy.exactness.word!r} tries it"
    return None


def restart(model: nn.Module, change: Callable[[], None]) -> None:
    """Begin anew, from the checkpoint, what is done with a model; its loop goes on in the pass that it is in.

    Args:
        model: under `checkpoint=`; all ranks call this at the same step.
        change: called in between, as long as nothing is done with the model.
    """
    began, before = time.monotonic(), MODELS.pop(model)
    assert before.elastic is not None
    proxies, loader = before.proxies, before.elastic.loader
    before.close(everywhere=True)
    change()
    proxy = next(each for each in proxies if each._accel_loader is loader)
    optimized = MODELS[model] = _start(model, proxy, before.elastic.optimizer, before.settings, None)
    for each in proxies:
        optimized.follow(each)
    assert optimized.elastic is not None
    optimized.elastic.go_on(proxy, began)


def undo(model: nn.Module) -> None:
    """Restore `model` and its loader as they were before `optimize`; the loop may go on with the same objects.

    Args:
        model: a model that was passed to `optimize`; any other is left alone.
    """
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
            "the model must have been passed to accel.optimize (and not undone); accel holds no report for it"
        )
    return record.journal.report()


def optimized(model: nn.Module) -> Optimized | None:
    """Return the session, journal and loaders of a model that was passed to `optimize`, None for any other."""
    return MODELS.get(model)


@atexit.register
def _at_exit() -> None:
    """Write the reports, and let a process that Ctrl-C has ended end by SIGINT, as Python has it by itself.

    A shell's loop then ends too. CPython remembers what the last source text that it ran ended with, not the script.
    Imports for the report run some: dataclasses and named tuples are made from text.
    """
    _conclude()
    if getattr(sys, "last_type", None) is KeyboardInterrupt and not is_interactive():
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def _conclude() -> None:
    """Write the reports of this process, which ends."""
    for optimized in list(MODELS.values()):
        if optimized.process != os.getpid():  # the end of a forked child is not that of the run
            continue
        # A report that can't be written must not change the exit status of a good run.
        try:
            optimized.journal.finish()
            optimized.journal.say_how_it_ended()
        except ours() as error:
            stderr.write(f"accel: the report could not be written: {error}")
