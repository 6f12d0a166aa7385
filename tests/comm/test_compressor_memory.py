"""What a compressor remembers: committed on finite steps, moved with its parameters, kept in sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.comm.compressor_memory import LossScale, Memory, reshard
from accel.comm.layout import Layout, between, equal_cuts

SHAPES = {"a": torch.Size([3]), "b": torch.Size([2, 2]), "c": torch.Size([5])}


def layout(index: int, *names: str) -> Layout:
    return Layout(index, names, tuple(SHAPES[name] for name in names), torch.float32, False)


def ready(memory: Memory, one: Layout) -> Any:
    slot = memory.slot(one)
    if not slot.filled:
        slot.fill("residual", memory.take(one, "residual", torch.zeros(0)))
        slot.filled = True
    return slot


def step(memory: Memory, one: Layout, values: torch.Tensor, finite: bool = True) -> None:
    ready(memory, one).write("residual").copy_(values)
    memory.note(torch.tensor([finite]))
    memory.settle()


def by_name(memory: Memory) -> dict[str, list[float]]:
    return {name: pieces[0][1].tolist() for name, pieces in memory.state_dict()["own"]["residual"].items()}


def test_a_void_step_leaves_it_alone_and_the_next_one_goes_on() -> None:
    memory, one = Memory(), layout(0, "a", "b")
    step(memory, one, torch.arange(7.0))
    step(memory, one, torch.full((7,), float("nan")), finite=False)
    assert by_name(memory) == {"a": [0, 1, 2], "b": [3, 4, 5, 6]}
    step(memory, one, 2 * torch.arange(7.0))
    assert by_name(memory) == {"a": [0, 2, 4], "b": [6, 8, 10, 12]}


def test_one_void_bucket_voids_the_step_for_all() -> None:
    memory = Memory()
    first, second = layout(0, "a"), layout(1, "b")
    for one in (first, second):
        ready(memory, one).write("residual").fill_(1.0)
    memory.note(torch.tensor([True]))
    memory.note(torch.tensor([False]))
    memory.settle()
    assert by_name(memory) == {"a": [0, 0, 0], "b": [0, 0, 0, 0]}


def test_new_buckets_take_over_what_old_ones_held() -> None:
    memory = Memory()
    step(memory, layout(0, "a", "b", "c"), torch.arange(12.0))
    one, two = ready(memory, layout(0, "c")), ready(memory, layout(1, "b", "a"))
    assert one.read("residual").tolist() == [7, 8, 9, 10, 11]
    assert two.read("residual").tolist() == [3, 4, 5, 6, 0, 1, 2]


def test_shared_fields_hold_after_a_finite_step_only() -> None:
    memory, one = Memory(), layout(0, "a")
    slot = ready(memory, one)
    assert slot.read_shared("warm", "a") is None
    slot.write_shared("warm", "a", torch.ones(2))
    memory.note(torch.tensor([False]))
    memory.settle()
    assert slot.read_shared("warm", "a") is None
    slot.write_shared("warm", "a", torch.ones(2))
    memory.note(torch.tensor([True]))
    memory.settle()
    other = Memory()
    other.load_state_dict(memory.state_dict())
    assert ready(other, one).read_shared("warm", "a").tolist() == [1, 1]


@given(st.integers(1, 6), st.integers(1, 6))
def test_resharding_keeps_the_sum(old: int, new: int) -> None:
    states = []
    for rank in range(old):
        memory = Memory()
        step(memory, layout(0, "b", "a"), torch.arange(7.0) + 10 * rank)
        states.append(memory.state_dict())
    found = reshard(states, new)
    assert len(found) == new
    total = torch.zeros(7)
    for state in found:
        memory = Memory()
        memory.load_state_dict(state)
        total += ready(memory, layout(0, "b", "a")).read("residual")
    assert total.tolist() == [sum(i + 10 * rank for rank in range(old)) for i in range(7)]


def saved(ranks: int) -> list[dict[str, Any]]:
    """Return states of ranks with different residuals and the same warm starts."""
    states = []
    for rank in range(ranks):
        memory, one = Memory(), layout(0, "b", "a")
        ready(memory, one).write_shared("warm", "a", torch.ones(2))
        step(memory, one, torch.arange(7.0) + 10 * rank)
        states.append({**memory.state_dict(), "step": 5})
    return states


@given(st.integers(1, 9), st.integers(1, 9))
def test_a_rank_alone_gets_what_it_would_among_all_and_reads_no_more(old: int, new: int) -> None:
    states = saved(old)
    everyone = reshard(states, new)
    for rank in range(new):
        read: list[int] = []

        def load(number: int, read: list[int] = read) -> dict[str, Any]:
            read.append(number)
            return states[number]

        for mine in (reshard(load, new, rank=rank, saved=old), reshard(states, new, rank=rank)):
            assert mine.keys() == everyone[rank].keys()
            assert mine["step"] == 5
            assert mine["shared"]["warm"]["a"].tolist() == [1, 1]
            whole, alone = Memory(), Memory()
            whole.load_state_dict(everyone[rank])
            alone.load_state_dict(mine)
            assert by_name(whole) == by_name(alone) if rank < old else not mine["own"]
        assert read == (list(range(rank, old, new)) or [rank % old])


def test_resharding_refuses_what_it_can_not_do() -> None:
    states = saved(2)
    for match, given_states, options in (
        ("needs rank= and saved=", states.__getitem__, {}),
        ("needs rank= and saved=", states.__getitem__, {"rank": 0}),
        ("rank must be from 0 to 2, got 3", states, {"rank": 3}),
        ("rank must be from 0 to 2, got -1", states, {"rank": -1}),
        ("at least one state and one rank, got 0 and 3", states.__getitem__, {"rank": 0, "saved": 0}),
    ):
        with pytest.raises(ValueError, match=match):
            reshard(given_states, 3, **options)  # type: ignore[call-overload]


def test_what_was_saved_with_a_scale_loses_it_where_there_is_none() -> None:
    memory, scale = Memory(), LossScale(None)
    step(memory, layout(0, "a"), torch.tensor([1.0, 2.0, 4.0]))
    scale.value = 4.0  # as a loaded state says
    for _ in range(2):
        scale.follow(memory)
        assert by_name(memory) == {"a": [0.25, 0.5, 1.0]}
    assert scale.value == 1.0


def test_what_waits_for_its_scaler_is_left_alone() -> None:
    memory, scale = Memory(), LossScale(None)
    step(memory, layout(0, "a"), torch.tensor([1.0, 2.0, 4.0]))
    scale.awaited, scale.value = True, 4.0
    scale.follow(memory)
    assert by_name(memory) == {"a": [1.0, 2.0, 4.0]}


def test_bad_states_are_refused() -> None:
    memory = Memory()
    with pytest.raises(ValueError, match="version must be 1, got None"):
        memory.load_state_dict({})
    with pytest.raises(ValueError, match="at least one state and one rank, got 0 and 2"):
        reshard([], 2)
    step(memory, layout(0, "a"), torch.zeros(3))
    other = Memory()
    other.load_state_dict(memory.state_dict())
    smaller = Layout(0, ("a",), (torch.Size([2]),), torch.float32, False)
    with pytest.raises(ValueError, match="must be of its 2 elements, got 3; load a state of the same model"):
        other.take(smaller, "residual", torch.zeros(0))


@given(st.integers(0, 500), st.integers(1, 9), st.integers(1, 70))
def test_cuts_cover_everything_at_multiples_of_the_unit(total: int, parts: int, unit: int) -> None:
    cuts = equal_cuts(total, parts, unit)
    assert len(cuts) == parts + 1
    assert cuts == sorted(cuts)
    assert (cuts[0], cuts[-1]) == (0, total)
    assert all(cut % unit == 0 for cut in cuts[:-1] if cut < total)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_cuts_between_parameters_are_at_their_borders(parts: int) -> None:
    one = layout(0, "a", "b", "c")
    cuts = between(one, parts)
    assert len(cuts) == parts + 1
    assert (cuts[0], cuts[-1]) == (0, one.numel)
    assert set(cuts) <= set(one.offsets)
    assert cuts == sorted(cuts)
