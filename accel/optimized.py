"""The models that `accel.optimize` has been given, with what is done for each."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from torch import nn

from accel.dataio.passes.proxy import LoaderProxy
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
