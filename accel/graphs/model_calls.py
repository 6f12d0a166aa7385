"""A model's calls as CUDA graphs: its forward pass, and its backward pass behind autograd.

Loss, clipping, optimizer and data parallelism stay eager. One kind of call (shapes, modes, where parameters lie) has a
forward graph, and a backward graph for the outputs that the loss was seen to use. Activations are in the graph's own
memory: as long as a call's backward pass is to come, another call of its kind runs eagerly.

Source: torch.cuda.make_graphed_callables, which fixes one shape, hands out memory that the next call overwrites, and
adds a gradient to itself under accumulation.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from accel.errors import AccelError
from accel.graphs.inputs import described, rebuilt
from accel.graphs.modes import modes, without_cached_casts
from accel.graphs.owners import Owners
from accel.graphs.recorder import CudaRecorder, GraphRecorder, RecordedGraph
from accel.run.gate import Call, hooks_of

_MOST_COUNTED = 1024
"""Kinds of calls that are remembered without a graph."""
_MOST_UNUSED = 4
"""Captures for the same arguments, none of which is replayed in a later call."""
_RETURNED = "let it return no other object (transformers return a cache unless config.use_cache is False)"
MANY = 64
"""Kinds of calls without a capture, after which a warning says so."""
MANY_KINDS = (
    f"{MANY} calls were of {MANY} kinds: inputs, or where parameters, buffers and gradients lie, differ each time. A "
    "buffer must be written to, and not replaced"
)


class CaptureError(AccelError):
    """A step or a model could not be captured; `why_not_capturable` names the line."""


class ModelCalls:
    """Run a model's calls by graphs.

    Args:
        model: whose calls these are.
        warmup: calls of each kind that run eagerly first, with their backward pass.
        most: kinds that have graphs; of more, the one that was replayed longest ago loses its own.
        strict: raise CaptureError where calls can't be captured, but for a model that is not on a CUDA device.
        say: is told why calls run eagerly, one sentence for each reason; default a warning.
        recorder: makes what records graphs on a device. Each kind has one, with memory of its own: the backward pass of
            a kind may come after the forward pass of another.

    Attributes:
        captures: kinds captured so far.
        replays: calls that were replayed.
        why_eager: why calls run eagerly, one sentence for each reason.
        may_capture: False while calls are only watched.
    """

    may_capture = True

    def __init__(
        self,
        model: nn.Module,
        *,
        warmup: int = 3,
        most: int = 8,
        strict: bool = False,
        say: Callable[[str], None] | None = None,
        recorder: Callable[[torch.device], GraphRecorder] | None = None,
    ) -> None:
        self.captures = self.replays = 0
        self.why_eager: list[str] = []
        self._model, self._owners = model, Owners([model], [])
        self._hooks = hooks_of(model)
        self._warmup, self._most, self._strict = warmup, most, strict
        self._has_stopped = False
        self._say_once, self._recorder = say or _warn, recorder
        self._graphs: OrderedDict[Hashable, ModelGraph] = OrderedDict()
        self._uses: dict[Hashable, Counter[frozenset[int]]] = {}
        """Arguments, and whether with gradients → which outputs got one in eager calls, and how often."""
        self._unused: Counter[Hashable] = Counter()
        self._eager: set[Hashable] = set()
        """What is not captured."""

    def wrap(self, call: Call, around: Hashable = None) -> Call:
        """Return the model's call, by graphs.

        Args:
            call: the eager call.
            around: tells this call from others that were wrapped; each has graphs of its own.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run(call, around, args, kwargs)

        return run

    def reset(self) -> None:
        """Drop all graphs and what is known of calls; the next ones are eager again."""
        self.drop_graphs()
        self._uses.clear()
        self._eager.clear()

    def drop_graphs(self) -> None:
        """Give the graphs' memory back; the next call of a kind is captured again."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def stop(self) -> None:
        """Run all calls eagerly from now on."""
        self._has_stopped = True

    def _run(self, call: Call, around: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._has_stopped or _is_watched():
            return call(*args, **kwargs)
        if any(map(len, self._hooks)) and not _are_capturable(self._hooks):
            self._say("the model or a part of it has hooks, which a graph would not call")
            return call(*args, **kwargs)
        inputs: list[Tensor] = []
        try:
            description = described((args, kwargs), inputs, "arguments")
        except TypeError as error:
            self._say(str(error).removeprefix("capture: "))
            return call(*args, **kwargs)
        key = self._key(around, description, inputs)
        graph = self._graphs.get(key)
        if graph is None:
            kind = description, torch.is_grad_enabled()
            if key in self._eager or kind in self._eager or not self.may_capture or not self._has_seen_enough(kind):
                return self._watched(kind, call, args, kwargs)
            self._owners.refresh()  # parameters that have come or gone are part of the key
            self._hooks = hooks_of(self._model)
            key = self._key(around, description, inputs)
            graph = self._capture(key, call, description, inputs) if self._has_room() else None
        if graph is None or graph.is_awaited:
            return call(*args, **kwargs)
        self._graphs.move_to_end(key)
        if graph.replays == 1:
            self._unused[description] = 0
        self.replays += 1
        return graph(inputs)

    def _key(self, around: Hashable, description: Hashable, inputs: list[Tensor]) -> Hashable:
        return around, description, self._owners.form(), modes(inputs)

    # -- eager calls before --------------------------------------------------------------------------------------------

    @property
    def is_warm(self) -> bool:
        """True once enough calls of a kind were watched."""
        return any(map(self._has_seen_enough, self._uses))

    def _has_seen_enough(self, kind: Hashable) -> bool:
        return self._warmup == 0 or self._uses.get(kind, Counter()).total() >= self._warmup

    def _watched(self, kind: Hashable, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call eagerly, and note which outputs get a gradient: at the end of the backward pass, or at once without."""
        result = call(*args, **kwargs)
        if kind in self._eager:
            return result
        if len(self._uses) >= _MOST_COUNTED:
            self._uses.clear()
        if len(self._uses) == MANY and not self.captures:
            self._say(MANY_KINDS)
        uses = self._uses.setdefault(kind, Counter())
        outputs: list[Tensor] = []
        try:
            described(result, outputs, "what a model returns", _RETURNED)
        except TypeError as error:
            self._refuse(kind, str(error).removeprefix("capture: "))
            return result
        differentiable = [number for number, output in enumerate(outputs) if output.requires_grad]
        if not differentiable:
            uses[frozenset()] += 1
            return result
        self._watch(kind, outputs, differentiable)
        return result

    def _watch(self, kind: Hashable, outputs: list[Tensor], numbers: list[int]) -> None:
        """Count a use once gradients have come to these outputs."""
        uses, known = self._uses[kind], frozenset[int]()

        def note(number: int) -> None:
            nonlocal known
            if torch.is_grad_enabled():
                self._refuse(kind, "its gradients are differentiated again (create_graph=True)")
            uses[known] -= bool(known)
            known |= {number}
            uses[known] += 1

        for number in numbers:
            outputs[number].register_hook(lambda _, number=number: note(number))  # type: ignore[no-untyped-call]

    # -- capture -------------------------------------------------------------------------------------------------------

    def _capture(self, key: Hashable, call: Call, description: Any, inputs: list[Tensor]) -> ModelGraph | None:
        recorder = self._recorder_for([*inputs, *self._owners.tensors()])
        if recorder is None:
            self._refuse(key, "")
            return None
        uses = self._uses.get((description, torch.is_grad_enabled()), Counter())
        recorder.waits()
        parameters = [tensor for tensor in self._owners.tensors() if tensor.requires_grad]
        try:
            graph = ModelGraph(recorder, call, description, inputs, parameters, [use for use in uses if uses[use]])
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._refuse(key, f"it could not be captured: {reason}; accel.graphs.why_not_capturable names the line")
            return None
        self._graphs[key] = graph
        self.captures += 1
        self._unused[description] += 1
        if self._unused[description] > _MOST_UNUSED:
            where = "where parameters or buffers lie differs each time; a buffer must be written to, and not replaced"
            self._refuse((description, torch.is_grad_enabled()), where)
        return graph

    def _has_room(self) -> bool:
        """Drop the graphs of a kind, if there are too many; of one whose backward pass may come they are kept."""
        if len(self._graphs) < self._most:
            return True
        oldest = next((key for key, graph in self._graphs.items() if not graph.is_awaited), None)
        if oldest is not None:
            self._graphs.pop(oldest).reset()
        return oldest is not None

    def _recorder_for(self, tensors: list[Tensor]) -> GraphRecorder | None:
        devices = sorted({tensor.device for tensor in tensors}, key=str)
        if len(devices) == 1 and self._recorder is not None:
            return self._recorder(devices[0])
        if len(devices) == 1 and devices[0].type == "cuda":
            return CudaRecorder(devices[0])
        where = ", ".join(map(str, devices)) or "no tensor"
        self._say(f"its tensors must be on one CUDA device. Found: {where}", strict=False)
        return None

    def _refuse(self, key: Hashable, reason: str) -> None:
        if len(self._eager) >= _MOST_COUNTED:
            self._eager.clear()
        self._eager.add(key)
        if reason:
            self._say(reason)

    def _say(self, reason: str, *, strict: bool = True) -> None:
        if reason not in self.why_eager:
            self.why_eager.append(reason)
            if strict and self._strict:
                raise CaptureError(f"capture: the model can't be captured: {reason}")
            self._say_once(f"the model runs eagerly: {reason}")


