"""Compare two reports: is the newer run slower, and what changed in its strategies and its step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accel.errors import InvalidArgument, ReportError
from accel.report.model import Report, StrategyRow
from accel.report.terminal import STATUS_STYLES, Cell, Page, gain_text, ms_text


@dataclass(frozen=True, kw_only=True)
class StrategyChange:
    """One strategy in both reports; None where a report has no row for it."""

    name: str
    old: StrategyRow | None
    new: StrategyRow | None

    @property
    def changed(self) -> bool:
        """Whether its status or its setting differ."""
        return _fate(self.old) != _fate(self.new)


@dataclass(frozen=True, kw_only=True)
class PhaseChange:
    """One phase of the step in both reports, ms; None where a report lacks it."""

    name: str
    old_ms: float | None
    new_ms: float | None


@dataclass(frozen=True, kw_only=True)
class StepChange:
    """A step's time in two reports."""

    old_ms: float
    """Step of the older report, ms."""
    new_ms: float
    """Step of the newer report, ms."""
    threshold: float
    """Slow-down that still counts as the same, as a fraction."""

    @property
    def ratio(self) -> float:
        """`new_ms` ÷ `old_ms`: above 1 the newer run is slower."""
        return self.new_ms / self.old_ms

    @property
    def unit(self) -> str:
        """What the compared time is for."""
        return "step"

    @property
    def regressed(self) -> bool:
        """Whether `new_ms` is above `old_ms` by more than `threshold`."""
        return self.new_ms > self.old_ms * (1 + self.threshold)

    def verdict(self) -> str:
        """Say the outcome in one line."""
        percent = 100 * (self.ratio - 1)
        word = "regression" if self.regressed else "no regression"
        change = f"{abs(percent):.3g} % {'slower' if percent > 0 else 'faster'}" if percent else "no change"
        return f"{word}: {ms_text(self.old_ms)} → {ms_text(self.new_ms)} ms per {self.unit}, {change}{self._allowed()}"

    def _allowed(self) -> str:
        return f" (threshold {100 * self.threshold:.3g} %)"


@dataclass(frozen=True, kw_only=True)
class Comparison(StepChange):
    """Two reports side by side; the step is the accelerated one."""

    strategies: tuple[StrategyChange, ...]
    phases: tuple[PhaseChange, ...]
    notes: tuple[str, ...]
    """What makes the two runs hard to compare, one sentence each."""

    def render(self, width: int | None = None, color: bool | None = None) -> str:
        """Render the comparison as text, verdict first.

        Args:
            width: columns, at most 100; None asks the terminal.
            color: whether to write ANSI codes; None writes them only to a terminal, and never under `NO_COLOR`.

        Returns:
            Lines without a final newline.
        """
        page = Page(width, color)
        page.say(self.verdict(), "bold red" if self.regressed else "bold green")
        for note in self.notes:
            page.say(f"note: {note}", "yellow")
        _strategies(page, self.strategies)
        phase_rows(page, "accelerated step in ms", self.phases)
        return page.text()


def compare(before: Report, after: Report, *, threshold: float = 0.05) -> Comparison:
    """Compare two reports of the same training.

    Args:
        before: the older report.
        after: the newer report.
        threshold: slow-down of the accelerated step that still counts as the same; 0.05 is 5 %.

    Returns:
        The comparison; `regressed` is `after.accel_ms > before.accel_ms * (1 + threshold)`.

    Raises:
        ReportError: if a report has no accelerated step time.
        InvalidArgument: if `threshold` is negative or not a number.
    """
    check_threshold(threshold)
    return Comparison(
        old_ms=_accel_ms(before, "first"),
        new_ms=_accel_ms(after, "second"),
        threshold=threshold,
        strategies=_strategy_changes(before, after),
        phases=phase_changes(before.anatomy_after, after.anatomy_after),
        notes=tuple(_notes(before, after)),
    )


def check_threshold(threshold: float) -> None:
    """Raise `InvalidArgument` unless `threshold` is 0 or more."""
    if not (math.isfinite(threshold) and threshold >= 0):
        raise InvalidArgument(f"threshold must be 0 or more, e.g. 0.05 for 5 %. Found: {threshold}")


def _accel_ms(report: Report, which: str) -> float:
    value = report.accel_ms
    # A report file may hold anything: NaN compares as "no regression", and zero has no ratio.
    if not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise ReportError(
            f"the {which} report has no accelerated step time (accel_ms is {value!r}, state {report.state!r}); "
            "let its search end before comparing."
        )
    return float(value)


def _strategy_changes(before: Report, after: Report) -> tuple[StrategyChange, ...]:
    old, new = ({row.name: row for row in report.rows} for report in (before, after))
    names = dict.fromkeys([*old, *new])
    return tuple(StrategyChange(name=name, old=old.get(name), new=new.get(name)) for name in names)


def phase_changes(old: Mapping[str, float], new: Mapping[str, float]) -> tuple[PhaseChange, ...]:
    """Pair the phases of two steps, ms, by name."""
    names = dict.fromkeys([*old, *new])
    return tuple(PhaseChange(name=name, old_ms=old.get(name), new_ms=new.get(name)) for name in names)


def _notes(before: Report, after: Report) -> list[str]:
    pairs = [
        ("model", before.model, after.model),
        ("parameters", before.parameters, after.parameters),
        ("fingerprint", before.fingerprint, after.fingerprint),
        ("allow", before.allow, after.allow),
        ("samples per step", before.samples_per_step, after.samples_per_step),
        *((name, value, vars(after.machine)[name]) for name, value in vars(before.machine).items()),
    ]
    notes = [f"{name.replace('_', ' ')} went from {old!r} to {new!r}" for name, old, new in pairs if old != new]
    states = (("first", before.state), ("second", after.state))
    return notes + [f"the {which} run is {state}" for which, state in states if state in {"searching", "interrupted"}]


def _fate(row: StrategyRow | None) -> str:
    if row is None:
        return "no row"
    return f"{row.status} {row.setting}".strip()


def _gain(row: StrategyRow | None) -> str:
    return "-" if row is None else gain_text(row.gain, row.gain_low, row.gain_high)


def _strategies(page: Page, changes: tuple[StrategyChange, ...]) -> None:
    shown = [change for change in changes if change.changed or _gain(change.old) != "-" or _gain(change.new) != "-"]
    if not shown:
        return
    page.heading("strategies (* marks a changed one)")
    for change in shown:
        mark, style = ("*", "bold") if change.changed else (" ", "")
        fates = " → ".join(dict.fromkeys([_fate(change.old), _fate(change.new)]))
        status = change.new.status if change.new else ""
        name = Cell(text=f"{mark} {change.name}", width=26, style=style, whole=True)
        fate = Cell(text=fates, width=28, style=STATUS_STYLES.get(status, "dim"))
        page.row([name, fate, Cell(text=f"{_gain(change.old)} → {_gain(change.new)}", width=40, whole=True)])


def phase_rows(page: Page, heading: str, changes: Sequence[PhaseChange]) -> None:
    """Write the phases side by side with their difference."""
    if not changes:
        return
    page.heading(heading)
    for change in changes:
        known = change.old_ms is not None and change.new_ms is not None
        difference = f"{(change.new_ms or 0.0) - (change.old_ms or 0.0):+.3g}" if known else "-"
        texts = (ms_text(change.old_ms), "→", ms_text(change.new_ms), difference)
        cells = [Cell(text=text, width=width, right=True) for text, width in zip(texts, (9, 2, 9, 9), strict=True)]
        page.row([Cell(text=f"  {change.name}", width=22, whole=True), *cells])
