"""A plugin for pytest that puts one fault in before the tests are imported.

ACCEL_DECISION_FAULT=keeps_a_loser python -m pytest -p benchmarks.decisions.plugin tests/profiler/test_trial.py
"""

from __future__ import annotations

import os

import pytest

VARIABLE = "ACCEL_DECISION_FAULT"


def pytest_configure(config: pytest.Config) -> None:
    """Put in the fault that the environment names."""
    # Imported late: torch reads the environment that the tests' own settings make.
    from benchmarks.decisions.table import FAULTS

    name = os.environ.get(VARIABLE, "")
    if name not in FAULTS:
        raise pytest.UsageError(f"{VARIABLE} must name a fault of benchmarks/decisions/. Found: {name!r}")
    FAULTS[name].put_in()
