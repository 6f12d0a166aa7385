"""Measure, model, choose: how each bucket of gradients is averaged on this network, with this model, on this machine.

    state = AutoComm(ddp, allow="lossy")
    ddp.register_comm_hook(state, hook)

1. Links and cores are measured when the state is made.
2. Each way that `allow` permits runs on this machine over channels that send nothing: what it computes and would send.
   Buckets' ready times, and the work of a step, are those of steps that are DDP's own.
3. A model predicts the step for each way; see `accel.comm.cost_model.cost`. Rank 0 decides, the others do as it says.
4. The best goes on for `check` steps, and as long as another is predicted to be about as short as what was measured,
   that one too: so a prediction that proves wrong leads to the next best. The two shortest, if they are near to each
   other, are on trial against each other. The shortest stays, perhaps DDP's own; a small gain must show in a trial
   against DDP's own: see `accel.profiler.trial`. Where nothing is gained the hook comes off.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel.comm.catalogue import Scheme, allowed, check_level
from accel.comm.cost_model.bucket_size import Size, better_size
from accel.comm.cost_model.choice import (
    WORTH,
    ObservedStep,
    Option,
    calibrated,
    describe,
    mean_of,
    options,
    preferred,
    worthwhile,
)
from accel.comm.cost_model.cost import Network, Profile, Stages
from accel.comm.cost_model.dry_run import copy_byte_s, costs, shared_out
from accel.comm.cost_model.probe import probe
from accel.comm.engine.plan import Plan
from accel.comm.ranks.post_mortem import CommError
from accel.comm.selection.planner import Planner, hook
from accel.profiler.trial import Trial, TrialConfig, Verdict

__all__ = ["AutoComm", "Choice", "choose", "hook"]

WARM_UP = 3
"""First steps, which are no measure: DDP makes new buckets after the first, memory is touched for the first time."""
_TRIALS = 4
_REBUILT = 4
"""Steps until DDP has made buckets of another size, and memory for them has been touched."""
_NEAR = 0.1
"""What a prediction, or a short measurement, may be wrong by."""
_SURE = 1.5
"""A gain below this must show in a trial: it may be a drift of the machine."""
_TRIAL = TrialConfig(looks=(4, 6), alpha=0.08, keep_gain=0.0, drop_gain=WORTH)
"""Of 1,500 played runs in a crowd it keeps 6 % where the scheme gives nothing and 72 % where it gives 20 %; the rule
"faster in each of four pairs" kept 7 % and 53 %."""
_BLOCK_S, _MOST_STEPS = 0.4, 20
"""Short steps, which a moment's disturbance may double, take longer blocks: at least so long, or so many steps."""


@dataclass
class Choice:
    """What the model says of every candidate, and what real steps said of those tried."""

    options: list[Option]
    """Best first: the shortest predicted step, or about as short and nearer to exact."""
    profile: Profile
    network: Network
    plain_s: float
    """DDP's own step, measured."""
    sizes: dict[Scheme | None, Size]
    """Sizes of buckets predicted to be better, by the way that all buckets go."""
    measured: dict[Plan, float] = field(default_factory=dict)
    """Steps of the options that were tried."""
    sized: dict[float, float] = field(default_factory=dict)
    """Steps of the chosen option by the size of buckets, where another one was tried."""

    def table(self, chosen: Plan | None = None) -> str:
        """Return the candidates, one a line: predicted step, communication that backward does not hide, measured."""
        width = max(len(str(one)) for one in self.options)
        lines = [f"{'way':{width}}  predicted     exposed    measured"]
        for one in self.options:
            real = self.measured.get(one.plan)
            said = f"{real * 1e3:8.1f} ms" if real is not None else " " * 11
            mark = "  <- chosen" if chosen is not None and _same(one.plan, chosen) else ""
            lines.append(
                f"{one!s:{width}} {one.step_s * 1e3:8.1f} ms {one.exposed_s * 1e3:8.1f} ms {said}{mark}".rstrip()
            )
        return "\n".join(lines)


def _same(one: Plan, other: Plan) -> bool:
    return one == other if any(one) or any(other) else True


Costs = dict[Scheme, tuple[Stages, ...]]


