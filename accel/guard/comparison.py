"""Compare what two paths of a call have computed: outputs and gradients.

    outputs     ‖y_c − y_r‖ ≤ δ ‖y_r‖
    gradients   ‖g_c − g_r‖ ≤ γ ‖g_r‖      for each parameter; 5 % of γ times the norm of all is let pass
    scale       |⟨g_c, g_r⟩ / ⟨g_r, g_r⟩ − 1| ≤ s (reduced), |‖g_c‖ / ‖g_r‖ − 1| ≤ s (reordered), of all together
    exact       the same bits
    complex     numbers count as their real and imaginary parts

δ, γ and s follow from the exactness and from ε of the coarsest format within the plain call
(`rounding`); docs/contributing/guard.md has the reasons. TF32 is off in both where it would hide a
fault, and dropout draws in canonical order in both (`draws`), so that it counts among the outputs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from accel.exactness import Exactness
from accel.guard.draws import Draw, by_other_kernels, difference, leave_out_alike
from accel.guard.rounding import FINEST, MOST_REORDERED, coarser, eps_of
from accel.profiler.trees import leaves
from accel.run.layouts import is_kept

_REDUCED_EPS = 2.0**-8
_HALF_EPS = torch.finfo(torch.float16).eps
_WRITES = (
    "the model writes to its arguments, which can't be compared; let it write to tensors and containers of its own"
)
_PIECE = 2**22


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a candidate may be from the plain path; all are relative."""

    output: float
    gradient: float
    scale: float

    @classmethod
    def of(cls, exactness: Exactness, dtype: torch.dtype) -> Tolerance:
        """Derive the tolerance from the declared exactness and the coarsest dtype in what is compared."""
        eps = eps_of(dtype)
        if exactness == Exactness.EXACT:
            return cls(output=0.0, gradient=0.0, scale=0.0)
        reduced = 2**4 * max(eps, _REDUCED_EPS)
        if exactness == Exactness.REORDERED:
            # 16-bit tensors are summed in float32, so another order moves them by few roundings: 2¹⁰ ε allows anything.
            output, scale = min(2**10 * eps, reduced), 2.0**-7 if eps < _HALF_EPS else 2.0**-6
        elif exactness == Exactness.FLOAT8:
            # Layers in float8 were off by 4 %, 32 blocks of a transformer by 7.5 %, their gradients' scale by 1.4 %.
            output, scale = max(reduced, 2.0**-3), 2.0**-4
        else:
            output, scale = reduced, 2.0**-6
        return cls(output=output, gradient=min(4 * math.sqrt(output), 0.5), scale=scale)


@dataclass
class Comparison:
    """A comparison by the guard; `problem` is '' if the two agree."""

    problem: str = ""
    output_error: float = 0.0
    gradient_error: float = 0.0
    tolerance: float = 0.0
    unsure: str = ""
    """Why nothing could be compared; '' if something was."""
    other_draws: bool = False
    """It draws other random numbers than the plain path, of the same distributions: as with another seed."""
    seconds: float = field(default=0.0, compare=False)
    replays_s: tuple[float, float] = field(default=(0.0, 0.0), compare=False)
    """What the plain call took, and that under the plan, when they were replayed last; 0 if they weren't."""

    def beside(self, other: Comparison) -> Comparison:
        """Return the worse of two comparisons of different things; it is unsure if one of them is."""
        return replace(self.merge(other), unsure=self.unsure or other.unsure)

    def merge(self, other: Comparison) -> Comparison:
        """Return the worse of two comparisons of the same thing; it is unsure only if both are."""
        return Comparison(
            self.problem or other.problem,
            max(self.output_error, other.output_error),
            max(self.gradient_error, other.gradient_error),
            max(self.tolerance, other.tolerance),
            other.unsure and self.unsure,  # the first reason
            self.other_draws or other.other_draws,
            max(self.seconds, other.seconds),
            other.replays_s if any(other.replays_s) else self.replays_s,
        )


