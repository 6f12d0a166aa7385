"""Checkpoints of a loop, between its steps: on an interval, before the process is terminated, and where it goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.passes.proxy import LoaderProxy
from accel.elastic.checkpoint import Checkpoints
from accel.elastic.checkpointing import Checkpointing
from accel.elastic.in_place import InPlace, ResizeOrder
from accel.elastic.sample_position import all_updates
from accel.elastic.save_policy import SavePolicy
from accel.elastic.saving.bucket_order import BucketOrder
from accel.elastic.saving.plain_values import check_plain
from accel.elastic.training_state import Stateful, capture_state, restore_state
from accel.errors import CheckpointError, InvalidArgument
from accel.profiler.interruptions import ours
from accel.run import backward
from accel.run.ranks import Ranks, leads
from accel.session.listeners import Onlooker
from accel.session.own_warning import warn

_REQUESTS_ELSEWHERE = 4
"""Of batches, by another thread than the one that trains, after which the loop is taken to fetch there."""
_UPDATES_ELSEWHERE, _STEPS_ELSEWHERE = 100, 10
"""Without a request for a batch, after which the loop is taken to train on those of another loader: so many updates, or
those of so many steps where a step has several."""
_START_S = 30.0
"""By which ranks may come to `accel.optimize` at different times: twice as much is waited for."""
_WRITING_S = 30.0
"""That the first rank may write for, after the others: as long as torchrun lets ranks live that it has told to end."""


class BatchState(Stateful, Protocol):
    """What decides the batch size."""

    memory: int
    """Bytes of this rank's device, or of the one that has the least."""


