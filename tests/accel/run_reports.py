"""Reports of runs under `accel.optimize`, for tests of how they are shown and compared."""

from __future__ import annotations

from typing import Any

from accel.report import Report, StrategyRow
from tests.accel.hostile import filled


def row(**fields: Any) -> StrategyRow:
    """Make the row of a strategy that was kept."""
    base: dict[str, Any] = {
        "name": "channels_last",
        "summary": "NHWC",
        "treats": ["conv"],
        "exactness": "reordered",
        "status": "kept",
        "why": "53 layout conversions went away",
        "before_ms": 26.6,
        "after_ms": 18.4,
        "spread_ms": 0.31,
        "gain": 1.45,
        "gain_low": 1.38,
        "gain_high": 1.52,
        "output_error": 3e-7,
        "gradient_error": 2e-6,
        "cost_s": 0.8,
    }
    return StrategyRow(**{**base, **fields})


def untried() -> StrategyRow:
    """Make the row of a strategy without a number."""
    return StrategyRow(
        name="bf16", summary="", treats=[], exactness="reduced", status="not allowed", why="needs reduced"
    )


def full(**fields: Any) -> Report:
    """Make the report of a search that has ended."""
    base: dict[str, Any] = {
        "state": "done",
        "plain_ms": 26.0,
        "accel_ms": 16.0,
        "speedup": 1.625,
        "speedup_low": 1.58,
        "speedup_high": 1.71,
        "training_same": "gradients agree to 3e-07",
        "steps": 700,
        "search_steps": 214,
        "search_s": 3.2,
        "break_even_step": 611,
        "bottleneck": "convolutions",
        "bottleneck_share": 0.61,
        "bottleneck_advice": "bf16 would treat it",
        "anatomy_before": {"loader": 6.0, "backward": 20.0},
        "anatomy_after": {"loader": 1.0, "backward": 15.0},
        "rows": [row()],
        "plan": {"channels_last": {}},
    }
    return Report(**{**base, **fields})


def hostile(*text_and_number: Any) -> Report:
    """Make a report that means harm; see `filled`."""
    return filled(Report, *text_and_number)
