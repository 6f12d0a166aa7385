"""The run-time watch: checks a strategy after its trial, as long as it is on.

While a strategy is on, each call's outputs are checked. A call that returns values that are not finite or far above
any in the plain loop, or that raises what a strategy may have caused (`faults`), is repeated along the plain path from
the same random state, buffers and counters, and the step goes on with that result. If the plain result is fine, the
strategies are at fault and are switched off at once. If it is no better, the fault is the run's own and no strategy is
blamed; if it raises too, the error is the user's and propagates, as all other errors do from the first call. What can't
be judged is passed over: no check raises anything into the loop.

With several ranks, the repeated call sends nothing that the first one has sent already. A model that exchanges more
within its call than `DistributedDataParallel` does can't be called on one rank alone: the loop gets the outputs as they
are, and the strategies go. Only a call that has raised is repeated in such a model, too: there are no outputs to hand
on, and ranks mostly meet the same error together.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accel.dataio.batches import leaves, tensors
from accel.guard import nested_state, own_state
from accel.guard.alone import without_forward
from accel.guard.changing_buffers import ChangingBuffers
from accel.guard.faults import of_strategies
from accel.guard.late_values import LateValues
from accel.guard.module_state import ModuleState
from accel.guard.nested_state import entries_within
from accel.guard.random_states import RandomStates
from accel.guard.sharded import talks_within_calls
from accel.profiler.interruptions import Tolerated
from accel.profiler.loop import backward
from accel.run import ranks
from accel.run.gate import Call, Gate

# Outputs don't grow so much in a few hundred healthy steps; a diverging run gets there fast.
_GROWTH = 1e3
_DIVERGED_STEPS = 20
_DIVERGES, _RAISED = "the run diverges", "it raised"
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
        trip: called with a reason when the strategies must go; they must be off when it returns.
    """

    LATE = 8
    """Calls until a value computed on a GPU is read, at the earliest."""

    def __init__(self, gate: Gate, device: torch.device, trip: Callable[[str], None]) -> None:
        self._gate = gate
        self._trip = trip
        self._device = device
        self._late, self._learnt = LateValues(self.LATE), LateValues(0)
        self._plain_max = 0.0
        self._large = 0
        self._moving = ChangingBuffers(gate.model)
        self._gpus = _gpus_of(gate.model)
        self._parallel = _data_parallel(gate.model)
        self._excuse = Excuse()
        self._keeps_inputs = False
        self._is_within = False
        """A call is being made: those within it are a recursion's, and the outermost is checked."""
        self._is_repeating = False
        """It is being made along the plain path."""

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
        try:
            with _noting([] if is_compiled else self._parallel, reached):
                outputs = call(*args, **kwargs)
        except of_strategies() as error:
            problem = f"{_RAISED} {type(error).__name__}: {error}"
            if not before.put_arguments_back():
                self._trip(f"{problem}, and what it has done to its inputs can't be undone, to make the call again")
                raise
        else:
            problem = "" if self._excuse.holds() else self._judged(self._problem, outputs)
            if not problem:
                return outputs
            if talks_within_calls(self._gate.model):
                self._trip(f"{problem}, and no rank can make this model's call again alone")
                return outputs
            if not before.put_arguments_back():
                return outputs
            del outputs  # beside their activations there may be no room for others
        # Outside the handler: the user's own error must have no context, and its activations no company in memory.
        return self._again(before, reached, problem, args, kwargs)

    def _before(self, args: Any, kwargs: Any) -> _CallState | None:
        """Return the state before a call; None if it can't be read, and so the call not be made again."""
        with Tolerated("the state before a call could not be read"):
            return _CallState(self._moving, self._gpus, (args, kwargs), keeps_inputs=self._keeps_inputs)
        return None

    def _again(self, before: _CallState, reached: list[nn.Module], why: str, args: Any, kwargs: Any) -> Any:
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
        if why.startswith(_RAISED) or not self._judged(self._problem_now, plain):
            self._trip(why)
        else:
            self._excuse.grant()
            self.learn(plain)
        return plain

    def _judged(self, judge: Callable[[Any], str], outputs: Any) -> str:
        with Tolerated("outputs could not be judged"):  # those of a kind without a norm are the loop's own affair
            return judge(outputs)
        return ""

    def _problem(self, outputs: Any) -> str:
        if self._device.type == "cpu":
            problem = self._problem_now(outputs)
            self._large = self._large + 1 if problem.endswith(_DIVERGES) else 0
            problem = "" if 0 < self._large < _DIVERGED_STEPS else problem
        else:
            problem = self._problem_late(outputs)
        if not problem:
            self._excuse.clear()
        return problem

    def _problem_now(self, outputs: Any) -> str:
        size = _size(outputs)
        if size is None:
            return "its output is not finite"
        if not 0 < self._plain_max * _GROWTH < size:
            return ""
        return f"outputs have grown to {size:.1e}, plain ones were at most {self._plain_max:.1e}: {_DIVERGES}"

    def _problem_late(self, outputs: Any) -> str:
        """Check the values of some calls ago that have arrived; only if one was bad, wait for the present one."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return ""  # a graph of the loop's own: nothing in it has a value yet
        norm = _norm(outputs)
        if norm is not None:
            self._late.note(norm)
        self._learn_sizes()  # those of the last plain calls
        was_bad = [self._is_bad(size) for size in self._late.due()]  # all are counted
        return self._problem_now(outputs) if any(was_bad) else ""

    def _is_bad(self, size: float) -> bool:
        grown = 0 < self._plain_max * _GROWTH < size
        self._large = self._large + 1 if grown else 0
        return not math.isfinite(size) or self._large >= _DIVERGED_STEPS

    def learn(self, outputs: Any) -> None:
        """Learn how large the outputs of the plain loop are.

        On a GPU without waiting here either: trials compare such calls with those under a strategy. The state that
        changes is waited for, in the first few.
        """
        with Tolerated("nothing could be learnt from a call"):
            self._moving.observe()
            norm = _norm(outputs)
            if norm is not None:
                self._learnt.note(norm)
            self._learn_sizes()

    def _learn_sizes(self) -> None:
        """Learn the sizes of plain outputs that have arrived."""
        self._plain_max = max([self._plain_max, *filter(math.isfinite, self._learnt.due())])

    def writes_to(self, parameters: Iterable[Tensor]) -> None:
        """Learn that the model's own call writes to these parameters."""
        self._moving.add(parameters)

    def changed_by_call(self, modules: ModuleState, random: RandomStates) -> None:
        """Learn what a plain call has changed.

        Args:
            modules: as they were before it.
            random: likewise.
        """
        with Tolerated("what a call has changed could not be learnt"):
            self._moving.add_changes(modules, random)

    def lives_on(self, device: torch.device) -> None:
        """Learn where the model lives now: the loop may have moved it, or filled one of the meta device, since."""
        self._device, self._gpus = device, _gpus_of(self._gate.model)

    def keep_inputs(self) -> None:
        """Learn that the model's own call writes to its inputs: those of the coming calls are kept, to be put back."""
        self._keeps_inputs = True

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


