"""What a search came to, in words."""

from __future__ import annotations

from accel.comm.cost_model.bucket_size import Size
from accel.comm.cost_model.choice import WORTH, describe
from accel.comm.cost_model.prediction import Choice
from accel.comm.engine.plan import Plan


def sentence(choice: Choice, chosen: Plan) -> str:
    """Return the outcome in a sentence; `chosen` is () where gradients were left as they are."""
    plain_ms = choice.plain_s * 1e3
    size = better_size(choice)
    if chosen or size is not None:
        scheme = describe(chosen) if chosen else "DDP's own all-reduce"
        step_s = choice.measured[chosen] if size is None else size.step_s
        where = "" if size is None else f" in buckets of {size.cap_mb:g} MB"
        return f"gradients: {scheme}{where}, a step takes {step_s * 1e3:.1f} ms in place of {plain_ms:.1f} ms"
    left = "gradients: left as they are, nothing helps on this network"
    return f"{left}: a step takes {plain_ms:.1f} ms, {_tried(choice)}"


def _tried(choice: Choice) -> str:
    tried = [f"{describe(plan)} took {step_s * 1e3:.1f} ms" for plan, step_s in choice.measured.items() if any(plan)]
    if tried:
        return ", ".join(tried)
    best = next((option for option in choice.options if any(option.plan)), None)
    if best is None:
        return "no scheme fits these gradients"
    return f"the best, {best}, is predicted to take {best.step_s * 1e3:.1f} ms"


def better_size(choice: Choice) -> Size | None:
    """Return the size of buckets that was measured to be better than DDP's, and its step; None if none stayed."""
    if not choice.sized:
        return None
    (cap_mb, new_s), (_, before_s) = choice.sized.items()
    return Size(cap_mb, new_s) if new_s < (1 - WORTH) * before_s else None


def explanation(verdict: str, choice: Choice, chosen: Plan | None) -> str:
    """Return a verdict and each candidate with its steps, predicted and measured; `chosen` is None until it is over."""
    lines = [verdict, "", choice.table(chosen)]
    if choice.sized:
        tried = ", ".join(f"{cap:g} MB {step_s * 1e3:.1f} ms" for cap, step_s in sorted(choice.sized.items()))
        lines += ["", f"measured by the size of buckets: {tried}"]
    elif chosen is not None and (size := choice.sizes.get(chosen[0] if chosen else None)):
        lines += ["", f"DistributedDataParallel(bucket_cap_mb={size.cap_mb:g}) is predicted to be faster"]
    return "\n".join(lines)
