"""Old public names work, warn once for each call that is written, and name the new ones."""

from __future__ import annotations

import inspect
import pickle
import warnings

import pytest

import accel
from accel.comm import bandwidth, catalogue
from accel.dataio import images
from accel.errors import InvalidArgument
from accel.goodput import fit
from accel.profiler import renamed


@renamed.arguments(workers="num_workers")
def load(num_workers: int = 0) -> int:
    """Load."""
    return num_workers


@renamed.gathered("elastic", accel.Elastic, "max_batch_size", "checkpoint")
def train(elastic: accel.Elastic | None = None) -> accel.Elastic | None:
    return elastic


def test_an_old_argument_is_passed_on_under_its_new_name() -> None:
    with pytest.warns(FutureWarning, match=r"accel: load\(workers=\) is now num_workers=; the next release drops"):
        assert load(workers=3) == 3  # type: ignore[call-arg]
    assert load(num_workers=2) == load(2) == 2
    assert list(inspect.signature(load).parameters) == ["num_workers"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'worker'"):
        load(worker=3)  # type: ignore[call-arg]


def test_old_arguments_become_one_object() -> None:
    with pytest.warns(
        FutureWarning, match=r"train\(max_batch_size=\) is now elastic=accel\.Elastic\(max_batch_size=\)"
    ):
        assert train(max_batch_size=3) == accel.Elastic(max_batch_size=3)  # type: ignore[call-arg]
    assert train() is None


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_old_name_beside_the_new_one_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"num_workers= must stand alone\. Found: workers= beside it"):
        load(workers=3, num_workers=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match=r"elastic= must stand alone\. Found: max_batch_size= beside it"):
        train(max_batch_size=3, elastic=accel.Elastic(max_batch_size=4))  # type: ignore[call-arg]


def test_the_warning_is_shown_once_for_a_line_that_runs_often() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            load(workers=1)  # type: ignore[call-arg]
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (images, "collate", "collate_images"),
        (catalogue, "register", "register_compressor"),
        (bandwidth, "measure", "measure_links"),
        (fit, "fit", "fit_throughput"),
    ],
)
def test_old_functions_call_the_new_ones(module: object, old: str, new: str) -> None:
    function = getattr(module, old)
    assert inspect.unwrap(function) is getattr(module, new) is getattr(accel, new)
    with pytest.warns(FutureWarning, match=rf"{old}\(\) is now {new}\(\)"), pytest.raises(TypeError):
        function(no_such_argument=1)


def test_a_collate_function_under_its_old_name_reaches_worker_processes() -> None:
    assert pickle.loads(pickle.dumps(images.collate)) is images.collate
