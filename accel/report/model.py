"""The report as data: what was done, what each strategy gained, and what it cost.

This module defines the numbers and their JSON form; `optimize_document.py` lays them out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from accel.errors import ReportError
from accel.files import write_atomic
from accel.profiler.report import MachineFacts, ReportHead
from accel.report.words import gain_text, ms_text

NOTHING_REMEMBERED = "nothing is remembered"
"""How `Report.cache` begins where the result could not be written."""

Status = Literal["kept", "undone", "refused", "not applicable", "not allowed", "disabled", "not tried"]
State = Literal["searching", "done", "interrupted", "replayed", "undone"]


@dataclass(kw_only=True)
class StrategyRow:
    """The result of one strategy."""

    name: str
    """Registered name, e.g. `channels_last`."""
    summary: str
    """What it does, one line."""
    treats: list[str]
    """Bottlenecks it treats."""
    exactness: str
    """`exact`, `reordered`, `reduced` or `lossy`."""
    status: Status = "not tried"
    """`kept`; `undone` (slower, wrong or failed); `refused` (too noisy to decide); or why it was never tried."""
    why: str = ""
    """One sentence that explains the status."""
    setting: str = ""
    """The setting that was kept or tried last, e.g. `workers=2`; empty when there is none."""
    before_ms: float | None = None
    """Median step without it, ms, in its own trial."""
    after_ms: float | None = None
    """Median step with it, ms, in its own trial."""
    spread_ms: float | None = None
    """Half the interquartile range of `after_ms`, ms."""
    gain: float | None = None
    """Speed-up as a ratio: 1.25 means 25 % more steps a second."""
    gain_low: float | None = None
    """Lower end of the confidence interval of `gain`."""
    gain_high: float | None = None
    """Upper end of the confidence interval of `gain`."""
    output_error: float | None = None
    """Relative RMS difference of the outputs from the plain path; 0 means the same bits."""
    gradient_error: float | None = None
    """Worst relative RMS difference of a parameter's gradient from the plain path."""
    tolerance: float | None = None
    """What `gradient_error` was allowed to be."""
    cost_s: float = 0.0
    """Seconds of its guard, its one-off work and its slower trial steps."""
    steps: int = 0
    """Training steps its trial used (real steps: none was thrown away)."""


@dataclass(kw_only=True)
class Event:
    """An event at a step, as text."""

    step: int
    text: str


@dataclass(kw_only=True)
class BatchRow:
    """One decision on the batch size that changed it."""

    step: int
    """Steps that had ended, of the training: also in the processes before, where it goes on from a checkpoint."""
    batch: int
    """Samples of a step from then on, over all ranks."""
    tried: bool = False
    """It had not been timed before: the next decision settled or undid it."""
    why: str = ""
    goodput: float | None = None
    """Predicted, samples per second as if of the user's batch; None where nothing was timed yet."""
    measured: float | None = None
    """The same by the time of its steps; None until they were timed."""
    noise: float | None = None
    """Gradient noise scale, samples; None where it was not known."""


@dataclass(kw_only=True)
class Machine(MachineFacts):
    """Where the run was measured, and with how many processes."""

    world_size: int = 1


