"""Every way to make batches, as a fixture, and a watch over every test: what hangs ends the run with its stacks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest

from tests.dataio.engines import watched
from tests.dataio.numbers import ENGINES

# Workers by forkserver are forked from one that has imported torch: seconds each.
multiprocessing.set_forkserver_preload(["torch", "accel.dataio.engine.worker"])


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """End the run if a test hangs."""
    with watched():
        yield


# One forked worker can't mix up an order, as two can: it is left to slow runs.
_PARAMS = [pytest.param(engine, marks=[pytest.mark.slow] if engine == ("fork", 1) else []) for engine in ENGINES]


@pytest.fixture(params=_PARAMS, ids=lambda engine: f"{engine[0]}{engine[1]}")
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the arguments of a `ContinuousLoader` that make it use one engine."""
    return {"mode": request.param[0], "num_workers": request.param[1]}
