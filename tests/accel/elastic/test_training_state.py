"""A training's state: complete, for any number of ranks, restored wholly or not at all."""

from __future__ import annotations

import copy
import functools
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from accel import amp
from accel.dataio.elastic_sampler import ElasticSampler
from accel.elastic.checkpoint import Checkpoints
from accel.elastic.learning_rate import LearningRateScaler
from accel.elastic.progress import ProgressSchedule
from accel.elastic.saving.plain_values import check_plain
from accel.elastic.scaling_rules import BatchScale
from accel.elastic.training_state import capture_state, random_state, restore_state, set_random_state, unwrapped
from accel.errors import CheckpointError, InvalidArgument, OtherVersion
from accel.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedLARS, FusedSGD
from tests.process_group import group_of_one


def model_of(width: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()


def all_of(*parts: Any) -> str:
    return repr([part.state_dict() for part in parts] + [random.getstate(), torch.get_rng_state().tolist()])


def through_a_file(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    checkpoints = Checkpoints(folder)
    checkpoints.save(state)
    loaded = checkpoints.load_latest()
    assert loaded is not None, checkpoints.refused
    return loaded


OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    torch.optim.Adam,
    functools.partial(torch.optim.AdamW, fused=True),
    functools.partial(torch.optim.Adam, lr=torch.tensor(0.1)),
    torch.optim.NAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adafactor,
    functools.partial(FusedSGD, lr=0.1, momentum=0.9),
    FusedAdam,
    FusedAdamW,
    FusedLAMB,
    functools.partial(FusedLARS, lr=0.1),
]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: getattr(make, "func", make).__name__)
def test_every_optimizer_goes_on_bit_for_bit(tmp_path: Path, make: Callable[..., torch.optim.Optimizer]) -> None:
    model = model_of()
    optimizer = make(model.parameters())
    train(model, optimizer)
    state = through_a_file(tmp_path, capture_state(model, optimizer, step=2))
    train(model, optimizer)
    again = model_of(seed=1)
    other = make(again.parameters())
    assert restore_state(state, again, other) == []
    train(again, other)
    assert all_of(again, other) == all_of(model, optimizer)


