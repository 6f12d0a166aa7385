"""Loops that train on without asking for batches: they repeat those that they have kept, in a list, or `cycle` has.

No request ends their steps, so that whatever was being tried would stay on for good. Such a step ends where the model
is called for the first time after an update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.optim.optimizer import Optimizer

from accel.run import backward, ranks
from accel.session.update_turns import UpdateTurns

FEW = 8
"""Updates by one batch that nothing is made of: a GAN makes a few with each."""
_REPEATED_AFTER = 64
"""Further steps from which on batches are taken to be repeated."""


class KeptBatches:
    """Find out whether a loop repeats batches, and where its steps end while it does."""

    def __init__(self) -> None:
        self.are_repeated = False
        """No request is waited for; an update by a batch that was asked for ends that."""
        self.has_just_begun = False
        """The step that ends now is the first without a request: it is all those since the last one."""
        self.is_possible = True
        """Steps may end without a request: not where the batch size is chosen at each, another thread makes them, or
        the trials have ended."""
        self.has_batch = False
        """A batch was delivered, and neither another one requested nor an update made since: the events set it. At the
        end of a validation the last request gets no batch."""
        self.updates = 0
        """Since the last batch that was asked for; the events count them."""
        self.is_updating = False
        """An optimizer is stepping; the events set it."""
        self._steps = 0
        """After the first few updates, as far as calls after an update tell."""
        self._turns = UpdateTurns()
        self._has_updated = False

    def begin_again(self) -> None:
        """Count from an update by a batch that was asked for."""
        self.updates = self._steps = 0
        self.has_batch = self.are_repeated = self._has_updated = False

    def updated(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped, after the first few updates."""
        self._has_updated = self._turns.ends_with(optimizer) or self._has_updated

    def ends_step(self) -> bool:
        """Return whether the call of the model that is about to be made is the first of the next step.

        It is none in an optimizer's closure; nor one that autograd makes again, or that is to be made again by it, for
        what is done between two steps would be taken for a part of it. On several ranks a boundary must be the same on
        all of them, and one may train on by itself.
        """
        if not self._has_updated or self.is_updating or not self.is_possible or not _is_between_steps():
            return False
        self._has_updated = False
        self._steps += 1
        if self._steps < _REPEATED_AFTER:
            return False
        self.has_just_begun, self.are_repeated = not self.are_repeated, True
        return True


def _is_between_steps() -> bool:
    if ranks.are_several() or backward.is_running() or torch.is_inference_mode_enabled():
        return False
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


@contextlib.contextmanager
def outside_autocast(device_type: str) -> Iterator[None]:
    """Leave the loop's autocast for a block, and what it has cast as it is: no cast made within the block is kept.

    That of a weight would belong to a graph that is gone when the loop uses it.
    """
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    is_kept = torch.is_autocast_cache_enabled()
    try:
        with torch.autocast(device_type, enabled=False, cache_enabled=False):
            yield
    finally:
        torch.set_autocast_cache_enabled(is_kept)
