"""What a call of a model may change, kept before the call and put back after it, so that it can be made again.

    attributes    of all modules, but for torch's own; which buffers and parameters stand in them
    containers    lists, dicts, sets and deques among these, also within each other: refilled, so
                  that they stay the same objects
    tensors       buffers and tensors in those containers: written in place
    generators    torch's on the host and on each device, Python's, numpy's, those that modules hold
                  or a call is given

Objects of other classes, and the insides of them, are not looked at.

Two snapshots are taken: a full one around a call that is recorded or replayed, and before each call
under strategies one of what such calls were seen to change (`Changes`).
"""

from __future__ import annotations

import itertools
import operator
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from accel.dataio.dataset.reach import is_library
from accel.dataio.fetching.randomness import streams
from accel.profiler.interruptions import ours
from accel.profiler.loop.module_hooks import home_of, hooks_of, of_the_loop
from accel.profiler.trees import leaves, shape_of, tensors

MOST_BYTES = 2**28
"""Of tensors in attributes that are copied for one snapshot."""
MOST_ENTRIES = 2**20
"""Entries of containers that are looked at for one snapshot."""
FEW_ENTRIES = 1000
"""The same before each call under strategies."""
_SMALL = 1_000_000
"""Elements of a tensor that is copied before each call under strategies."""
_OF_TENSORS = ("_buffers", "_parameters")
_CONTAINERS = (list, dict, set, deque)
_PLAIN = (Tensor, nn.Parameter)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WITHOUT_STATE = {"cpu", "meta"}
"""The CPU's generator is among the host's; a meta tensor draws nothing."""

Contents = list[tuple[Any, list[Any]]]


class Source(NamedTuple):
    """A random generator: how its state is read and written."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    is_shared: bool = False
    """Other threads may draw from it: it is written only if it has been drawn from, and its states can be compared."""


_TORCH = Source("torch", torch.get_rng_state, torch.set_rng_state)
"""The host's, as it is kept before each call: reading its bytes takes longer."""


class ModelSnapshot:
    """The state that a call of a model finds.

    Args:
        devices: on which it may draw random numbers, beside the host.
        written: parameters that its own call may write to.

    Attributes:
        unkept: why some of the state could not be kept; '' if all of it was.
    """

    def __init__(
        self, model: nn.Module, devices: Iterable[torch.device] = (), given: Any = (), written: Iterable[Tensor] = ()
    ) -> None:
        self.unkept = ""
        self._attributes = [(module, plain_attributes(module)) for module in model.modules()]
        self._contents, others, is_all = within(value for _, kept in self._attributes for value in kept.values())
        if not is_all:
            self.unkept = f"its modules hold containers with more than {MOST_ENTRIES:,} entries"
        if hook := _hook_of_the_users(model):
            self.unkept = f"your hook {hook} may keep what it sees"
        own = [buffer for buffer in model.buffers() if not is_lazy(buffer)] + list(written)
        self._copies = [(tensor, tensor.detach().clone()) for tensor in own]
        elsewhere = {_memory(tensor) for tensor in (*model.parameters(), *own) if type(tensor) in _PLAIN}
        self._copy(tensor for tensor in others if _may_be_written(tensor) and _memory(tensor) not in elsewhere)
        of_the_host = [Source(stream.name, stream.read, stream.write, is_shared=True) for stream in streams()]
        self._lasting = [*of_the_host, *_of_devices(devices), *own_generators(model)]
        sources = [*self._lasting, *generators_in(leaves(given))]
        self._generators = [(source, source.read()) for source in sources]

    def _copy(self, tensors: Iterable[Tensor]) -> None:
        left = MOST_BYTES
        for tensor in tensors:
            left -= tensor.nbytes
            if left < 0:
                self.unkept = f"its modules hold tensors of more than {MOST_BYTES >> 20} MiB in attributes"
                return
            self._copies.append((tensor, tensor.detach().clone()))

    def restore(self) -> None:
        """Put back what has changed."""
        for module, kept in self._attributes:
            for name in plain_attributes(module).keys() - kept.keys():
                del vars(module)[name]
            vars(module).update(kept)
        refill(self._contents)
        for tensor, value in self._copies:
            if _is_other(tensor, value):
                _write(tensor, value)
        self.restore_generators()

    def restore_generators(self) -> None:
        """Put back the random states alone."""
        restore_generators(self._generators)

    def changed(self) -> Changes:
        """Return what has changed since: what a call, say, has changed that was made in the meantime."""
        refilled = {id(each) for each, entries in self._contents if not _are_same(_entries(each), entries)}
        attributes = [
            (vars(module), name)
            for module, kept in self._attributes
            for name, value in kept.items()
            if vars(module).get(name) is not value or (refilled and _reaches(value, refilled))
        ]
        written = [tensor for tensor, value in self._copies if _is_other(tensor, value)]
        unshared = [_TORCH, *(source for source in self._lasting if not source.is_shared)]
        shared = [(source, state) for source, state in self._generators if source.is_shared]
        drawn = [source for source, state in shared if source.name != _TORCH.name and source.read() != state]
        return Changes(attributes, [each for each in written if each.numel() <= _SMALL], unshared + drawn)


