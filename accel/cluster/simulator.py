"""Simulate a cluster by measured profiles: how long would these jobs take under that policy?

The rules are those of the simulator of Qiao et al., OSDI 2021
(https://www.usenix.org/conference/osdi21/presentation/qiao), so that its published figures come out: all jobs run for
an interval of 60 s, then the policy gives replicas; a job that gets others stands still for 30 s. What a job really
does is read from its measured profile (`accel.cluster.profiles`). The policy sees what the job's own controller has
fitted to the steps so far (`JobView`), and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, get_type_hints

from accel.cluster.jobs import ClusterNode, JobView, Policy
from accel.cluster.profiles import Application, Noise, StepTime, read_table
from accel.errors import InvalidArgument
from accel.goodput.efficiency import NoiseInterval
from accel.goodput.fit import fit_throughput
from accel.goodput.goodput import BatchLimits, SpeedTable
from accel.goodput.job import EXPLORED, JobProfile
from accel.goodput.observations import Configuration, Observations
from accel.goodput.throughput import ThroughputModel

INTERVAL_S = 60
RESTART_S = 30.0
MOST_REPLICAS = 64
MOST_ACCUMULATION = 15
ONE_BATCH = {"ncf": 32768}
"""Applications that run at this batch, on one replica, under every policy that chooses batches itself."""


class Submission(NamedTuple):
    """A line of a workload."""

    name: str
    time: int
    """When it is submitted, s."""
    application: str
    num_replicas: int
    """What a user who can't resize asks for."""
    batch_size: int
    """What a user who can't change the batch trains at."""


def read_workload(path: Path) -> list[Submission]:
    """Read a workload: a CSV file with the columns name, time, application, num_replicas and batch_size.

    Args:
        path: of the file.

    Raises:
        InvalidArgument: if it can't be read, lacks a column, or names a job twice.
    """
    jobs = [Submission(**row) for row in read_table(path, get_type_hints(Submission))]
    if not jobs or len({job.name for job in jobs}) < len(jobs):
        raise InvalidArgument(f"{path} must name at least one job, and none twice. Found: {len(jobs)} lines")
    return jobs


class Outage(NamedTuple):
    """A node that is not there for some time: it failed, or a spot node was reclaimed."""

    node: str
    since_s: float
    until_s: float


def read_outages(path: Path) -> list[Outage]:
    """Read outages: a CSV file with the columns node, since_s and until_s.

    Args:
        path: of the file.

    Raises:
        InvalidArgument: if it can't be read or lacks a column.
    """
    return [Outage(**row) for row in read_table(path, get_type_hints(Outage))]


class JobRules(NamedTuple):
    """What kind of jobs a policy is for."""

    is_elastic: bool = True
    """Whether jobs choose their batch themselves; else they train at the one of the workload."""
    has_fixed_size: bool = False
    """Whether jobs ask for the replicas of the workload."""
    says_length: bool = True
    """Whether jobs declare how many epochs they train."""
    restart_s: float = RESTART_S
    """How long a change of its replicas stops a job, s."""
    checkpoint_s: float = 300.0
    """Between two checkpoints, s: a job that loses a node goes back to the last one."""


