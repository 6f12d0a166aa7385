"""SIGTERM to all of a group ends no worker of a loader before the step under way is saved; the loop's own does."""

from __future__ import annotations

import functools
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from accel.dataio.elastic_sampler import ElasticSampler
from accel.elastic.batch_size.loader import elastic_loader
from accel.elastic.worker_signals import outliving
from tests.accel.elastic import worker_loop
from tests.accel.elastic.schedules import newest_step
from tests.accel.elastic.test_local_job import wait_for
from tests.forks import ForkServer


@functools.cache
def _server() -> ForkServer:
    return ForkServer("ranks", ("tests.comm.rank_server",))


def is_running(process: int | None) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_signal_to_the_group_is_answered_by_a_checkpoint_and_the_workers_end_with_the_loop(tmp_path: Path) -> None:
    """The loader's workers died of it, and torch raised that in the loop, in the midst of the step."""
    loop = _server().fork(worker_loop.train, folder=tmp_path)
    wait_for((tmp_path / "workers").exists)
    workers = [int(each) for each in (tmp_path / "workers").read_text().split()]
    os.killpg(loop, signal.SIGTERM)
    in_time, status = _server().wait(loop, 60)
    assert in_time
    assert not (tmp_path / "error").exists(), (tmp_path / "error").read_text()
    assert status == -signal.SIGTERM
    assert newest_step(tmp_path / "saved") == worker_loop.STEP + 1
    assert len(workers) == 2
    wait_for(lambda: not any(map(is_running, workers)))


def test_a_worker_that_is_a_thread_of_the_loop_leaves_the_loop_its_group() -> None:
    called: list[int] = []
    before = os.getpgid(0)
    outliving(called.append)(3)
    assert called == [3]
    assert os.getpgid(0) == before


class Grouped:
    """Tells of each sample whether its process has a group of its own, and what the user's function left there."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[bool, int]:
        info = get_worker_info()
        own = os.getpgid(0) == os.getpid()
        return own, getattr(info.dataset if info is not None else self, "left", -1)


def leave(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.left = number  # type: ignore[attr-defined]


@pytest.mark.parametrize("own", [False, True], ids=["a plain loader", "a loader with an ElasticSampler"])
def test_the_elastic_loaders_workers_do_so_and_call_the_users_function(own: bool) -> None:
    dataset: Any = Grouped()
    how: dict[str, Any] = {"batch_sampler": ElasticSampler(6, batch_size=3)} if own else {"batch_size": 3}
    plain: DataLoader[Any] = DataLoader(dataset, num_workers=1, worker_init_fn=leave, **how)
    loader = elastic_loader(plain)
    assert [torch.stack(list(batch)).tolist() for batch in loader] == [[[1, 1, 1], [0, 0, 0]]] * 2
    assert plain.worker_init_fn is leave
    assert elastic_loader(loader) is loader


def test_it_can_be_sent_to_workers_that_are_not_forked() -> None:
    assert pickle.loads(pickle.dumps(outliving(leave))).init is leave


def test_without_workers_the_function_is_the_users() -> None:
    assert elastic_loader(DataLoader(range(3))).worker_init_fn is None  # type: ignore[arg-type]
