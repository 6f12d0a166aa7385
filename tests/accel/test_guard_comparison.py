"""What the guard compares: layouts, arguments, complex and sparse numbers, large tensors, calls as they were made."""

from __future__ import annotations

import copy
import math
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel.guard import comparison, guard, update_guard
from accel.guard.guard import Comparison, Replayed, Tolerance
from accel.profiler import trees
from accel.run.layouts import in_order, is_kept, order
from accel.strategies.base import Exactness
from tests.accel.guard_replays import CPU, mean_square, recorded, replayed_both_ways
from tests.accel.loops import Longer
from tests.sampling import examples

EACH = pytest.mark.parametrize("exactness", Exactness)


def same(call: Any) -> Any:
    return call


# -- layouts -----------------------------------------------------------------------------------------------------------


class Features(nn.Module):
    """A convolution whose features are kept as an attribute, in a list or nowhere, and returned flat or as a mean."""

    def __init__(self, keeps: str, is_flat: bool) -> None:
        super().__init__()
        self.layer, self.keeps, self.is_flat = nn.Conv2d(3, 4, 3), keeps, is_flat
        self.features: Any = None
        self._features: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.keeps == "private":
            self._features = {"all": [h]}
        elif self.keeps:
            self.features = [h] if self.keeps == "list" else h
        return h.flatten(2) if self.is_flat else h.mean((2, 3))


@pytest.mark.parametrize(
    ("keeps", "is_flat", "needs_gradient", "problem"),
    [
        ("", False, False, ""),
        ("attribute", False, False, "what it keeps in features has other strides than in the plain path"),
        ("list", False, False, "what it keeps in features has other strides than in the plain path"),
        ("private", False, False, "what it keeps in _features has other strides than in the plain path"),
        ("", True, False, "its output has the strides"),
        ("", False, True, "its gradient for input 0 is not contiguous, unlike the plain one"),
    ],
)
def test_what_the_loop_could_no_longer_view_is_a_problem(
    keeps: str, is_flat: bool, needs_gradient: bool, problem: str
) -> None:
    model, x = Features(keeps, is_flat), torch.randn(2, 3, 6, 5).requires_grad_(needs_gradient)

    def in_channels_last(call: Any) -> Any:
        return lambda x: call(x.to(memory_format=torch.channels_last))

    found = replayed_both_ways(model, in_channels_last, recorded(model, x)).problem
    assert found.startswith(problem) and bool(found) == bool(problem)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.randoms())
def test_any_tensor_can_be_laid_out_in_any_order(shape: list[int], chance: Any) -> None:
    def shuffled() -> list[int]:
        return chance.sample(range(len(shape)), len(shape))  # type: ignore[no-any-return]

    values = torch.arange(torch.Size(shape).numel()).view(shape)
    turned = shuffled()
    tensor = values.permute(turned).contiguous().permute(sorted(range(len(shape)), key=turned.__getitem__))
    places = [place for place in shuffled() if shape[place] > 1]
    laid_out = in_order(tensor, places)
    assert torch.equal(laid_out, values)
    assert list(order(laid_out)) == places
    assert in_order(laid_out, places) is laid_out
    assert is_kept(tensor, laid_out) == (order(tensor) == order(laid_out))
    if len(shape) > 2:
        assert in_order(tensor).is_contiguous()


def test_what_has_no_strides_is_left_alone() -> None:
    sparse = torch.eye(3).to_sparse()
    assert in_order(sparse) is sparse
    assert is_kept(sparse, sparse)
    expanded = torch.ones(3, 1, 2).expand(3, 4, 2)
    assert in_order(expanded) is expanded
    assert is_kept(expanded, expanded.clone())


# -- arguments ---------------------------------------------------------------------------------------------------------


@dataclass
class Log:
    losses: list[float] = field(default_factory=list)
    scale: Tensor = field(default_factory=lambda: torch.ones(1))


@dataclass(frozen=True)
class Frozen:
    losses: list[float] = field(default_factory=list)


class Pair(NamedTuple):
    losses: list[float]
    calls: int


class Dict(dict[str, list[float]]):
    """A dict of a class of its own."""


class List(list[float]):
    """A list that is made otherwise."""

    def __init__(self, first: float) -> None:
        super().__init__([first])


