"""Options of the suite under pytest, and its models measured in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import pytest

from benchmarks import step_times
from benchmarks.pairs import Racer, racers
from benchmarks.step_times import Options, Steps
from benchmarks.suite import MODELS
from benchmarks.variants import VARIANTS

Start = Callable[[list[str]], AbstractContextManager[dict[str, Racer]]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what can be chosen."""
    group = parser.getgroup("suite", "models of the suite")
    group.addoption("--variant", action="append", choices=list(VARIANTS), help="beside plain; default planned")
    group.addoption("--size", default="tiny", choices=["tiny", "full"], help="of the models")
    group.addoption("--data", default="synthetic", choices=["synthetic", "real"], help="real: decoded from files")
    group.addoption("--turns", default=6, type=int, help="of each variant, default 6; at least 2")
    group.addoption("--seconds", default=4.0, type=float, help="of all turns of a model, default 4")
    group.addoption("--settle", default=60.0, type=float, help="longest search or compilation of a model, s")
    group.addoption("--slow", metavar="STRATEGY=SECONDS", help="slow a strategy down: the comparison must fail")


def chosen(config: pytest.Config) -> list[str]:
    """Return the variants that are measured."""
    names = ["plain", *(config.getoption("variant") or ["planned"])]
    return list(dict.fromkeys(names))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Take the models one after the other, each in all variants."""
    if "variant" in metafunc.fixturenames:
        pairs = [(model, name) for model in MODELS for name in chosen(metafunc.config)]
        metafunc.parametrize(("model", "variant"), pairs)
    elif "model" in metafunc.fixturenames:
        metafunc.parametrize("model", list(MODELS))


def slowed(text: str | None) -> tuple[str, float] | None:
    """Return the strategy and the seconds of `--slow`."""
    if text is None:
        return None
    name, _, seconds = text.partition("=")
    try:
        return name, float(seconds)
    except ValueError:
        raise pytest.UsageError(f"--slow must be STRATEGY=SECONDS, such as allocator=0.05. Found: {text}") from None


class Field:
    """The models of this run, measured when they are asked for first.

    Args:
        start: starts a process for each variant that trains the models named, and ends them on leaving.
        models: in the order in which `players` come to them.
        players: the processes that train them all.
        options: of a measurement.
    """

    def __init__(self, start: Start, models: list[str], players: dict[str, Racer], options: Options) -> None:
        self._start, self._waiting, self._players, self._options = start, list(models), players, options
        self._results: dict[str, dict[str, Steps]] = {}

    def __getitem__(self, model: str) -> dict[str, Steps]:
        """Return what each variant gave on a model."""
        while model not in self._results:  # the processes take the models in order
            current = self._waiting.pop(0)
            self._results[current] = self._measure(current)
        return self._results[model]

    def _measure(self, model: str) -> dict[str, Steps]:
        judged = [name for name in self._players if VARIANTS[name].allow]
        first = step_times.measure(self._players, self._options)
        return step_times.judge(first, partial(self._measure_anew, model), judged)

    def _measure_anew(self, model: str, times: int) -> dict[str, Steps]:
        with self._start([model]) as players:
            return step_times.measure(players, self._options.longer(times))


@pytest.fixture(scope="session")
def field(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    """Return the models of this run, whose variants wait in processes of their own."""
    config = request.config
    options = Options(config.getoption("turns"), config.getoption("seconds"), config.getoption("settle"))
    if options.turns < 2:
        raise pytest.UsageError(f"--turns must be at least 2. Found: {options.turns}")
    wanted = {item.callspec.params["model"] for item in request.session.items if hasattr(item, "callspec")}
    models = [model for model in MODELS if model in wanted]
    slow = slowed(config.getoption("slow"))
    shared = {"size": config.getoption("size"), "data": config.getoption("data")}

    def start(models: list[str]) -> AbstractContextManager[dict[str, Racer]]:
        variants = {
            name: {**shared, "models": models, "name": name, "slowed": slow if VARIANTS[name].allow else None}
            for name in chosen(config)
            if not VARIANTS[name].why_not()
        }
        return racers({name: (step_times.train, arguments) for name, arguments in variants.items()})

    # Searches begin anew, and leave nothing where the user's own runs would find it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCEL_CACHE", str(tmp_path_factory.mktemp("cache")))
        with start(models) as players:
            yield Field(start, models, players, options)