def costs_of(planner: Planner, ways: list[Scheme]) -> list[Costs]:
    """Return on rank 0 what buckets cost on each way, as each rank has timed it; all ranks call this together.

    All ranks at once, since they share memory, caches and cores in earnest too.

    Args:
        planner: with recorded steps.
        ways: to be timed.
    """
    mine: Costs | str
    try:
        mine = costs(ways, planner.recorder.layouts, planner.topology, planner.device)
    except Exception as error:  # on this rank, perhaps alone: the others wait for what it has to say
        mine = f"rank {planner.talk.rank} could not time the ways: {type(error).__name__}: {error}"
    told = planner.talk.collect(mine)
    if problem := planner.talk.first(next((one for one in told if isinstance(one, str)), "")):
        raise CommError(problem)
    return [one for one in told if not isinstance(one, str)]


def choose(planner: Planner, network: Network, told: list[Costs]) -> Choice:
    """Return what the model says, from the steps that a planner has recorded; all ranks call this together.

    Args:
        planner: with recorded steps under DDP's own all-reduce.
        network: from `accel.comm.cost_model.probe.probe`.
        told: from `costs_of`, of the candidates; on rank 0.

    Returns:
        The same on every rank.
    """
    mine = (planner.recorder.times.observed(), float(torch.get_num_threads()))
    copying = 0.0 if planner.registration.gradients_are_views else copy_byte_s(planner.recorder.layouts, planner.device)

    def decision(seen: list[tuple[ObservedStep, float]]) -> Choice:
        mean = mean_of([one for one, _ in seen])
        known = calibrated(mean, network, seen[0][1], copying)
        return _decide(mean, known, shared_out(told), planner.registration.cap_mb)

    return planner.talk.decide(mine, decision)


def _decide(seen: ObservedStep, known: tuple[Profile, Network], cost: Costs, cap_mb: float) -> Choice:
    profile, fitted = known
    sizes = {way: better_size(way, profile, fitted, cost, cap_mb) for way in (None, *cost)}
    better = {way: size for way, size in sizes.items() if size is not None}
    plain_s = seen.step_s - seen.extra_s
    return Choice(
        options(profile, fitted, cost), profile, fitted, plain_s, better, {(None,) * len(seen.bytes): plain_s}
    )


