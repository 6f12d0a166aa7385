"""The gradients of a step as they arrive at the parameters, and what their parts say of the noise.

    plain (SGD)                       g
    preconditioned (Adam, LAMB)       P g,   P = 1 / (max(√v̂, r / 10) + ε),   v̂ = v / (1 - β₂ᵗ)

All gradients of a model are one float32 vector, in the coordinates in which the optimizer steps. One vector has one
norm: the arithmetic has no loop over parameters. With Adam it is P g that moves the weights, so the noise that matters
is φ_P = tr(P Σ P) / ‖P μ‖² (Pollux, OSDI 2021, equation 5). P is that of the steps before, hence independent of this
step's samples.

r is the root mean square of √v̂ over a weight's tensor. Adam's own steps are bounded, since the gradient of a step is
in its v̂ already; in that of the steps before, the row of a letter that comes for the first time has 0. Without the
bound a model of characters had φ_P = 626,000 after 100 steps, all of it from 1 % of the weights, in place of 120; from
step 400 on the bound changes it by less than 4 %. A tensor that has had no gradient is left out.

Each micro-batch is taken for a mean over its samples that counts as much as every other one: so do loops that divide
the loss by the number of micro-batches, and so does DistributedDataParallel with its ranks. The gradients that arrive
are g_k = w_k S_k with w_k = 1 / (micro-batches of a rank), and G is their sum, averaged over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from accel.errors import AccelError
from accel.goodput.noise_scale import NoiseSums
from accel.guard.together import fsdp_parameters
from accel.profiler.loop.backward import on_gradient

Gather = Callable[[Any], list[Any]]
"""Gives each rank what all of them passed, by rank."""

_LEAST_ROOT = 0.1
"""√v̂ at least, of its root mean square over the tensor."""
_SKETCH = 16384
"""Numbers of a sketch: the squared length has a standard deviation of √(2/m), 1.1 %, or less. And of a sample."""
_LEAST_DRAWN = 32
"""Coordinates of each weight in a sample, if it has as many."""


class Unmeasurable(AccelError):  # not an error of the user's: the meter leaves the step out, and says why
    """The step says nothing of the noise; the text is the reason."""


class GradientTap:
    """Collects the gradients that arrive at parameters, before anything is done with them.

    A tensor hook on a leaf is called once in each backward pass, with the sum over all uses of the parameter, before
    the gradient is added to `.grad` and before DistributedDataParallel gets it. So a replica's own gradient is seen
    whatever hook then compresses it, a micro-batch's own gradient beside those of others, and all that before clipping.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._handles: list[Any] = []
        self._arrived: dict[int, Tensor] = {}

    @property
    def holds(self) -> bool:
        return bool(self._arrived)

    def install(self) -> None:
        self.remove()
        self._handles = [on_gradient(p, partial(self._arrive, i)) for i, p in enumerate(self._parameters)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._handles:
            for parameter in self._parameters:
                if not parameter._backward_hooks:
                    # Else every backward pass goes on asking each parameter's empty table: 0.5 µs apiece.
                    parameter._backward_hooks = None
        self._handles = []
        self._arrived.clear()

    def take(self) -> list[Tensor | None]:
        """Return the sum of what has arrived at each parameter since the last call; None where nothing did."""
        arrived = [self._arrived.get(number) for number in range(len(self._parameters))]
        self._arrived.clear()
        return [None if gradient is None else gradient.detach() for gradient in arrived]

    def _arrive(self, number: int, gradient: Tensor) -> None:
        # This very tensor is kept: autograd then copies it into `.grad` instead of moving it, and clipping leaves it.
        if number in self._arrived:  # a second pass over the same batch
            gradient = self._arrived[number] + gradient
        self._arrived[number] = gradient


def trained_parameters(model: Any) -> list[Tensor]:
    """Return the parameters that require gradients; raise Unmeasurable if they can't be measured."""
    parameters: list[Tensor] = [p for _, p in model.named_parameters() if p.requires_grad]
    if len({p.device for p in parameters}) > 1:
        raise Unmeasurable("the parameters lie on several devices")
    if not parameters:
        raise Unmeasurable("no parameter of the model requires a gradient")
    return parameters


def flattened(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
    """Return gradients as one float32 vector, 0 for none; raise Unmeasurable if one is sparse."""
    if any(g is not None and g.layout != torch.strided for g in gradients):
        raise Unmeasurable("a gradient is sparse; make it dense, such as by nn.Embedding(sparse=False)")
    dense = [
        torch.zeros_like(p, dtype=torch.float32) if g is None else g for g, p in zip(gradients, parameters, strict=True)
    ]
    if any(each.is_complex() for each in dense):
        dense = [torch.view_as_real(each) if each.is_complex() else each for each in dense]
    return _joined(dense)


def _joined(tensors: list[Tensor]) -> Tensor:
    # torch's own flattening: one call for all parameters, where a reshape of each takes 1 µs.
    singles = [each if each.dtype == torch.float32 else each.float() for each in tensors]
    return cast(Tensor, torch._utils._flatten_dense_tensors(singles))  # type: ignore[no-untyped-call]


class AdamMoments(NamedTuple):
    squares: list[Tensor]
    corrections: list[float]
    epsilons: list[float]

    @torch.no_grad()
    def denominators(self) -> Tensor:
        """Return max(√v̂, r / 10) + ε as one vector."""
        roots = torch._foreach_sqrt(torch._foreach_div([each.float() for each in self.squares], self.corrections))
        for root, length in zip(roots, torch._foreach_norm(roots), strict=True):
            least = length * (_LEAST_ROOT / math.sqrt(max(root.numel(), 1)))
            root.clamp_(min=torch.where(length > 0, least, math.inf))
        return _joined(list(torch._foreach_add(roots, self.epsilons)))


def denominators(parameters: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> Tensor | None:
    moments = adam_moments(parameters, optimizers)
    return None if moments is None else moments.denominators()


def adam_moments(parameters: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> AdamMoments | None:
    """Return v and what corrects it, or None where an optimizer has no v̂: the plain noise scale.

    With an optimizer of another kind than Adam among them, gradients stay plain: two kinds of coordinates have no norm
    in common.

    Raises:
        Unmeasurable: if no Adam has taken a step yet.
    """
    rows = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    if not rows or not all(_is_adam(optimizer, group) for optimizer, group in rows):
        return None
    owner = {id(p): (optimizer, group) for optimizer, group in rows for p in group["params"]}
    squares: list[Tensor] = []
    corrections: list[float] = []
    epsilons: list[float] = []
    for p in parameters:
        optimizer, group = owner.get(id(p), rows[0])
        state = optimizer.state.get(p, {})
        # One that has had no gradient, or that nobody updates, has no square, and is left out as those of 0 are.
        squares.append(_square(p, state) if "exp_avg_sq" in state else torch.zeros_like(p, dtype=torch.float32))
        corrections.append(_correction(state, group))
        epsilons.append(float(group["eps"]))
    if not any("exp_avg_sq" in owner[id(p)][0].state.get(p, {}) for p in parameters if id(p) in owner):
        raise Unmeasurable("the optimizer has no averages of squared gradients yet")
    return AdamMoments(squares, corrections, epsilons)


def _square(p: Tensor, state: dict[str, Any]) -> Tensor:
    square: Tensor = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    if square.is_complex():
        raise Unmeasurable("the optimizer's squares are complex")
    if square.shape != p.shape:
        raise Unmeasurable(f"the optimizer keeps squares of shape {tuple(square.shape)} for {tuple(p.shape)} weights")
    return square


def _is_adam(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Tell Adam, AdamW, NAdam, RAdam and LAMB from others: by their settings, since a new one has no state yet."""
    kept = next((state for state in optimizer.state.values() if state), None)
    betas = group.get("betas")
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    # Lion has betas and no eps, Adamax keeps exp_inf.
    return pair and "eps" in group and (kept is None or "exp_avg_sq" in kept)


def _correction(state: dict[str, Any], group: dict[str, Any]) -> float:
    step = state.get("step", group.get("step"))  # apex counts in the group
    if step is None or not group.get("bias_correction", True):
        return 1.0
    beta2, steps = float(group["betas"][1]), max(float(step), 1.0)
    return max(1.0 - float(beta2**steps), 1e-12)


class ShardedSample:
    """A sample of the coordinates of an FSDP2 model, the same on all ranks; another one for each step, by its seed.

        √(n / k) x_i        for k of a weight's n coordinates: the squared length is that of the whole, in expectation

    FSDP2 gathers a weight before its use and reduces its gradient afterwards: what arrives at the gathered weight is
    this rank's own gradient, whole. But √v̂ is known to the owner of a shard alone. For vectors in Adam's coordinates
    ranks would exchange as many numbers as the model has; of a sample they exchange v̂ as well, and divide at the end.

    Raises:
        Unmeasurable: if parameters are spread in another way.
    """

    def __init__(self, model: Any, seed: int) -> None:
        sharded = [each for each in fsdp_parameters(model) if each.sharded_param.requires_grad]
        own = {id(each.sharded_param) for each in sharded if not each.is_dtensor}
        if own != {id(p) for p in model.parameters() if p.requires_grad}:
            raise Unmeasurable("parameters are spread over processes in another way than by FSDP2 (fully_shard) alone")
        weights: list[tuple[Any, Any]] = [
            (each.sharded_param, getattr(each, "_unsharded_param", None)) for each in sharded
        ]
        # One that was not called yet has no gathered weight, and one that has just been unfrozen a frozen one.
        weights = [(p, whole) for p, whole in weights if whole is not None and whole.requires_grad]
        self._parameters: list[Any] = [p for p, _ in weights]
        generator = torch.Generator().manual_seed(seed)
        numel = sum(p.numel() for p in self._parameters)
        self.places: list[Tensor] = []
        for p in self._parameters:
            drawn = max(_LEAST_DRAWN, _SKETCH * p.numel() // numel)
            every = p.numel() <= drawn
            place = torch.arange(p.numel()) if every else torch.randint(p.numel(), (drawn,), generator=generator)
            self.places.append(place.to(p.device))
        self.tap: GradientTap = _SampledTap([whole for _, whole in weights], self.places)

    def moments(self, optimizers: Sequence[Optimizer]) -> AdamMoments | None:
        """Return what this rank has of the optimizer's squares, 0 elsewhere; None if it has none."""
        moments = adam_moments(self._parameters, optimizers)
        if moments is None:
            return None
        pairs = zip(moments.squares, self.places, strict=True)
        return moments._replace(squares=[_of_shard(square, places).cpu() for square, places in pairs])


class _SampledTap(GradientTap):
    """Keeps gradients at some places alone, each in place of as many as the weight has for one of them."""

    def __init__(self, parameters: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        super().__init__(parameters)
        self._places = places

    def _arrive(self, number: int, gradient: Tensor) -> None:
        if gradient.layout == torch.strided:
            places = self._places[number]
            drawn = gradient.detach().reshape(-1)[places].float()
            gradient = drawn * math.sqrt(gradient.numel() / max(len(places), 1))
        super()._arrive(number, gradient)


def _of_shard(square: Any, places: Tensor) -> Tensor:
    """Return the values of a sharded tensor at places of the whole one; 0 where another rank has them."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(square.shape, square.device_mesh, square.placements)
    index = [each - first for each, first in zip(torch.unravel_index(places, square.shape), offset, strict=True)]
    is_own = torch.stack([(each >= 0) & (each < size) for each, size in zip(index, shape, strict=True)]).all(0)
    values = torch.zeros(len(places), device=places.device)
    values[is_own] = square.to_local()[tuple(each[is_own] for each in index)].float().to(places.device)
    return values


class GradientSketch:
    """A short linear sketch of long vectors, whose squared length is that of the vector, in expectation.

        sketch(x)_j = Σ_{i ≡ j mod m} s_i x_i      s_i = ±1, drawn once, alike on all ranks

    The sketch of a mean is the mean of sketches. So ranks agree on the norm of their mean gradient by exchanging m
    numbers, without the gradient that a communication hook makes of it, which compression and clipping change. A vector
    shorter than m is its own sketch.

    Source: Charikar, Chen, Farach-Colton, Finding Frequent Items in Data Streams, 2002 (the count sketch).
    """

    def __init__(self, length: int = _SKETCH, seed: int = 0) -> None:
        self._length, self._seed = length, seed
        self._signs = torch.empty(0)

    def of(self, vector: Tensor) -> Tensor:
        size = vector.numel()
        if size <= self._length:
            return vector
        if self._signs.numel() != size or self._signs.device != vector.device:
            generator = torch.Generator().manual_seed(self._seed)  # of the host: ranks may have different devices
            drawn = torch.randint(0, 2, (size,), generator=generator, dtype=torch.int8)
            self._signs = drawn.mul_(2).sub_(1).to(vector.device)
        signed = torch.zeros(-(-size // self._length) * self._length, dtype=vector.dtype, device=vector.device)
        torch.mul(vector, self._signs, out=signed[:size])
        return signed.view(-1, self._length).sum(0)


@dataclass
class PartSums:
    """Sums over the micro-batches of one rank, which other ranks may get.

    Example:
        >>> parts = PartSums()
        >>> parts.add(torch.tensor([3.0, 0.0]), 8)
        >>> parts.add(torch.tensor([1.0, 0.0]), 8)
        >>> step_sums([parts])  # half the loss each: S_1 = 6, S_2 = 2, G = 4
        NoiseSums(part_square=20.0, mean_square=16.0, part_samples=8.0, samples=16.0)
    """

    total: Tensor | None = None
    square: Tensor | float = 0.0
    """The sum of the parts' squared norms; of a sample, each coordinate's part of it."""
    count: int = 0
    inverse_sizes: float = 0.0
    moments: AdamMoments | None = None
    """Of a sample: what this rank has of them; they are not in the sums yet."""

    def add(self, vector: Tensor, samples: float, *, is_sample: bool = False) -> None:
        """Add the gradient of a micro-batch of so many samples, > 0, its sketch or a sample of it."""
        self.total = vector if self.total is None else self.total + vector
        self.square = self.square + (vector.square() if is_sample else vector.square().sum())
        self.count += 1
        self.inverse_sizes += 1 / samples

    def on_host(self) -> PartSums:
        total = None if self.total is None else self.total.cpu()
        return replace(self, total=total, square=torch.as_tensor(self.square).cpu())


def in_coordinates(ranks: Sequence[PartSums]) -> Sequence[PartSums]:
    """Return the sums of all ranks in Adam's coordinates, where each has brought its part of the moments."""
    moments = [rank.moments for rank in ranks if rank.moments is not None]
    if len(moments) < len(ranks):
        return ranks
    squares = [torch.stack(each).amax(0) for each in zip(*(one.squares for one in moments), strict=True)]
    scales = moments[0]._replace(squares=squares).denominators()
    return [replace(r, total=cast(Tensor, r.total) / scales, square=r.square / scales.square()) for r in ranks]


def step_sums(ranks: Sequence[PartSums]) -> NoiseSums | None:
    """Return what the parts of all ranks say of the noise; None if there is only one part.

    A rank without any part has left the step out by its GradScaler; then the sums are not finite.
    """
    totals = [rank.total for rank in ranks if rank.total is not None]
    if len(totals) < len(ranks):
        return NoiseSums(math.nan, math.nan, 1.0, 2.0)
    count, inverse_sizes = sum(rank.count for rank in ranks), sum(rank.inverse_sizes for rank in ranks)
    if count < 2:
        return None
    squares = torch.as_tensor(sum(rank.square for rank in ranks)).sum(), sum(totals[1:], totals[0]).square().sum()
    square, total_square = (each / len(ranks) ** 2 for each in torch.stack(squares).tolist())
    part_samples = count / inverse_sizes
    return NoiseSums(count * square, total_square, part_samples, count * part_samples)
