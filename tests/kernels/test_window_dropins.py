"""Swin models on the fused op: equal outputs and gradients, and nothing else about them changes."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from accel.kernels.dropins import DropIn
from accel.kernels.window_attention.regions import shift_regions
from accel.kernels.window_dropins import fuse_window_attention
from tests.kernels.hosts import MODELS, MODULES, OfficialWindowAttention, need, randomised, serve_cpu

SIZES = {
    "maps cut without a rest": (64, 4),  # stages of 16 and 8 tokens
    "windows of 7, padded": (64, 7),
    "windows larger than the last map": (56, 8),  # stages of 14 and 7
}


@pytest.fixture(autouse=True)
def _serves_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_cpu(monkeypatch)


def run(model: nn.Module, *inputs: Tensor | None) -> dict[str, Tensor]:
    model.zero_grad()
    out = model(*inputs)
    out.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach(), **grads}


@pytest.mark.sample(6, every_value=False)
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_computes_the_same(name: str, case: str) -> None:
    size, window = SIZES[case]
    if case == "windows larger than the last map" and name.startswith("Hugging Face"):
        pytest.skip("the library's own model refuses such maps")
    model = randomised(MODELS[name](size, window)).double().eval()
    images = torch.randn(2, 3, size, size, dtype=torch.float64)
    plain = run(model, images)
    fused = fuse_window_attention(model)
    found = run(model, images)

    assert len(fused.names) >= 4 and not fused.refused
    assert found.keys() == plain.keys()
    for tensor_name, tensor in plain.items():
        scale = max(float(tensor.abs().max()), 1e-3 * float(plain["output"].abs().max()))
        assert float((found[tensor_name] - tensor).abs().max()) <= 1e-9 * scale, tensor_name


def calls_of_the_op(module: nn.Module, monkeypatch: pytest.MonkeyPatch, *inputs: Tensor) -> int:
    """Return how often a fused module calls the op, where it does not take the library's own path."""
    from accel.kernels.window_attention import attention as op

    fuse_window_attention(module)
    calls = []
    original = op._attend
    monkeypatch.setattr(op, "_attend", lambda *args: calls.append(1) or original(*args))
    module(*inputs)
    return len(calls)


@pytest.mark.sample(2, every_value=False)
@pytest.mark.parametrize("name", MODELS)
def test_all_four_attention_layers_call_the_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_of_the_op(MODELS[name](64, 4).eval(), monkeypatch, torch.randn(1, 3, 64, 64)) == 4


@pytest.mark.sample(2, every_value=False)
@pytest.mark.parametrize("name", MODELS)
def test_nothing_else_changes(name: str) -> None:
    model = MODELS[name](64, 4)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    classes = [type(m) for m in model.modules()]
    names = [type(m).__name__ for m in model.modules()]
    fused = fuse_window_attention(model)

    assert any(isinstance(m, DropIn) for m in model.modules())
    assert all(isinstance(m, kind) for m, kind in zip(model.modules(), classes, strict=True))
    assert [type(m).__name__ for m in model.modules()] == names
    assert list(model.state_dict()) == list(before)
    assert model.load_state_dict(before)
    fused.undo()
    assert [type(m) for m in model.modules()] == classes
    fused.redo()
    assert any(isinstance(m, DropIn) for m in model.modules())


@pytest.mark.sample(2, every_value=False)
@pytest.mark.parametrize("name", MODELS)
def test_copies_and_pickles_are_plain(name: str) -> None:
    model = MODELS[name](64, 4)
    fuse_window_attention(model)
    file = io.BytesIO()
    pickle.dump(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.load(file)):
        assert not any(isinstance(m, DropIn) for m in other.modules())
        for key, value in model.state_dict().items():
            assert torch.equal(other.state_dict()[key], value)


@pytest.mark.sample(2, every_value=False)
@pytest.mark.parametrize("name", MODELS)
def test_in_mixed_precision(name: str) -> None:
    model = randomised(MODELS[name](64, 4))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model.eval()(images).float()
        fuse_window_attention(model)
        found = model(images).float()
    assert float((found - plain).norm() / plain.norm()) < 0.02


def official(**changes: float) -> nn.Module:
    torch.manual_seed(0)
    return OfficialWindowAttention(32, (4, 4), 2, **changes)


def shift_mask() -> Tensor:
    regions = torch.zeros(2, 16)
    regions[1, 8:] = 1
    return torch.where(regions[:, None] == regions[:, :, None], 0.0, -100.0)


