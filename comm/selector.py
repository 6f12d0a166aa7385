"""Measure, model, choose: how each bucket of gradients is averaged on this network, with this model, on this machine.

    state = AutoComm(ddp, allow="lossy")
    ddp.register_comm_hook(state, hook)

1. Links and cores are measured when the state is made.
2. Each scheme that `allow` permits runs on this machine over channels that send nothing: what it computes and would
   send. Buckets' ready times, and the work of a step, are those of steps that are DDP's own.
3. A model predicts the step for each scheme; see `accel.comm.cost_model.cost`. Rank 0 decides, the others do as it
   says.
4. The best are tried on real steps; see `search`. What was shown to be fastest stays; where
   nothing is gained the hook comes off.
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
from accel.comm.cost_model.choice import WORTH, Choice, Option, choose, costs_of, fidelity, preferred
from accel.comm.cost_model.cost import Network
from accel.comm.cost_model.probe import probe
from accel.comm.selection.planner import Planner
from accel.profiler import stderr
from accel.profiler.errors import InvalidArgument
from accel.profiler.trial import TrialConfig
from accel.profiler.trial_driver import Block, Steps, by_blocks, drive

__all__ = ["AutoComm", "Choice", "choose"]

WARM_UP = 3
"""First steps, which are no measure: DDP makes new buckets after the first, memory is touched for the first time."""


class AutoComm(Planner):
    """State of a hook that chooses how gradients are averaged, within what is allowed, and checks its choice.

    Every rank makes one, with the same arguments. The first `WARM_UP` + `watch` steps are DDP's own. Saving, resuming
    and errors are as with `CommState`; a resumed run measures and chooses again, and keeps what was not sent yet.

    Args:
        ddp: the module; its process group must be the default one, whose links are measured.
        allow: how far the numbers may move: "exact" (DDP's own all-reduce), "reordered" (sums by hosts first;
            default), "reduced" (16 bits on the wire), "lossy" (compressed, with error feedback).
        watch: steps that are measured under DDP's own all-reduce, default 5.
        check: steps that a candidate is tried for at least, in turns with the best so far; default 20.
        network: the network, if known; default: it is measured.
        verbose: print the outcome on rank 0, to stderr.
        timeout: for each collective, default 5 minutes.
        scaler: the GradScaler in use, so that what was not sent yet follows its scale;
            default None.

    Raises:
        InvalidArgument: if an argument is out of range, or the module has a hook or a process group of its own.
        accel.CommError: from `loss.backward()`, if communication fails.

    Example:
        >>> ddp = DistributedDataParallel(model)
        >>> state = AutoComm(ddp, allow="lossy")
        >>> ddp.register_comm_hook(state, hook)
        >>> ...  # train
        >>> print(state.explain())
    """

    kind = "AutoComm"
    pickled = (*Planner.pickled, "allow", "watch", "check", "verbose", "_network")
    choice: Choice | None = None
    """What is predicted and measured, once it is."""
    chosen: Scheme | None = None
    """What the search came to, None where gradients were left as they are."""
    settled = False
    """Whether the search is over."""
    _broke_off = False
    _best: Option | None = None

    def __init__(
        self,
        ddp: DistributedDataParallel,
        allow: str = "reordered",
        *,
        watch: int = 5,
        check: int = 20,
        network: Network | None = None,
        verbose: bool = True,
        timeout: timedelta = timedelta(minutes=5),
        scaler: Any = None,
    ) -> None:
        check_level(allow)
        for name, value in (("watch", watch), ("check", check)):
            if value < 1:
                raise InvalidArgument(f"{name} must be at least 1 step, got {value}")
        self.allow, self.watch, self.check, self.verbose = allow, watch, check, verbose
        self._network = network
        super().__init__(ddp, timeout=timeout, scaler=scaler)

    def bind(self, model: nn.Module, process_group: dist.ProcessGroup | None = None, *, scaler: Any = None) -> None:
        """Take a DDP module, measure the network, and choose anew; every rank takes part. See `GradientEngine.bind`."""
        super().bind(model, process_group, scaler=scaler)
        self.choice, self.chosen, self._best, self.settled, self._broke_off = None, None, None, False, False
        self._steps = self._search()
        self._schemes = self.schemes(self.allow)
        if self._schemes:
            self.network = self._network or self._probed()

    def _probed(self) -> Network:
        size = dist.get_world_size()
        if self.topology.size != size:
            raise InvalidArgument(
                f"the module's process group must have all {size} ranks for its links to be measured, got "
                f"{self.topology.size}; pass network="
            )
        return probe(self.topology, self.binding.device)

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
        """Probe, predict, try, keep; at each yield a step is taken."""
        if not self._schemes:
            yield from self._keep(None)
        self.recorder.on = True
        for _ in range(WARM_UP):
            yield
        # Before plain steps are watched: malloc keeps pages once buffers as large as a bucket have been freed, and the
        # backward pass, which then has no pages to fault in, took 70 ms of a core in place of 105.
        costs = costs_of(self._schemes, self.facts, self.objects)
        self.recorder.clear()
        for _ in range(self.watch):
            yield
        self.choice = choose(self.recorder.observed(), self.facts, self.network, costs, self.objects)
        self._best = yield from search(self.choice, self.check, self._block)
        yield from self._keep(self._best)

    def _block(self, option: Option, block: Block) -> Generator[None, None, Steps]:
        """Run a block of steps under an option; a step's length is that of the slowest rank."""
        self.use(option.scheme)
        for _ in range(block.settle):
            yield
        self.recorder.clear()
        for _ in range(block.steps):
            yield
        observed = self.recorder.observed()
        own_s = observed.step_s - (observed.extra_s if option.scheme is None else 0.0)
        return Steps(seconds=[self.objects.decide(own_s, max)])

    def _keep(self, option: Option | None) -> Iterator[None]:
        self.chosen = None if option is None else option.scheme
        self.use(self.chosen)
        self.recorder.on = False
        self.recorder.clear()
        self.release()
        self.settled = True
        if self.chosen is None:
            self.take_off_later()
        if self.verbose and self.objects.rank == 0:
            stderr.write(f"accel: {self.verdict()}")
        yield

    def verdict(self) -> str:
        """Return the outcome in a sentence."""
        if not self.settled:
            return "gradients: still measuring"
        if self._broke_off:
            return "gradients: left as they are, the search was closed before its end"
        choice, best = self.choice, self._best
        if choice is None or best is None:
            nothing = f"allow={self.allow!r} leaves nothing to choose for these gradients"
            why = "there is one rank" if self.topology.size == 1 else nothing
            return f"gradients: left as they are, {why}"
        plain = f"{choice.plain_s * 1e3:.1f} ms"
        if best == choice.plain:
            return f"gradients: left as they are, nothing helps on this network: a step takes {plain}, {_tried(choice)}"
        return f"gradients: {best}, a step takes {choice.measured[best] * 1e3:.1f} ms in place of {plain}"

    def explain(self) -> str:
        """Return the outcome, each candidate's predicted step, and the measured ones."""
        if self.choice is None:
            return self.verdict()
        return f"{self.verdict()}\n\n{self.choice.table(self._best)}"