class Changes:
    """What calls of a model were seen to change.

    Args:
        attributes: dictionaries of modules, each with a name in it.
    """

    def __init__(
        self, attributes: Iterable[tuple[dict[str, Any], str]], written: Iterable[Tensor], generators: Iterable[Source]
    ) -> None:
        self.attributes = {(id(owner), name): owner for owner, name in attributes}
        self.written = {id(tensor): tensor for tensor in written}
        self.generators = {source.name: source for source in generators}
        self._copies: _Copies | None = None

    def add(self, other: Changes) -> None:
        """Add what another call has changed, too."""
        self.attributes |= other.attributes
        self.written |= other.written
        self.generators |= other.generators

    def kept(self) -> Callable[[], None]:
        """Keep all of it as it is now, and return what puts it back; only the latest copies of tensors are kept."""
        tensors = list(self.written.values())
        if self._copies is None or not self._copies.take(tensors):
            self._copies = _Copies(tensors)
        values = [(owner, name, owner.get(name)) for (_, name), owner in self.attributes.items()]
        contents, _, _ = within((value for _, _, value in values), FEW_ENTRIES)
        generators = [(source, source.read()) for source in self.generators.values()]
        return partial(self._restore, values, contents, generators)

    def _restore(self, values: list[tuple[dict[str, Any], str, Any]], contents: Contents, generators: Any) -> None:
        restore_generators(generators)
        if self._copies is not None:
            self._copies.put_back(list(self.written.values()))
        for owner, name, value in values:
            owner[name] = value
        refill(contents)


class _Copies:
    """Copies of tensors that are taken before each call: what that needs is made once."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._places = _places(tensors)
        # What is made in inference mode operators refuse to write in the next training step.
        with torch.inference_mode(False):
            owns = [tensor.data for tensor in tensors]
            self._copies = [own.clone() for own in owns]
        self._pairs = _pairs(self._copies, owns)

    def take(self, tensors: list[Tensor]) -> bool:
        """Copy them once more; return False if they lie elsewhere now."""
        if self._places != _places(tensors):
            return False
        for copies, owns in self._pairs:
            torch._foreach_copy_(copies, owns)
        return True

    def put_back(self, tensors: list[Tensor]) -> None:
        """Make them what they were, wherever they lie now; one that has been resized stays as it is.

        By `data`: the graphs of calls before, which may have saved them, go by their versions.
        """
        same = [
            (each.data, copy) for each, copy in zip(tensors, self._copies, strict=False) if each.shape == copy.shape
        ]
        for owns, copies in _pairs([own for own, _ in same], [copy for _, copy in same]):
            torch._foreach_copy_(owns, copies)


def _places(tensors: list[Tensor]) -> list[tuple[object, torch.Size]]:
    """Return where tensors lie, and their shapes; one that may have no address is never where it was."""
    return [(t.data_ptr() if type(t) in _PLAIN and t.layout == torch.strided else object(), t.shape) for t in tensors]


def _pairs(some: list[Tensor], others: list[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return both by dtype and device, for one call each: a hundred of BatchNorm's one by one take 0.5 ms on a GPU.

    torch's own grouping switches gradients off and on in Python, between two lines of which Ctrl-C may come.
    """
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for one, other in zip(some, others, strict=True):
        firsts, seconds = kinds.setdefault((one.dtype, one.device), ([], []))
        firsts.append(one)
        seconds.append(other)
    return list(kinds.values())


