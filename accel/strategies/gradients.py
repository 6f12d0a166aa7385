"""The strategies for gradients: when they apply, and which schemes they offer for a trial.

The schemes and what is predicted of them come from `accel.comm.selection.offers`, the trial is the controller's. The
former is imported where there is something to offer: with it come the hooks, the compressors and the cost model, 0.2 s
that a run on one rank need not spend.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from accel.profiler.bottleneck import Bottleneck
from accel.run import Run
from accel.strategies.base import Exactness, NothingHelps, Strategy
from accel.strategies.trial_design import TrialDesign

if TYPE_CHECKING:
    from accel.comm.selection.offers import SchemeOffers


class GradientStrategy(Strategy):
    """Base of the strategies for gradients; each names the level of the schemes that it offers, and those above it."""

    treats = frozenset({Bottleneck.COMMUNICATION})
    touches = frozenset({"ranks"})
    level: str
    """Of `allow`."""
    measuring_s = 5.0
    """What measuring the network and the compressors takes."""
    above: tuple[str, ...] = ()
    """Levels whose schemes include those of this one."""

    def __init__(self) -> None:
        self._offers: SchemeOffers | None = None
        self._settings = [0]

    def refusal(self, run: Run) -> str:
        """Say why not: no DDP, one rank, a GPU, a hook or a process group of the user's, or a wider choice."""
        if run.world_size < 2:
            return "there is one rank"
        if not isinstance(run.model, DistributedDataParallel):
            return "the model is no DistributedDataParallel module; pass the wrapped one"
        if run.model._join_config.enable:
            return "within join() ranks take different numbers of steps, and these must switch at the same one"
        if run.cuda and self.name not in run.enabled:
            return f"its hooks have not been proven on GPUs; enable=({self.name!r},) tries them after a self-test"
        from accel.comm.selection import offers

        return offers.refusal(run.model, self.above)

    def trial_design(self, run: Run) -> TrialDesign:
        """Reckon with the measurement of the network; DDP makes its buckets anew after the hook has come off or on."""
        return TrialDesign(cost_s=self.measuring_s, settle_steps=3, describe=self.describe)

    def settings(self, run: Run) -> list[Any]:
        """Return the numbers of the offers; the list grows once they are known, while it is gone through."""
        self._settings = [0]
        return self._settings

    def enable(self, run: Run, setting: Any) -> None:
        """Let gradients go by an offered scheme from the next step on, or once there is a prediction."""
        assert isinstance(run.model, DistributedDataParallel)
        from accel.comm.selection import offers

        self._offers = offers.open_offers(run.model)
        with _declining():
            self._offers.enable(self.level, setting)
        self._settings += range(len(self._settings), len(self._offers.about_as_fast(self.level)))

    def disable(self, run: Run) -> None:
        """Let DDP average as it does by itself, or as another of these strategies has it."""
        if self._offers is not None:
            with _declining():
                self._offers.disable(self.level)

    def close(self, run: Run) -> None:
        """Free threads, groups and the hook, unless one of these strategies is on."""
        if self._offers is not None:
            self._offers.free()

    def describe(self, setting: Any) -> str:
        """Return the scheme and the step predicted for it; '' until it is known."""
        return "" if self._offers is None else self._offers.describe(self.level, setting)


@contextlib.contextmanager
def _declining() -> Iterator[None]:
    """Decline where nothing is predicted to help."""
    from accel.comm.selection.offers import NoOffer

    try:
        yield
    except NoOffer as error:
        raise NothingHelps(str(error)) from None


class GradientCompression(GradientStrategy):
    """Offer, beside DDP's own all-reduce, sums by hosts, 16 bits, int8, 1-bit, PowerSGD and DGC."""

    name = "gradient_compression"
    summary = "gradients compressed on slow links, with error feedback"
    exactness = Exactness.LOSSY
    level = "lossy"


class GradientHalf(GradientStrategy):
    """Offer, beside DDP's own all-reduce, sums by hosts and bfloat16 on the wire."""

    name = "gradient_half"
    summary = "16-bit gradients on slow links"
    exactness = Exactness.REDUCED
    level = "reduced"
    above = ("lossy",)


class GradientByHosts(GradientStrategy):
    """Offer, beside DDP's own all-reduce, a sum within each host first; within one by its memory, not by sockets.

    N hosts of G ranks send 2 (N - 1)/N of the gradient each, where a ring over all sends 2 (NG - 1)/(NG) of it.
    """

    name = "gradient_by_hosts"
    summary = "gradients summed within each host first, through its memory"
    exactness = Exactness.REORDERED
    level = "reordered"
    above = ("lossy", "reduced")

    def refusal(self, run: Run) -> str:
        """Say why not: also where hosts have one rank each, or GPUs, which need no host memory, have one host."""
        if reason := super().refusal(run):
            return reason
        if ranks_per_host() == 1:
            return "each host has one rank"
        return "there is one host" if run.cuda and ranks_per_host() == run.world_size else ""


def ranks_per_host() -> int:
    """Return how many ranks torchrun has started on this host, 0 where it has not."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
