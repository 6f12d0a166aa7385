"""Strategies for NVIDIA GPUs: their logic on a CPU, and, where there is a GPU, for real."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import strategies
from accel.dataio.engine import transfer
from accel.dataio.passes.proxy import Fetching
from accel.report import StrategyRow
from accel.run import Run
from accel.run.gate import Gate
from accel.search import outlook
from accel.strategies import torch_compile
from accel.strategies.async_copy import AsyncCopy
from accel.strategies.autocast_bf16 import AutocastBf16
from accel.strategies.base import Strategy
from accel.strategies.cudnn_benchmark import CudnnBenchmark
from accel.strategies.pin_memory import PinMemory
from accel.strategies.tf32 import TF32
from accel.strategies.torch_compile import TorchCompile

CUDA = [TF32(), CudnnBenchmark(), PinMemory(), AsyncCopy()]


def make_run(device: str = "cpu", **options: Any) -> Run:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(1, 3, 8, 8))
    loader = DataLoader(TensorDataset(torch.randn(8, 3, 8, 8)), batch_size=4, **options)
    return Run(model.to(device), loader, [], Gate(model, []), Fetching(), enabled=frozenset({"async_copy"}))


@pytest.fixture
def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let refusals believe in a GPU of compute capability 9.0; nothing is run on it."""
    monkeypatch.setattr(Run, "cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.mark.parametrize("strategy", CUDA, ids=lambda s: s.name)
def test_without_a_gpu_it_says_so(strategy: Strategy) -> None:
    assert strategy.refusal(make_run()) == "it needs a CUDA device; the model is on the CPU"


@pytest.mark.parametrize("strategy", CUDA, ids=lambda s: s.name)
def test_with_a_gpu_it_applies(strategy: Strategy, pretend_cuda: None) -> None:
    assert strategy.refusal(make_run()) == ""


def test_tf32_is_set_and_put_back(pretend_cuda: None) -> None:
    run, strategy = make_run(), TF32()
    before = [torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision]
    strategy.enable(run, None)
    during = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    assert strategy.refusal(run) == "TF32 is on already"
    strategy.disable(run)

    assert during == ("tf32", "tf32")
    assert [torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision] == before


def test_tf32_needs_a_gpu_that_has_it(pretend_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))

    assert "has no TF32" in TF32().refusal(make_run())


def test_cudnn_benchmark_is_set_and_put_back(pretend_cuda: None) -> None:
    run, strategy = make_run(), CudnnBenchmark()
    assert torch.backends.cudnn.benchmark is False
    strategy.enable(run, None)
    assert torch.backends.cudnn.benchmark is True
    assert strategy.refusal(run) == "it is on already"
    strategy.disable(run)
    assert torch.backends.cudnn.benchmark is False


def test_cudnn_benchmark_respects_deterministic_algorithms(pretend_cuda: None) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in CudnnBenchmark().refusal(make_run())
    finally:
        torch.use_deterministic_algorithms(False)


def test_pinning_keeps_structure_and_leaves_other_things_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 0)
    batch = {"x": [torch.ones(2), "name", 3], "y": (torch.zeros(1),)}

    pinned = transfer.pin(batch)

    assert pinned["x"][1:] == ["name", 3]
    assert pinned["x"][0] is not batch["x"][0]
    assert torch.equal(pinned["x"][0], torch.ones(2))
    assert isinstance(pinned["y"], tuple)


def test_pin_memory_acts_on_the_batches_of_the_loader(pretend_cuda: None) -> None:
    run, strategy = make_run(), PinMemory()
    strategy.enable(run, None)
    assert run.fetching.transforms == {"pin_memory": transfer.pin}
    strategy.disable(run)
    assert run.fetching.transforms == {}