LOGS: dict[str, tuple[Any, Callable[[Any, float], Any]]] = {
    "defaultdict": (defaultdict(list), lambda log, loss: log["loss"].append(loss)),
    "ordered dict": (OrderedDict(loss=[]), lambda log, loss: log["loss"].append(loss)),
    "dict of its own class": (Dict(loss=[]), lambda log, loss: log["loss"].append(loss)),
    "list": ([0.0], lambda log, loss: log.append(loss)),
    "list of its own class": (List(0.0), lambda log, loss: log.append(loss)),
    "user's dict": (UserDict(loss=[]), lambda log, loss: log["loss"].append(loss)),
    "counter": (Counter({"calls": 1}), lambda log, loss: log.update([f"{log['calls']}"])),
    "deque": (deque([0.0]), lambda log, loss: log.append(loss)),
    "deque of lists": (deque([[0.0]]), lambda log, loss: log[0].append(loss)),
    "set": ({"a"}, lambda log, loss: log.add(len(log))),
    "dataclass": (Log(), lambda log, loss: log.losses.append(loss)),
    "dataclass that counts": (Log(), lambda log, loss: setattr(log, "losses", [*log.losses, loss])),
    "frozen dataclass": (Frozen(), lambda log, loss: log.losses.append(loss)),
    "named tuple": (Pair([], 1), lambda log, loss: log.losses.append(loss)),
    "list in a tuple": (([], 1), lambda log, loss: log[0].append(loss)),
}


class Logs(nn.Module):
    """Writes to the log that it is called with."""

    def __init__(self, write: Callable[[Any, float], Any]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(2, 2), write

    def forward(self, x: Tensor, log: Any) -> Tensor:
        outputs: Tensor = self.layer(x)
        self.write(log, float(outputs.detach().mean()))
        return outputs


@pytest.mark.parametrize("name", LOGS)
def test_replays_leave_the_loop_s_containers_alone(name: str) -> None:
    log, write = copy.deepcopy(LOGS[name])
    model, x = Logs(write), torch.ones(1, 2)
    recording = recorded(model, x, log)
    before = repr(log)
    assert replayed_both_ways(model, same, recording).problem == ""
    assert repr(log) == before
    assert type(recording.args[1]) is type(log)


def test_what_can_not_be_copied_is_passed_as_it_is() -> None:
    class Refuses(dict[str, int]):
        def __copy__(self) -> Any:
            raise TypeError("not to be copied")

    given = Refuses(a=1), UserList([1]), torch.Size([2, 3]), object(), nn.Linear(2, 2), Log
    assert all(copied is own for copied, own in zip(trees.copied(given), given, strict=True))


# -- the flags of the call: a loop may freeze parameters, or evaluate, before the step ends ----------------------------


def checked_later(model: nn.Module, at_boundary: Callable[[], object], wrap: Callable[[Any], Any]) -> Comparison:
    """Record a call, change flags, and compare the plain call with a wrapped one."""
    torch.manual_seed(0)
    recording = recorded(model, torch.randn(8, 3), loss=mean_square)
    at_boundary()
    return replayed_both_ways(model, wrap, recording)


def test_gradients_of_a_model_that_is_frozen_after_its_call_are_compared() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))

    def longer(call: Any) -> Any:
        return lambda x: Longer.apply(call(x))  # type: ignore[no-untyped-call]

    assert "off by 5.0e-02" in checked_later(model, lambda: model.requires_grad_(False), longer).problem
    assert not any(p.requires_grad for p in model.parameters())


def test_parameters_that_are_thawed_after_the_call_have_no_gradient_to_compare() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    recording = guard.record(model, CPU, (torch.randn(8, 3),), {})
    model.requires_grad_(True)
    assert guard.replay(model, model, recording).names == ["2.weight", "2.bias"]
    assert all(p.requires_grad for p in model.parameters())


def test_the_training_path_is_compared_though_the_step_ends_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def wrong(call: Any) -> Any:
        return lambda x: call(x) * (1.5 if call.training else 1.0)

    assert "output is off" in checked_later(model, model.eval, wrong).problem
    assert not any(module.training for module in model.modules())


def test_flags_are_put_back_when_a_call_fails() -> None:
    model = nn.Linear(3, 1)
    recording = guard.record(model, CPU, (torch.randn(8, 3),), {})
    model.eval().requires_grad_(False)

    def failing(x: Tensor) -> Tensor:
        assert model.training and model.weight.requires_grad
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        guard.replay(model, failing, recording)
    assert not model.training
    assert not model.weight.requires_grad