def _are_capturable(hooks: list[dict[Any, Any]]) -> bool:
    """Return whether hooks do nothing but compute with tensors, as those of `accel.amp` say of themselves."""
    owners = [getattr(hook, "__self__", None) for own in hooks for hook in own.values()]
    return all(getattr(owner, "is_capturable", False) for owner in owners)


def _is_watched() -> bool:
    """Return whether someone looks at each operator, who would not see into a graph: a compiler, a mode, a capture."""
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch._C._len_torch_function_stack() > 0
        or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    )


def _warn(text: str) -> None:
    warnings.warn(f"accel.graphs.capture: {text}", RuntimeWarning, stacklevel=5)


class ModelGraph:
    """One kind of call: a forward graph, and backward graphs for outputs that get gradients.

    Args:
        recorder: records them.
        call: the eager call.
        description: of its arguments.
        inputs: the tensors in them.
        parameters: that are trained.
        uses: which outputs were seen to get gradients, in different calls.
    """

    def __init__(
        self,
        recorder: GraphRecorder,
        call: Call,
        description: Any,
        inputs: list[Tensor],
        parameters: list[Tensor],
        uses: list[frozenset[int]],
    ) -> None:
        self._inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
        args, kwargs = rebuilt(description, iter(self._inputs))
        with without_cached_casts(inputs):
            self._forward, result = recorder.record(lambda: call(*args, **kwargs))
        self._outputs: list[Tensor] = []  # in the graph's memory; their history holds the activations
        self._result = described(result, self._outputs, "what a model returns", _RETURNED)
        self.parameters = parameters
        self._needing = [tensor for tensor in self._inputs if tensor.requires_grad] + parameters
        self.differentiable = [number for number, output in enumerate(self._outputs) if output.requires_grad]
        self.replays = 0
        self._use: weakref.ref[_Use] | None = None
        self._backwards: dict[frozenset[int], BackwardGraph] = {}
        if self.differentiable:
            for use in {*filter(None, uses), frozenset(self.differentiable)}:
                self._backwards[use] = BackwardGraph(recorder, self._outputs, sorted(use), self._needing)

    @property
    def is_awaited(self) -> bool:
        """True while the backward pass of a call may come: another call would overwrite its activations."""
        return self._use is not None and self._use() is not None

    def __call__(self, inputs: list[Tensor]) -> Any:
        """Run the call on these inputs."""
        self.replays += 1
        if not self.differentiable:
            outputs: Any = self.replay(inputs)
        else:
            outputs = _Replayed.apply(self, len(inputs), *inputs, *self.parameters)  # type: ignore[no-untyped-call]
        return rebuilt(self._result, iter(outputs))

    @torch.no_grad()
    def replay(self, inputs: Any) -> list[Tensor]:
        """Replay the forward pass, and return copies of its outputs."""
        self._take(inputs)
        self._forward.replay()
        return [output.detach().clone() for output in self._outputs]

    def _take(self, inputs: Any) -> None:
        if self._inputs:
            torch._foreach_copy_(self._inputs, list(inputs), non_blocking=True)

    def begin(self, use: _Use) -> None:
        """Await a backward pass as long as `use` lives."""
        self._use = weakref.ref(use)

    def backward(self, use: _Use, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Replay the backward pass, and return copies of the gradients of inputs and parameters."""
        if not self._backwards:
            raise RuntimeError("capture: a backward pass must come before its graphs are dropped. Found: one after")
        if self._use is None or self._use() is not use:
            raise RuntimeError(
                "capture: a second backward pass must come before the model's next call. Found: one after it, which "
                "has overwritten the activations; pass retain_graph=True to the first, so that they are kept"
            )
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._use = None
        present = frozenset(number for number in self.differentiable if gradients[number] is not None)
        if not present:
            return [None] * len(self._needing)
        backward = self._backwards.get(present) or self._backwards[frozenset(self.differentiable)]
        return backward(gradients, present)

    def reset(self) -> None:
        """Give the memory back."""
        self._forward.reset()
        for backward in self._backwards.values():
            backward.graph.reset()
        self._backwards.clear()


class BackwardGraph:
    """The backward pass for some of the outputs."""

    def __init__(
        self, recorder: GraphRecorder, outputs: list[Tensor], numbers: list[int], needing: list[Tensor]
    ) -> None:
        self._numbers = numbers
        used = [outputs[number] for number in numbers]
        self._given = [torch.zeros_like(output) for output in used]
        self.graph: RecordedGraph
        self.graph, gradients = recorder.record(
            lambda: torch.autograd.grad(used, needing, self._given, retain_graph=True, allow_unused=True)
        )
        self._gradients: list[Tensor | None] = list(gradients)
        self._reached = {number: _reached(outputs[number], needing) for number in numbers}

    def __call__(self, given: tuple[Tensor | None, ...], present: frozenset[int]) -> list[Tensor | None]:
        """Replay, and return copies: autograd takes a gradient as it is for `.grad`, where it would be overwritten."""
        self._take(given)
        self.graph.replay()
        reached = None
        if len(present) < len(self._numbers):  # as autograd has it, no gradient where nothing leads to
            reached = set().union(*(self._reached[number] for number in present))
        kept = [g if reached is None or n in reached else None for n, g in enumerate(self._gradients)]
        there = [gradient for gradient in kept if gradient is not None]
        copies = [torch.empty_like(gradient) for gradient in there]
        if there:
            torch._foreach_copy_(copies, there)
        remaining: Iterator[Tensor] = iter(copies)
        return [None if gradient is None else next(remaining) for gradient in kept]

    def _take(self, given: tuple[Tensor | None, ...]) -> None:
        for own, number in zip(self._given, self._numbers, strict=True):
            gradient = given[number]
            if gradient is None:
                own.zero_()
            else:
                own.copy_(gradient, non_blocking=True)


class _Use:
    """Lives as long as the backward pass of a call may come."""

    __slots__ = ("__weakref__",)


class _Replayed(torch.autograd.Function):
    """A replayed call, with its replayed backward pass."""

    @staticmethod
    def forward(ctx: Any, graph: ModelGraph, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Replay the forward pass."""
        outputs = graph.replay(tensors[:count])
        ctx.graph, ctx.use = graph, _Use()
        ctx.inputs = [tensor.requires_grad for tensor in tensors[:count]]
        graph.begin(ctx.use)
        ctx.save_for_backward(*tensors[count:])  # torch raises if one was written to before its backward pass
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for n, o in enumerate(outputs) if n not in graph.differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Replay the backward pass."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "capture: gradients of a captured model can't be differentiated again. Found: create_graph=True; don't "
                "capture this model (accel.graphs.release)"
            )
        ctx.saved_tensors  # noqa: B018
        remaining = iter(ctx.graph.backward(ctx.use, gradients))
        inputs = [next(remaining) if requires_grad else None for requires_grad in ctx.inputs]
        return (None, None, *inputs, *remaining)


def _reached(output: Tensor, needing: list[Tensor]) -> set[int]:
    """Return the numbers of the tensors that an output's gradient comes to."""
    numbers = {id(tensor): number for number, tensor in enumerate(needing)}
    reached, waiting, seen = set[int](), [output.grad_fn], set[Any]()
    if output.grad_fn is None and id(output) in numbers:
        return {numbers[id(output)]}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in numbers:
            reached.add(numbers[id(variable)])
        waiting += [following for following, _ in node.next_functions]
    return reached
