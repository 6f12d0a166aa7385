"""The models that `accel.optimize` has been given, with what is done for each."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from accel.dataio.passes.proxy import LoaderProxy
from accel.errors import InvalidArgument
from accel.profiler import stderr
from accel.profiler.interruptions import ours
from accel.profiler.loop.observers import follow, leave
from accel.settings import OptimizeSettings

if TYPE_CHECKING:
    from accel.elastic.run import ElasticRun
    from accel.session.journal import Announcer, Journal
    from accel.session.session import Session


class Optimized:
    """One optimized model with its session, journal and loaders."""

    def __init__(
        self,
        session: Session,
        journal: Journal,
        announcer: Announcer,
        settings: OptimizeSettings,
        elastic: ElasticRun | None = None,
    ) -> None:
        self.session = session
        self.journal = journal
        self.announcer = announcer
        self.settings = settings
        self.elastic = elastic
        self.process = os.getpid()
        self.followed: weakref.WeakValueDictionary[int, LoaderProxy] = weakref.WeakValueDictionary()

    @property
    def proxies(self) -> list[LoaderProxy]:
        """The loaders' proxies that are in use."""
        return list(self.followed.values())

    def follow(self, proxy: LoaderProxy) -> None:
        """Follow a loader of the model: for training, for validation, or one that replaces the first."""
        self.followed[id(proxy)] = proxy  # it hashes and compares as its loader does: a list has no hash
        if self.elastic is not None and proxy._accel_loader is self.elastic.loader:
            self.elastic.follow(proxy, self.session.events)
        else:
            follow(proxy, self.session.events)

    def close(self, *, everywhere: bool = False) -> None:
        """End what is done with the model; `everywhere` if all ranks do so at this step."""
        if self.elastic is not None:
            self.elastic.close(everywhere=everywhere)
        self.session.close()
        for proxy in self.proxies:
            leave(proxy, self.session.events)
            if self.elastic is not None:
                self.elastic.leave(proxy)
        self.journal.finish()


MODELS: weakref.WeakKeyDictionary[nn.Module, Optimized] = weakref.WeakKeyDictionary()


def elastic_proxy_of(model: nn.Module, proxy: LoaderProxy) -> LoaderProxy:
    """Return the proxy of a loader whose batches accel deals out."""
    from accel.elastic.run import elastic_proxy

    elastic = elastic_proxy(proxy)
    loader = elastic._accel_loader
    others = [other for key, other in MODELS.items() if key is not model]
    if any(other.elastic is not None and other.elastic.loader is loader for other in others):
        raise InvalidArgument(
            "elastic must be given for one model of a loop. Found: a loader whose batches another model's call deals "
            "out; leave it out of this call"
        )
    return elastic


def elastic_run_of(
    session: Session,
    optimizer: Optimizer | None,
    settings: OptimizeSettings,
    announcer: Announcer,
    previous: ElasticRun | None,
    restart: Callable[[Callable[[], None]], None],
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
            restart=restart,
            is_alone=lambda: len(MODELS) <= 1,
            previous=previous,
        )
    except BaseException:
        session.close()
        raise


def conclude() -> None:
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