def test_what_a_call_freezes_stays_frozen_in_its_replay() -> None:
    class Freezes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.eval()
            return super().forward(x)

    model = Freezes(3, 1)
    recording = guard.record(model, CPU, (torch.randn(8, 3),), {})
    guard.replay(model, model, recording)
    assert model.training  # as before the replay
    model(torch.randn(8, 3))
    guard.replay(model, model, recording)
    assert not model.training


# -- complex numbers, by both of their parts ---------------------------------------------------------------------------

SIZE = 256
Spectrally = Callable[[Any], Callable[[Tensor], Tensor]]


class Spectral(nn.Module):
    """One complex layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.weight.dtype) @ self.weight


class Conjugated(torch.autograd.Function):
    """Passes values on, and the conjugate of their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.conj()


def spectral(wrap: Spectrally, exactness: Exactness = Exactness.REORDERED, *, trains: bool = True) -> Comparison:
    torch.manual_seed(0)
    model = Spectral()
    recording = recorded(model, torch.randn(16, SIZE), loss=mean_square if trains else None)
    return replayed_both_ways(model, wrap, recording, exactness)


def reordered(model: Spectral) -> Callable[[Tensor], Tensor]:
    columns = torch.randperm(SIZE)
    return lambda x: x[:, columns].to(model.weight.dtype) @ model.weight[columns]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("wrap", "exactness", "problem"),
    [
        (reordered, Exactness.REORDERED, ""),
        (reordered, Exactness.EXACT, "has other bits"),
        (lambda m: lambda x: (x.to(m.weight.dtype) @ m.weight.conj()).conj(), Exactness.REORDERED, ""),
        (same, Exactness.EXACT, ""),
        (
            lambda model: lambda x: torch.complex(model(x).real, 1.01 * model(x).imag),
            Exactness.REORDERED,
            "its output is off by",
        ),
        (
            lambda model: lambda x: model(x) * complex(1, 1e39),
            Exactness.REORDERED,
            "not finite, unlike the plain one",
        ),
    ],
)
def test_complex_outputs_are_compared_without_a_warning(wrap: Spectrally, exactness: Exactness, problem: str) -> None:
    finding = spectral(wrap, exactness)
    assert problem in finding.problem and bool(problem) == bool(finding.problem)
    assert 0 <= finding.output_error < 1e-4 or problem


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("trains", [True, False])
def test_a_wrong_imaginary_gradient_is_found(trains: bool) -> None:
    def wrong(model: Spectral) -> Callable[[Tensor], Tensor]:
        return lambda x: x.to(model.weight.dtype) @ Conjugated.apply(model.weight)  # type: ignore[no-untyped-call]

    assert "its gradient for weight is off by" in spectral(wrong, trains=trains).problem
    assert "its gradient for weight has other bits" in spectral(wrong, Exactness.EXACT, trains=trains).problem


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_wrong_imaginary_update_is_found(has_gradient: bool) -> None:
    torch.manual_seed(0)
    model = Spectral()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if has_gradient:
        mean_square(model(torch.randn(16, SIZE))).backward()
    start, plain = update_guard.start_of(optimizer), update_guard.updated(optimizer)

    def compared(change: Callable[[Tensor], Tensor]) -> str:
        candidate = [before + change(after - before) for before, after in zip(start, plain, strict=True)]
        return update_guard.compare(plain, candidate, start, Exactness.REORDERED).problem

    assert compared(lambda update: update * (1 + 1e-5)) == ""
    assert "its update is off by" in compared(lambda update: update.conj().resolve_conj())


@EACH
def test_a_complex_dtype_is_as_precise_as_its_parts(exactness: Exactness) -> None:
    for dtype, part in ((torch.complex64, torch.float32), (torch.complex128, torch.float64)):
        assert Tolerance.of(exactness, dtype) == Tolerance.of(exactness, part)


# -- gradients: of `nn.Embedding(sparse=True)` by what they hold, and each by its dtype --------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.words(x))


def of_other_rows(model: Words) -> Any:
    def run(x: Tensor) -> Any:
        found, other = model.words(x), model.words(x + 1)
        return model.head(found.detach() + (other - other.detach()))

    return run


