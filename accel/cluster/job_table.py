"""The jobs of a cluster in one SQLite file: the truth that survives a scheduler, a head and a power cut.

Every change is one transaction, written before the scheduler acts on it. States:

    waiting ──▶ running ──▶ done            ended by itself, exit status 0
       ▲           │   ├──▶ failed          ended by itself, another status
       └───────────┘   └──▶ cancelled       at the user's wish, from waiting too
      (its replicas are wanted elsewhere)
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from accel.elastic.batch_size.report import PROFILE
from accel.errors import InvalidArgument
from accel.goodput.job import JobProfile, LostTime

FILE = "jobs.sqlite"
_LOCK = "scheduler.lock"
SCHEMA = 2
ENDED = ("done", "failed", "cancelled")

_TABLE = """
CREATE TABLE IF NOT EXISTS jobs (
    name TEXT PRIMARY KEY,
    spec TEXT NOT NULL,
    submitted_s REAL NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('waiting', 'running', 'done', 'failed', 'cancelled')),
    is_cancelled INTEGER NOT NULL DEFAULT 0,
    nodes TEXT NOT NULL DEFAULT '[]',
    changes INTEGER NOT NULL DEFAULT 0,
    service_s REAL NOT NULL DEFAULT 0,
    ran_s REAL NOT NULL DEFAULT 0,
    waited_s REAL NOT NULL DEFAULT 0,
    changing_s REAL NOT NULL DEFAULT 0,
    ended_s REAL,
    exit_status INTEGER,
    note TEXT NOT NULL DEFAULT ''
)
"""


class TableUnwritable(InvalidArgument):
    """A job table can't be read or written now, since the disk is full, say; nothing was changed."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What is asked for a job.

    Args:
        arguments: of Python from the script on, such as `("train.py", "--epochs=30")`.
        folder: absolute; the script runs there.
        checkpoint: folder that the script passes as `accel.Elastic(checkpoint=)`, absolute.
        min_replicas: fewest replicas that it can run on.
        max_replicas: most.
        weight: how much its speed counts beside the others'.
        deadline_s: seconds after its submission at which it is wanted; None for no deadline.
        is_preemptible: whether its replicas may be moved or taken once it runs.
        in_place: whether its processes may go on when their number changes, see `LocalJob`.

    Raises:
        InvalidArgument: if a value is out of its range.
    """

    arguments: tuple[str, ...]
    folder: str
    checkpoint: str
    min_replicas: int = 1
    max_replicas: int = 1
    weight: float = 1.0
    deadline_s: float | None = None
    is_preemptible: bool = True
    in_place: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise InvalidArgument(
                f"replicas must have 1 ≤ min ≤ max. Found: {self.min_replicas} and {self.max_replicas}"
            )
        if not 0 < self.weight < math.inf:
            raise InvalidArgument(f"weight must be positive and finite. Found: {self.weight}")
        if self.deadline_s is not None and not 0 < self.deadline_s < math.inf:
            raise InvalidArgument(f"deadline_s must be positive and finite. Found: {self.deadline_s}")


@dataclass
class JobRow:
    """A job with what became of it."""

    name: str
    spec: JobSpec
    submitted_s: float
    state: str = "waiting"
    is_cancelled: bool = False
    """Whether its end is wanted."""
    nodes: tuple[str, ...] = ()
    """Where its replicas are, or are about to be."""
    changes: int = 0
    """Of its replicas, after the first start."""
    service_s: float = 0.0
    """GPU-seconds had."""
    ran_s: float = 0.0
    """Seconds with replicas."""
    waited_s: float = 0.0
    """Seconds without replicas."""
    changing_s: float = 0.0
    """Seconds that starts and changes of its replicas took."""
    ended_s: float | None = None
    exit_status: int | None = None
    note: str = ""
    """Why it is as it is, one sentence."""

    def profile(self) -> JobProfile | None:
        """Return what the job has measured of itself; None if that can't be read."""
        path = Path(self.spec.checkpoint) / PROFILE
        try:
            return JobProfile.load(path) if path.exists() else None
        except InvalidArgument:
            return None

    def booked(self) -> dict[str, float]:
        """Return the seconds of its life by what it did in them: what it has measured itself, and what the table has.

        The life ends with the last look of a scheduler; time without one is nobody's.
        """
        profile = self.profile()
        lost = vars(LostTime() if profile is None else profile.lost)
        parts = {**lost, "restart": lost["restart"] + self.changing_s, "waiting": self.waited_s}
        return {"training": max(self.ran_s - sum(lost.values()), 0.0), **parts}

    def progress(self) -> float | None:
        """Return the part of the training that is done; None where the script declares no length."""
        if self.state == "done":
            return 1.0
        profile = self.profile()
        return None if profile is None or profile.total is None else min(profile.progress / profile.total, 1.0)


