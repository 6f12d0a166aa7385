"""The base of the strategies that choose how gradients are averaged: when they apply, and what they choose among.

What measures, chooses and switches is in `gradient_choice`, and is imported where there is something to choose: with it
come the hooks, the compressors and the cost model, 0.2 s that a run on one rank need not spend.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.strategies.base import Strategy

if TYPE_CHECKING:
    from accel.strategies.gradient_choice import Gradients


class GradientStrategy(Strategy):
    """Base of the strategies that choose how gradients are averaged; each names a level and those above it."""

    treats = frozenset({Bottleneck.COMMUNICATION})
    touches = frozenset()
    collective = True
    one_off_s = 5.0
    settle_steps = 3  # DDP makes its buckets anew after the hook has come off or gone on
    level: str
    """Of `allow`."""
    above: tuple[str, ...] = ()
    """Levels whose choice includes the ways of this one."""

    def __init__(self) -> None:
        self._gradients: Gradients | None = None
        self._settings = [0]

    def refusal(self, run: Run) -> str:
        """Say why not: no DDP, one rank, a GPU, a hook or a process group of the user's, or a wider choice."""
        if run.world_size < 2:
            return "there is one rank"
        if not isinstance(run.model, DistributedDataParallel):
            return "the model is no DistributedDataParallel module; pass the wrapped one"
        if run.model._join_config.enable:
            return "within join() ranks take different numbers of steps, and these must switch at the same one"
        if run.cuda:
            return "its hooks have not been run on GPUs yet; accel.comm.selector.AutoComm can be tried by hand"
        from accel.strategies import gradient_choice

        return gradient_choice.refusal(run.model, self.above)

    def settings(self, run: Run) -> list[Any]:
        """Return the numbers of the best ways; the list grows once they are known, while it is gone through."""
        self._settings = [0]
        return self._settings

    def enable(self, run: Run, setting: Any) -> None:
        """Measure and choose if that has not been done, and let gradients go the chosen way from the next step on."""
        assert isinstance(run.model, DistributedDataParallel)
        from accel.strategies import gradient_choice

        self._gradients = gradient_choice.opened(run.model)
        self._gradients.enable(self.level, setting)
        self._settings += list(range(len(self._settings), len(self._gradients.about_as_fast(self.level))))

    def disable(self, run: Run) -> None:
        """Let DDP average as it does by itself, or as another of these strategies has it."""
        if self._gradients is not None:
            self._gradients.disable(self.level)

    def close(self, run: Run) -> None:
        """Let go of threads, groups and the hook, unless one of these strategies is on."""
        if self._gradients is not None:
            self._gradients.close()

    def describe(self, setting: Any) -> str:
        """Return the way and the step predicted for it; '' until it is known."""
        return "" if self._gradients is None else self._gradients.describe(self.level, setting)


def ranks_per_host() -> int:
    """Return how many ranks torchrun has started on this host, 0 where it has not."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
