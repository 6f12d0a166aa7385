"""Kernels in Triton's interpreter, and memory that is poisoned until it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from accel.kernels import support
from tests.kernels import interpreter

# Warnings are errors. With poison on, torch warns of its own operators on a GPU that don't repeat their bits, and the
# mode that finds waits for the device says that it is a prototype.
_ON_A_GPU = ("ignore:.*[dD]eterministic.*:UserWarning", "ignore:Synchronization debug mode:UserWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let GPU tests of this folder pass over what torch says about its modes."""
    for item in items:
        if item.get_closest_marker("gpu") and Path(__file__).parent in item.path.parents:
            for words in _ON_A_GPU:
                item.add_marker(pytest.mark.filterwarnings(words))


@pytest.fixture
def waits_for_nothing() -> Callable[[], AbstractContextManager[None]]:
    """Return what makes a wait for the device an error for as long as its block lasts."""

    @contextmanager
    def watched() -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return watched


@pytest.fixture
def interpreted() -> Iterator[None]:
    """CPU tensors run the Triton kernels."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here; the interpreter is for machines without a GPU")
    if not support.has_triton():
        pytest.skip("needs triton, which is not installed")
    with interpreter.interpreted():
        yield


@pytest.fixture(params=["plain", "kernels"])
def path(request: pytest.FixtureRequest) -> str:
    """Run a test on the path without kernels, and by kernels in the interpreter."""
    if request.param == "kernels":
        request.getfixturevalue("interpreted")
    return str(request.param)


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Uninitialised memory reads as NaN, or as the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
