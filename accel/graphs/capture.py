"""`capture`, and a training step as CUDA graphs: one for each kind of input, captured after some ordinary calls.

A launch-bound step costs the host tens of microseconds an operator; a graph costs one launch. What it freezes is made
its key, so that nothing stale is replayed: shapes, dtypes and strides of the inputs, modes of modules, autocast,
numbers of optimizers, and where parameters and gradients lie. Randomness goes on as in eager steps (torch's generators
count within a graph).

Sources: https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs; traps: pytorch/pytorch#148439, #169545.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel.errors import InvalidArgument, InvalidType
from accel.graphs.captures import MANY, MANY_KINDS, MOST_COUNTED, Captures, warn
from accel.graphs.kinds import described, difference, modes, rebuilt, without_cached_casts
from accel.graphs.model_calls import ModelCalls, capture_model
from accel.graphs.obstacles import (
    StateMade,
    nothing_left,
    state_in_place,
    unwritten,
    without_draws,
)
from accel.graphs.owners import Owners
from accel.graphs.recorder import CudaGraph, CudaRecorder

_FIRST_STEPS = 8
"""Eager calls of a kind, beside `warmup`, in which optimizers may make state."""
_Model = TypeVar("_Model", bound=nn.Module)


@overload
def capture(step: _Model, *, warmup: int = ..., most: int = ..., strict: bool = ...) -> _Model: ...  # type: ignore[overload-overlap]
@overload
def capture(
    step: Callable[..., Any],
    *,
    warmup: int = ...,
    most: int = ...,
    modules: Iterable[nn.Module] | None = ...,
    optimizers: Iterable[Optimizer] | None = ...,
    strict: bool = ...,
    fixed: bool = ...,
) -> CapturedStep: ...
def capture(
    step: Any,
    *,
    warmup: int = 3,
    most: int = 8,
    modules: Iterable[nn.Module] | None = None,
    optimizers: Iterable[Optimizer] | None = None,
    strict: bool = False,
    fixed: bool = False,
) -> Any:
    """Return a training step, or a model, whose calls are captured as CUDA graphs and replayed.

    The step may hold all of a training step (forward, backward, optimizer) or the first two. Of a model, forward and
    backward pass are captured, and it stays the same object; loss, clipping, optimizer and data parallelism run as they
    did. Captured code runs in the first calls and once for each capture, and no more; what it prints or counts does not
    go on.

    Args:
        step: takes tensors, numbers and words, or tuples, lists and dicts of them, and returns such. Inputs of a step
            don't require gradients, and its outputs have none. Outputs are copies, and may be kept. Or a model;
            `accel.graphs.release` undoes its capture.
        warmup: calls of each kind that run eagerly first: libraries set themselves up. Default 3; 11 under
            DistributedDataParallel, as torch asks.
        most: graphs that are kept, default 8; of more, the one that was replayed longest ago goes.
        modules: for a step, whose mode and parameters count; default those that the step refers to.
        optimizers: for a step, whose numbers count; default those that it refers to. A learning rate that is a tensor
            on the device, or that of an optimizer of `accel.optim`, follows its scheduler; any other that is a number
            takes a graph for each value.
        strict: raise CaptureError where a step can't be captured. By default it goes on eagerly, with a warning.
        fixed: for a step, raise InvalidArgument where arguments are not of the form of the first call's. By default
            another form takes a graph of its own.

    Raises:
        InvalidArgument: if `warmup` or `most` is out of range, or `modules`, `optimizers` or `fixed` are given for a
            model; in a call of a step, with `fixed`.
        InvalidType: if `step` is neither, or the model is wrapped for data parallelism; in a call of a step, if an
            argument or a result is of another kind, or an input requires gradients.
        CaptureError: in a call, with `strict`.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> step = capture(lambda x: model(x).sum())  # on a CPU it runs as it is

    Source: https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/
    """
    if not callable(step) or isinstance(step, type):
        raise InvalidType(f"capture: step must be a model or a function that makes a step. Found: {step!r}")
    if warmup < 0 or most < 1:
        raise InvalidArgument(f"capture: warmup must be 0 or more and most 1 or more. Found: {warmup} and {most}")
    if isinstance(step, nn.Module):
        if modules is not None or optimizers is not None or fixed:
            raise InvalidArgument("capture: modules, optimizers and fixed are for a step. Found: a model")
        return capture_model(step, ModelCalls(step, warmup=warmup, most=most, strict=strict))
    by_itself = found(step)
    owners = Owners(by_itself[0] if modules is None else modules, by_itself[1] if optimizers is None else optimizers)
    captured = CapturedStep(step, owners, warmup=warmup, most=most, strict=strict, fixed=fixed)
    captured.has_no_owners = modules is None and optimizers is None and not any(by_itself)
    return captured


class _Key(NamedTuple):
    """What a graph is captured for: what decides how the code goes, and where it reads and writes."""

    kind: Hashable
    places: Hashable
    """Numbers of modules, and where tensors lie."""
    entries: tuple[int, ...]


@dataclass(eq=False)
class _Captured:
    """One graph with its own memory."""

    key: _Key
    graph: CudaGraph
    inputs: list[Tensor]
    result: Hashable
    outputs: list[Tensor]
    gradients: list[tuple[Tensor, Tensor | None]]
    """Those that the step has made, each with its parameter."""
    begun_with: list[tuple[Tensor, Tensor | None]]
    """Gradients that the step adds to, or finds to be none."""
    entries: list[Any]

    def fits(self, key: _Key) -> bool:
        """Return whether it does what the step would do now."""
        return self.key == key and all(parameter.grad is gradient for parameter, gradient in self.begun_with)

    def replay(self, inputs: list[Tensor]) -> Any:
        """Run it on these inputs."""
        if inputs:
            torch._foreach_copy_(self.inputs, inputs, non_blocking=True)
        self.graph.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient  # zero_grad outside of the graph has taken it off
        return rebuilt(self.result, iter([output.clone() for output in self.outputs]))


class CapturedStep(Captures):
    """What `capture` returns; it is called as the step is.

    Attributes:
        has_no_owners: True if a model or optimizer was looked for in the step, and none was found.
    """

    has_no_owners = False

    def __init__(
        self, step: Callable[..., Any], owners: Owners, *, warmup: int, most: int, strict: bool, fixed: bool = False
    ) -> None:
        super().__init__("step", strict=strict)
        self._step, self._owners, self._fixed = step, owners, fixed
        self._warmup, self._most = warmup, most
        self._graphs: list[_Captured] = []
        self._calls: Counter[Hashable] = Counter()
        """Arguments, modes and numbers → eager calls with such."""
        self._first: Hashable = None
        """Form of the first call's arguments, which `fixed` holds all others to."""
        self._recorder: CudaRecorder | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do a step: eagerly, or by a graph."""
        inputs: list[Tensor] = []
        description = described((args, kwargs), inputs, "arguments")
        if self._first is None:
            self._first = description
        elif self._fixed and description != self._first:
            other = _difference(self._first, description)
            raise InvalidArgument(f"capture: arguments must be of the form of the first call's. Found at {other}")
        recorder = self._recorder or self._made(inputs)
        if recorder is None:
            return _detached(self._step(*args, **kwargs))
        if any(tensor.device != recorder.device for tensor in inputs):
            return self._elsewhere(recorder.device, args, kwargs)
        key = self._key(description, recorder)
        if captured := next((each for each in reversed(self._graphs) if each.fits(key)), None):
            self._graphs.remove(captured)
            self._graphs.append(captured)
            self._note_replay(description)
            self._owners.send()
            return captured.replay(inputs)
        if key in self._eager or description in self._eager:
            return _detached(self._step(*args, **kwargs))
        if self._calls[key.kind] < self._warmup:
            return self._warm(recorder, key.kind, args, kwargs)
        return self._captured(recorder, description, inputs, args, kwargs)

    def reset(self) -> None:
        """Drop all graphs and their memory; the next calls are eager again."""
        for captured in self._graphs:
            captured.graph.reset()
        self._graphs.clear()
        self._calls.clear()
        self._eager.clear()

    def _key(self, description: Hashable, recorder: CudaRecorder) -> _Key:
        device, form = recorder.device.type, self._owners.form()
        kind = description, self._owners.numbers(device), modes(device), form[:2]
        return _Key(kind, form[2:], tuple(map(id, self._owners.entries())))

    def _elsewhere(self, device: torch.device, args: Any, kwargs: Any) -> Any:
        self._say(
            f"its inputs must be on {device}: a graph would go on with what the host has read of others; move them "
            "before the call"
        )
        return _detached(self._step(*args, **kwargs))

    def _made(self, inputs: list[Tensor]) -> CudaRecorder | None:
        devices = {tensor.device for tensor in (*inputs, *self._owners.tensors()) if tensor.device.type != "cpu"}
        if len(devices) == 1 and next(iter(devices)).type == "cuda":
            self._recorder = CudaRecorder(next(iter(devices)))
            return self._recorder
        words = ", ".join(sorted(map(str, devices))) or "the CPU"
        self._say(f"its tensors must be on one CUDA device. Found: {words}", strict=False)
        return None

    def _warm(self, recorder: CudaRecorder, kind: Hashable, args: Any, kwargs: Any) -> Any:
        if len(self._calls) >= MOST_COUNTED:
            self._calls.clear()
        if len(self._calls) == MANY:
            self._say(MANY_KINDS)
        result = recorder.aside(lambda: self._step(*args, **kwargs))
        self._calls[kind] += 1
        return _detached(result)

    def _captured(self, recorder: CudaRecorder, description: Any, inputs: list[Tensor], args: Any, kwargs: Any) -> Any:
        if any(tensor.requires_grad for tensor in inputs):
            raise InvalidType(
                "capture: inputs must not require gradients, they are copied into a graph's own; detach them"
            )
        own = [tensor.clone() for tensor in inputs]
        own_args, own_kwargs = rebuilt(description, iter(own))
        self._owners.refresh()  # parameters that have come or gone are part of the key
        key = self._key(description, recorder)
        before = self._owners.gradients()
        self._owners.send()
        recorder.waits()
        try:
            recording = self._attempt(key, description, lambda: self._recorded(recorder, own, own_args, own_kwargs))
        except StateMade as error:  # it would be made anew in each replay
            if self._calls[key.kind] >= self._warmup + _FIRST_STEPS:
                self._refuse(description, str(error))
            return self._warm(recorder, key.kind, args, kwargs)
        if recording is None:
            return _detached(self._step(*args, **kwargs))
        graph, result = recording
        outputs: list[Tensor] = []
        shape = described(_detached(result), outputs, "what a step returns")
        key = self._key(description, recorder)
        made, begun_with = self._owners.made(before), self._owners.begun_with(before)
        captured = _Captured(key, graph, own, shape, outputs, made, begun_with, self._owners.entries())
        self._keep(description, captured)
        return captured.replay(inputs)

    def _recorded(self, recorder: CudaRecorder, own: list[Tensor], args: Any, kwargs: Any) -> tuple[CudaGraph, Any]:
        """Record the step; where that fails, gradients, models, optimizers and its object are what they were."""
        before, own_object = self._owners.gradients(), _object_of(self._step)
        object_before = dict(own_object)
        recording = None
        try:
            with (
                nothing_left(self._owners.every),
                state_in_place(self._owners.optimizers, recorder.device),
                unwritten(own),
                without_draws(recorder.device),
                without_cached_casts(recorder.device.type),
            ):
                recording = recorder.record(lambda: self._step(*args, **kwargs))
                return recording
        except BaseException:
            if recording is not None:
                recording[0].reset()
            self._owners.put(before)
            own_object.clear()
            own_object.update(object_before)
            raise

    def _keep(self, description: Hashable, captured: _Captured) -> None:
        if len(self._graphs) >= self._most:
            self._graphs.pop(0).graph.reset()
        self._graphs.append(captured)
        self._note_capture(description, description)
        if self.captures == 1 and self.has_no_owners:
            warn(
                "no model and no optimizer was found in what the step refers to, and a graph goes on with their modes, "
                "numbers and places; name them (modules=, optimizers=), modules=[] if there is none"
            )
        if self.captures == 4 * self._most:
            other = _difference(self._first, description)
            warn(
                f"{self.captures} graphs were captured, and {self._most} are kept: inputs differ too much for that"
                f"{other and f', as at {other}'}. Pad them to few sizes (accel.graphs.Buckets), or raise most="
            )


def _object_of(step: Callable[..., Any]) -> dict[str, Any]:
    owner = getattr(step, "__self__", None)
    return {} if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {})


def _difference(known: Any, new: Any) -> str:
    """Say where the arguments of two calls differ first, such as `args[0]: float32 [8] on cpu → float32 [4] on cpu`."""
    (args, kwargs), (new_args, new_kwargs) = known.items, new.items
    return difference(args, new_args, "args") or difference(kwargs, new_kwargs, "kwargs")


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        items = [_detached(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return type(value)((key, _detached(item)) for key, item in value.items())
    return value


# -- the models and optimizers that a step refers to -------------------------------------------------------------------


def found(function: Callable[..., Any]) -> tuple[list[nn.Module], list[Optimizer]]:
    """Return the modules and optimizers that a function refers to: closure, globals, its object, bound arguments.

    Decorators are looked through, and lists, tuples and dicts are looked into. Functions that it calls are not read,
    but for those in its closure.

    Args:
        function: a function, a method, a partial or another object that can be called.
    """
    modules: dict[int, nn.Module] = {}
    optimizers: dict[int, Optimizer] = {}
    for value in _referred(function, set()):
        for item in (value, *_items(value)):
            if isinstance(item, nn.Module):
                modules[id(item)] = item
            elif isinstance(item, Optimizer):
                optimizers[id(item)] = item
    return list(modules.values()), list(optimizers.values())


def _referred(function: Any, seen: set[int]) -> Iterator[Any]:
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        yield from _referred(function.func, seen)
    elif isinstance(function, types.MethodType):
        yield from _of_object(function.__self__, seen)
        yield from _referred(function.__func__, seen)
    elif isinstance(function, types.FunctionType):
        yield from _of_function(function, seen)
    else:
        yield from _of_object(function, seen)
        call = getattr(type(function), "__call__", None)  # noqa: B004  (an object's call has globals of its own)
        if isinstance(call, types.FunctionType) and not isinstance(function, nn.Module):
            yield from _referred(call, seen)


def _of_function(function: types.FunctionType, seen: set[int]) -> Iterator[Any]:
    if (wrapped := getattr(function, "__wrapped__", None)) is not None:
        yield from _referred(wrapped, seen)
    for cell in function.__closure__ or ():
        value = _content(cell)
        yield value
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):  # what a decorator has wrapped
            yield from _referred(value, seen)
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name]


def _of_object(value: Any, seen: set[int]) -> Iterator[Any]:
    yield value
    if not isinstance(value, nn.Module | Tensor):
        yield from getattr(value, "__dict__", {}).values()
        if (wrapped := getattr(value, "__wrapped__", None)) is not None:
            yield from _referred(wrapped, seen)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else ()
