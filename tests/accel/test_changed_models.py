"""A loop that changes its model or optimizer under a plan goes on as the plain loop does, with the plan or without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

import accel
from accel import strategies
from accel.compile import compiled_draws
from accel.search.plan import fingerprint
from accel.strategies import REGISTRY, Exactness
from tests.accel import loops

PLANS: dict[str, dict[str, Any]] = {
    "torch_compile": {"torch_compile": "whole model"},
    "channels_last": {"channels_last": None},
    "autocast_bf16": {"autocast_bf16": None},
    "amp_o2": {"amp_o2": None},
    "dropout_masks": {"dropout_masks": None},
    "flush_denormal": {"flush_denormal": None},
    "fused": {"fused_optimizer": "fused"},
    "foreach": {"fused_optimizer": "foreach"},
    "all": {
        "torch_compile": "whole model",
        "channels_last": None,
        "dropout_masks": None,
        "fused_optimizer": "fused",
        "allocator": None,
    },
}
ELSEWHERE = {
    **dict.fromkeys(("intraop_threads", "loader_workers", "sample_cache"), "it never sees a model"),
    **dict.fromkeys(("gradient_by_hosts", "gradient_compression", "gradient_half"), "they need several ranks"),
    **dict.fromkeys(
        ("async_copy", "cuda_graphs", "cudnn_benchmark", "float8", "liger", "pin_memory", "tf32", "window_attention"),
        "GPU",
    ),
    "batched_muon": "it replaces torch.optim.Muon's update, see test_batched_muon.py",
}


def test_each_strategy_is_tried_or_it_is_said_why_not() -> None:
    tried = {name for plan in PLANS.values() for name in plan}
    assert tried | set(ELSEWHERE) == set(strategies.names())
    assert not tried & set(ELSEWHERE)


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Images made in `__getitem__`, the same in each epoch."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=draw), torch.tensor(index % 3)


class Images(nn.Module):
    """What a classifier of images has: convolutions, batch norm, dropout and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()
        )
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8 * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.body(x).flatten(1)))  # type: ignore[no-any-return]


def _format(memory_format: torch.memory_format) -> Any:
    return lambda model, optimizer: model.to(memory_format=memory_format)


def _other_data(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.data = p.data * 0.9


def _data_turned(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        order = tuple(range(p.dim()))[::-1]
        p.data = p.data.permute(order).contiguous().permute(order)


def _to(dtype: torch.dtype) -> Any:
    return lambda model, optimizer: model.to(dtype)


def _rate(lr: Any) -> Any:
    def change(model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = lr

    return change


def _head_replaced(model: Any, optimizer: Any) -> None:
    model.head = nn.Linear(8 * 9, 3, dtype=model.head.weight.dtype)
    optimizer.add_param_group({"params": list(model.head.parameters())})


def _activation_replaced(model: Any, optimizer: Any) -> None:
    model.body[4] = nn.Tanh()


def _group_added(model: Any, optimizer: Any) -> None:
    model.body[1].register_parameter("scale", nn.Parameter(torch.ones(8)))
    optimizer.add_param_group({"params": [model.body[1].scale], "lr": 0.01})


def _frozen(model: Any, optimizer: Any) -> None:
    for p in model.body[0].parameters():
        p.requires_grad_(not p.requires_grad)


CHANGES: dict[str, list[Any]] = {
    "nothing": [lambda model, optimizer: None],
    "channels last": [_format(torch.channels_last)],
    "channels last and back": [_format(torch.channels_last), _format(torch.contiguous_format)],
    "other data": [_other_data],
    "data turned": [_data_turned],
    "float64": [_to(torch.float64)],
    "bfloat16 and back": [_to(torch.bfloat16), _to(torch.float32)],
    "float16": [_to(torch.float16)],
    "a rate that is a tensor, and a number": [_rate(torch.tensor(0.02)), _rate(0.02)],
    "another head": [_head_replaced],
    "another activation": [_activation_replaced],
    "another group": [_group_added],
    "frozen and not": [_frozen, _frozen],
}


def training(model: Any, loader: Any, optimizer: Any) -> Iterator[None]:
    while True:
        for x, target in loader:
            optimizer.zero_grad()
            outputs = model(x.to(model.head.weight.dtype))
            nn.functional.cross_entropy(outputs.float(), target).backward()
            optimizer.step()
            yield


def trained(plan: dict[str, Any], change: str) -> dict[str, Tensor]:
    """Train some steps before and after each change, under a plan if there is one; return what the model holds."""
    torch.manual_seed(0)
    model: Any = Images()
    data = Pictures()
    loader: Any = DataLoader(data, batch_size=8, sampler=RandomSampler(data))
    if "float" in change:  # torch's own Adam refuses moments of another dtype
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    else:  # with a large epsilon, or it makes much of the last bits of gradients that are almost 0
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-2)
    if plan:
        made = accel.Plan(fingerprint=fingerprint(model), model="Images", strategies=plan)
        model, loader, optimizer = accel.optimize(model, loader, optimizer, plan=made, allow="reduced")
    loop = training(model, loader, optimizer)
    loops.advance(loop, 26)  # the plan is taken over after some
    if plan:
        report = accel.explain(model)
        assert report.plan == plan, [(row.name, row.why) for row in report.rows if row.name in plan]
    for each in CHANGES[change]:
        each(model, optimizer)
        loops.advance(loop, 6)
    if plan:
        accel.undo(model)
    return {name: value.clone() for name, value in model.state_dict().items()}


def bound_of(plan: dict[str, Any], change: str) -> float:
    """Return what weights may be apart by."""
    exactness = max(kind.exactness for kind in REGISTRY if kind.name in plan)
    if exactness is Exactness.EXACT:
        return 0.0
    return 0.04 if exactness is Exactness.REDUCED else 0.01 if "float16" in change else 1e-5


@pytest.mark.sample(8)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("plan", PLANS)
def test_weights_are_those_of_the_plain_loop(plan: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loops.play_clock(monkeypatch.setattr)
    # What is compiled is the compiler's business; here it matters when a graph is taken for another model.
    monkeypatch.setattr(compiled_draws, "compile_with_plain_draws", lambda graph, inputs: graph.forward)
    expected, actual = trained({}, change), trained(PLANS[plan], change)
    bound = bound_of(PLANS[plan], change)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=bound)
