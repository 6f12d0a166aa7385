"""How a model of the suite is trained: plainly, with accel, tuned by hand, and by rivals.

A variant takes a workload and returns the one that its user would train. Nothing but torch is imported before a
variant is prepared; `why_not` says where a rival isn't installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.suite import Workload
from benchmarks.variants import rivals
from benchmarks.variants.recipes import PUBLISHED, RECIPES, STRATEGIES, by_hand

BY_HAND = "by hand: "
"""How the names of variants begin that are tuned by hand; the settings follow."""
PLANNED = "planned: "
RIVALS = ("autotune", "accelerate", "fabric", "compile")
"""What accel is compared with as the best of them."""


class Variant(NamedTuple):
    """One way to train a model."""

    prepare: Callable[[Workload, str], Workload]
    """Takes the workload and the name of its model."""
    allow: str = ""
    """Of `accel.optimize`; '' without accel."""
    caches: bool = False
    """Whether a second run finds on disk what the first one made."""
    why_not: Callable[[], str] = lambda: ""
    """Returns why it can't be had here, '' if it can."""


def optimized(workload: Workload, **options: Any) -> Workload:
    """Return the workload after the one line, with these options of `accel.optimize`."""
    import accel

    model, loader, optimizer = accel.optimize(workload.model, workload.loader, workload.optimizer, **options)
    return workload._replace(model=model, loader=loader, optimizer=optimizer)


def planned(workload: Workload, strategies: Mapping[str, Any]) -> Workload:
    """Return the workload with strategies taken over from a plan, without a search."""
    from accel import Plan
    from accel.search.plan import fingerprint

    plan = Plan(fingerprint=fingerprint(workload.model), model=type(workload.model).__name__, strategies={**strategies})
    return optimized(workload, plan=plan)


def _planned(strategies: Callable[[str], Mapping[str, Any]]) -> Variant:
    return Variant(lambda workload, model: planned(workload, strategies(model)), allow="reordered")


def _first_recipe(model: str) -> Mapping[str, Any]:
    return dict(STRATEGIES[setting] for setting in RECIPES[model][0])


def _accel(allow: str) -> Variant:
    return Variant(lambda workload, _: optimized(workload, allow=allow), allow=allow, caches=True)


def _rival(prepare: Callable[[Workload], Workload], module: str, caches: bool = False) -> Variant:
    return Variant(lambda workload, _: prepare(workload), caches=caches, why_not=lambda: rivals.why_not(module))


def _by_hand(settings: Sequence[str]) -> Variant:
    return Variant(lambda workload, _: by_hand(workload, settings), caches="compile" in settings)


VARIANTS: dict[str, Variant] = {
    "plain": Variant(lambda workload, _: workload),
    "compile": _by_hand(["compile"]),
    "published": _by_hand(PUBLISHED),
    **{allow: _accel(allow) for allow in ("exact", "reordered", "reduced", "lossy")},
    "planned": _planned(_first_recipe),
    "autotune": _rival(rivals.autotune, "pytorch_autotune", caches=True),
    "accelerate": _rival(rivals.accelerate, "accelerate"),
    "fabric": _rival(rivals.fabric, "lightning"),
}


def variant(name: str) -> Variant:
    """Return a variant by its name, also one that is tuned by hand: "by hand: allocator, fused"; or one that is planned
    with strategies and their settings: "planned: autocast_bf16, torch_compile=blocks".

    Raises:
        KeyError: if there is none of that name.
    """
    if name.startswith(PLANNED):
        parts = [each.partition("=") for each in name.removeprefix(PLANNED).split(", ")]
        return _planned(lambda _: {strategy: setting or None for strategy, _, setting in parts})
    return _by_hand(name.removeprefix(BY_HAND).split(", ")) if name.startswith(BY_HAND) else VARIANTS[name]


def hand_tuned(model: str) -> list[str]:
    """Return the names of the variants that are tuned by hand for a model."""
    return [BY_HAND + ", ".join(settings) for settings in RECIPES[model]]
