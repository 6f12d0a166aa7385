"""Fused Swin modules in whatever order people use them: validated first, traced, exported, copied, moved to a CPU."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from accel.kernels import support
from accel.kernels.dropins import DropIn
from accel.kernels.window_attention import libraries as window_hosts
from accel.kernels.window_attention import shifted_window_attention
from accel.kernels.window_dropins import fuse_window_attention
from tests.kernels.hosts import MODELS, MODULES, OfficialWindowAttention, randomised, serve_cpu, window_operators
from tests.kernels.test_window_dropins import run, shift_mask
from tests.sampling import examples

HOSTS = sorted(MODELS)
HUGGING_FACE = ("Hugging Face v1", "Hugging Face v2")
V2_ALONE = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name.endswith("v1") else []) for name in HUGGING_FACE]
)
"""By default: what there is to get wrong is in the class that both inherit from."""


def small(name: str) -> nn.Module:
    """Return a model whose first stage, of 8 x 8 tokens, is shifted."""
    torch.manual_seed(0)
    return randomised(MODELS[name](32, 4)).double().eval()


def images(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))


def same(found: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert found.keys() == plain.keys()
    for name, tensor in plain.items():
        scale = max(float(tensor.abs().max()), 1e-3 * float(plain["output"].abs().max()))
        assert float((found[name] - tensor).abs().max()) <= 1e-9 * scale, name


# -- what each library's module must stand -----------------------------------------------------------------------------


@pytest.mark.sample(2, every_value=False)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_validated_and_then_trained(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As every Lightning user's sanity check does."""
    serve_cpu(monkeypatch)
    model = small(name)
    plain = run(model, images())
    assert not fuse_window_attention(model).refused
    with torch.inference_mode():
        validated = model(images())
    same(run(model, images()), plain)
    torch.testing.assert_close(validated, plain["output"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("made", ["under inference_mode", "outside"])
@pytest.mark.parametrize("name", MODULES)
def test_a_mask_is_read_in_any_mode(name: str, made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_cpu(monkeypatch)
    module = randomised(MODULES[name](32, (4, 4), 2)).double()
    x = torch.randn(4, 16, 32, dtype=torch.float64)
    with torch.inference_mode(made == "under inference_mode"):
        mask = shift_mask().double()
    plain = run(module, x, mask)
    fuse_window_attention(module)
    with torch.inference_mode():
        module(x, mask)
    same(run(module, x, mask), plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")  # of the exporter's own
def test_an_exported_model_runs_where_this_package_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_cpu(monkeypatch)
    model = small(name)
    plain = run(model, images())
    fuse_window_attention(model)
    program = torch.export.export(model, (images(),))
    assert not [node for node in program.graph.nodes if "accel" in str(node.target)]
    torch.testing.assert_close(program.module()(images()), plain["output"])
    same(run(model, images()), plain)


@pytest.mark.filterwarnings("ignore")  # of the tracer's own
def test_a_traced_model_holds_the_librarys_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_cpu(monkeypatch)
    model = small("timm v1")
    plain = model(images())
    fuse_window_attention(model)
    traced = torch.jit.trace(model, (images(),))
    assert "PythonOp" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(images()), plain)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@V2_ALONE
def test_a_size_is_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There was a break in each layer, and each piece was compiled anew for another size."""
    serve_cpu(monkeypatch)
    model = small(name)
    fuse_window_attention(model)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for graphs, size in ((1, 32), (2, 64), (2, 32)):
            torch.testing.assert_close(compiled(images(size)), model(images(size)))
            assert counter.frame_count == graphs


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_a_mask_that_is_given_breaks_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler knows none of its values: the module's own path takes the call."""
    serve_cpu(monkeypatch)
    module = OfficialWindowAttention(32, (4, 4), 2).double()
    x, mask = torch.randn(4, 16, 32, dtype=torch.float64), shift_mask().double()
    plain = module(x, mask)
    fuse_window_attention(module)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, mask), plain)
    torch.testing.assert_close(module(x, mask), plain)


@V2_ALONE
def test_nothing_is_kept_on_the_model_or_beside_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_cpu(monkeypatch)
    model = small(name)
    fuse_window_attention(model)
    model(images())
    gc.collect()
    attributes = [set(vars(module)) for module in model.modules()]
    size, masks = len(pickle.dumps(model)), len(window_hosts._read_masks)
    for side in (48, 64, 80):
        model(images(side))
    gc.collect()
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert len(pickle.dumps(model)) == size and len(window_hosts._read_masks) == masks


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_who_listens_to_the_attention_is_given_a_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_cpu(monkeypatch)
    model = small(name)
    plain = model(images())
    fuse_window_attention(model)
    heard = []
    for module in model.modules():
        if isinstance(module, DropIn) and hasattr(module, "get_attn_mask"):
            module.attention.register_forward_pre_hook(lambda _, arguments: heard.append(arguments[1]))
    torch.testing.assert_close(model(images()), plain)
    masks = [mask for mask in heard if mask is not None]
    assert masks and all(mask.is_floating_point() and mask.dim() == 3 for mask in masks)


# -- on a CPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_a_cpu_is_left_alone(name: str) -> None:
    model = MODELS[name](32, 4)
    kinds = [type(module) for module in model.modules()]
    fused = fuse_window_attention(model)
    assert fused.names == [] and len(fused.refused) >= 4
    assert all("it is on cpu" in why and "CUDA" in why for why in fused.refused.values())
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.sample(2, every_value=False)
@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_that_is_moved_to_a_cpu_is_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(name)
    plain = run(model, images())
    with monkeypatch.context() as on_a_gpu:
        serve_cpu(on_a_gpu)
        fuse_window_attention(model)
    assert any(isinstance(module, DropIn) for module in model.modules())
    found = run(model, images())
    assert all(torch.equal(found[key], tensor) for key, tensor in plain.items())


# -- any order ---------------------------------------------------------------------------------------------------------


def _fake(model: nn.Module, x: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(x))


def _export(model: nn.Module, x: Tensor) -> None:
    torch.export.export(model, (x,))


def _under(mode: Any) -> Callable[[nn.Module, Tensor], None]:
    def call(model: nn.Module, x: Tensor) -> None:
        with mode():
            model(x)

    return call


ACTIONS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "train": run,
    "no_grad": _under(torch.no_grad),
    "inference": _under(torch.inference_mode),
    "export": _export,
    "fake": _fake,
    "deepcopy": lambda model, x: copy.deepcopy(model)(x),
    "pickle": lambda model, x: pickle.loads(pickle.dumps(model))(x),
    "other size": lambda model, x: model(images(48)),
    "undo, redo": lambda model, x: (model.fused.undo(), model(x), model.fused.redo()),
}


