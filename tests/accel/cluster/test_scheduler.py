"""The scheduler and its table: no job is lost, none runs twice, whatever ends in between."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.cluster import local_actuator
from accel.cluster.actuators import LOG, RESTARTS, ClusterUnreachable, Status
from accel.cluster.job_table import ENDED, FILE, JobRow, JobSpec, JobTable, TableUnwritable, claimed, scheduler_of
from accel.cluster.jobs import ClusterNode
from accel.cluster.local_actuator import LocalActuator, processes_of
from accel.cluster.policy import PolicyOptions, allocate
from accel.cluster.scheduler import Scheduler
from accel.cluster.status import JobCollector, job_status, to_html, to_json
from accel.commands.cli import main
from accel.elastic import local_job
from accel.elastic.batch_size.report import PROFILE
from accel.errors import InvalidArgument
from accel.goodput.job import LostTime
from tests.accel.cluster.cluster_cases import profile
from tests.sampling import examples


def spec(folder: Path, name: str = "one", **options: Any) -> JobSpec:
    given = {"arguments": ("train.py",), "folder": str(folder), "checkpoint": str(folder / name)}
    return JobSpec(**{**given, **options})


class PlayedActuator:
    """Jobs that run on slots until the test says that they end."""

    def __init__(self, slots: int = 4) -> None:
        self.slots = slots
        self.running: dict[str, int] = {}
        self.statuses: dict[str, Status] = {}
        self.is_reachable = True
        self.owner: dict[str, object] = {}
        self.fails: set[str] = set()
        self._lock = threading.Lock()

    def nodes(self) -> list[ClusterNode]:
        self.reach()
        return [ClusterNode("localhost", self.slots)] if self.slots else []

    def reach(self) -> None:
        if not self.is_reachable:
            raise ClusterUnreachable("the cluster does not answer")

    def change(self, row: JobRow, nodes: tuple[str, ...]) -> None:
        with self._lock:
            self.reach()
            if self.statuses.get(row.name) == "lost":
                del self.statuses[row.name]
            if row.name in self.fails:
                raise OSError("no such script")
            if row.name in self.statuses:
                return
            self.running[row.name] = len(nodes)
            assert sum(self.running.values()) <= self.slots

    def status(self, name: str) -> Status:
        self.reach()
        return self.statuses.get(name)

    def recover(self, row: JobRow) -> bool:
        self.running.pop(row.name, None)
        return False

    def ends(self, name: str, status: Status) -> None:
        if self.running.get(name):
            self.statuses[name] = status
            self.running[name] = 0


class Played:
    """A cluster whose clock the test moves."""

    def __init__(self, folder: Path, slots: int = 4) -> None:
        self.now, self.folder, self.actuator = 1000.0, folder, PlayedActuator(slots)
        self.table, self.said = JobTable(folder), list[str]()
        self.scheduler = self.started()

    def started(self) -> Scheduler:
        scheduler = Scheduler(self.table, self.actuator, clock=lambda: self.now, say=self.said.append)
        scheduler.recover()
        return scheduler

    def passes(self, seconds: float = 60.0) -> dict[str, JobRow]:
        self.now += seconds
        for _ in range(3):  # a decision, its changes, and what they make room for
            self.scheduler.decide(self.scheduler.look())
            for future, _ in list(self.scheduler._changing.values()):
                future.exception()
        self.scheduler.look()
        return {row.name: row for row in self.table.jobs()}


def test_jobs_share_the_slots_and_the_next_gets_what_is_given_up(tmp_path: Path) -> None:
    cluster = Played(tmp_path)
    for name in ("a", "b"):
        cluster.table.submit(name, spec(tmp_path, name, max_replicas=2 + 2 * (name == "b")), cluster.now)
        profile(most=4).save(tmp_path / name / PROFILE)
    rows = cluster.passes()
    assert [len(rows[name].nodes) for name in ("a", "b")] == [2, 2]
    cluster.actuator.ends("a", 0)
    rows = cluster.passes()
    assert (rows["a"].state, rows["a"].exit_status, rows["a"].nodes) == ("done", 0, ())
    assert len(rows["b"].nodes) == 4
    assert rows["b"].service_s > 0


def test_what_a_job_came_to_is_told(tmp_path: Path) -> None:
    cluster = Played(tmp_path)
    for name in ("good", "bad", "none", "unwanted", "large"):
        cluster.table.submit(
            name, spec(tmp_path, name, min_replicas=9 if name == "large" else 1, max_replicas=9), cluster.now
        )
    cluster.actuator.fails.add("none")
    cluster.passes()
    cluster.table.cancel(["unwanted", "large"])
    cluster.actuator.ends("good", 0)
    cluster.actuator.ends("bad", 3)
    rows = cluster.passes()
    assert {name: row.state for name, row in rows.items()} == {
        **{"good": "done", "bad": "failed", "none": "failed", "unwanted": "cancelled", "large": "cancelled"}
    }
    assert rows["bad"].exit_status == 3
    assert {"good: changing to 1 replica", "good: done", "bad: failed, exit status 3"} <= set(cluster.said)
    assert "no such script" in rows["none"].note


@settings(max_examples=examples(60))
@given(st.data())
def test_no_job_is_lost_and_none_runs_twice(data: st.DataObject) -> None:
    memory = Path("/dev/shm")  # each change is written through to the disk
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        draw_events(Played(Path(folder), data.draw(st.integers(1, 5))), data)


def draw_events(cluster: Played, data: st.DataObject) -> None:
    names: list[str] = []
    for _ in range(data.draw(st.integers(1, 12))):
        event = data.draw(
            st.sampled_from(["submit", "submit", "end", "cancel", "killed", "lost", "unreachable", "pass"])
        )
        rows = {row.name: row for row in cluster.table.jobs()}
        open_ = [name for name in names if rows[name].state not in ENDED]
        if event == "submit":
            names.append(f"job-{len(names)}")
            least = data.draw(st.integers(1, 3))
            asked = spec(cluster.folder, names[-1], min_replicas=least, max_replicas=least + 2)
            cluster.table.submit(names[-1], asked, cluster.now)
        elif event == "end" and open_:
            cluster.actuator.ends(data.draw(st.sampled_from(open_)), data.draw(st.sampled_from([0, 1])))
        elif event == "lost" and open_:
            cluster.actuator.ends(data.draw(st.sampled_from(open_)), "lost")
        elif event == "unreachable":
            cluster.actuator.is_reachable = False
            with pytest.raises(ClusterUnreachable):
                cluster.passes()
            cluster.actuator.is_reachable = True
        elif event == "cancel" and open_:
            cluster.table.cancel([data.draw(st.sampled_from(open_))])
        elif event == "killed":  # at any moment: changes may be under way, or not be written down
            if data.draw(st.booleans()):
                cluster.scheduler.decide(cluster.scheduler.look())
            for future, _ in list(cluster.scheduler._changing.values()):
                future.exception()
            cluster.scheduler = cluster.started()
        rows = cluster.passes()
        assert rows.keys() == set(names)
        for row in rows.values():
            assert cluster.actuator.running.get(row.name, 0) == len(row.nodes)
    for _ in range(2 * len(names) + 2):
        for name in names:
            cluster.actuator.ends(name, 0)
        rows = cluster.passes()
    assert all(row.state in ENDED or row.spec.min_replicas > cluster.actuator.slots for row in rows.values())


def test_a_job_that_ends_while_it_is_resized_has_ended(tmp_path: Path) -> None:
    """It stayed "running" for good."""
    script = tmp_path / "train.py"
    script.write_text("")
    actuator, row = LocalActuator(2), JobRow("a", spec(tmp_path, arguments=(str(script),)), 0.0)
    actuator.change(row, ("localhost",))
    actuator._jobs["a"]._launched[0].wait()
    actuator.change(row, ("localhost",) * 2)
    assert actuator.status("a") == 0


def test_what_an_earlier_scheduler_has_left_is_ended_before_anything_is_written_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that was killed while it started a job left it running beside the next start."""
    launcher = tmp_path / "launcher.py"
    launcher.write_text("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])")
    monkeypatch.setattr(local_actuator, "SAVE_S", 5.0)
    row = JobRow("a", spec(tmp_path, arguments=(str(launcher),)), 0.0)
    killed = LocalActuator(1)
    killed.change(row, ("localhost",))
    while not processes_of(row.spec.checkpoint):  # its environment is not there at once
        time.sleep(0.01)
    assert not LocalActuator(1).recover(row)
    assert not processes_of(row.spec.checkpoint)
    assert killed._jobs["a"]._launched[0].wait() != 0


