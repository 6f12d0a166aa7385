"""The run-time watch: checks a strategy after its trial, as long as it is on.

A call under strategies whose outputs are not finite or far above any in the plain loop, or that raises what a strategy
may have caused (`faults`), is repeated along the plain path from the same state; docs/contributing/guard.md has the
table of what follows. No check raises anything into the loop.

With several ranks, the repeated call sends nothing that the first one has sent already. A model that exchanges more
within its call than `DistributedDataParallel` does can't be called on one rank alone: the loop gets the outputs as they
are, and the strategies go. After an error it is called again, as ranks mostly meet the same error together; not a
sharded one, where the others are in the midst of that call.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accel.guard.alone import is_sharded, talks_within_calls, without_forward
from accel.guard.comparison import has_written, versions
from accel.guard.faults import of_strategies
from accel.guard.snapshot import Changes, ModelSnapshot, devices_of, generators_in, restore_generators
from accel.profiler.interruptions import Tolerated
from accel.profiler.loop import backward
from accel.profiler.trees import leaves, tensors
from accel.run import ranks
from accel.run.gate import Call, Gate, make_room

_RAISED = "it raised"
_ALONE = "and no rank can make this model's call again alone"
_WRITTEN = "and the call, which has written to its arguments, can't be made again"
_LONGEST_EXCUSE = 64


class Excuse:
    """How often a run that is at fault itself is not checked: once, then twice, four times, …, at most 64.

    Without it, a run whose weights are no longer finite would pay for each call twice.
    """

    def __init__(self) -> None:
        self._length = self._left = 0

    def grant(self) -> None:
        """Skip the next checks, twice as many as the last time."""
        self._left = self._length = min(2 * self._length or 1, _LONGEST_EXCUSE)

    def holds(self) -> bool:
        """Return whether this check is to be skipped, and count it."""
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def clear(self) -> None:
        """The run is healthy: check every time."""
        self._length = self._left = 0


class Watch:
    """Check outputs and gradients while strategies are on.

    Args:
        gate: the model's gate; its plain path is the fallback.
        device: where the model lives. On a device that runs ahead of the host, values are read some steps late.
        trip: called with a reason when the strategies must go, and with the names of those to blame where these are
            known; they must be off when it returns.
    """

    def __init__(self, gate: Gate, device: torch.device, trip: Callable[..., None]) -> None:
        self._gate = gate
        self._trip = trip
        self._device = device
        self._sizes = OutputSizes()
        self._changes: Changes | None = None
        """What calls change; None until one was looked at. Until then all state is kept before each call."""
        parallel = (module for module in gate.model.modules() if isinstance(module, DistributedDataParallel))
        self._parallel: list[nn.Module] = list(parallel) if ranks.are_several() else []
        """The modules in which this rank talks to others."""
        self._excuse = Excuse()
        self._is_within = False
        """A call is being made: those within it are a recursion's, and the outermost is checked."""
        self._is_repeating = False

    def call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call through the strategies and check its outputs.

        Activation checkpointing ends the call that it repeats in a backward pass by an error of its own, and compares
        what was saved in it: no call may follow. The same call was checked in the forward pass.
        """
        if not self._gate.wrapped or backward.is_running():
            return call(*args, **kwargs)
        if self._is_within:
            return (self._gate.plain if self._is_repeating else call)(*args, **kwargs)
        self._is_within = True
        try:
            return self._checked(call, args, kwargs)
        finally:
            self._is_within = self._is_repeating = False

    def _checked(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self._before(args, kwargs)
        if before is None:
            return call(*args, **kwargs)
        # In what the loop has compiled a hook would become a part of the graph.
        is_compiled = self._gate.compiled_by_user or hasattr(self._gate.model, "_orig_mod")
        reached = list(self._parallel) if is_compiled else []
        has_no_room, keeping = False, list[str]()
        try:
            with _noting([] if is_compiled else self._parallel, reached):
                outputs = call(*args, **kwargs)
        except of_strategies() as error:
            has_no_room = isinstance(error, torch.OutOfMemoryError)
            problem = f"{_RAISED} {type(error).__name__}: {error}"
            if is_sharded(self._gate.model):
                self._trip(f"{problem}, {_ALONE}")
                raise
            if before.has_written():
                self._trip(f"{problem}, {_WRITTEN}")
                raise
        else:
            problem = "" if self._excuse.holds() else self._problem(outputs)
            if not problem:
                if before.snapshot is not None and torch.is_grad_enabled():
                    self.learn_changes(before.snapshot)
                return outputs
            if talks_within_calls(self._gate.model):
                self._trip(f"{problem}, {_ALONE}")
                return outputs
            if before.has_written():
                self._trip(f"{problem}, {_WRITTEN}")
                return outputs
            del outputs  # beside their activations there may be no room for others
        # Outside the handler: the user's own error must have no context, and its activations no company in memory.
        if has_no_room:
            keeping = make_room(self._gate)
        return self._again(before, reached, problem, keeping, args, kwargs)

    def _before(self, args: Any, kwargs: Any) -> _Before | None:
        """Return the state before a call; None if it can't be read, and so the call not be made again."""
        with Tolerated("the state before a call could not be read"):
            given, snapshot = (args, kwargs), None
            if self._changes is None:
                model = self._gate.model
                snapshot = ModelSnapshot(model, devices_of(model, self._device, given))
            restore = self._changes.kept() if snapshot is None else snapshot.restore  # type: ignore[union-attr]
            return _Before(given, restore, snapshot)
        return None

    def _again(
        self, before: _Before, reached: list[nn.Module], why: str, culprits: list[str], args: Any, kwargs: Any
    ) -> Any:
        """Repeat the call along the plain path; the strategies are to blame only if its result is fine.

        The modules in `reached` have told the other ranks of this call. These don't listen a second time.
        """
        with Tolerated("the state before a call could not be put back"):
            before.put_back()
        self._is_repeating = True
        with contextlib.ExitStack() as alone:
            for module in reached:
                alone.enter_context(without_forward(module))
            plain = self._gate.plain(*args, **kwargs)  # raises the user's own error, if it is the user's
        if why.startswith(_RAISED) or not self._judged(self._sizes.problem_now, plain):
            self._trip(why, *culprits)
        else:
            self._excuse.grant()
            self.learn(plain)
        return plain

    def _judged(self, judge: Callable[[Any], str], outputs: Any) -> str:
        with Tolerated("outputs could not be judged"):  # those of a kind without a norm are the loop's own affair
            return judge(outputs)
        return ""

    def _problem(self, outputs: Any) -> str:
        problem = self._judged(self._sizes.problem, outputs)
        if not problem:
            self._excuse.clear()
        return problem

    def learn(self, outputs: Any) -> None:
        """Learn how large the outputs of the plain loop are."""
        with Tolerated("nothing could be learnt from a call"):
            self._sizes.learn(outputs)

    def learn_changes(self, before: ModelSnapshot) -> None:
        """Learn what a call has changed, which has found this state; beside it, as much is kept as was known to."""
        with Tolerated("what a call has changed could not be learnt"):
            changes = before.changed()
            if self._changes is not None:
                changes.add(self._changes)
            self._changes = changes

    def lives_on(self, device: torch.device) -> None:
        """Learn where the model lives now: the loop may have moved it, or filled one of the meta device, since."""
        if device != self._device:
            self._device, self._changes = device, None

    def gradients_are_finite(self, optimizer: Optimizer) -> bool:
        """Return whether the gradients that `optimizer` will use are finite; on a GPU, without waiting, always."""
        if self._device.type != "cpu":
            return True
        with Tolerated("gradients could not be judged"):
            return _are_finite([p.grad for group in optimizer.param_groups for p in group["params"]])
        return True


