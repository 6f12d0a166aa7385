"""The strategy that runs language models of Hugging Face on Liger's kernels, here in Triton's interpreter."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.kernels import support
from accel.kernels.dropins import DropIn
from accel.strategies import liger
from accel.strategies.base import NothingHelps
from accel.strategies.liger import Liger
from tests.accel.frameworks import need
from tests.kernels import interpreter

pytestmark = pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "pad_token_id": 0,
}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run kernels on CPU tensors; numbers come to them as scalars with methods, as compiled kernels get them."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here; the interpreter is for machines without a GPU")
    import numpy as np
    import triton
    from triton import language as tl
    from triton.runtime import interpreter as tritons

    def rsqrt(x: Any) -> Any:
        return 1 / tl.sqrt(x)

    convert = tritons._implicit_cvt

    def with_scalars(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(tritons.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)

    monkeypatch.setattr(tritons, "_implicit_cvt", with_scalars)
    norms = importlib.import_module("liger_kernel.ops.rms_norm")
    monkeypatch.setattr(norms, "rsqrt", triton.jit(rsqrt))  # theirs is a function of the device's library
    with interpreter.interpreted():
        yield


def model_of(kind: str) -> nn.Module:
    from benchmarks.suite.packages import let_torchvision_import

    need("transformers")
    let_torchvision_import()
    import transformers

    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.2)
    return model


def run_of(model: nn.Module, *, cuda: bool = True, twice: str = "") -> Any:
    device = torch.device("cuda" if cuda else "cpu")
    return SimpleNamespace(model=model, cuda=cuda, device=device, observed=SimpleNamespace(needs_graphs=twice))


def trained(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    tokens = torch.arange(1, 15, device=next(model.parameters()).device).view(2, 7)
    output = model(input_ids=tokens, labels=tokens)
    output.loss.backward()
    return output.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("kind", "norms", "gates"), [("Llama", 5, 2), ("Qwen3", 9, 2), ("Gemma2", 9, 0)])
def test_outputs_and_gradients_stay_and_it_goes_back(interpreted: None, kind: str, norms: int, gates: int) -> None:
    model, strategy = model_of(kind), Liger()
    plain, gradients = trained(model)
    keys, classes, draws = list(model.state_dict()), [type(m) for m in model.modules()], torch.get_rng_state()
    assert strategy.refusal(run_of(model)) == ""
    for _ in range(2):
        strategy.enable(run_of(model), None)
        switched = [type(module).__name__ for module in model.modules() if isinstance(module, DropIn)]
        assert sum("Norm" in name for name in switched) == norms
        assert sum("MLP" in name for name in switched) == gates
        assert torch.equal(torch.get_rng_state(), draws)
        assert list(model.state_dict()) == keys
        output, own = trained(model)
        torch.testing.assert_close(output, plain, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own, gradients, rtol=1e-4, atol=1e-6)
        strategy.disable(run_of(model))
        assert [type(module) for module in model.modules()] == classes
        assert torch.equal(trained(model)[0], plain)


def test_copies_and_pickles_are_of_the_librarys_classes(interpreted: None) -> None:
    model, strategy = model_of("Llama"), Liger()
    strategy.enable(run_of(model), None)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(isinstance(module, DropIn) for module in copied.modules())
    strategy.disable(run_of(model))


def test_where_kernels_do_not_run_the_modules_compute_as_they_did(interpreted: None, monkeypatch: Any) -> None:
    model, strategy = model_of("Llama"), Liger()
    plain, _ = trained(model)
    strategy.enable(run_of(model), None)
    monkeypatch.setattr(support, "runs_triton", lambda x: False)  # the model has gone to the CPU, say
    assert torch.equal(trained(model)[0], plain)
    strategy.disable(run_of(model))


class OtherRMSNorm(nn.Module):
    """Looks like Hugging Face's, and isn't."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight


def test_a_variant_is_refused_with_its_reason(interpreted: None) -> None:
    model = nn.Sequential(OtherRMSNorm())
    strategy = Liger()
    assert strategy.refusal(run_of(model)) == ""
    for _ in range(2):  # also when verdicts are reopened
        with pytest.raises(NothingHelps, match="1 modules: it computes something else than Liger's kernel"):
            strategy.enable(run_of(model), None)
        strategy.disable(run_of(model))
    assert type(model[0]) is OtherRMSNorm


class Clamped(nn.Module):
    """A SwiGLU layer whose gate is clamped, which no small input shows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=10.0)) * self.up_proj(x))  # type: ignore[no-any-return]


class Gated(Clamped):
    """As Hugging Face writes it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def test_what_clamps_its_gate_is_left_alone(interpreted: None) -> None:
    model, strategy = nn.Sequential(Clamped(), Gated()), Liger()
    strategy.enable(run_of(model), None)
    assert [isinstance(layer, DropIn) for layer in model] == [False, True]
    strategy.disable(run_of(model))


def test_a_second_backward_pass_and_hooks_get_what_they_would_without_it(interpreted: None) -> None:
    torch.manual_seed(0)
    model, strategy, x = nn.Sequential(Gated()), Liger(), torch.randn(2, 3, 16)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    strategy.enable(run_of(model), None)
    loss = model(x).square().sum()
    for keeps in (True, True, False):
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=keeps)
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)
    kept: list[Tensor] = []
    for part in (model[0].act_fn, model[0].gate_proj):
        part.register_forward_hook(lambda module, args, output: kept.append(output))
    model(x).sum().backward()
    assert len(kept) == 2
    x.requires_grad_()
    second = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert second[0].requires_grad
    strategy.disable(run_of(model))


def test_what_fails_half_way_is_undone(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, strategy = nn.Sequential(Gated(), Gated()), Liger()
    tried: list[nn.Module] = []

    def fails(module: nn.Module, dropin: Any) -> bool:
        tried.append(module)
        if len(tried) == 2:
            raise KeyboardInterrupt
        return True

    monkeypatch.setattr(liger, "_is_alike", fails)
    with pytest.raises(KeyboardInterrupt):
        strategy.enable(run_of(model), None)
    strategy.disable(run_of(model))
    assert [type(layer) for layer in model] == [Gated, Gated]


def test_it_says_why_it_does_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(OtherRMSNorm(), nn.Linear(16, 16))
    assert "needs a CUDA device" in Liger().refusal(run_of(model, cuda=False))
    assert "no RMSNorm" in Liger().refusal(run_of(nn.Linear(2, 2)))
    assert "can be differentiated once" in Liger().refusal(run_of(model, twice="a backward pass keeps its graph"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install liger-kernel" in Liger().refusal(run_of(model))


@pytest.mark.gpu
def test_it_runs_on_a_gpu() -> None:
    model, strategy = model_of("Llama").cuda(), Liger()
    plain, gradients = trained(model)
    strategy.enable(run_of(model), None)
    output, own = trained(model)
    strategy.disable(run_of(model))
    torch.testing.assert_close(output, plain, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(own, gradients, rtol=1e-2, atol=1e-3)
