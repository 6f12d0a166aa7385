"""gradient_by_hosts: gradients summed within each host, through its memory, before they cross the network."""

from __future__ import annotations

from accel.run import Run
from accel.strategies.base import Exactness
from accel.strategies.gradient_strategy import GradientStrategy, ranks_per_host


class GradientByHosts(GradientStrategy):
    """Offer, beside DDP's own all-reduce, a sum within each host first; within one by its memory, not by sockets.

    N hosts of G ranks send 2 (N - 1)/N of the gradient each, where a ring over all sends 2 (NG - 1)/(NG) of it.
    """

    name = "gradient_by_hosts"
    summary = "gradients summed within each host first, through its memory"
    exactness = Exactness.REORDERED
    level = "reordered"
    above = ("lossy", "reduced")
    measuring_s = 0.0  # there is one scheme

    def refusal(self, run: Run) -> str:
        """Say why not: also where hosts have one rank each, or GPUs, which need no host memory, have one host."""
        if reason := super().refusal(run):
            return reason
        if ranks_per_host() == 1:
            return "each host has one rank"
        return "there is one host" if run.cuda and ranks_per_host() == run.world_size else ""
