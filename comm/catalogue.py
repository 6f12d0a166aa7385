"""What there is to choose from: compressors by name, each with how far it moves the numbers.

    exact       the same bits: DDP's own all-reduce and nothing else
    reordered   the same precision, another order of summation: by hosts, or through the memory of the only one
    reduced     16 bits on the wire
    lossy       fewer, or fewer numbers, and what a step lost is sent with the next (error feedback)

Int8 counts as lossy and is offered with error feedback alone: without it, what a step loses is lost for good. DGC and
1-bit are offered without momentum, which learns worse: to take it over from the optimizer
(`accel.comm.sgd_momentum`) and give it back costs an all-reduce of everything, too much between trials.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from accel.comm.compressor import RESIDUAL, Compressor, Exact
from accel.comm.dgc import DGC
from accel.comm.half import Half
from accel.comm.int8 import Int8
from accel.comm.one_bit import OneBit
from accel.comm.powersgd import PowerSGD
from accel.profiler import renamed
from accel.profiler.errors import InvalidArgument

LEVELS = ("exact", "reordered", "reduced", "lossy")


class Scheme(NamedTuple):
    """How a bucket is averaged: by which compressor of the catalogue, and by hosts or not."""

    compressor: str
    hierarchical: bool = False

    def __str__(self) -> str:
        return f"{self.compressor}{' by hosts' if self.hierarchical else ''}"


class Entry(NamedTuple):
    """A compressor of the catalogue."""

    make: Callable[[], Compressor]
    level: str
    """Of `LEVELS`: what a user must allow."""


# In the order of fidelity: of two that are about as fast the first is taken.
CATALOGUE: dict[str, Entry] = {
    "exact": Entry(Exact, "reordered"),
    "half": Entry(Half, "reduced"),
    "int8": Entry(Int8, "lossy"),
    "1-bit": Entry(OneBit, "lossy"),
    # Lower ranks are faster and learn worse: 4 % more loss of a transformer of width 96 at rank 4, 0.8 % at 16.
    "powersgd 16": Entry(partial(PowerSGD, rank=16), "lossy"),
    "dgc 1%": Entry(partial(DGC, 0.01, momentum=False), "lossy"),
    "powersgd 4": Entry(partial(PowerSGD, rank=4), "lossy"),
}


def register_compressor(name: str, make: Callable[[], Compressor], level: str) -> None:
    """Add a compressor to what is chosen from; call it on every rank before choosing.

    Args:
        name: how it is called in tables and plans, not yet taken.
        make: makes the compressor, the same on every rank.
        level: "reduced" or "lossy", what a user must allow. Lossy ones that can use error feedback get it.

    Raises:
        InvalidArgument: if an argument is out of range, or the compressor must see a whole step at once.

    Example:
        >>> register_compressor("int8 fine", lambda: Int8(block=64), "lossy")
    """
    if level not in ("reduced", "lossy"):
        raise InvalidArgument(f"level must be 'reduced' or 'lossy', got {level!r}; exact sums need no other compressor")
    if name in CATALOGUE or not name:
        raise InvalidArgument(f"name must be new, got {name!r}, which is taken; known: {', '.join(CATALOGUE)}")
    if make().needs_whole_step:
        raise InvalidArgument(f"{name!r} must see all buckets of a step, but some stay with DDP; use it with CommState")
    CATALOGUE[name] = Entry(make, level)


register = renamed.function("register", register_compressor)


def check_level(allow: str) -> str:
    """Return `allow`, or raise InvalidArgument unless it is one of `LEVELS`."""
    if allow not in LEVELS:
        raise InvalidArgument(f"allow must be one of {', '.join(map(repr, LEVELS))}, got {allow!r}")
    return allow


def allowed(allow: str, *, by_hosts: bool, in_memory: bool = False) -> list[Scheme]:
    """Return the schemes, beside DDP's own all-reduce, that a level permits.

    Args:
        allow: of `LEVELS`.
        by_hosts: there are several hosts with several ranks, as many on each.
        in_memory: sums of all ranks go through shared memory; else flat and exact is what DDP does anyway.
    """
    level = LEVELS.index(check_level(allow))
    names = [name for name, entry in CATALOGUE.items() if LEVELS.index(entry.level) <= level]
    flat = [Scheme(name) for name in names if name != "exact" or in_memory]
    return flat + [Scheme(name, hierarchical=True) for name in names if by_hosts]


class SchemeSettings(NamedTuple):
    """How buckets of one scheme are averaged."""

    compressor: Compressor
    hierarchical: bool
    error_feedback: bool

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the own fields of the memory that the scheme uses."""
        return ((RESIDUAL,) if self.error_feedback else ()) + self.compressor.fields


def catalogue_settings(scheme: Scheme) -> SchemeSettings:
    """Return the settings of a scheme of the catalogue, or raise InvalidArgument if there is no such compressor.

    Lossy compressors are used with error feedback where they take it.
    """
    entry = CATALOGUE.get(scheme.compressor)
    if entry is None:
        raise InvalidArgument(f"schemes must be of the catalogue ({', '.join(CATALOGUE)}), got {scheme.compressor!r}")
    compressor = entry.make()
    feedback = compressor.takes_feedback and (entry.level == "lossy" or compressor.feedback)
    return SchemeSettings(compressor, scheme.hierarchical, feedback)
