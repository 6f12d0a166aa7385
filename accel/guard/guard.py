"""The guard: does a candidate compute the same thing as the plain path?

One call of the model in a plain step is *recorded*, and *replayed* at the step boundary, plain and under the candidate
(docs/contributing/guard.md). Whatever a replay changes is restored.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from accel.errors import AccelError
from accel.guard import together
from accel.guard.alone import is_sharded, on_this_rank_alone
from accel.guard.comparison import Comparison, Replayed, Tolerance, compare, has_written, noise_like, versions
from accel.guard.draws import ReplayedDraws
from accel.guard.rounding import Rounding, rounding_of
from accel.guard.snapshot import ModelSnapshot, devices_of, plain_attributes, within
from accel.profiler.interruptions import Tolerated
from accel.profiler.loop.backward import on_gradient
from accel.profiler.trees import copied, leaves, tensors

__all__ = ["Comparison", "Recording", "Replayed", "Tolerance", "compare", "record", "replay", "untouched"]

_MOST_IN_AN_ATTRIBUTE = 100
"""Entries of a container that are looked at: it may be a whole data set."""


class NotRestorable(AccelError):
    """A model holds more state than a snapshot keeps, so that its calls can't be made again without a trace."""


class NotReplayable(AccelError):
    """The plain call can't be made again, whatever the candidate does."""


class CallFlags:
    """Which modules of a model train, and which parameters get gradients, as it is now.

    A GAN's loop freezes the discriminator for the generator's step, and one that reports accuracy in each batch leaves
    the model in evaluation mode: at the step boundary, where calls are replayed, the flags are not those of the call.
    """

    def __init__(self, model: nn.Module) -> None:
        self._training = [(module, module.training) for module in model.modules()]
        self._requires_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def evaluating(self) -> CallFlags:
        """Return the same with all modules in evaluation mode."""
        flags = copy.copy(self)
        flags._training = [(module, False) for module, _ in self._training]
        return flags

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """Set them for the block, past `train()` and `eval()`: a user's own may change weights, as loralib's do."""
        training = [(module, module.training) for module, _ in self._training]
        requires_grad = [(parameter, parameter.requires_grad) for parameter, _ in self._requires_grad]
        try:
            _set(self._training, self._requires_grad)
            yield
        finally:
            _set(training, requires_grad)


def _set(training: list[tuple[nn.Module, bool]], requires_grad: list[tuple[nn.Parameter, bool]]) -> None:
    for module, flag in training:
        if module.training != flag:
            module.training = flag
    for parameter, flag in requires_grad:
        if parameter.requires_grad != flag:
            parameter.requires_grad = flag


@dataclass
class Recording:
    """One call of the model in a plain step."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: ModelSnapshot
    autocast: tuple[bool, torch.dtype]
    device: str
    arrived: dict[int, Tensor] = field(default_factory=dict)
    hooks: list[RemovableHandle] = field(default_factory=list)
    flags: CallFlags | None = None
    """Which modules trained and which parameters got gradients; None for those of now."""
    rounding: Rounding | None = None
    """What the plain call computes with; None until one was looked at."""

    def coarsest(self, model: nn.Module, outputs: Iterable[Tensor]) -> torch.dtype:
        """Return the coarsest format within a plain call that is made now; the first replay is one."""
        if self.rounding is None:
            self.rounding = rounding_of(model, self.autocast, outputs)
        return self.rounding.now(self.device)

    def listen(self, outputs: Any) -> None:
        """Record the gradients that arrive at the outputs."""
        for number, tensor in enumerate(tensors(outputs)):
            if tensor.requires_grad:
                self.hooks.append(on_gradient(tensor, partial(self._arrive, number)))

    def forget(self) -> None:
        """Listen no more: an output that is a parameter outlives the step, and a hook on it holds this whole call."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def _arrive(self, number: int, gradient: Tensor) -> None:
        with Tolerated("a gradient is not recorded"):  # for lack of memory: the loop's own backward pass goes on
            arrived = gradient.detach().clone()
            # A loop may call backward twice; the gradients then add up.
            self.arrived[number] = self.arrived[number] + arrived if number in self.arrived else arrived