@dataclass
class Replayed:
    """The outputs and gradients of a replay."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    names: list[str]
    draws: list[Draw] = field(default_factory=list)
    other_draws: bool = False
    """Some draws were made in canonical order, and come out otherwise in a real step."""
    writes: bool = False
    is_cut_off: bool = False
    """Gradients arrived in the step, and in the replay none of them reached a parameter or an input."""
    attributes: dict[str, list[Tensor]] = field(default_factory=dict)
    coarsest: torch.dtype = FINEST
    stopped: str = ""


def compare(plain: Replayed, candidate: Replayed, exactness: Exactness) -> Comparison:
    """Compare a candidate's replay with the plain one under the tolerance of its exactness."""
    if candidate.stopped:
        return Comparison(unsure=candidate.stopped)
    if len(plain.outputs) != len(candidate.outputs):
        return Comparison(f"it returns {len(candidate.outputs)} tensors, the plain path {len(plain.outputs)}")
    if exactness != Exactness.EXACT and not all(map(_is_finite, plain.outputs)):
        return Comparison(unsure="the plain call's own output is not finite")
    if plain.writes:
        return Comparison(unsure=_WRITES)
    if candidate.writes:
        return Comparison("it writes to its arguments, unlike the plain path", 1.0)
    if plain.names and not plain.outputs:  # a training call; one of evaluation may return what it found, as text, say
        return Comparison(unsure="the model returns no tensors that can be looked at")
    if plain.is_cut_off:  # its graph has other leaves than the model's parameters, as that of a sharded model has
        return Comparison(unsure="gradients arrived at the outputs, and none of them reaches a parameter or an input")
    finding = reduce(Comparison.merge, _compared_tensors(plain, candidate, exactness), Comparison())
    if not finding.problem:
        finding = finding.merge(_compare_gradients(plain, candidate, exactness))
    finding.other_draws = candidate.other_draws or by_other_kernels(plain.draws, candidate.draws)
    drawn, alike = difference(plain.draws, candidate.draws), leave_out_alike(plain.draws, candidate.draws)
    if drawn and (finding.problem or exactness == Exactness.EXACT or not alike):
        finding.problem = f"{finding.problem}; {drawn}" if finding.problem else drawn
    return finding


def _compared_tensors(plain: Replayed, candidate: Replayed, exactness: Exactness) -> Iterator[Comparison]:
    for expected, actual in zip(plain.outputs, candidate.outputs, strict=True):
        yield _compare_tensors(expected, actual, exactness, plain.coarsest)
    for name, kept in plain.attributes.items():
        for own, other in zip(kept, candidate.attributes.get(name, ()), strict=False):
            if own.dtype != other.dtype:  # the loop, or the next plain call, would meet it
                yield Comparison(f"what it keeps in {name} is {other.dtype}, {own.dtype} in the plain path")
        if not all(map(is_kept, kept, candidate.attributes.get(name, ()))):
            yield Comparison(f"what it keeps in {name} has other strides than in the plain path")


def _compare_tensors(plain: Tensor, candidate: Tensor, exactness: Exactness, coarsest: torch.dtype) -> Comparison:
    if plain.shape != candidate.shape or plain.dtype != candidate.dtype:
        was, now = f"{tuple(plain.shape)} {plain.dtype}", f"{tuple(candidate.shape)} {candidate.dtype}"
        return Comparison(f"its output is {now}, the plain one {was}")
    if not is_kept(plain, candidate):
        return Comparison(f"its output has the strides {candidate.stride()}, the plain one {plain.stride()}")
    plain, candidate = as_real(plain), as_real(candidate)
    if exactness == Exactness.EXACT or not plain.is_floating_point():
        return Comparison() if same_bits(plain, candidate) else Comparison("its output has other bits", math.nan)
    tolerance = Tolerance.of(exactness, coarser(plain.dtype, coarsest)).output
    if not _is_finite(candidate):
        return Comparison("its output is not finite, unlike the plain one", math.inf)
    error, size, _ = _sizes(plain, candidate)
    relative = error / size if size > 0 else error
    if relative > tolerance:
        return Comparison(f"its output is off by {relative:.1e}, allowed {tolerance:.1e}", relative)
    return Comparison(output_error=relative)


def _compare_gradients(plain: Replayed, candidate: Replayed, exactness: Exactness) -> Comparison:
    compared: list[tuple[str, Tensor, Tensor]] = []
    for name, expected, actual in zip(plain.names, plain.gradients, candidate.gradients, strict=True):
        if expected is None or actual is None:
            if expected is not actual:
                what = "no" if actual is None else "a"
                return Comparison(f"it gives {what} gradient for {name}, unlike the plain path", 0.0, 1.0)
            continue
        if expected.shape != actual.shape:
            was, now = tuple(expected.shape), tuple(actual.shape)
            return Comparison(f"its gradient for {name} has shape {now}, the plain one {was}")
        places, values = _places_and_values(expected)
        own_places, own_values = _places_and_values(actual)
        if (places is None) != (own_places is None) or not (places is None or torch.equal(places, own_places)):
            return Comparison(f"its gradient for {name} holds other entries than the plain one", 0.0, 1.0)
        # The loop may view it; gradients of parameters arrive in the layout of these.
        is_viewed = name.startswith("input ") and expected.layout == torch.strided and expected.is_contiguous()
        if is_viewed and not is_kept(expected, actual):
            return Comparison(f"its gradient for {name} is not contiguous, unlike the plain one")
        compared.append((name, values, own_values))
    if exactness == Exactness.EXACT:
        wrong = [name for name, expected, actual in compared if not same_bits(expected, actual)]
        return Comparison(f"its gradient for {wrong[0]} has other bits", 0.0, math.nan) if wrong else Comparison()
    return _compare_sizes(compared, exactness, plain.coarsest) if compared else Comparison()


