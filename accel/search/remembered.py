"""What an earlier run found: a suggestion for this one, and what is told of it.

Its plan is tried first and as a whole. Strategies that gave nothing then wait until the run is long enough; those of
which noise let nothing be said are tried as if for the first time. What was measured of one-off work stands in for the
guess. After `MOST_DAYS` or `MOST_RUNS` only that last part holds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, Protocol

from accel.profiler.interruptions import ours
from accel.profiler.trial import Outcome
from accel.profiler.typed_json import UnreadableJson
from accel.report import StrategyRow
from accel.search.actions import Candidate
from accel.search.ledger import refusal
from accel.search.plan import Choices
from accel.search.trials import bears_out, pooled, shows_a_gain

MOST_DAYS, MOST_RUNS = 30, 20
_RETRY = 10.0
"""How many times as long as the trials of what gave nothing the run must be before they are made again."""
_LATE, _LONGER = 0.5, 1.02
"""Between these parts of the last run's length they are not: runs of one script mostly last about equally long."""
_DAY_S = 86400.0
_LARGEST = 1e12


@dataclass(kw_only=True)
class RememberedTrial:
    """The result of one strategy."""

    status: Literal["kept", "undone", "refused"]
    on: str
    """When it was tried, ISO 8601 with offset."""
    why: str = ""
    gain: float | None = None
    """Speed-up in its own trial, as a ratio."""
    low: float | None = None
    """Lower end of its 95 % interval."""
    trial_s: float = 0.0
    """Seconds from the first step of its trials to the last."""
    open: bool = False
    """Noise may have hidden a gain: it says nothing of the next run."""


@dataclass(kw_only=True)
class RememberedSearch:
    """What a search found."""

    searched: str
    """When, ISO 8601 with offset."""
    plan: Choices = field(default_factory=dict)
    """Strategy name → setting, in the order in which they are switched on."""
    speedup: float | None = None
    """Of the plan, by the closing trials of the runs that had it; None if there was none."""
    speedup_low: float | None = None
    """Lower end of its 95 % interval."""
    speedup_of: list[str] | None = None
    """What was on then, where the rest of the plan waited; None if it is the speed-up of the whole plan."""
    trials: dict[str, RememberedTrial] = field(default_factory=dict)
    one_off_s: dict[str, float] = field(default_factory=dict)
    """Strategy → seconds that its one-off work, such as compiling, is expected to take the next time, as measured. The
    setting follows the name where each has work of its own."""
    runs: int = 0
    """Runs since then that have taken the result over."""
    run_s: float = 0.0
    """Seconds that the steps of the last run took."""

    def measured(self) -> Choices:
        """Return the part of the plan that the speed-up is of."""
        return {n: s for n, s in self.plan.items() if self.speedup_of is None or n in self.speedup_of}

    @property
    def saved_s(self) -> float:
        """Seconds that the plan saves at the least in a run as long as the last one; 0 if that isn't known."""
        if self.speedup_low is None or self.measured() != self.plan:
            return 0.0
        return self.run_s * max(0.0, self.speedup_low - 1)

    def check(self) -> None:
        """Raise `UnreadableJson` unless each time and number is one."""
        for moment in (self.searched, *(trial.on for trial in self.trials.values())):
            seconds_of(moment)
        numbers = [self.speedup, self.speedup_low, self.run_s, self.runs, *self.one_off_s.values()]
        numbers += [n for t in self.trials.values() for n in (t.gain, t.low, t.trial_s)]
        if not all(number is None or 0 <= number < _LARGEST for number in numbers):
            raise UnreadableJson(f"its numbers must lie in [0, {_LARGEST:g})")


class PlanMemory(Protocol):
    """Keeps what was found from run to run, for runs like this one."""

    interrupted: str
    """Why the remembered plan is not to be tried: a run ended without notice while it checked it; else ''."""
    note: str
    """For the report: where it is kept, or why it is not."""

    def recall(self) -> RememberedSearch | None:
        """Return what is remembered, None if nothing is; never raises."""

    def begin_check(self) -> None:
        """Note that this process checks the plan now; `store` and `forget` end it."""

    def store(self, search: RememberedSearch) -> None:
        """Remember this from now on; never raises."""

    def forget(self) -> None:
        """Remember nothing; never raises."""


