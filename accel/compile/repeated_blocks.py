"""Find the blocks that a model repeats: those that one compiled graph can serve."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from accel.run.gate import hooks_of

_LEAST_SHARE = 0.5
"""Share of the model's leaf modules that repeated blocks must hold: compiling less could gain little."""
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
    """Yield the modules in lists, but for lists without a forward of their own and for single layers."""
    for module in model.modules():
        if _is_list(module):
            yield from (
                block
                for block in module.children()
                if not isinstance(block, nn.ModuleList | nn.ModuleDict) and leaves(block) > 1
            )


def _signature(block: nn.Module) -> Hashable | None:
    """Return what two blocks must share to run the same graph; None if this one is left as it is."""
    return None if any(map(len, hooks_of(block))) or _has_own_forward(block) else _alike(block)


def _has_own_forward(block: nn.Module) -> bool:
    return any("forward" in vars(module) for module in block.modules())


def _alike(block: nn.Module) -> Hashable:
    modules = tuple((name, type(module), _numbers(module)) for name, module in block.named_modules())
    parameters = tuple((name, *_layout(p)) for name, p in block.named_parameters(remove_duplicate=False))
    buffers = tuple((name, *_layout(b)) for name, b in block.named_buffers(remove_duplicate=False))
    return modules, parameters, buffers


def _numbers(module: nn.Module) -> Hashable:
    """Return the plain attributes that a forward may depend on."""
    plain = {
        name: value for name, value in vars(module).items() if not name.startswith("_") and not _INDEX.search(name)
    }
    return tuple(sorted((name, repr(value)) for name, value in plain.items() if _is_plain(value)))


def _is_plain(value: Any) -> bool:
    return isinstance(value, _SCALARS) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    return tuple(tensor.shape), strides, tensor.dtype, tensor.device, tensor.requires_grad