def test_a_job_whose_node_is_lost_goes_on_elsewhere(tmp_path: Path) -> None:
    cluster = Played(tmp_path)
    cluster.table.submit("a", spec(tmp_path), cluster.now)
    cluster.passes()
    cluster.actuator.ends("a", "lost")
    assert cluster.passes()["a"].state == "running"
    assert "a: it was lost; it goes on from its last checkpoint" in cluster.said
    assert cluster.actuator.running["a"] == 1


def test_a_cluster_that_does_not_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Played(tmp_path)
    cluster.table.submit("a", spec(tmp_path), cluster.now)
    cluster.actuator.is_reachable = False
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        cluster.actuator.is_reachable = len(waits) > 2
        if cluster.actuator.running.get("a"):
            cluster.actuator.ends("a", 0)
        cluster.now += 1.0

    monkeypatch.setattr(cluster.scheduler._stops, "wait", wait)
    cluster.scheduler.run(until_empty=True)
    assert cluster.table.job("a").state == "done"
    assert cluster.said.count("the cluster does not answer") == 1


def test_nodes_that_change_are_seen_before_the_next_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Played(tmp_path, slots=1)
    cluster.table.submit("a", spec(tmp_path, max_replicas=2), cluster.now)
    profile(most=4).save(tmp_path / "one" / PROFILE)
    sizes: list[int] = []

    def wait(seconds: float) -> None:
        cluster.now += 1.0
        cluster.actuator.slots = 2
        if sizes[-1:] != [cluster.actuator.running.get("a", 0)]:
            sizes.append(cluster.actuator.running.get("a", 0))
        if cluster.now > 1030.0:
            cluster.scheduler.stop()

    monkeypatch.setattr(cluster.scheduler._stops, "wait", wait)
    cluster.scheduler.run()
    assert sizes[-1] == 2  # a minute has not passed