@dataclass(kw_only=True)
class Report(ReportHead):
    """Everything that accel reports about one run.

    Times are in ms or s as the names say; `anatomy_*` map a phase of the step to its median ms.
    """

    machine: Machine = field(default_factory=Machine)
    model: str = ""
    """Class name of the model."""
    parameters: int = 0
    """Number of parameters."""
    fingerprint: str = ""
    """Hash of class, names, shapes and dtypes; a plan is bound to it."""
    allow: str = "reordered"
    budget: str = ""
    state: State = "searching"
    samples_per_step: float | None = None
    """Samples in a step (a step may hold several batches), or None when the batch has no length."""
    plain_ms: float | None = None
    """Median plain step in the closing trial of the whole plan, ms."""
    accel_ms: float | None = None
    """Median step under the plan in the same trial, ms."""
    speedup: float | None = None
    """plain ÷ accelerated, from that interleaved trial."""
    speedup_low: float | None = None
    speedup_high: float | None = None
    training_same: str = ""
    """Evidence that the model learns the same, one phrase, e.g. `gradients agree to 3e-07`."""
    steps: int = 0
    """Steps seen so far."""
    remembered: str = ""
    """What an earlier run had found, and whether it was kept when checked again; '' if nothing was remembered."""
    cache: str = ""
    """The file in which the result is remembered, or why it is not; '' if that is switched off."""
    search_steps: int = 0
    """Steps that belonged to trials."""
    search_s: float = 0.0
    """What the search cost, s: guards, one-off work, and the time trial steps took above the plain step."""
    break_even_step: int | None = None
    """Step at which the search has paid for itself; None if it never does."""
    bottleneck: str = ""
    """What limits the run now."""
    bottleneck_share: float | None = None
    """Its share of the step, 0…1."""
    bottleneck_advice: str = ""
    """What would treat it, one sentence."""
    anatomy_before: dict[str, float] = field(default_factory=dict)
    anatomy_after: dict[str, float] = field(default_factory=dict)
    rows: list[StrategyRow] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    """Strategy name → setting, as chosen."""
    max_batch_size: int | None = None
    """The most samples of a step, over all ranks; None if the batch size stays."""
    batch_rows: list[BatchRow] = field(default_factory=list)
    """Changes of the batch size, the user's own first."""
    batch_note: str = ""
    """Why the batch size is not changed, or no more; '' if it may be."""
    progress: float | None = None
    """Steps of the user's batch that the steps so far were worth; None if the batch size stays."""

    def verdict(self) -> str:
        """Return the outcome in one line, speed first."""
        if self.state == "replayed" and self.speedup is None:
            return f"replayed without a trial: {', '.join(self.plan) or 'nothing of the plan applies here'}"
        if self.speedup is None or self.plain_ms is None or self.accel_ms is None:
            return self._without_speedup()
        if not self.plan:
            if any(row.status in ("undone", "refused") for row in self.rows):
                why = "nothing tried made the step faster"
            else:
                why = "no trial came to a verdict" if any(row.steps for row in self.rows) else "nothing was tried"
            return f"left as it was: {why} ({ms_text(self.plain_ms)} ms)"
        same = f", {self.training_same}" if self.training_same else ""
        if not self.is_settled:
            whole = gain_text(self.speedup, self.speedup_low, self.speedup_high)
            return f"at least {self.speedup_low:.2f}x, not settled: {whole} as a whole; each alone: {self.kept_text()}"
        return f"{self.speedup:.2f}x: {self.throughput()}{same}"

    @property
    def is_settled(self) -> bool:
        """False if the plan stays by what its strategies have shown alone: noise has left its closing trial open."""
        return not self.plan or self.speedup_low is None or not self.speedup_low <= 1.0

    def _without_speedup(self) -> str:
        """Say why the whole has not been compared with the plain loop, and what was kept in trials of its own."""
        kept = self.kept_text()
        so_far = f"; kept in trials of their own, not yet compared as a whole: {kept}" if kept else ""
        if self.state == "searching":
            return f"no verdict yet: {self.steps} steps seen, the search has not ended{so_far}"
        if self.state == "interrupted":
            return f"no verdict: the run ended after {self.steps} steps, before the search did{so_far}"
        if self.state == "undone":
            return f"no verdict: accel was undone after {self.steps} steps{so_far}"
        if not kept:
            return "left as it was: nothing is kept"
        alone = f"what is kept now was not compared with the plain loop again; each alone: {kept}"
        return f"no speed-up of the whole: {alone}"

    def kept_text(self) -> str:
        """Return what was kept in trials of its own, with its gains, in one line."""
        rows = (row for row in self.rows if row.status == "kept")
        gains = (f"{row.name} {gain_text(row.gain, row.gain_low, row.gain_high)}" for row in rows)
        return ", ".join(gain.removesuffix(" -") for gain in gains)

    def throughput(self) -> str:
        """Return samples a second, or else ms per step, without and with the plan; both must be known."""
        assert self.plain_ms is not None and self.accel_ms is not None
        if self.samples_per_step and self.plain_ms > 0 and self.accel_ms > 0:
            before, after = (1e3 * self.samples_per_step / ms for ms in (self.plain_ms, self.accel_ms))
            return f"{ms_text(before)} → {ms_text(after)} samples/s"
        return f"{ms_text(self.plain_ms)} → {ms_text(self.accel_ms)} ms per step"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, or as a self-contained web page if `path` ends in `.html`; whole or not at all."""
        if str(path).endswith(".html"):
            from accel.report.rendering import as_page

            write_atomic(path, as_page(self))
        else:
            write_atomic(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a report written by `save`.

        Raises:
            ReportError: if the file is no JSON, is of another kind or schema, or lacks a field.
        """
        from accel.report.reader import load

        report = load(path)
        if not isinstance(report, cls):
            raise ReportError(
                f"{path} is a report of `accel profile`, not of accel.optimize; read it with `accel report`."
            )
        return report

    def _repr_html_(self) -> str:
        """Show the page in a notebook, in a frame of its own: its styles are not the notebook's."""
        from html import escape

        from accel.report.rendering import as_page

        return f'<iframe srcdoc="{escape(as_page(self))}" style="width: 100%; height: 40em; border: 0"></iframe>'

    def __str__(self) -> str:
        from accel.report.rendering import as_text

        return as_text(self)
