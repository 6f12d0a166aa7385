"""Several passes over one loader at a time: each yields what it would over the plain loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from tests.dataio.engines import wrapped
from tests.dataio.numbers import Numbers, indices, seeded

Seen = list[Any]


def nested(loader: Any) -> Seen:
    return [(indices(a), indices(b)) for a in loader for b in loader]


def nested_and_left(loader: Any) -> Seen:
    seen: Seen = []
    for outer in loader:
        seen.append(indices(outer))
        for number, inner in enumerate(loader):
            seen.append(indices(inner))
            if number == 1:
                break
    return seen


def zipped(loader: Any) -> Seen:
    return [(indices(a), indices(b)) for a, b in zip(loader, loader, strict=True)]


def begun_before_a_draw(loader: Any) -> Seen:
    batches = iter(loader)
    drawn = float(torch.rand(1))
    return [drawn, *map(indices, batches)]


def one_left_for_another(loader: Any) -> Seen:
    first = iter(loader)
    seen = [indices(next(first))]
    seen += map(indices, loader)
    return [*seen, *map(indices, first)]


def begun_and_never_used(loader: Any) -> Seen:
    kept = [iter(loader), iter(loader)]
    return [*map(indices, loader), len(kept)]


LOOPS = [nested, nested_and_left, zipped, begun_before_a_draw, one_left_for_another, begun_and_never_used]


def make(length: int, own: str) -> DataLoader[Any]:
    data = Numbers(length)
    if own == "sampler":
        return DataLoader(data, 4, sampler=RandomSampler(data, generator=seeded(2)))
    return DataLoader(data, 4, shuffle=own != "sequential", generator=seeded(2) if own == "loader" else None)


def outcome(loader: Any, plain: DataLoader[Any], loop: Callable[[Any], Seen]) -> Any:
    """Return what three such loops see, with whole epochs between, and the random states at the end."""
    torch.manual_seed(5)
    seen = []
    for _ in range(3):
        seen += [[indices(batch) for batch in loader], loop(loader)]
    own = [
        g.get_state().tolist() for g in (plain.generator, getattr(plain.sampler, "generator", None)) if g is not None
    ]
    return seen, torch.get_rng_state().tolist(), own


def _often(mode: str, own: str, length: int) -> bool:
    """Whether a case is run by default: each loop with the global generator, and each generator with one length."""
    return own == "global" or (mode not in ("fork", "proxy") and length == 9)


# Processes are costly: with them one length, and not the order that needs no draws.
CASES = [
    pytest.param(mode, loop, own, length, marks=[] if _often(mode, own, length) else pytest.mark.slow)
    for mode in ("inline", "auto", "threads", "fork", "proxy")
    for loop in LOOPS
    for own in ("global", "loader", "sampler", "sequential")
    for length in (3, 9, 30)
    if mode not in ("fork", "proxy") or (length == 9 and own != "sequential")
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("mode", "loop", "own", "length"), CASES, ids=lambda each: getattr(each, "__name__", str(each))
)
def test_each_pass_is_as_over_the_plain_loader(mode: Any, loop: Any, own: str, length: int) -> None:
    plain, made = make(length, own), make(length, own)
    wanted = outcome(plain, plain, loop)
    with wrapped(made, mode) as loader:
        assert outcome(loader, made, loop) == wanted
