"""What came of a simulation: times, fairness, what was lost to what; as numbers, JSON and plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accel.cluster.profiles import Application
from accel.cluster.simulator import ONE_BATCH, JobRules, Period, SimulatedJob, Simulation, Submission


@dataclass(frozen=True, kw_only=True)
class SimulationOutcome:
    """Figures of a simulation; all times are in seconds."""

    policy: str
    workload: str
    completion_s: dict[str, float]
    """From submission to the end, by job."""
    fairness: dict[str, float]
    """Finish-time ratio of each job: its completion time, over that alone on its share of the GPUs."""
    makespan_s: float
    gpu_hours: float
    restarts: int
    waited_s: float
    """Without replicas, all jobs together."""
    stood_s: float
    """Standing still in restarts."""
    lost_s: float
    """Trained once more after a node was lost."""

    @property
    def mean_s(self) -> float:
        """Mean completion time."""
        return float(np.mean(list(self.completion_s.values())))

    @property
    def p99_s(self) -> float:
        """99th percentile of the completion times."""
        return float(np.percentile(list(self.completion_s.values()), 99))

    @property
    def worst_fairness(self) -> float:
        """Largest finish-time ratio."""
        return max(self.fairness.values())

    def to_dict(self) -> dict[str, Any]:
        """Return what is written as JSON."""
        means = {"mean_s": self.mean_s, "p99_s": self.p99_s, "worst_fairness": self.worst_fairness}
        return {**means, **vars(self)}


def outcome(simulation: Simulation, policy: str, workload: str) -> SimulationOutcome:
    """Return the figures of a simulation that has been run.

    Args:
        simulation: that has ended.
        policy: its name.
        workload: its name.
    """
    jobs = simulation.jobs
    ends = {job.submission.name: float(job.finished_s or 0.0) for job in jobs}
    return SimulationOutcome(
        policy=policy,
        workload=workload,
        completion_s={job.submission.name: ends[job.submission.name] - job.submission.time for job in jobs},
        fairness=fairness(jobs, sum(node.gpus for node in simulation.nodes), simulation.interval_s),
        makespan_s=max(ends.values()) - min(job.submission.time for job in jobs),
        gpu_hours=sum(job.service_s for job in jobs) / 3600,
        restarts=sum(max(job.restarts, 0) for job in jobs),
        waited_s=sum(job.waited_s for job in jobs),
        stood_s=sum(job.stood_s for job in jobs),
        lost_s=sum(job.lost_s for job in jobs),
    )


def fairness(jobs: Sequence[SimulatedJob], gpus: int, interval_s: int) -> dict[str, float]:
    """Return finish-time ratios (Mahajan et al., Themis, NSDI 2020, section 3), by job.

        ratio = completion time ÷ completion time alone on gpus / n GPUs,   n the mean number of jobs meanwhile

    Alone a job chooses its batch itself, and waits for the next decision as all do.
    """
    spans = [(job.submission.time, float(job.finished_s or 0.0)) for job in jobs]
    alone: dict[tuple[str, int], float] = {}
    ratios = {}
    for job, (begin, end) in zip(jobs, spans, strict=True):
        others = sum(max(0.0, min(end, until) - max(begin, since)) for since, until in spans) / (end - begin)
        application = job.application
        most = 1 if application.name in ONE_BATCH else application.max_batch // application.local_bounds[0]
        share = max(min(round(gpus / others), most), 1)
        key = application.name, share
        if key not in alone:
            alone[key] = _alone_s(application, share)
        ratios[job.submission.name] = (end - begin) / (alone[key] + -begin % interval_s)
    return ratios


_PER_NODE = 4


def _alone_s(application: Application, replicas: int) -> float:
    """Return how long a job takes on replicas that stay."""
    job = SimulatedJob(Submission("alone", 0, application.name, replicas, 0), application, JobRules())
    whole, rest = divmod(replicas, _PER_NODE)
    job.reallocate((_PER_NODE,) * whole + ((rest,) if rest else ()))
    while job.finished_s is None:
        job.advance(600.0)
    return job.finished_s


def utilisation(periods: Iterable[Period], gpus: int) -> tuple[list[float], list[float]]:
    """Return when the share of busy GPUs changes, and that share from then on."""
    changes: dict[float, int] = {}
    for period in periods:
        changes[period.since_s] = changes.get(period.since_s, 0) + len(period.nodes)
        changes[period.until_s] = changes.get(period.until_s, 0) - len(period.nodes)
    times = sorted(changes)
    busy = np.cumsum([changes[time] for time in times])
    return times, (busy / gpus).tolist()


def draw(simulation: Simulation, path: Path, title: str) -> None:
    """Write a Gantt chart of the jobs' replicas, and the share of busy GPUs below it.

    Args:
        simulation: that has been run.
        path: of a PNG, SVG or PDF.
        title: of the picture.
    """
    from matplotlib.figure import Figure

    rows = {job.submission.name: row for row, job in enumerate(simulation.jobs)}
    figure = Figure(figsize=(11, 3 + 0.06 * len(rows)), layout="constrained")
    chart, busy = figure.subplots(2, 1, sharex=True, height_ratios=[max(len(rows) / 40, 2), 1])
    most = max(len(period.nodes) for period in simulation.periods)
    bars = chart.barh(
        [rows[period.job] for period in simulation.periods],
        [(period.until_s - period.since_s) / 3600 for period in simulation.periods],
        left=[period.since_s / 3600 for period in simulation.periods],
        height=0.9,
    )
    for bar, period in zip(bars, simulation.periods, strict=True):
        bar.set_alpha(0.25 + 0.75 * len(period.nodes) / most)
    chart.scatter([job.submission.time / 3600 for job in simulation.jobs], list(rows.values()), s=4, color="black")
    chart.set(title=title, ylabel="job", ylim=(len(rows), -1))
    times, shares = utilisation(simulation.periods, sum(node.gpus for node in simulation.nodes))
    busy.step([time / 3600 for time in times], [100 * share for share in shares], where="post")
    busy.set(xlabel="hours; a bar is the darker, the more GPUs; dots are submissions", ylabel="busy GPUs, %")
    busy.set_ylim(0, 105)
    figure.savefig(path)