def record(model: nn.Module, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    """Record a call that is about to be made; its inputs are copied, since a forward may change them in place.

    Raises:
        NotRestorable: if the model, or a hook on it, holds more state than can be put back after a replay.
    """
    kind = device.type
    before = ModelSnapshot(model, devices_of(model, device, args, kwargs), (args, kwargs))
    if before.unkept:
        raise NotRestorable(f"{before.unkept}, which could not all be put back after a replay")
    return Recording(
        args=copied(args),
        kwargs=copied(kwargs),
        before=before,
        autocast=(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        device=kind,
        flags=CallFlags(model),
    )


@contextlib.contextmanager
def untouched(model: nn.Module, device: torch.device, *given: Any, written: Iterable[Tensor] = ()) -> Iterator[None]:
    """Restore, at the end, whatever the block changes in random states, buffers and module attributes.

    Args:
        written: the parameters that its own call writes to.
    """
    before = ModelSnapshot(model, devices_of(model, device, *given), given, written)
    try:
        yield
    finally:
        before.restore()


def replay(
    model: nn.Module,
    call: Any,
    recording: Recording,
    draws: ReplayedDraws | None = None,
    *,
    evaluates: bool = False,
) -> Replayed:
    """Make the recorded call again through `call`, and send the recorded gradient back through it.

    The modules must be in the recorded state (`recording.before.restore()`); that is not done here, because a strategy
    may have set attributes of its own since. If no gradient arrived (the loop made none), a fixed random one is sent.

    Args:
        model: its parameters' gradients are returned.
        call: the plain call, or a candidate's.
        draws: notes the random draws; None notes none.
        evaluates: make it with modules in their evaluation mode, and without gradients.
    """
    recording.before.restore_generators()
    flags = recording.flags or CallFlags(model)
    with (flags.evaluating() if evaluates else flags).set():
        args, kwargs = copied((recording.args, recording.kwargs))
        given = list(leaves((args, kwargs)))
        counted, named = versions(given), [] if evaluates else _differentiated(model, given)
        with draws or contextlib.nullcontext():
            outputs = called(model, call, recording, args, kwargs, has_gradients=not evaluates)
            coarsest = recording.coarsest(model, outputs)
            gradients = _sent_back(model, recording, outputs, [tensor for _, tensor in named])
        return Replayed(
            [output.detach() for output in outputs],
            gradients,
            [name for name, _ in named],
            [] if draws is None else draws.noted,
            draws is not None and draws.other_order,
            has_written((args, kwargs), given, counted),
            is_cut_off=bool(recording.arrived and named) and all(gradient is None for gradient in gradients),
            attributes={} if evaluates else _tensors_in_attributes(model),
            coarsest=coarsest,
        )


def _differentiated(model: nn.Module, given: list[Any]) -> list[tuple[str, Tensor]]:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and not is_lazy(p)]
    inputs = enumerate(tensor for tensor in given if isinstance(tensor, Tensor))
    return [*trained, *((f"input {number}", tensor) for number, tensor in inputs if tensor.requires_grad)]


def called(
    model: nn.Module,
    call: Any,
    recording: Recording,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    has_gradients: bool = True,
) -> list[Tensor]:
    """Return the outputs of a call with gradients, under the autocast that was recorded, on this rank alone."""
    enabled, dtype = recording.autocast
    autocast = torch.autocast(recording.device, dtype=dtype, enabled=enabled)
    with torch.set_grad_enabled(has_gradients), on_this_rank_alone(model), autocast:
        return tensors(call(*args, **kwargs))


def _tensors_in_attributes(model: nn.Module) -> dict[str, list[Tensor]]:
    by_place = {}
    for path, module in model.named_modules():
        for name, value in plain_attributes(module).items():
            _, held, is_all = ((), (), True) if name == "_parameters" else within([value], _MOST_IN_AN_ATTRIBUTE)
            if held and is_all:
                by_place[f"{path}.{name}".lstrip(".")] = [each.detach() for each in held]
    return by_place


def _sent_back(
    model: nn.Module, recording: Recording, outputs: list[Tensor], inputs: list[Tensor]
) -> list[Tensor | None]:
    differentiable = [(i, t) for i, t in enumerate(outputs) if t.requires_grad]
    backward_roots = [(i, t) for i, t in differentiable if i in recording.arrived] or differentiable
    if not backward_roots or not inputs:
        return [None] * len(inputs)
    roots, sent = [t for _, t in backward_roots], [_cotangent(recording, i, t) for i, t in backward_roots]
    if is_sharded(model):
        return together.sent_back(model, roots, sent, inputs)
    return list(torch.autograd.grad(roots, inputs, sent, allow_unused=True))


def _cotangent(recording: Recording, number: int, output: Tensor) -> Tensor:
    arrived = recording.arrived.get(number)
    if arrived is not None and arrived.shape == output.shape:
        return arrived.to(output.dtype)
    generator = torch.Generator().manual_seed(number)
    return noise_like(output, generator)