def test_everything_else_with_a_state(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = LearningRateScaler(optimizer)
        more = {
            "scaler": scaler,
            "schedule": ProgressSchedule(lr_scheduler.ExponentialLR(optimizer, 0.9), scaler),
            "grad_scaler": torch.amp.GradScaler("cpu", init_scale=8.0),
            "sampler": ElasticSampler(20, batch_size=4),
        }
        return model, optimizer, more

    model, optimizer, more = made()
    more["scaler"].update(BatchScale(256, 64, noise=100.0, noise_bounds=(50.0, 200.0), epoch=0.5))
    for _, _ in zip(range(2), more["sampler"].consumed(more["sampler"]), strict=False):
        train(model, optimizer, 1)
        more["schedule"].step()
    state = through_a_file(tmp_path, capture_state(model, optimizer, **more))
    again, other, others = made()
    assert restore_state(state, again, other, **others) == []
    assert others["sampler"].position == more["sampler"].position > 0
    assert {name: part.state_dict() for name, part in more.items()} == {n: p.state_dict() for n, p in others.items()}


def test_mixed_precision_with_master_weights(tmp_path: Path) -> None:
    def made() -> Any:
        model = model_of()
        return amp.decorate(model, torch.optim.Adam(model.parameters()), level="O2", dtype=torch.bfloat16)

    model, optimizer = made()
    train(model, optimizer)
    state = through_a_file(tmp_path, capture_state(model, optimizer))
    again, other = made()
    restore_state(state, again, other)
    train(model, optimizer)
    set_back = state["random"][0]["torch"]
    torch.set_rng_state(set_back)
    train(again, other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


# The model's wrappers, ranks


class Compiled(nn.Module):
    """Holds its module as torch.compile's does, whose import takes seconds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


def test_names_are_those_of_the_module_inside(tmp_path: Path) -> None:
    inner = model_of()
    with group_of_one(tmp_path):
        wrapped: nn.Module = DistributedDataParallel(inner)
        state = capture_state(wrapped)
        plain = model_of(seed=1)
        restore_state(state, plain)
        assert unwrapped(wrapped) is inner
        restore_state(capture_state(model_of(seed=2)), wrapped)
    assert state["parts"]["model"].keys() == inner.state_dict().keys()
    assert unwrapped(Compiled(nn.DataParallel(inner))) is inner


# All or nothing


class Picky:
    """Refuses one state."""

    def __init__(self) -> None:
        self.value = 3

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]
        if self.value == 13:
            raise ValueError("13 is not taken")


class PickyModel(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"value": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        if state["value"] == 13:
            raise KeyboardInterrupt if state.get("interrupts") else ValueError("13 is not taken")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


WRONG: list[tuple[str, Callable[[], dict[str, Any]]]] = [
    (
        r"it holds the model's '4\.weight', which this model does not have",
        lambda: {"model": model_of().append(nn.PReLU())},
    ),
    (r"it lacks the model's '1\.weight'", lambda: {"model": model_of()[:1]}),
    (r"the model's '0\.weight' had shape \[5, 4\], and has \[3, 4\] here", lambda: {"model": model_of(5)}),
    (r"it has no optimizer 0 \(Adam\); leave it out, or start over", lambda: {"optimizers": ()}),
    (
        r"it holds optimizer 1 \(SGD\), which this run does not have; pass it",
        lambda: {"optimizers": [adam(m := model_of()), torch.optim.SGD(m.parameters())], "model": m},
    ),
    (r"optimizer 0 was a SGD, and is a Adam here", lambda: {"optimizers": torch.optim.SGD(model_of().parameters())}),
    (
        r"optimizer 0 had groups of \[2, 4\] parameters, and has \[6\] here",
        lambda: {
            "optimizers": torch.optim.Adam(
                [{"params": (p := list(model_of().parameters()))[:2]}, {"params": p[2:]}],
            )
        },
    ),
    (r"it has no scheduler 0 \(StepLR\)", lambda: {"schedulers": ()}),
    (
        r"scheduler 0 was a ExponentialLR, and is a StepLR here",
        lambda: {"schedulers": lr_scheduler.ExponentialLR(adam(model_of()), 0.9)},
    ),
    (r"it has no 'picky' \(Picky\)", lambda: {"picky": None}),
]


@pytest.mark.parametrize(("text", "other"), WRONG, ids=[text for text, _ in WRONG])
def test_a_state_of_another_training_changes_nothing(text: str, other: Callable[[], dict[str, Any]]) -> None:
    theirs_model = model_of(seed=5)
    theirs_optimizer = adam(theirs_model)
    theirs: dict[str, Any] = {
        "model": theirs_model,
        "optimizers": theirs_optimizer,
        "schedulers": lr_scheduler.StepLR(theirs_optimizer, 2),
        "picky": Picky(),
        **other(),
    }
    state = capture_state(**{name: part for name, part in theirs.items() if part is not None})
    model = model_of()
    optimizer = adam(model)
    train(model, optimizer)
    scheduler, picky = lr_scheduler.StepLR(optimizer, 2), Picky()
    picky.value = 8
    before = all_of(model, optimizer, scheduler, picky)
    with pytest.raises(CheckpointError, match=rf"is not one of this training: {text}.*Nothing was loaded"):
        restore_state(state, model, optimizer, scheduler, picky=picky)
    assert all_of(model, optimizer, scheduler, picky) == before


@pytest.mark.parametrize("state", [{"version": 2}, {"version": 2, "step": 1, "kinds": {"a": 1}, "parts": {}}])
def test_a_state_of_another_version_is_refused_as_such(state: Any) -> None:
    """Else an older checkpoint of this version would be loaded in its place."""
    with pytest.raises(OtherVersion, match="its version is 2, and 1 is known here"):
        restore_state(state, nn.Linear(1, 1))


@pytest.mark.parametrize("state", [{}, {"version": 7}, [1]])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"its version is .*, and 1 is known here; save what capture_state returns"
    ):
        restore_state(state, nn.Linear(1, 1))


@pytest.mark.parametrize("culprit", ["picky", "model", "random", "interrupt"])
def test_a_part_that_refuses_puts_the_others_back(culprit: str) -> None:
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any, Picky]:
        torch.manual_seed(seed)
        model = PickyModel(4, 2)
        optimizer = adam(model)
        train(model, optimizer, seed)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
        picky = Picky()
        picky.value = seed
        return model, optimizer, scheduler, picky

    *parts, picky = made(2)
    state = copy.deepcopy(capture_state(*parts, picky=picky))
    if culprit == "picky":
        state["parts"]["'picky'"]["value"] = 13
    elif culprit == "random":
        state["random"][0]["torch"] = torch.zeros(3, dtype=torch.uint8)
    else:
        state["parts"]["model"]["_extra_state"] = {"value": 13, "interrupts": culprit == "interrupt"}
    kept = repr(state)
    *own, own_picky = made(3)
    before = all_of(*own, own_picky)
    if culprit == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            restore_state(state, *own, picky=own_picky)
    else:
        with pytest.raises(CheckpointError, match=r"the checkpoint does not fit: .*Nothing was loaded"):
            restore_state(state, *own, picky=own_picky)
    assert all_of(*own, own_picky) == before
    assert repr(state) == kept


def test_optimizers_of_one_kind_read_each_others_state() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    state = capture_state(model, optimizer)
    other = FusedAdamW(model.parameters())
    assert restore_state(state, model, other) == []
    assert len(other.state) == len(optimizer.state)


def test_a_restored_state_is_not_changed_by_training() -> None:
    model = model_of()
    optimizer = adam(model)
    train(model, optimizer)
    state = copy.deepcopy(capture_state(model, optimizer))
    before = repr(state)
    restore_state(state, model, optimizer)
    train(model, optimizer)
    assert repr(state) == before


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(
        InvalidArgument, match=r"must have state_dict and load_state_dict, got a int as 'epoch'; add plain"
    ):
        capture_state(nn.Linear(1, 1), epoch=3)  # type: ignore[arg-type]


def test_values_beside_the_state_are_kept(tmp_path: Path) -> None:
    state = through_a_file(tmp_path, {**capture_state(nn.Linear(1, 1), step=4), "best": 0.5})
    assert (state["best"], state["step"]) == (0.5, 4)
    check_plain(state)
    assert restore_state(state, nn.Linear(1, 1)) == []


def test_states_that_torch_itself_does_not_keep_so_are_taken() -> None:
    """NovoGrad's moments are numbers; MADGRAD has an entry beside those of parameters."""

    class Novo(torch.optim.SGD):
        pass

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        return model, Novo(model.parameters(), 0.1)

    model, optimizer = made()
    optimizer.state[model.weight]["exp_avg_sq"] = torch.tensor(2.0)
    optimizer.state["k"] = torch.tensor([3])  # type: ignore[index]
    state = copy.deepcopy(capture_state(model, optimizer))
    model, optimizer = made()
    assert restore_state(state, model, optimizer) == []
    assert float(optimizer.state[model.weight]["exp_avg_sq"]) == 2.0


def test_none_among_more_is_passed_over() -> None:
    """`scaler=None`, as a script has it that uses one on a GPU only."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = capture_state(model, optimizer, scaler=None)
    assert restore_state(state, model, optimizer, scaler=None) == []
    with pytest.raises(CheckpointError, match="it has no 'scaler'"):
        restore_state(state, model, optimizer, scaler=torch.amp.GradScaler("cpu"))


# Random states as plain values: every stream goes on with the same draws


def loaded(value: Any) -> Any:
    check_plain(value)
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def draws() -> list[Any]:
    python = [random.random(), random.gauss(0, 1), random.getrandbits(100)]
    return [*python, np.random.rand(), np.random.randn(), torch.rand(3).tolist(), torch.randn(()).item()]


@given(st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_draws_go_on_bit_for_bit(seed: int, drawn: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    for _ in range(drawn):
        draws()
    random.gauss(0, 1)  # keeps its second number for the next call, as NumPy's does
    np.random.randn()
    state = loaded(random_state())
    expected = [draws() for _ in range(2)]
    set_random_state(state)
    assert [draws() for _ in range(2)] == expected


def test_python_and_numpy_states_are_the_same_after_a_round_trip() -> None:
    random.gauss(0, 1)
    np.random.randn(3)
    before: Any = random.getstate(), np.random.get_state(legacy=False)
    state = loaded(random_state())
    draws()
    set_random_state(state)
    after: Any = random.getstate(), np.random.get_state(legacy=False)
    assert repr(after) == repr(before)
    assert after[1]["state"]["key"].dtype == np.uint32


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.Philox, np.random.SFC64])
def test_numpys_other_bit_generators(kind: Any) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(kind(7))
    try:
        np.random.rand(3)
        state = loaded(random_state())
        expected = np.random.rand(5).tolist()
        set_random_state(state)
        assert np.random.rand(5).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("part", ["python", "numpy", "torch", "cuda"])
def test_what_is_no_random_state_changes_nothing(part: str) -> None:
    state = random_state()
    wrong = copy.deepcopy(state)
    del wrong[part]
    random.random(), np.random.rand(), torch.rand(1)
    before = random_state()
    with pytest.raises(InvalidArgument, match="must be one that random_state"):
        set_random_state(wrong)
    assert repr(random_state()) == repr(before)
    wrong[part] = {"words": 3}
    if part != "cuda" or torch.cuda.is_available():
        with pytest.raises(InvalidArgument, match="got one that does not fit"):
            set_random_state(wrong)
        assert repr(random_state()) == repr(before)


class FakeCuda:
    """CUDA's random states, on devices that are numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, current: int) -> None:
        self.states = [torch.full((16,), number, dtype=torch.uint8) for number in range(count)]
        for name, value in {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: count,
            "current_device": lambda: current,
            "get_rng_state_all": lambda: list(self.states),
            "set_rng_state_all": self.set_all,
            "set_rng_state": lambda state: self.states.__setitem__(current, state),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def set_all(self, states: list[torch.Tensor]) -> None:
        self.states = list(states)


def test_cuda_devices_each_get_theirs_and_one_alone_that_of_the_current(monkeypatch: pytest.MonkeyPatch) -> None:
    four = FakeCuda(monkeypatch, 4, current=2)
    state = loaded(random_state())
    four.states = [torch.zeros(16, dtype=torch.uint8)] * 4
    set_random_state(state)
    assert [int(one[0]) for one in four.states] == [0, 1, 2, 3]
    one = FakeCuda(monkeypatch, 1, current=0)
    set_random_state(state)
    assert [int(each[0]) for each in one.states] == [2]


@pytest.mark.gpu
def test_draws_on_a_gpu_go_on() -> None:
    torch.rand(1, device="cuda")
    state = loaded(random_state())
    expected = torch.rand(5, device="cuda")
    set_random_state(state)
    assert torch.equal(torch.rand(5, device="cuda"), expected)
