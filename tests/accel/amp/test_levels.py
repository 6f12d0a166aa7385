"""What each level does to a model: its weights, its border, its copies."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.amp import decorate
from accel.amp.border import current
from accel.errors import InvalidArgument
from tests.accel.amp.amp_models import cnn, mlp

HALVES = (torch.float16, torch.bfloat16)
Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Parts:
    image: Tensor
    number: int


class Structured(nn.Module):
    """Takes and returns structures; notes the dtypes that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, x: Any, *, more: Any = None) -> Any:
        self.seen = [x["image"].image.dtype, x["label"].dtype, more[0].dtype]
        y = self.linear(x["image"].image)
        return OrderedDict(a=Pair(y, x["label"]), b=Parts(y * 2, 3), c=None, d="text")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_o2_keeps_batch_norm_in_float32(dtype: torch.dtype) -> None:
    model = cnn()
    given = model
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), 0.1), dtype=dtype)
    assert model is given
    assert [model[0].weight.dtype, model[1].weight.dtype, model[1].running_mean.dtype, model[5].bias.dtype] == [
        *(dtype, torch.float32, torch.float32, dtype)
    ]
    output = model(torch.randn(2, 3, 8, 8))
    assert output.dtype == torch.float32
    output.sum().backward()
    optimizer.step()
    assert model[1].num_batches_tracked.item() == 1


def test_o3_casts_all_and_o1_and_o0_nothing() -> None:
    model = decorate(cnn(), level="O3", dtype=torch.bfloat16)
    assert {p.dtype for p in (*model.parameters(), *model.buffers()) if p.is_floating_point()} == {torch.bfloat16}
    for level in ("O0", "O1"):
        model = decorate(cnn(), level=level, dtype=torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_o1_computes_under_autocast_and_leaves_it() -> None:
    seen: list[Any] = []
    model = mlp()
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), 0.1), level="O1", dtype=torch.bfloat16)
    output = model(torch.randn(3, 8))
    assert seen == [torch.bfloat16] and output.dtype == torch.float32
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 9))
    assert not torch.is_autocast_enabled("cpu")
    assert current() is None
    output.sum().backward()
    optimizer.step()


def test_a_call_that_fails_before_the_border_leaves_the_call_around_it_alone() -> None:
    def fail(module: nn.Module, args: Any) -> None:
        raise RuntimeError("on purpose")

    inner, seen = mlp(), []
    inner.register_forward_pre_hook(fail)
    inner = decorate(inner, level="O1", dtype=torch.bfloat16)

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with pytest.raises(RuntimeError, match="on purpose"):
                inner(x)
            seen.append(current())
            return x

    decorate(Outer(), level="O1", dtype=torch.float16)(torch.randn(2, 8))
    assert seen[0] is not None and seen[0].dtype == torch.float16
    assert current() is None


def test_modules_that_are_named_stay_in_float32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(body=nn.Linear(8, 8), norm=nn.LayerNorm(8), head=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    )
    seen: dict[str, torch.dtype] = {}
    for name in ("body", "norm", "head"):
        module = getattr(model, name)
        module.register_forward_hook(lambda module, args, output, name=name: seen.update({name: output.dtype}))
    decorate(model, dtype=torch.bfloat16, keep_fp32=[nn.LayerNorm, "head"])
    assert model(torch.randn(3, 8)).dtype == torch.float32
    dtypes = {name: p.dtype for name, p in model.named_parameters() if name.endswith("weight")}
    assert dtypes == {
        "body.weight": torch.bfloat16,
        "norm.weight": torch.float32,
        "head.0.weight": torch.float32,
        "head.1.weight": torch.float32,
    }


def test_structures_are_cast_on_both_sides() -> None:
    model = decorate(Structured(), dtype=torch.bfloat16)
    image = Parts(torch.randn(2, 4), 1)
    out = model({"image": image, "label": torch.tensor([1, 2])}, more=(torch.randn(1),))
    assert model.seen == [torch.bfloat16, torch.int64, torch.bfloat16]
    assert [out["a"].first.dtype, out["a"].second.dtype, out["b"].image.dtype] == [
        *(torch.float32, torch.int64, torch.float32)
    ]
    assert (type(out), type(out["a"]), out["b"].number, out["c"], out["d"]) == (OrderedDict, Pair, 3, None, "text")
    assert image.image.dtype == torch.float32


