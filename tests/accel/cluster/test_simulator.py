"""Simulated clusters: the published figures, and small ones whose course can be reckoned by hand."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from click.testing import CliRunner

from accel.cluster.baselines import Optimus, Tiresias, equal_shares, first_come, optimus_seconds
from accel.cluster.genetic import Pollux
from accel.cluster.outcome import outcome, utilisation
from accel.cluster.policy import allocate
from accel.cluster.profiles import Application
from accel.cluster.simulator import JobRules, Outage, Simulation, Submission, read_outages, read_workload
from accel.commands.cli import main
from accel.errors import InvalidArgument
from benchmarks.record import DATA
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
        [Submission("a", 0, "small", 1, 32)], hosts(1), first_come, applications, JobRules(False, True)
    )
    simulation.run()
    (job,) = simulation.jobs
    assert job.finished_s == pytest.approx(60 + 30 + 600 * 0.2, abs=1)
    assert job.service_s == pytest.approx(30 + 600 * 0.2, abs=1)


def test_a_lost_node_costs_the_steps_since_the_checkpoint(applications: dict[str, Application]) -> None:
    rules = JobRules(False, True, checkpoint_s=60.0)
    ends = []
    for outages in ((), [Outage("node-00", 150.0, 170.0)]):
        simulation = Simulation(
            [Submission("a", 0, "small", 1, 32)], hosts(1), first_come, applications, rules, outages=outages
        )
        simulation.run()
        ends.append(simulation.jobs[0].finished_s)
    assert ends[0] is not None
    assert ends[1] is not None
    assert simulation.jobs[0].restarts == 0 or ends[1] > ends[0]
    long = Simulation(
        [Submission("a", 0, "large", 1, 32)],
        hosts(1),
        first_come,
        applications,
        rules,
        outages=[Outage("node-00", 230, 350)],
    )
    long.run()
    assert long.jobs[0].restarts == 1
    assert long.jobs[0].waited_s == 60 + 120


@pytest.mark.parametrize("policy", [allocate, Pollux(20, 10), equal_shares, first_come, Tiresias()])
def test_every_job_ends_and_its_times_add_up(policy: Any, applications: dict[str, Application], tmp_path: Path) -> None:
    write_workload(tmp_path / "jobs.csv")
    rules = FIXED if policy is first_come or isinstance(policy, Tiresias) else JobRules()
    simulation = Simulation(read_workload(tmp_path / "jobs.csv"), hosts(2), policy, applications, rules)
    simulation.run()
    found = outcome(simulation, "any", "jobs")
    for job in simulation.jobs:
        spans = [each for each in simulation.periods if each.job == job.submission.name]
        assert sum((each.until_s - each.since_s) * len(each.nodes) for each in spans) == pytest.approx(job.service_s)
    assert found.gpu_hours == pytest.approx(sum(job.service_s for job in simulation.jobs) / 3600)
    assert max(utilisation(simulation.periods, 8)[1]) <= 1
    assert found.mean_s <= found.p99_s <= found.makespan_s


def test_a_cheap_resize_is_worth_something(applications: dict[str, Application]) -> None:
    jobs = submissions(*((f"job-{number}", 45 * number, ("small", "large")[number % 2], 2) for number in range(10)))
    means = []
    for restart_s in (30.0, 0.1):
        simulation = Simulation(jobs, hosts(2), allocate, applications, JobRules(restart_s=restart_s))
        simulation.run()
        means.append(outcome(simulation, "accel", "jobs").mean_s)
    assert means[1] < means[0]


def test_the_command_prints_a_table_and_writes_json_and_plots(
    applications: dict[str, Application], tmp_path: Path
) -> None:
    write_workload(tmp_path / "jobs.csv", 4)
    (tmp_path / "lost.csv").write_text("node,since_s,until_s\nnode-00,100,200\n")
    arguments = [
        "cluster",
        "simulate",
        str(tmp_path / "jobs.csv"),
        "--profiles",
        str(tmp_path / "traces"),
        "--nodes",
        "2",
    ]
    more = [
        "--policy",
        "accel",
        "--policy",
        "optimus",
        "--outages",
        str(tmp_path / "lost.csv"),
        "--out",
        str(tmp_path / "out"),
    ]
    done = CliRunner().invoke(main, [*arguments, *more])
    assert done.exit_code == 0, done.output
    assert "optimus" in done.output
    (first, second) = json.loads((tmp_path / "out" / "outcomes.json").read_text())
    assert first["policy"], second["policy"] == ("accel", "optimus")
    assert len(first["completion_s"]) == 4
    assert (tmp_path / "out" / "jobs-accel.png").stat().st_size > 1000


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
    (tmp_path / "lost.csv").write_text("node\nnode-00\n")
    with pytest.raises(InvalidArgument, match="node, since_s, until_s"):
        read_outages(tmp_path / "lost.csv")
    with pytest.raises(InvalidArgument, match=r"a batch of small must be in \[32, 512\]. Found: 8"):
        applications["small"].noise(8, 0)
    with pytest.raises(InvalidArgument, match="was not measured near 1000 samples"):
        applications["small"].step_time((1,), 1000)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match="must hold validation"):
        _ = Application(tmp_path / "empty").base_batch
