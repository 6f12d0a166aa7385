"""By which scheme each bucket of gradients is averaged, and what a scheme is made of."""

from __future__ import annotations

from typing import NamedTuple

from accel.comm.catalogue import CATALOGUE, Scheme, error_feedback
from accel.comm.compressor import RESIDUAL, Compressor

Plan = tuple[Scheme | None, ...]
"""The scheme of each bucket, None for DDP's own all-reduce; the last counts for all that follow, () is DDP's own."""


class SchemeSettings(NamedTuple):
    """How buckets of one scheme are averaged."""

    compressor: Compressor
    hierarchical: bool
    error_feedback: bool

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the own fields of the memory that the scheme uses."""
        return ((RESIDUAL,) if self.error_feedback else ()) + self.compressor.fields


def scheme_of(plan: Plan, bucket: int) -> Scheme | None:
    """Return the scheme of a bucket, by its number."""
    return plan[min(bucket, len(plan) - 1)] if plan else None


def catalogue_settings(scheme: Scheme) -> SchemeSettings:
    """Return the settings of a scheme of the catalogue, or raise ValueError if there is no such compressor."""
    entry = CATALOGUE.get(scheme.compressor)
    if entry is None:
        raise ValueError(f"schemes must be of the catalogue ({', '.join(CATALOGUE)}), got {scheme.compressor!r}")
    compressor = entry.make()
    return SchemeSettings(compressor, scheme.hierarchical, error_feedback(compressor, entry.level))
