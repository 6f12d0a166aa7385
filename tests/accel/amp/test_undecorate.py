"""What `decorate` has put on comes off without a trace."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from accel.amp import decorate, master_params, undecorate
from accel.errors import InvalidArgument
from accel.optim import FusedAdamW
from tests.accel.amp.amp_models import OPTIMIZERS, batches, cnn, loss_of, mlp
from tests.sampling import examples


class Tabled(nn.Module):
    """Has a table in a buffer, a counter in another, a recurrent layer, and a weight in two places."""

    table: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("table", torch.arange(8.0) / 7)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y = self.second(torch.tanh(self.first(x))) + self.table
        out: Tensor = self.norm(self.recurrent(y[:, None])[0])[:, 0, :4]
        return out


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "mlp": (mlp, (8,)),
    "cnn": (cnn, (3, 8, 8)),
    "tabled": (Tabled, (8,)),
}


def train(model: Any, optimizer: Any, data: list[tuple[Tensor, Tensor]]) -> None:
    for x, target in data:
        optimizer.zero_grad()
        loss_of(model(x), target).backward()
        optimizer.step()


def hooks(model: nn.Module, optimizer: Any) -> list[int]:
    """How many hooks there are, of each kind and in each module."""
    owners: list[Any] = [*model.modules(), optimizer]
    return [len(value) for owner in owners for name, value in vars(owner).items() if "hooks" in name]


def everything(model: nn.Module, optimizer: Any) -> list[Any]:
    state = {key: value for key, value in optimizer.state_dict().items()}
    gradients = [p.grad for p in model.parameters()]
    return tree_leaves([list(model.state_dict().items()), state, gradients, hooks(model, optimizer)])


def assert_same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert type(a) is type(b)
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b


@pytest.mark.sample(5)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_on_and_off_leaves_no_trace(model: str, optimizer: str, dtype: torch.dtype, level: str) -> None:
    make, shape = MODELS[model]
    network = make()
    own = OPTIMIZERS[optimizer](network.parameters())
    train(network, own, batches(3, *shape))
    if level == "O3":  # 16-bit weights are all there is: take some that lose nothing
        with torch.no_grad():
            for p in network.parameters():
                p.copy_(p.to(dtype))
            for value in tree_leaves([own.state[p] for p in network.parameters() if "betas" in own.defaults]):
                if isinstance(value, Tensor) and value.dim():
                    value.copy_(value.to(dtype))
    own.zero_grad()
    before = copy.deepcopy(everything(network, own))
    attributes = sorted(vars(own))
    for _ in range(2):
        assert decorate(network, own, level=level, dtype=dtype) == (network, own)
        assert undecorate(network) is network
    assert_same(everything(network, own), before)
    assert sorted(vars(own)) == attributes


@settings(max_examples=examples(15))
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 3)), min_size=1, max_size=5), st.sampled_from(sorted(OPTIMIZERS))
)
def test_a_run_that_changes_its_mind(parts: list[tuple[bool, int]], name: str) -> None:
    """In parts with and without mixed precision: each begins with the bits that the one before has left."""
    model, data = cnn(), batches(16, 3, 8, 8)
    optimizer = OPTIMIZERS[name](model.parameters())
    for is_mixed, steps in parts:
        twin = cnn()
        twin.load_state_dict(model.state_dict())
        other = OPTIMIZERS[name](twin.parameters())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert not any("master" in own for own in optimizer.state.values())
        own, data = data[:steps], data[steps:]
        if is_mixed:
            decorate(model, optimizer, dtype=torch.bfloat16)
            decorate(twin, other, dtype=torch.bfloat16)
        train(model, optimizer, own)
        train(twin, other, own)
        if is_mixed:
            masters = [m.detach().clone() for m in master_params(optimizer)]
            undecorate([model, twin])
            assert all(map(torch.equal, model.parameters(), masters))
        assert all(
            torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True)
        )


def test_a_buffer_that_was_written_to_keeps_what_was_written() -> None:
    model = Tabled()
    decorate(model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.bfloat16)
    model(torch.randn(2, 8))
    undecorate(model)
    assert (float(model.count), model.count.dtype) == (1.0, torch.float32)
    assert torch.equal(model.table, torch.arange(8.0) / 7)


def test_models_that_were_decorated_together() -> None:
    one, two = mlp(), mlp(1)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], 0.1)
    decorate([one, two], optimizer, dtype=torch.bfloat16)
    undecorate(one)
    assert two[0].weight.dtype == torch.float32
    train(nn.Sequential(one, nn.Tanh()), optimizer, batches(1, 8))


def test_gradients_that_wait_for_their_step() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    decorate(model, optimizer, dtype=torch.float16)
    (x, target), *_ = batches(1, 8)
    loss_of(model(x), target).backward()
    with pytest.raises(InvalidArgument, match=r"between two steps. Found: gradients that wait"):
        undecorate(model)
    assert model[0].weight.dtype == torch.float16
    optimizer.step()
    undecorate(model)
    assert model[0].weight.dtype == torch.float32


def test_nothing_is_changed_where_one_of_several_waits() -> None:
    pairs = [decorate(each, torch.optim.SGD(each.parameters(), 0.1), dtype=torch.float16) for each in (mlp(), mlp(1))]
    ready, waiting = (model for model, _ in pairs)
    (x, target), *_ = batches(1, 8)
    loss_of(waiting(x), target).backward()
    with pytest.raises(InvalidArgument, match="between two steps"):
        undecorate([ready, waiting])
    assert ready[0].weight.dtype == torch.float16


def test_accumulated_gradients_without_a_scale_are_kept() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    decorate(model, optimizer, dtype=torch.bfloat16)
    (x, target), *_ = batches(1, 8)
    loss_of(model(x), target).backward()
    half = model[0].weight.grad
    undecorate(model)
    assert half is not None
    assert torch.equal(model[0].weight.grad, half.float())
    optimizer.step()


def test_what_was_not_decorated_is_left_alone() -> None:
    model = mlp()
    assert undecorate(model) is model
    assert undecorate([model]) == [model]


def test_a_model_that_is_let_go_takes_all_with_it() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    decorate(model, optimizer, dtype=torch.bfloat16)
    train(model, optimizer, batches(1, 8))
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


def test_a_copy_is_no_longer_decorated_by_anyone() -> None:
    model = mlp()
    decorate(model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.bfloat16)
    twin = copy.deepcopy(model)
    assert undecorate(twin) is twin
    assert model[0].weight.dtype == torch.bfloat16
    undecorate(model)
    assert model[0].weight.dtype == torch.float32


@pytest.mark.parametrize(("level", "keeps"), [("O2", True), ("O3", False)])
@pytest.mark.parametrize("own", [True, False])
def test_the_optimizer_s_own_option_is_its_own_again(level: str, keeps: bool, own: bool) -> None:
    model = nn.Linear(4, 2)
    extra = nn.Parameter(torch.zeros(3))
    optimizer = FusedAdamW(model.parameters(), 0.01, master_weights=own)
    decorate(model, optimizer, level=level, dtype=torch.bfloat16)
    assert optimizer.param_groups[0]["master_weights"] == keeps
    other = FusedAdamW(model.parameters(), 0.01, master_weights=not keeps)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["master_weights"] == keeps
    optimizer.add_param_group({"params": [extra]})
    undecorate(model)
    assert [group["master_weights"] for group in optimizer.param_groups] == [own, own]
    assert optimizer.defaults["master_weights"] == own


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, FusedAdamW])
def test_a_model_does_not_keep_its_optimizer(make: Any, level: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = make(model.parameters())
    decorate(model, optimizer, level=level, dtype=torch.bfloat16)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_backward_passes_are_no_longer_looked_at(level: str, again: bool) -> None:
    """The look for gradients past the loss scale once went on: each backward pass in float32 was refused."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    decorate(model, optimizer, level=level, dtype=torch.float16)
    train(model, optimizer, batches(1, 8))
    undecorate(model)
    if again:
        decorate(model, optimizer, level=level, dtype=torch.float16, loss_scale=64.0)
    train(model, optimizer, batches(3, 8))


@pytest.mark.parametrize("name", ["Adam", "AdamW fused", "RMSprop", "FusedAdamW"])
def test_moments_follow_the_weights_at_o3(name: str) -> None:
    """Moments of another dtype than their gradients once made the next step raise, on either side."""
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, batches(1, 8))
    decorate(model, optimizer, level="O3", dtype=torch.bfloat16)
    train(model, optimizer, batches(2, 8))
    undecorate(model)
    train(model, optimizer, batches(2, 8))
    moments = [value for own in optimizer.state.values() for entry, value in own.items() if entry != "step"]
    assert {value.dtype for value in moments} == {torch.float32}