class _CallState:
    """The state that a call finds: random numbers, buffers and counters, its arguments as far as they are kept."""

    def __init__(self, moving: ChangingBuffers, gpus: list[torch.device], given: Any, *, keeps_inputs: bool) -> None:
        self._given, self._passed = given, list(leaves(given))
        self._tensors = [leaf for leaf in self._passed if isinstance(leaf, Tensor)]
        self._written = versions(self._tensors)
        self._contents = entries_within(given)
        self._inputs = _Inputs(self._tensors) if keeps_inputs else None
        self._moving = moving
        self._drawn = torch.get_rng_state()
        self._drawn_on_gpus = [(gpu, torch.cuda.get_rng_state(gpu)) for gpu in gpus]
        self._moved = moving.saved()
        self._generators = own_state.states_of(own_state.generators_given(*given))

    def put_arguments_back(self) -> bool:
        """Give the arguments the entries again that a call has taken or exchanged; tell whether it can be repeated.

        It can't where it has written to a tensor that is not kept, or has exchanged what can't be put back. The
        arguments then stay as the call has left them.
        """
        if self._inputs is None and versions(self._tensors) != self._written:
            return False
        left = nested_state.as_now(self._contents)
        nested_state.put_back(self._contents)
        now = list(leaves(self._given))
        if len(now) == len(self._passed) and all(map(operator.is_, now, self._passed)):
            return True
        nested_state.put_back(left)
        return False

    def put_back(self) -> None:
        """Make it what it was."""
        torch.set_rng_state(self._drawn)
        for gpu, state in self._drawn_on_gpus:
            torch.cuda.set_rng_state(state, gpu)
        self._moving.restore(self._moved)
        own_state.put_back(self._generators)
        if self._inputs is not None:
            self._inputs.put_back()


def _gpus_of(model: nn.Module) -> list[torch.device]:
    """Return the GPUs that a model draws random numbers on: those of its parameters."""
    return list({p.device: None for p in model.parameters() if p.device.type == "cuda"})


def _data_parallel(model: nn.Module) -> list[nn.Module]:
    """Return the modules in which this rank talks to others, if there are any."""
    return [m for m in model.modules() if isinstance(m, DistributedDataParallel)] if ranks.are_several() else []


@contextlib.contextmanager
def _noting(modules: list[nn.Module], called: list[nn.Module]) -> Iterator[None]:
    """Put those of the modules that are called in the block into `called`."""
    hooks = [module.register_forward_pre_hook(lambda module, _: called.append(module)) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Inputs:
    """What the tensors hold that a call is given."""

    def __init__(self, given: list[Tensor]) -> None:
        counted = [tensor for tensor in given if not tensor.is_inference()]
        self._kept = [(each, each.detach().clone(), each._version, each.grad_fn) for each in counted]

    def put_back(self) -> None:
        """Put it back, where a call that has failed has written to them."""
        for tensor, value, version, history in self._kept:
            if tensor._version == version:
                continue
            if history is None and tensor.grad_fn is not None and not tensor._is_view():
                tensor.detach_()
            with torch.no_grad():
                tensor.copy_(value)


def versions(given: list[Tensor]) -> list[int]:
    """Return how often the tensors that a call is given have been written to, of those that count it."""
    return [t._version for t in given if not t.is_inference()]


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
    norm: Tensor = torch.linalg.vector_norm(tensor if tensor.dtype == torch.float64 else tensor.float())
    return norm


def _total(norms: list[Tensor]) -> Tensor:
    """Return the sum of norms; on a GPU if one of them is there, so that the host needn't wait for it."""
    if len(norms) == 1:
        return norms[0]
    place = next((norm.device for norm in norms if norm.device.type != "cpu"), norms[0].device)
    return torch.stack([norm.to(place, torch.float32, non_blocking=True) for norm in norms]).sum()


def _size(outputs: Any) -> float | None:
    """Return the norm of all outputs together, or None if it is not finite."""
    norm = _norm(outputs)
    if norm is None:
        return 0.0
    size = float(norm)
    return size if math.isfinite(size) else None