@EACH
@pytest.mark.parametrize(
    ("wrap", "problem"),
    [
        (same, ""),
        (lambda model: lambda x: model.head(model.words(x) * 2 - model.words(x).detach()), "its gradient"),
        (of_other_rows, "gradient for words.weight"),
        # An optimizer treats the two otherwise: a sparse one leaves the other rows' states as they are.
        (
            lambda model: lambda x: model.head(nn.functional.embedding(x, model.words.weight)),
            "gradient for words.weight",
        ),
    ],
    ids=["plain", "long", "of other rows", "dense"],
)
def test_sparse_gradients_are_compared_by_what_they_hold(
    wrap: Callable[[Any], Any], problem: str, exactness: Exactness
) -> None:
    torch.manual_seed(0)
    model = Words()
    recording = recorded(model, torch.tensor([1, 1, 2, 7]), loss=mean_square)
    finding = replayed_both_ways(model, wrap, recording, exactness)
    assert problem in finding.problem and (bool(finding.problem), finding.unsure) == (bool(problem), "")


@pytest.mark.parametrize("wide_first", [True, False])
@pytest.mark.parametrize("wrong", [torch.float32, torch.bfloat16])
def test_each_gradient_has_the_tolerance_of_its_dtype(wrong: torch.dtype, wide_first: bool) -> None:
    dtypes = [torch.float32, torch.bfloat16] if wide_first else [torch.bfloat16, torch.float32]
    torch.manual_seed(0)
    plain = [torch.randn(50).to(dtype) for dtype in dtypes]

    def spoilt(gradient: Tensor) -> Tensor:
        noise = torch.randn(50)
        noise -= noise @ gradient.float() / gradient.float().square().sum() * gradient.float()
        return gradient + (0.2 * noise).to(gradient.dtype)  # 4e-2 is allowed in float32, a half in bfloat16

    other = [spoilt(each) if each.dtype == wrong else each for each in plain]
    replayed, candidate = (Replayed([], gradients, ["a", "b"]) for gradients in (plain, other))
    sizes = comparison._compare_gradients(replayed, candidate, Exactness.REORDERED)
    assert bool(sizes.problem) == (wrong == torch.float32)


# -- large tensors, a piece at a time ----------------------------------------------------------------------------------


class Doubles(TorchDispatchMode):
    """Notes how large the double tensors are that are made in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float64:
            self.most = max(self.most, result.numel())
        return result


def compared(
    outputs: list[Tensor], gradients: list[Tensor], other_outputs: list[Tensor], others: list[Tensor]
) -> Comparison:
    names = [f"weight {i}" for i in range(len(gradients))]
    plain, candidate = Replayed(outputs, [*gradients], names), Replayed(other_outputs, [*others], names)
    return guard.compare(plain, candidate, Exactness.REORDERED)


def test_large_tensors_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_PIECE", 1000)
    torch.manual_seed(0)
    output, gradient = torch.randn(70, 100), torch.randn(4, 30, 5, 20).to(memory_format=torch.channels_last)
    off = gradient * (1 + 1e-3 * torch.randn_like(gradient))
    with Doubles() as doubles:
        finding = compared([output], [gradient], [output + 1e-5], [off.contiguous()])
    assert 0 < doubles.most <= 1000
    assert finding.problem == ""
    assert math.isclose(finding.output_error, 1e-5, rel_tol=0.05)
    expected = float((off.double() - gradient.double()).norm() / gradient.double().norm())
    assert math.isclose(finding.gradient_error, expected, rel_tol=1e-6)


def test_a_fault_in_the_last_piece_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_PIECE", 1000)
    torch.manual_seed(0)
    gradient, output = torch.randn(3500), torch.ones(2)
    wrong = gradient.clone()
    wrong[3200:] = 0
    assert compared([], [gradient], [], [wrong]).unsure  # no outputs
    assert "weight 0 is off" in compared([output], [gradient], [output], [wrong]).problem


def test_numbers_that_are_not_finite_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_PIECE", 2)
    good, endless, output = torch.ones(4), torch.tensor([math.inf, 1.0, -math.inf, 1.0]), torch.ones(2)
    assert compared([output], [endless, good], [output], [endless, good]).problem == ""
    assert "weight 0 is off" in compared([output], [good, good], [output], [endless, good]).problem