def _places_and_values(gradient: Tensor) -> tuple[Any, Tensor]:
    """Return where a sparse gradient has entries, each once, and these; None and all of them of a dense one."""
    if not gradient.is_sparse:
        return None, as_real(gradient)
    summed = gradient.coalesce()  # it has a row for each time that one was looked up
    return summed.indices(), as_real(summed.values())


def _compare_sizes(
    compared: list[tuple[str, Tensor, Tensor]], exactness: Exactness, coarsest: torch.dtype
) -> Comparison:
    tolerances = [Tolerance.of(exactness, coarser(expected.dtype, coarsest)) for _, expected, _ in compared]
    widest = max(tolerances, key=lambda each: each.gradient)
    errors, sizes, products = zip(*(_sizes(expected, actual) for _, expected, actual in compared), strict=True)
    if not all(map(math.isfinite, sizes)):
        return Comparison()  # the plain gradients are not finite: the loop's own fault, and nothing to compare with
    total = math.hypot(*sizes)
    overall = math.hypot(*errors) / total if total > 0 else math.hypot(*errors)
    for (name, _, _), tolerance, error, size in zip(compared, tolerances, errors, sizes, strict=True):
        if not error <= tolerance.gradient * max(size, 0.05 * total):
            off = error / size if size > 0 else math.inf
            problem = f"its gradient for {name} is off by {off:.1e}, allowed {tolerance.gradient:.1e}"
            return Comparison(problem, 0.0, off, tolerance.gradient)
    scale = math.fsum(products) / total**2 if total > 0 else 1.0
    if exactness == Exactness.REORDERED:
        scale = math.sqrt(max(0.0, 2 * scale - 1 + overall**2)) if total > 0 else 1.0  # ‖g_c‖ ÷ ‖g_r‖
    if exactness == Exactness.REORDERED and overall > MOST_REORDERED:
        problem = f"its gradients are off by {overall:.1e}, allowed {MOST_REORDERED:.1e}"
        return Comparison(problem, 0.0, overall, MOST_REORDERED)
    if abs(scale - 1) > widest.scale:
        problem = f"its gradients are {scale:.3f} times as long, allowed 1 ± {widest.scale:.1e}"
        return Comparison(problem, 0.0, overall, widest.gradient)
    return Comparison("", 0.0, overall, widest.gradient)


def _is_finite(tensor: Tensor) -> bool:
    tensor = as_real(tensor)
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _sizes(expected: Tensor, actual: Tensor) -> tuple[float, float, float]:
    """Return the size of the difference and that of `expected`, and their product, piece by piece: double is large."""
    differences, sizes, products = [], [], []
    pieces = (torch.split(tensor.reshape(-1), _PIECE) for tensor in (expected, actual))
    for left, right in zip(*pieces, strict=True):
        a, b = left.double(), right.double()
        differences.append(float(torch.linalg.vector_norm(b - a)))
        sizes.append(float(torch.linalg.vector_norm(a)))
        products.append(float(a @ b))
    return math.hypot(*differences), math.hypot(*sizes), sum(products)


def same_bits(expected: Tensor, actual: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits; NaN equals NaN."""
    expected, actual = as_real(expected), as_real(actual)
    if not expected.is_floating_point():
        return torch.equal(expected, actual)
    return torch.equal(expected.isnan(), actual.isnan()) and torch.equal(expected.nan_to_num(), actual.nan_to_num())


def as_real(tensor: Tensor) -> Tensor:
    """Return the real and imaginary parts of a complex tensor; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def versions(given: list[Any]) -> list[int]:
    """Return how often the tensors among arguments have been written to, of those that count it."""
    return [each._version for each in given if isinstance(each, Tensor) and not each.is_inference()]


def has_written(given: Any, before: list[Any], counted: list[int]) -> bool:
    """Return whether a call has written to its arguments, or has taken or exchanged entries of them.

    Args:
        before: the leaves of the arguments that it has found.
        counted: their versions.
    """
    now = list(leaves(given))
    return len(now) != len(before) or not all(map(operator.is_, now, before)) or versions(before) != counted


def noise_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return normal noise of a tensor's shape, dtype and device; that of a complex one has an imaginary part."""
    drawn = torch.complex64 if tensor.is_complex() else torch.float32
    return torch.randn(tensor.shape, generator=generator, dtype=drawn).to(tensor.device, tensor.dtype)
