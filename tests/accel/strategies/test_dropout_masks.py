"""With the strategy on, dropout trains bit for bit as without it, wherever it stands; off, it leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import accel
from accel.kernels import bernoulli
from accel.strategies import dropout_masks
from accel.strategies.base import NothingHelps
from accel.strategies.dropout_masks import DropoutMasks, drops

pytestmark = pytest.mark.skipif(bool(bernoulli.why_not()), reason=f"not applicable here: {bernoulli.why_not()}")


def run_of(model: nn.Module, device: str = "cpu") -> Any:
    return SimpleNamespace(device=torch.device(device), model=model)


@pytest.fixture
def drawn_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of what the kernel drew."""
    shapes: list[tuple[int, ...]] = []
    own = bernoulli._drawn

    def noting(tensor: Tensor, *arguments: Any) -> bool:
        shapes.append(tuple(tensor.shape))
        return own(tensor, *arguments)

    monkeypatch.setattr(bernoulli, "_drawn", noting)
    yield shapes
    dropout_masks._KERNEL.wrong = ""


class Attention(nn.Module):
    """Attention that drops within torch's operator."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.1
        self.project = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).movedim(-3, 0).transpose(-2, -3)
        p = self.dropout if self.training else 0.0
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(-2)


class Recomputed(nn.Module):
    """Layers whose forward pass is made again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layers, x, use_reentrant=False)


class First(nn.Module):
    """The first of what an LSTM returns."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x)[0]
        return output


MODELS: dict[str, Callable[[], nn.Module]] = {
    "modules": lambda: nn.Sequential(
        nn.Linear(16, 64), nn.Dropout(0.1), nn.ReLU(), nn.AlphaDropout(0.2), nn.Linear(64, 4)
    ),
    "in place": lambda: nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5, inplace=True), nn.Linear(64, 4)),
    "attention": Attention,
    "encoder": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True),
    "recomputed": Recomputed,
    "lstm": First,
}


def trained(make: Callable[[], nn.Module], steps: int = 4) -> tuple[list[Tensor], Tensor]:
    """Train a few steps; return the weights and the next random numbers."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(32, 20, 16)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], torch.rand(4)


@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_bit_for_bit(name: str, drawn_here: list[tuple[int, ...]]) -> None:
    strategy, run = DropoutMasks(), run_of(MODELS[name]())
    assert strategy.refusal(run) == ""
    plain, plain_next = trained(MODELS[name])
    assert not drawn_here
    strategy.enable(run, None)
    try:
        own, own_next = trained(MODELS[name])
    finally:
        strategy.disable(run)
    assert drawn_here
    assert all(torch.equal(a, b) for a, b in zip(plain, own, strict=True))
    assert torch.equal(plain_next, own_next)
    assert strategy.failure(run) == ""


def test_masks_follow_the_layout_of_memory(drawn_here: list[tuple[int, ...]]) -> None:
    images = torch.randn(4, 8, 16, 16).to(memory_format=torch.channels_last)
    torch.manual_seed(0)
    plain = functional.dropout(images, 0.3)
    strategy, run = DropoutMasks(), run_of(nn.Dropout(0.3))
    strategy.enable(run, None)
    torch.manual_seed(0)
    own = functional.dropout(images, 0.3)
    strategy.disable(run)
    assert torch.equal(plain, own)
    assert drawn_here == [(4, 8, 16, 16)]


def test_it_is_on_for_as_long_as_one_run_uses_it(drawn_here: list[tuple[int, ...]]) -> None:
    run = run_of(nn.Dropout())
    first, second = DropoutMasks(), DropoutMasks()
    for number, (act, strategy) in enumerate(
        [(DropoutMasks.enable, first), (DropoutMasks.enable, second), (DropoutMasks.disable, first)], 1
    ):
        act(strategy, run, None) if act is DropoutMasks.enable else strategy.disable(run)
        torch.empty(5000).bernoulli_(0.5)
        assert len(drawn_here) == number
    second.disable(run)
    second.disable(run)
    torch.empty(5000).bernoulli_(0.5)
    assert len(drawn_here) == 3


def test_a_compiler_that_leaves_a_model_eager_does_not_trace_the_drawing(drawn_here: list[tuple[int, ...]]) -> None:
    traced: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        traced.append(graph.code)
        return graph.forward

    model = nn.LSTM(16, 16, 2, dropout=0.2)  # Dynamo leaves it to eager torch, but looks into Python that this calls
    strategy, run = DropoutMasks(), run_of(model)
    strategy.enable(run, None)
    try:
        torch.compile(model, backend=backend)(torch.randn(10, 32, 16))
    finally:
        strategy.disable(run)
        torch._dynamo.reset()
    assert drawn_here
    assert traced == []


@pytest.mark.usefixtures("drawn_here")
def test_a_wrong_draw_is_noticed_and_torch_draws_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout_masks, "_COMPARED_EVERY", 2)
    strategy, run = DropoutMasks(), run_of(nn.Dropout())
    strategy.enable(run, None)
    try:
        own = bernoulli._drawn
        monkeypatch.setattr(bernoulli, "_drawn", lambda tensor, p, generator: own(tensor, 0.9 * p, generator))
        for _ in range(2):
            torch.empty(5000).bernoulli_(0.5)
        assert strategy.failure(run) == "it drew other numbers than torch for (5000,) torch.float32"
        torch.manual_seed(1)
        after = torch.empty(5000).bernoulli_(0.5)
    finally:
        strategy.disable(run)
    torch.manual_seed(1)
    assert torch.equal(after, torch.empty(5000).bernoulli_(0.5))


def test_where_torch_draws_otherwise_it_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bernoulli, "why_not", lambda: "torch draws torch.float32 otherwise on this processor")
    with pytest.raises(NothingHelps, match="otherwise on this processor"):
        DropoutMasks().enable(run_of(nn.Dropout()), None)


class OwnDropout(nn.Module):
    def __init__(self, drop_prob: Any) -> None:
        super().__init__()
        self.drop_prob = drop_prob


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Dropout(0.1), True),
        (nn.Dropout2d(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.Dropout(1.0), False),
        (nn.Linear(2, 2), False),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.1), True),
        (OwnDropout(0.1), True),
        (OwnDropout(None), False),
        (OwnDropout(0), False),
    ],
    ids=str,
)
def test_which_modules_drop(module: nn.Module, expected: bool) -> None:
    assert drops(module) is expected


def test_when_it_does_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DropoutMasks().refusal(run_of(nn.Linear(2, 2))) == "the model has no dropout"
    assert DropoutMasks().refusal(run_of(nn.Dropout(), "cuda")) == "masks are drawn on cuda, not on the CPU"
    monkeypatch.setattr(bernoulli, "compiler", lambda: ())
    assert DropoutMasks().refusal(run_of(nn.Dropout())).startswith("there is no C compiler")


def test_a_run_that_keeps_it_trains_as_the_plain_loop() -> None:
    def train(optimized: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(16, 256), nn.Dropout(0.2), nn.Linear(256, 1))
        loader: Any = [torch.randn(64, 16) for _ in range(6)]
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        if optimized:
            plan = accel.Plan(
                fingerprint=accel.search.plan.fingerprint(model), model="Sequential", strategies={"dropout_masks": None}
            )
            model, loader, optimizer = accel.optimize(model, loader, optimizer, plan=plan, allow="exact")
        for _ in range(5):
            for x in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        if optimized:
            report = accel.explain(model)
            assert [row.name for row in report.rows if row.status == "kept"] == ["dropout_masks"]
            accel.undo(model)
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))
