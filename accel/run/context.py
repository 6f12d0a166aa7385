"""The run as strategies see it: the user's objects, what has been observed of them, and the places to act on."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel.dataio.batches import shape_of, tensors
from accel.profiler.host import usable_cores

if TYPE_CHECKING:
    from accel.dataio.passes.proxy import Fetching
    from accel.run.gate import Gate

Shapes = tuple[tuple[int, ...], ...]
"""Of the tensors that the model is called with, in order."""
_MOST_SHAPES = 64


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """Return the shapes of the tensors in a call's arguments."""
    return tuple(tuple(shape_of(tensor)) for tensor in tensors((args, kwargs)))


@dataclass
class Observed:
    """What has been observed in plain steps."""

    autocast: bool = False
    """The loop runs the model under an autocast of its own."""
    conv_input: bool = False
    """The model was called with a 4-d floating-point tensor."""
    calls: int = 0
    """Number of calls of the model."""
    uncalled: str = ""
    """What to pass in place of a model that the loop never calls; '' if it is called."""
    input_dtypes: set[str] = field(default_factory=set)
    """Of the tensors that the model was called with."""
    call_shapes: Counter[Shapes] = field(default_factory=Counter)
    """Of the calls with gradients, the first `_MOST_SHAPES` different ones."""
    needs_graphs: str = ""
    """What the loop does in backward passes that only autograd's own graphs can: '' if nothing was seen."""
    batch: Hashable = None
    """Shapes of the tensors in the usual batch; "varying" if there is no usual one."""
    free_cores: int | None = None
    """Cores that processes outside this run left to this rank at the last look; None before the first."""
    fetch_finding: str = ""
    """Why fetching can't be moved elsewhere; '' if nothing speaks against it."""

    def note_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
        """Note a plain call of the model."""
        self.calls += 1
        self.autocast = self.autocast or torch.is_autocast_enabled(device.type)
        if torch.is_grad_enabled() and len(self.call_shapes) < _MOST_SHAPES:
            self.call_shapes[shapes_of(args, kwargs)] += 1
        for tensor in tensors((args, kwargs)):
            self.conv_input = self.conv_input or (tensor.dim() == 4 and tensor.is_floating_point())
            self.input_dtypes.add(str(tensor.dtype))

    def note_backward_of(self, outputs: Any) -> None:
        """Note, in the backward passes to come, what the loop does with the graph of a plain call."""
        for tensor in tensors(outputs):
            if tensor.grad_fn is not None:  # on a leaf, such as a parameter, the hook would stay
                tensor.register_hook(self._note_backward)  # type: ignore[no-untyped-call]

    def _note_backward(self, gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            self.needs_graphs = "the loop differentiates gradients again (create_graph=True)"
        elif torch._C._autograd._get_current_graph_task_keep_graph() and not self.needs_graphs:
            self.needs_graphs = "the loop goes backward through a call twice (retain_graph=True)"

    def note_batch(self, shape: Hashable) -> None:
        """Note the usual batch; if it was another before, the calls' shapes are learnt anew."""
        if None not in (shape, self.batch) and shape != self.batch:
            self.call_shapes.clear()
        self.batch = shape

    @property
    def usual_shapes(self) -> Shapes | None:
        """The shapes in four of five training calls or more; None if they vary, or no call was seen."""
        shapes, count = self.call_shapes.most_common(1)[0] if self.call_shapes else (None, 0)
        return shapes if count >= 0.8 * self.call_shapes.total() else None


class Optimizers(Sequence[Optimizer]):
    """The optimizers of a model that somebody uses, in the order in which they came.

    None is kept alive by this: one that a loop has replaced, as after a search for the learning rate or at a new stage
    of the training, is freed with its state.

    Args:
        optimizers: those that are known from the start.
    """

    def __init__(self, optimizers: Iterable[Optimizer] = ()) -> None:
        self._references: list[weakref.ref[Optimizer]] = []
        self._any = False
        for optimizer in optimizers:
            self.append(optimizer)

    def append(self, optimizer: Optimizer) -> None:
        """Add one."""
        self._references = [*self._references, weakref.ref(optimizer, self._forget)]
        self._any = True

    def _forget(self, reference: weakref.ref[Optimizer]) -> None:
        self._references = [each for each in self._references if each is not reference]

    def __iter__(self) -> Iterator[Optimizer]:
        return map(_referent, self._references)  # without a line of Python for each: it is asked for twice a step

    @overload
    def __getitem__(self, place: int) -> Optimizer: ...

    @overload
    def __getitem__(self, place: slice) -> list[Optimizer]: ...

    def __getitem__(self, place: int | slice) -> Optimizer | list[Optimizer]:
        return list(self)[place]

    def __len__(self) -> int:
        return len(self._references)

    def __bool__(self) -> bool:
        """Return whether there has been one: the loop is one with an optimizer, also between two of them."""
        return self._any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Optimizers | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


_referent: Any = weakref.ref.__call__


@dataclass
class Run:
    """The user's model, loader and optimizers, and where strategies act on them."""

    model: nn.Module
    loader: Any
    optimizers: Optimizers | list[Optimizer]
    """Of the model; a list becomes `Optimizers`."""
    gate: Gate
    fetching: Fetching
    world_size: int = 1
    observed: Observed = field(default_factory=Observed)
    refused_elsewhere: dict[str, str] = field(default_factory=dict)
    """Strategies that apply on this rank and don't on another, and why."""
    cores: int = field(default_factory=usable_cores)
    threads: int = field(default_factory=torch.get_num_threads)
    """Intra-op threads when the run began."""

    def __post_init__(self) -> None:
        self.optimizers = Optimizers(self.optimizers)

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter or buffer; the CPU if it has none."""
        tensors = itertools.chain(self.model.parameters(), self.model.buffers())
        first = next(tensors, None)  # asked for at each step: a list of them all took 0.2 ms with 60
        return torch.device("cpu") if first is None else first.device

    @property
    def cuda(self) -> bool:
        """True when the model lives on an NVIDIA (or ROCm) device."""
        return self.device.type == "cuda"

    def has_module(self, *kinds: type[nn.Module]) -> bool:
        """Return whether the model contains a module of one of these classes."""
        return any(isinstance(module, kinds) for module in self.model.modules())
