"""What is checked in each step while strategies are on.

in each call     its outputs (`guard.watch`)
in each step     its gradients; if one is not finite, the step's calls are replayed (`guard.blame`)
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from accel.guard.alone import is_sharded
from accel.guard.blame import Blame
from accel.guard.comparison import Comparison, Replayed
from accel.guard.guard import Recording
from accel.guard.snapshot import ModelSnapshot, devices_of
from accel.guard.watch import Excuse, Watch
from accel.profiler.interruptions import Tolerated
from accel.profiler.loop import backward
from accel.run.gate import Call
from accel.session.replays import Replays


class StepWatch:
    """Check outputs and gradients, and switch off what has spoiled them."""

    def __init__(self, replays: Replays) -> None:
        self._replays, self._run, self._switchboard = replays, replays.run, replays.switchboard
        self.calls = Watch(self._run.gate, self._run.device, self._switchboard.trip)
        self._blame = Blame(self._run.model, self._run.observed.note_backward)
        self._excuse = Excuse()
        self._gradients_checked = False
        self._leaves_out_update = False
        self.steps_alone = True
        """No other rank takes the same steps, so an update may be left out."""

    def call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call, check its outputs, and keep it until its gradients have been checked."""
        if not self._run.gate.wrapped or self._run.device.type != "cpu" or backward.is_running() or self._is_sharded:
            return self.calls.call(call, args, kwargs)
        kept_call = self._blame.begin(args, kwargs)
        outputs = self.calls.call(call, args, kwargs)
        self._blame.keep(kept_call, outputs)
        return outputs

    @cached_property
    def _is_sharded(self) -> bool:
        return is_sharded(self._run.model)

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> bool:
        """Learn the usual inputs and outputs of a plain call; return whether it was one, since nothing is on."""
        if self._switchboard.active:
            return False
        with Tolerated("nothing could be noted of a call"):  # arguments that can't be looked through
            self._run.observed.note_call(args, kwargs, self._run.device)
            self._run.observed.note_outputs(outputs)
        self.calls.learn(outputs)
        return True

    def begin_step(self) -> None:
        """Forget what belongs to the step that has ended."""
        self._gradients_checked = self._leaves_out_update = False
        if self._blame.calls:
            self._blame.forget()

    def backward_begins(self) -> None:
        """Record whether gradients are there already."""
        self._blame.backward_begins()

    def backward_ended(self, roots: list[Tensor]) -> None:
        """Check the gradients."""
        self._gradients_checked = True
        if self._blame.calls:
            self._check_gradients(roots)

    def before_update(self, optimizer: Optimizer) -> None:
        """Check the gradients, if no backward pass was seen; leave out an update that strategies have spoiled.

        One within a backward pass changes the weights that the calls were made with: they can't be made again.
        """
        if self._blame.calls and backward.is_running():
            self._blame.forget()
        if not self._gradients_checked and self._blame.calls:
            self._check_gradients(None)
        if self._leaves_out_update and not self.calls.gradients_are_finite(optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _check_gradients(self, roots: list[Tensor] | None) -> None:
        """If strategies have made a gradient that is not finite, switch them off, and leave out its update."""
        if not self._switchboard.suspects() or self._excuse.holds():
            return
        self._blame.gradients_checked()
        if all(self.calls.gradients_are_finite(optimizer) for optimizer in self._run.optimizers):
            self._excuse.clear()
            return
        why = ""
        with Tolerated("a call could not be made again"):  # which proves nothing
            why = self._blame.verdict(roots, self._repeated)
        if not why:
            self._excuse.grant()
            return
        # Ranks step together: a rank that left out an update alone would no longer be a replica.
        self._leaves_out_update = self.steps_alone
        self._switchboard.trip(why + ("; that update was left out" if self._leaves_out_update else ""))

    def _repeated(self, call: Recording) -> tuple[Replayed, Comparison]:
        run, active = self._run, dict(self._switchboard.active)
        on_model = self._switchboard.acting_on("model", active)
        beside = {name: setting for name, setting in active.items() if name not in on_model}
        compiles, given = bool(run.gate.compilers), (call.args, call.kwargs)
        with self._replays.untouched(call):
            # The kept call has the random state of the CPU only: the rest is as now in both replays.
            devices = devices_of(run.model, run.device, *given)
            call.before.restore = ModelSnapshot(run.model, devices, given).restore  # type: ignore[method-assign]
            try:
                finding, plain = self._replays.compared(active, call, compiles=compiles, beside=beside)
            finally:
                self._switchboard.switch(active)
        return plain, finding

    def close(self) -> None:
        """Release the calls that were kept."""
        self._blame.forget()
