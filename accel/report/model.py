"""The report as data: what was done, what each strategy gained, and what it cost.

`words.py` has its texts, `optimize_document.py` lays them out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from accel.profiler.report import MachineFacts, ReportHead

NOTHING_REMEMBERED = "nothing is remembered"
"""How `Report.cache` begins where the result could not be written."""

Status = Literal["kept", "undone", "inconclusive", "not applicable", "not allowed", "disabled", "not tried"]
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
    """`kept`; `undone` (slower, wrong or failed); `inconclusive` (too noisy to decide); or why it was never tried."""
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
class RunReport(ReportHead):
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
    offers: dict[str, float] = field(default_factory=dict)
    """Number format that `allow` leaves out → about how many times as fast a step would be with it."""
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

    @property
    def is_settled(self) -> bool:
        """False if the plan stays by what its strategies have shown alone: noise has left its closing trial open."""
        return not self.plan or self.speedup_low is None or not self.speedup_low <= 1.0
