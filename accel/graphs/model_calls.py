"""Which calls of a model run by CUDA graphs, and which eagerly.

One kind of call (shapes, modes, where parameters lie) has graphs of its own, captured after some eager calls have shown
which outputs the loss uses. As long as a call's backward pass is to come, another call of its kind runs eagerly.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from accel.errors import InvalidType
from accel.graphs.captures import MANY, MANY_KINDS, MOST_COUNTED, Captures
from accel.graphs.kinds import described, is_watched, modes
from accel.graphs.model_graph import ModelGraph, described_outputs
from accel.graphs.obstacles import nothing_left, without_draws
from accel.graphs.owners import Owners
from accel.graphs.recorder import CudaRecorder
from accel.profiler.loop import callslot
from accel.profiler.loop.backward import on_gradient
from accel.profiler.loop.module_hooks import hooks_of
from accel.run.gate import Call

_TWICE = "its gradients are differentiated again (create_graph=True)"
_AROUNDS = 2
"""Wrappings of the call whose graphs are kept: a trial of what lies between model and graphs has two in turns, with it
and without. Each has a set of activations, and at another time only one is in use."""
_Key = tuple[Hashable, ...]


class EagerCalls:
    """What eager calls have shown: which outputs get gradients, and what was around the model in them."""

    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self.uses: dict[Hashable, Counter[frozenset[int]]] = {}
        """Arguments, and whether with gradients → which outputs got one in eager calls, and how often."""
        self._prepared: OrderedDict[Hashable, set[Hashable]] = OrderedDict()
        """`around` → kinds that were called so eagerly, with their backward pass: what compiles has done so then."""

    def clear(self) -> None:
        """Forget them."""
        self.uses.clear()
        self._prepared.clear()

    def are_enough(self, kind: Hashable) -> bool:
        """Return whether enough calls of a kind were seen."""
        return self._warmup == 0 or self.uses.get(kind, Counter()).total() >= self._warmup

    @property
    def is_warm(self) -> bool:
        """True once enough calls of a kind were seen, whatever was around the model in them."""
        return any(map(self.are_enough, self.uses))

    def have_prepared(self, around: Hashable, kind: Hashable) -> bool:
        """Return whether all that is around the model has had an eager call: a compiler must not begin in a capture."""
        return self._warmup == 0 or kind in self._prepared.get(around, ())

    def note(self, around: Hashable, kind: Hashable, outputs: list[Tensor], twice: Callable[[Hashable], None]) -> None:
        """Count a call once gradients have come to its outputs; at once where none can come.

        Args:
            around: what is around the model in it.
            kind: of the call.
            outputs: that it has returned.
            twice: is called with the kind if its gradients are differentiated again.
        """
        if len(self.uses) >= MOST_COUNTED:
            self.clear()
        uses, prepared = self.uses.setdefault(kind, Counter()), self._prepared.setdefault(around, set())
        self._prepared.move_to_end(around)
        while len(self._prepared) > _AROUNDS:  # it keeps alive what is around, such as a compiled model
            self._prepared.popitem(last=False)
        known = frozenset[int]()
        differentiable = [number for number, output in enumerate(outputs) if output.requires_grad]
        if not differentiable:
            uses[known] += 1
            prepared.add(kind)

        def arrive(number: int) -> None:
            nonlocal known
            if torch.is_grad_enabled():
                twice(kind)
            uses[known] -= bool(known)
            known |= {number}
            uses[known] += 1
            prepared.add(kind)

        for number in differentiable:
            on_gradient(outputs[number], lambda _, number=number: arrive(number))  # type: ignore[misc]


class ModelCalls(Captures):
    """Run a model's calls by graphs.

    Args:
        warmup: calls of each kind that run eagerly first, with their backward pass.
        most: kinds that have graphs; of more, the one that was replayed longest ago loses its own.
        strict: raise CaptureError where calls can't be captured, but for a model that is not on a CUDA device.
        say: is told why calls run eagerly, one sentence for each reason; default a warning.
        recorder: makes what records graphs on a device. Each kind has one, with memory of its own: the backward pass of
            a kind may come after the forward pass of another.

    Attributes:
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
        recorder: Callable[[torch.device], Any] = CudaRecorder,
    ) -> None:
        super().__init__("model", strict=strict, say=say)
        self._model, self._owners = model, Owners([model], [])
        self._hooks = hooks_of(model)
        self._most, self._recorder = most, recorder
        self.has_stopped = False
        self._graphs: OrderedDict[_Key, ModelGraph] = OrderedDict()
        self.seen = EagerCalls(warmup)

    def wrap(self, call: Call, around: Hashable = None) -> Call:
        """Return the model's call, by graphs.

        Args:
            around: tells this call from others that were wrapped; each has graphs of its own. They are kept for the
                last two, and a call that is new runs eagerly once: what is around the model may set itself up.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run(call, around, args, kwargs)

        return run

    def reset(self) -> None:
        """Drop all graphs and what is known of calls; the next ones are eager again."""
        self.drop_graphs()
        self.seen.clear()
        self._eager.clear()

    @property
    def has_graphs(self) -> bool:
        """True while something is captured."""
        return bool(self._graphs)

    def drop_graphs(self, *, awaited: bool = True) -> None:
        """Give the graphs' memory back; the next call of a kind is captured again.

        Args:
            awaited: also that of graphs whose backward pass may come, which is an error from then on.
        """
        self._drop([key for key, graph in self._graphs.items() if awaited or not graph.is_awaited])

    def _drop(self, keys: Iterable[_Key]) -> None:
        for key in keys:
            self._graphs.pop(key).reset()

    def _run(self, call: Call, around: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.has_stopped or _is_traced():
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
            is_ready = self.may_capture and self.seen.are_enough(kind) and self.seen.have_prepared(around, kind)
            if key in self._eager or kind in self._eager or not is_ready:
                return self._watched(around, kind, call, args, kwargs)
            self._owners.refresh()  # parameters that have come or gone are part of the key
            self._hooks = hooks_of(self._model)
            # One that comes after the capture is called by `.grad` alone.
            if any(tensor._backward_hooks for tensor in self._owners.tensors()):
                self._say("a parameter has hooks, which a graph would call once more")
                return call(*args, **kwargs)
            graph = self._capture(around, call, description, inputs) if self._has_room() else None
        else:
            self._graphs.move_to_end(key)
        if graph is None or graph.is_awaited:
            return call(*args, **kwargs)
        if graph.replays:  # else it was captured for this call
            self._note_replay(description)
        else:
            self.replays += 1
        return graph(inputs)

    def _key(self, around: Hashable, description: Hashable, inputs: list[Tensor]) -> _Key:
        kind = next((tensor.device.type for tensor in inputs), "cuda")
        return around, description, self._owners.form(), modes(kind)

    def _watched(
        self, around: Hashable, kind: Hashable, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = call(*args, **kwargs)
        if kind in self._eager:
            return result
        if len(self.seen.uses) == MANY and not self.captures:
            self._say(MANY_KINDS)
        outputs: list[Tensor] = []
        try:
            described_outputs(result, outputs)
        except TypeError as error:
            self._refuse(kind, str(error).removeprefix("capture: "))
            return result
        self.seen.note(around, kind, outputs, lambda kind: self._refuse(kind, _TWICE))
        return result

    def _capture(self, around: Hashable, call: Call, description: Any, inputs: list[Tensor]) -> ModelGraph | None:
        key = self._key(around, description, inputs)
        devices = sorted({tensor.device for tensor in (*inputs, *self._owners.tensors())}, key=str)
        if len(devices) != 1 or (self._recorder is CudaRecorder and devices[0].type != "cuda"):
            where = ", ".join(map(str, devices)) or "no tensor"
            self._refuse(key, f"its tensors must be on one CUDA device. Found: {where}", strict=False)
            return None
        recorder, lasting = self._recorder(devices[0]), (description, torch.is_grad_enabled())
        self._make_room_for(around)
        recorder.waits()
        graph = self._attempt(key, lasting, lambda: self._recorded(recorder, call, description, inputs))
        if graph is not None:
            self._graphs[key] = graph
            self._note_capture(description, lasting)
        return graph

    def _recorded(self, recorder: CudaRecorder, call: Call, description: Any, inputs: list[Tensor]) -> ModelGraph:
        uses = self.seen.uses.get((description, torch.is_grad_enabled()), Counter())
        seen = [use for use in uses if uses[use]]
        # Each once: autograd adds up what comes for a weight that stands in two places.
        trained = {id(tensor): tensor for tensor in self._owners.tensors() if tensor.requires_grad}
        modules = self._owners.every
        with nothing_left(modules), without_draws(recorder.device):
            return ModelGraph(recorder, call, description, inputs, list(trained.values()), seen, modules)

    def _has_room(self) -> bool:
        if len(self._graphs) < self._most:
            return True
        oldest = next(([key] for key, graph in self._graphs.items() if not graph.is_awaited), [])
        self._drop(oldest)
        return bool(oldest)

    def _make_room_for(self, around: Hashable) -> None:
        """Drop the graphs of other wrappings but for those that were called last, and those that are awaited."""
        lately = dict.fromkeys([around, *(key[0] for key in reversed(self._graphs))])
        kept = list(lately)[:_AROUNDS]
        self._drop([key for key, graph in self._graphs.items() if key[0] not in kept and not graph.is_awaited])


def _are_capturable(hooks: list[dict[Any, Any]]) -> bool:
    """Return whether hooks do nothing but compute with tensors, as those of `accel.amp` say of themselves."""
    owners = [getattr(hook, "__self__", None) for own in hooks for hook in own.values()]
    return all(getattr(owner, "is_capturable", False) for owner in owners)


def _is_traced() -> bool:
    """Return whether someone looks at each operator, who would not see into a graph: a compiler, a mode, a capture."""
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or is_watched()
        or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    )


# -- captured models: put in place, and released -----------------------------------------------------------------------


_NAME = "_accel_captured"


class _Captured:
    """What was captured of a model; it is kept in the model, and goes with it. A copy of the model has None."""

    def __init__(self, calls: ModelCalls, call: Any, before: dict[str, Any]) -> None:
        self.calls, self.call, self.before = calls, call, before

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


_Model = TypeVar("_Model", bound=nn.Module)


def capture_model(model: _Model, calls: ModelCalls) -> _Model:
    """Run the calls of a model by graphs, in place."""
    if _distributes(model):
        raise InvalidType(
            "capture: a model must be captured inside of what distributes it. "
            f"Found: {type(model).__name__}; capture the model that was passed to it"
        )
    release(model)
    before = callslot.contents(model)
    call = callslot.SlotCall(calls.wrap(before.get(callslot.NAME, model._call_impl)))
    callslot.fill(model, call)
    vars(model)[_NAME] = _Captured(calls, call, before)
    return model


def _distributes(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    return isinstance(model, (DataParallel, DistributedDataParallel, FullyShardedDataParallel, FSDPModule))


def calls_of(model: nn.Module) -> ModelCalls | None:
    """Return what was captured of a model's calls, and why some run eagerly; None if it is not captured."""
    captured: _Captured | None = vars(model).get(_NAME)
    return None if captured is None else captured.calls


def release(model: nn.Module) -> None:
    """Call a captured model eagerly again, and give the memory of its graphs back.

    Args:
        model: any; one that is not captured is left as it is.

    Example:
        >>> model = capture(torch.nn.Linear(4, 2))
        >>> release(model)
    """
    captured: _Captured | None = vars(model).pop(_NAME, None)
    if captured is None:
        return
    captured.calls.reset()
    if callslot.contents(model).get(callslot.NAME) is captured.call:
        callslot.restore(model, captured.before)
    else:  # someone has wrapped it since
        captured.calls.has_stopped = True
