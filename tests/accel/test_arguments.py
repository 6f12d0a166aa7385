"""Wrong arguments: each raises at once, and its text says what is wrong and how to put it right."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, IterableDataset

import accel
from accel.errors import InvalidArgument, PlanError
from accel.search.plan import fingerprint
from tests.accel.loops import Net, Samples, make, make_loader


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Any:
    """A call that raises has put nothing anywhere."""
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    yield
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before


def _model() -> Net:
    return Net()


@pytest.mark.parametrize(
    ("model", "loader", "text"),
    [
        (lambda: 3, make_loader, r"model must be a torch.nn.Module, got a int; pass the module itself"),
        (lambda: None, make_loader, r"model must be a torch.nn.Module, got None; pass"),
        (lambda: Net, make_loader, r"model must be a torch.nn.Module, got the class Net"),
        (lambda: [Net(), Net()], make_loader, r"model must be a torch.nn.Module, got a list; call it for each"),
        (make_loader, _model, r"got a DataLoader \(model and loader are swapped\)"),
        (
            _model,
            lambda: 3,
            r"an iterable of batches, got a int; pass the DataLoader of the training loop",
        ),
        (_model, lambda: None, r"loader must be an iterable of batches, got None; pass"),
        (_model, lambda: "train", r"loader must be an iterable of batches, got a str; pass"),
        (_model, lambda: DataLoader, r"loader must be an iterable of batches, got the class DataLoader; pass"),
        (_model, lambda: Samples(4), r"loader must be an iterable of batches, got a Samples; pass the DataLoader"),
        (_model, lambda: [make_loader(), make_loader()], r"iterable of batches, got a list; call it for each"),
        (_model, lambda: {"train": make_loader()}, r"loader must be an iterable of batches, got a dict; pass"),
        (_model, list, r"loader must hold at least one batch, it is empty; check the dataset and drop_last"),
        (_model, lambda: DataLoader(Samples(4), batch_size=8, drop_last=True), r"at least one batch, it is empty"),
    ],
)
def test_model_or_loader_is_wrong(model: Callable[[], Any], loader: Callable[[], Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        accel.optimize(model(), loader())


def test_a_loader_whose_length_nobody_knows_is_no_error() -> None:
    model, loader = accel.optimize(Net(), DataLoader(Stream(), batch_size=2))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    accel.undo(model)


def test_optimizer_is_wrong() -> None:
    model, loader, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(InvalidArgument, match=r"must be a torch.optim.Optimizer, got a StepLR; leave it out instead"):
        accel.optimize(model, loader, scheduler)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match=r"got the class SGD"):
        accel.optimize(model, loader, torch.optim.SGD)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match=r"got a SGD; the order is model, loader, optimizer"):
        accel.optimize(model, optimizer, loader)  # type: ignore[call-overload]
    stranger = torch.optim.Adam(nn.Linear(2, 2).parameters())
    with pytest.raises(
        InvalidArgument, match=r"this Adam holds none of Net's; make it from model.parameters\(\) after the model is on"
    ):
        accel.optimize(model, loader, stranger)


def test_an_optimizer_with_other_parameters_too_is_taken() -> None:
    model, loader, _ = make()
    both = torch.optim.SGD([*nn.Linear(2, 2).parameters(), *model.head.parameters()], lr=0.1)
    assert accel.optimize(model, loader, both)[2] is both
    accel.undo(model)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"allow": "fast"}, r"allow must be one of 'exact', 'reordered', 'reduced', 'float8', 'lossy', got 'fast'"),
        ({"allow": None}, r"allow must be one of .* got None"),
        ({"allow": ["exact"]}, r"allow must be one of .* got \['exact'\]"),
        ({"allow": "bf16"}, r"allow must be one of .* got 'bf16'; did you mean 'reduced'\?"),
        ({"allow": "fp16"}, r"allow must be one of .* got 'fp16'; did you mean 'reduced'\?"),
        ({"allow": "Reduced"}, r"allow must be one of .* got 'Reduced'; did you mean 'reduced'\?"),
        ({"allow": "reorderd"}, r"got 'reorderd'; did you mean 'reordered'\?"),
        ({"allow": 1}, r"allow must be one of .* got 1"),
        (
            {"enable": ("torch_compil",)},
            r"enable names an unknown strategy 'torch_compil'; did you mean 'torch_compile'",
        ),
        ({"disable": ["chanels_last"]}, r"disable names an unknown strategy .*; did you mean 'channels_last'"),
        ({"disable": ("zzzzzzzz",)}, r"unknown strategy 'zzzzzzzz'; known: torch_compile, channels_last"),
        ({"enable": (3, "tf32")}, r"enable names an unknown strategy 3"),
        ({"enable": "tf32"}, r"enable must be a tuple of strategy names, got the string 'tf32'; write \('tf32',\)"),
        ({"disable": "compile"}, r"got the string 'compile'; write \('torch_compile',\)"),
        ({"disable": "tf32"}, r"disable must be a tuple of strategy names, got the string"),
        ({"enable": None}, r"enable must be a tuple of strategy names, got None"),
        ({"enable": ("tf32",), "disable": {"tf32"}}, r"\['tf32'\] are in both enable and disable; keep them in one"),
        ({"budget": 0}, r"budget must be a positive time, got 0s; write seconds"),
        ({"budget": -1}, r"budget must be a positive time, got -1s"),
        ({"budget": math.nan}, r"budget must be a positive time, got nan"),
        ({"budget": math.inf}, r"budget must be a positive time, got inf"),
        ({"budget": "0s"}, r"budget must be a positive time, got 0s"),
        ({"budget": "abc"}, r"budget must be a time or a share, got 'abc'; write seconds \(60\), \"90s\", \"2m\""),
        ({"budget": "-5s"}, r"budget must be a time or a share, got '-5s'"),
        ({"budget": ""}, r"budget must be a time or a share, got ''"),
        ({"budget": "200%"}, r"budget as a share must lie in \(0 %, 100 %\], got '200%'"),
        ({"budget": "0%"}, r"budget as a share must lie in \(0 %, 100 %\], got '0%'"),
        ({"budget": True}, r"budget must be a time or a share, got True"),
        ({"budget": None}, r"budget must be a time or a share, got None"),
        ({"report": ""}, r"report must be a path, or None for the terminal alone, got ''"),
        ({"report": 3}, r"report must be a path, or None for the terminal alone, got 3"),
        ({"report": __file__ + "/a.json"}, r"report must be a folder, a .json .* got '.*a.json'.*; name another one"),
        (
            {"report": "run.txt"},
            r"report must be a folder, a .json or a .html file, got 'run.txt'|run.txt.*name another",
        ),
        ({"cache": "runs"}, r"cache must be True or False, got 'runs'; ACCEL_CACHE=FOLDER names"),
        ({"plan": 3}, r"plan must be a plan or the path of its file, got a int"),
        ({"plan": {}}, r"plan must be a plan or the path of its file, got a dict"),
    ],
)
def test_an_option_is_wrong(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        accel.optimize(*make(), **options)


def test_a_wrong_call_leaves_the_search_before_it_alone() -> None:
    model, loader, optimizer = make()
    _, proxy, _ = accel.optimize(model, loader, optimizer, budget=60)
    with pytest.raises(InvalidArgument, match="allow must be"):
        accel.optimize(model, loader, optimizer, allow="fast")
    assert accel.optimize(model, loader, optimizer, budget=60)[1] is proxy
    accel.undo(model)


# -- plans -------------------------------------------------------------------------------------------------------------


def _raw(**changes: Any) -> dict[str, Any]:
    raw = {"schema": 1, "fingerprint": fingerprint(Net()), "model": "Net", "strategies": {}, "allow": "exact"}
    return {name: value for name, value in {**raw, **changes}.items() if value is not ...}


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        ("{", r"plan.json can't be read as a plan: .* Leave out plan= to search again"),
        ("", r"can't be read as a plan"),
        (b"\xff\xfe\x00", r"can't be read as a plan"),
        ("[1, 2]", r"must have plan schema 1, found 'list'"),
        ("null", r"must have plan schema 1, found 'NoneType'"),
        (_raw(schema=2), r"must have plan schema 1, found 2; leave out plan= to search again"),
        (_raw(schema=...), r"must have plan schema 1, found None"),
        (_raw(fingerprint=...), r"not a whole plan: plan is incomplete: it lacks fingerprint; leave out plan="),
        (_raw(strategies=["tf32"]), r"plan.strategies must be an object, got .*tf32"),
        (_raw(allow=3), r"plan.allow must be str, got '3'"),
        (_raw(model=...), r"plan is incomplete: it lacks model"),
        (_raw(strategies=...), r"plan is incomplete: it lacks strategies"),
        (_raw(speedup="fast"), r"plan.speedup must be a number, got 'fast'"),
        (_raw(fingerprint="0" * 16), r"the plan was made for another model \(Net, 0000000000000000\), this one is Net"),
        (_raw(strategies={"tf33": None}), r"plan names an unknown strategy 'tf33'; did you mean 'tf32'"),
    ],
)
def test_a_plan_that_is_broken_or_another_s_is_refused(tmp_path: Path, contents: Any, text: str) -> None:
    path = tmp_path / "plan.json"
    if isinstance(contents, dict):
        contents = json.dumps(contents)
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    with pytest.raises(accel.AccelError, match=text):
        accel.optimize(*make(), plan=path)


def test_a_plan_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", str(tmp_path)):
        with pytest.raises(PlanError, match="can't be read as a plan"):
            accel.optimize(*make(), plan=path)
