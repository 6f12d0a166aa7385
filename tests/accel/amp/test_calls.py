"""A call of a decorated model: what it computes in, what it returns, and that it leaves the model as it was."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import pickle
import threading
import warnings
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel.amp import decorate, undecorate
from accel.amp.decorate import calls_of
from accel.errors import InvalidArgument
from tests.accel.amp.amp_models import batches, cnn, loss_of, mlp, train
from tests.kernels.hosts import need

HALVES = (torch.float16, torch.bfloat16)
Pair = namedtuple("Pair", ["first", "second"])


class Words(dict[str, Any]):
    """As Hugging Face's and others' outputs are: a class of its own."""


class Lines(list[Any]):
    """Another."""


@dataclasses.dataclass
class Parts:
    image: Tensor
    number: int
    late: Any = dataclasses.field(init=False)


class Structured(nn.Module):
    """Takes and returns structures; notes the dtypes that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, x: Any, *, more: Any = None) -> Any:
        self.seen = [x["image"].image.dtype, x["label"].dtype, more[0].dtype]
        y = self.linear(x["image"].image)
        parts = Parts(y * 2, 3)
        parts.late = [y * 3]
        return OrderedDict(a=Pair(y, x["label"]), b=parts, c=None, d="text", e=Words(y=y * 4), f=Lines([y * 5]))


class Spy(nn.Module):
    """Notes what its weights are in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: p.dtype for name, p in self.named_parameters()} | {"x": x.dtype}
        y: Tensor = self.linear(x)
        return y


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_it_computes_in_16_bits_and_everything_outside_is_float32(dtype: torch.dtype) -> None:
    model, given = cnn(), {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda m, args, y, name=name: given.update({name: y.dtype}))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert decorate(model, optimizer, dtype=dtype) == (model, optimizer)
    before = list(model.parameters())
    output = model(torch.randn(2, 3, 8, 8))
    assert output.dtype == torch.float32
    assert set(given.values()) == {dtype}
    output.sum().backward()
    optimizer.step()
    assert all(map(lambda a, b: a is b, before, model.parameters()))
    assert {p.dtype for p in before} == {p.grad.dtype for p in before if p.grad is not None} == {torch.float32}
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert model[1].num_batches_tracked.item() == 1
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32, torch.int64}


def test_within_the_call_the_model_is_one_of_16_bits() -> None:
    model = decorate(Spy(), dtype=torch.bfloat16)
    model(torch.randn(2, 8, dtype=torch.float64))
    assert set(model.seen.values()) == {torch.bfloat16}


def test_o1_computes_under_autocast_and_leaves_it() -> None:
    model, seen = mlp(), []
    model[0].register_forward_hook(lambda module, args, y: seen.append(y.dtype))
    decorate(model, level="O1", dtype=torch.bfloat16)
    assert model(torch.randn(2, 8)).dtype == torch.float32
    assert seen == [torch.bfloat16]
    assert not torch.is_autocast_enabled("cpu")


def test_modules_that_are_named_compute_in_float32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(body=nn.Linear(8, 8), norm=nn.LayerNorm(8), head=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    )
    seen: list[torch.dtype] = []
    for part in (model.body, model.norm, model.head[0]):
        part.register_forward_hook(lambda module, args, y: seen.append(y.dtype))
    decorate(model, dtype=torch.bfloat16, keep_fp32=[nn.LayerNorm, "head"])
    assert model(torch.randn(3, 8)).dtype == torch.float32
    assert seen == [torch.bfloat16, torch.float32, torch.float32]
    assert model.head(torch.randn(3, 8)).dtype == torch.float32  # by itself it is as it was
    undecorate(model)
    assert not model.head._forward_hooks and not model.head._forward_pre_hooks


class ActivatedNorm(nn.BatchNorm2d):
    """As timm has it: batch normalisation with something inside."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.PReLU(channels)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(super().forward(x))
        return y


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_what_is_within_batch_normalisation_is_cast(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), ActivatedNorm(4), nn.Conv2d(4, 2, 3))
    decorate(model, dtype=dtype)
    model(torch.randn(2, 3, 8, 8)).mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_structures_are_cast_on_both_sides() -> None:
    model = decorate(Structured(), dtype=torch.float16, loss_scale=1024.0)
    image = Parts(torch.randn(2, 4), 1)
    out = model({"image": image, "label": torch.tensor([1, 2])}, more=(torch.randn(1),))
    assert model.seen == [torch.float16, torch.int64, torch.float16]
    tensors = [out["a"].first, out["b"].image, out["b"].late[0], out["e"]["y"], out["f"][0]]
    assert {y.dtype for y in tensors} == {torch.float32}
    kinds = [OrderedDict, Pair, Parts, Words, Lines]
    assert [type(each) for each in (out, out["a"], out["b"], out["e"], out["f"])] == kinds
    assert (out["a"].second.dtype, out["b"].number, out["c"], out["d"]) == (torch.int64, 3, None, "text")
    assert image.image.dtype == torch.float32
    for y in tensors:  # each by its own way: the loss scale is the same
        model.zero_grad()
        y.sum().backward(retain_graph=True)
        assert 1.9 <= float(model.linear.bias.grad.sum()) / 4 <= 10.1