# -- attributes and containers -----------------------------------------------------------------------------------------


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are kept: the user's own, and the dicts of tensors."""
    private = _keeps_private(type(module))
    return {name: value for name, value in vars(module).items() if name in _OF_TENSORS or _is_plain(name, private)}


def _is_plain(name: str, private: bool) -> bool:
    return name not in _OF_MODULES and not name.startswith("_accel_" if private else "_")


_OF_MODULES = frozenset({*vars(nn.Module()), "_compiled_call_impl"})
"""Attributes of every module, which torch writes."""


def _keeps_private(kind: type) -> bool:
    """Return whether private attributes of such a module are the user's: what wraps others has a life beside calls."""
    kind = next(each for each in kind.__mro__ if each.__module__ != "torch.nn.utils.parametrize")
    bases = [base.__module__ for base in kind.__mro__ if base.__module__.partition(".")[0] == "torch"]
    return kind.__module__ not in bases and all(base.startswith("torch.nn.modules.") for base in bases)


def _hook_of_the_users(model: nn.Module) -> str:
    """Return the name of a hook on modules or gradients that is no library's, '' if there is none.

    Those of libraries (PEFT's, say) are taken to keep nothing for the loop.
    """
    of_gradients = ("_backward_hooks", "_post_accumulate_grad_hooks")
    on_parameters = [getattr(each, name, None) or {} for each in model.parameters() for name in of_gradients]
    for hook in of_the_loop([*hooks_of(model), *on_parameters]):
        if not is_library(home_of(hook).rstrip(".")):
            return str(getattr(hook, "__qualname__", type(hook).__qualname__))
    return ""


