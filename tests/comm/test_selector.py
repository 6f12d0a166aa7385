"""The search on real ranks: what is allowed, agreement, falling back when the prediction is wrong, and the verdict."""

from __future__ import annotations

import os
import pickle
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel.comm.catalogue import CATALOGUE, LEVELS, Scheme
from accel.comm.hooks import hook
from accel.comm.selector import AutoComm
from tests.comm.cases import SECONDS, WAIT, backward, gradients, message, module, same_everywhere
from tests.comm.played_search import SLOW_S, play_catalogue, play_time, played_network, slow_plain
from tests.comm.ranks import on_ranks, run_ranks


def automatic(allow: str, **options: Any) -> tuple[DistributedDataParallel, AutoComm]:
    ddp = module(bucket_cap_mb=25)
    state = AutoComm(ddp, allow, **{"verbose": False, "timeout": SECONDS, **options})
    ddp.register_comm_hook(state, hook)
    return ddp, state


def searched(ddp: DistributedDataParallel, state: AutoComm, rank: int) -> list[str]:
    """Train until a search is over, and three steps more; return each step's scheme, the same on all ranks."""
    schemes: list[str] = []
    while not state.settled and len(schemes) < 3000:  # on a busy machine trials are longer
        assert same_everywhere(backward(ddp, gradients(rank, len(schemes))))
        schemes.append(str(state.scheme or "plain"))
    for step in range(3):
        assert same_everywhere(backward(ddp, gradients(rank, step)))
    options = [] if state.choice is None else [str(option) for option in state.choice.options]
    both: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(both, (schemes, options, state.scheme))
    assert all(one == both[0] for one in both)
    return schemes


BETWEEN = ("reordered", "reduced")


def search_all(rank: int, world: int, level: str) -> tuple[list[Scheme], str]:
    """Measure this machine's own network, choose among everything, and train on; return what was considered."""
    ddp, state = automatic(level, watch=2, check=3)
    steps = searched(ddp, state, rank)
    assert state.settled
    options = [] if state.choice is None else state.choice.options
    considered, verdict = [option.scheme for option in options if option.scheme is not None], state.verdict()
    assert level in {"reduced", "lossy"} or len(steps) == 1
    state.close()
    return considered, verdict


@pytest.mark.parametrize(
    "level", [pytest.param(level, marks=[pytest.mark.slow] if level in BETWEEN else []) for level in LEVELS]
)
@on_ranks(2)
def test_the_search_ends_and_considers_nothing_beyond_what_is_allowed(rank: int, world: int, level: str) -> None:
    considered, verdict = search_all(rank, world, level)
    wanted = {"exact": [], "reordered": [], "reduced": ["reduced"], "lossy": ["lossy", "reduced"]}
    # One rank to a host: nothing to be summed there first.
    assert sorted({CATALOGUE[scheme.compressor].level for scheme in considered}) == wanted[level]
    if not wanted[level]:  # nothing is measured
        assert verdict == f"gradients: left as they are, allow={level!r} leaves nothing to choose for these gradients"


@on_ranks(1)
def test_one_rank_has_nothing_to_choose(rank: int, world: int) -> None:
    ddp, state = automatic("lossy")
    assert searched(ddp, state, rank) == ["plain"]
    assert state.verdict() == "gradients: left as they are, there is one rank"
    state.close()


@pytest.mark.slow
@on_ranks(4, per_host=2)
def test_four_ranks_on_two_hosts_agree(rank: int, world: int) -> None:
    considered, _ = search_all(rank, world, "lossy")
    assert any(scheme.hierarchical for scheme in considered)


def played(
    rank: int, world: int, entries: dict[str, tuple[float, str]], allow: str = "reduced", slow: bool = True
) -> tuple[DistributedDataParallel, AutoComm, list[str], dict[str, float]]:
    """Search among compressors that lie by so many seconds, on a network that is played to be slow."""
    play_catalogue(entries)
    if slow:
        slow_plain()
    nbytes = sum(p.nbytes for p in module().parameters())
    ddp, state = automatic(allow, watch=3, check=4, network=played_network(world, SLOW_S / nbytes))
    play_time(state)
    schemes = searched(ddp, state, rank)
    assert state.choice is not None
    return ddp, state, schemes, {str(option): step_s for option, step_s in state.choice.measured.items()}


NOTHING = "gradients: left as they are, nothing helps on this network: a step takes "


