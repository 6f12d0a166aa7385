"""Faults of what guards the numbers: the guard, the batch size, the learning rate, checkpoints."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

from benchmarks.decisions.fault import Fault, is_now, property_becomes, result_becomes, returns

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
    # Guard
    Fault(
        "tolerance_times_ten",
        "guard",
        "allows ten times the deviation",
        "accel.guard.guard:Tolerance.of",
        _ten_times_as_wide,
        _GUARD,
    ),
    Fault(
        "ignores_gradients",
        "guard",
        "compares the outputs alone",
        "accel.guard.guard:_compare_gradients",
        _agreed,
        _GUARD,
    ),
    Fault(
        "ignores_outputs", "guard", "compares the gradients alone", "accel.guard.guard:_compare_output", _agreed, _GUARD
    ),
    Fault(
        "ignores_random_streams",
        "guard",
        "replays with other random numbers",
        "accel.guard.guard:RandomStates.restore",
        returns(None),
        _GUARD,
    ),
    Fault(
        "ignores_draws", "guard", "does not compare what was drawn", "accel.guard.draws:difference", returns(""), _DRAWS
    ),
    Fault("always_right", "guard", "finds each candidate right", "accel.guard.guard:compare", _agreed, _GUARD),
    Fault(
        "updates_always_right",
        "guard",
        "finds each optimizer's update right",
        "accel.guard.update_guard:compare",
        _agreed,
        _GUARD,
    ),
    Fault(
        "leaves_a_trace",
        "guard",
        "does not put buffers back after a replay",
        "accel.guard.guard:ModuleState.restore",
        returns(None),
        _GUARD,
    ),
    Fault(
        "watch_sees_nothing",
        "guard",
        "lets outputs that are not finite pass while a strategy is on",
        "accel.guard.watch:Watch._problem",
        returns(""),
        _SESSION,
    ),
    # Batch size
    Fault(
        "below_the_users_batch",
        "batch size",
        "offers half the user's batch",
        "accel.elastic.batch_size.choice:candidates",
        _half_the_batch_too,
        _BATCH,
    ),
    Fault(
        "above_the_cap",
        "batch size",
        "offers twice the largest batch allowed",
        "accel.elastic.batch_size.choice:candidates",
        _twice_the_cap_too,
        _BATCH,
    ),
    Fault(
        "no_hysteresis",
        "batch size",
        "changes for any gain",
        "accel.elastic.batch_size.choice:MARGIN",
        is_now(1.0),
        _BATCH,
    ),
    Fault(
        "pure_noise_grows",
        "batch size",
        "grows while the noise scale is not known",
        "accel.elastic.batch_size.policy:BatchPolicy.decide",
        _unknown_is_pure_noise,
        _BATCH,
    ),
    Fault(
        "believes_the_estimate",
        "batch size",
        "reckons with the estimate, not with the interval's careful end",
        "accel.elastic.batch_size.choice:_best",
        _by_the_estimate,
        _BATCH,
    ),
    Fault(
        "forgets_the_memory_limit",
        "batch size",
        "tries again at once what did not fit into memory",
        "accel.elastic.batch_size.policy:_FITS_AGAIN",
        is_now(0),
        _BATCH,
    ),
    Fault(
        "rehearses_nothing",
        "batch size",
        "lets the loop run out of memory with a larger batch",
        "accel.elastic.batch_size.rehearsal:BatchRehearsal.problem",
        returns(""),
        ("tests/accel/elastic/test_rehearsal.py",),
    ),
    Fault(
        "leaps",
        "batch size",
        "tries a hundred times the largest batch timed",
        "accel.elastic.batch_size.policy:_GROWTH",
        is_now(100),
        _BATCH,
    ),
    Fault(
        "pays_stalls_in_full",
        "batch size",
        "waits for all that a measurement of the noise took once before the next one",
        "accel.goodput.noise_schedule:_BY_AND_BY",
        is_now(1.0),
        _NOISE,
    ),
    Fault(
        "forgives_stalls",
        "batch size",
        "never pays for what a measurement of the noise took beyond the usual",
        "accel.goodput.noise_schedule:_BY_AND_BY",
        is_now(0.0),
        _NOISE,
    ),
    Fault(
        "keeps_the_beginning",
        "batch size",
        "lets measurements of the run's beginning outweigh later ones",
        "accel.goodput.noise_scale:_LEAST_WITH_FIRST",
        is_now(12),
        _NOISE,
    ),
    # Learning rate
    Fault(
        "above_linear",
        "learning rate",
        "multiplies by more than the batch grew",
        "accel.elastic.scaling_rules:BatchScale.bounded_gain",
        property_becomes(lambda batch, gain: gain if batch.scale == 1 else 1.5 * batch.scale),
        _RATES,
    ),
    Fault(
        "beyond_the_noise",
        "learning rate",
        "goes on growing beyond the noise scale",
        "accel.elastic.scaling_rules:BatchScale.scale_within_noise",
        property_becomes(lambda batch, scale: batch.scale),
        _RATES,
    ),
    Fault(
        "linear_for_adam",
        "learning rate",
        "multiplies Adam's rate by the batch, not by its root",
        "accel.elastic.scaling_rules:Sqrt.multipliers",
        result_becomes(lambda by: by._replace(lr=by.lr**2)),
        _RATES,
    ),
    # Checkpoints
    Fault(
        "no_checksum",
        "checkpoints",
        "loads what has the right size",
        "accel.elastic.checkpoint:_verify",
        _size_alone,
        _CHECKPOINT,
    ),
    Fault(
        "newest_or_none",
        "checkpoints",
        "does not fall back where the newest is damaged",
        "accel.elastic.checkpoint:Checkpoints._newest",
        _newest_or_none,
        _CHECKPOINT,
    ),
    Fault(
        "damaged_ones_count",
        "checkpoints",
        "removes a whole one for the sake of a damaged one",
        "accel.elastic.checkpoint:Checkpoints._looks_whole",
        returns(True),
        _CHECKPOINT,
    ),
    Fault(
        "never_due",
        "checkpoints",
        "never saves",
        "accel.elastic.save_policy:SavePolicy._decide",
        returns(False),
        _SAVES,
    ),
    Fault(
        "always_due",
        "checkpoints",
        "saves after each step",
        "accel.elastic.save_policy:SavePolicy._decide",
        returns(True),
        _SAVES,
    ),
]
