"""What every test gets: process-wide settings put back, a reason for each skip, a count of what was left out."""

from __future__ import annotations

import gc
import os
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

# Threads that wait for others of a parallel region sleep: libgomp lets them spin, on cores that other tests need. With
# two processes on two cores the kernels' tests took 84 s, and take 37 s. It is read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Nor does any operator wait for a second thread, which on a busy machine takes up to 150 ms, here or in what tests
# start: a script of 0.15 s took 6 s beside another worker of pytest. Tests of threads say how many they want.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from filelock import FileLock
from hypothesis import settings

from accel.profiler.host import usable_cores
from tests import huge_pages
from tests.durations import Durations
from tests.sampling import mark_the_rest_slow

# Triton reads it when a kernel is defined. With a GPU the kernels are compiled, without one they are interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No test reads or writes what the user's own runs remember; tests of that have a folder of their own.
_WITHOUT_CACHE = {"ACCEL_CACHE": "0"}
os.environ.update(_WITHOUT_CACHE)

# A busy machine is no failure. The default run tries the same examples every time, so that what has passed goes on to
# pass; `make slow` tries more, and others each time.
settings.register_profile("few", settings(deadline=None, max_examples=25, derandomize=True))
settings.register_profile("as many as usual", settings(deadline=None))  # of tests that name no number of their own
settings.load_profile("few")

# Marker → what to type for the tests that carry it.
_RUN_WITH = {
    "gpu": "pytest -m gpu, on a machine with a CUDA device",
    "slow": "make slow",
    "integration": "make integrations",
}

_left_out: Counter[str] = Counter()

# Beyond that, tests of several ranks and worker processes get into each other's way.
_MOST_WORKERS = 4

_T = TypeVar("_T")


class Once(Protocol):
    """What the fixture `once` gives."""

    def __call__(self, name: str, compute: Callable[[], _T]) -> _T: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-slowest", action="store_true", help="write tests/slowest_ten.json from this run")


def pytest_configure(config: pytest.Config) -> None:
    if "not slow" not in config.option.markexpr:
        settings.load_profile("as many as usual")
    if not hasattr(config, "workerinput"):  # one process hears of all tests: the only one, or xdist's controller
        config.pluginmanager.register(Durations(config.getoption("--record-slowest")), "durations")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    # One more than cores: tests of ranks and worker processes wait a third of their time. Two more took 526 s, one more
    # 437.
    return min(usable_cores() + 1, _MOST_WORKERS)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    # Importing all tests makes a million objects that stay. Left out of garbage collection they cost neither that time
    # (half a second each) nor copies of their pages in the processes that tests fork.
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
    huge_pages.use()


@pytest.fixture(autouse=True, scope="module")
def _lean_heap() -> None:
    """Leave what earlier tests have imported out of garbage collection, too, and of looks at all objects: 0.5 s each.

    What was left out before isn't collected anew, so that this takes a hundredth of a second after the first time.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before -m "not slow" picks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_the_rest_slow(items)
    # pytest-xdist's processes must collect the same: an object's address in a name differs from process to process.
    if addresses := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"Names of tests must be the same in each process. Found: {addresses}. Give them ids=.")


def _why_no_gpu() -> str:
    return "" if torch.cuda.is_available() else "needs a CUDA device: torch.cuda.is_available() is False"


def _why_no_net() -> str:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"needs iproute2: {' and '.join(missing)} not found"
    return "" if os.geteuid() == 0 else "needs root to make network namespaces"


_WHY_NOT = {"gpu": _why_no_gpu, "net": _why_no_net}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, why_not in _WHY_NOT.items():
        if item.get_closest_marker(marker) and (reason := why_not()):
            pytest.skip(reason)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    # A GPU test that is slow too is counted once, as what it needs first.
    _left_out.update(next((name for name in _RUN_WITH if item.get_closest_marker(name)), "") for item in items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # Each worker collects all tests: what one has left out, all have.
    _left_out.update(Counter(getattr(node, "workeroutput", {}).get("left_out", {})) - _left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for marker, how in _RUN_WITH.items():
        if count := _left_out[marker]:
            terminalreporter.write_line(f"LEFT OUT {count} marked {marker} (run them with: {how})")


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Return what computes a thing once for all of pytest-xdist's processes; the result must pickle.

    A fixture for a whole module is set up by each process that gets a test of it.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def load_or_compute(name: str, compute: Callable[[], _T]) -> _T:
        path = folder / f"{name}.pickle"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                path.write_bytes(pickle.dumps(compute()))
        result: _T = pickle.loads(path.read_bytes())
        return result

    return load_or_compute


def _accel_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name == "ACCEL" or name.startswith("ACCEL_")}


def _seed_torch() -> None:
    # For devices that have not been started, torch.manual_seed keeps a copy of the stack for each: 2 ms a test.
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _process_settings() -> Iterator[None]:
    """Start each test with the same seeds, without ACCEL and without a cache, and put back what it changed for the
    whole process."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    # Asking for the device's state would start CUDA; a test that has not done so has no state to put back.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    variables = _accel_variables()
    for name in variables:
        del os.environ[name]
    os.environ.update(_WITHOUT_CACHE)
    try:
        with torch.random.fork_rng(devices=devices):
            # A test that fails for one shuffle in twelve fails always or never, here as in CI.
            _seed_torch()
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for name in _accel_variables():
            del os.environ[name]
        os.environ.update(variables)