@on_ranks(2)
def test_what_is_predicted_best_and_proves_so_is_taken(rank: int, world: int) -> None:
    ddp, state, schemes, measured = played(rank, world, {"quick": (0.0, "reduced")})
    assert str(state.scheme) == "quick"
    assert measured["quick"] < measured["plain"]
    assert state.verdict().startswith("gradients: quick, a step takes ")
    assert "in place of" in state.verdict()
    assert len(ddp._comm_hooks) == 1
    assert schemes[0] == "plain"  # first the steps as they are
    state.close()


@on_ranks(2)
def test_a_wrong_prediction_makes_the_next_best_be_tried(rank: int, world: int) -> None:
    # "fib" says that it sends less work than it does; "true" is what it says.
    entries = {"fib": (0.06, "reduced"), "true": (0.0, "lossy")}
    _, state, schemes, measured = played(rank, world, entries, "lossy")
    assert list(dict.fromkeys(schemes))[:3] == ["plain", "fib", "true"]
    assert str(state.scheme) == "true"
    assert measured["fib"] > measured["plain"] > measured["true"]
    state.close()


@on_ranks(2)
def test_where_nothing_keeps_its_promise_ddps_own_stays_and_the_hook_goes(rank: int, world: int) -> None:
    ddp, state, schemes, _ = played(rank, world, {"fib": (0.06, "reduced"), "lie": (0.08, "reduced")})
    assert state.scheme is None
    assert {"fib", "lie"} <= set(schemes)
    assert state.verdict().startswith(NOTHING)
    assert "fib took" in state.verdict()
    assert "lie took" in state.verdict()
    assert "<- chosen" in next(line for line in state.explain().splitlines() if line.startswith("plain"))
    assert not ddp._comm_hooks
    assert not [one for one in threading.enumerate() if one.name.startswith("accel-comm")]
    state.close()


@on_ranks(2)
def test_where_the_model_sees_no_gain_nothing_is_tried(rank: int, world: int) -> None:
    # The network is played to be slow, and real steps are not: the model is set right by them.
    _, state, _, _ = played(rank, world, {"fib": (0.06, "reduced")}, slow=False)
    assert state.scheme is None
    assert state.verdict().startswith(NOTHING)
    assert "is predicted to take" in state.verdict() or "took" in state.verdict()
    state.close()


@on_ranks(2)
def test_closing_ends_the_search(rank: int, world: int) -> None:
    for steps in (1, 4, 6):
        bare = module(bucket_cap_mb=25)
        ddp, state = automatic("reduced", watch=2, check=30, network=played_network(world, 1e-9))
        for step in range(steps):
            backward(ddp, gradients(rank, step))
            backward(bare, gradients(rank, step))
        searching = not state.settled
        assert searching or steps == 6
        state.close()
        for step in range(steps, steps + 6):  # DDP's own all-reduce
            assert torch.equal(backward(ddp, gradients(rank, step)), backward(bare, gradients(rank, step))), steps
        assert state.settled
        if searching:
            assert state.verdict() == "gradients: left as they are, the search was closed before its end"


@pytest.mark.slow
@on_ranks(2)
def test_a_resumed_run_searches_anew_and_keeps_its_settings(rank: int, world: int) -> None:
    ddp, state = automatic("reduced", watch=2, check=2)
    for step in range(4):
        backward(ddp, gradients(rank, step))
    copy = pickle.loads(pickle.dumps(state))
    state.close()
    other = module(bucket_cap_mb=25)
    copy.bind(other)
    other.register_comm_hook(copy, hook)
    assert (copy.allow, copy.watch, copy.step) == ("reduced", 2, 4)
    searched(other, copy, rank)
    assert copy.settled
    copy.close()


def dies_in_the_search(rank: int, world: int) -> str:
    """Let rank 1 end before all ranks choose."""
    ddp, _ = automatic("reduced", watch=1, check=2, network=played_network(world, 1e-9), timeout=WAIT)
    for step in range(4):
        backward(ddp, gradients(rank, step))
    if rank == 1:
        time.sleep(0.3)
        os._exit(3)
    began = time.monotonic()
    said = message(lambda: backward(ddp, gradients(rank, 4)))
    assert time.monotonic() - began < WAIT.total_seconds()
    return said


def test_a_rank_that_ends_during_the_search_is_an_error_on_the_others() -> None:
    said, code = run_ranks(dies_in_the_search, 2, meet=False)
    assert code == 3
    assert said.startswith("CommError: rank 0 could not agree with the others on how gradients go: ")