class CheckpointRun(Onlooker):
    """Save a loop's training, and restore it.

    Args:
        model, optimizer: the user's.
        sampler: of the training loader.
        settings: the user's.
        batch: what decides the batch size; None if nothing does.
        say: prints one line for the user.
        in_place: carries out orders to go on with other ranks; None if there are none.
        terminate: ends the process as the signal would have; called once the state is saved.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        sampler: ElasticSampler,
        settings: Checkpointing,
        *,
        batch: BatchState | None = None,
        say: Callable[[str], None] = lambda line: None,
        in_place: InPlace | None = None,
        terminate: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM),
    ) -> None:
        super().__init__()
        self.checkpoints = Checkpoints(settings.folder, settings.keep, alone=True)
        self._model, self._optimizer, self._settings, self._sampler = model, optimizer, settings, sampler
        self._say, self._terminate, self._batch, self._in_place = say, terminate, batch, in_place
        self._ordered: ResizeOrder | None = None
        """What is to be carried out before the next step."""
        self._more: dict[str, Any] = {
            "sampler": sampler,
            "buckets": BucketOrder(model),
            **settings.more,
            **({} if batch is None else {"batch": batch}),
        }
        self._steps_before = 0
        """In the runs that this one goes on from."""
        self._steps = 0
        self._updated = self._is_threaded = False
        self._thread: int | None = None
        """That trains; None until it is known."""
        self._requests_elsewhere = self._uncounted = 0
        """Of batches, since the thread that trains has asked for one; and updates since then."""
        self._by_step, self._has_ended = 1, False
        """Updates of a step; and whether a pass over the loader has ended since the last request."""
        self._since_request = 0
        """Updates of all optimizers."""
        self._is_away = self._has_warned = False
        """The loop trains on batches of another loader."""
        # Of its own: a session that has failed, or is suspended, hears of no more steps.
        self._hook = optimizer.register_step_post_hook(self._stepped)
        all_updates().listen(self)
        self._called_at = time.time()
        self._ranks: Ranks | None = None
        self._gather: Callable[[Any], list[Any]] | None = None
        """With several ranks: gives each what all of them passed."""
        self._policy: SavePolicy | None = None
        self._is_requested = False
        """A checkpoint was asked for before the first step had ended."""
        self._is_put_off = False
        """What was due at an epoch's end is saved after a step of the next one."""
        self._apart_since: int | None = None
        """The step at which ranks didn't meet, until they do again."""
        self._alive = True

    @property
    def step(self) -> int:
        """Steps of the training so far, those of the runs before included."""
        return self._steps_before + self._steps + self._unheard  # the loop may ask in its body, before the step ends

    @property
    def _unheard(self) -> int:
        """Steps since the last request: after an epoch's end those on the batches that the loop has fetched before."""
        if not self._updated or self._is_threaded or not self._has_ended:
            return int(self._updated)
        return max(1, self._uncounted // self._by_step)

    @property
    def save_s(self) -> float:
        """What the last save took, s; 0.0 before the first."""
        return 0.0 if self._policy is None else self._policy.save_s

    def restore(self) -> None:
        """Go on from the newest checkpoint that is whole, if there is one.

        Raises:
            CheckpointError: if there are only those of another training; nothing has been changed then.
            InvalidArgument: if something has a state that no checkpoint can hold: better now than at the first save.
        """
        schedulers = list(self._settings.schedulers)
        self._check_states(schedulers)
        self._look_for_schedulers()
        ranks = Ranks()
        ranks.join(since=self._called_at)
        gather = partial(_gather, ranks, "did not come to load a checkpoint", _START_S) if ranks.distributed else None
        if gather is not None and self._batch is not None:
            self._batch.memory = min(gather(self._batch.memory))  # all ranks go on with as many samples
        notes: list[str] = []

        def take(state: dict[str, Any]) -> None:
            notes[:] = restore_state(state, self._model, self._optimizer, schedulers, **self._more)

        state = self.checkpoints.load_latest(gather, take)
        for sentence in self.checkpoints.refused:
            self._say(sentence)
        if state is None:
            return
        self._steps_before = state["step"]
        self._say(f"goes on from step {self._steps_before}, saved in {self._settings.folder}")
        for sentence in notes:
            self._say(sentence)

    def restore_position(self) -> None:
        """Take the epoch of the newest checkpoint alone: what else it has is loaded once this process has joined."""
        state = self.checkpoints.load_latest()
        if state is not None:
            self._sampler.load_state_dict(state["parts"]["'sampler'"])

    def _look_for_schedulers(self) -> None:
        """Warn of a learning-rate scheduler that no checkpoint would hold; torch's and timm's mark the groups."""
        steps = (hasattr(each, "step") for each in self._settings.more.values() if each is not self._settings.scaler)
        is_scheduled = any("initial_lr" in group for group in self._optimizer.param_groups)
        if is_scheduled and not self._settings.schedulers and not any(steps) and leads():
            warn(
                "a learning-rate scheduler acts on the optimizer and is in no checkpoint, so that a resume begins it "
                "anew; name it: Checkpointing(folder=..., schedulers=[scheduler])",
                stacklevel=6,
            )

    def takes_over(self, earlier: CheckpointRun) -> bool:
        """Return whether an earlier run of this process has saved this training in this folder; go on from its steps.

        Args:
            earlier: of the same model; closed. What it has trained since its last save would be lost by a load.
        """
        same_loop = self._optimizer is earlier._optimizer and self._sampler is earlier._sampler
        if not (same_loop and self.checkpoints.are_in(earlier.checkpoints.folder)):
            return False
        self._steps_before = earlier.step
        self._say(f"goes on from step {self.step} in this process: nothing is loaded from {self._settings.folder}")
        return True

    def _check_states(self, schedulers: list[Stateful]) -> None:
        """Raise if a state can't be held; the model's is of tensors, which it may not have yet (`LazyLinear`)."""
        try:
            state = capture_state(nn.Module(), self._optimizer, schedulers, **self._more)
        except InvalidArgument:
            raise
        except ours():  # of what has no state yet, as an optimizer that is sharded
            return
        check_plain(state)

    # -- the loader (listeners.Follower) -------------------------------------------------------------------------------

    def batch_requested(self) -> None:
        """Save, if it is time to and a step has ended."""
        self._since_request = 0
        if not self._alive:
            return
        if self._is_away:
            self._come_back()
        if not self._updated:
            self._has_ended = False
            return
        if self._thread not in (None, get_ident()):
            self._requests_elsewhere += 1
            if self._requests_elsewhere == _REQUESTS_ELSEWHERE:
                self._leave_to_the_script()
            return
        self._steps += self._unheard
        if not self._has_ended:
            self._by_step = self._uncounted
        self._updated, self._has_ended, self._requests_elsewhere, self._uncounted = False, False, 0, 0
        try:
            ends = not self._is_apart() and self._step_ended()
        except ours() as error:
            ends = self._failed(error)
        # The signal was held back for a save that won't be: other ranks may have died, say.
        if ends or (self._policy is not None and self._policy.terminated and self._apart_since is not None):
            self._end()
        if self._ordered is not None and self._in_place is not None:
            self._change_ranks(self._in_place, self._ordered)

    def _change_ranks(self, in_place: InPlace, order: ResizeOrder) -> None:
        self._ordered = None
        policy, ranks = self._policy, self._ranks
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

    def epoch_begins(self, proxy: LoaderProxy) -> None:
        """Let a process that was added to a training join the others: from here on it does what they do."""
        if self._in_place is not None and self._in_place.is_added:
            self._in_place.join()

    def epoch_ended(self, proxy: LoaderProxy) -> None:
        """Note that no request tells the ends of the next steps, if the loop holds batches."""
        self._has_ended = True

    def _end(self) -> None:
        """End the process as the signal would have; where that leaves it to the script, save on."""
        assert self._policy is not None
        if self._policy.is_survived:
            self._policy.go_on()
            return
        self._wait_for_writer()
        self.close()
        self._terminate()

    def _wait_for_writer(self) -> None:
        """Wait until rank 0 has written: an agent ends all ranks soon after the first has ended."""
        assert self._ranks is not None
        if self._apart_since is None:
            with contextlib.suppress(RuntimeError):  # one that has ended, or writes for longer, is waited for no more
                self._ranks.decide(None, lambda _: None, "did not come to end", _WRITING_S)

    def _is_apart(self) -> bool:
        """Return whether ranks have not met, and some are still missing; asked ever less often, at the same steps."""
        since = self._apart_since
        if since is None:
            return False
        assert self._ranks is not None
        steps = self._steps - since
        if steps & (steps - 1) or not self._ranks.all_came():
            return True
        self._apart_since = None
        self._say(f"all ranks have come: checkpoints are saved again from step {self.step} on")
        return False

    def _failed(self, error: Exception) -> bool:
        """Report it: a rank that is only late is met again later. Return whether the process is to end."""
        if self._ranks is not None and self._ranks.is_late(error):
            self._apart_since = self._steps
            ending = "; no checkpoint is saved until it has come"
            warn(f"at step {self.step} {error}{ending}", stacklevel=5)
            return False
        text = f"no checkpoints are saved from step {self.step} on: {type(error).__name__}: {error}"
        warn(text, stacklevel=5)
        self.close()
        return self._policy is not None and (self._policy.stop or self._policy.terminated)  # the others end, too

    def request(self) -> None:
        """Save at the end of the step under way."""
        if self._policy is None:
            self._is_requested = True  # not begun here: other ranks may not have been asked, and begin with their step
        else:
            self._policy.request()

    # -- saving --------------------------------------------------------------------------------------------------------

    def _stepped(self, *_: Any) -> None:
        self._steps += self._is_threaded and self._updated
        self._updated, self._uncounted = True, self._uncounted + 1
        if not backward.is_running():  # on CUDA a backward pass has threads of its own
            self._thread = get_ident()

    def updated(self) -> None:
        """An optimizer has stepped (updates.UpdateListener): notice that the loop has gone on to another loader."""
        self._since_request += 1
        longest = max(_UPDATES_ELSEWHERE, _STEPS_ELSEWHERE * self._by_step)
        if self._since_request == longest and self._steps and not self._is_threaded:
            self._go_away()

    def _go_away(self) -> None:
        """Leave SIGTERM to whom it was before, since nothing here would act on it, until the loop comes back."""
        self._is_away = True
        if self._uncounted > 1 and not self._has_warned:  # it is this model that goes on
            self._has_warned = True
            warn(
                f"no checkpoints are saved from step {self.step} on: the loop asks for no more batches of the loader "
                "that was passed with checkpoint=; call accel.elastic.running.save_checkpoint(model) between two steps",
                stacklevel=6,
            )
        if (policy := self._policy) is None:
            return
        policy.leave_signal()
        if policy.terminated and not policy.is_survived:
            self.close()
            self._terminate()

    def _come_back(self) -> None:
        self._is_away = False
        if self._policy is not None:
            self._policy.take_signal()

    def _leave_to_the_script(self) -> None:
        """Save only when the script says so: another thread takes the batches, while the training is within a step."""
        self._is_threaded = True
        self._steps += max(0, self._uncounted - 1)
        if self._policy is not None:
            self._policy.close()
        warn(
            "checkpoints are saved where the loop asks for a batch, but another thread than the one that trains does; "
            "call accel.elastic.running.save_checkpoint(model) between two steps",
            stacklevel=6,
        )

    def _step_ended(self) -> bool:
        """Save if it is time to; return whether the process is to end.

        Resumed at an epoch's end, the loop would begin with a pass without a batch, of which many compute a mean. So
        that save is put off until the next epoch's first step; once, since that step may be its last one, too. What was
        asked for is saved at once as well: the process may be killed before that step, or the epoch be the last one.
        """
        if self._policy is None:
            self._begin()
        policy = self._policy
        assert policy is not None
        is_due = policy.due()
        if self._in_place is not None and self._in_place.is_due(policy.order) and not policy.stop:
            self._ordered = policy.order
            return False
        if not is_due:
            return policy.stop and not self._is_put_off
        is_put_off = self._sampler.steps_left == 0 and not self._is_put_off
        self._is_put_off = False
        if policy.is_wanted or not is_put_off:
            self.save()
        self._is_put_off = is_put_off
        if is_put_off and policy.is_wanted:
            policy.request()
        return policy.stop and not is_put_off

    def _begin(self) -> None:
        self._ranks = Ranks()
        self._ranks.join(since=self._called_at)
        if self._ranks.distributed:
            self._gather = partial(_gather, self._ranks, "did not come to save a checkpoint", 0.0)
        look = ResizeOrder if self._in_place is None else self._in_place.order
        self._policy = SavePolicy(
            self._settings.interval_s, sigterm=not self._is_threaded, gather=self._gather, look=look
        )
        if self._is_requested:
            self._policy.request()

    def save(self) -> bool:
        """Save now, between two steps; a failure is reported and the training goes on.

        Returns:
            Whether rank 0 has saved; True on the others.
        """
        if self._policy is None:
            self._begin()
        assert self._policy is not None and self._ranks is not None
        self._is_put_off = self._is_put_off and self._policy.is_requested
        with self._policy.saving(keeps_request=self._is_put_off):
            state = capture_state(
                self._model,
                self._optimizer,
                list(self._settings.schedulers),
                step=self.step,
                gather=self._gather,
                **self._more,
            )
            if not self._ranks.leads:
                return True
            try:
                self.checkpoints.save(state)
            except (CheckpointError, InvalidArgument) as error:
                warn(f"no checkpoint was saved at step {self.step}: {error}", stacklevel=6)
                return False
        return True

    def save_now(self) -> None:
        """Save, where the script asks; ranks that have left, as at its end, are told of in one sentence."""
        try:
            self.save()
        except RuntimeError as error:
            if self._ranks is None or not self._ranks.distributed:
                raise
            if self._ranks.leads:  # the others don't save: what they miss is the answer that it was done
                warn(f"no checkpoint was saved at step {self.step}: {error}", stacklevel=4)

    def close(self) -> None:
        """Save no more, and leave SIGTERM to whom it was before."""
        self._alive = False
        self._hook.remove()
        all_updates().forget(self)
        self.checkpoints.release()
        if self._policy is not None:
            self._policy.close()


def _gather(ranks: Ranks, missed: str, step_s: float, mine: Any) -> list[Any]:
    return ranks.decide(mine, list, missed, step_s)
