"""What `accel.optimize` adds to a run whose batch size may change, or that is saved: followers of its loader."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from accel.dataio.passes.proxy import LoaderProxy
from accel.elastic.batch_size.driver import BatchRun
from accel.elastic.batch_size.loader import deal_alike, elastic_loader
from accel.elastic.batch_size.report import ProfileFile, TimeBook
from accel.elastic.in_place import InPlace, Restart, has_joined, orders_of_job
from accel.elastic.sample_position import SamplePosition
from accel.elastic.saving.run import CheckpointRun
from accel.elastic.saving.training import TrainingCheckpoints, settings_of
from accel.profiler.loop.observers import follow, is_followed, leave, observers_of
from accel.session.session import Session

if TYPE_CHECKING:
    from accel.goodput.job import JobProfile
    from accel.settings import OptimizeSettings


class ElasticRun:
    """The batch policy and the checkpoints of one run.

    `is_alone` returns whether no other model is trained in this process. `previous` is the run of the same model that
    has just ended: what it has trained is not loaded from before its last steps.

    Raises:
        CheckpointError: if there is a checkpoint of another training.
        InvalidArgument: if `max_batch_size` is below the user's batch, or ranks would deal samples in different ways.
    """

    def __init__(
        self,
        session: Session,
        optimizer: Optimizer | None,
        settings: OptimizeSettings,
        say: Callable[[str], None],
        *,
        restart: Restart,
        is_alone: Callable[[], bool],
        previous: ElasticRun | None = None,
    ) -> None:
        self._settings, self._say, self.optimizer = settings, say, optimizer
        self.loader: Any = session.run.loader
        sampler = self.loader.batch_sampler
        self.batch: BatchRun | None = None
        self.checkpoint: CheckpointRun | None = None
        self._in_place: InPlace | None = None
        how = None if settings.checkpoint is None else settings_of(settings.checkpoint)
        deal_alike(sampler, settings, is_new=has_joined())
        self._position = SamplePosition(sampler)
        self._profile_file = None if how is None else ProfileFile(how.folder)
        self._book = TimeBook(None)
        if settings.max_batch_size is not None:
            session.events.rule.needs_requests = True  # a step here ends with a request
            self.batch = BatchRun(
                session,
                settings.max_batch_size,
                rule=settings.scaling_rule,
                scaler=None if how is None else how.scaler,
                say=say,
                decided=self._decided,
            )
        try:
            if how is not None:
                assert optimizer is not None
                model = session.run.model
                if (orders := orders_of_job()) is not None:
                    self._in_place = InPlace(orders, model, optimizer, sampler, restart, is_alone, say)
                record = None if self.batch is None else self.batch.record
                training = TrainingCheckpoints(model, optimizer, sampler, how, record, say)
                self.checkpoint = CheckpointRun(
                    training, say=say, in_place=self._in_place, saved=lambda: self._decided(is_saved=True)
                )
                if self._in_place is not None and self._in_place.is_added:
                    self._in_place.wait()
                    self.checkpoint.training.restore_position()
                elif not self._goes_on(previous):
                    self.checkpoint.restore()
                    if self.checkpoint.updates.step and self._profile_file is not None:
                        self._book = TimeBook(self._profile_file.lost())
            if self.batch is not None:
                self.batch.record.check()  # only now: on more ranks than the training began on, the user's batch stays
        except BaseException:
            self.close()
            raise
        RUNS[session.run.model] = self

    def _goes_on(self, previous: ElasticRun | None) -> bool:
        """Return whether the training goes on in this process, past what is saved; take over what was learnt."""
        if previous is None or previous.checkpoint is None or self.checkpoint is None:
            return False
        if not self.checkpoint.takes_over(previous.checkpoint):
            return False
        if self.batch is not None and previous.batch is not None:
            self.batch.record.memory = previous.batch.record.memory
            self.batch.record.load_state_dict(previous.batch.record.state_dict())
            self.batch.timer.start_s, self._book = previous.batch.timer.start_s, previous._book
        return True

    def saves_in(self, folder: str | os.PathLike[str]) -> bool:
        return self.checkpoint is not None and self.checkpoint.training.checkpoints.are_in(folder)

    def settings_for(self, proxy: LoaderProxy, settings: OptimizeSettings) -> OptimizeSettings:
        """Return the settings of a further call with the model, for the loader of `proxy`.

        For another loader the run's own hold, unless those of the call name a batch or a checkpoint.
        """
        if settings.is_elastic or proxy._accel_loader is self.loader:
            return settings
        own = self._settings
        named = replace(settings, max_batch_size=own.max_batch_size, scaling_rule=own.scaling_rule)
        named = replace(named, report=own.report, checkpoint=own.checkpoint)
        if named != own:
            self._say("another loader of the model: it is followed under the settings of the training loader")
        return own

    def profile(self) -> JobProfile | None:
        """Return the job's profile; None where no batch is chosen, or nothing is known yet."""
        if self.batch is None:
            return None
        policy = None if self.checkpoint is None else self.checkpoint.policy
        save_s, saved_s = (0.0, 0.0) if policy is None else (policy.save_s, policy.saved_s)
        start_s = self.batch.timer.start_s
        return self.batch.report.profile(start_s + save_s, self._book.lost(start_s, saved_s))

    def _decided(self, *, is_saved: bool = False) -> None:
        if self._profile_file is not None and (profile := self.profile()) is not None:
            assert self.batch is not None and self.batch.record.policy is not None
            self._profile_file.write(profile, self.batch.record.policy.batch, is_saved=is_saved)

    def follow(self, proxy: LoaderProxy, session: Any) -> None:
        """Follow the loader, around the session that follows it: samples are counted and clocks stopped before it."""
        # One that followed before goes on: a sample that is counted twice would be missing later.
        if not is_followed(proxy, SamplePosition):
            follow(proxy, self._position)
        if self.batch is not None:
            follow(proxy, self.batch.timer)
        follow(proxy, session)
        if self.batch is not None:
            follow(proxy, self.batch)
        if self.checkpoint is not None:
            follow(proxy, self.checkpoint)
            follow(proxy, self._book)
        if self._in_place is not None:
            self._in_place.proxy = proxy

    def go_on(self, proxy: LoaderProxy, began: float) -> None:
        """Go on in the pass that the loop is in, or is just beginning.

        The change of ranks was begun at `began` of time.monotonic, which says what it costs.
        """
        current = proxy._accel_fetching.underway.current
        if current is not None:
            current.begin_again()
        for follower in observers_of(proxy):
            if current is not None and isinstance(follower, SamplePosition):
                follower.begin_again(current)
            else:
                follower.epoch_begins(proxy)
        for follower in observers_of(proxy) if current is not None else ():
            follower.batch_requested()
        if self.batch is not None:
            self.batch.timer.start_s = time.monotonic() - began

    def close(self, *, everywhere: bool = False) -> None:
        """Leave batch size and learning rate to the loop, and save no more; samples are still counted.

        Args:
            everywhere: all ranks do so at this step; else several keep the batch and the rates that they have.
        """
        for model in [each for each, run in RUNS.items() if run is self]:
            del RUNS[model]
        if self.batch is not None:
            self.batch.close(everywhere=everywhere)
        if self.checkpoint is not None:
            self.checkpoint.close()

    def leave(self, proxy: LoaderProxy) -> None:
        """Hear no more of the loader, but for its samples."""
        for follower in (self.batch, self.checkpoint, self._book, None if self.batch is None else self.batch.timer):
            if follower is not None:
                leave(proxy, follower)


RUNS: weakref.WeakKeyDictionary[nn.Module, ElasticRun] = weakref.WeakKeyDictionary()
"""By the model, those that are not closed."""


def elastic_proxy(proxy: LoaderProxy) -> LoaderProxy:
    """Return the proxy of a loader as the one of `proxy`, whose batches an `ElasticSampler` deals out.

    Raises:
        InvalidArgument: if that can't be.
    """
    loader: Any = elastic_loader(proxy._accel_loader)
    return proxy if loader is proxy._accel_loader else LoaderProxy(loader)
