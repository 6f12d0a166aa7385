"""A checkpoint whose checksum is right and whose contents are anything: it is taken, or the one before is."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from accel.dataio.elastic_sampler import ElasticSampler
from accel.elastic import checkpoint
from accel.elastic.checkpoint import Checkpoints, Manifest
from accel.elastic.options import Checkpointing
from accel.elastic.saving.run import CheckpointRun
from accel.elastic.saving.training import TrainingCheckpoints
from accel.elastic.training_state import capture_state
from accel.errors import CheckpointError, OtherVersion
from tests.sampling import examples

SAMPLES, BATCH = 24, 2


class Training:
    """What a checkpoint restores, without a loop around it."""

    def __init__(self, folder: Path, said: Callable[[str], None] = lambda line: None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 3])
        self.sampler = ElasticSampler(SAMPLES, batch_size=BATCH)
        how = Checkpointing(folder=folder, schedulers=[self.schedule])
        self.run = CheckpointRun(
            TrainingCheckpoints(self.model, self.optimizer, self.sampler, how, None, said), say=said
        )

    def step(self) -> None:
        self.model(torch.randn(BATCH, 3)).sum().backward()
        self.optimizer.step()
        self.schedule.step()
        self.sampler.set_epoch(0, self.sampler.position + BATCH)
        self.run.batch_requested()

    def state(self) -> Any:
        return capture_state(
            self.model, self.optimizer, self.schedule, step=self.run.updates.step, sampler=self.sampler
        )


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    training = Training(folder)
    for _ in range(2):
        training.step()
        training.step()
        training.run.save()
    training.run.close()
    return folder


def tampered(saved: Path, folder: Path, change: Callable[[Any], None]) -> Any:
    """Copy the checkpoints, the newest one with another content under a right checksum; return that."""
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    (newest,) = folder.glob("*-step-4")
    state = torch.load(newest / "state.pt", weights_only=True)
    change(state)
    torch.save(state, newest / "state.pt")
    signed(newest)
    return state


def signed(newest: Path) -> None:
    content = (newest / "state.pt").read_bytes()
    digest = checkpoint.hashlib.sha256(content).hexdigest()
    (newest / "manifest.json").write_text(Manifest(len(content), digest, 4, 1).to_json())


def assert_taken_or_the_one_before(folder: Path, changed: Any) -> bool:
    """Return whether it was taken."""
    said: list[str] = []
    training = Training(folder, said.append)
    if type(version := changed.get("version")) is int and version != 1:
        with pytest.raises(OtherVersion):  # not the one before: what was trained since then would be lost
            training.run.restore()
        training.run.close()
        return False
    training.run.restore()
    training.run.close()
    refused = [line for line in said if "was refused" in line]
    assert [line.split()[0] for line in refused] == ["00000002-step-4"] * len(refused)
    found = training.state()
    if refused:
        expected = torch.load(next(folder.glob("*-step-2")) / "state.pt", weights_only=True)
        assert training.run.updates.step == 2
        assert equal(found["random"], expected["random"])
    else:
        expected = changed
        assert training.run.updates.step == changed["step"]
    # What was put in place is one of the two as a whole.
    for name in ("model", "optimizer 0", "scheduler 0", "'sampler'"):
        part = expected["parts"][name]
        assert refused or name != "model" or equal(dict(found["parts"][name]), dict(part)), name
        assert not refused or equal(dict(found["parts"][name]), dict(part)), name
    return not refused


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["parts"]["optimizer 0"]["param_groups"][0]["params"].__setitem__(0, [1]),
        lambda state: state["parts"]["optimizer 0"]["param_groups"][0].__setitem__("params", [{}] * 6),
        lambda state: state["parts"]["optimizer 0"]["param_groups"][0].__setitem__("lr", "fast"),
        lambda state: state["parts"]["optimizer 0"]["param_groups"][0].pop("lr"),
        lambda state: state["parts"]["optimizer 0"]["param_groups"][0].__setitem__("betas", 0.9),
        lambda state: state["parts"]["optimizer 0"]["state"][0].__setitem__("exp_avg", "none"),
        lambda state: state["parts"]["'sampler'"].__setitem__("position", 2.5),
        lambda state: state["parts"]["'sampler'"].__setitem__("position", None),
        lambda state: state["parts"]["'sampler'"].__setitem__("position", True),
        lambda state: state["parts"]["'sampler'"].__setitem__("epoch", True),
        lambda state: state["parts"].__setitem__("'sampler'", 3),
        lambda state: state["parts"].__setitem__("scheduler 0", []),
        lambda state: state["parts"]["model"].__setitem__("0.weight", torch.zeros(2, 2)),
        lambda state: state["parts"]["model"].pop("0.weight"),
        lambda state: state.__setitem__("step", True),
        lambda state: state.__setitem__("step", -3),
        lambda state: state.__setitem__("version", True),
        lambda state: state.__setitem__("kinds", {}),
        lambda state: state["random"].__setitem__(0, 7),
        lambda state: state["random"][0]["python"].__setitem__("words", torch.full((625,), 2**40)),
        lambda state: state["random"][0]["python"].__setitem__("version", 10**30),
        lambda state: state["random"][0]["numpy"]["state"].__setitem__("pos", 10**30),
        lambda state: state["random"][0]["numpy"]["state"].__setitem__("pos", 100_000),
        lambda state: state["random"][0].__setitem__("cuda", {}) if torch.cuda.is_available() else state.clear(),
    ],
)
def test_one_that_fits_nobody_is_refused(saved: Path, tmp_path: Path, change: Callable[[Any], None]) -> None:
    assert not assert_taken_or_the_one_before(tmp_path, tampered(saved, tmp_path, change))


VALUES = st.sampled_from(
    [
        *(None, True, -1, 0, 7, 2.5, float("nan"), 10**30, "", "x", [], {}, [[1]], {"a": 1}, (1, 2)),
        *(torch.zeros(3), torch.zeros(0), torch.ones((), dtype=torch.int64), torch.zeros(4, 3)),
    ]
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a value with one of its keys."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


@settings(max_examples=examples(40))
@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.sampled_from(["put", "drop", "rename", "double"]), VALUES),
        min_size=1,
        max_size=3,
    )
)
def test_whatever_is_in_it_it_is_taken_as_a_whole_or_the_one_before_is(
    saved: Path, changes: list[tuple[int, str, Any]]
) -> None:
    def change(state: Any) -> None:
        for number, how, value in changes:
            found = list(places(state))
            if not found:
                return
            container, key = found[number % len(found)]
            if how == "put":
                container[key] = copy.deepcopy(value)
            elif how == "drop":
                del container[key]
            elif isinstance(container, list):
                container.append(copy.deepcopy(container[key]))
            elif how == "rename":
                container[f"{key}x"] = container.pop(key)
            else:
                container[f"{key}x"] = container[key]

    with tempfile.TemporaryDirectory() as name:
        assert_taken_or_the_one_before(Path(name), tampered(saved, Path(name), change))


@settings(max_examples=examples(20))
@given(st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=8)), min_size=1, max_size=3))
def test_whatever_bytes_it_has_it_is_taken_or_the_one_before_is(saved: Path, changes: list[tuple[int, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(saved, folder, dirs_exist_ok=True)
        (newest,) = folder.glob("*-step-4")
        content = bytearray((newest / "state.pt").read_bytes())
        for place, values in changes:
            at = place % len(content)
            content[at : at + len(values)] = values
        (newest / "state.pt").write_bytes(content)
        signed(newest)
        said: list[str] = []
        training = Training(folder, said.append)
        training.run.restore()
        training.run.close()
        assert training.run.updates.step == 2 or not any("was refused" in line for line in said)


def test_where_none_fits_the_training_does_not_begin_anew(saved: Path, tmp_path: Path) -> None:
    """What it would save would in time remove those that are there."""
    tampered(saved, tmp_path, lambda state: state["parts"]["model"].pop("0.weight"))
    shutil.rmtree(next(tmp_path.glob("*-step-2")))
    training = Training(tmp_path)
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"lacks the model's '0\.weight'\. Nothing was loaded"):
        training.run.restore()
    training.run.close()
    assert equal(dict(training.model.state_dict()), before)


def test_all_ranks_take_the_one_before_where_one_of_them_cannot_take_it(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    taken: list[int] = []

    def gather(mine: Any) -> list[Any]:
        return [mine, mine if type(mine) is int else taken == [4]]  # rank 1 can't take that of step 4

    checkpoints = Checkpoints(tmp_path)
    state = checkpoints.load_latest(gather, lambda state: taken.append(state["step"]))
    assert state is not None
    assert (state["step"], taken) == (2, [4, 2])
    assert checkpoints.refused == ["00000002-step-4 was refused: another rank could not take it."]
