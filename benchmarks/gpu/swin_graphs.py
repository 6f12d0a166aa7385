"""Swin-T of timm as in benchmarks/swin_training.py, with whole steps as CUDA graphs: fused, compiled, and both.

    python -m benchmarks.gpu.sections swin_graphs FILE

In turns with the compiled model as it is, and with graphs of the compiler's own ("reduce-overhead"). Fused and
compiled, the device is done sooner than the host has launched a step: only in a graph it shows what the op gives.
Nothing is timed whose first losses are not those of eager steps within a percent.
"""

from __future__ import annotations

import torch

from accel.graphs import capture
from benchmarks import spread
from benchmarks.gpu.rows import Figures
from benchmarks.spread import extremes
from benchmarks.swin_training import BATCH, Trainer, in_turns, model

STEPS = 8
"""Whose losses are compared: the first are ordinary calls, the last replays."""
TOLERANCE = 0.01
"""Of a loss: bfloat16, added up in another order by each."""
COMPILED, OWN_GRAPHS = "compile", "reduce-overhead"
CAPTURED = {"fused, captured": "fused", "compile, captured": "compile", "both, captured": "both"}
"""Way → kind of model."""


def trainer(way: str) -> Trainer:
    """Return what trains in a way: one of CAPTURED, COMPILED, OWN_GRAPHS or "eager"."""
    kind = CAPTURED.get(way, way)
    made = Trainer(model("eager" if kind == OWN_GRAPHS else kind), BATCH, 224)
    if kind == OWN_GRAPHS:
        made.model.compile(dynamic=False, fullgraph=True, mode=OWN_GRAPHS)
    if way in CAPTURED:
        captured(made)
    return made


def captured(made: Trainer, strict: bool = True) -> None:
    """Have a trainer capture its step; with `strict` what can't be captured is an error."""
    made.optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-4, fused=True, capturable=made.device == "cuda")
    step = capture(made.train_on, modules=[made.model], optimizers=[made.optimizer], strict=strict)
    made.train = step


def everything() -> Figures:
    """Train; yield each figure as it is found."""
    expected = trainer("eager").losses(STEPS)
    trainers: dict[str, Trainer] = {}
    failed: dict[str, str] = {}
    for way in (COMPILED, "both, captured", "compile, captured", OWN_GRAPHS, "fused, captured"):
        try:
            one = trainer(way)
            losses = one.losses(STEPS)
            apart = max(abs(loss - other) / other for loss, other in zip(losses, expected, strict=True))
            if not apart <= TOLERANCE:
                raise RuntimeError(f"losses are {apart:.1%} apart from those of eager steps")
            trainers[way] = one
        except Exception as error:  # one way that fails is a result, the others are timed
            failed[way] = f"{type(error).__name__}: {str(error)[:300]}"
            yield "failed_ways", failed
            continue
        times = in_turns(trainers)
        yield "step_ms", {name: list(extremes(values)) for name, values in times.items()}
        yield "speedup", speedups(times)


def speedups(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return how many times as fast as each of torch's own ways each captured one is: median, least, most."""
    rivals = [name for name in (COMPILED, OWN_GRAPHS) if name in times]
    return {
        f"{name} over {rival}": list(extremes(spread.ratios(times[rival], values)))
        for name, values in times.items()
        if name not in rivals
        for rival in rivals
    }
