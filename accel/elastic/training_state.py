"""All that a training needs to go on bit for bit, as one dict of tensors and plain values; and back, all or nothing."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from accel.elastic.saving.plain_values import with_plain_numbers
from accel.errors import CheckpointError, InvalidArgument, OtherVersion
from accel.profiler.interruptions import ours

_VERSION = 1
_LIKE_PARAMETERS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "exp_inf"}
)

_NUMPY_WORDS = 624
"""Of its Mersenne Twister, which takes any place among them."""


class Stateful(Protocol):
    """A loader, sampler, scheduler, GradScaler, controller: whatever has a state that can be taken and loaded."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def capture_state(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    schedulers: Stateful | Sequence[Stateful] = (),
    *,
    step: int = 0,
    gather: Callable[[Any], list[Any]] | None = None,
    **more: Stateful | None,
) -> dict[str, Any]:
    """Return the state of a training, between two of its steps.

    Tensors in it are those of the model and the optimizers, not copies: save it before the next step.

    Args:
        model: its state is that of the module inside DistributedDataParallel or torch.compile, so it loads at any
            number of ranks.
        optimizers, schedulers: one or several, in an order that is the same when the state is restored.
        step: steps taken so far.
        gather: with several ranks, gives each the values that all of them passed, by rank; then every rank calls this
            at the same step, and one saves what it returns. Default: this process is alone.
        more: further objects with `state_dict` and `load_state_dict`, equal on all ranks, by a name of yours: loader or
            sampler, GradScaler, LearningRateScaler. None is passed over.

    Returns:
        A dict for `Checkpoints.save`, with the random states of all ranks.

    Raises:
        InvalidArgument: if an object has no `state_dict` and `load_state_dict`.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> state = capture_state(model, optimizer, step=5)
        >>> restore_state(state, model, optimizer)
        []
    """
    parts = _parts(model, optimizers, schedulers, more)
    random = [random_state()] if gather is None else gather(random_state())
    return {
        "version": _VERSION,
        "step": step,
        "world_size": len(random),
        "kinds": {name: _kind(part) for name, part in parts.items()},
        "parts": {name: with_plain_numbers(part.state_dict()) for name, part in parts.items()},
        "random": random,
    }


def restore_state(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    schedulers: Stateful | Sequence[Stateful] = (),
    *,
    rank: int | None = None,
    **more: Stateful | None,
) -> list[str]:
    """Put a training where a state was captured, or change nothing.

    Whether model, optimizers and the rest are those of the state is checked before anything is changed. If one of them
    refuses its part all the same, those that took theirs are put back.

    Args:
        state: from `capture_state`; it is not changed.
        model, optimizers, schedulers, more: as they were passed to `capture_state`.
        rank: this process's, whose random state is set; default the process group's, or 0.

    Returns:
        Sentences on what could not be as it was: a rank that is new has no random state of its own, and keeps the one
        it has. Usually none.

    Raises:
        CheckpointError: if the state is of another model, optimizer and so on, with the first difference; nothing has
            been changed then. OtherVersion if it is of another version.
        InvalidArgument: if an object has no `state_dict` and `load_state_dict`.
    """
    parts = _parts(model, optimizers, schedulers, more)
    if rank is None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    version = state.get("version") if isinstance(state, Mapping) else type(state).__name__
    kind = OtherVersion if type(version) is int and version != _VERSION else CheckpointError
    try:
        if version != _VERSION:
            problem: str | None = (
                f"its version is {version!r}, and {_VERSION} is known here; save what capture_state returns"
            )
        else:
            problem = next(_problems(state, parts), None)
    except ours() as error:  # whatever hostile contents make of those who judge them
        problem = f"it can't be compared with it ({type(error).__name__}: {error})"
    if problem is not None:
        raise kind(f"the checkpoint is not one of this training: {problem}. Nothing was loaded")
    before = {name: (copied(part.state_dict()), _attributes(part)) for name, part in parts.items()}
    taken: list[str] = []
    try:
        for name, part in parts.items():
            taken.append(name)
            part.load_state_dict(copied(state["parts"][name]))  # optimizers keep the tensors that they are given
        if rank < len(state["random"]):
            taken.append("the random state")
            set_random_state(state["random"][rank])
    except BaseException as error:
        with contextlib.ExitStack() as putting_back:
            for name in filter(before.__contains__, reversed(taken)):
                putting_back.callback(_put_back, parts[name], *before[name])
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(
            f"the checkpoint does not fit: {taken[-1]} refused its part ({error}). Nothing was loaded"
        ) from error
    if rank < len(state["random"]):
        return []
    saved = len(state["random"])
    return [f"rank {rank} keeps its own random state: the checkpoint has those of {saved} ranks, and none for it."]


