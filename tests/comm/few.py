"""A few cases by default and the others by `make slow`, each in one launch of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest


def few(names: Iterable[str], default: Collection[str]) -> pytest.MarkDecorator:
    """Give a test `names`, a tuple of its cases: `default`, and in slow runs the rest."""
    every = tuple(names)
    assert set(default) < set(every), f"{default} must be some of {every}"
    others = tuple(name for name in every if name not in default)
    some = [pytest.param(tuple(default), id="few"), pytest.param(others, id="others", marks=pytest.mark.slow)]
    return pytest.mark.parametrize("names", some)