class Recollection:
    """Use what an earlier run found, and pass on what this one finds.

    Args:
        memory: keeps it from run to run; None remembers nothing.
        candidates: what may be tried.
        now: seconds since 1970.
    """

    def __init__(
        self, memory: PlanMemory | None, candidates: Iterable[Candidate], now: Callable[[], float] = time.time
    ) -> None:
        self._memory, self._now = memory, now
        self._candidates = {candidate.name: candidate for candidate in candidates}
        self.text = ""
        """What the report says of it; '' if nothing was remembered."""
        self._suggestion = ""
        """What is being checked, in words."""
        self._earlier: RememberedSearch | None = None
        self._holds = False
        """The earlier plan and verdicts stand, if no check has shown otherwise."""
        self.is_checking = False
        """The earlier plan is on, and has shown nothing yet."""
        self._losers: dict[str, RememberedTrial] = {}
        """Strategies that gave nothing then and have not been tried again."""
        self._waiting: Choices = {}
        """The part of the earlier plan whose one-off work is too much for the budget so far."""
        self._trial_s: dict[str, float] = {}
        self._one_off_s: dict[str, float] = {}
        self._repeated: dict[str, float] = {}
        """Share of that which a later process does again."""
        self.stored: RememberedSearch | None = None  # as far as it was decided in this run

    @property
    def note(self) -> str:
        """Where the result is kept, or why it is not; '' if it is not to be."""
        return "" if self._memory is None else self._memory.note

    # -- at the beginning of a search ----------------------------------------------------------------------------------

    def recall(self) -> None:
        """Look up what an earlier run under the present conditions found."""
        if self._memory is None:
            return
        self._end_check()
        self._earlier = self.stored = earlier = self._memory.recall()
        self._holds = False
        self.text, self._losers, self._waiting = "", {}, {}
        self._trial_s, self._one_off_s, self._repeated = {}, {}, {}
        if earlier is None:
            return
        if reason := self._memory.interrupted or self._too_old(earlier):
            self.text = f"from {_date(earlier.searched)}; {reason}, so all is searched anew"
            return
        self._holds = True
        trials = earlier.trials.items()
        settled = {n: trial for n, trial in trials if not trial.open and n in self._candidates}
        self._losers = {n: trial for n, trial in settled.items() if trial.status != "kept"}
        self.text = f"from {_date(earlier.searched)}: {self._outcome(earlier)}"

    def _outcome(self, earlier: RememberedSearch) -> str:
        if earlier.plan:
            return "a plan of which nothing applies now"
        return "nothing that helped" if earlier.trials else "a search that was not finished"

    def _too_old(self, earlier: RememberedSearch) -> str:
        days = abs(self._now() - seconds_of(earlier.searched)) / _DAY_S
        if days > MOST_DAYS:
            return f"it is {days:.0f} days old"
        return f"{earlier.runs} runs have relied on it" if earlier.runs >= MOST_RUNS else ""

    def choices(self, affordable: Callable[[float, float, float], bool]) -> Choices:
        """Return what of the earlier plan applies here, and begin its check.

        Only settings are taken that this version would try in this run, whatever the memory says.

        Args:
            affordable: called with seconds of one-off work, how long the run is expected to last, s, and what the plan
                is known to save in it, s.
        """
        if not self._holds or self._earlier is None or self._memory is None:
            return {}
        plan = {name: setting for name, setting in self._earlier.plan.items() if self._applies(name, setting)}
        one_off_s = {name: self.one_off_s(self._candidates[name], setting) for name, setting in plan.items()}
        saved_s = self._earlier.saved_s if plan == self._earlier.plan else 0.0
        in_all_s = 0.0
        for name in sorted(plan, key=one_off_s.__getitem__):
            in_all_s += one_off_s[name]
            if one_off_s[name] and not affordable(in_all_s, self._earlier.run_s, saved_s):
                self._waiting[name] = plan[name]
        suggested = {name: setting for name, setting in plan.items() if name not in self._waiting}
        if plan:
            self._suggestion = self.text = self._words(plan)
        if suggested:
            self.is_checking, self.stored = True, None
            self.text = f"{self._suggestion}; being checked again"
            self._memory.begin_check()
        return suggested

    def _words(self, plan: Choices) -> str:
        """Describe what applies of the earlier plan. Other settings are not repeated: anything may stand in a file."""
        assert self._earlier is not None
        names = ", ".join(f"{n} {self._candidates[n].describe(setting)}".strip() for n, setting in plan.items())
        is_whole = len(plan) == len(self._earlier.plan)
        is_known = is_whole and self._earlier.measured() == self._earlier.plan
        speedup = f" ({self._earlier.speedup:.2f}x then)" if self._earlier.speedup and is_known else ""
        more = "" if is_whole else "; the rest of it does not apply now"
        more += f"; waiting for the budget: {', '.join(self._waiting)}" if self._waiting else ""
        return f"from {_date(self._earlier.searched)}: plan {names}{speedup}{more}"

    def _end_check(self) -> None:
        """If a check is under way, leave what is remembered as it was."""
        if self.is_checking and self._memory is not None and self._earlier is not None:
            self.is_checking = False
            self._memory.store(self._earlier)

    def _applies(self, name: str, setting: object) -> bool:
        candidate = self._candidates.get(name)
        if candidate is None or candidate.ruled_out is not None or refusal(candidate):
            return False
        try:
            return any(type(other) is type(setting) and other == setting for other in candidate.settings())
        except ours():
            return False

    # -- the check of the plan -----------------------------------------------------------------------------------------

    def agrees(self, name: str, outcome: Outcome) -> bool:
        """Tell whether a trial of a strategy agrees with the one that has kept it, and both together show a gain."""
        trial = None if self._earlier is None else self._earlier.trials.get(name)
        if trial is None or trial.status != "kept" or trial.gain is None or trial.low is None:
            return False
        return bears_out(outcome, trial.gain, trial.low)

    def shows_with(self, name: str, outcome: Outcome, at_least: float) -> bool:
        """Tell whether a trial that noise leaves open shows a gain together with the one that it left open then.

        Args:
            name: of a strategy with one setting.
            outcome: of this run's trial.
            at_least: gain above which something is kept, as a ratio - 1.
        """
        trial = None if self._earlier is None else self._earlier.trials.get(name)
        if trial is None or trial.status != "refused" or trial.gain is None or trial.low is None:
            return False
        return shows_a_gain(outcome, trial.gain, trial.low, at_least)

    def agrees_on_plan(self, plan: Collection[str], outcome: Outcome) -> bool:
        """Tell the same of a closing trial, if the plan is what the earlier one was of, or a single strategy of it."""
        earlier = self._earlier
        if earlier is None or outcome.verdict == "drop":
            return False
        if plan == earlier.measured().keys() and earlier.speedup is not None and earlier.speedup_low is not None:
            return bears_out(outcome, earlier.speedup, earlier.speedup_low)
        return len(plan) == 1 < len(earlier.plan) and self.agrees(next(iter(plan)), outcome)

    def confirm(self, undone: Sequence[str] = (), *, is_open: bool = False) -> None:
        """The plan passed the guard and its closing trial, without what was undone before that.

        Args:
            undone: strategies.
            is_open: noise has left the trial open, and earlier runs have decided.
        """
        self.is_checking = False
        self.text = f"{self._suggestion}; checked again: kept" + (f", but for {', '.join(undone)}" if undone else "")
        self.text += ", by what was shown then, since noise leaves it open in this run" if is_open else ""

    def wait_with(self, name: str, setting: object, rest: Choices) -> None:
        """Leave a strategy of the plan to the next run: steps of this one can't show what it gives."""
        self._waiting[name] = setting
        if not rest:
            self._end_check()
            self.text = f"{self._suggestion}; left to the next run"

    def reject(self, why: str) -> None:
        """The plan did not pass: forget it, and the verdicts that were made beside it."""
        assert self._memory is not None
        self.is_checking = self._holds = False
        self.text = f"{self._suggestion}; checked again: undone ({why}), and searched anew"
        self._losers, self._waiting, self.stored = {}, {}, None
        self._memory.forget()

    def failed(self) -> None:
        """accel has failed: if it was during the check, the next run is not to try the same."""
        if self.is_checking and self._memory is not None:
            self.is_checking = False
            self._memory.forget()

    def reason(self, name: str) -> str:
        """Return why a strategy of the confirmed plan is kept."""
        assert self._earlier is not None
        trial = self._earlier.trials.get(name)
        gain = f" ({trial.gain:.2f}x in its own trial then)" if trial and trial.gain and trial.status == "kept" else ""
        return f"remembered from {_date(self._earlier.searched)}{gain}; the plan as a whole was checked again"

    # -- candidates ----------------------------------------------------------------------------------------------------

    def one_off_s(self, candidate: Candidate, setting: object = None) -> float:
        """Return the seconds that one-off work is expected to take: as measured last, or else as estimated."""
        work = _work(candidate, setting)
        if not candidate.one_off_s or work in self._one_off_s:
            return 0.0  # it has none, or does not wait for the budget, or the work is done
        remembered = {} if self._earlier is None else self._earlier.one_off_s
        return remembered[work] if work in remembered else _estimate(candidate, setting)

    def took_s(self, candidate: Candidate, setting: object) -> float:
        """Return the seconds that its one-off work has taken, in this run or an earlier one, or else as estimated."""
        remembered = {} if self._earlier is None else self._earlier.one_off_s
        work = _work(candidate, setting)
        seconds = self._one_off_s.get(work, remembered.get(work))
        return _estimate(candidate, setting) if seconds is None else seconds

    def postponed(self, name: str, elapsed_s: float) -> str:
        """Return why it is too early to try a strategy that gave nothing in an earlier run, else ''.

        All of these are tried again together, once their trials would be a small part of the run.
        """
        if name not in self._losers:
            return ""
        if elapsed_s < _RETRY * sum(trial.trial_s for trial in self._losers.values()):
            return f"{self.lost(name)}; again once the run is long enough"
        last_s = 0.0 if self._earlier is None else self._earlier.run_s
        if _LATE * last_s <= elapsed_s < _LONGER * last_s:  # what they win would be too late for this run
            return f"{self.lost(name)}; again if the run lasts longer than the last one"
        return ""

    def lost(self, name: str) -> str:
        """Return what became of a strategy that gave nothing in an earlier run, else ''."""
        trial = self._losers.get(name)
        if trial is None:
            return ""
        gain = "" if trial.gain is None else f"{trial.gain:.2f}x"
        return f"tried {self._ago(trial.on)}: {', '.join(filter(None, (gain, trial.why)))}"

    def _ago(self, moment: str) -> str:
        days = int(max(0.0, self._now() - seconds_of(moment)) / _DAY_S)
        return "less than a day ago" if days < 1 else "a day ago" if days == 1 else f"{days} days ago"

    def worked(self, choices: Choices, seconds: float) -> str:
        """Note what a check cost in which dear one-off work was done, if of one only; return a line for the report."""
        working = [self._candidates[name] for name in choices if self._candidates[name].is_dear]
        if len(working) != 1:
            return ""
        candidate, setting = working[0], choices[working[0].name]
        work, expected_s = _work(candidate, setting), self.one_off_s(candidate, setting)
        self._repeated[work] = candidate.repeated_share if candidate.repeats is None else candidate.repeats(setting)
        self._one_off_s[work] = max(seconds, self._one_off_s.get(work, 0.0))
        return f"{work}: one-off work took {seconds:.1f} s, expected {expected_s:.1f} s" if expected_s else ""

    def tried(self, name: str, seconds: float) -> None:
        """Note that a strategy has been tried in this run."""
        self._trial_s[name] = self._trial_s.get(name, 0.0) + seconds
        self._losers.pop(name, None)
        self._waiting.pop(name, None)

    # -- for the next run ----------------------------------------------------------------------------------------------

    def store(
        self,
        plan: Choices,
        rows: Mapping[str, StrategyRow],
        closing: Outcome | None,
        run_s: float,
        *,
        open_rows: Collection[str] = (),
        ended: bool,
    ) -> None:
        """Remember what is known by now.

        Args:
            plan: what is on.
            rows: the report's rows.
            closing: the closing trial of that plan, None if there was none.
            run_s: seconds that this run's steps have taken.
            open_rows: names of those in which noise may have hidden a gain.
            ended: the run is over.
        """
        if self._memory is None:
            return
        if self.is_checking:  # it has shown nothing yet
            if ended:
                self._end_check()
            return
        earlier = self._earlier
        now = datetime.fromtimestamp(self._now()).astimezone().isoformat(timespec="seconds")
        relied_on = earlier if self._holds else None
        trials = {} if relied_on is None else dict(relied_on.trials)
        for row in rows.values():
            if (trial := self._trial(row, trials, now)) is not None:
                trials[row.name] = dataclasses.replace(trial, open=row.name in open_rows)
        one_off_s = {} if earlier is None else dict(earlier.one_off_s)
        for name, seconds in self._one_off_s.items():
            is_first = earlier is None or name not in earlier.one_off_s  # what is kept on disk was not there yet
            one_off_s[name] = round(seconds * (self._repeated[name] if is_first else 1.0), 2)
        if not plan and not trials and not one_off_s and not self._waiting:
            return
        known_run_s = 0.0 if ended or earlier is None else earlier.run_s
        speedup, low, of = self._shown(plan, closing)
        search = RememberedSearch(
            searched=now if relied_on is None else relied_on.searched,
            plan={**plan, **self._waiting},
            speedup=speedup,
            speedup_low=low,
            speedup_of=of,
            trials=trials,
            one_off_s=one_off_s,
            runs=0 if relied_on is None else relied_on.runs + 1,
            run_s=round(max(run_s, known_run_s), 1),
        )
        if self.stored is None or ended or not _same(search, self.stored):
            self.stored = search
            self._memory.store(search)

    def _shown(self, plan: Choices, closing: Outcome | None) -> tuple[float | None, float | None, list[str] | None]:
        """Return a speed-up by the runs that had it, the lower end of its interval, and what it is of if not of all."""
        earlier = self._earlier
        of = list(plan) if self._waiting else None
        if earlier is not None and earlier.speedup is not None:
            measured = earlier.measured()
            both = None
            if closing is not None and plan == measured and earlier.speedup_low is not None:
                both = pooled(closing, earlier.speedup, earlier.speedup_low)
            if both is not None:
                return round(both[0], 4), round(both[1], 4), of
            # What is known of the whole plan is worth more than what this run says of a part of it.
            if (closing is None and plan == measured) or measured == {**plan, **self._waiting} != plan:
                return earlier.speedup, earlier.speedup_low, earlier.speedup_of
        return (None, None, None) if closing is None else (round(closing.gain, 4), round(closing.low, 4), of)

    def _trial(self, row: StrategyRow, earlier: Mapping[str, RememberedTrial], now: str) -> RememberedTrial | None:
        """Return the result that this run has for a strategy, None if it has none."""
        before = earlier.get(row.name)
        is_undone = row.status == "undone" and self._earlier is not None and row.name in self._earlier.plan
        # A row without either is of a trial that the end of the run has cut short.
        if not (row.name in self._trial_s or is_undone) or row.status not in ("kept", "undone", "refused"):
            return None
        return RememberedTrial(
            status=row.status,
            on=now,
            why=row.why[:200],
            gain=None if row.gain is None else round(row.gain, 4),
            low=None if row.gain_low is None else round(row.gain_low, 4),
            trial_s=round(self._trial_s.get(row.name, 0.0 if before is None else before.trial_s), 2),
        )


