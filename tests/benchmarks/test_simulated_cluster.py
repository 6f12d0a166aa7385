"""Simulated clusters: the published figures, and small ones whose course can be reckoned by hand."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from accel.cluster.policy import allocate
from accel.errors import InvalidArgument
from benchmarks.record import DATA
from benchmarks.simulated_cluster.outcome import outcome
from benchmarks.simulated_cluster.profiles import Application
from benchmarks.simulated_cluster.rivals import Optimus, Tiresias, optimus_seconds
from benchmarks.simulated_cluster.simulator import JobRules, Simulation, Submission, read_workload
from tests.accel.cluster.cluster_cases import hosts, write_application, write_workload

POLLUX = DATA / "pollux_osdi21"
FIXED = JobRules(is_elastic=False, has_fixed_size=True)


@pytest.fixture(name="applications")
def _applications(tmp_path: Path) -> dict[str, Application]:
    write_application(tmp_path / "traces" / "small")
    write_application(tmp_path / "traces" / "large", step_s=0.4, epochs=6)
    return {path.name: Application(path) for path in (tmp_path / "traces").iterdir()}


def submissions(*lines: tuple[str, int, str, int]) -> list[Submission]:
    return [Submission(name, time, kind, replicas, 128) for name, time, kind, replicas in lines]


@pytest.mark.skipif(not POLLUX.exists(), reason=f"needs the measured profiles in {POLLUX.name}")
@pytest.mark.parametrize(("policy", "seconds"), [("tiresias", 3469.69375), ("optimus", 5301.875)])
def test_published_figures_come_out_to_the_digit(policy: str, seconds: float) -> None:
    """Those of the authors of Pollux, job by job."""
    applications = {path.name: Application(path) for path in (POLLUX / "traces").iterdir()}
    workload = read_workload(POLLUX / "workloads" / "workload-6.csv")
    rules = FIXED if policy == "tiresias" else JobRules(is_elastic=False)
    simulation = Simulation(workload, hosts(16), Tiresias(), applications, rules)
    if policy == "optimus":
        simulation.policy = Optimus(optimus_seconds({job.submission.name: job for job in simulation.jobs}))
    simulation.run()
    found = {job.submission.name: (job.finished_s or 0.0) - job.submission.time for job in simulation.jobs}
    published = json.loads((POLLUX / "results-jobload" / f"{policy}-1.0" / "summary.json").read_text())
    assert found == published["jcts"]["workload-6"]
    assert mean(found.values()) == seconds


def test_a_job_alone_takes_what_its_tables_say(applications: dict[str, Application]) -> None:
    """600 base steps of 32 on one replica; the first decision is after 60 s, the start takes 30 s."""
    simulation = Simulation(
        [Submission("a", 0, "small", 1, 32)], hosts(1), Tiresias(), applications, JobRules(False, True)
    )
    simulation.run()
    (job,) = simulation.jobs
    assert job.finished_s == pytest.approx(60 + 30 + 600 * 0.2, abs=1)
    assert job.service_s == pytest.approx(30 + 600 * 0.2, abs=1)


@pytest.mark.parametrize("policy", [allocate, Tiresias()])
def test_every_job_ends_and_its_times_add_up(policy: Any, applications: dict[str, Application], tmp_path: Path) -> None:
    write_workload(tmp_path / "jobs.csv")
    rules = FIXED if policy is not allocate else JobRules()
    simulation = Simulation(read_workload(tmp_path / "jobs.csv"), hosts(2), policy, applications, rules)
    simulation.run()
    found = outcome(simulation)
    for job in simulation.jobs:
        spans = [each for each in simulation.periods if each.job == job.submission.name]
        assert sum((each.until_s - each.since_s) * len(each.nodes) for each in spans) == pytest.approx(job.service_s)
    assert found.gpu_hours == pytest.approx(sum(job.service_s for job in simulation.jobs) / 3600)
    assert found.mean_s <= found.p99_s <= found.makespan_s


def test_a_cheap_resize_is_worth_something(applications: dict[str, Application]) -> None:
    jobs = submissions(*((f"job-{number}", 45 * number, ("small", "large")[number % 2], 2) for number in range(10)))
    means = []
    for restart_s in (30.0, 0.1):
        simulation = Simulation(jobs, hosts(2), allocate, applications, JobRules(restart_s=restart_s))
        simulation.run()
        means.append(outcome(simulation).mean_s)
    assert means[1] < means[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,time\na,1\n", "must be a table with the columns name, time, application"),
        ("name,time,application,num_replicas,batch_size\na,x,small,1,32\n", "must be a table"),
        ("name,time,application,num_replicas,batch_size\n", "at least one job"),
        ("name,time,application,num_replicas,batch_size\n" + "a,1,small,1,32\n" * 2, "none twice"),
    ],
)
def test_workloads_that_can_not_be_read(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        read_workload(tmp_path / "jobs.csv")


def test_other_bad_input(applications: dict[str, Application], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"applications must be among .*'large', 'small'.* Found: .*'none'"):
        Simulation(submissions(("a", 0, "none", 1)), hosts(1), allocate, applications)
    with pytest.raises(InvalidArgument, match=r"a batch of small must be in \[32, 512\]. Found: 8"):
        applications["small"].noise(8, 0)
    with pytest.raises(InvalidArgument, match="was not measured near 1000 samples"):
        applications["small"].step_time((1,), 1000)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match="must hold validation"):
        _ = Application(tmp_path / "empty").base_batch
