"""What came of a simulation: times and fairness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulated_cluster.profiles import Application
from benchmarks.simulated_cluster.simulator import ONE_BATCH, JobRules, SimulatedJob, Simulation, Submission


@dataclass(frozen=True, kw_only=True)
class SimulationOutcome:
    """Figures of a simulation; all times are in seconds."""

    completion_s: dict[str, float]
    """From submission to the end, by job."""
    fairness: dict[str, float]
    """Finish-time ratio of each job: its completion time, over that alone on its share of the GPUs."""
    makespan_s: float
    gpu_hours: float
    restarts: int

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


def outcome(simulation: Simulation) -> SimulationOutcome:
    """Return the figures of a simulation that has been run.

    Args:
        simulation: that has ended.
    """
    jobs = simulation.jobs
    ends = {job.submission.name: float(job.finished_s or 0.0) for job in jobs}
    return SimulationOutcome(
        completion_s={job.submission.name: ends[job.submission.name] - job.submission.time for job in jobs},
        fairness=fairness(jobs, sum(node.gpus for node in simulation.nodes), simulation.interval_s),
        makespan_s=max(ends.values()) - min(job.submission.time for job in jobs),
        gpu_hours=sum(job.service_s for job in jobs) / 3600,
        restarts=sum(max(job.restarts, 0) for job in jobs),
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