def _work(candidate: Candidate, setting: object) -> str:
    """Return what names a piece of one-off work: the strategy, with the setting if each has work of its own."""
    described = "" if candidate.expected_s is None else candidate.describe(setting)
    return f"{candidate.name} {described}".strip()


def _estimate(candidate: Candidate, setting: object) -> float:
    try:
        return candidate.one_off_s if candidate.expected_s is None else candidate.expected_s(setting)
    except ours():  # a model whose modules can't be looked into
        return candidate.one_off_s


def seconds_of(moment: str) -> float:
    """Return seconds since 1970 of an ISO 8601 time.

    Raises:
        UnreadableJson: if it is none.
    """
    try:
        return datetime.fromisoformat(moment).astimezone().timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise UnreadableJson(f"it must hold times as ISO 8601, got {moment[:60]!r}: {error}") from None


def _date(moment: str) -> str:
    return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M")


def _same(search: RememberedSearch, other: RememberedSearch) -> bool:
    """Tell whether both say the same but for times."""

    def plain(it: RememberedSearch) -> object:
        trials = {name: dataclasses.replace(trial, on="") for name, trial in it.trials.items()}
        return dataclasses.replace(it, trials=trials, run_s=0.0, searched="", runs=0)

    return plain(search) == plain(other)
