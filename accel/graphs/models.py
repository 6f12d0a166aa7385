"""Models whose calls are captured, in place: which they are, and how that is undone."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from accel.errors import InvalidType
from accel.graphs.model_calls import ModelCalls
from accel.profiler.loop import callslot

_NAME = "_accel_captured"


class _Captured:
    """What was captured of a model; it is kept in the model, and goes with it. A copy of the model has None."""

    def __init__(self, calls: ModelCalls, call: Any, before: dict[str, Any]) -> None:
        self.calls, self.call, self.before = calls, call, before

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    return None


_Model = TypeVar("_Model", bound=nn.Module)


def capture_model(model: _Model, calls: ModelCalls) -> _Model:
    """Run the calls of a model by graphs, in place."""
    if _distributes(model):
        raise InvalidType(
            "capture: a model must be captured inside of what distributes it. "
            f"Found: {type(model).__name__}; capture the model that was passed to it"
        )
    release(model)
    before = callslot.contents(model)
    call = callslot.SlotCall(calls.wrap(before.get(callslot.NAME, model._call_impl)))
    callslot.fill(model, call)
    vars(model)[_NAME] = _Captured(calls, call, before)
    return model


def _distributes(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    return isinstance(model, (DataParallel, DistributedDataParallel, FullyShardedDataParallel, FSDPModule))


def calls_of(model: nn.Module) -> ModelCalls | None:
    """Return what was captured of a model's calls, and why some run eagerly; None if it is not captured."""
    captured: _Captured | None = vars(model).get(_NAME)
    return None if captured is None else captured.calls


def release(model: nn.Module) -> None:
    """Call a captured model eagerly again, and give the memory of its graphs back.

    Args:
        model: any; one that is not captured is left as it is.

    Example:
        >>> model = capture(torch.nn.Linear(4, 2))
        >>> release(model)
    """
    captured: _Captured | None = vars(model).pop(_NAME, None)
    if captured is None:
        return
    captured.calls.reset()
    if callslot.contents(model).get(callslot.NAME) is captured.call:
        callslot.restore(model, captured.before)
    else:  # someone has wrapped it since
        captured.calls.has_stopped = True