def _tried(choice: Choice) -> str:
    tried = {option: step_s for option, step_s in choice.measured.items() if option != choice.plain}
    if tried:
        return ", ".join(f"{option} took {step_s * 1e3:.1f} ms" for option, step_s in tried.items())
    return choice.best_predicted


_TRIALS = 4
_NEAR = 0.1
"""What a prediction may be wrong by."""
_TRIAL = TrialConfig(looks=(4, 6), alpha=0.08, keep_gain=0.0, drop_gain=WORTH)
"""Of 1,500 played runs in a crowd it keeps 6 % where the scheme gives nothing and 72 % where it gives 20 %; the rule
"faster in each of four pairs" kept 7 % and 53 %."""
_BLOCK_S, _MOST_STEPS = 0.4, 20
"""Short steps, which a moment's disturbance may double, take longer blocks: at least so long, or so many steps."""


def search(
    choice: Choice, check: int, run: Callable[[Option, Block], Generator[None, None, Steps]]
) -> Generator[None, None, Option]:
    """Return the best of what was tried, and leave in `choice` what was measured; at each `yield` a step is taken."""
    best = choice.plain
    for option in choice.candidates[:_TRIALS]:
        best_s = choice.measured[best]
        if option.step_s > best_s * (1 + _NEAR):
            break
        enough = min(math.ceil(_BLOCK_S / max(best_s, 1e-6)), _MOST_STEPS)
        config = replace(_TRIAL, block_steps=max(check // _TRIAL.looks[0], enough, 2))
        arms = {"A": best, "B": option}
        outcome = (yield from drive(by_blocks(config), lambda block: run(arms[block.arm], block))).outcome  # noqa: B023
        assert outcome is not None
        measured = {best: outcome.before_ms / 1e3, option: outcome.after_ms / 1e3}
        choice.measured |= measured
        is_shown = outcome.verdict == "keep" or fidelity(option) < fidelity(best)
        if is_shown and preferred(measured) == option:
            best = option
    return best