def test_a_side_stream_copy_waits_by_event_and_records_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    current = SimpleNamespace(wait_event=lambda event: log.append("compute waits for copy"))
    event = SimpleNamespace(record=lambda stream: log.append(f"event on {stream}"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "side")
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: _logged(log, f"on {stream}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(transfer, "pin", lambda batch: batch)
    monkeypatch.setattr(transfer, "_used_on", lambda tensor, stream: (log.append("recorded"), tensor)[1])

    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor)
    moved = transfer.AheadCopier(torch.device("cuda"))([torch.ones(2), "label"])

    assert log == ["on side", "event on side", "off side", "compute waits for copy", "recorded"]
    assert moved[1] == "label"


class _logged:  # noqa: N801  (reads as a function)
    def __init__(self, log: list[str], text: str) -> None:
        self.log, self.text = log, text

    def __enter__(self) -> None:
        self.log.append(self.text)

    def __exit__(self, *_: object) -> None:
        self.log.append(self.text.replace("on ", "off "))


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", [TF32(), CudnnBenchmark(), AutocastBf16()], ids=lambda s: s.name)
def test_on_a_gpu_model_strategies_pass_the_guard(strategy: Strategy) -> None:
    from accel.guard import guard

    run = make_run("cuda")
    run.gate = Gate(run.model, [strategy.name])
    x = torch.randn(4, 3, 8, 8, device="cuda")
    recording = guard.record(run.model, run.device, (x,), {})
    out = run.model(x)
    recording.listen(out)
    out.square().mean().backward()
    with guard.untouched(run.model, run.device):
        plain = guard.replay(run.model, run.gate.plain, recording)
        strategy.enable(run, None)
        candidate = guard.replay(run.model, run.gate.call, recording)
        strategy.disable(run)

    assert guard.compare(plain, candidate, strategy.exactness).problem == ""


@pytest.mark.gpu
def test_on_a_gpu_copied_batches_hold_the_same_bits() -> None:
    copier = transfer.AheadCopier(torch.device("cuda"))
    for size in (1, 1000, 1_000_003):
        batch = [torch.randn(size), {"label": torch.arange(size)}]
        moved = copier(batch)
        assert moved[0].is_cuda
        assert torch.equal(moved[0].cpu(), batch[0])
        assert torch.equal(moved[1]["label"].cpu(), batch[1]["label"])  # type: ignore[call-overload]


@pytest.mark.gpu
def test_on_a_gpu_pinned_batches_are_pinned() -> None:
    assert transfer.pin([torch.ones(3)])[0].is_pinned()


@pytest.mark.gpu
def test_on_a_gpu_a_search_ends_with_the_same_kind_of_model() -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 3, 16, 16)
    data = TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2)
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    keys = list(model.state_dict())
    model, loader, optimizer = accel.optimize(
        model, DataLoader(data, batch_size=32), optimizer, allow="reduced", budget=60, disable=("torch_compile",)
    )
    losses: list[float] = []
    began = time.monotonic()
    while len(losses) < 1280 or (accel.explain(model).state == "searching" and time.monotonic() - began < 60):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    assert list(model.state_dict()) == keys
    assert sum(losses[-50:]) < sum(losses[:50])
    assert not any(row.why.startswith(("wrong", "failed")) for row in accel.explain(model).rows)
    accel.undo(model)


class Dropping(nn.Module):
    """Two layers of a transformer with dropout everywhere: in attention, behind it and in the feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))  # type: ignore[no-any-return]


def compiled_in_a_search(device: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> StrategyRow:
    """Train with dropout under a search that tries `torch_compile` in one setting alone, and return its row."""
    monkeypatch.setattr(TorchCompile, "settings", lambda self, run: [setting])
    monkeypatch.setattr(outlook, "is_crowded", lambda diagnosis: False)  # by other tests
    monkeypatch.setattr(torch_compile, "_no_room", lambda run: "not in tests")
    torch.manual_seed(0)
    model = Dropping().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(64, 16, 64), torch.randint(4, (64,)))
    others = tuple(name for name in strategies.names() if name != "torch_compile")
    model, loader, optimizer = accel.optimize(
        model,
        DataLoader(data, batch_size=16),
        optimizer,
        budget=300,
        cache=False,
        enable=("torch_compile",),
        disable=others,
    )
    began = time.monotonic()
    while accel.explain(model).state == "searching" and time.monotonic() - began < 120:
        for x, target in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    row = next(row for row in accel.explain(model).rows if row.name == "torch_compile")
    accel.undo(model)
    return row


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("setting", ["blocks", "whole model"])
def test_on_a_gpu_a_compiled_model_with_dropout_passes_the_guard(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that a compiler draws otherwise than eager code does are no wrong result, and must not be taken for one."""
    row = compiled_in_a_search("cuda", setting, monkeypatch)
    assert row.status in ("kept", "undone", "inconclusive"), row
    assert not row.why.startswith(("wrong", "failed")), row
    assert row.gradient_error is not None, row


@pytest.mark.gpu
def test_on_a_gpu_reordered_convolutions_are_not_taken_for_wrong_ones() -> None:
    """cuDNN's are in TF32 by default: through eight layers its rounding moves gradients by more than is allowed."""
    from accel.guard import guard, rounding
    from accel.strategies.channels_last import ChannelsLast

    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1)]
    for _ in range(8):
        layers += [nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).cuda()
    loader: Any = DataLoader(TensorDataset(torch.randn(64, 3, 64, 64)), batch_size=64)
    x, target = torch.randn(64, 3, 64, 64, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    precision = torch.backends.cudnn.conv.fp32_precision
    assert precision == "tf32"
    for strategy in (ChannelsLast(), CudnnBenchmark()):
        run = Run(model, loader, [], Gate(model, [strategy.name]), Fetching())
        recording = guard.record(model, run.device, (x,), {})
        out = model(x)
        recording.listen(out)
        nn.functional.cross_entropy(out, target).backward()
        with (
            rounding.without_tf32(recording.rounding, run.device, strategy.exactness, compiles=False),
            guard.untouched(model, run.device),
        ):
            plain = guard.replay(model, run.gate.plain, recording)
            strategy.enable(run, None)
            candidate = guard.replay(model, run.gate.call, recording)
            strategy.disable(run)
        assert guard.compare(plain, candidate, strategy.exactness).problem == ""
    assert torch.backends.cudnn.conv.fp32_precision == precision
