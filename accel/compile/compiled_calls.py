"""Which calls of a model run compiled, and how often may be compiled for them.

    the usual call      compiled the first time
    any other kind      plainly until calls of that kind have taken twenty times as long as compiling did: a smaller
                        last batch is not compiled for, an evaluation only if there is much of it
    a varying batch     all sizes are one kind: torch compiles for the first, and for all once they vary
    hooks that are new  plainly: torch does not check whether modules have got hooks since; and what the loop's own
                        `saved_tensors_hooks` unpack for a backward pass may have strides that compiled code can't take

A kind is: shapes of the tensors, training or evaluation, with or without gradients. After `MOST` compilations all calls
run plainly, and `stopped` says why.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from accel.guard.alone import is_sharded, on_this_rank_alone
from accel.guard.faults import of_strategies
from accel.profiler.loop import backward, callslot
from accel.profiler.loop.module_hooks import hooks_of
from accel.profiler.trees import tensors
from accel.run.context import Shapes, shapes_of
from accel.run.gate import Call

Kind = tuple[Shapes | None, bool, bool]
"""Shapes unless they vary, with gradients, in training mode."""
MOST = 4
_MOST_OTHERS = 100
"""Calls in a row that find other parameters being trained, after which nothing runs compiled any more."""
_REQUIRES_GRAD = attrgetter("requires_grad")
_PATIENCE = 20.0
"""How many times as long as compiling the plain calls of another kind must have taken: the default budget's tenth, and
the backward half of a graph, which is compiled later, takes about as long again as the measured half."""
_MOST_RECENT = 256


class CompiledCalls:
    """Run a model's calls compiled: the whole model, or the blocks that it repeats.

    Args:
        groups: blocks that share a graph; [] compiles the whole model. Those of a sharded model are compiled within the
            hooks that gather their weights.
        usual: shapes of the tensors in the usual call; None if they vary.
        compiler: compiles a captured graph; a backend for `torch.compile`.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[list[nn.Module]],
        *,
        usual: Shapes | None,
        compiler: Callable[[fx.GraphModule, Any], Callable[..., Any]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model, self._groups, self._clock = model, groups, clock
        self._are_sharded = is_sharded(model)
        self.usual = usual
        self._compiler = compiler
        self._backend = self._counted  # kept, because torch tells backends apart by identity
        self._graphs = 0
        self.compilations = 0
        self.seconds = 0.0
        self.stopped = ""
        self._kinds: set[Kind] = set()
        self._plain_s: dict[Kind, float] = {}
        self._is_compiled = self._has_gradients = False
        self._is_left = False
        """What is called next is a call along the plain path."""
        self._depth = self._others = 0
        """Calls of the model that are under way, and how many in a row have found other parameters being trained."""
        self._recent: dict[Shapes, bool] = {}
        """Shapes that blocks were given in calls with gradients → whether they ran compiled.

        A backward pass in which they are called again (checkpointing) must find the same, also after other calls.
        """
        self._hooks: list[dict[Any, Any]] = []
        self._hook_keys: list[tuple[int, ...]] = []
        self._parameters: list[nn.Parameter] = []
        self._trained: list[bool] = []
        """Which of them required gradients when it was compiled."""
        self._frames: list[Any] = []
        self._whole: Call | None = None
        self._block_calls: list[Call] = []
        self._slots: list[tuple[nn.Module, dict[str, Any]]] = []

    def wrap(self, call: Call) -> Call:
        """Return the model's call with the compiled parts in it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run(call, args, kwargs)

        return run

    def put_on(self) -> None:
        """Put the compiled calls of blocks into their slots, which act in the model's call, and beside it as there."""
        if not self._hooks:
            self._parameters = list(self._model.parameters())
            self._hooks = hooks_of(self._model)
            self._hook_keys = list(map(tuple, self._hooks))
        if self._slots:
            return
        if not self._block_calls:
            self._block_calls = [self._compile(_block_frame(are_sharded=self._are_sharded)) for _ in self._groups]
        for group, compiled in zip(self._groups, self._block_calls, strict=True):
            for block in group:
                self._slots.append((block, callslot.contents(block)))
                callslot.fill(block, callslot.SlotCall(self._block_call(compiled, block)))

    def take_off(self) -> None:
        """Leave the slots as they were."""
        for block, contents in self._slots:
            callslot.restore(block, contents)
        self._slots = []

    def leave(self) -> None:
        """Run plainly what is called next: a call along the plain path, with its backward pass."""
        self._is_compiled, self._has_gradients, self._is_left = False, torch.is_grad_enabled(), True

    def forget(self) -> None:
        """Take off, and let torch forget what it has compiled for it."""
        self.take_off()
        for frame in self._frames:
            torch._dynamo.reset_code(frame.__code__)  # type: ignore[attr-defined]
        self._frames, self._whole, self._block_calls = [], None, []

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = self._kind(args, kwargs)
        if not self._may_be_compiled(kind):
            began = self._clock()
            with _within(self, is_compiled=False):
                outputs = call(*args, **kwargs)
            self._plain_s[kind] = self._plain_s.get(kind, 0.0) + self._clock() - began
            return outputs
        graphs, began = self._graphs, self._clock()
        compiled = call if self._groups else self._whole_call(call)
        is_new = kind not in self._kinds or (self.usual is None and self.compilations == 1)
        with _unwarned() if is_new else contextlib.nullcontext(), _within(self, is_compiled=True):
            outputs = compiled(*args, **kwargs)
        if not self._kinds:
            self._trained = _trained(self._parameters)
        self._kinds.add(kind)
        if self._graphs > graphs:
            self._note_compilation(self._clock() - began)
        return outputs

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
        shapes = None if self.usual is None else shapes_of(args, kwargs)
        return shapes, torch.is_grad_enabled(), self._model.training

    def _may_be_compiled(self, kind: Kind) -> bool:
        packs = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if self.stopped or packs or list(map(tuple, self._hooks)) != self._hook_keys:
            return False
        # Of these Dynamo's guards see nothing where they pass by the dictionary they stand in (torch 2.9 to 2.11).
        if self._kinds and _trained(self._parameters) != self._trained:
            self._others += 1
            if self._others >= _MOST_OTHERS:
                self.stopped = "the loop trains other parameters now than when it was compiled"
            return False
        self._others = 0
        shapes, has_gradients, _ = kind
        if kind in self._kinds or (has_gradients and shapes == self.usual):
            return True
        return self.compilations < MOST - 1 and self._plain_s.get(kind, 0.0) > _PATIENCE * max(self.seconds, 1.0)

    def _note_compilation(self, seconds: float) -> None:
        self.compilations += 1
        self.seconds += seconds
        if self.compilations >= MOST:
            what = "sizes" if self.usual is None else "values in the model's code"
            self.stopped = (
                f"it was compiled {self.compilations} times, and again for other {what}: from then on it ran plainly"
            )

    def _counted(self, graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self._graphs += 1
        return self._compiler(graph, inputs)

    def _compile(self, frame: Any) -> Call:
        self._frames.append(frame)
        # For one kind of calls each a graph of fixed sizes, which is faster than one for all.
        return torch.compile(frame, backend=self._backend, dynamic=None if self.usual is None else False)

    def _whole_call(self, call: Call) -> Call:
        if self._whole is None:
            self._whole = self._compile(_call_frame(call))
        return self._whole

    def _block_is_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if backward.is_running():
            return self._recent.get(shapes_of(args, kwargs), self._is_compiled)
        # By a method of the model: as within its call, since a backward pass may make both again.
        if not self._depth and not self._is_left:
            is_as_compiled = torch.is_grad_enabled() and list(map(tuple, self._hooks)) == self._hook_keys
            return is_as_compiled and self._recent.get(shapes_of(args, kwargs), False)
        if self._has_gradients:
            if len(self._recent) >= _MOST_RECENT:
                self._recent.pop(next(iter(self._recent)))
            shapes = shapes_of(args, kwargs)
            self._recent.pop(shapes, None)  # the latest comes last
            self._recent[shapes] = self._is_compiled
        return self._is_compiled

    def _block_call(self, compiled: Call, block: nn.Module) -> Call:
        if self._are_sharded:
            return _sharded_call(self, compiled, block)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._block_is_compiled(args, kwargs):
                return compiled(block, *args, **kwargs)
            return block._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        return run


@contextlib.contextmanager
def _within(calls: CompiledCalls, *, is_compiled: bool) -> Iterator[None]:
    """Have blocks run compiled, or plainly, for a call of the model."""
    before = calls._is_compiled, calls._has_gradients, calls._depth
    calls._is_left = False
    calls._is_compiled, calls._has_gradients, calls._depth = is_compiled, torch.is_grad_enabled(), calls._depth + 1
    try:
        yield
    finally:
        calls._is_compiled, calls._has_gradients, calls._depth = before


def _trained(parameters: list[nn.Parameter]) -> list[bool]:
    return list(map(_REQUIRES_GRAD, parameters))


def _sharded_call(calls: CompiledCalls, compiled: Call, block: nn.Module) -> Call:
    """Return the call of a block with its `forward` compiled, within the hooks by which FSDP2 gathers its weights.

    What fails in there is made again plainly on this rank, which so stays in step with the others.
    """
    plainly = partial(type(block).forward, block)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if calls.stopped:
            return plainly(*args, **kwargs)
        try:
            # With the backward half, whose failure in the backward pass nobody could make good.
            with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
                return compiled(block, *args, **kwargs)
        except of_strategies() as error:
            calls.stopped = f"it raised {type(error).__name__}: {error}"
        return plainly(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not calls._block_is_compiled(args, kwargs):
            return block._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        vars(block)["forward"] = forward
        try:
            return block._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            del vars(block)["forward"]

    return run


def compile_once(calls: CompiledCalls, model: nn.Module, call: Call, args: tuple[Any, ...], kwargs: Any) -> None:
    """Compile forward and backward, on this rank alone, in a process that then ends.

    Args:
        model: whose call it is: that of all that is compiled, or one around it.
    """
    calls.put_on()
    with on_this_rank_alone(model):
        outputs = [output for output in tensors(calls.wrap(call)(*args, **kwargs)) if output.requires_grad]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.autograd.grad(outputs, parameters, [torch.ones_like(o) for o in outputs], allow_unused=True)


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """Silence Dynamo's warnings, which the loop has not asked for, also where it turns warnings into errors."""
    handlers = logging.getLogger("torch._dynamo").handlers
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        warnings.filterwarnings("ignore", module=r"torch\._dynamo")
        for handler in handlers:
            handler.addFilter(_is_asked_for)
        try:
            yield
        finally:
            for handler in handlers:
                handler.removeFilter(_is_asked_for)


def _is_asked_for(record: logging.LogRecord) -> bool:
    """Tell whether a message is no mere warning, or TORCH_LOGS asks for such."""
    return record.levelno != logging.WARNING or "TORCH_LOGS" in os.environ


# torch does not compile frames of its own files, so nothing of a Sequential: each call has a frame of ours around it.
# It counts what it has compiled for a code object, and forgets it for one: so each has its own.


def _call_frame(call: Call) -> Any:
    def run_call(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return _with_own_code(run_call)


def _block_frame(*, are_sharded: bool) -> Any:
    def run_block(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return block._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    def run_forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return type(block).forward(block, *args, **kwargs)

    return _with_own_code(run_forward if are_sharded else run_block)


def _with_own_code(function: Any) -> Any:
    return FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


# -- the blocks that a model repeats -----------------------------------------------------------------------------------


_LEAST_SHARE = 0.5
_SCALARS = (bool, int, float, str, type(None), torch.dtype)
# Where a block stands in the model, which its forward hardly ever depends on. If it does, torch compiles once more.
_INDEX = re.compile(r"idx|index|layer_(number|id)|block_id|depth")


def repeated_blocks(model: nn.Module) -> list[list[nn.Module]]:
    """Return the groups of blocks with the same code on parameters of the same shapes; [] if they are too few.

    Blocks are modules in a `ModuleList`, `ModuleDict` or `Sequential`, the outermost that repeat. Two of a group have
    the same class, modules, numbers (such as a dropout's probability or a window's shift), parameters and buffers. A
    block with hooks or with a `forward` of its own belongs to none.

    Example:
        >>> [len(group) for group in repeated_blocks(nn.TransformerEncoder(layer, 6))]
        [6]
    """
    signatures = {id(block): _signature(block) for block in _listed(model)}
    counts = Counter(signature for signature in signatures.values() if signature is not None)
    groups: dict[Hashable, list[nn.Module]] = {}
    waiting: list[tuple[nn.Module, bool]] = [(model, False)]
    seen: set[int] = set()
    while waiting:
        module, is_listed = waiting.pop(0)
        if id(module) in seen:
            continue
        seen.add(id(module))
        signature = signatures.get(id(module)) if is_listed else None
        if signature is not None and counts[signature] > 1:
            groups.setdefault(signature, []).append(module)
        else:
            waiting += [(child, _is_list(module)) for child in module.children()]
    repeated = [group for group in groups.values() if len(group) > 1]
    inside = sum(leaves(block) for group in repeated for block in group)
    return repeated if inside >= _LEAST_SHARE * leaves(model) else []


def sharded_blocks(model: nn.Module) -> list[list[nn.Module]]:
    """Return the innermost modules that `fully_shard` was given, by what a graph can serve; other hooks leave one out.

    FSDP2 gathers their weights in hooks around their `forward`, which is what is compiled.
    """
    from torch.distributed.fsdp import FSDPModule

    groups: dict[Hashable, list[nn.Module]] = {}
    for block in model.modules():
        inner = [module for module in block.modules() if isinstance(module, FSDPModule)]
        others = [hook for hooks in hooks_of(block) for hook in hooks.values() if not _is_of_fsdp(hook)]
        if inner == [block] and not others and not _has_own_forward(block):
            groups.setdefault(_alike(block), []).append(block)
    return list(groups.values())


def _is_of_fsdp(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")


def leaves(module: nn.Module) -> int:
    """Return the number of modules that hold no others: how many layers there are to compile."""
    return sum(next(child.children(), None) is None for child in module.modules())


def layers(modules: Iterable[nn.Module]) -> tuple[int, int]:
    """Return how many different leaf modules these hold, by class, numbers and shapes, and how many repeat another."""
    kinds = [
        (type(leaf), _numbers(leaf), tuple(map(_layout, leaf.parameters())))
        for module in modules
        for leaf in module.modules()
        if next(leaf.children(), None) is None
    ]
    return len(set(kinds)), len(kinds) - len(set(kinds))


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _listed(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if _is_list(module):
            yield from (
                block
                for block in module.children()
                if not isinstance(block, nn.ModuleList | nn.ModuleDict) and leaves(block) > 1
            )


def _signature(block: nn.Module) -> Hashable | None:
    return None if any(map(len, hooks_of(block))) or _has_own_forward(block) else _alike(block)


def _has_own_forward(block: nn.Module) -> bool:
    return any("forward" in vars(module) for module in block.modules())


def _alike(block: nn.Module) -> Hashable:
    modules = tuple((name, type(module), _numbers(module)) for name, module in block.named_modules())
    parameters = tuple((name, *_layout(p)) for name, p in block.named_parameters(remove_duplicate=False))
    buffers = tuple((name, *_layout(b)) for name, b in block.named_buffers(remove_duplicate=False))
    return modules, parameters, buffers


def _numbers(module: nn.Module) -> Hashable:
    plain = {
        name: value for name, value in vars(module).items() if not name.startswith("_") and not _INDEX.search(name)
    }
    return tuple(sorted((name, repr(value)) for name, value in plain.items() if _is_plain(value)))


def _is_plain(value: Any) -> bool:
    return isinstance(value, _SCALARS) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    return tuple(tensor.shape), strides, tensor.dtype, tensor.device, tensor.requires_grad