def _are_finite(gradients: list[Tensor | None]) -> bool:
    dense = [g for g in gradients if g is not None and not g.is_sparse]
    # One multi-tensor call: 12 µs for ten small tensors, against 35 µs one by one.
    if not dense or math.isfinite(math.fsum(norm.item() for norm in torch._foreach_norm(dense))):
        return True
    return all(bool(g.isfinite().all()) for g in dense)  # a norm overflows before its elements do


class _Before:
    """What a call finds: the state of the model, random numbers, and which arguments.

    Args:
        restore: puts the state of the model and random numbers back.
        snapshot: of all that state, where it is not known what calls change.
    """

    def __init__(self, given: Any, restore: Callable[[], None], snapshot: ModelSnapshot | None) -> None:
        self.snapshot, self._restore = snapshot, restore
        self._given, self._passed = given, list(leaves(given))
        self._versions = versions(self._passed)
        self._generators = [(source, source.read()) for source in generators_in(self._passed)]

    def has_written(self) -> bool:
        """Return whether the call has written to its arguments: it would find others if it was made again."""
        return has_written(self._given, self._passed, self._versions)

    def put_back(self) -> None:
        """Make all of it what it was."""
        self._restore()
        restore_generators(self._generators)


@contextlib.contextmanager
def _noting(modules: list[nn.Module], called: list[nn.Module]) -> Iterator[None]:
    hooks = [module.register_forward_pre_hook(lambda module, _: called.append(module)) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# -- how large outputs are ---------------------------------------------------------------------------------------------


# Outputs don't grow so much in a few hundred healthy steps; a diverging run gets there fast.
_GROWTH = 1e3
_DIVERGED_STEPS = 20
_DIVERGES = "the run diverges"
_LATE = 8
"""Calls until a value computed on a GPU is read, at the earliest."""

_SAMPLE = 2**20


class OutputSizes:
    """Judge outputs: they must be finite, and not far larger than any in the plain loop."""

    def __init__(self) -> None:
        self._late, self._learnt = LateValues(_LATE), LateValues(0)
        self._plain_max = 0.0
        self._large = 0

    def problem_now(self, outputs: Any) -> str:
        """Judge one call by itself."""
        size = _size(outputs)
        if size is None:
            return "its output is not finite"
        if not 0 < self._plain_max * _GROWTH < size:
            return ""
        return f"outputs have grown to {size:.1e}, plain ones were at most {self._plain_max:.1e}: {_DIVERGES}"

    def problem(self, outputs: Any) -> str:
        """Return what is wrong with the outputs of a call under strategies; '' if nothing is.

        On a GPU the values of some calls ago are looked at; only if one was bad, the present one is waited for.
        """
        norm = _norm(outputs)
        if norm is not None:
            self._late.note(norm)
        self._learn_sizes()  # those of the last plain calls
        was_bad = [self._is_bad(size) for size in self._late.due()]  # all are counted
        return self.problem_now(outputs) if any(was_bad) else ""

    def _is_bad(self, size: float) -> bool:
        grown = 0 < self._plain_max * _GROWTH < size
        self._large = self._large + 1 if grown else 0
        return not math.isfinite(size) or self._large >= _DIVERGED_STEPS

    def learn(self, outputs: Any) -> None:
        """Learn how large the outputs of the plain loop are.

        On a GPU without waiting here either: trials compare such calls with those under a strategy.
        """
        norm = _norm(outputs)
        if norm is not None:
            self._learnt.note(norm)
        self._learn_sizes()

    def _learn_sizes(self) -> None:
        self._plain_max = max([self._plain_max, *filter(math.isfinite, self._learnt.due())])


class LateValues:
    """Numbers, one a call, that are read some calls late and in their order, without waiting for what was queued since.

    `item()` copies on the current stream, and so waits for all that was launched before it: however old the value of a
    GPU is, the host loses its lead. So it is copied to page-locked memory where it is computed, and read once the event
    behind that copy has come. Only where very many are under way is the oldest waited for.

    Args:
        calls: values of a GPU that are always under way; the youngest ones.
        most: values that may be under way; beyond it the oldest is waited for.
    """

    def __init__(self, calls: int, most: int = 64) -> None:
        self._calls, self._most = calls, most
        self._under_way: deque[tuple[Tensor, Any]] = deque()

    def note(self, value: Tensor) -> None:
        """Add the value of the present call."""
        self._under_way.append(_on_its_way(value))

    def due(self) -> list[float]:
        """Return those of enough calls ago that have arrived since, the oldest first."""
        values: list[float] = []
        while self._under_way:
            number, event = self._under_way[0]
            if event is not None and len(self._under_way) <= self._calls:
                break
            if event is not None and not event.query():
                if len(self._under_way) <= self._most:
                    break
                event.synchronize()
            self._under_way.popleft()  # first: one that can't be read must not hold up the others
            values.append(float(number))
        return values


def _on_its_way(value: Tensor) -> tuple[Any, Any]:
    """Return a number and the event that tells when it is there: a copy in page-locked memory, of a value of a GPU.

    That memory torch's allocator has from earlier copies.
    """
    if not value.is_cuda:
        return value, None
    number = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
    number.copy_(value, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(value.device))
    return number, event


def _norm(outputs: Any) -> Tensor | None:
    # Sparse and nested tensors have no norm to ask for, and those of the meta device no values.
    dense = [t.detach() for t in tensors(outputs) if t.layout == torch.strided and not (t.is_nested or t.is_meta)]
    numbers = [t for t in dense if (t.is_floating_point() or t.is_complex()) and t.numel()]
    return _total([_norm_of(t) for t in numbers]) if numbers else None


def _norm_of(tensor: Tensor) -> Tensor:
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()  # this rank's part: for the whole all ranks would have to talk
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    part = tensor if tensor.device.type == "cpu" else sample(tensor)
    norm: Tensor = torch.linalg.vector_norm(part if part.dtype == torch.float64 else part.float())
    return norm if part is tensor else norm * math.sqrt(tensor.numel() / part.numel())


def sample(tensor: Tensor) -> Tensor:
    """Return at most 2^20 elements, from all over a tensor without gaps; any other as it is.

    The logits of a language model are 2 GB, which took 0.5 ms in each call of BERT-base on an H200. The step is odd, so
    that it meets all columns where their number is a power of two.
    """
    step = -(-tensor.numel() // _SAMPLE) | 1
    if step == 1:
        return tensor
    in_memory_order = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return in_memory_order.view(-1)[::step] if in_memory_order.is_contiguous() else tensor


def _total(norms: list[Tensor]) -> Tensor:
    """Return the sum of norms; on a GPU if one of them is there, so that the host needn't wait for it."""
    if len(norms) == 1:
        return norms[0]
    place = next((norm.device for norm in norms if norm.device.type != "cpu"), norms[0].device)
    return torch.stack([norm.to(place, torch.float32, non_blocking=True) for norm in norms]).sum()


def _size(outputs: Any) -> float | None:
    norm = _norm(outputs)
    if norm is None:
        return 0.0
    size = float(norm)
    return size if math.isfinite(size) else None
