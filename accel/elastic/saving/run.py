"""Checkpoints of a loop, between its steps: on an interval, before the process is terminated, and when it is resumed.

waits ──a step has ended, and it is time──▶ saves ──▶ waits
  │                                           └─ after SIGTERM: the process ends as the signal would have ended it
  ├─ a rank did not come ──▶ apart: nothing is saved until all have come
  ├─ no batch is asked for where the loop trains (another loader, another thread) ──▶ saves only when the script
  │    asks for it; SIGTERM ends the process without a checkpoint
  └─ an error that is none of the disk ──▶ closed
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

from torch.optim import Optimizer

from accel.dataio.passes.proxy import LoaderProxy
from accel.elastic.in_place import InPlace, ResizeOrder
from accel.elastic.save_policy import SavePolicy
from accel.elastic.saving.training import TrainingCheckpoints
from accel.profiler.interruptions import ours
from accel.profiler.loop import backward
from accel.profiler.loop.observers import LoopObserver
from accel.profiler.loop.update_hooks import UPDATES
from accel.profiler.stderr import warn
from accel.run.ranks import Ranks

_UPDATES_ELSEWHERE, _STEPS_ELSEWHERE = 100, 10
"""After so many updates without a request for a batch, or those of so many steps where a step has several, the loop is
taken to train on batches of another loader, or on those that another thread takes."""
_WRITING_S = 30.0
"""That the first rank may write for, after the others: as long as torchrun lets ranks live that it has told to end."""


class UpdateCount:
    """The updates of a training, and whether batches are asked for in between."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.step = self._asked_at = self._by_request = 0
        """Also at the last request for a batch, and the updates between the last two."""
        self._since_request = 0
        self._is_updating = False
        self._thread: int | None = None
        self._hooks = [
            optimizer.register_step_pre_hook(self._begin_update),
            optimizer.register_step_post_hook(self._end_update),
        ]

    def _begin_update(self, *_: Any) -> None:
        self._is_updating = True

    def _end_update(self, *_: Any) -> None:
        if self._is_updating:  # else a class that calls its base's step, whose end has been counted
            self._is_updating = False
            self.step += 1
            if not backward.is_running():  # on CUDA a backward pass has threads of its own
                self._thread = get_ident()

    def resume(self, step: int) -> None:
        self.step = self._asked_at = step

    @property
    def is_elsewhere(self) -> bool:
        return self._thread not in (None, get_ident())

    @property
    def goes_on(self) -> bool:
        """Whether this optimizer, too, has stepped since the last request, and more than the one step under way."""
        return self.step - self._asked_at > 1

    def without_request(self) -> bool:
        """Note a step of any optimizer; return whether the loop has long asked for no batch here."""
        self._since_request += 1
        return self._since_request >= max(_UPDATES_ELSEWHERE, _STEPS_ELSEWHERE * self._by_request)

    def requested(self) -> bool:
        """Note that a batch is asked for; return whether there was an update since the last time."""
        self._since_request = 0
        if self.step == self._asked_at:
            return False
        self._by_request, self._asked_at = self.step - self._asked_at, self.step
        return True

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class MissingRanks:
    """Whether ranks are missing, so that nothing is saved; they are asked for ever less often."""

    def __init__(self) -> None:
        self.steps: int | None = None

    def __bool__(self) -> bool:
        return self.steps is not None

    def are_back(self, ranks: Ranks | None) -> bool:
        """Note a step, and return whether those that were missing have come with it."""
        if self.steps is None or ranks is None:
            return False
        self.steps += 1
        if self.steps & (self.steps - 1) or not ranks.all_came():
            return False
        self.steps = None
        return True