def test_each_replica_has_a_gpu_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "launcher.py"
    launcher.write_text("import os, time\nprint(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\ntime.sleep(60)")
    monkeypatch.setattr(local_job, "TORCHRUN", (sys.executable, str(launcher)))
    actuator = LocalActuator(4, (0, 1, 2, 5))
    rows = [JobRow(name, spec(tmp_path, name, arguments=(str(launcher),)), 0.0) for name in ("a", "b")]
    used: list[str] = []
    for row, replicas in ((rows[0], 2), (rows[1], 1), (rows[0], 1), (rows[1], 3), (rows[0], 0), (rows[1], 4)):
        actuator.change(row, ("localhost",) * replicas)
        log = Path(row.spec.checkpoint) / LOG
        while replicas and not log.read_text().endswith("\n"):
            time.sleep(0.01)
        used.append(log.read_text() if replicas else "")
        log.write_text("")
    for row in rows:
        actuator.change(row, ())
    assert [text.strip() for text in used] == ["0,1", "2", "0", "1,2,5", "", "0,1,2,5"]


@pytest.fixture
def played_ranks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the `LocalJob`s that an actuator makes; they start nothing."""
    made: list[Any] = []

    class PlayedJob:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.sizes, self.options, self.status = list[int](), options, None
            made.append(self)

        def resize(self, ranks: int) -> None:
            self.sizes.append(ranks)

    monkeypatch.setattr(local_actuator, "LocalJob", PlayedJob)
    return made


def test_processes_stay_where_the_job_allows_it(tmp_path: Path, played_ranks: list[Any]) -> None:
    for actuator, in_place in ((LocalActuator(4), True), (LocalActuator(4), False), (LocalActuator(2, (0, 1)), True)):
        row = JobRow("a", spec(tmp_path, in_place=in_place), 0.0)
        for ranks in (1, 2, 0, 1):
            actuator.change(row, ("localhost",) * ranks)
    kept, *anew = played_ranks
    assert kept.sizes == [1, 2, 0, 1]
    assert kept.options["in_place"]
    assert [each.sizes for each in anew] == [[1, 0], [2, 0], [0, 0], [1]] * 2  # each start may be on other GPUs
    assert not any(each.options["in_place"] for each in anew)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_rank_that_fails_costs_no_job(tmp_path: Path, played_ranks: list[Any], in_place: bool) -> None:
    actuator, row = LocalActuator(4), JobRow("a", spec(tmp_path, in_place=in_place), 0.0)
    seen: list[Status] = []
    for _ in range(5):
        actuator.change(row, ("localhost",))
        assert actuator.status("a") is None
        played_ranks[-1].status = 7
        seen.append(actuator.status("a"))
        if seen[-1] == "lost":
            assert played_ranks[-1].sizes[-1] == 0
            assert actuator.status("a") == "lost"  # it may be asked again, where it could not be written down
        else:
            break
    assert seen == ["lost"] * RESTARTS + [7]


def test_a_change_in_place_is_no_lost_time(tmp_path: Path) -> None:
    cluster = Played(tmp_path)
    for name, in_place in (("a", True), ("b", False)):
        cluster.table.submit(name, spec(tmp_path, name, in_place=in_place), cluster.now)
        row = cluster.table.job(name)
        row.nodes = ("localhost",)
        cluster.scheduler._change(row, ("localhost",) * 2)
        cluster.scheduler._changing[name][0].exception()
        cluster.now += 5.0
        cluster.scheduler._end_change(row)
        assert (row.ran_s, row.changing_s) == ((5.0, 0.0) if in_place else (0.0, 5.0))


def test_where_a_job_s_time_went(tmp_path: Path) -> None:
    lost = LostTime(start=10.0, restart=5.0, compile=4.0, input=20.0, checkpoint=0.5)
    dataclasses.replace(profile(), lost=lost).save(tmp_path / "one" / PROFILE)
    row = JobRow("a", spec(tmp_path), 0.0, ran_s=100.0, service_s=200.0, waited_s=85.0, changing_s=15.0)
    assert row.booked() == {
        **{"training": 60.5, "start": 10.0, "restart": 20.0, "compile": 4.0},
        **{"input": 20.0, "checkpoint": 0.5, "waiting": 85.0},
    }
    assert job_status(row).lost == "waiting 42%, input 10%, restart 10%, start 5%, compile 2%"
    assert '<span class="input" style="width: 10.0%"></span>' in to_html([row], "now")
    assert json.loads(to_json([row]))[0]["booked_s"]["waiting"] == 85.0


def test_stopping_saves_every_job_and_a_later_start_goes_on(tmp_path: Path) -> None:
    cluster = Played(tmp_path)
    cluster.table.submit("a", spec(tmp_path), cluster.now)
    cluster.passes()
    cluster.scheduler.stop()
    cluster.scheduler.run()
    (row,) = cluster.table.jobs()
    assert (row.state, row.nodes) == ("waiting", ())
    assert not any(cluster.actuator.running.values())
    cluster.scheduler = cluster.started()
    assert cluster.passes()["a"].state == "running"


def test_a_job_that_does_not_fit_says_so(tmp_path: Path) -> None:
    cluster = Played(tmp_path, slots=2)
    cluster.table.submit("a", spec(tmp_path, min_replicas=3, max_replicas=3), cluster.now)
    assert cluster.passes()["a"].note == "needs 3 replicas; there is room for 2"


@pytest.mark.parametrize(
    "options", [{"weight": -1.0}, {"weight": float("nan")}, {"min_replicas": 2}, {"deadline_s": 0.0}]
)
def test_what_would_stop_the_scheduler_is_not_submitted(options: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="must"):
        spec(tmp_path, **options)


def test_a_profile_that_can_not_be_read_is_passed_over(tmp_path: Path) -> None:
    cluster = Played(tmp_path)
    cluster.table.submit("a", spec(tmp_path), cluster.now)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / PROFILE).write_text("{")
    assert cluster.passes()["a"].state == "running"


def test_a_folder_has_one_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with claimed(tmp_path), pytest.raises(InvalidArgument, match="another one runs"), claimed(tmp_path):
        pass
    with claimed(tmp_path):
        pass

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(InvalidArgument, match="No locks available"), claimed(tmp_path):
        pass


def test_a_name_is_given_once(tmp_path: Path) -> None:
    table = JobTable(tmp_path)
    table.submit("a", spec(tmp_path), 1.0)
    with pytest.raises(InvalidArgument, match=r"a name of its own\. Found: 'a'"):
        table.submit("a", spec(tmp_path), 2.0)
    assert [row.submitted_s for row in table.jobs()] == [1.0]


def test_jobs_that_are_not_there_or_have_ended_are_not_cancelled(tmp_path: Path) -> None:
    table = JobTable(tmp_path)
    table.submit("a", spec(tmp_path), 1.0)
    with pytest.raises(InvalidArgument, match=r"must be one of \['a'\]. Found: 'b'"):
        table.cancel(["a", "b"])
    assert not table.job("a").is_cancelled
    row = table.job("a")
    row.state = "done"
    table.write(row)
    with pytest.raises(InvalidArgument, match="'a' is done"):
        table.cancel(["a"])


@pytest.mark.parametrize("what", ["text", "cut", "version", "folder"])
def test_a_damaged_table_is_refused_in_a_sentence(what: str, tmp_path: Path) -> None:
    table = JobTable(tmp_path)
    table.submit("a", spec(tmp_path), 1.0)
    path = tmp_path / FILE
    if what == "text":
        path.write_text("these are not the jobs you are looking for" * 100)
    elif what == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    elif what == "version":
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version = 9")
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(InvalidArgument, match="job table"):
        JobTable(tmp_path).jobs()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set that holds "full" while SQLite has no page left for what it writes."""
    state, connect = set[str](), sqlite3.connect

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
            if state and sql.startswith(("INSERT", "UPDATE")):
                raise sqlite3.OperationalError("database or disk is full")
            return super().execute(sql, *args)

    monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: connect(*args, factory=Connection, **options))
    return state


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path, full_disk: set[str]) -> None:
    cluster = Played(tmp_path)
    cluster.table.submit("a", spec(tmp_path), cluster.now)
    full_disk.add("full")
    with pytest.raises(InvalidArgument, match=r"jobs.sqlite can't be written as a job table: database or disk is full"):
        cluster.table.submit("b", spec(tmp_path, "b"), cluster.now)
    with pytest.raises(TableUnwritable):
        cluster.passes()
    assert not cluster.actuator.running  # nothing is started that is not written down
    full_disk.clear()
    assert cluster.passes()["a"].state == "running"
    full_disk.add("full")
    cluster.actuator.ends("a", 0)
    with pytest.raises(TableUnwritable):
        cluster.passes()
    full_disk.clear()
    assert cluster.passes()["a"].state == "done"


