"""Every way to make batches, as a fixture."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dataio.numbers import ENGINES


@pytest.fixture(params=ENGINES, ids=lambda engine: f"{engine[0]}{engine[1]}")
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the arguments of a `ContinuousLoader` that make it use one engine."""
    return {"mode": request.param[0], "workers": request.param[1]}
