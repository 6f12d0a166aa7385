"""Ranks started by `srun`, and a limit on a script's time; SLURM is played by its variables."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel.commands.run import REQUEUE, TimeLimit, first_node, seconds_until, torch_variables
from accel.errors import InvalidArgument
from tests.accel.elastic.schedules import check_samples, lines

TASK = {
    **{"SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_ID": "1"},
    **{"SLURM_JOB_ID": "123456", "SLURM_STEP_NODELIST": "gpu[007-009,020]", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"},
}


def test_torch_is_told_what_slurm_knows() -> None:
    assert torch_variables(TASK) == {
        **{"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "gpu007", "MASTER_PORT": str(20_000 + 123_457 % 12_000)},
    }
    assert torch_variables({**TASK, "SLURM_NODEID": "3"})["LOCAL_WORLD_SIZE"] == "1"
    own = {"MASTER_ADDR": "other", "MASTER_PORT": "1"}
    assert torch_variables({**TASK, **own}).items() >= own.items()
    assert not torch_variables({**TASK, "RANK": "0"})  # under torchrun
    assert not torch_variables({name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"})
    for name, value in {"SLURM_NODEID": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x", "SLURM_STEP_ID": "batch"}.items():
        with pytest.raises(InvalidArgument, match=rf"SLURM's variables must be as its manual says. Found: .*{name}"):
            torch_variables({**TASK, name: value})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("a[3,5-7]", "a3"), ("a[01-02]-ib,b", "a01-ib"), ("a-b.c[09]", "a-b.c09")],
)
def test_the_first_node_is_found(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_limits_are_read_or_refused() -> None:
    assert 7200 - 3600 < seconds_until("2h", {}) <= 7200
    assert 50 < seconds_until("slurm", {"SLURM_JOB_END_TIME": str(int(time.time()) + 60)}) <= 60
    for text, variables, message in (
        ("2", {}, "must be a time such as"),
        ("0s", {}, "must be a time to come"),
        ("slurm", {}, "must be in a SLURM job"),
        ("slurm", {"SLURM_JOB_END_TIME": "1"}, "must be a time to come"),
        ("2h", {"TORCHELASTIC_RUN_ID": "a"}, "must be given without torchrun"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            seconds_until(text, variables)
    assert not TimeLimit(1000.0).is_saved


@pytest.mark.slow
def test_tasks_of_srun_save_before_their_limit_and_go_on(tmp_path: Path) -> None:
    """Two tasks, as `srun --ntasks 2 accel run --until slurm` starts them, queued until they are done."""
    (tmp_path / "logs").mkdir()
    statuses = []
    for run in range(8):
        end = {"SLURM_JOB_END_TIME": str(int(time.time()) + 60)}
        step = {"SLURM_STEP_ID": str(run), "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost"}
        tasks = []
        for rank in "01":
            place = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0", "SLURM_NTASKS": "2"}
            own = {
                **os.environ,
                **end,
                **step,
                **place,
                "GLOO_SOCKET_IFNAME": "lo",
                "PACE_S": "1",
            }
            own.pop("SLURM_STEP_TASKS_PER_NODE", None)
            command = [sys.executable, "-m", "accel", "run", "--until", "slurm", "--no-cache"]
            module = ["-m", "tests.accel.elastic.torchrun_job", str(tmp_path)]
            tasks.append(subprocess.Popen([*command, *module], env=own))
        statuses.append([task.wait(150) for task in tasks])
        if statuses[-1] == [0, 0]:
            break
        if run == 1:
            (tmp_path / "hurry").touch()
    assert statuses[:2] == [[REQUEUE] * 2] * 2
    assert statuses[-1] == [0, 0]
    names = sorted(os.listdir(tmp_path / "logs"))
    begins = sorted({name.partition("-")[0] for name in names}, key=int)
    check_samples(
        [[lines(tmp_path / "logs" / name) for name in names if name.startswith(f"{each}-")] for each in begins]
    )