def test_a_scheduler_that_ends_on_a_full_disk_stops_its_jobs(tmp_path: Path, full_disk: set[str]) -> None:
    cluster = Played(tmp_path)
    cluster.table.submit("a", spec(tmp_path), cluster.now)
    cluster.passes()
    full_disk.add("full")
    cluster.scheduler.stop()
    cluster.scheduler._stop_all()
    assert not any(cluster.actuator.running.values())
    full_disk.clear()
    cluster.scheduler = cluster.started()
    assert cluster.passes()["a"].state == "running"


def test_a_scheduler_waits_for_room_on_the_disk(
    tmp_path: Path, full_disk: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Played(tmp_path)
    cluster.table.submit("a", spec(tmp_path), cluster.now)
    full_disk.add("full")
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) > 2:
            full_disk.clear()
        cluster.actuator.ends("a", 0)
        cluster.now += 1.0

    monkeypatch.setattr(cluster.scheduler._stops, "wait", wait)
    cluster.scheduler.run(until_empty=True)
    assert cluster.table.job("a").state == "done"
    assert len([line for line in cluster.said if "disk is full" in line]) == 1


def test_a_job_that_finds_no_room_for_its_log_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, change = Played(tmp_path), PlayedActuator.change

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cluster.table.submit("a", spec(tmp_path), cluster.now)
    monkeypatch.setattr(PlayedActuator, "change", full)
    row = cluster.passes()["a"]
    assert (row.state, "No space left" in row.note) == ("waiting", True)
    monkeypatch.setattr(PlayedActuator, "change", change)
    assert cluster.passes()["a"].state == "running"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submit", "none.py"], "'none.py' does not exist"),
        (["submit", "--min", "3", "--max", "2", "train.py"], "replicas must have 1 ≤ min ≤ max. Found: 3 and 2"),
        (["submit", "--name", "a", "train.py"], "a job must have a name of its own. Found: 'a' is there already"),
        (["cluster", "status", "--cluster", "none"], "none must hold a cluster's jobs. Found: no jobs.sqlite"),
        (["cluster", "status", "--html", "train.py/page.html"], "--html must be a file that can be written"),
        (["cluster", "down"], "must have a scheduler that runs. Found: none"),
        (["logs", "b"], "the job must be one of ['a']. Found: 'b'"),
        (["cancel", "b"], "the job must be one of ['a']. Found: 'b'"),
        (["cluster", "up", "--image", "i"], "--image must come with --claim and --mount"),
        (["cluster", "status", "--cluster", "train.py"], "train.py"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    JobTable(tmp_path / ".accel-cluster").submit("a", spec(tmp_path), 1.0)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert [row.name for row in JobTable(tmp_path / ".accel-cluster").jobs()] == ["a"]


def test_what_is_shown_of_jobs(tmp_path: Path) -> None:
    cluster = Played(tmp_path)
    for name in ("a", "<b>"):
        cluster.table.submit(name, spec(tmp_path, name, max_replicas=2), cluster.now)
    profile(most=4, progress=25.0, left=75.0).save(tmp_path / "a" / PROFILE)
    rows = cluster.passes()
    line = job_status(rows["a"])
    assert (line.replicas, line.done) == ("2/2", "25%")
    assert 1.0 < float(line.speedup.removesuffix("x")) <= 2.0
    page = to_html(list(rows.values()), "now")
    assert "&lt;b&gt;" in page
    assert "25%" in page
    assert {each["name"]: each["progress"] for each in json.loads(to_json(list(rows.values())))} == {
        "a": 0.25,
        "<b>": None,
    }


def test_metrics_are_those_of_the_table(tmp_path: Path) -> None:
    exposition = pytest.importorskip("prometheus_client.exposition")
    registry = pytest.importorskip("prometheus_client").CollectorRegistry()
    cluster = Played(tmp_path)
    cluster.table.submit("a", spec(tmp_path), cluster.now)
    cluster.passes()
    cluster.passes()
    registry.register(JobCollector(cluster.table))
    text = exposition.generate_latest(registry).decode()
    assert 'accel_cluster_jobs{state="running"} 1.0' in text
    assert 'accel_cluster_job_replicas{job="a"} 1.0' in text
    assert 'accel_cluster_job_service_seconds_total{job="a"} 60.0' in text
    assert 'accel_cluster_job_seconds_total{cause="training",job="a"} 60.0' in text


@pytest.mark.parametrize("apart", [(), ("--apart",)])
def test_jobs_of_several_nodes_are_kept_apart_if_asked(
    apart: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PolicyOptions] = []

    def noted(*args: Any, options: PolicyOptions) -> dict[str, tuple[str, ...]]:
        asked.append(options)
        return allocate(*args, options)

    monkeypatch.setattr("accel.commands.cluster.allocate", noted)
    command = ["cluster", "up", "--cluster", str(tmp_path), "--slots", "1", "--until-empty", *apart]
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert CliRunner().invoke(main, command).exit_code == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert {options.keeps_links_apart for options in asked} == {bool(apart)}


def test_a_scheduler_is_ended_from_elsewhere(tmp_path: Path) -> None:
    table = JobTable(tmp_path)
    runner = CliRunner()
    refused = runner.invoke(main, ["cluster", "down", "--cluster", str(tmp_path)])
    assert (refused.exit_code, "Found: none" in refused.stderr) == (2, True)
    command = [sys.executable, "-m", "accel", "cluster", "up", "--cluster", str(tmp_path), "--slots", "1"]
    with subprocess.Popen(command) as scheduler:
        while scheduler_of(tmp_path) is None:
            time.sleep(0.05)
        assert runner.invoke(main, ["cluster", "down", "--cluster", str(tmp_path)]).exit_code == 0
    assert scheduler.returncode == 0
    assert table.jobs() == []
