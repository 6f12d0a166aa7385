"""Real torchrun, whose nodes join, are lost and leave: each sample of an epoch comes once."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.elastic.saving.torchrun_nodes import VARIABLE, remedy
from tests import warm
from tests.accel.elastic.torchrun_cluster import TIMEOUT_S, check_that_nodes_come_and_go, on_one_host


@pytest.mark.slow
def test_a_node_joins_and_one_is_lost_and_one_leaves(tmp_path: Path) -> None:
    with on_one_host(tmp_path) as nodes:
        check_that_nodes_come_and_go(nodes)


@pytest.mark.slow
def test_torch_s_own_way_ends_the_job_when_a_node_joins_and_it_is_said_before(tmp_path: Path) -> None:
    """Should this fail, torch has mended it: the advice and the variable can go then."""
    with on_one_host(tmp_path, shares=True) as nodes:
        first = nodes.join()
        nodes.wait_for_steps(1, 6)
        nodes.join()
        ended = first.wait(TIMEOUT_S)
    assert ended.returncode != 0
    assert len(nodes.runs()) == 1, "the workers met again"
    assert "a node that joins this job later would end it" in ended.stderr
    assert f"by a fault of torch; set {VARIABLE}=1" in ended.stderr


MISSED = """
import os, signal, time
from datetime import timedelta
import torch.distributed as dist

rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
time.sleep(2.0 if start and rank == 0 else 0.0)  # the other one is faster after the first start
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
dist.barrier()
if start == 0:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # until torchrun ends it, and starts both again
print("met again", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("shares", [False, True])
def test_torch_s_own_way_lets_workers_that_are_started_again_miss_each_other(shares: bool, tmp_path: Path) -> None:
    """Should it be shown no more with a store that is shared, torch has mended it: the advice can go then."""
    (tmp_path / "job.py").write_text(MISSED)
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "job.py"]
    variables = {VARIABLE: "0" if shares else "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = warm.run(arguments, cwd=tmp_path, environment=variables, timeout_s=TIMEOUT_S)
    assert (ended.returncode != 0) == shares, ended.stderr
    assert ended.stdout.count("met again") == (0 if shares else 2)


SHARED = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"}


@pytest.mark.parametrize(
    ("environment", "advised"),
    [
        ({**SHARED, "PET_NNODES": "1:2"}, True),
        ({**SHARED, "PET_NNODES": "2:2"}, False),
        ({**SHARED, "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
        (SHARED, False),
        ({**SHARED, "PET_NNODES": "1:2", "TORCHELASTIC_USE_AGENT_STORE": "False"}, False),
        ({}, False),
    ],
)
def test_the_advice_is_given_where_nodes_may_join(environment: dict[str, str], advised: bool) -> None:
    assert bool(remedy(environment)) == advised
