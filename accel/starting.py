"""Begin with a model: its run, the search, the session and the journal are made, and put together."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from accel import startup, strategies
from accel.optimized import MODELS, Optimized, conclude, elastic_run_of
from accel.run import Gate, Run
from accel.search.controller import decisions
from accel.search.state import Candidate, SearchState
from accel.session.journal import Announcer, Journal
from accel.session.session import Session
from accel.session.training_loader import free_fetching

if TYPE_CHECKING:
    from accel.cache.remembered_plans import RememberedPlans
    from accel.dataio.passes.proxy import LoaderProxy
    from accel.settings import OptimizeSettings


def start(
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
    taken = [other.journal.place.target for key, other in MODELS.items() if key is not model]
    fetching_in_use = fetching is not proxy._accel_fetching
    search = SearchState(
        offered=[
            Candidate(
                strategy=strategy,
                run=run,
                ruled_out=_ruled_out(strategy, settings, fetching_in_use),
                is_insisted=strategy.name in settings.enable,
            )
            for strategy in chosen.values()
        ],
        budget=settings.budget,
        reduce=statistics.fmean if run.cuda else statistics.median,
        announce=announcer.announce,
        say=announcer.say,
        replay=None if settings.plan is None else settings.plan.strategies,
        memory=_memory(run, settings, fetching_in_use),
        startup_s=startup.charge,
        ran_s=(lambda: 0.0) if startup.is_interactive() else startup.ran_s,
        device=run.device_kind,
        steps_in_all=run.steps_in_all,
    )
    session = Session(run, chosen, partial(decisions, search), say=announcer.say)
    journal = Journal(
        session,
        search,
        announcer,
        allow=settings.level.word,
        budget=settings.budget.text,
        report=settings.report,
        taken=taken,
        replayed=settings.plan,
    )
    session.start(on_search_end=journal.search_has_ended)
    if multiprocessing.parent_process() is not None:  # a forked one leaves without exit handlers
        Finalize(None, conclude, exitpriority=0)
    elastic = elastic_run_of(
        session,
        optimizer,
        settings,
        announcer,
        None if previous is None else previous.elastic,
        restart=partial(restart, model),
    )
    if elastic is not None and elastic.batch is not None:
        journal.describe_batch = elastic.batch.report.describe
    optimized = Optimized(session, journal, announcer, settings, elastic)
    for earlier_proxy in earlier_proxies:
        optimized.follow(earlier_proxy)
    return optimized


def _memory(run: Run, settings: OptimizeSettings, fetching_in_use: bool) -> RememberedPlans | None:
    if not settings.cache or settings.plan is not None:
        return None
    from accel.cache.remembered_plans import RememberedPlans, conditions

    options = {**settings.conditions, "loader_is_shared": fetching_in_use}
    return RememberedPlans(lambda: conditions(run, options))


def _ruled_out(
    strategy: strategies.Strategy, settings: OptimizeSettings, fetching_in_use: bool
) -> tuple[str, str] | None:
    if strategy.name in settings.disable:
        return "disabled", "left out by disable="
    if fetching_in_use and strategy.touches == {"input"}:
        return "not applicable", "the loader is another model's too: its report has the verdict"
    if strategy.name in settings.enable:
        return None
    if strategy.exactness > settings.level:
        return "not allowed", f"it needs allow={strategy.exactness.word!r}"
    return None


def restart(model: nn.Module, change: Callable[[], None]) -> None:
    """Begin anew, from the checkpoint, what is done with a model; its loop goes on in the pass that it is in.

    Args:
        model: under `elastic.checkpoint`; all ranks call this at the same step.
        change: called in between, as long as nothing is done with the model.
    """
    began, before = time.monotonic(), MODELS.pop(model)
    assert before.elastic is not None
    proxies, loader = before.proxies, before.elastic.loader
    before.close(everywhere=True)
    change()
    proxy = next(each for each in proxies if each._accel_loader is loader)
    optimized = MODELS[model] = start(model, proxy, before.elastic.optimizer, before.settings, None)
    for each in proxies:
        optimized.follow(each)
    assert optimized.elastic is not None
    optimized.elastic.go_on(proxy, began)