class JobTable:
    """Read and change the jobs of a cluster; several processes may at once.

    Args:
        folder: of the cluster; made if it is not there.

    Raises:
        InvalidArgument: if the file is no job table of this version.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"{folder} can't be the folder of a cluster: {error}") from None
        with self._change() as table:
            version = table.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA):
                raise InvalidArgument(f"{self._path} must be a job table of version {SCHEMA}. Found: {version}")
            table.execute(_TABLE)
            table.execute(f"PRAGMA user_version = {SCHEMA}")

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction, which is carried out whole or not at all.

        Raises:
            TableUnwritable: if the file can't be written.
            InvalidArgument: if it is no table.
        """
        try:
            with closing(sqlite3.connect(self._path, timeout=30.0, isolation_level=None)) as table:
                table.execute("PRAGMA journal_mode = WAL")
                table.execute("PRAGMA synchronous = FULL")
                table.execute("BEGIN IMMEDIATE")
                yield table
                table.execute("COMMIT")  # closing without it rolls back
        except sqlite3.IntegrityError:
            raise
        except sqlite3.OperationalError as error:
            raise TableUnwritable(f"{self._path} can't be written as a job table: {error}") from None
        except sqlite3.DatabaseError as error:
            raise InvalidArgument(f"{self._path} can't be used as a job table: {error}") from None

    def submit(self, name: str, spec: JobSpec, now_s: float) -> None:
        """Add a job.

        Args:
            name: of the job, unlike all others'.
            spec: what is asked for.
            now_s: seconds since 1970.

        Raises:
            InvalidArgument: if there is a job of that name.
        """
        try:
            with self._change() as table:
                table.execute(
                    "INSERT INTO jobs (name, spec, submitted_s, state) VALUES (?, ?, ?, 'waiting')",
                    (name, json.dumps(vars(spec)), now_s),
                )
        except sqlite3.IntegrityError:
            raise InvalidArgument(f"a job must have a name of its own. Found: {name!r} is there already") from None

    def jobs(self) -> list[JobRow]:
        """Return all jobs, in the order of their submission."""
        with self._change() as table:
            table.row_factory = sqlite3.Row
            return [_row(each) for each in table.execute("SELECT * FROM jobs ORDER BY submitted_s, name")]

    def job(self, name: str) -> JobRow:
        """Return one job.

        Raises:
            InvalidArgument: if there is none of that name.
        """
        every = {each.name: each for each in self.jobs()}
        if name not in every:
            raise InvalidArgument(f"the job must be one of {sorted(every) or 'none so far'}. Found: {name!r}")
        return every[name]

    def write(self, row: JobRow) -> None:
        """Write what became of a job; whether its end is wanted is left as it is."""
        with self._change() as table:
            table.execute(
                "UPDATE jobs SET state = ?, nodes = ?, changes = ?, service_s = ?, ran_s = ?, waited_s = ?, "
                "changing_s = ?, ended_s = ?, exit_status = ?, note = ? WHERE name = ?",
                (
                    *(row.state, json.dumps(row.nodes), row.changes, row.service_s, row.ran_s, row.waited_s),
                    *(row.changing_s, row.ended_s, row.exit_status, row.note, row.name),
                ),
            )

    def cancel(self, names: Sequence[str]) -> None:
        """Note that jobs are to end; the scheduler ends them.

        Raises:
            InvalidArgument: if one is not there, or has ended.
        """
        for name in names:
            if (state := self.job(name).state) in ENDED:
                raise InvalidArgument(f"a job must not have ended to be cancelled. Found: {name!r} is {state}")
        with self._change() as table:
            table.executemany("UPDATE jobs SET is_cancelled = 1 WHERE name = ?", [(name,) for name in names])


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a cluster's folder while a scheduler runs; the claim ends with the process.

    Raises:
        InvalidArgument: if another scheduler holds it, or its file system has no locks.
    """
    with (folder / _LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidArgument(f"{folder} must have one scheduler. Found: another one runs") from None
        except OSError as error:
            raise InvalidArgument(f"{folder} must be where files can be locked. Found: {error}") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def scheduler_of(folder: Path) -> int | None:
    """Return the process that schedules a cluster on this machine; None if none does."""
    try:
        with (folder / _LOCK).open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                number = file.read()
                return int(number) if number.isdecimal() else None
    except FileNotFoundError:
        pass
    return None


def _row(values: sqlite3.Row) -> JobRow:
    spec = json.loads(values["spec"])
    own = dict(values)
    own |= {"nodes": tuple(json.loads(own["nodes"])), "is_cancelled": bool(own["is_cancelled"])}
    own |= {"spec": JobSpec(**{**spec, "arguments": tuple(spec["arguments"])})}
    return JobRow(**own)
