"""Errors of the loop's own at any place, under each strategy: they reach the loop, once, and nobody is blamed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

import accel
from accel import entry, strategies
from accel.compile import compiled_draws
from accel.dataio.sample_cache import SampleKeeper
from accel.strategies.base import Exactness
from tests.accel.loops import Quick
from tests.sampling import examples

pytestmark = [  # of torch's compiler
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
]

STEPS = 14
PLACES = (
    "sample",
    "collate",
    "pre-hook",
    "forward",
    "inner hook",
    "hook",
    "loss",
    "tensor hook",
    "backward hook",
    "optimizer hook",
    "late optimizer hook",
)


class Stop(Exception):
    """A class of the loop's own, with arguments of its own."""

    def __init__(self, place: str, number: int) -> None:
        super().__init__(place, number)


KINDS: dict[str, Callable[[str, int], Exception]] = {
    "own": Stop,
    "RuntimeError": RuntimeError,
    "ValueError": ValueError,
    "TimeoutError": lambda place, number: TimeoutError(f"{place} {number}"),
}


class Faults:
    """Counts what runs at each place, and raises once at one, in a signal handler or there."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.place, self.kind, self.by_signal = "", "own", False
        self.number = 0

    def at(self, place: str) -> None:
        self.log.append(place)
        if place == self.place:
            self.place = ""
            if self.by_signal:
                signal.raise_signal(signal.SIGUSR1)
            raise KINDS[self.kind](place, self.number)

    def collate(self, samples: list[Any]) -> Any:
        self.at("collate")
        return default_collate(samples)

    def handle(self, signum: int, frame: Any) -> None:
        raise KINDS[self.kind]("signal", self.number)


class Net(nn.Module):
    def __init__(self, at: Faults) -> None:
        super().__init__()
        self._at = [at]
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self._at[0].at("forward")
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.head(self.drop(x))  # type: ignore[no-any-return]


class Images(Dataset[tuple[Tensor, int]]):
    def __init__(self, at: Faults) -> None:
        self.at, self.x = at, torch.randn(24, 3, 6, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.at.at("sample")
        return self.x[index].clone(), index % 3


@pytest.fixture
def one_graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch's compiler capture graphs, and run them as they are; let `Quick` be one more strategy."""
    monkeypatch.setattr(compiled_draws, "compile_with_plain_draws", lambda graph, inputs: graph.forward)
    monkeypatch.setattr(strategies, "REGISTRY", [*strategies.REGISTRY, Quick])
    monkeypatch.setattr("accel.session.session.TURNS.join", lambda session: None)
    monkeypatch.setattr(SampleKeeper, "noting_share", lambda self, fetch: 0.0)  # which is measured
    yield
    torch._dynamo.reset()


def hooked(model: Net, optimizer: torch.optim.Optimizer, at: Faults) -> None:
    """Put the loop's own hooks on."""
    model.register_forward_pre_hook(lambda *_: at.at("pre-hook"))
    model.register_forward_hook(lambda *_: at.at("hook"))
    model.head.register_forward_hook(lambda *_: at.at("inner hook"))
    model.norm.register_full_backward_hook(lambda *_: at.at("backward hook"))
    optimizer.register_step_pre_hook(lambda *_: at.at("optimizer hook"))
    optimizer.register_step_post_hook(lambda *_: at.at("late optimizer hook"))


def trained(name: str, planned: dict[int, tuple[str, str, bool]]) -> tuple[Any, ...]:
    """Train under a strategy, '' for none; return what was seen, what is left, and what the session says."""
    torch.manual_seed(0)
    at = Faults()
    model: Any = Net(at)
    loader: Any = DataLoader(Images(at), 4, shuffle=True, collate_fn=at.collate)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    session: Any = None
    if name:
        model, loader, optimizer = accel.optimize(model, loader, optimizer, allow="reduced", budget=60)
        session = entry.MODELS[model].session
    hooked(model, optimizer, at)
    before, seen, number, batches = signal.signal(signal.SIGUSR1, at.handle), list[Any](), 0, iter(())
    try:
        while number < STEPS:
            at.number = number
            if number == 3 and session is not None:
                session.runner._next_action = lambda first=False: None
                session.switchboard.switch({name: _setting(session, name)})
                session.run.gate.watch(session.events.calls)
                at.log.append("on") if name not in session.active else None
            at.place, at.kind, at.by_signal = planned.get(number, ("", "own", False))
            number += 1
            try:
                try:
                    x, target = next(batches)
                except StopIteration:
                    batches = iter(loader)
                    x, target = next(batches)
                optimizer.zero_grad()
                outputs = model(x)
                outputs.register_hook(lambda _: at.at("tensor hook"))
                at.at("loss")
                nn.functional.cross_entropy(outputs, target).backward()
                optimizer.step()
            except (Stop, RuntimeError, ValueError, TimeoutError) as error:
                seen.append((type(error), error.args, type(error.__context__)))
    finally:
        signal.signal(signal.SIGUSR1, before)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    outcome = ({}, {}, "")
    if session is not None:
        outcome = (dict(session.switchboard.trips), dict(session.active), session.failed)
        accel.undo(model)
    return seen, at.log, state | {"random": torch.get_rng_state()}, outcome


def _setting(session: Any, name: str) -> Any:
    return {"fused_optimizer": "foreach", "intraop_threads": 1, "loader_workers": 1}.get(name)


WRAPPERS = (
    "quick",
    "channels_last",
    "autocast_bf16",
    pytest.param("torch_compile", marks=pytest.mark.slow),
    "dropout_masks",
    "fused_optimizer",
    "sample_cache",
)
ANY_FAULTS = st.dictionaries(
    st.integers(4, STEPS - 1),
    st.tuples(st.sampled_from(PLACES), st.sampled_from(sorted(KINDS)), st.booleans()),
    min_size=1,
    max_size=4,
)


def assert_as_plain(name: str, planned: dict[int, tuple[str, str, bool]]) -> None:
    seen, log, state, _ = trained("", planned)
    own_seen, own_log, own_state, (trips, active, failed) = trained(name, planned)
    assert own_seen == seen and len(seen) == len(planned)
    assert (trips, list(active), failed) == ({}, [name], "")
    counted = [each for each in log if name != "sample_cache" or each != "sample"]
    assert [each for each in own_log if name != "sample_cache" or each != "sample"] == counted
    registered = next(each for each in strategies.REGISTRY if each.name == name)
    if registered.exactness is Exactness.EXACT:
        assert [key for key, value in state.items() if not torch.equal(value, own_state[key])] == []


@pytest.mark.parametrize("name", WRAPPERS)
@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(planned=ANY_FAULTS)
def test_an_error_of_the_loop_s_own_reaches_it_once(
    one_graph: None, name: str, planned: dict[int, tuple[str, str, bool]]
) -> None:
    assert_as_plain(name, planned)


def test_an_error_of_the_loop_s_own_reaches_it_once_where_the_model_is_compiled(one_graph: None) -> None:
    assert_as_plain(
        "torch_compile",
        {4: ("forward", "RuntimeError", True), 6: ("inner hook", "own", False), 8: ("hook", "ValueError", False)},
    )
