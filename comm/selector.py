"""Measure and choose: how the gradients of a model are averaged on this network and machine.

    state = AutoComm(ddp, allow="lossy")
    ddp.register_comm_hook(state, hook)

1. DDP's own all-reduce and each scheme that `allow` permits are used for a few steps.
2. Those that were fastest are tried in turns with the best so far; see `search`. What was shown to be fastest stays;
   where nothing is gained the hook comes off.

All ranks change at the same steps, and go by the steps of the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.comm.catalogue import Scheme, check_level
from accel.comm.selection.choice import WORTH, Choice, Option, fidelity, named, preferred
from accel.comm.selection.planner import Planner
from accel.profiler import stderr
from accel.profiler.errors import InvalidArgument
from accel.profiler.trial import TrialConfig
from accel.profiler.trial_driver import Block, Steps, by_blocks, drive

__all__ = ["AutoComm", "Choice"]


class AutoComm(Planner):
    """State of a hook that chooses how gradients are averaged, within what is allowed, by steps of the run.

    Every rank makes one, with the same arguments. Saving, resuming and errors are as with `CommState`; a resumed run
    measures and chooses again, and keeps what was not sent yet.

    Args:
        ddp: the module.
        allow: how far the numbers may move: "exact" (DDP's own all-reduce), "reordered" (sums by hosts first;
            default), "reduced" (16 bits on the wire), "lossy" (compressed, with error feedback).
        watch: steps that each scheme is measured for at first, default 5.
        check: steps that a candidate is tried for at least, in turns with the best so far; default 20.
        verbose: print the outcome on rank 0, to stderr.
        timeout: for each collective, default 5 minutes.
        scaler: the GradScaler in use, so that what was not sent yet follows its scale;
            default None.

    Raises:
        InvalidArgument: if an argument is out of range, or the module has a hook of its own.
        accel.CommError: from `loss.backward()`, if communication fails.

    Example:
        >>> ddp = DistributedDataParallel(model)
        >>> state = AutoComm(ddp, allow="lossy")
        >>> ddp.register_comm_hook(state, hook)
        >>> ...  # train
        >>> print(state.explain())
    """

    kind = "AutoComm"
    pickled = (*Planner.pickled, "allow", "watch", "check", "verbose")
    choice: Choice | None = None
    """What is measured, once each scheme was used."""
    chosen: Scheme | None = None
    """What the search came to, None where gradients were left as they are."""
    settled = False
    """Whether the search is over."""
    _broke_off = False

    def __init__(
        self,
        ddp: DistributedDataParallel,
        allow: str = "reordered",
        *,
        watch: int = 5,
        check: int = 20,
        verbose: bool = True,
        timeout: timedelta = timedelta(minutes=5),
        scaler: Any = None,
    ) -> None:
        check_level(allow)
        for name, value in (("watch", watch), ("check", check)):
            if value < 1:
                raise InvalidArgument(f"{name} must be at least 1 step, got {value}")
        self.allow, self.watch, self.check, self.verbose = allow, watch, check, verbose
        super().__init__(ddp, timeout=timeout, scaler=scaler)

    def bind(self, model: nn.Module, process_group: dist.ProcessGroup | None = None, *, scaler: Any = None) -> None:
        """Take a DDP module, and choose anew; every rank takes part. See `GradientEngine.bind`."""
        super().bind(model, process_group, scaler=scaler)
        self.choice, self.chosen, self.settled, self._broke_off = None, None, False, False
        self._steps = self._search()

    def close(self) -> None:
        """End threads and groups, and with them the search; the hook is DDP's own all-reduce from then on."""
        if self.is_open and not self.settled:
            self.settled = self._broke_off = True
        super().close()

    def between_steps(self) -> None:
        """Go on with the search."""
        if not self.settled:
            next(self._steps)

    def _search(self) -> Iterator[None]:
        """Use each for a few steps, try the best, keep; at each yield a step is taken."""
        best: Option = None
        if schemes := self.schemes(self.allow):
            self.choice = Choice((yield from self.screened(schemes, self.watch)))
            best = yield from search(self.choice, self.check, self._block)
        self.chosen = best
        self.use(best)
        self.release()
        self.settled = True
        if best is None:
            self.take_off_later()
        if self.verbose and self.objects.rank == 0:
            stderr.write(f"accel: {self.verdict()}")
        yield

    def _block(self, option: Option, block: Block) -> Generator[None, None, Steps]:
        """Run a block of steps by an option."""
        return Steps(seconds=[(yield from self.measured(option, block.settle, block.steps))])

    def verdict(self) -> str:
        """Return the outcome in a sentence."""
        if not self.settled:
            return "gradients: still measuring"
        if self._broke_off:
            return "gradients: left as they are, the search was closed before its end"
        choice = self.choice
        if choice is None:
            nothing = f"allow={self.allow!r} leaves nothing to choose for these gradients"
            why = "there is one rank" if self.topology.size == 1 else nothing
            return f"gradients: left as they are, {why}"
        plain = f"{choice.step_s(None) * 1e3:.1f} ms"
        if self.chosen is None:
            return f"gradients: left as they are, nothing helps on this network: a step takes {plain}, {_tried(choice)}"
        return f"gradients: {self.chosen}, a step takes {choice.step_s(self.chosen) * 1e3:.1f} ms in place of {plain}"

    def explain(self) -> str:
        """Return the outcome, and the step of each option: at first, and for the best in turns."""
        if self.choice is None:
            return self.verdict()
        return f"{self.verdict()}\n\n{self.choice.table(self.chosen)}"


def _tried(choice: Choice) -> str:
    tried = [
        f"{named(option)} took {step_s * 1e3:.1f} ms"
        for option, step_s in choice.measured.items()
        if option is not None
    ]
    return ", ".join(tried) or choice.best_screened


_TRIALS = 4
_NEAR = 0.1
"""What a few steps may be wrong by."""
_TRIAL = TrialConfig(looks=(4, 6), alpha=0.08, keep_gain=0.0, drop_gain=WORTH)
"""Of 1,500 played runs in a crowd it keeps 6 % where the scheme gives nothing and 72 % where it gives 20 %; the rule
"faster in each of four pairs" kept 7 % and 53 %."""
_BLOCK_S, _MOST_STEPS = 0.4, 20
"""Short steps, which a moment's disturbance may double, take longer blocks: at least so long, or so many steps."""


def search(
    choice: Choice, check: int, run: Callable[[Option, Block], Generator[None, None, Steps]]
) -> Generator[None, None, Option]:
    """Return the best of what was tried, and leave in `choice` what was measured; at each `yield` a step is taken."""
    best: Option = None
    for scheme in choice.candidates[:_TRIALS]:
        best_s = choice.step_s(best)
        if choice.screened[scheme] > best_s * (1 + _NEAR):
            break
        enough = min(math.ceil(_BLOCK_S / max(best_s, 1e-6)), _MOST_STEPS)
        config = replace(_TRIAL, block_steps=max(check // _TRIAL.looks[0], enough, 2))
        arms: dict[str, Option] = {"A": best, "B": scheme}
        outcome = (yield from drive(by_blocks(config), lambda block: run(arms[block.arm], block))).outcome  # noqa: B023
        assert outcome is not None
        measured = {best: outcome.before_ms / 1e3, scheme: outcome.after_ms / 1e3}
        choice.measured |= measured
        is_shown = outcome.verdict == "keep" or fidelity(scheme) < fidelity(best)
        if is_shown and preferred(measured) == scheme:
            best = scheme
    return best
