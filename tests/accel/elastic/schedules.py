"""Random sequences of runs of one training, and what must hold of what they took, worked out from their own logs.

Of a run that began at step s, the steps from s on of the runs before are undone. A checkpoint of step n says that the
steps 0 to n - 1 are done; what was taken after that by a run that was killed comes again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import signal
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from accel.elastic.checkpoint import Checkpoints
from tests.accel.elastic.scheduled_job import EPOCHS, MOMENTS, SAMPLES, End, Run, forked
from tests.forks import ForkServer

TIMEOUT_S = 120.0
_IN_A_SAVE = (*range(0, 120, 12), *range(124, 140))
"""Operations on the disk: a save of this job has 137, most of them writes; the last ten name it and remove others."""


@dataclass(frozen=True)
class Schedule:
    """Runs in a row, the last of which nobody stops."""

    runs: tuple[Run, ...]

    @classmethod
    def drawn(cls, seed: int) -> Schedule:
        """Return a random one; a third of them keep the number of ranks and the batch, in another the batch grows."""
        draw = random.Random(seed)
        number, constant, grows = draw.randint(3, 6), seed % 3 == 0, seed % 3 == 1
        world = draw.randint(1, 3)
        runs = []
        for _ in range(number):
            world = world if constant else draw.randint(1, 3)
            batch = 4 if constant else draw.choice((1, 2, 3, 4, 8))
            runs.append(Run(world, batch, draw.choice((24, 48)) if grows else None, _ends(draw, world)))
        return cls((*runs, replace(runs[-1], ends=())))

    @property
    def is_constant(self) -> bool:
        """The same number of ranks and the same batch in each run."""
        return len({(run.world, run.batch, run.most) for run in self.runs}) == 1 and self.runs[0].most is None


def _ends(draw: random.Random, world: int) -> tuple[tuple[int, End], ...]:
    step = draw.choice((0, 1, 2, *range(3, 30)))
    if draw.random() < 0.5:  # one rank dies
        rank = draw.randrange(world)
        moment = draw.choice(_IN_A_SAVE) if rank == 0 and draw.random() < 0.4 else draw.choice(MOMENTS)
        return ((rank, End(step, moment)),)
    told = range(world) if draw.random() < 0.5 else [draw.randrange(world)]  # all, as by an agent, or one
    return tuple((rank, End(step + draw.randint(0, 2), _notice(draw, rank), signal.SIGTERM)) for rank in told)


def _notice(draw: random.Random, rank: int) -> str | int:
    return draw.choice(_IN_A_SAVE) if rank == 0 and draw.random() < 0.3 else draw.choice(MOMENTS)


@functools.cache
def _server() -> ForkServer:
    return ForkServer("ranks", ("tests.comm.rank_server",))


class Training:
    """A training in the runs of a schedule, and the log of it.

    Args:
        folder: for checkpoints and logs.
        fault: one of `scheduled_job.FAULTS`, put in on purpose.
    """

    def __init__(self, folder: Path, fault: str = "") -> None:
        self.checkpoints, self._logs, self._fault = folder / "checkpoints", folder / "logs", fault
        self._logs.mkdir(parents=True)
        self.runs: list[list[list[dict[str, Any]]]] = []
        """By run and rank, the lines of the log."""

    def follow(self, schedule: Schedule) -> str:
        """Run the schedule until the training has ended; return what its end is known by."""
        for run in schedule.runs:
            statuses = self._run(run)
            if set(statuses) == {0}:
                break
            assert run.ends, f"nobody stopped {run}, which ended with {statuses}:\n{self._errors()}"
        ends = {line["ended"] for rank in self.runs[-1] for line in rank if "ended" in line}
        assert len(ends) == 1, "ranks ended with different weights"
        return str(ends.pop())

    def _run(self, run: Run) -> list[int]:
        before = saved_steps(self.checkpoints)
        statuses = self._statuses(run)
        logs = [lines(self._log(len(self.runs), rank)) for rank in range(run.world)]
        self.runs.append(logs)
        begins = {line["begins"] for rank in logs for line in rank if "begins" in line}
        assert begins <= {before}, f"ranks began at steps {begins} of a training that was saved at {before}"
        if all(end.signal == signal.SIGTERM for _, end in run.ends):
            self._check_notice(run, statuses, before)
        return statuses

    def _check_notice(self, run: Run, statuses: list[int], before: int) -> None:
        """Check that ranks which were sent SIGTERM in good time stopped together, and lost no step."""
        if any(end.step < 2 for _, end in run.ends):
            return  # the signal is noted once a step has ended; before, it ends the process at once
        assert set(statuses) <= {0} or set(statuses) == {-signal.SIGTERM}, f"{statuses}:\n{self._errors()}"
        if run.ends and statuses[0]:
            taken = max(line["step"] + 1 for rank in self.runs[-1] for line in rank if "step" in line)
            assert saved_steps(self.checkpoints) == taken, f"{taken} steps were taken on from step {before}"

    def _log(self, number: int, rank: int) -> Path:
        return self._logs / f"{number}-{rank}"

    def _errors(self) -> str:
        return "\n".join(line["error"] for rank in self.runs[-1] for line in rank if "error" in line)

    def _statuses(self, run: Run) -> list[int]:
        """Do what an agent does: once a rank has died, the others are sent SIGTERM."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {"run": run, "port": store.port, "folder": self.checkpoints, "fault": self._fault}
        number = len(self.runs)
        ranks = [_server().fork(forked, rank=rank, log=self._log(number, rank), **common) for rank in range(run.world)]
        deadline = time.monotonic() + TIMEOUT_S
        statuses: dict[int, int] = {}
        killed = [rank for rank, end in run.ends if end.signal == signal.SIGKILL]
        for rank in sorted(range(run.world), key=lambda rank: rank not in killed):
            in_time, statuses[rank] = _server().wait(ranks[rank], deadline - time.monotonic())
            assert in_time, f"rank {rank} still ran after {TIMEOUT_S} s: {run}"
            if statuses[rank] == -signal.SIGKILL:
                for other in set(range(run.world)) - statuses.keys():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(ranks[other], signal.SIGTERM)
        return [statuses[rank] for rank in range(run.world)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint, by its name; 0 without one."""
    names = [re.fullmatch(r"(\d+)-step-(\d+)", path.name) for path in folder.glob("*")]
    return max(((int(name[1]), int(name[2])) for name in names if name), default=(0, 0))[1]


def saved_steps(folder: Path) -> int:
    """Return the job's own steps in the newest whole checkpoint, several of one update counted each; 0 without one."""
    state = Checkpoints(folder).load_latest()
    return 0 if state is None else state["parts"][repr("count")]["steps"]


def surviving(runs: list[list[list[dict[str, Any]]]]) -> dict[int, list[dict[str, Any]]]:
    """Return, by step, what the ranks took in those steps that were not undone."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for ranks in runs:
        begins = [line["begins"] for lines in ranks for line in lines if "begins" in line]
        if not begins:
            continue  # killed before it went on from anywhere
        steps = {step: taken for step, taken in steps.items() if step < begins[0]}
        of_run: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for line in (line for lines in ranks for line in lines if "samples" in line):
            of_run[line["step"]].append(line)
        steps |= of_run
    return steps


def check_samples(runs: list[list[list[dict[str, Any]]]]) -> None:
    """Check that each epoch has each sample once, in the steps that were not undone."""
    steps = surviving(runs)
    assert sorted(steps) == list(range(len(steps))), "a step is missing"
    seen: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(EPOCHS)}
    for step in sorted(steps):
        ranks = steps[step]
        assert len({line["epoch"] for line in ranks}) == 1 and len(ranks) == ranks[0]["world"], f"step {step}: {ranks}"
        taken = seen[ranks[0]["epoch"]]
        left = SAMPLES - taken.total()
        repeats = sum(len(line["samples"]) - line["fresh"] for line in ranks)
        # With fewer samples left than ranks, each rank that has none takes one that was there before.
        expected = ranks[0]["world"] - left if 0 < left < ranks[0]["world"] else 0
        assert repeats == expected, f"step {step} of {left} samples left: {ranks}"
        taken.update(sample for line in ranks for sample in line["samples"][: line["fresh"]])
    for epoch, taken in seen.items():
        wrong = {sample: taken[sample] for sample in range(SAMPLES) if taken[sample] != 1}
        assert not wrong, f"epoch {epoch} has samples more or less often than once: {wrong}"