class _Fused(nn.Module):
    """A fused model with what can put it back, which no copy and no pickle takes along."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.fused = fuse_window_attention(model)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "fused"}


@functools.cache
def _plain_and_fused(name: str) -> tuple[dict[str, Tensor], _Fused]:
    plain = run(small(name), images())
    return plain, _Fused(small(name))


def the_same_after(actions: list[str], name: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        serve_cpu(monkeypatch)
        plain, model = _plain_and_fused(name)
        for action in actions:
            if not (action == "other size" and name.startswith("timm")):  # which takes one size
                ACTIONS[action](model, images())
        same(run(model.model, images()), plain)


@settings(max_examples=examples(12))
@given(st.lists(st.sampled_from(sorted(set(ACTIONS) - {"export"})), min_size=1, max_size=4), st.sampled_from(HOSTS))
def test_a_fused_model_is_the_same_after_anything(actions: list[str], name: str) -> None:
    the_same_after(actions, name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the exporter's own
@settings(max_examples=15)
@given(st.lists(st.sampled_from(sorted(ACTIONS)), min_size=1, max_size=4), st.sampled_from(HOSTS))
def test_a_fused_model_is_the_same_after_anything_exported_too(actions: list[str], name: str) -> None:
    the_same_after(actions, name)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_a_model_is_validated_compiled_exported_and_trained(name: str) -> None:
    model = randomised(MODELS[name](64, 4)).cuda().eval()
    x = images(64).float().cuda()
    plain = run(model, x)
    assert not fuse_window_attention(model).refused
    with torch.inference_mode():
        model(x)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    with torch.no_grad():
        compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)(x)
    assert window_operators(*counter.graphs) == 4  # two stages of two blocks
    exported = torch.export.export(model, (x,)).module()(x)
    found = run(model, x)
    for out in (compiled, exported, found["output"]):
        assert float((out - plain["output"]).norm() / plain["output"].norm()) < 3e-2
    assert found.keys() == plain.keys() and support.runs_triton(x)


def test_what_differs_from_a_checked_call_is_checked_again(interpreted: None) -> None:
    layer = {"heads": 2, "window": (4, 4), "shift": (2, 2)}
    qkv, table = torch.randn(1, 8, 8, 24), torch.randn(49, 2)
    expected = shifted_window_attention(qkv, table, **layer)
    for wrong_qkv, wrong_table, message in (
        (qkv[:, :6], table, "multiples of"),
        (qkv.int(), table, "floating point"),
        (qkv, table[:48], "table must be"),
        (qkv, table.int(), "table must be floating point"),
        (qkv, table.to("meta"), "on qkv's device"),
    ):
        with pytest.raises(ValueError, match=message):
            shifted_window_attention(wrong_qkv, wrong_table, **layer)
    strided = qkv.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(shifted_window_attention(strided, table.t().contiguous().t(), **layer), expected)
    bigger = shifted_window_attention(torch.cat((qkv, qkv), 2), table, **layer)
    assert bigger.shape == (1, 8, 16, 8)
    assert torch.equal(shifted_window_attention(qkv, table, **layer), expected)


@pytest.mark.parametrize("passes", ["forward", "windows"])
def test_a_layer_too_large_for_the_gpu_says_what_to_do(
    interpreted: None, monkeypatch: pytest.MonkeyPatch, passes: str
) -> None:
    from triton.runtime.errors import OutOfResources

    from accel.kernels.launching import LaunchPlan

    qkv, table = torch.randn(1, 6, 6, 48, requires_grad=True), torch.randn(25, 2)
    launches = LaunchPlan.__call__
    left = [0 if passes == "forward" else 1]

    def launch(plan: LaunchPlan, *tensors: torch.Tensor | None) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OutOfResources(167_936, 166_912, "shared memory")
        launches(plan, *tensors)

    monkeypatch.setattr(LaunchPlan, "__call__", launch)
    with pytest.raises(RuntimeError, match=r"windows of 3 x 3 in torch.float32 .* 167936 of shared memory .* 166912"):
        shifted_window_attention(qkv, table, heads=2, window=(3, 3)).sum().backward()
