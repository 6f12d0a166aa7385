"""The scheduler: asks the policy every minute, and carries out what it answers, job by job.

    table ─ jobs ─▶ views ─▶ allocate ─▶ changes ─ written to the table ─▶ actuator, a thread for each job

What is to be done is in the table before it is begun, so a scheduler that is killed can be started again: its actuator
takes over what runs, or ends it after a checkpoint, and the job starts again from there.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from accel.cluster.actuators import Actuator, ClusterUnreachable, Status
from accel.cluster.job_table import ENDED, JobRow, JobTable, TableUnwritable
from accel.cluster.jobs import ClusterNode, JobView, Policy
from accel.cluster.policy import allocate
from accel.goodput.job import EXPLORED

INTERVAL_S = 60.0
_NODES_S = 5.0
"""Between two looks at the nodes."""
_RETRY_S = 2.0
"""Between two attempts to reach a cluster."""
_THREADS = 64
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Of a disk, which may pass."""


class Scheduler:
    """Share out a cluster's nodes between the jobs of a table.

    Args:
        table: of the jobs.
        actuator: starts and stops them.
        interval_s: time between two decisions, s; jobs that come or end are seen within a second.
        policy: decides who gets what, as in the simulator.
        clock: seconds since 1970.
        say: told in a line of each change of a job. Default: nobody is.
    """

    def __init__(
        self,
        table: JobTable,
        actuator: Actuator,
        interval_s: float = INTERVAL_S,
        policy: Policy = allocate,
        clock: Callable[[], float] = time.time,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._say, self._policy = say, policy
        self._table, self._actuator, self._interval_s = table, actuator, interval_s
        self._clock = clock
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="accel-cluster")
        self._changing: dict[str, tuple[Future[None], float]] = {}
        """Changes under way, and since when."""
        self._going_on = set[str]()
        """Jobs whose change takes place beside their training."""
        self._seen_s = self._nodes_s = clock()
        self._nodes: list[ClusterNode] = []
        """Of the last decision or look at them, and when that was."""
        self._stops = threading.Event()

    def recover(self) -> None:
        """Take over or end what an earlier scheduler has started, so that no job runs twice.

        Raises:
            ClusterUnreachable: if the cluster does not answer.
        """
        left = [row for row in self._table.jobs() if row.state == "running"]
        for row, runs_on in zip(left, self._pool.map(self._actuator.recover, left), strict=True):
            if not runs_on:
                row.state, row.nodes, row.note = "waiting", (), "the scheduler was started again"
                self._table.write(row)

    def run(self, until_empty: bool = False) -> None:
        """Decide until `stop` is called, then stop all jobs, each after a checkpoint.

        Args:
            until_empty: end when no job is left.
        """
        self.recover()
        problem = ""
        try:
            decided, known = float("-inf"), set[tuple[str, bool]]()
            while not self._stops.is_set():
                try:
                    rows = self.look()
                    now = {(row.name, row.is_cancelled) for row in rows}
                    if now != known or self._clock() >= decided + self._interval_s or self._nodes_have_changed():
                        self.decide(rows)
                        known, decided = now, self._clock()
                    problem = ""
                except (ClusterUnreachable, TableUnwritable) as error:
                    if str(error) != problem:
                        self._say(problem := str(error))
                    self._stops.wait(_RETRY_S)
                    continue
                if until_empty and not rows and not self._changing:
                    return
                self._stops.wait(0.2)
        finally:
            self._stop_all()

    def stop(self) -> None:
        """Let `run` end; may be called in a signal handler."""
        self._stops.set()

    def look(self) -> list[JobRow]:
        """Book what has happened since the last look; return the jobs that have not ended."""
        passed, self._seen_s = self._clock() - self._seen_s, self._clock()
        rows = [row for row in self._table.jobs() if row.state not in ENDED]
        for row in rows:
            if row.name in self._changing:
                self._end_change(row)
            elif row.state == "running":
                row.service_s += passed * len(row.nodes)
                row.ran_s += passed
                if (status := self._actuator.status(row.name)) is not None:
                    self._ended(row, status)
                self._table.write(row)
            else:
                row.waited_s += passed
                self._table.write(row)
        return [row for row in rows if row.state not in ENDED]

    def decide(self, rows: list[JobRow]) -> None:
        """Ask the policy, and begin what it answers."""
        for row in rows:
            if row.is_cancelled and row.name not in self._changing:
                self._change(row, ())
        free = [row for row in rows if not row.is_cancelled]
        current = {row.name: row.nodes for row in rows if row.nodes}
        views, nodes = [self._view(row) for row in rows if row in free or row.nodes], self._actuator.nodes()
        self._nodes, self._nodes_s = nodes, self._clock()
        room = sum(node.gpus for node in nodes)
        given = self._policy(views, nodes, current, self._clock())
        for row in free:
            if not row.nodes and row.spec.min_replicas > room:
                row.note = f"needs {row.spec.min_replicas} replicas; there is room for {room}"
                self._table.write(row)
        # Those that give replicas up first: the others' may be on their slots.
        for row in sorted(free, key=lambda each: len(given.get(each.name, ())) - len(each.nodes)):
            wanted = given.get(row.name, ())
            if wanted != row.nodes and row.name not in self._changing:
                self._change(row, wanted)

    def _nodes_have_changed(self) -> bool:
        """Look every few seconds whether nodes have come, gone, or are about to go."""
        if self._clock() < self._nodes_s + _NODES_S:
            return False
        self._nodes_s = self._clock()
        return self._actuator.nodes() != self._nodes

    def _view(self, row: JobRow) -> JobView:
        profile, spec = row.profile(), row.spec
        shown = profile.most_replicas if profile else 0
        return JobView(
            name=row.name,
            submitted_s=row.submitted_s,
            profiles={} if profile is None else {"gpu": profile},
            min_replicas=spec.min_replicas,
            max_replicas=max(spec.min_replicas, min(spec.max_replicas, EXPLORED * shown or 1)),
            is_preemptible=spec.is_preemptible and row.name not in self._changing and not row.is_cancelled,
            service_s=row.service_s,
            restarts=row.changes,
            weight=spec.weight,
            deadline_s=None if spec.deadline_s is None else row.submitted_s + spec.deadline_s,
        )

    def _change(self, row: JobRow, nodes: tuple[str, ...]) -> None:
        """Write down what a job is to have, and begin to give it."""
        waits_for = [future for name, (future, _) in self._changing.items() if name != row.name] if nodes else []
        row.changes += bool(row.nodes)
        if row.spec.in_place and row.nodes and nodes:
            self._going_on.add(row.name)
        row.nodes, row.state = nodes, "running" if nodes or row.nodes else row.state
        row.note = f"changing to {len(nodes)} replica{'s' if len(nodes) != 1 else ''}"
        try:
            self._table.write(row)
        except TableUnwritable:
            if nodes:  # nothing is started that is not written down; one that stops starts again from its checkpoint
                raise
        self._say(f"{row.name}: {row.note}")
        self._changing[row.name] = self._pool.submit(self._act, row, nodes, waits_for), self._clock()

    def _act(self, row: JobRow, nodes: tuple[str, ...], waits_for: list[Future[None]]) -> None:
        for other in waits_for:  # they may be giving up the slots
            other.exception()
        self._actuator.change(row, nodes)

    def _end_change(self, row: JobRow) -> None:
        future, since = self._changing[row.name]
        if not future.done():
            return
        if row.name in self._going_on:
            row.ran_s += self._clock() - since
        else:
            row.changing_s += self._clock() - since
        error = future.exception()
        if isinstance(error, ClusterUnreachable) or getattr(error, "errno", None) in _FULL:
            row.state, row.nodes, row.note = "waiting", (), str(error)
        elif error is not None:
            self._end(row, "failed", None, f"it could not be changed: {type(error).__name__}: {error}")
        elif (status := self._actuator.status(row.name)) is not None:
            self._ended(row, status)
        elif row.is_cancelled and not row.nodes:
            self._end(row, "cancelled", None)
        else:
            row.state, row.note = "running" if row.nodes else "waiting", ""
        self._table.write(row)
        del self._changing[row.name]  # now: what can't be written is looked at again
        self._going_on.discard(row.name)

    def _ended(self, row: JobRow, status: Status) -> None:
        if status == "lost":
            row.state, row.nodes, row.note = "waiting", (), "it was lost; it goes on from its last checkpoint"
            self._say(f"{row.name}: {row.note}")
        else:
            self._end(row, "failed" if status else "done", status)

    def _end(self, row: JobRow, state: str, status: int | None, note: str = "") -> None:
        row.state, row.exit_status, row.ended_s, row.nodes, row.note = state, status, self._clock(), (), note
        self._say(f"{row.name}: {state}{f', exit status {status}' if status else ''}{f', {note}' if note else ''}")

    def _stop_all(self) -> None:
        rows = [row for row in self._table.jobs() if row.state not in ENDED]
        self._end_changes(rows)
        for row in rows:
            if row.nodes:
                self._change(row, ())
        self._end_changes(rows)
        self._pool.shutdown()

    def _end_changes(self, rows: list[JobRow]) -> None:
        """Wait for the changes under way; one that can't be written is found by the next scheduler."""
        for row in rows:
            if row.name in self._changing:
                self._changing[row.name][0].exception()
                with contextlib.suppress(TableUnwritable):
                    self._end_change(row)
