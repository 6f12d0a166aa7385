"""Reports of runs under `accel.optimize`, for tests of how they are shown and compared."""

from __future__ import annotations

from typing import Any

from accel.report import Event, Machine, Report, StrategyRow


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


def hostile(text: str = "<script>alert(1)</script>", value: float | None = 1.0) -> Report:
    """Make a report whose every text is `text`, and whose numbers that are drawn are `value`."""
    fates = {"summary": text, "treats": [text], "status": text, "why": text, "exactness": text, "setting": text}
    numbers = dict.fromkeys(("gain", "gain_low", "output_error", "spread_ms", "before_ms"), value)
    words = ("model", "started", "command", "fingerprint", "training_same", "state", "bottleneck", "bottleneck_advice")
    return full(
        **dict.fromkeys(words, text),
        plain_ms=value,
        anatomy_before={text: 0.0 if value is None else value},
        anatomy_after={"other": 1.0, text: 0.0 if value is None else value},
        rows=[row(name=text, **fates, **numbers, cost_s=value or 0.0)],
        events=[Event(step=1, text=text)],
        unseen=[text],
        machine=Machine(device=text, platform=text, torch=text),
        plan={text: text},
    )