def test_double_precision_inputs_are_cast_too() -> None:
    model = decorate(mlp(), dtype=torch.bfloat16)
    assert model(torch.randn(2, 8, dtype=torch.float64)).dtype == torch.float32


def test_copies_and_pickles_work_and_are_not_scaled() -> None:
    model = mlp()
    model, _optimizer = decorate(model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.float16)
    x = torch.randn(3, 8)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for each in copies:
        assert torch.equal(each(x), model(x))
        each(x).sum().backward()
        assert each[2].bias.grad.tolist() == [3.0] * 4  # the model's own would be 2¹⁶ times that
        assert {value.dtype for value in each.state_dict().values()} == {torch.float32}


def test_hooks_of_the_user_see_what_they_did() -> None:
    model, seen = mlp(), []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    model = decorate(model, dtype=torch.bfloat16)
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model(torch.randn(2, 8))
    assert seen == [torch.float32, torch.float32]


def test_tied_weights_stay_tied() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10, bias=False))
    model[1].weight = model[0].weight
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.bfloat16)
    assert model[1].weight is model[0].weight
    model(torch.tensor([[1, 2, 3]])).square().mean().backward()
    optimizer.step()
    other = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10, bias=False))
    other[1].weight = other[0].weight
    with pytest.raises(InvalidArgument, match="weight is in a module that keep_fp32 names and in another"):
        decorate(other, keep_fp32=["1"])


def test_an_lstm_trains() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(8, 8, batch_first=True)
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), 0.1), dtype=torch.bfloat16)
    output, (h, c) = model(torch.randn(2, 5, 8))
    assert {output.dtype, h.dtype, c.dtype} == {torch.float32}
    output.square().mean().backward()
    optimizer.step()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "level": ({"level": "O4"}, "level must be one of O0, O1, O2, O3. Found: 'O4'"),
    "dtype": ({"dtype": torch.float32}, "dtype must be torch.float16 or torch.bfloat16. Found: torch.float32"),
    "scale": ({"loss_scale": -1.0}, 'loss_scale must be "dynamic", a number > 0'),
    "word": ({"loss_scale": "static"}, 'loss_scale must be "dynamic", a number > 0'),
    "keep": ({"keep_fp32": nn.LayerNorm}, "keep_fp32 must be a list of classes and names"),
    "name": ({"keep_fp32": ["tail"]}, "keep_fp32 must name modules of the model. Found: 'tail'"),
    "keep at O3": ({"level": "O3", "keep_fp32": [nn.LayerNorm]}, "keep_fp32 is for level O2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_change_nothing(case: str) -> None:
    options, message = WRONG[case]
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(InvalidArgument) as error:
        decorate(model, optimizer, **options)
    assert message in str(error.value)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model._forward_pre_hooks and not optimizer._optimizer_step_pre_hooks


def test_what_does_not_go_together_is_refused() -> None:
    model, other = mlp(), mlp(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(InvalidArgument, match="must update parameters of these models only"):
        decorate(other, optimizer)
    decorate(model, optimizer)
    with pytest.raises(InvalidArgument, match="Sequential is decorated already"):
        decorate(model)
    with pytest.raises(InvalidArgument, match=r"models must be nn\.Module. Found: str"):
        decorate("model")  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match=r"must not be parts of each other\. Found: Linear in another"):
        decorate([other, other[0]])
    double = mlp().double()
    with pytest.raises(InvalidArgument, match=r"weights must be float32, float16 or bfloat16. Found: .*float64"):
        decorate(double)


def test_returns_what_was_passed() -> None:
    models = [mlp(), mlp(1)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    assert decorate(tuple(models), optimizers[0], level="O0") == (models, optimizers[0])
    assert decorate(models[0], optimizers[:1], level="O0") == (models[0], optimizers[:1])
    assert decorate(models) == models
