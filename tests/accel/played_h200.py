"""Models on a played H200: what their steps take under a plan, from what the records and docs/gpu.md say of the parts.

A step takes what the device does or what the host launches, whichever is longer, and what waits in between. Parts that
were not recorded by themselves are estimates, marked so; the tests compare with a hand plan on the same parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from accel.profiler.bottleneck import Bottleneck
from accel.search.actions import Action, Result
from accel.search.state import Candidate
from accel.strategies import Exactness
from tests.accel.simulation import Machine, candidate


@dataclass(frozen=True, kw_only=True)
class Played:
    """The parts of a step, ms."""

    products: float
    """On the device, in fp32."""
    rest: float
    """What is not products on the device: element-wise, norms."""
    optimizer: float
    launches: float
    """What the host takes to launch a step."""
    copies: float = 0.0
    """Batches copied while the device waits."""
    faster: float = 5.5
    """Products in bfloat16, with TF32 in place of it: 3.4."""
    convolves: bool = False
    compiling_s: float = 30.0

    def ms(self, plan: dict[str, Any]) -> float:
        """Return a step under a plan."""
        products, rest, launches = self.products, self.rest, self.launches
        if "autocast_bf16" in plan:
            products, rest = products / self.faster, rest / 1.6
        if "channels_last" in plan:
            products *= (1 / 1.25) if "autocast_bf16" in plan else 1.02
        if "torch_compile" in plan:
            rest, launches = rest / 2.2, launches / 1.5
        if "cuda_graphs" in plan:
            launches, rest = launches / 8, rest + 0.2  # copies in and out of the graph
        optimizer = self.optimizer / 3 if "fused_optimizer" in plan else self.optimizer
        return max(products + rest + optimizer, launches) + self.copies * (0.4 if "pin_memory" in plan else 1.0)


MODELS = {
    # 279 → 57.5 ms in bfloat16, 1.95 ms saved by the fused optimizer (searches-h200: day_after)
    "bert": Played(products=245, rest=31, optimizer=3.0, launches=25, compiling_s=14),
    # 268 ms plain (searches-h200), parts as BERT's
    "gpt": Played(products=228, rest=37, optimizer=3.0, launches=22, compiling_s=14),
    # 37.9 ms plain, 1.11x by pinning (searches-h200); its launches take 26 ms, its copies 10 (docs/gpu.md)
    "resnet": Played(products=15, rest=11, optimizer=0.8, launches=26, copies=6.0, faster=3, convolves=True),
    # 79 ms plain (searches-h200); 57.7 eager in float16, 30 compiled, 19.4 captured (gpu-h200: training, swin_graphs)
    "swin": Played(products=40, rest=37, optimizer=1.5, launches=31, compiling_s=60),
    # 7.73 ms eager, 1.24 captured (gpu-h200: graphs, transformer)
    "transformer": Played(products=0.7, rest=0.5, optimizer=0.1, launches=7.7, faster=1.2),
}


class H200(Machine):
    """Plays one of the models; a check takes its replays, and the first with a compiler in it the compilation."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(**{"noise": 0.01, **options})
        self.model, self.parts = model, MODELS[model]
        self.compiled = False
        self.seconds_of_run, self.now_s = 0.0, self.parts.ms({}) / 1e3

    def seconds(self, plan: dict[str, Any]) -> float:
        return self.parts.ms(plan) / 1e3 * math.exp(self.random.gauss(0, self.noise))

    def answer(self, action: Action) -> Result:
        result = super().answer(action)
        for measured in result.measurements:
            parts = {"data": 0.001, "copy": self.parts.copies / 1e3, "optimizer": self.parts.optimizer / 1e3}
            measured.phases = {**parts, "forward": max(1e-4, measured.seconds - sum(parts.values()))}
        if action.check is not None:
            new = set(action.check) - set(action.plan)
            of_model = new - {"pin_memory", "fused_optimizer"}
            replays = 3 if of_model else 0.5 if "fused_optimizer" in new else 0.0
            took_s = action.steps * replays * self.seconds({})
            if "torch_compile" in new and not self.compiled:
                self.compiled = True
                took_s += self.parts.compiling_s
            result.aside_s += took_s
            if result.finding is not None:
                result.finding.seconds = took_s / action.steps
        self.seconds_of_run += result.elapsed_s + result.aside_s
        self.now_s = self.seconds(action.plan)
        return result

    def steps_in(self, seconds: float) -> float:
        """Return how many steps a run of so many seconds has, with those that are still to come as they are now."""
        return self.step + max(0.0, seconds - self.seconds_of_run) / self.now_s


COMPUTE, LAUNCH = frozenset({Bottleneck.COMPUTE}), frozenset({Bottleneck.LAUNCH})


def offered(model: str, *, without: tuple[str, ...] = ()) -> list[Candidate]:
    """Return the candidates that apply to a model under allow="reduced", in the order of the registry."""
    parts = MODELS[model]
    reordered, exact = Exactness.REORDERED, Exactness.EXACT
    all_of_them = [
        candidate(
            "torch_compile",
            treats=frozenset({Bottleneck.LAUNCH, Bottleneck.COMPUTE}),
            exactness=reordered,
            cost_s=parts.compiling_s,
            settle_steps=2,
            is_made_for_calls=True,
        ),
        candidate("channels_last", treats=COMPUTE, exactness=reordered),
        candidate("autocast_bf16", treats=COMPUTE, exactness=Exactness.REDUCED),
        candidate("cuda_graphs", treats=LAUNCH, exactness=reordered),
        candidate(
            "fused_optimizer",
            treats=frozenset({Bottleneck.OPTIMIZER}),
            exactness=reordered,
            touches=frozenset({"optimizer"}),
        ),
        candidate("pin_memory", treats=frozenset({Bottleneck.TRANSFER}), exactness=exact, touches=frozenset({"input"})),
    ]
    left = without if parts.convolves else (*without, "channels_last")
    return [each for each in all_of_them if each.name not in left]