def _put_back(part: Stateful, state: Any, attributes: set[str]) -> None:
    """Load what a part had; torch's schedulers make an attribute of whatever a state holds."""
    for name in _attributes(part) - attributes:
        delattr(part, name)
    part.load_state_dict(state)


def _attributes(part: Stateful) -> set[str]:
    return set(getattr(part, "__dict__", ()))


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def copied(value: Any) -> Any:
    """Return a copy that shares no tensor with `value`, on the CPU; dicts keep their class and attributes."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        other = copy.copy(value)
        for key, item in value.items():  # not by `update`: that of a Counter, as MultiStepLR has, adds them up
            other[key] = copied(item)
        return other
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return copy.deepcopy(value)


def _parts(model: nn.Module, optimizers: Any, schedulers: Any, more: Mapping[str, Any]) -> dict[str, Stateful]:
    """Return everything with a state by name. What is small and may refuse comes first, the model last."""
    parts: dict[str, Any] = {f"{name!r}": part for name, part in more.items() if part is not None}
    parts |= {f"scheduler {number}": part for number, part in enumerate(_several(schedulers))}
    parts |= {f"optimizer {number}": part for number, part in enumerate(_several(optimizers))}
    parts["model"] = unwrapped(model)
    for name, part in parts.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise InvalidArgument(
                f"what a checkpoint keeps must have state_dict and load_state_dict, got a {type(part).__name__} as "
                f"{name}; add plain values to the dict that capture_state returns"
            )
    return parts


def _several(given: Any) -> Iterable[Any]:
    return given if isinstance(given, list | tuple) else [given]


def _kind(part: Stateful) -> str:
    # accel.optim's optimizers read the states of torch's of the same kind, and the other way round.
    return type(part).__name__.removeprefix("Fused") if isinstance(part, Optimizer) else type(part).__name__


def _problems(state: Mapping[str, Any], parts: Mapping[str, Stateful]) -> Iterator[str]:
    if problem := _malformed(state):
        yield f"{problem}; save what capture_state returns"
        return
    kinds = state["kinds"]
    for name, kind in kinds.items():
        if name not in parts:
            yield f"it holds {name} ({kind}), which this run does not have; pass it"
    for name, part in parts.items():
        if name not in kinds:
            yield f"it has no {name} ({_kind(part)}); leave it out, or start over"
    for name, part in parts.items():
        if name != "model" and _kind(part) != kinds[name]:
            yield f"{name} was a {kinds[name]}, and is a {_kind(part)} here"
        if isinstance(state["parts"][name], Mapping) != isinstance(part.state_dict(), Mapping):
            yield f"the state of {name} is a {type(state['parts'][name]).__name__}"
        if isinstance(part, Optimizer):
            yield from _optimizer_problems(name, state["parts"][name], part)
    yield from _model_problems(state["parts"]["model"], parts["model"].state_dict())


def _malformed(state: Mapping[str, Any]) -> str:
    """Return in which way a state is none that `capture_state` returns; '' if it has the form of one."""
    forms = {"version": int, "step": int, "kinds": dict, "parts": dict, "random": list}
    for key, form in forms.items():
        if type(state.get(key)) is not form:
            return f"its {key!r} is a {type(state.get(key)).__name__} in place of {form.__name__}"
    if state["step"] < 0:
        return f"its 'step' is {state['step']}"
    if state["kinds"].keys() != state["parts"].keys():
        return "its 'kinds' and 'parts' name other objects"
    return ""


def _optimizer_problems(name: str, saved: Mapping[str, Any], optimizer: Optimizer) -> Iterator[str]:
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if theirs != own:
        yield f"{name} had groups of {theirs} parameters, and has {own} here"
        return
    for there, here in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        for key in getattr(optimizer, "defaults", {}).keys() & here.keys():
            if key == "lr" and key not in there:
                yield f"{name} had no learning rate"
            elif not _is_like(there.get(key), here[key]):
                yield f"{name} had {key} {there[key]!r}, and has {here[key]!r} here"
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if not all(isinstance(saved["state"].get(number, {}), Mapping) for number in numbers):
        yield f"{name} kept no dict for each parameter"
        return
    if type(optimizer).__module__.partition(".")[0] not in ("torch", "accel"):
        return  # others may keep a number under the same name, as NovoGrad does
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        state = {} if nn.parameter.is_lazy(parameter) else saved["state"].get(number, {})
        for key, value in state.items():
            if key in _LIKE_PARAMETERS and value is not None and getattr(value, "shape", None) != parameter.shape:
                kept = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"as a {type(value).__name__}"
                yield f"{name} kept {key!r} {kept} for a parameter of shape {list(parameter.shape)}"


def _is_like(saved: Any, own: Any) -> bool:
    """Return whether a setting may stand in the place of another one: a number, say, or as many of them."""
    if saved is None or own is None:
        return True
    if isinstance(own, list | tuple):
        return isinstance(saved, list | tuple) and len(saved) == len(own) and all(map(_is_like, saved, own))
    return isinstance(saved, int | float | Tensor) == isinstance(own, int | float | Tensor)


def _model_problems(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"it holds the model's {key!r}, which this model does not have" for key in saved if key not in own)
    yield from (f"it lacks the model's {key!r}" for key in own if key not in saved)
    for key, value in own.items():
        there = saved[key]
        if isinstance(value, Tensor) != isinstance(there, Tensor):
            yield f"the model's {key!r} was a {type(there).__name__}, and is a {type(value).__name__} here"
        elif isinstance(value, Tensor) and not nn.parameter.is_lazy(value) and value.shape != there.shape:
            yield f"the model's {key!r} had shape {list(there.shape)}, and has {list(value.shape)} here"


# -- random states --


def random_state() -> dict[str, Any]:
    """Return the random states of this process as plain values.

    Those of CUDA devices are in it once the process has used CUDA, with the current device.

    Example:
        >>> state = random_state()
        >>> before = torch.rand(2)
        >>> set_random_state(state)
        >>> torch.equal(torch.rand(2), before)
        True
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": _plain_of_numpy(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "cuda": None,
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = {"current": torch.cuda.current_device(), "states": torch.cuda.get_rng_state_all()}
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put this process where `random_state` was taken.

    If there are as many CUDA devices as there were, each gets its state; else the current one gets that of the device
    which was current. Without CUDA its states are left out.

    Raises:
        InvalidArgument: if it is not such a state; nothing has been changed then.
    """
    before = random_state()
    try:
        _set(state)
    except BaseException as error:  # whatever damaged or hostile contents make of the generators
        _set(before)
        if not isinstance(error, ours()):
            raise
        raise InvalidArgument(
            f"a random state must be one that random_state() returned, got one that does not fit "
            f"({type(error).__name__}: {error}); take it from a checkpoint of this version"
        ) from error


def _set(state: Mapping[str, Any]) -> None:
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(_numpy_of_plain(state["numpy"]))
    if not 0 <= np.random.get_state(legacy=False)["state"].get("pos", 0) <= _NUMPY_WORDS:
        raise InvalidArgument("NumPy would read beyond its words")
    torch.set_rng_state(state["torch"])
    _set_cuda(state["cuda"])


def _set_cuda(state: Mapping[str, Any] | None) -> None:
    if state is None or not torch.cuda.is_available():
        return
    states, current = state["states"], state["current"]
    if len(states) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states)
    else:
        torch.cuda.set_rng_state(states[current])


def _plain_of_numpy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain_of_numpy(one) for name, one in value.items()}
    if isinstance(value, np.ndarray):
        # As bytes: torch has few operators for unsigned integers.
        return {"dtype": str(value.dtype), "bytes": torch.from_numpy(value.copy().view(np.uint8))}
    return value.item() if isinstance(value, np.generic) else value


def _numpy_of_plain(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    raw = value.get("bytes")
    if isinstance(raw, Tensor):
        return raw.numpy().view(np.dtype(value["dtype"])).copy()
    return {name: _numpy_of_plain(one) for name, one in value.items()}