@pytest.mark.sample(3)
@pytest.mark.parametrize("shifted", [False, True], ids=["not shifted", "shifted"])
@pytest.mark.parametrize("window", [(4, 4), (7, 7), (12, 12), (3, 5)])
@pytest.mark.parametrize("name", MODULES)
def test_attention_on_windows_computes_the_same(name: str, window: tuple[int, int], shifted: bool) -> None:
    torch.manual_seed(0)
    module = randomised(MODULES[name](32, window, 2)).double()
    size, shift = (2 * window[0], 2 * window[1]), (window[0] // 2, window[1] // 2)
    x = torch.randn(8, window[0] * window[1], 32, dtype=torch.float64)
    mask = None
    if shifted:
        regions = shift_regions(size, window, shift, torch.device("cpu"))
        mask = torch.where(regions[:, None] == regions[:, :, None], 0.0, -100.0).double()
    plain = run(module, x, mask)
    fused = fuse_window_attention(module)
    found = run(module, x, mask)

    assert fused.names == [""]
    assert found.keys() == plain.keys() == {"output", *(name for name, _ in module.named_parameters())}
    for tensor_name, tensor in plain.items():
        torch.testing.assert_close(found[tensor_name], tensor, rtol=1e-9, atol=1e-9 * float(tensor.abs().max()))


@pytest.mark.parametrize("name", MODULES)
def test_attention_on_windows_runs_on_the_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = MODULES[name](32, (4, 4), 2)
    assert calls_of_the_op(module, monkeypatch, torch.randn(2, 16, 32), shift_mask()) == 1


@pytest.mark.parametrize("name", MODULES)
def test_a_replica_has_parameters_as_plain_attributes(name: str) -> None:
    """As those of `nn.DataParallel`, and shards: Swin V2 was taken for V1, and its forward raised."""
    torch.manual_seed(0)
    module, x = MODULES[name](32, (4, 4), 2), torch.randn(2, 16, 32)
    fuse_window_attention(module)
    plain = module(x)
    for each in module.modules():
        parameters = dict(each._parameters)
        each._parameters.clear()
        vars(each).update(parameters)
    torch.testing.assert_close(module(x), plain)


def test_a_mask_of_another_kind_takes_the_modules_own_path() -> None:
    module = official()
    x, mask = torch.randn(2, 16, 32), torch.randn(1, 16, 16)
    plain = module(x, mask)
    fuse_window_attention(module)
    assert torch.equal(module(x, mask), plain)


def test_a_mask_that_is_changed_in_place_is_read_again() -> None:
    module = official()
    x, mask = torch.randn(2, 16, 32), shift_mask()
    fuse_window_attention(module)
    first = module(x, mask)
    mask.zero_()
    second = module(x, mask)
    assert not torch.equal(first, second)
    torch.testing.assert_close(second, module(x))


def test_dropout_acts_in_training_only() -> None:
    module = official(attn_drop=0.5)
    x = torch.randn(4, 16, 32)
    fuse_window_attention(module)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_hooks_of_the_module_and_of_inner_layers_run() -> None:
    module = official()
    called = []
    module.register_forward_hook(lambda *args: called.append("module"))
    module.qkv.register_forward_hook(lambda *args: called.append("qkv"))
    module.softmax.register_forward_hook(lambda *args: called.append("softmax"))  # the op has none: own path
    fuse_window_attention(module)
    module(torch.randn(2, 16, 32))
    assert called == ["qkv", "softmax", "module"]


class WindowAttention(OfficialWindowAttention):
    """A namesake that computes something else."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) * 1.01


def test_a_variant_under_a_known_name_is_left_alone() -> None:
    model = nn.Sequential(WindowAttention(32, (4, 4), 2))
    fused = fuse_window_attention(model)
    assert fused.names == []
    assert "computes something else" in fused.refused["0"]
    assert type(model[0]) is WindowAttention


def test_a_namesake_with_other_arguments_is_left_alone() -> None:
    class Other(OfficialWindowAttention):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return x

    Other.__name__ = "WindowAttention"
    fused = fuse_window_attention(Other(32, (4, 4), 2))
    assert "can't be tried: TypeError" in fused.refused[""]


def test_trying_out_leaves_no_trace() -> None:
    module = official(attn_drop=0.3)
    state = torch.get_rng_state()
    module.qkv.register_forward_hook(lambda *args: None)
    fuse_window_attention(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training and module.qkv.weight.grad is None


def test_a_model_without_windows() -> None:
    fused = fuse_window_attention(nn.Linear(3, 3))
    assert fused.names == [] and fused.refused == {}


def test_hugging_face_gives_attentions_when_asked() -> None:
    need("transformers")
    model = MODELS["Hugging Face v1"](64, 4).eval()
    model.model.set_attn_implementation("eager")
    images = torch.randn(1, 3, 64, 64)
    plain = model.model(images, output_attentions=True)
    fuse_window_attention(model)
    found = model.model(images, output_attentions=True)
    assert len(found.attentions) == len(plain.attentions)
    torch.testing.assert_close(found.attentions[0], plain.attentions[0])
