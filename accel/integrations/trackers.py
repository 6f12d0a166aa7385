"""The figures of a report for TensorBoard, Weights & Biases, MLflow and the loggers of Lightning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from accel.errors import InvalidArgument
from accel.report import Report


def metrics(report: Report) -> dict[str, float]:
    """Return the figures of a report by name; what is not known is left out.

    `accel/speedup` with `_low` and `_high`, the ends of its 95 % interval; `accel/plain_ms` and `accel/accel_ms`, a
    step's; `accel/search_s`; `accel/gain/NAME` of each strategy that had a trial. With `max_batch_size` also
    `accel/batch_size`, `accel/goodput`, `accel/noise_scale` and `accel/progress`, as of the last decision.

    Args:
        report: of `accel.explain`.

    Example:
        >>> metrics(accel.explain(model))["accel/speedup"]
        1.31
    """
    names = ("speedup", "speedup_low", "speedup_high", "plain_ms", "accel_ms", "search_s")
    figures = {f"accel/{name}": getattr(report, name) for name in names}
    figures.update({f"accel/gain/{row.name}": row.gain for row in report.rows})
    if report.batch_rows:
        last = report.batch_rows[-1]
        figures["accel/batch_size"], figures["accel/goodput"] = last.batch, last.measured or last.goodput
        figures["accel/noise_scale"], figures["accel/progress"] = last.noise, report.progress
    return _known(figures)


def log_report(report: Report, to: Any, step: int | None = None) -> None:
    """Log the figures of a report, and its verdict where the tracker takes text.

    Args:
        report: of `accel.explain`.
        to: TensorBoard's `SummaryWriter` (or what has its `add_scalar`), MLflow or a logger of Lightning
            (`log_metrics`), or a run of Weights & Biases (`log`).
        step: at which to log them; default: the steps that the report has seen, which a run of Weights & Biases gets
            as `accel/step`, at a step of its own.

    Raises:
        InvalidArgument: if `to` has none of these methods.

    Example:
        >>> log_report(accel.explain(model), SummaryWriter())
    """
    _log(to, metrics(report), "accel/verdict", report.verdict(), step, report.steps)


def log_batches(report: Report, to: Any) -> None:
    """Log every change of the batch size at the step at which it was decided: for the end of a training.

    `accel/batch_size`, `accel/goodput` and `accel/noise_scale`, and why, where the tracker takes text. A run of Weights
    & Biases, whose steps may only grow, gets the step as `accel/step`, at steps of its own.

    Args:
        report: of `accel.explain`, of a training with `max_batch_size`.
        to: as for `log_report`.

    Raises:
        InvalidArgument: if `to` has none of the methods that `log_report` names.

    Example:
        >>> log_batches(accel.explain(model), SummaryWriter())
    """
    for row in report.batch_rows:
        figures = {
            "accel/batch_size": row.batch,
            "accel/goodput": row.measured or row.goodput,
            "accel/noise_scale": row.noise,
        }
        _log(to, _known(figures), "accel/batch_size/why", row.why, None, row.step)


def _known(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Leave out what is not known, or infinite as the noise scale of pure noise: not every tracker takes that."""
    return {name: float(value) for name, value in figures.items() if value is not None and math.isfinite(value)}


def _log(to: Any, figures: dict[str, float], title: str, text: str, given: int | None, seen: int) -> None:
    """Log figures and a text at the step that the caller has given, or else at the one that accel has seen."""
    step = seen if given is None else given
    if hasattr(to, "add_scalar"):
        for name, value in figures.items():
            to.add_scalar(name, value, step)
        if hasattr(to, "add_text"):
            to.add_text(title, text, step)
    elif hasattr(to, "log_metrics"):
        to.log_metrics(figures, step=step)
    elif hasattr(to, "log"):
        entry = {**figures, title: text}
        # W&B drops what lies below a step of its own, which counts the calls of `log`.
        if given is None:
            to.log({**entry, "accel/step": seen})
        else:
            to.log(entry, step=given)
    else:
        raise InvalidArgument(
            "to must have add_scalar (TensorBoard), log_metrics (MLflow, Lightning) or log (W&B), "
            f"got {type(to).__name__}"
        )