@dataclass
class SimulatedJob:
    """A job that runs as its application was measured.

    Args:
        submission: line of the workload.
        application: measured profile.
        rules: what kind of job it is.
    """

    submission: Submission
    application: Application
    rules: JobRules
    placement: tuple[int, ...] = ()
    """Replicas on each node."""
    local_batch: int = 0
    accumulation: int = 0
    progress: float = 0.0
    """Base steps done."""
    epoch: int = 0
    now_s: float = 0.0
    finished_s: float | None = None
    service_s: float = 0.0
    """GPU-seconds had."""
    restarts: int = -1
    """Changes of the replicas after the first."""
    waited_s: float = 0.0
    stood_s: float = 0.0
    """Seconds with replicas that stood still for a restart."""
    lost_s: float = 0.0
    """Seconds of training that were done again after a node was lost."""
    _standing_s: float = 0.0
    _saved: tuple[float, float, int] = (0.0, 0.0, 0)
    """When the last checkpoint was written, with its progress and epoch."""
    _observed: Observations = field(default_factory=Observations)
    _measured: set[tuple[int, int, int]] = field(default_factory=set)
    _model: ThroughputModel | None = None
    _noise: NoiseInterval | None = None
    _most_replicas: int = 0
    _table: tuple[object, SpeedTable] | None = None

    def view(self) -> JobView:
        """Return what a policy may know."""
        application, submission = self.application, self.submission
        most = application.max_batch // application.local_bounds[0]
        if self.rules.has_fixed_size:
            most = submission.num_replicas
        elif application.name in ONE_BATCH:
            most = 1
        elif self.rules.is_elastic:
            most = min(max(EXPLORED * self._most_replicas, 1), MOST_REPLICAS, most)
        else:
            most = submission.batch_size // application.local_bounds[0]
        profile = self._profile()
        return JobView(
            name=submission.name,
            submitted_s=submission.time,
            profiles={} if profile is None else {"gpu": profile},
            max_replicas=most,
            service_s=self.service_s,
            restarts=max(self.restarts, 0),
        )

    def _length(self) -> float:
        """Return the base steps that the declared epochs come to, by those of the first."""
        return self.application.epochs * self.application.progress(1)

    def _profile(self) -> JobProfile | None:
        if self._model is None or self._noise is None:
            return None
        return JobProfile(
            model=self._model,
            noise=self._noise,
            base_batch=self.application.base_batch,
            limits=self._limits(),
            most_replicas=self._most_replicas,
            restart_s=self.rules.restart_s,
            progress=self.progress,
            total=self._length() if self.rules.says_length else None,
        )

    def _limits(self) -> BatchLimits:
        least, most = self.application.local_bounds
        return BatchLimits(
            max_batch_size=self.application.max_batch,
            local_min=least,
            local_max=most,
            max_accumulation=MOST_ACCUMULATION,
            min_gradients=2,
        )

    def advance(self, seconds: float) -> None:
        """Train for some seconds, or wait."""
        if not self.placement:
            if self.finished_s is None and self.now_s + seconds > self.submission.time:
                self.waited_s += seconds
            self.now_s += seconds
            return
        standing = min(self._standing_s, seconds)
        self._standing_s -= standing
        self.stood_s += standing
        self._pass(standing)
        left = seconds - standing
        while left > 0 and self.finished_s is None:
            rate = self._step()
            end = self.application.progress(self.epoch + 1)
            if self.progress + rate * left < end:
                self.progress += rate * left
                self._pass(left)
                left = 0.0
            else:
                self.epoch += 1
                needed = round((end - self.progress) / rate)
                self.progress = end
                self._pass(needed)
                left -= needed
                if self.epoch > self.application.epochs - 1:
                    self.finished_s = self.now_s
            self._choose_batch()
        self.now_s += left
        if self.now_s - self._saved[0] >= self.rules.checkpoint_s:
            self._save()

    def _save(self) -> None:
        self._saved = self.now_s, self.progress, self.epoch

    def lose_node(self) -> None:
        """Go back to the last checkpoint."""
        saved_s, self.progress, self.epoch = self._saved
        self.lost_s += self.now_s - saved_s

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds
        self.service_s += seconds * sum(self.placement)

    def _step(self) -> float:
        """Let the controller measure a step, and return the real progress in base steps per second."""
        batch = sum(self.placement) * self.local_batch * (self.accumulation + 1)
        time, noise = (
            self.application.step_time(self.placement, self.local_batch),
            self.application.noise(batch, self.epoch),
        )
        if self.rules.is_elastic:
            self._observe(time, noise)
        return noise.gain(batch / self.application.base_batch) / (time.step_s + time.compute_s * self.accumulation)

    def _observe(self, time: StepTime, noise: Noise) -> None:
        phi = self.application.base_batch * noise.variance / noise.square if noise.square > 0 else math.inf
        self._noise = NoiseInterval(phi, phi, phi)
        replicas = sum(self.placement)
        key = len(self.placement), replicas, self.local_batch
        if key in self._measured:
            return
        self._measured.add(key)
        self._most_replicas = max(self._most_replicas, replicas)
        self._observed.add(Configuration(*key), time.step_s)
        if time.compute_s > 0:
            self._observed.add(Configuration(*key, communication_scale=0.0), time.compute_s)
        self._model = fit_throughput(self._observed.step_times(), self._model)

    def _choose_batch(self) -> None:
        application, replicas = self.application, sum(self.placement)
        if not replicas:
            return
        least, most = application.local_bounds
        batch = self.submission.batch_size
        if self.rules.is_elastic:
            batch = ONE_BATCH.get(application.name, 0)
            if not batch and (self._model is None or self._noise is None):
                batch = max(application.base_batch, least * replicas)
        if batch:
            shared = math.ceil(batch / replicas - 1e-8)
            self.accumulation = math.ceil(shared / most - 1e-8) - 1
            if replicas == 1 and batch > application.base_batch:
                self.accumulation = max(1, self.accumulation)
            self.local_batch = math.ceil(shared / (self.accumulation + 1) - 1e-8)
        else:
            assert self._model is not None and self._noise is not None
            key = self._model, self.placement
            if self._table is None or self._table[0] != key:
                place = [len(self.placement)], [replicas]
                self._table = key, SpeedTable(self._model, application.base_batch, self._limits(), *place)
            best = self._table[1].best(self._noise)
            self.local_batch, self.accumulation = int(best.local_batch[0]), int(best.accumulation[0])
        self.local_batch = min(self.local_batch, application.max_batch // (replicas * (self.accumulation + 1)))

    def reallocate(self, placement: tuple[int, ...]) -> None:
        """Take other replicas, or none; a checkpoint is written before."""
        self._save()
        self.placement = placement
        if placement:
            self._choose_batch()
            self._standing_s = self.rules.restart_s
            self.restarts += 1


class Period(NamedTuple):
    """Replicas of a job that stayed for some time."""

    job: str
    since_s: float
    until_s: float
    nodes: tuple[str, ...]


class Simulation:
    """Jobs on a cluster under a policy.

    Args:
        workload: jobs that are submitted.
        nodes: of the cluster.
        policy: gives replicas.
        applications: measured profiles, by name.
        rules: what kind of jobs the policy is for.
        interval_s: time between two decisions.
        outages: when nodes are not there; they come and go at the next decision.

    Attributes:
        jobs: in the order of the workload.
        periods: what each job had, in the order in which it ended.
    """

    def __init__(
        self,
        workload: Iterable[Submission],
        nodes: Sequence[ClusterNode],
        policy: Policy,
        applications: Mapping[str, Application],
        rules: JobRules | None = None,
        interval_s: int = INTERVAL_S,
        outages: Iterable[Outage] = (),
    ) -> None:
        submissions = list(workload)
        if unknown := {each.application for each in submissions} - applications.keys():
            raise InvalidArgument(f"applications must be among {sorted(applications)}. Found: {sorted(unknown)}")
        self._outages = list(outages)
        self.nodes, self.policy, self.interval_s = nodes, policy, interval_s
        self.jobs = [SimulatedJob(each, applications[each.application], rules or JobRules()) for each in submissions]
        self.periods: list[Period] = []
        self.now_s = 0
        self._given: dict[str, tuple[str, ...]] = {}
        self._since: dict[str, float] = {}

    def run(self) -> None:
        """Run until all jobs have ended."""
        while any(job.finished_s is None for job in self.jobs):
            self.round()

    def round(self) -> None:
        """Run for one interval, and let the policy decide."""
        for job in self.jobs:
            job.advance(self.interval_s)
        self.now_s += self.interval_s
        active = [job for job in self.jobs if job.submission.time <= self.now_s and job.finished_s is None]
        names = {job.submission.name for job in active}
        out = {each.node for each in self._outages if each.since_s <= self.now_s < each.until_s}
        there = [node for node in self.nodes if node.name not in out]
        for job in active:
            if not out.isdisjoint(self._given.get(job.submission.name, ())):
                job.lose_node()
        current = {name: given for name, given in self._given.items() if name in names and out.isdisjoint(given)}
        asked = [job.view() for job in active]
        given = self.policy(asked, there, current, self.now_s) if active and there else {}
        for job in self.jobs:
            self._change(job, given.get(job.submission.name, ()))

    def _change(self, job: SimulatedJob, nodes: tuple[str, ...]) -> None:
        name = job.submission.name
        before = self._given.get(name, ())
        if before == nodes:
            return
        if before:
            until = self.now_s if job.finished_s is None else job.finished_s
            self.periods.append(Period(name, self._since[name], until, before))
            del self._given[name]
        if nodes:
            self._given[name], self._since[name] = nodes, self.now_s
        if job.finished_s is None or nodes:
            job.reallocate(tuple(len(list(same)) for _, same in groupby(nodes)))
