"""The run as strategies see it: the user's objects, what has been observed of them, and the places to act on."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accel.profiler.host import has_amx, machine_name, usable_cores
from accel.profiler.loop.backward import on_gradient
from accel.profiler.loop.optimizers import Optimizers
from accel.profiler.trees import leaves, shape_of, tensors
from accel.run import ranks
from accel.run.layouts import order

if TYPE_CHECKING:
    from accel.dataio.passes.proxy import Fetching
    from accel.run.gate import Gate

Shapes = tuple[tuple[int, ...], ...]
"""Of the tensors that the model is called with, or of those that it returns, in order."""
Orders = tuple[tuple[int, ...], ...]
"""Of the dimensions of tensors in memory (`layouts.order`)."""
_MOST_SHAPES = 64


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """Return the shapes of the tensors in a call's arguments."""
    return _shapes(tensors((args, kwargs)))


def _shapes(of: list[Tensor]) -> Shapes:
    return tuple(tuple(shape_of(tensor)) for tensor in of)


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
    """What the loop does with graphs or in backward passes that only autograd's own can: '' if nothing was seen."""
    output_orders: dict[Shapes, Orders] = field(default_factory=dict)
    """How the tensors that a call with gradients has returned lie in memory, by their shapes; the latest stand last."""
    returns_tensor: bool = False
    """The last call returned one tensor, and nothing else."""
    distribution: str = ""
    """Class of a distribution that a call has returned: nobody sees the tensors in it; '' if there was none."""
    batch: Hashable = None
    """Shapes of the tensors in the usual batch; "varying" if there is no usual one."""
    free_cores: int | None = None
    """Cores that processes outside this run left to this rank at the last look; None before the first."""
    batches_of_steps: Counter[int] = field(default_factory=Counter)
    """How many steps have had so many batches."""
    fetch_finding: str = ""
    """Why fetching can't be moved elsewhere; '' if nothing speaks against it."""

    def batches_per_step(self) -> int:
        """Return how many batches most steps have."""
        usual = self.batches_of_steps.most_common(1)
        return max(1, usual[0][0]) if usual else 1

    def note_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
        """Note a plain call of the model."""
        self.calls += 1
        if torch.amp.is_autocast_available(device.type):  # on the meta device there is none
            self.autocast = self.autocast or torch.is_autocast_enabled(device.type)
        if torch.is_grad_enabled() and len(self.call_shapes) < _MOST_SHAPES:
            self.call_shapes[shapes_of(args, kwargs)] += 1
        for tensor in tensors((args, kwargs)):
            self.conv_input = self.conv_input or (tensor.dim() == 4 and tensor.is_floating_point())
            self.input_dtypes.add(str(tensor.dtype))

    def note_outputs(self, outputs: Any) -> None:
        """Note how outputs of a plain call lie in memory, and what the loop will do with its graph."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            self.needs_graphs = "the loop packs what backward passes need in its own way (saved_tensors_hooks)"
        self.returns_tensor = isinstance(outputs, Tensor)
        if not self.returns_tensor:
            kinds = (type(leaf).__name__ for leaf in leaves(outputs) if isinstance(leaf, Distribution))
            self.distribution = next(kinds, self.distribution)
        returned = tensors(outputs)
        shapes = _shapes(returned)
        self.output_orders.pop(shapes, None)  # the latest stands last
        if len(self.output_orders) >= _MOST_SHAPES:
            del self.output_orders[next(iter(self.output_orders))]
        self.output_orders[shapes] = tuple(map(order, returned))
        for tensor in returned:
            if tensor.grad_fn is not None:  # on a leaf, such as a parameter, the hook would stay
                on_gradient(tensor, self.note_backward)

    def orders_of(self, returned: list[Tensor]) -> Orders:
        """Return how the tensors that a call returns would lie in memory in a plain one, as far as that is known.

        As those of the same shapes did, or else those of the last call: a loop may call its model in several ways.
        """
        latest = next(reversed(self.output_orders.values()), ())
        return self.output_orders.get(_shapes(returned), latest)

    def note_backward(self, gradient: Tensor) -> None:
        """Note, in a backward pass, what the loop does with the graph of a call."""
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
    exact: bool = False
    """allow="exact": what can't be shown to be the same bits is left alone."""
    enabled: frozenset[str] = frozenset()
    """Strategies that the user has named in `enable=`."""
    observed: Observed = field(default_factory=Observed)
    refused_elsewhere: dict[str, str] = field(default_factory=dict)
    """Strategies that apply on this rank and don't on another, and why."""
    preparing: set[str] = field(default_factory=set)
    """Strategies that had to wait in the loop on rank 0, and are not ready to be tried on all ranks yet."""
    waits_elsewhere: dict[str, str] = field(default_factory=dict)
    """What these wait for on other ranks; '' if they could be tried there."""
    cores: int = field(default_factory=usable_cores)
    threads: int = field(default_factory=torch.get_num_threads)
    """Intra-op threads of plain steps: when the run began, or when `intraop_threads` was last switched on."""
    planned_steps: int | None = None
    """How many steps the run will have, as the user or a framework has it."""
    planned_epochs: float | None = None
    """How many epochs, likewise."""

    def __post_init__(self) -> None:
        self.optimizers = Optimizers(self.optimizers)

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter or buffer; the CPU if it has none."""
        tensors = itertools.chain(self.model.parameters(), self.model.buffers())
        first = next(tensors, None)  # asked for at each step: a list of them all took 0.2 ms with 60
        return torch.device("cpu") if first is None else first.device

    @property
    def device_name(self) -> str:
        """Its name, e.g. `cpu (AMD EPYC)`."""
        return machine_name(self.device)

    @property
    def inner(self) -> nn.Module:
        """The module inside DistributedDataParallel; the model itself if it is in none."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    @property
    def cuda(self) -> bool:
        """True when the model lives on an NVIDIA (or ROCm) device."""
        return self.device.type == "cuda"

    @property
    def has_ranks(self) -> bool:
        """True when other processes take part in the training."""
        return ranks.are_several()

    @property
    def ranks_here(self) -> int:
        """How many ranks of the training share this machine's cores, as torchrun has it; at least 1."""
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if self.world_size > 1 else 1

    @property
    def device_kind(self) -> str:
        """What the recorded results tell devices apart by: "cuda", "cpu with AMX", "cpu", or another type."""
        return "cpu with AMX" if self.device.type == "cpu" and has_amx() else self.device.type

    def steps_in_all(self) -> float | None:
        """Return how many steps the run will have; None if nobody has said so, or the loader has no length."""
        turns = getattr(getattr(self.loader, "batch_sampler", None), "turns", None)
        epochs = getattr(turns, "to_come", None) if self.planned_epochs is None else self.planned_epochs
        if self.planned_steps is not None or epochs is None:
            return self.planned_steps
        try:
            return float(epochs * len(self.loader)) / self.observed.batches_per_step()
        except (TypeError, NotImplementedError):
            return None

    def has_module(self, *kinds: type[nn.Module]) -> bool:
        """Return whether the model contains a module of one of these classes."""
        return any(isinstance(module, kinds) for module in self.model.modules())