class WithBuffers(nn.Module):
    """Keeps a mean of what it has seen, writes a count, and replaces a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.full((8,), 1 / 3))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("latest", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + self.table
        self.mean.mul_(0.5).add_(y.detach().mean(0))
        self.latest = y.detach()[0]
        self.count += 1
        return y


@pytest.mark.parametrize("inference", [False, True])
def test_buffers_are_cast_and_what_is_written_to_them_stays(inference: bool) -> None:
    model = decorate(WithBuffers(), dtype=torch.bfloat16)
    table, mean = model.table, model.mean
    with torch.inference_mode(inference):
        with pytest.warns(RuntimeWarning, match="writes to 'mean' within its call, where it has 16 bits"):
            model(torch.ones(3, 8))
        model(torch.ones(3, 8))  # it is said once
    assert model.table is table and torch.equal(table, torch.full((8,), 1 / 3))
    assert model.mean is mean and float(mean.abs().max()) > 0
    assert (model.count.item(), model.latest.dtype) == (2, torch.float32)
    assert float(model.latest.abs().max()) > 0


class Normalises(nn.Module):
    """Writes to its weights in each call, as some image generators do, and keeps vectors as spectral norm once did."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.vector = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.copy_(F.normalize(self.linear.weight, dim=1))
            self.linear.weight[0, 0] = 3.0
            self.vector.data = F.normalize(self.linear.weight @ self.vector.data, dim=0)
        y: Tensor = self.linear(x)
        return y


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was() -> None:
    model = decorate(Normalises(), dtype=torch.bfloat16)
    weight = model.linear.weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="where it has 16 bits"):
            model(torch.ones(2, 8))
    assert model.linear.weight is weight and not calls_of(model).is_under_way
    assert model(torch.ones(2, 8)).dtype == torch.float32


def test_weights_that_the_model_writes_stay_written() -> None:
    model, plain = Normalises(), Normalises()
    plain.load_state_dict(model.state_dict())
    decorate(model, dtype=torch.bfloat16)
    plain(torch.ones(2, 8)).sum().backward()
    with pytest.warns(RuntimeWarning, match="where it has 16 bits: small changes are lost"):
        model(torch.ones(2, 8)).sum().backward()
    assert float(model.linear.weight[0, 0].detach()) == 3.0
    torch.testing.assert_close(model.linear.weight, plain.linear.weight, rtol=0.01, atol=0.01)
    torch.testing.assert_close(model.vector, plain.vector, rtol=0.02, atol=0.02)
    before = model.linear.weight.detach().clone()
    model(torch.ones(2, 8))  # it is normalised again: what still rounds to the same keeps its bits
    assert isinstance(model.linear.weight, nn.Parameter) and model.linear.weight.dtype == before.dtype == torch.float32


