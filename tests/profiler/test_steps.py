"""The rule for where a step ends: by requests where a loader feeds the loop, by calls where none does."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.optim import Optimizer

from accel.profiler.loop.steps import FEW, NO_OPTIMIZER_AFTER, UNFED_AFTER, EndingOptimizer, StepRule


def made() -> Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


def test_a_step_is_over_at_a_request_once_the_model_was_updated() -> None:
    rule = StepRule(lambda: True, lambda: False)
    for _ in range(3):
        rule.batches, rule.has_batch = rule.batches + 1, True
        assert not rule.has_ended()  # accumulation: several batches are one step
    rule.update(made())
    assert rule.has_ended() and not rule.wants_calls


def test_without_an_optimizer_each_batch_is_a_step_once_that_is_known() -> None:
    rule = StepRule(lambda: False, lambda: False)
    rule.batches = NO_OPTIMIZER_AFTER - 1
    assert not rule.has_ended()
    rule.batches += 1
    assert rule.has_ended()
    rule.begun, rule.batches = True, 1
    assert rule.has_ended()


def test_a_few_updates_by_one_batch_are_one_step_and_no_call_is_looked_at() -> None:
    rule, optimizer = StepRule(lambda: True, lambda: False), made()
    for _ in range(20):
        rule.has_batch = True
        for _ in range(FEW):
            rule.update(optimizer)
            assert not rule.wants_calls and not rule.call_ends_step()
    assert rule.is_fed


def test_of_several_ranks_none_ends_steps_by_itself() -> None:
    are_several, optimizer = [True], made()
    rule = StepRule(lambda: True, lambda: are_several[0])

    def ends_step() -> bool:
        rule.update(optimizer)
        return rule.call_ends_step()

    assert not any(ends_step() for _ in range(3 * UNFED_AFTER))
    are_several[0] = False
    assert [ends_step() for _ in range(UNFED_AFTER)].index(True) == UNFED_AFTER - 1
    assert rule.has_just_changed and not rule.call_ends_step()
    assert ends_step() and not rule.has_just_changed
    rule.has_batch = True
    rule.update(optimizer)
    assert rule.is_fed and not ends_step()


def test_a_loop_that_makes_its_batches_ends_its_steps_at_calls_on_several_ranks_too() -> None:
    optimizer = made()
    rule = StepRule(lambda: True, lambda: True)
    rule.makes_batches()
    assert not rule.call_ends_step()
    for _ in range(3):
        rule.update(optimizer)
        assert rule.wants_calls and rule.call_ends_step() and not rule.call_ends_step()


def ended(updates: int, *, is_freed: bool, has_ranks: bool) -> list[bool]:
    """Return which updates of a second optimizer have ended a step; the first one has stepped three times before."""
    first, second = made(), made()
    ending = EndingOptimizer()
    assert all(ending.is_of(first, has_ranks=has_ranks) for _ in range(3))
    if is_freed:
        del first
        gc.collect()
    return [ending.is_of(second, has_ranks=has_ranks) for _ in range(updates)]


def test_another_optimizer_ends_the_steps_at_once_when_the_first_is_gone() -> None:
    assert ended(5, is_freed=True, has_ranks=False) == [True] * 5


def test_ranks_end_the_same_steps_whenever_each_frees_it() -> None:
    """One that began earlier would wait for the others, and these, in a reduction of gradients, for it."""
    of_ranks = [ended(55, is_freed=is_freed, has_ranks=True) for is_freed in (True, False)]
    assert of_ranks == [[False] * 50 + [True] * 5] * 2
