"""A model is captured in place, and released again."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
from torch import nn

from accel.graphs import ModelCalls, calls_of, capture, model_calls, release
from accel.profiler.loop import callslot
from tests.accel.graphs.model_loops import batch, network, taped
from tests.accel.graphs.tape import TapeRecorder

pytestmark = pytest.mark.filterwarnings("ignore:accel.graphs.capture:RuntimeWarning")


def loops_of(model: nn.Module, calls: int) -> None:
    for seed in range(calls):
        model(batch(8, seed)).sum().backward()


def test_capture_and_release() -> None:
    model = network()
    model.compile(backend="eager")
    before = callslot.contents(model)
    assert capture(model, warmup=1) is model
    calls = calls_of(model)
    assert calls is not None
    with pytest.warns(RuntimeWarning, match=r"runs eagerly: its tensors must be on one CUDA device. Found: cpu"):
        loops_of(model, 4)
    assert calls.why_eager
    release(model)
    assert callslot.contents(model) == before
    assert calls_of(model) is None
    release(model)


def test_a_model_that_is_let_go_takes_its_graphs_with_it() -> None:
    model = network()
    calls = ModelCalls(model, warmup=0, recorder=lambda device: TapeRecorder())
    model_calls.capture_model(model, calls)
    model(batch(8, 0)).sum().backward()
    assert calls.replays == 1
    assert calls_of(copy.deepcopy(model)) is None
    assert calls_of(pickle.loads(pickle.dumps(model))) is None
    gone = weakref.ref(model)
    del model, calls
    gc.collect()
    assert gone() is None


def test_release_under_a_later_wrapper() -> None:
    model = network()
    capture(model)
    calls = calls_of(model)
    inner = vars(model)[callslot.NAME]
    callslot.fill(model, callslot.SlotCall(lambda *args: inner(*args)))
    release(model)
    assert calls is not None
    model(batch(8, 0))
    assert not calls.seen.uses


def test_bad_arguments() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"modules, optimizers and fixed are for a step. Found: a model"):
        capture(model, modules=[model])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"captured inside of what distributes it. Found: DataParallel"):
        capture(nn.DataParallel(model))


def test_graphs_that_are_dropped_before_a_backward_pass() -> None:
    model = network()
    calls = taped(model, warmup=0)
    loss = model(batch(8, 0)).sum()
    calls.reset()
    with pytest.raises(RuntimeError, match="before its graphs are dropped"):
        loss.backward()