class CheckpointRun(LoopObserver):
    """Save a loop's training, and restore it; `saved` is called after each save."""

    def __init__(
        self,
        training: TrainingCheckpoints,
        *,
        say: Callable[[str], None] = lambda line: None,
        in_place: InPlace | None = None,
        saved: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.training = training
        self._say, self._in_place, self._saved = say, in_place, saved
        self._terminate: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM)
        self._ordered: ResizeOrder | None = None
        self.updates = UpdateCount(training.optimizer)
        self._is_asked_elsewhere = self._has_warned = False
        self._forget_updates = UPDATES.add_weakly(self.updated)
        self._called_at = time.time()
        self._ranks: Ranks | None = None
        self._gather: Callable[[Any], list[Any]] | None = None
        self.policy: SavePolicy | None = None
        """None until the first step has ended: then all ranks begin."""
        self._is_requested = False
        self._is_put_off = False
        """What was due at an epoch's end is saved after a step of the next one."""
        self._missing = MissingRanks()
        self._alive = True

    def restore(self) -> None:
        """Go on from the newest checkpoint that is whole, if there is one; see `TrainingCheckpoints.restore`."""
        self.updates.resume(self.training.restore(self._called_at))

    def takes_over(self, earlier: CheckpointRun) -> bool:
        """Return whether an earlier run of this process, now closed, has saved this training here.

        Then go on from its steps: what it has trained since its last save would be lost by a load.
        """
        own, theirs = self.training, earlier.training
        is_same_loop = own.optimizer is theirs.optimizer and own.sampler is theirs.sampler
        if not (is_same_loop and own.checkpoints.are_in(theirs.checkpoints.folder)):
            return False
        self.updates.resume(earlier.updates.step)
        where = own.settings.folder
        self._say(f"goes on from step {self.updates.step} in this process: nothing is loaded from {where}")
        return True

    # -- the loop (observers.LoopObserver, optimizer hooks, update listener) -------------------------------------------

    def updated(self) -> None:
        """An optimizer has stepped: notice that the loop asks for no more batches here, and leave SIGTERM to it."""
        if not self.updates.without_request():
            return
        if self.policy is None and not self._is_asked_elsewhere:
            return  # the first step is still under way
        if self.updates.goes_on and not self._has_warned:  # it is this model that goes on
            self._has_warned = True
            warn(
                f"no checkpoints are saved from step {self.updates.step} on: the loop asks for no more batches of the "
                "loader that was passed with elastic.checkpoint, or another thread does; call "
                "accel.save_checkpoint(model) between two steps",
                stacklevel=6,
            )
        if (policy := self.policy) is not None and policy.terminated and not policy.is_survived:
            self.close()
            self._terminate()

    def epoch_begins(self, proxy: LoaderProxy) -> None:
        """Let a process that was added to a training join the others: from here on it does what they do."""
        if self._in_place is not None and self._in_place.is_added:
            self._in_place.join()

    def batch_requested(self) -> None:
        """Save, if it is time to and a step has ended."""
        if not self._alive:
            return
        if self.updates.is_elsewhere:
            self._is_asked_elsewhere = True  # while the training is within a step
            return
        if not self.updates.requested():
            return
        try:
            if self._missing.are_back(self._ranks):
                self._say(f"all ranks have come: checkpoints are saved again from step {self.updates.step} on")
            ends = not self._missing and self._end_step()
        except ours() as error:
            ends = self._failed(error)
        # The signal was held back for a save that won't be: other ranks may have died, say.
        if ends or (self.policy is not None and self.policy.terminated and self._missing):
            self._end()
        if self._ordered is not None and self._in_place is not None:
            self._change_ranks(self._in_place, self._ordered)

    def _end_step(self) -> bool:
        """Save if it is time to; return whether the process is to end.

        Resumed at an epoch's end, the loop would begin with a pass without a batch, of which many compute a mean. So
        that save is put off until the next epoch's first step; once, since that step may be its last one, too. What was
        asked for is saved at once as well: the process may be killed before that step, or the epoch be the last one.
        """
        policy = self._begin()
        is_due = policy.due()
        if self._in_place is not None and self._in_place.is_due(policy.order) and not policy.stop:
            self._ordered = policy.order
            return False
        if not is_due:
            return policy.stop and not self._is_put_off
        is_put_off = self.training.sampler.ledger.steps_left == 0 and not self._is_put_off
        self._is_put_off = False
        if policy.is_wanted or not is_put_off:
            self.save()
        self._is_put_off = is_put_off
        if is_put_off and policy.is_wanted:
            policy.request()
        return policy.stop and not is_put_off

    def _end(self) -> None:
        """End the process as the signal would have; where that leaves it to the script, save on."""
        assert self.policy is not None and self._ranks is not None
        if self.policy.is_survived:
            self.policy.go_on()
            return
        if not self._missing:
            # An agent ends all ranks soon after the first. One that has ended, or writes for longer, is waited for no
            # more.
            with contextlib.suppress(RuntimeError):
                self._ranks.decide(None, lambda _: None, "did not come to end", _WRITING_S)
        self.close()
        self._terminate()

    # -- several ranks -------------------------------------------------------------------------------------------------

    def _change_ranks(self, in_place: InPlace, order: ResizeOrder) -> None:
        self._ordered = None
        policy, ranks = self.policy, self._ranks
        assert policy is not None and ranks is not None
        try:
            is_agreed = in_place.agree(order, ranks, self.save, lambda: policy.terminated)
        except ours() as error:
            if self._failed(error):
                self._end()
            return
        if is_agreed:
            in_place.change(order, ranks)
            if policy.terminated and not policy.is_survived:  # since they have agreed, and saved
                self._terminate()

    def _failed(self, error: Exception) -> bool:
        """Report it: a rank that is only late is met again later. Return whether the process is to end."""
        if self._ranks is not None and self._ranks.is_late(error):
            self._missing.steps = 0
            warn(f"at step {self.updates.step} {error}; no checkpoint is saved until it has come", stacklevel=5)
            return False
        text = f"no checkpoints are saved from step {self.updates.step} on: {type(error).__name__}: {error}"
        warn(text, stacklevel=5)
        self.close()
        return self.policy is not None and (self.policy.stop or self.policy.terminated)  # the others end, too

    # -- saving --------------------------------------------------------------------------------------------------------

    def _begin(self) -> SavePolicy:
        """Return the policy; the first time it is asked for, all ranks meet."""
        if self.policy is None:
            self._ranks = Ranks()
            self._ranks.join(since=self._called_at)
            if self._ranks.distributed:
                missed = "did not come to save a checkpoint"
                self._gather = partial(self._ranks.decide, decision=list, missed=missed)
            self.policy = SavePolicy(self.training.settings.interval_s, gather=self._gather)
            if self._in_place is not None:
                self.policy.look = self._in_place.order
            if self._is_requested:
                self.policy.request()
        return self.policy

    def request(self) -> None:
        """Save at the end of the step under way."""
        if self.policy is None:
            self._is_requested = True  # not begun here: other ranks may not have been asked, and begin with their step
        else:
            self.policy.request()

    def save(self) -> bool:
        """Save now, between two steps; a failure of the disk is reported and the training goes on.

        Returns:
            Whether rank 0 has saved; True on the others.
        """
        policy = self._begin()
        assert self._ranks is not None
        self._is_put_off = self._is_put_off and policy.is_requested
        with policy.saving(keeps_request=self._is_put_off):
            is_saved = self.training.save(self.updates.step, self._gather, writes=self._ranks.leads)
        self._saved()
        return is_saved

    def save_now(self) -> None:
        """Save, where the script asks; ranks that have left, as at its end, are reported in one sentence."""
        try:
            self.save()
        except RuntimeError as error:
            if self._ranks is None or not self._ranks.distributed:
                raise
            if self._ranks.leads:  # the others don't save: they miss the answer that it was done
                warn(f"no checkpoint was saved at step {self.updates.step}: {error}", stacklevel=4)

    def close(self) -> None:
        """Save no more, and leave SIGTERM to whom it was before."""
        self._alive = False
        self.updates.close()
        self._forget_updates()
        self.training.checkpoints.release()
        if self.policy is not None:
            self.policy.close()
