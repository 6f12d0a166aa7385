"""One kind of a model's calls as CUDA graphs: its forward pass, and its backward pass behind autograd.

The call is recorded on other leaves over the same memory (docs/contributing/graphs.md says why). A call that gives a
parameter other memory, leaves one somewhere, or reads one past its module is not captured.

Source: torch.cuda.make_graphed_callables, which fixes one shape, hands out memory that the next call overwrites, and
adds a gradient to itself under accumulation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accel.errors import InvalidState
from accel.graphs.kinds import described, rebuilt, without_cached_casts
from accel.graphs.obstacles import NotCapturable, unwritten
from accel.graphs.recorder import CudaGraph, CudaRecorder
from accel.precision import outside_autocast
from accel.run.gate import Call

_DONATED = "donated buffers"
"""What torch says where a compiled backward pass has been given its activations to write to (torch 2.6 and newer)."""


def described_outputs(result: Any, outputs: list[Tensor]) -> Hashable:
    """Describe what a model returns, and add its tensors to a list.

    Raises:
        TypeError: if it holds other objects.
    """
    remedy = "let it return no other object (transformers return a cache unless config.use_cache is False)"
    return described(result, outputs, "what a model returns", remedy)


class ModelGraph:
    """One kind of call: a forward graph, and backward graphs for outputs that get gradients.

    Args:
        uses: which outputs were seen to get gradients, in different calls.

    Raises:
        NotCapturable: if the call does what no replay would do.
    """

    def __init__(
        self,
        recorder: CudaRecorder,
        call: Call,
        description: Any,
        inputs: list[Tensor],
        parameters: list[Tensor],
        uses: list[frozenset[int]],
        modules: Iterable[nn.Module] = (),
    ) -> None:
        self._inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
        self.parameters = parameters
        self.replays = 0
        self._outputs: list[Tensor] = []  # in the graph's memory; their history holds the activations
        self._use: weakref.ref[_Use] | None = None
        self._backwards: dict[frozenset[int], BackwardGraph] = {}
        args, kwargs = rebuilt(description, iter(self._inputs))
        leaves = Leaves(modules)
        try:
            with leaves.in_place():
                self._record(recorder, lambda: call(*args, **kwargs), leaves, uses)
        except NotCapturable:
            self.reset()
            raise

    def _record(
        self, recorder: CudaRecorder, call: Callable[[], Any], leaves: Leaves, uses: list[frozenset[int]]
    ) -> None:
        with unwritten(self._inputs), without_cached_casts(recorder.device.type):
            self._forward, result = recorder.record(call)
        self._result = described_outputs(result, self._outputs)
        leaves.check_unread(self.parameters, self._outputs)
        given = [tensor for tensor in self._inputs if tensor.requires_grad]
        self._needing = given + list(map(leaves.of, self.parameters))
        self.differentiable = [number for number, output in enumerate(self._outputs) if output.requires_grad]
        if self.differentiable:
            every = {*filter(None, uses), frozenset(self.differentiable)}
            for use in every:
                is_only = len(every) == 1
                self._backwards[use] = BackwardGraph(recorder, self._outputs, sorted(use), self._needing, is_only)

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
            raise InvalidState("capture: a backward pass must come before its graphs are dropped. Found: one after")
        if self._use is None or self._use() is not use:
            raise InvalidState(
                "capture: a second backward pass must come before the model's next call. Found: one after it, which "
                "has overwritten the activations; pass retain_graph=True to the first, so that they are kept"
            )
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._use = None
        elif any(backward.frees for backward in self._backwards.values()):
            raise InvalidState(
                "capture: the backward pass of a compiled model must come once: it is compiled to write to its "
                "activations. Found: retain_graph=True"
            )
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
    """The backward pass for some of the outputs.

    It is recorded so that activations stay, also where it is the only one: the loop may go backward twice. A compiled
    backward pass that writes to its activations refuses that, as it does in eager calls, and is recorded without.

    Args:
        numbers: those of the outputs that get gradients.
        needing: the tensors that get theirs by it.
        is_only: no other is recorded after it, so that activations need not stay.

    Attributes:
        frees: activations are gone after it.
    """

    def __init__(
        self, recorder: CudaRecorder, outputs: list[Tensor], numbers: list[int], needing: list[Tensor], is_only: bool
    ) -> None:
        self._numbers = numbers
        used = [outputs[number] for number in numbers]
        self._given = [torch.zeros_like(output) for output in used]
        self.frees = False

        def record() -> tuple[CudaGraph, tuple[Tensor | None, ...]]:
            retains = not self.frees
            return recorder.record(
                lambda: torch.autograd.grad(used, needing, self._given, retain_graph=retains, allow_unused=True)
            )

        self.graph: CudaGraph
        with outside_autocast(recorder.device.type):  # where it belongs, though it is captured within a call under it
            try:
                self.graph, gradients = record()
            except RuntimeError as error:
                if not is_only or _DONATED not in str(error):
                    raise
                self.frees = True
            if self.frees:
                self.graph, gradients = record()
        self._gradients: list[Tensor | None] = list(gradients)
        self._reached = {number: reached(outputs[number], needing) for number in numbers}

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
            raise InvalidState(
                "capture: gradients of a captured model can't be differentiated again. Found: create_graph=True; don't "
                "capture this model (accel.graphs.release)"
            )
        ctx.saved_tensors  # noqa: B018
        remaining = iter(ctx.graph.backward(ctx.use, gradients))
        inputs = [next(remaining) if requires_grad else None for requires_grad in ctx.inputs]
        return (None, None, *inputs, *remaining)


# -- parameters as leaves of their own while a call is recorded --------------------------------------------------------


_BESIDE = (
    "it gives a parameter other memory, leaves one in a module, or reads one past its module (from a list, say), and a "
    "graph has leaves of its own in their place; let it read parameters from modules alone"
)


class Leaves:
    """The leaves of a recording.

    Args:
        modules: with all inside of them. Parameters of a class of their own stay what they are.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._of: dict[int, nn.Parameter] = {}
        self._slots: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        for module in self._modules:
            for name, parameter in module._parameters.items():
                if type(parameter) is nn.Parameter and parameter.requires_grad:
                    self._slots.append((module._parameters, name, parameter))

    def of(self, parameter: Tensor) -> Tensor:
        """Return the leaf that stands for a parameter; the parameter itself where there is none."""
        return self._of.get(id(parameter), parameter)

    def check_unread(self, parameters: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Check that outputs depend on no parameter for which a leaf stands.

        Raises:
            NotCapturable: if one does.
        """
        replaced = [parameter for parameter in parameters if id(parameter) in self._of]
        if any(reached(output, replaced) for output in outputs):
            raise NotCapturable(_BESIDE)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the leaves stand in the modules for a block.

        Raises:
            NotCapturable: at the end, if one has other memory than its parameter, or is left in a module.
        """
        rnns = [each for each in self._modules if isinstance(each, nn.RNNBase)]  # they list their weights once more
        lists = [(each, each._flat_weights, each._flat_weight_refs) for each in rnns]
        try:
            for where, name, parameter in self._slots:
                where[name] = self._of.setdefault(id(parameter), _leaf(parameter))
            for rnn, weights, _ in lists:
                own: list[Any] = [None if weight is None else self.of(weight) for weight in weights]
                rnn._flat_weights = own
                rnn._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in own]
            yield
        finally:
            for where, name, parameter in self._slots:
                if where.get(name) is self._of.get(id(parameter)) is not None:
                    where[name] = parameter
            for rnn, weights, refs in lists:
                rnn._flat_weights, rnn._flat_weight_refs = weights, refs
        has_moved = any(_lies(parameter) != _lies(self.of(parameter)) for _, _, parameter in self._slots)
        if has_moved or self._is_left():
            raise NotCapturable(_BESIDE)

    def _is_left(self) -> bool:
        known = set(map(id, self._of.values()))
        values: list[Any] = [value for each in self._modules for value in vars(each).values()]
        for value in values:
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            if not known.isdisjoint(map(id, (value, *inner))):
                return True
        return False


def reached(output: Tensor, needing: list[Tensor]) -> set[int]:
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


def _lies(parameter: Tensor) -> tuple[Any, ...]:
    return parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype, parameter.requires_grad


def _leaf(parameter: nn.Parameter) -> nn.Parameter:
    leaf = nn.Parameter(parameter.detach())
    leaf.__dict__.update(parameter.__dict__)
    return leaf