class Fails(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.linear, self.error = nn.Linear(8, 8), error

    def forward(self, x: Tensor) -> Tensor:
        self.linear(x)
        raise self.error("in the middle")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_call_that_fails_leaves_nothing_behind(error: type[BaseException]) -> None:
    model = decorate(Fails(error), dtype=torch.bfloat16)
    weight = model.linear.weight
    for _ in range(2):
        with pytest.raises(error, match="in the middle"):
            model(torch.randn(2, 8))
        assert model.linear.weight is weight and model.linear._parameters["weight"] is weight
    assert not calls_of(model).is_under_way


def test_outputs_and_inputs_can_be_written_to() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            x *= 2
            return F.cross_entropy(self.linear(x).float(), target)

    for level in ("O1", "O2"):
        model = decorate(Loss(), level=level, dtype=torch.float16)
        (x, target), *_ = batches(1, 8)
        x = x.requires_grad_() * 1
        loss = model(x, target)
        loss /= 4
        loss.backward()
        assert 0 < float(model.linear.weight.grad.abs().max()) < 1


def test_a_model_that_calls_itself() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.deep = nn.Linear(8, 8), False

        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            y: Tensor = self.linear(x)
            return self(y, again=False) if again else y

    model = decorate(Twice(), dtype=torch.float16)
    model(torch.randn(2, 8)).mean().backward()
    assert 0 < float(model.linear.weight.grad.abs().max()) < 100


def test_another_thread_is_told_so() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            entered.set()
            leave.wait(60)
            y: Tensor = self.linear(x)
            return y

    model = decorate(Waits(), dtype=torch.bfloat16)
    thread = threading.Thread(target=model, args=(torch.randn(2, 8),))
    thread.start()
    entered.wait(60)
    try:
        with pytest.raises(InvalidArgument, match="by one thread at a time"):
            model(torch.randn(2, 8))
    finally:
        leave.set()
        thread.join()
    assert model(torch.randn(2, 8)).dtype == torch.float32


def test_tied_weights_are_cast_once_and_stay_tied() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10, bias=False))
    model[1].weight = model[0].weight
    plain = copy.deepcopy(model)
    decorate(model, dtype=torch.bfloat16)
    for each in (model, plain):
        each(torch.tensor([[1, 2, 3]])).square().mean().backward()
    assert model[1].weight is model[0].weight
    own, other = model[0].weight.grad, plain[0].weight.grad
    assert float((own - other).norm() / other.norm()) < 0.02


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train_and_keep_their_lists(kind: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(8, 8, num_layers=2, batch_first=True, bidirectional=True))
    decorate(model, dtype=torch.bfloat16)
    output, _ = model(torch.randn(2, 5, 8))
    assert output.dtype == torch.float32
    output.square().mean().backward()
    layer = model[0]
    assert all(
        own is getattr(layer, name) for own, name in zip(layer._flat_weights, layer._flat_weights_names, strict=True)
    )
    assert all(p.grad is not None for p in model.parameters())
    copy.deepcopy(model)
    assert undecorate(model)[0](torch.randn(2, 5, 8))[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_copies_and_pickles_are_decorated_too(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    decorate(model, optimizer, dtype=dtype, keep_fp32=["1"])
    train(model, optimizer, batches(2, 8))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    pairs = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    loaded = torch.load(buffer, weights_only=False)
    pairs.append((loaded, torch.optim.AdamW(loaded.parameters(), 0.01)))
    pairs[-1][1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected = train(model, optimizer, batches(5, 8))
    for other, own in pairs:
        assert type(other) is not nn.Sequential and isinstance(other, nn.Sequential)
        assert calls_of(other) is not calls_of(model)
        assert all(map(torch.equal, train(other, own, batches(5, 8)), expected))
        undecorate(other)
        assert type(other) is nn.Sequential and not other[1]._forward_hooks
    assert calls_of(model) is not None


def test_the_model_is_still_what_it_was_to_others() -> None:
    model = decorate(Structured(), dtype=torch.bfloat16)
    assert isinstance(model, Structured)
    assert type(model).__name__ == "Structured" and type(model).__module__ == Structured.__module__
    assert inspect.signature(model.forward) == inspect.signature(Structured().forward)
    assert list(model.state_dict()) == list(Structured().state_dict())
    undecorate(model)
    assert type(model) is Structured


def test_hooks_of_the_user_see_the_model_from_outside() -> None:
    model, seen = mlp(), []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    model = decorate(model, dtype=torch.bfloat16)
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model(torch.randn(2, 8))
    assert seen == [torch.float32, torch.float32]


def test_a_part_that_is_called_by_itself_is_plain() -> None:
    model = decorate(mlp(), dtype=torch.float16)
    model[0](torch.randn(2, 8)).sum().backward()
    assert model[0].bias.grad.tolist() == [2.0] * 16


def test_modules_that_are_shared_and_models_that_are_named_twice() -> None:
    shared = nn.Linear(8, 8)
    first, second = nn.Sequential(shared, nn.Linear(8, 2)), nn.Sequential(shared, nn.ReLU(), nn.Linear(8, 2))
    before = shared.weight.detach().clone()
    params = list({id(p): p for model in (first, second) for p in model.parameters()}.values())
    optimizer = torch.optim.SGD(params, 0.1)
    decorate([first, second], optimizer, dtype=torch.bfloat16)
    assert torch.equal(shared.weight, before)
    (first(torch.randn(4, 8)).sum() + second(torch.randn(4, 8)).sum()).backward()
    optimizer.step()
    assert not torch.equal(shared.weight, before)
    assert decorate([shared, shared], dtype=torch.bfloat16) == [shared, shared]


def test_a_module_that_comes_later() -> None:
    model = decorate(mlp(), dtype=torch.bfloat16)
    model[2] = nn.Linear(16, 3)
    model(torch.randn(2, 8)).sum().backward()
    assert model[2].weight.grad.dtype == torch.float32
    model[2] = nn.Linear(16, 3).bfloat16()
    with pytest.raises(
        InvalidArgument, match=r"must be float32.*Found: 'weight' of Linear, torch.bfloat16; call float"
    ):
        model(torch.randn(2, 8))
    model.requires_grad_(False)  # a frozen one may be
    assert model(torch.randn(2, 8)).dtype == torch.float32


@pytest.mark.parametrize("write", ["p.copy_", "p.data.copy_", "p.data =", "state_dict", "nn.Parameter"])
def test_weights_that_are_written_are_those_of_the_next_call(write: str) -> None:
    model, other = decorate(mlp(), dtype=torch.bfloat16), mlp(1)
    x = torch.randn(2, 8)
    model(x).sum().backward()
    with torch.no_grad():
        for (name, p), value in zip(list(model.named_parameters()), other.parameters(), strict=True):
            if write == "p.copy_":
                p.copy_(value)
            elif write == "p.data.copy_":
                p.data.copy_(value)
            elif write == "p.data =":
                p.data = value.detach().clone()
            elif write == "state_dict":
                model.state_dict()[name].copy_(value)
            else:
                setattr(model.get_submodule(name.split(".")[0]), name.split(".")[1], nn.Parameter(value.clone()))
    assert torch.equal(model(x), decorate(other, dtype=torch.bfloat16)(x))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "level": ({"level": "O3"}, "level must be one of O0, O1, O2. Found: 'O3'"),
    "dtype": ({"dtype": torch.float32}, "dtype must be torch.float16 or torch.bfloat16. Found: torch.float32"),
    "scale": ({"loss_scale": -1.0}, 'loss_scale must be "dynamic", a number > 0'),
    "word": ({"loss_scale": "static"}, 'loss_scale must be "dynamic", a number > 0'),
    "keep": ({"keep_fp32": nn.LayerNorm}, "keep_fp32 must be a list of classes and names"),
    "name": ({"keep_fp32": ["tail"]}, "keep_fp32 must name modules of the model. Found: 'tail'"),
    "keep at O1": ({"level": "O1", "keep_fp32": [nn.LayerNorm]}, "keep_fp32 is for level O2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_change_nothing(case: str) -> None:
    options, message = WRONG[case]
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(InvalidArgument) as error:
        decorate(model, optimizer, **options)
    assert message in str(error.value)
    assert type(model) is nn.Sequential and calls_of(model) is None
    assert not optimizer._optimizer_state_dict_post_hooks


def test_what_can_not_be_decorated() -> None:
    model, other = mlp(), mlp(1)
    decorate(model)
    with pytest.raises(InvalidArgument, match="Sequential is decorated already"):
        decorate([other, model])
    with pytest.raises(InvalidArgument, match="decorated already, or a part of it is"):
        decorate(nn.Sequential(model, nn.Linear(4, 4)))
    with pytest.raises(InvalidArgument, match=r"models must be nn\.Module. Found: str"):
        decorate("model")
    with pytest.raises(InvalidArgument, match=r"must not be parts of each other\. Found: Linear in another"):
        decorate([other, other[0]])
    with pytest.raises(InvalidArgument, match=r"optimizers must be torch\.optim\.Optimizer. Found: float"):
        decorate(other, 0.1)
    with pytest.raises(InvalidArgument, match=r"weights must be float32.*Found: 0\.weight torch\.bfloat16; call float"):
        decorate(mlp().bfloat16())
    with pytest.raises(InvalidArgument, match=r"lazy modules must have seen a batch\. Found: 0\.weight"):
        decorate(nn.Sequential(nn.LazyLinear(4)))
    other.forward = lambda x: x
    with pytest.raises(InvalidArgument, match="must have its forward in its class"):
        decorate(other)
    assert type(other) is nn.Sequential


def test_returns_what_was_passed() -> None:
    models = [mlp(), mlp(1)]
    optimizer = torch.optim.SGD(models[0].parameters(), 0.1)
    assert decorate(models, optimizer, level="O0") == (models, optimizer)
    assert decorate(models, [optimizer]) == (models, [optimizer])
    assert decorate(mlp(2)).__class__.__name__ == "Sequential"


def held_bytes(model: nn.Module, x: Tensor, **options: Any) -> int:
    """Return what a call holds for its backward pass, parameters left out."""
    held: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    decorate(model, **options)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    del y
    return sum(held.values())


def test_a_call_holds_no_more_memory_than_under_autocast() -> None:
    x, sizes = torch.randn(4, 32, 64), []
    for options in ({"level": "O1"}, {"level": "O2"}):
        torch.manual_seed(0)
        model = nn.Sequential(
            *[nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(2)]
        )
        sizes.append(held_bytes(model, x, dtype=torch.bfloat16, **options))
    under_autocast, at_o2 = sizes
    assert 0.3 * under_autocast < at_o2 < under_autocast


def test_a_loss_of_an_output_is_the_models() -> None:
    """At the scale's two ends the same number: gradients are those of float32, in three digits."""
    results = []
    for dtype, scale in ((None, None), (torch.bfloat16, None), (torch.float16, 1024.0), (torch.float16, "dynamic")):
        model = mlp()
        if dtype is not None:
            decorate(model, dtype=dtype, loss_scale=scale)
        (x, target), *_ = batches(1, 8)
        loss_of(model(x), target).backward()
        results.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for each in results[1:]:
        assert float((each - results[0]).norm() / results[0].norm()) < 0.01


@pytest.mark.integration  # Transformers take seconds to import
def test_a_hugging_face_model_is_saved_as_float32_and_loads_to_the_same_bits(tmp_path: Path) -> None:
    need("transformers")
    import transformers

    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=20
    )
    model = transformers.BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    decorate(model, optimizer, dtype=torch.bfloat16)
    tokens = torch.arange(12).view(3, 4)
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens, labels=torch.tensor([0, 1, 0])).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert "float32" in (tmp_path / "config.json").read_text()
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
