"""The guard knows a call no better than the coarsest format in it: a loop's own autocast, half weights, TF32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from accel.guard import comparison, guard, rounding
from accel.guard.guard import Comparison, Recording, Replayed
from accel.guard.rounding import FINEST, Rounding
from accel.precision import fp32_precision
from accel.strategies.base import Exactness
from tests.accel.guard_replays import replayed_both_ways

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALVES = [torch.bfloat16, torch.float16]


class Deep(nn.Module):
    """Convolutions with batch norm, and the loss in float32, as transformers' models return it."""

    def __init__(self, depth: int = 8, within: torch.dtype | None = None) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
        for _ in range(depth):
            layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
        self.layers = nn.Sequential(*layers, nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(16, 5)
        self.within = within

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        with self._own_autocast():
            logits = self.head(self.layers(x.to(self.head.weight.dtype)))
        return {"loss": nn.functional.cross_entropy(logits.float(), target), "logits": logits.float()}

    def _own_autocast(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.within is None else torch.autocast("cpu", self.within)


def autocast_by_loop(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    return Deep(), torch.autocast("cpu", dtype)


def autocast_by_model(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """As Accelerate does it."""
    return Deep(within=dtype), contextlib.nullcontext()


def half_weights(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    return Deep().to(dtype), contextlib.nullcontext()


def recorded(model: nn.Module, around: Any) -> Recording:
    """Record one step of 16 images, small ones: float16 is slow on a CPU without instructions for it."""
    given = torch.randn(16, 3, 8, 8), torch.randint(0, 5, (16,))
    with around:
        recording = guard.record(model, CPU, given, {})
        outputs = model(*given)
    recording.listen(outputs)
    outputs["loss"].backward()
    return recording


def checked(make: Any, dtype: torch.dtype, wrap: Callable[[Any], Any]) -> Comparison:
    torch.manual_seed(0)
    model, around = make(dtype)
    return replayed_both_ways(model, wrap, recorded(model, around))


def last(call: Any) -> Any:
    return lambda x, target: call(x.to(memory_format=torch.channels_last), target)


class Scale(torch.autograd.Function):
    """Leave the numbers, and make their gradient longer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.factor, None


def scaled(factor: float) -> Callable[[Any], Any]:
    def wrap(call: Any) -> Any:
        return lambda *given: {name: Scale.apply(value, factor) for name, value in last(call)(*given).items()}

    return wrap


def without_a_gradient(call: Any) -> Any:
    def run(*given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            layer = call.layers[0]
            patch.setattr(layer, "forward", lambda x: nn.Conv2d.forward(layer, x).detach())
            return last(call)(*given)

    return run


def changed_loss(call: Any) -> Any:
    return lambda *given: {name: value * 1.2 for name, value in call(*given).items()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("make", [autocast_by_loop, autocast_by_model, half_weights])
def test_another_order_of_sums_passes_where_layers_round_to_sixteen_bits(make: Any, dtype: torch.dtype) -> None:
    """Loss and gradients are in float32, and were held to its tolerance: off by 1.3e-1, allowed 4.4e-2."""
    finding = checked(make, dtype, last)
    assert (finding.problem, finding.unsure) == ("", "")
    assert finding.gradient_error > 0


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("make", [autocast_by_loop, autocast_by_model, half_weights])
@pytest.mark.parametrize(
    "fault", [*map(scaled, (1.05, 0.95, -1.0, 0.0)), without_a_gradient, changed_loss], ids=lambda fault: fault.__name__
)
def test_what_is_wrong_is_found_there_too(fault: Any, make: Any, dtype: torch.dtype) -> None:
    assert checked(make, dtype, fault).problem


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounding_that_only_the_candidate_does_is_no_other_order(dtype: torch.dtype) -> None:
    def half(call: Any) -> Any:
        def run(*given: Any) -> Any:
            with torch.autocast("cpu", dtype):
                return call(*given)

        return run

    assert "off by" in checked(lambda _: (Deep(), contextlib.nullcontext()), dtype, half).problem


@pytest.mark.parametrize("depth", [16])
def test_many_layers_shorten_no_gradient_by_their_rounding(depth: int) -> None:
    """What each path errs by itself took 7 % off the projection of one on the other."""
    finding = checked(lambda dtype: (Deep(depth), torch.autocast("cpu", dtype)), torch.bfloat16, last)
    assert finding.problem == ""
    longer = checked(lambda dtype: (Deep(depth), torch.autocast("cpu", dtype)), torch.bfloat16, scaled(1.05))
    assert "times as long" in longer.problem


@given(st.integers(0, 10_000), st.floats(0.0, 0.2), st.sampled_from([0.9, 0.95, 1.0, 1.05, 1.1]))
def test_a_length_is_told_through_noise_of_both(seed: int, noise: float, factor: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    true, one, other = torch.randn(3, 20_000, generator=generator)
    plain = Replayed([], [true + noise * one], ["weight"], coarsest=torch.bfloat16)
    candidate = Replayed([], [factor * (true + noise * other)], ["weight"])
    plain.outputs = candidate.outputs = [torch.ones(1)]
    problem = guard.compare(plain, candidate, Exactness.REORDERED).problem
    assert ("times as long" in problem) == (factor != 1.0), problem


def looked_at(model: nn.Module, x: Tensor, autocast: tuple[bool, torch.dtype] = (False, torch.bfloat16)) -> Rounding:
    return rounding.rounding_of(model, autocast, [model(x)])


class Functional(nn.Module):
    """A convolution without a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(2, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv1d(x, self.kernel)


class Frozen(nn.Module):
    """A half backbone without gradients, under a head in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(3, 4).bfloat16().requires_grad_(False), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.backbone(x.bfloat16())
        return self.head(hidden.float())


def test_what_a_call_computes_with_is_seen() -> None:
    row, image = torch.randn(2, 3), torch.randn(2, 1, 8)
    assert looked_at(nn.Linear(3, 2), row) == Rounding(FINEST, False)
    assert looked_at(nn.Linear(3, 2), row, (True, torch.float16)) == Rounding(torch.float16, False)
    assert looked_at(nn.Linear(3, 2), row, (False, torch.float16)) == Rounding(FINEST, False)
    assert looked_at(nn.Linear(3, 2).double(), row.double()) == Rounding(FINEST, False)
    assert looked_at(Frozen(), row) == Rounding(torch.bfloat16, False)
    assert looked_at(Functional(), image) == Rounding(FINEST, True)
    assert looked_at(nn.Sequential(nn.Flatten(), nn.Linear(8, 2)), image) == Rounding(FINEST, False)
    assert rounding.rounding_of(nn.LSTM(3, 4), (False, torch.float16), []).convolves
    assert rounding.rounding_of(nn.Conv3d(1, 1, 3), (False, torch.float16), []).convolves


def test_tf32_counts_as_the_format_with_its_mantissa_where_it_is_used() -> None:
    linear, convolving = Rounding(FINEST, False), Rounding(FINEST, True)
    for products, convolutions, of_linear, of_convolving in (
        ("ieee", "ieee", FINEST, FINEST),
        ("ieee", "tf32", FINEST, torch.float16),
        ("tf32", "ieee", torch.float16, torch.float16),
    ):
        with fp32_precision(products, convolutions):  # type: ignore[arg-type]
            assert (linear.now("cuda"), convolving.now("cuda")) == (of_linear, of_convolving)
            assert (linear.now("cpu"), convolving.now("cpu")) == (FINEST, FINEST)
            assert Rounding(torch.bfloat16, True).now("cuda") == torch.bfloat16


@pytest.mark.parametrize(
    ("seen", "products", "changes"),
    [
        (None, "ieee", True),
        (Rounding(FINEST, True), "ieee", True),
        (Rounding(FINEST, False), "ieee", False),  # BERT has nothing that would use it
        (Rounding(torch.float16, True), "ieee", False),  # cuDNN computes in float16
        (Rounding(torch.bfloat16, True), "ieee", False),
    ],
)
def test_convolutions_leave_tf32_only_where_something_is_finer_for_it(seen: Any, products: Any, changes: bool) -> None:
    """cuDNN makes plans for each precision: 1 to 2 s for a ResNet, and graphs captured so are lost."""

    def now() -> tuple[str, str]:
        backends: Any = torch.backends
        return backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision

    with fp32_precision(products, "tf32"):
        before = now()
        for device, exactness in ((CPU, Exactness.REORDERED), (CUDA, Exactness.REDUCED), (CUDA, Exactness.EXACT)):
            with rounding.without_tf32(seen, device, exactness, compiles=False) as changed:
                assert changed is None
                assert now() == before
        with rounding.without_tf32(seen, CUDA, Exactness.REORDERED, compiles=True) as changed:
            assert (changed is not None) == changes
            assert now()[0] == before[0]
            assert (now()[1] != "tf32") == changes
        assert now() == before
    with fp32_precision("ieee"), rounding.without_tf32(seen, CUDA, Exactness.REORDERED, compiles=False) as changed:
        assert changed is None


@pytest.mark.parametrize("convolves", [False, True])
@pytest.mark.parametrize("compiles", [False, True])
def test_products_that_the_user_has_set_to_tf32_are_fine_ones_in_a_comparison_unless_graphs_look_at_them(
    compiles: bool, convolves: bool
) -> None:
    """With `torch.set_float32_matmul_precision("high")` an output that is 5 % off passed for rounding."""
    seen = Rounding(FINEST, convolves)
    with fp32_precision("tf32"):
        assert seen.now("cuda") == torch.float16
        with rounding.without_tf32(seen, CUDA, Exactness.REORDERED, compiles=compiles):
            assert seen.now("cuda") == (torch.float16 if compiles else FINEST)


class Named(torch.autograd.Function):
    """Keeps an attribute with a name of the graph's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.name = "mine"
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient


def test_only_what_a_model_computes_itself_makes_it_coarse() -> None:
    """A head in float32 on the features of a backbone in bfloat16: a candidate that is 10 % off passed."""
    head = nn.Linear(16, 5)
    backbone = nn.Conv2d(3, 16, 3)
    with torch.autocast("cpu", torch.bfloat16):
        features = backbone(torch.randn(2, 3, 8, 8)).mean((2, 3))
    given = features.float()
    out = Named.apply(head(given))
    whole = rounding.rounding_of(head, (False, torch.float32), [out])
    assert (whole.coarsest, whole.convolves) == (torch.bfloat16, True)
    own = rounding.rounding_of(head, (False, torch.float32), [out], {given.grad_fn})
    assert (own.coarsest, own.convolves) == (FINEST, False)


def test_gradients_of_the_right_length_in_another_direction_are_found_in_sixteen_bits() -> None:
    """As of a backward pass whose masks of dropout are others than the forward pass's."""
    torch.manual_seed(0)
    right = torch.randn(1000)
    other = torch.randn(1000)
    other -= right * (other @ right) / (right @ right)
    other *= right.norm() / other.norm()
    for sine, problem in ((0.3, False), (0.47, True)):
        turned = right * (1 - sine**2 / 2) + other * sine
        turned *= right.norm() / turned.norm()
        finding = comparison._compare_sizes([("w", right, turned)], Exactness.REORDERED, torch.bfloat16)
        assert bool(finding.problem) == problem, finding


def test_in_evaluation_mode_the_format_of_the_training_call_counts() -> None:
    """Without gradients no graph tells of an autocast within the model."""
    torch.manual_seed(0)
    model = Deep(within=torch.bfloat16)
    recording = recorded(model, contextlib.nullcontext())
    assert guard.replay(model, model, recording).coarsest == torch.bfloat16
    assert guard.replay(model, model, recording, evaluates=True).coarsest == torch.bfloat16


def test_a_comparison_of_things_made_in_float32_is_as_fine_as_before() -> None:
    plain = Replayed([torch.ones(4)], [torch.ones(4)], ["weight"])
    off = Replayed([torch.ones(4) * (1 + 1e-3)], [torch.ones(4)], ["weight"])
    assert "off by" in guard.compare(plain, off, Exactness.REORDERED).problem
    plain.coarsest = torch.bfloat16
    assert guard.compare(plain, off, Exactness.REORDERED).problem == ""
    assert guard.compare(plain, off, Exactness.EXACT).problem == "its output has other bits"
