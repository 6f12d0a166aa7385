"""Models whose calls are captured, in place: which they are, and how that is undone."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from accel.graphs.model_calls import ModelCalls
from accel.profiler.clocks import callslot


class _Captured(NamedTuple):
    calls: ModelCalls
    call: Any
    """What stands in the model's slot."""
    before: dict[str, Any]
    """What stood there."""


_captured: WeakKeyDictionary[nn.Module, _Captured] = WeakKeyDictionary()
_Model = TypeVar("_Model", bound=nn.Module)


def capture_model(model: _Model, calls: ModelCalls) -> _Model:
    """Run the calls of a model by graphs, in place."""
    if _distributes(model):
        raise TypeError(
            "capture: a model must be captured inside of what distributes it. "
            f"Found: {type(model).__name__}; capture the model that was passed to it"
        )
    release(model)
    before = callslot.contents(model)
    call = callslot.SlotCall(calls.wrap(before.get(callslot.NAME, model._call_impl)))
    callslot.fill(model, call)
    _captured[model] = _Captured(calls, call, before)
    return model


def _distributes(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    return isinstance(model, (DataParallel, DistributedDataParallel, FullyShardedDataParallel, FSDPModule))


def calls_of(model: nn.Module) -> ModelCalls | None:
    """Return what was captured of a model's calls, and why some run eagerly; None if it is not captured."""
    captured = _captured.get(model)
    return None if captured is None else captured.calls


def release(model: nn.Module) -> None:
    """Call a captured model eagerly again, and give the memory of its graphs back.

    Args:
        model: any; one that is not captured is left as it is.

    Example:
        >>> model = capture(torch.nn.Linear(4, 2))
        >>> release(model)
    """
    captured = _captured.pop(model, None)
    if captured is None:
        return
    captured.calls.reset()
    if callslot.contents(model).get(callslot.NAME) is captured.call:
        callslot.restore(model, captured.before)
    else:  # someone has wrapped it since
        captured.calls.stop()