class AutoComm(Planner):
    """State of a hook that chooses how gradients are averaged, within what is allowed, and checks its choice.

    Every rank makes one, with the same arguments. The first `WARM_UP` + `watch` steps are DDP's own. Saving, resuming
    and errors are as with `CommState`; a resumed run measures and chooses anew, and keeps what was not sent yet.

    Args:
        ddp: the module; its process group must be the default one, whose links are measured.
        allow: how far the numbers may move: "exact" (DDP's own all-reduce), "reordered" (sums by hosts first;
            default), "reduced" (16 bits on the wire), "lossy" (compressed, with error feedback).
        watch: steps that are measured under DDP's own all-reduce, default 5.
        check: steps that a candidate is measured for, default 20.
        network: the network, if known; default: it is measured.
        verbose: print the outcome on rank 0, to stderr.
        timeout: for each collective, default 5 minutes.
        scaler: the GradScaler in use, so that what was not sent yet follows its scale; default None.

    Raises:
        ValueError: if an argument is out of range, or the module has a hook or a process group of its own.
        accel.comm.ranks.post_mortem.CommError: from `loss.backward()`, if communication fails.

    Example:
        >>> ddp = DistributedDataParallel(model)
        >>> state = AutoComm(ddp, allow="lossy")
        >>> ddp.register_comm_hook(state, hook)
        >>> ...  # train
        >>> print(state.explain())
    """

    kind = "AutoComm"

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
                raise ValueError(f"{name} must be at least 1 step, got {value}")
        self.allow, self.watch, self.check, self.verbose = allow, watch, check, verbose
        self._network = network
        super().__init__(ddp, timeout=timeout, scaler=scaler)

    def bind(self, ddp: DistributedDataParallel) -> None:
        """Take a module, measure the network, and choose anew; every rank takes part."""
        super().bind(ddp)
        self.choice: Choice | None = None
        self.chosen: Plan = ()
        """What the search came to, () where gradients were left as they are."""
        self.settled = False
        self._turns = self._decisions()
        self._ways = allowed(self.allow, by_hosts=self.topology.by_hosts_pays) if self.topology.size > 1 else []
        if self._ways:
            self.network = self._network or probe_for(self)

    def between_steps(self) -> None:
        """Go on with the search."""
        if not self.settled:
            next(self._turns)

    def _decisions(self) -> Iterator[None]:
        """Measure, choose, try; at each yield a step is taken."""
        if not self._ways:
            yield from self._end(())
        self.recorder.on = True
        for _ in range(WARM_UP):
            yield
        # Before plain steps are watched: malloc keeps pages once buffers as large as a bucket have been freed, and the
        # backward pass, which then has no pages to fault in, took 70 ms of a core in place of 105.
        told = costs_of(self, self._ways)
        self.recorder.times.clear()
        for _ in range(self.watch):
            yield
        self.choice = choose(self, self.network, told)
        best = yield from self._shortest()
        if any(best):
            gain = self.choice.plain_s / self.choice.measured[best]
            if gain * (1 - WORTH) <= 1 or (gain < _SURE and not (yield from self._proves(best))):
                best = ()
        yield from self._end((yield from self._in_other_buckets(best)))

    def _shortest(self) -> Generator[None, None, Plan]:
        """Try what is predicted to be about as short as the shortest that was measured; return the shortest of all."""
        assert self.choice is not None
        tried: dict[Plan, float] = {}
        for option in worthwhile(self.choice.options)[:_TRIALS]:
            if option.step_s > min([self.choice.plain_s, *tried.values()]) * (1 + _NEAR):
                break
            tried[option.plan] = yield from self._measured(option.plan, self.check)
            self.engine.release(min(tried, key=tried.__getitem__))  # each way holds a socket to whom it speaks to
        first, *others = sorted(tried, key=tried.__getitem__) or [()]
        if others and tried[others[0]] < tried[first] * (1 + _NEAR):
            yield from self._trial(first, others[0])
            return preferred((first, others[0]), self.choice.measured)
        return first

    def _proves(self, plan: Plan) -> Generator[None, None, bool]:
        """Tell whether a plan is faster than DDP's own in a trial, and by enough."""
        assert self.choice is not None
        plain: Plan = (None,) * len(plan)
        verdict = yield from self._trial(plain, plan)
        self.choice.plain_s = self.choice.measured[plain]
        return verdict == "keep" and self.choice.measured[plan] < (1 - WORTH) * self.choice.plain_s

    def _trial(self, plan_a: Plan, plan_b: Plan) -> Generator[None, None, Verdict]:
        """Run two plans in blocks A B B A until it is known whether B is faster; leave both in `measured`."""
        assert self.choice is not None
        enough = min(math.ceil(_BLOCK_S / max(self.choice.measured[plan_a], 1e-6)), _MOST_STEPS)
        steps = max(self.check // _TRIAL.looks[0], enough, 2)
        trial = Trial(_TRIAL)
        while trial.verdict is None:
            step_s = yield from self._measured(plan_a if trial.arm == "A" else plan_b, steps)
            trial.record([step_s])
        outcome = trial.outcome()
        self.choice.measured[plan_a], self.choice.measured[plan_b] = outcome.before_ms / 1e3, outcome.after_ms / 1e3
        return outcome.verdict

    def _in_other_buckets(self, plan: Plan) -> Generator[None, None, Plan]:
        """Try the size of buckets that is predicted to suit a plan better; return the plan for the size that stays."""
        assert self.choice is not None
        way = plan[0] if plan else None
        size = self.choice.sizes.get(way) if len(set(plan)) <= 1 else None
        if size is None or not self.registration.rebucket(self.registration.cap_mb):
            return plan
        earlier_s = self.choice.measured[plan] if plan else self.choice.plain_s
        sized, before = self.choice.sized, self.registration.cap_mb
        for cap in (size.cap_mb, before):
            self.registration.rebucket(cap)
            sized[cap] = yield from self._measured((way,), self.check, settle=_REBUILT)
        sized[before] = min(earlier_s, sized[before])
        if sized[size.cap_mb] >= (1 - WORTH) * sized[before]:
            return plan
        self.registration.rebucket(size.cap_mb)
        self.choice.measured[way,] = sized[size.cap_mb]
        return (way,)

    def _measured(self, plan: Plan, steps: int, settle: int = 1) -> Generator[None, None, float]:
        """Run a plan for some steps and return the step's length: that of the slowest rank."""
        assert self.choice is not None
        self.engine.use(plan)
        self.recorder.on = True
        for turn in range(settle + steps):
            if turn == settle:
                self.recorder.times.clear()
            yield
        seen = self.recorder.times.observed()
        step_s = self.talk.decide(seen.step_s if any(plan) else seen.step_s - seen.extra_s, max)
        self.choice.measured[plan] = step_s
        return step_s

    def _end(self, plan: Plan) -> Iterator[None]:
        self.engine.use(plan)
        self.chosen = self.engine.wanted
        self.recorder.on = False
        self.recorder.times.clear()
        self.engine.release()
        self.settled = True
        if not any(plan):
            self.take_off_later()
        if self.verbose and self.talk.rank == 0:
            print(f"accel: {self.verdict()}", file=sys.stderr)
        yield

    def verdict(self) -> str:
        """Return the outcome in a sentence."""
        if not self.settled:
            return "gradients: still measuring"
        if self.choice is None:
            why = "there is one rank" if self.topology.size == 1 else f"allow={self.allow!r} leaves nothing to choose"
            return f"gradients: left as they are, {why}"
        plain_ms = self.choice.plain_s * 1e3
        size = self._better_size()
        if self.chosen or size is not None:
            way = describe(self.chosen) if self.chosen else "DDP's own all-reduce"
            step_s = self.choice.measured[self.chosen] if size is None else size.step_s
            where = "" if size is None else f" in buckets of {size.cap_mb:g} MB"
            return f"gradients: {way}{where}, a step takes {step_s * 1e3:.1f} ms in place of {plain_ms:.1f} ms"
        best = next((one for one in self.choice.options if any(one.plan)), None)
        tried = [
            f"{describe(plan)} took {step_s * 1e3:.1f} ms" for plan, step_s in self.choice.measured.items() if any(plan)
        ]
        said = ", ".join(tried) or "no way fits these gradients"
        if best is not None and not tried:
            said = f"the best, {best}, is predicted to take {best.step_s * 1e3:.1f} ms"
        return f"gradients: left as they are, nothing helps on this network: a step takes {plain_ms:.1f} ms, {said}"

    def _better_size(self) -> Size | None:
        """Return the size of buckets that was measured to be better than DDP's, and its step; None if none stayed."""
        if self.choice is None or not self.choice.sized:
            return None
        (cap_mb, new_s), (_, before_s) = self.choice.sized.items()
        return Size(cap_mb, new_s) if new_s < (1 - WORTH) * before_s else None

    def explain(self) -> str:
        """Return the outcome, each candidate's predicted step, and the measured ones."""
        if self.choice is None:
            return self.verdict()
        lines = [self.verdict(), "", self.choice.table(self.chosen if self.settled else None)]
        if sized := self.choice.sized:
            tried = ", ".join(f"{cap:g} MB {step_s * 1e3:.1f} ms" for cap, step_s in sorted(sized.items()))
            lines += ["", f"measured by the size of buckets: {tried}"]
        elif self.settled and (size := self.choice.sizes.get(self.chosen[0] if self.chosen else None)):
            lines += ["", f"DistributedDataParallel(bucket_cap_mb={size.cap_mb:g}) is predicted to be faster"]
        return "\n".join(lines)

    # -- saving ------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        plain = ("allow", "watch", "check", "verbose", "_network")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in plain}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.choice, self.chosen, self.settled = None, (), False


def probe_for(planner: Planner) -> Network:
    """Measure the network of a planner's ranks, which must be all; every rank takes part."""
    size = torch.distributed.get_world_size()
    if planner.topology.size != size:
        raise ValueError(
            f"the module's process group must have all {size} ranks for its links to be measured, got "
            f"{planner.topology.size}; pass network="
        )
    return probe(planner.topology, planner.device)
