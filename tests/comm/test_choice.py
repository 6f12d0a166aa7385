"""The choice on played numbers: what is allowed, and what wins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel.comm.catalogue import CATALOGUE, LEVELS, Scheme, allowed, catalogue_settings, register_compressor
from accel.comm.dgc import DGC
from accel.comm.half import Half
from accel.comm.selection.choice import Choice

EXACT, HALF, INT8, ONE_BIT = Scheme("exact", True), Scheme("half"), Scheme("int8"), Scheme("1-bit")


@pytest.fixture
def catalogue_put_back() -> Iterator[None]:
    before = dict(CATALOGUE)
    yield
    CATALOGUE.clear()
    CATALOGUE.update(before)


# What is allowed


def test_each_level_permits_what_the_one_before_does_and_more() -> None:
    found = [set(allowed(level, by_hosts=True)) for level in LEVELS]
    assert found[0] == set() or all(CATALOGUE[way.compressor].level == "exact" for way in found[0])
    assert found[1] == {EXACT}
    assert found[2] == {EXACT, HALF, Scheme("half", True)}
    assert found[0] < found[1] < found[2] < found[3]


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_lossy_unless_it_was_asked_for(level: str) -> None:
    for by_hosts in (False, True):
        for way in allowed(level, by_hosts=by_hosts):
            assert LEVELS.index(CATALOGUE[way.compressor].level) <= LEVELS.index(level)
            assert by_hosts or not way.hierarchical
    assert {CATALOGUE[name].level for name in ("int8", "1-bit", "powersgd 4")} == {"lossy"}


def test_lossy_ways_have_error_feedback_and_16_bits_have_none() -> None:
    for name, entry in CATALOGUE.items():
        assert catalogue_settings(Scheme(name)).error_feedback == (entry.level == "lossy"), name


def test_a_wrong_level_is_named() -> None:
    with pytest.raises(ValueError, match="allow must be one of 'exact', 'reordered', 'reduced', 'lossy', got 'any'"):
        allowed("any", by_hosts=False)


def test_own_compressors_join(catalogue_put_back: None) -> None:
    register_compressor("fp16", lambda: Half(), "reduced")
    assert Scheme("fp16") in allowed("reduced", by_hosts=False)
    assert Scheme("fp16") not in allowed("reordered", by_hosts=True)
    with pytest.raises(ValueError, match="name must be new, got 'fp16'"):
        register_compressor("fp16", Half, "reduced")
    with pytest.raises(ValueError, match="level must be 'reduced' or 'lossy', got 'exact'"):
        register_compressor("other", Half, "exact")
    with pytest.raises(ValueError, match="'whole' must see all buckets of a step"):
        register_compressor("whole", lambda: DGC(0.01, max_grad_norm=1.0), "lossy")


# What wins


def choice(**steps_s: float) -> Choice:
    """Return the choice between steps of so many seconds; "plain" takes one."""
    ways = {"half": HALF, "int8": INT8, "one_bit": ONE_BIT}
    return Choice({None: 1.0, **{ways[name]: step_s for name, step_s in steps_s.items()}})


def test_what_is_faster_than_ddps_own_comes_best_first() -> None:
    assert choice(half=0.9, int8=0.5, one_bit=0.7).candidates == [INT8, ONE_BIT, HALF]
    assert choice(half=1.2, int8=0.99, one_bit=0.7).candidates == [ONE_BIT]


def test_of_two_that_are_about_as_fast_the_nearer_to_exact_comes_first() -> None:
    assert choice(half=0.51, one_bit=0.5).candidates == [HALF, ONE_BIT]
    assert choice(half=0.52, one_bit=0.5).candidates == [ONE_BIT, HALF]


def test_the_best_is_said_although_nothing_helps() -> None:
    assert choice(half=1.3, int8=1.1).best_screened == "the best, int8, took 1100.0 ms"
