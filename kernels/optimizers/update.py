"""One step of an optimizer for all parameters: on a GPU by kernels, elsewhere by torch's operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accel.kernels.optimizers import host
from accel.kernels.optimizers.device import Launcher
from accel.kernels.optimizers.regular import Sizes
from accel.kernels.optimizers.rules import Batch, Hypers, Kind, Scaling, UpdateOutcome
from accel.kernels.support import Cost, runs_triton


class Updater:
    """Updates the parameters of one optimizer.

    Formulas: `accel.kernels.optimizers.rules`.

    Args:
        kind: of optimizer.

    Example:
        >>> weight, momentum = torch.ones(3), torch.zeros(3)
        >>> batch = Batch(Hypers(lr=0.1, beta1=0.9), [weight], [torch.ones(3)], [[momentum]])
        >>> _ = Updater("sgd")([batch])
        >>> weight
        tensor([0.9000, 0.9000, 0.9000])
    """

    def __init__(self, kind: Kind) -> None:
        self.kind: Kind = kind
        self._launcher: Launcher | None = None
        self._known: list[Sizes] = []

    def __call__(self, batches: Sequence[Batch], scaling: Scaling | None = None) -> UpdateOutcome:
        """Update, in place.

        Args:
            batches: one for each parameter group, with the parameters that have a gradient.
            scaling: of mixed precision; None (default) for none.

        Returns:
            The norm of all gradients and whether the step was skipped, each where it was asked for. On a GPU nothing
            waits for them, and the next step overwrites them.
        """
        scaling = scaling or Scaling()
        first = next((batch.params[0] for batch in batches if batch.params), None)
        if first is None:
            return UpdateOutcome(None, None)
        if runs_triton(first):
            outcome = self._launcher_on(first).update(self.kind, batches, scaling)
        else:
            outcome = host.update(self.kind, batches, scaling, self._known)
        # Neither our kernels nor torch's fused ones say so: what autograd saved of a parameter is no more what it was.
        for batch in batches:
            torch.autograd.graph.increment_version(batch.params)
        return outcome

    def send(self, rows: Sequence[Hypers], param: Tensor) -> None:
        """Send the numbers of parameter groups to the device of a parameter, before a captured step or a capture."""
        if runs_triton(param):
            launcher = self._launcher_on(param)
            launcher.send(rows)
            launcher.make_room()

    def _launcher_on(self, param: Tensor) -> Launcher:
        if self._launcher is None or self._launcher.device != param.device:
            self._launcher = Launcher(param.device)
        return self._launcher


_STATES = {"sgd": 1, "lars": 1, "adam": 2, "lamb": 2}


def cost(
    kind: Kind,
    numel: int,
    dtype: torch.dtype = torch.float32,
    *,
    norm: bool = False,
    states: int | None = None,
    grad_bytes: int | None = None,
) -> Cost:
    """Return the least work of a step.

    Args:
        kind: of optimizer.
        numel: elements of all parameters.
        dtype: of parameters and gradients; 16-bit ones have float32 master weights.
        norm: whether gradients are clipped, or looked through for infinity: they are read twice.
        states: moments or buffers of a parameter; None (default) for as many as the optimizer usually has.
        grad_bytes: of an element of a gradient; None (default) for those of `dtype`.

    Returns:
        Bytes read and written, and roughly how many operations.
    """
    param = torch.empty((), dtype=dtype).element_size()
    weight = max(param, 4)
    grad = param if grad_bytes is None else grad_bytes
    state = weight * (_STATES[kind] if states is None else states)
    # Weight and states are read and written, the gradient is read; the 16-bit parameter is written.
    each = 2 * weight + 2 * state + grad + (param if param < 4 else 0)
    each += grad if norm or kind == "lars" else 0
    # LARS needs norms of the weights first; LAMB reads moments and weights once more, when it has the norms.
    each += weight if kind == "lars" else 0
    each += weight + state if kind == "lamb" else 0
    return Cost(flops=20 * numel, bytes=each * numel)
