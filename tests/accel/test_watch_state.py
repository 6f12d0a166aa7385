"""A call that is made again begins from the state that it found: random numbers, attributes, also in a recursion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.guard import watch as watching
from accel.run.gate import Call
from tests.accel.test_watch_outputs import broken


def gives_nan(call: Call) -> Call:
    """Spoil the input, so that all that the model computes from it is spoiled, too."""
    return lambda x: call(x * float("nan"))


class Stateful(nn.Module):
    """A recurrent model that keeps its own state, as an attribute, in a tuple, or as a buffer that is replaced."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(2, 2)
        self.state: Any = None
        if kind == "buffer":
            del self.state
            self.register_buffer("state", torch.zeros(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        before = self.state[0] if isinstance(self.state, tuple) else self.state
        h = torch.tanh(self.layer(x) + (0.0 if before is None else before))
        self.state = (h.detach(),) if self.kind == "tuple" else h.detach()
        return h


@pytest.mark.parametrize("kind", ["tensor", "tuple", "buffer"])
def test_a_state_that_a_bad_call_has_replaced_is_put_back(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Stateful(kind), torch.ones(1, 2)
    gate, watch, trips = broken(model, gives_nan)
    for _ in range(3):
        watch.learn(gate.plain(x))
    kept = model.state
    expected = gate.plain(x)
    model.state = kept
    outputs = watch.call(gate.call, (x,), {})
    assert trips == ["its output is not finite"]
    assert torch.equal(outputs, expected)


class Tree(nn.Module):
    """Calls itself for the child, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        self.count += 1
        below = self(x, depth - 1) if depth else 0.0
        return self.layer(x) + below + self.count  # type: ignore[no-any-return]


def test_the_outermost_call_of_a_recursion_is_made_again_plainly_with_its_own_buffers() -> None:
    def spoils_the_outermost(call: Call) -> Call:
        return lambda x, depth=0: call(x, depth) * (float("nan") if depth == 2 else 1.0)

    class Watcher:
        def around(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return watch.call(call, args, kwargs)

    torch.manual_seed(0)
    model, x = Tree(), torch.ones(1, 2)
    gate, watch, trips = broken(model, spoils_the_outermost)
    for _ in range(3):
        watch.learn(gate.plain(x))
    model.count.zero_()
    gate.remove("broken")
    expected = model(x, 2)
    model.count.zero_()
    gate.add("broken", spoils_the_outermost)
    gate.watch(Watcher())
    outputs = model(x, 2)
    gate.close()
    assert trips == ["its output is not finite"]
    assert (torch.equal(outputs, expected), model.count.item()) == (True, 3)


def test_a_call_made_again_draws_the_same_numbers_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count stands for the state of a GPU's generator."""
    gpu, drawn = torch.device("cuda", 0), [7]
    monkeypatch.setattr(watching, "_gpus_of", lambda model: [gpu])
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor(drawn[0]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: drawn.__setitem__(0, int(state)))

    class Draws(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            drawn[0] += 1
            return super().forward(x) + drawn[0]

    gate, watch, trips = broken(Draws(2, 2), gives_nan)
    watch.call(gate.call, (torch.ones(1, 2),), {})
    assert (trips, drawn) == (["its output is not finite"], [8])
