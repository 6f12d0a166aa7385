"""Faults of what guards the numbers: the guard, the batch size, the learning rate, checkpoints."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

from benchmarks.decisions.fault import faults, is_now, property_becomes, result_becomes, returns

_GUARD = ("tests/accel/test_guard.py",)
_DRAWS = ("tests/accel/test_guard_draws.py", "tests/accel/test_guard.py")
_SESSION = ("tests/accel/test_own_faults.py", "tests/accel/test_session.py")
_BATCH = ("tests/accel/elastic/test_policy.py",)
_NOISE = ("tests/accel/goodput/test_noise_meter.py", "tests/accel/goodput/test_noise_scale.py")
_CHECKPOINT = ("tests/accel/elastic/test_checkpoint.py",)
_SAVES = ("tests/accel/elastic/test_save_policy.py",)
_RATES = ("tests/accel/elastic/test_scaling_rules.py",)


def _ten_times_as_wide(right: Any) -> Any:
    def of(cls: Any, exactness: Any, dtype: Any) -> Any:
        own = right.__func__(cls, exactness, dtype)
        return replace(own, output=10 * own.output, gradient=10 * own.gradient, scale=10 * own.scale)

    return classmethod(of)


def _agreed(right: Any) -> Any:
    from accel.guard.guard import Comparison

    return lambda *args, **kwargs: Comparison()


def _half_the_batch_too(right: Any) -> Any:
    return lambda base, most, multiple=1: sorted({max(multiple, base // 2), *right(base, most, multiple)})


def _twice_the_cap_too(right: Any) -> Any:
    return lambda base, most, multiple=1: [*right(base, most, multiple), 2 * most // multiple * multiple]


def _unknown_is_pure_noise(right: Any) -> Any:
    def decide(self: Any, step: int, noise: Any) -> Any:
        from accel.goodput.efficiency import NoiseInterval

        unknown = noise is None or not noise.is_known
        return right(self, step, NoiseInterval(math.inf, math.inf, math.inf) if unknown else noise)

    return decide


def _by_the_estimate(right: Any) -> Any:
    return lambda now, sizes, base, noise, bound, *rest: right(now, sizes, base, noise, "phi", *rest)


def _size_alone(right: Any) -> Any:
    def verify(file: Any, manifest: Any) -> None:
        from accel.elastic.checkpoint import _Refused

        if os.fstat(file.fileno()).st_size != manifest.size_bytes:
            raise _Refused("its state.pt has another size than by its manifest")

    return verify


def _newest_or_none(right: Any) -> Any:
    def newest(self: Any, most: int | None) -> Any:
        listed = self._listed
        self._listed = lambda: listed()[:1]
        try:
            return right(self, most)
        finally:
            del self._listed

    return newest


FAULTS = [
    *faults(
        "guard",
        "accel.guard.guard",
        _GUARD,
        tolerance_times_ten=("allows ten times the deviation", "Tolerance.of", _ten_times_as_wide),
        always_right=("finds each candidate right", "compare", _agreed),
    ),
    *faults(
        "guard",
        "accel.guard.comparison",
        _GUARD,
        ignores_gradients=("compares the outputs alone", "_compare_gradients", _agreed),
        ignores_outputs=("compares the gradients alone", "_compare_tensors", _agreed),
    ),
    *faults(
        "guard",
        "accel.guard.snapshot",
        _GUARD,
        ignores_random_streams=("replays with other random numbers", "restore_generators", returns(None)),
        leaves_a_trace=("does not put buffers back after a replay", "_write", returns(None)),
    ),
    *faults(
        "guard",
        "accel.guard.draws",
        _DRAWS,
        ignores_draws=("does not compare what was drawn", "difference", returns("")),
    ),
    *faults(
        "guard",
        "accel.guard.update_guard",
        _GUARD,
        updates_always_right=("finds each optimizer's update right", "compare", _agreed),
    ),
    *faults(
        "guard",
        "accel.guard.watch",
        _SESSION,
        watch_sees_nothing=(
            "lets outputs that are not finite pass while a strategy is on",
            "Watch._problem",
            returns(""),
        ),
    ),
    *faults(
        "batch size",
        "accel.elastic.batch_size.choice",
        _BATCH,
        below_the_users_batch=("offers half the user's batch", "candidates", _half_the_batch_too),
        above_the_cap=("offers twice the largest batch allowed", "candidates", _twice_the_cap_too),
        no_hysteresis=("changes for any gain", "MARGIN", is_now(1.0)),
        believes_the_estimate=(
            "reckons with the estimate, not with the interval's careful end",
            "_best",
            _by_the_estimate,
        ),
    ),
    *faults(
        "batch size",
        "accel.elastic.batch_size.policy",
        _BATCH,
        pure_noise_grows=("grows while the noise scale is not known", "BatchPolicy.decide", _unknown_is_pure_noise),
        forgets_the_memory_limit=("tries again at once what did not fit into memory", "_FITS_AGAIN", is_now(0)),
        leaps=("tries a hundred times the largest batch timed", "_GROWTH", is_now(100)),
    ),
    *faults(
        "batch size",
        "accel.elastic.batch_size.rehearsal",
        ("tests/accel/elastic/test_rehearsal.py",),
        rehearses_nothing=(
            "lets the loop run out of memory with a larger batch",
            "BatchRehearsal.problem",
            returns(""),
        ),
    ),
    *faults(
        "batch size",
        "accel.goodput.noise_schedule",
        _NOISE,
        pays_stalls_in_full=(
            "waits for all that a measurement of the noise took once before the next one",
            "_OF_LARGE",
            is_now(1.0),
        ),
        forgives_stalls=(
            "never pays for what a measurement of the noise took beyond the usual",
            "_OF_LARGE",
            is_now(0.0),
        ),
    ),
    *faults(
        "batch size",
        "accel.goodput.noise_scale",
        _NOISE,
        keeps_the_beginning=(
            "lets measurements of the run's beginning outweigh later ones",
            "_LEAST_WITH_FIRST",
            is_now(12),
        ),
    ),
    *faults(
        "learning rate",
        "accel.elastic.scaling_rules",
        _RATES,
        above_linear=(
            "multiplies by more than the batch grew",
            "BatchScale.bounded_gain",
            property_becomes(lambda batch, gain: gain if batch.scale == 1 else 1.5 * batch.scale),
        ),
        beyond_the_noise=(
            "goes on growing beyond the noise scale",
            "BatchScale.scale_within_noise",
            property_becomes(lambda batch, scale: batch.scale),
        ),
        linear_for_adam=(
            "multiplies Adam's rate by the batch, not by its root",
            "Sqrt.multipliers",
            result_becomes(lambda by: by._replace(lr=by.lr**2)),
        ),
    ),
    *faults(
        "checkpoints",
        "accel.elastic.checkpoint",
        _CHECKPOINT,
        no_checksum=("loads what has the right size", "_verify", _size_alone),
        newest_or_none=("does not fall back where the newest is damaged", "Checkpoints._newest", _newest_or_none),
        damaged_ones_count=(
            "removes a whole one for the sake of a damaged one",
            "Checkpoints._looks_whole",
            returns(True),
        ),
    ),
    *faults(
        "checkpoints",
        "accel.elastic.save_policy",
        _SAVES,
        never_due=("never saves", "SavePolicy._decide", returns(False)),
        always_due=("saves after each step", "SavePolicy._decide", returns(True)),
    ),
]