def within(values: Iterable[Any], most: int | None = None) -> tuple[Contents, list[Tensor], bool]:
    """Return the containers within values with their entries, the tensors, and whether these are all.

    Args:
        most: entries that are looked at; default `MOST_ENTRIES`.
    """
    left = MOST_ENTRIES if most is None else most
    contents: Contents = []
    held, seen = list[Tensor](), set[int]()
    waiting = deque(values)
    while waiting:
        value = waiting.popleft()
        if not isinstance(value, (*_CONTAINERS, tuple, Tensor)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            held.append(value)
            continue
        left -= len(value)
        if left < 0:
            return contents, held, False
        if not isinstance(value, tuple):
            contents.append((value, _entries(value)))
        if not isinstance(value, set):
            inner = value.values() if isinstance(value, dict) else value
            waiting.extend(each for each in inner if isinstance(each, (*_CONTAINERS, tuple, Tensor)))
    return contents, held, True


def refill(contents: Contents) -> None:
    """Give containers the entries again that they had, where these are others now."""
    for container, entries in contents:
        if _are_same(_entries(container), entries):
            continue
        container.clear()
        if isinstance(container, dict):
            for key, value in zip(entries[::2], entries[1::2], strict=True):  # not by update(): a Counter's adds up
                container[key] = value
        else:
            (container.update if isinstance(container, set) else container.extend)(entries)


def _reaches(value: Any, containers: set[int]) -> bool:
    return any(id(each) in containers for each, _ in within([value])[0])


def _entries(container: Any) -> list[Any]:
    return list(itertools.chain.from_iterable(container.items())) if isinstance(container, dict) else list(container)


def _are_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


# -- tensors -----------------------------------------------------------------------------------------------------------


def _may_be_written(tensor: Tensor) -> bool:
    """Return whether a tensor may be state: not a result that has a graph, or one that an optimizer moves."""
    if type(tensor) not in _PLAIN or tensor.requires_grad or tensor.is_inference():
        return False
    return has_plain_memory(tensor) and 0 not in tensor.stride()  # an expanded one can't be written to


def has_plain_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's elements lie in memory by its strides, to be read and written."""
    is_plain = type(tensor) in _PLAIN and tensor.layout == torch.strided and not tensor.is_nested
    return is_plain and not (tensor.is_quantized or tensor.is_meta)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _is_other(tensor: Tensor, value: Tensor) -> bool:
    if shape_of(tensor) != shape_of(value) or not has_plain_memory(tensor):
        return True
    try:
        return not torch.equal(tensor, value)
    except ours(RuntimeError):  # of 8-bit floats, say, torch can't tell
        return True


def _write(tensor: Tensor, value: Tensor) -> None:
    # By `data`: the graphs of calls before, which may have saved them, go by their versions.
    if shape_of(tensor) == shape_of(value):
        tensor.data.copy_(value)
    else:  # it has grown
        tensor.data = value.clone()


# -- generators --------------------------------------------------------------------------------------------------------


def restore_generators(states: Iterable[tuple[Source, Any]]) -> None:
    """Put generators back into the states that they were in."""
    for source, state in states:
        if not source.is_shared or source.read() != state:
            source.write(state)


def devices_of(model: nn.Module, device: torch.device, *given: Any) -> list[torch.device]:
    """Return the devices that a call may draw on: those of parameters, buffers and the tensors that it is given."""
    places = [device, *(tensor.device for tensor in (*model.parameters(), *model.buffers(), *tensors(given)))]
    return list(dict.fromkeys(place for place in places if place.type not in _WITHOUT_STATE))


def _of_devices(devices: Iterable[torch.device]) -> list[Source]:
    sources = []
    for device in devices:
        module: Any = torch.get_device_module(device.type)
        if hasattr(module, "get_rng_state"):
            at = () if device.type == "mps" else (device,)  # there is one of these only
            write = partial(lambda put, at, state: put(state, *at), module.set_rng_state, at)
            sources.append(Source(str(device), partial(module.get_rng_state, *at), write))
    return sources


def own_generators(model: nn.Module) -> list[Source]:
    """Return the random generators that stand in attributes of modules, private ones too, also in lists and dicts."""
    values = [value for module in model.modules() for each in vars(module).values() for value in _items(each)]
    return generators_in({id(value): value for value in values}.values())


def generators_in(values: Iterable[Any]) -> list[Source]:
    """Return those of some values that are random generators."""
    numpy = sys.modules.get("numpy.random")
    kinds = (torch.Generator, random.Random, *(() if numpy is None else (numpy.Generator, numpy.RandomState)))
    return [_source(each) for each in values if isinstance(each, kinds) and not isinstance(each, random.SystemRandom)]


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)


def _source(generator: Any) -> Source:
    name = str(id(generator))
    if isinstance(generator, torch.Generator):
        return Source(name, generator.get_state, generator.set_state)
    if isinstance(generator, random.Random):
        return Source(name, generator.getstate, generator.setstate)
    if hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        return Source(name, lambda: bits.state, partial(setattr, bits, "state"))
    return Source(name, partial(generator.get_state, legacy=False), generator.set_state)


# -- parameters that calls write to ------------------------------------------------------------------------------------


def without_gradient(model: nn.Module) -> list[Tensor]:
    """Return the parameters that no gradient has come to, as none does to a codebook that calls write to.

    The smallest first, and as many as copies are made of: most of them may be a frozen model.

    Args:
        model: after a backward pass, before its gradients are cleared.
    """
    small, bytes_left = list[Tensor](), MOST_BYTES
    plain = (p for p in model.parameters() if p.grad is None and has_plain_memory(p))
    for parameter in sorted(plain, key=lambda each: each.nbytes):
        bytes_left -= parameter.nbytes
        if bytes_left < 0:
            break
        small.append(parameter)
    return small


def sums_of_bits(parameters: list[nn.Parameter]) -> list[int]:
    """Return a number for each parameter, another one once it is written to, also past the version counter."""
    sums = [_sum_of_bits(parameter) for parameter in parameters]
    return torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []


def _sum_of_bits(parameter: Tensor) -> Tensor:
    if not has_plain_memory(parameter):
        return torch.zeros((), dtype=torch.int64)
    data = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
    return data.view(_INTEGERS[data.element_size()]).sum(dtype=torch.int64)
