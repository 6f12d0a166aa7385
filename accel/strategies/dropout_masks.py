"""dropout_masks: draw the masks of dropout by vector instructions, with the same bits.

torch draws Bernoulli numbers on a CPU one by one, in one thread. A strategy can't reach all calls of dropout from the
modules: attention draws within one operator, models call `functional.dropout`. So the operator `bernoulli_` is given
another kernel while it is on. That holds for the whole process, and nobody can see it: numbers and states of the
generators are torch's own.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from typing import Any

import torch
from torch import Generator, Tensor, nn

from accel.profiler.bottleneck import Bottleneck
from accel.profiler.loop.untraced import untraced
from accel.run import Run
from accel.strategies.base import Exactness, NothingHelps
from accel.strategies.process_setting import ProcessSetting, ProcessSwitch
from accel.strategies.trial_design import TrialDesign

_COMPARED_EVERY = 512
"""One draw in so many is made by torch as well, and compared."""
_COMPILING_S = 0.3


class _Kernel:
    """The kernel in the place of torch's, while a run uses it; one for the process."""

    def __init__(self) -> None:
        self.wrong = ""
        self._library: Any = None
        self._count = itertools.count(1)

    def register(self, wanted: bool) -> None:
        """Put it in the place of torch's, or take it away."""
        if wanted and self._library is None:
            library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of each kernel that is replaced
                library.impl("bernoulli_.float", self.draw, "CPU")
            self._library = library
        elif not wanted and self._library is not None:
            self._library._destroy()
            self._library = None

    @untraced  # eager parts of a compiled model call it, too
    def draw(self, tensor: Tensor, p: float = 0.5, generator: Generator | None = None) -> Tensor:
        """Be the kernel."""
        from accel.kernels import bernoulli

        if self.wrong or (next(self._count) % _COMPARED_EVERY == 0 and bernoulli.takes(tensor)):
            return self._compared(tensor, p, generator)
        return bernoulli.bernoulli_(tensor, p, generator=generator)

    def _compared(self, tensor: Tensor, p: float, generator: Generator | None) -> Tensor:
        """Draw by torch; what the kernel would have drawn is compared."""
        from accel.kernels import bernoulli

        if not self.wrong:
            twin = Generator()
            twin.set_state((generator or torch.default_generator).get_state())
            own = bernoulli.bernoulli_(torch.empty_like(tensor), p, generator=twin)
            if not torch.equal(own, bernoulli.torchs(tensor, p, generator)):
                self.wrong = f"it drew other numbers than torch for {tuple(tensor.shape)} {tensor.dtype}"
            return tensor
        return bernoulli.torchs(tensor, p, generator)


_KERNEL = _Kernel()


class DropoutMasks(ProcessSwitch):
    """Give `aten::bernoulli_` on the CPU a kernel that draws the same numbers in a tenth of the time.

    Before it is on, draws of all dtypes are compared with torch's, bit by bit, and the generators' states as well; then
    one in 512.

    Source: `accel.kernels.bernoulli`.
    """

    name = "dropout_masks"
    summary = "dropout's masks drawn by vector instructions"
    treats = frozenset({Bottleneck.COMPUTE})
    exactness = Exactness.EXACT
    touches = frozenset()  # it compares its numbers itself, in all steps
    switch = ProcessSetting(lambda: False, _KERNEL.register)

    def refusal(self, run: Run) -> str:
        """Say why it does not apply: another device, no dropout, no C compiler."""
        if run.device.type != "cpu":
            return f"masks are drawn on {run.device.type}, not on the CPU"
        if not any(map(drops, run.model.modules())):
            return "the model has no dropout"
        from accel.kernels.bernoulli import compiler

        return "" if compiler() else "there is no C compiler: neither CC nor cc, gcc or clang"

    def trial_design(self, run: Run) -> TrialDesign:
        """Reckon with what compiling takes, 0 once that has been done in this process."""
        bernoulli = sys.modules.get("accel.kernels.bernoulli")  # imported where a model drops out
        is_compiled = bernoulli is not None and bernoulli.why_not.cache_info().currsize
        return TrialDesign(cost_s=0.0 if is_compiled else _COMPILING_S)

    def enable(self, run: Run, setting: Any) -> None:
        """Compile the kernel, the first time, and register it."""
        from accel.kernels.bernoulli import why_not

        if reason := why_not():
            raise NothingHelps(reason)
        super().enable(run, setting)

    def failure(self, run: Run) -> str:
        """Say that a draw was not torch's."""
        return _KERNEL.wrong


def drops(module: nn.Module) -> bool:
    """Return whether a module drops something in training: one of torch's, or one that keeps a probability for it."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return 0 < module.p < 1
    values = (value for name, value in vars(module).items() if "drop" in name.lower())
    return any(isinstance(value, float) and 0 < value < 1 for value in values)
