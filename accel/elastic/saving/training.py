"""One training's checkpoints: everything that is in them, how it is saved, and how it is taken up again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from accel.dataio.elastic_sampler import ElasticSampler
from accel.elastic.checkpoint import Checkpoints
from accel.elastic.options import Checkpointing
from accel.elastic.saving.bucket_order import BucketOrder
from accel.elastic.saving.plain_values import check_plain
from accel.elastic.saving.torchrun_nodes import remedy
from accel.elastic.training_state import capture_state, restore_state
from accel.errors import CheckpointError, InvalidArgument
from accel.profiler.interruptions import ours
from accel.profiler.stderr import warn
from accel.run.ranks import Ranks, leads

if TYPE_CHECKING:
    from accel.elastic.batch_size.record import BatchRecord

_START_S = 30.0
"""By which ranks may come to `accel.optimize` at different times: twice as much is waited for."""


def settings_of(wanted: str | Checkpointing) -> Checkpointing:
    return wanted if isinstance(wanted, Checkpointing) else Checkpointing(folder=wanted)


class TrainingCheckpoints:
    """The checkpoints of a training; `batch` decides its batch size, if anything does."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        sampler: ElasticSampler,
        settings: Checkpointing,
        batch: BatchRecord | None,
        say: Callable[[str], None],
    ) -> None:
        self.checkpoints = Checkpoints(settings.folder, settings.keep, alone=True)
        if advice := remedy():
            say(advice)
        self._model, self.optimizer, self.sampler = model, optimizer, sampler
        self.settings, self._batch, self._say = settings, batch, say
        own = {"sampler": sampler, "buckets": BucketOrder(model)} | ({} if batch is None else {"batch": batch})
        self._parts: dict[str, Any] = {"schedulers": list(settings.schedulers), **own, **settings.more}

    def restore(self, called_at: float) -> int:
        """Take up the newest checkpoint that is whole, and return its step; 0 if there is none.

        Raises:
            CheckpointError: if there are only those of another training; nothing has been changed then.
            InvalidArgument: if something has a state that no checkpoint can hold: better now than at the first save.
        """
        self._check_states()
        self._look_for_schedulers()
        ranks = Ranks()
        ranks.join(since=called_at)
        gather: Callable[[Any], list[Any]] | None = None
        if ranks.distributed:
            gather = partial(ranks.decide, decision=list, missed="did not come to load a checkpoint", step_s=_START_S)
            if self._batch is not None:
                self._batch.memory = min(gather(self._batch.memory))  # all ranks go on with as many samples
        notes: list[str] = []

        def take(state: dict[str, Any]) -> None:
            notes[:] = restore_state(state, self._model, self.optimizer, **self._parts)

        state = self.checkpoints.load_latest(gather, take)
        for sentence in self.checkpoints.refused:
            self._say(sentence)
        if state is None:
            return 0
        self._say(f"goes on from step {state['step']}, saved in {self.settings.folder}")
        for sentence in notes:
            self._say(sentence)
        step: int = state["step"]
        return step

    def restore_position(self) -> None:
        """Take the epoch of the newest checkpoint alone: what else it has is loaded once this process has joined."""
        state = self.checkpoints.load_latest()
        if state is not None:
            self.sampler.load_state_dict(state["parts"]["'sampler'"])

    def save(self, step: int, gather: Callable[[Any], list[Any]] | None, *, writes: bool) -> bool:
        """Save between two steps; return whether that could be done, True on ranks that don't write."""
        state = capture_state(self._model, self.optimizer, step=step, gather=gather, **self._parts)
        try:
            if writes:
                self.checkpoints.save(state)
        except (CheckpointError, InvalidArgument) as error:
            warn(f"no checkpoint was saved at step {step}: {error}", stacklevel=7)
            return False
        return True

    def _check_states(self) -> None:
        """Raise if a state can't be held; the model's is of tensors, perhaps still to come (`LazyLinear`)."""
        try:
            state = capture_state(nn.Module(), self.optimizer, **self._parts)
        except InvalidArgument:
            raise
        except ours():  # of what has no state yet, as an optimizer that is sharded
            return
        check_plain(state)

    def _look_for_schedulers(self) -> None:
        """Warn of a learning-rate scheduler that no checkpoint would hold; torch's and timm's mark the groups."""
        settings = self.settings
        steps = (hasattr(each, "step") for each in settings.more.values() if each is not settings.scaler)
        is_scheduled = any("initial_lr" in group for group in self.optimizer.param_groups)
        if is_scheduled and not settings.schedulers and not any(steps) and leads():
            warn(
                "a learning-rate scheduler acts on the optimizer and is in no checkpoint, so that a resume begins it "
                "from its start; name it: Checkpointing(folder=..., schedulers=[scheduler])",
                stacklevel=9,
            )
