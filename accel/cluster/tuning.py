"""Tuning: each trial is a job of the cluster, so replicas and batch sizes follow the scheduler's one policy.

    Optuna asks ─▶ a job with `--NAME=VALUE` for each parameter ─▶ `accel.report_score` ─▶ Optuna is told
                                                                └▶ a trial that is no good is cancelled (ASHA)

The study is a file beside the job table: a tuner that was killed goes on where it was.
ASHA: https://arxiv.org/abs/1810.05934. Optuna's ask and tell:
https://optuna.readthedocs.io/en/stable/tutorial/20_recipes/009_ask_and_tell.html
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.cluster.job_table import JobRow, JobSpec, JobTable
from accel.errors import InvalidArgument
from accel.scores import read_scores

FILE = "tuning.sqlite"
DIRECTIONS = ("minimize", "maximize")
_KEYS = {"choices", "low", "high", "log", "step"}


@dataclass(frozen=True)
class SearchSpace:
    """What is tried.

    Args:
        parameters: by name, Optuna's distributions.
        direction: of the score, "minimize" or "maximize".
        trials: how many are tried, ≥ 1.
    """

    parameters: Mapping[str, Any]
    direction: str = "minimize"
    trials: int = 20

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise InvalidArgument(f"direction must be one of {DIRECTIONS}. Found: {self.direction!r}")
        if not (isinstance(self.trials, int) and self.trials >= 1):
            raise InvalidArgument(f"trials must be an integer of at least 1. Found: {self.trials!r}")


def read_space(path: Path) -> SearchSpace:
    """Read a search space from TOML.

        direction = "minimize"                          # the default
        trials = 30
        [parameters]
        lr = { low = 1e-5, high = 1e-1, log = true }
        layers = { low = 1, high = 4 }                  # integers, as both ends are
        activation = { choices = ["relu", "gelu"] }

    Raises:
        InvalidArgument: if the file can't be read, or is no such space.
    """
    try:
        import tomllib
    except ImportError:
        raise InvalidArgument("reading TOML needs Python 3.11 or later") from None
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} must be a search space in TOML. Found: {error}") from None
    if unknown := content.keys() - {"parameters", "direction", "trials"}:
        raise InvalidArgument(f"{path} may have direction, trials and [parameters]. Found: {sorted(unknown)}")
    parameters = content.get("parameters")
    if not isinstance(parameters, dict) or not parameters:
        raise InvalidArgument(f"{path} must have [parameters] with at least one. Found: {parameters!r}")
    distributions = {name: _distribution(name, each) for name, each in parameters.items()}
    return SearchSpace(distributions, **{key: content[key] for key in ("direction", "trials") if key in content})


def _distribution(name: str, values: Any) -> Any:
    """Return Optuna's distribution of a parameter."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, dict) or not (values.keys() == {"choices"} or {"low", "high"} <= values.keys() <= _KEYS):
        raise InvalidArgument(f"parameter {name} must have choices, or low and high (log, step). Found: {values!r}")
    try:
        if "choices" in values:
            return CategoricalDistribution(values["choices"])
        is_whole = all(isinstance(values[end], int) for end in ("low", "high"))
        return (IntDistribution if is_whole else FloatDistribution)(**values)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"parameter {name} must be a range or choices. Found: {values!r}: {error}") from None


class ParameterTuner:
    """Tune a script's parameters with jobs of a cluster.

    Args:
        table: of the jobs.
        folder: of the cluster; the study is kept there.
        space: what is tried.
        spec: of each trial's job; its parameters are added to the arguments, its name to the checkpoint's folder.
        name: of the study; trials are the jobs NAME-0, NAME-1, …
        parallel: trials at once, ≥ 1.
        seed: of the sampler; None draws one.
        say: gets a line for each trial that has ended.

    Raises:
        InvalidArgument: if Optuna is not installed, or `parallel` is below 1.
    """

    def __init__(
        self,
        table: JobTable,
        folder: Path,
        space: SearchSpace,
        spec: JobSpec,
        name: str,
        *,
        parallel: int = 1,
        seed: int | None = None,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        if parallel < 1:
            raise InvalidArgument(f"parallel must be at least 1. Found: {parallel}")
        try:
            import optuna
        except ImportError:
            raise InvalidArgument("Optuna must be installed to tune: pip install 'accel-train[tune]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._table, self._space, self._spec, self._name = optuna, table, space, spec, name
        self._parallel, self._say = parallel, say
        self._study = optuna.create_study(
            storage=f"sqlite:///{folder.resolve() / FILE}",
            study_name=name,
            direction="maximize" if space.direction == "maximize" else "minimize",
            sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=parallel > 1),
            pruner=optuna.pruners.SuccessiveHalvingPruner(),
            load_if_exists=True,
        )
        open_trials = self._study.get_trials(states=[optuna.trial.TrialState.RUNNING])
        self._open = {self._job(each.number): optuna.trial.Trial(self._study, each._trial_id) for each in open_trials}

    def _job(self, number: int) -> str:
        return f"{self._name}-{number}"

    @property
    def best(self) -> tuple[dict[str, Any], float] | None:
        """Parameters and score of the best trial; None while none has a score."""
        try:
            return self._study.best_params, self._study.best_value
        except ValueError:
            return None

    def run(self, wait_s: float = 1.0) -> None:
        """Tune until all trials have ended.

        Args:
            wait_s: between two looks at the jobs, s.
        """
        while self.look():
            time.sleep(wait_s)

    def look(self) -> bool:
        """Tell Optuna what jobs have reported, and submit others; return whether any is left."""
        rows = {row.name: row for row in self._table.jobs()}
        for name, trial in list(self._open.items()):
            if name not in rows:  # killed between the two
                self._submit(name, trial)
            else:
                self._follow(rows[name], trial)
        while len(self._open) < self._parallel and len(self._study.trials) < self._space.trials:
            trial = self._study.ask(dict(self._space.parameters))
            self._open[self._job(trial.number)] = trial
            self._submit(self._job(trial.number), trial)
        return bool(self._open)

    def _submit(self, name: str, trial: Any) -> None:
        parameters = tuple(f"--{key}={value}" for key, value in trial.params.items())
        spec = dataclasses.replace(
            self._spec,
            arguments=(*self._spec.arguments, *parameters),
            checkpoint=str(Path(self._spec.checkpoint) / name),
        )
        self._table.submit(name, spec, time.time())

    def _follow(self, row: JobRow, trial: Any) -> None:
        """Pass on what one trial has reported, and how it ended."""
        scores = read_scores(row.spec.checkpoint)
        known = trial.study._storage.get_trial(trial._trial_id).intermediate_values
        fresh = sorted(scores.keys() - known.keys())
        for step in fresh:
            trial.report(scores[step], step)
        state = self._optuna.trial.TrialState
        last = scores[max(scores)] if scores else math.nan
        if row.state == "done" and not math.isnan(last):
            self._tell(row, trial, f"{last:.6g}", values=last)
        elif row.state == "cancelled":
            self._tell(row, trial, "given up", state=state.PRUNED)
        elif row.state in ("done", "failed"):
            why = row.note or ("no score" if row.state == "done" else f"exit status {row.exit_status}")
            self._tell(row, trial, f"failed: {why}", state=state.FAIL)
        elif fresh and not row.is_cancelled and trial.should_prune():
            self._table.cancel([row.name])

    def _tell(self, row: JobRow, trial: Any, text: str, **result: Any) -> None:
        self._study.tell(trial, **result)
        del self._open[row.name]
        parameters = ", ".join(f"{key}={value}" for key, value in trial.params.items())
        self._say(f"{row.name}: {text}  ({parameters})")
