"""Whether the loop uses what was passed to `accel.optimize`; the user is warned if it doesn't."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from accel.profiler.loop import callslot
from accel.run.context import Run

# After so many updates without a batch, the loop is assumed to iterate another loader.
_UPDATES_WITHOUT_BATCH = 3
# After so many requests of another thread than the one that trains, the loop is taken to fetch there.
_REQUESTS_ELSEWHERE = 8
# After so many batches without a call of the model or a step of its optimizer, while something else is trained, the
# loop is assumed to train another model.
_UNTRAINED_BATCHES = 32


class Usage:
    """Record what the loop uses.

    Args:
        run: the user's objects.
        say: prints one line for the user.
    """

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._model = type(run.model).__name__
        self.iterated = False
        """The loop has iterated the loader."""
        self.called = False
        """The loop has called the model to train it."""
        self._batches = 0
        """Batches that came before the first call of the model and the first step."""
        self._trained_elsewhere_at = 0
        """Of these, the one at which something was trained."""
        self._updates = self._requests_elsewhere = 0
        self._submodule_calls: SubmoduleCalls | None = None

    # -- the loader ----------------------------------------------------------------------------------------------------

    def updated_without_batch(self) -> None:
        """The model was updated, and the loader has not been iterated."""
        self._updates += 1
        if self._updates == _UPDATES_WITHOUT_BATCH:
            self._say(
                f"{self._model} was updated {self._updates} times without a batch from the loader that "
                "accel.optimize returned; iterate that one, or nothing is made faster"
            )

    def requested_elsewhere(self) -> None:
        """A batch is requested by another thread than the one that trained last: perhaps it trains from now on."""
        self._requests_elsewhere += 1
        if self._requests_elsewhere == _REQUESTS_ELSEWHERE:
            self._say(
                f"the batches of {self._model} are taken by another thread than the one that trains it, so that its "
                "steps can't be told apart and nothing more is tried; iterate the loader in the loop itself"
            )

    # -- the model -----------------------------------------------------------------------------------------------------

    def untrained_batch(self) -> bool:
        """Count a batch before any training of the model; return whether it is time to listen to backward passes.

        A loop that trains nothing yet may be gathering statistics; only the end of the run shows that it did no more.
        """
        self._batches += 1
        if self._trained_elsewhere_at and self._batches - self._trained_elsewhere_at == _UNTRAINED_BATCHES - 1:
            self._say(self.untrained)
        return self._batches == _UNTRAINED_BATCHES

    def trained_elsewhere(self) -> None:
        """Something was trained: this model or another one, which the optimizer's next step decides."""
        self._trained_elsewhere_at = self._trained_elsewhere_at or self._batches

    @property
    def untrained(self) -> str:
        """A line for the user if the loop has gone through many batches and never trained the model, else ''."""
        if self.called or self._batches < _UNTRAINED_BATCHES:
            return ""
        return (
            f"{self._batches} batches were fetched without a training call of {self._model} or a "
            "step of its optimizer; pass the model that the loop trains"
        )

    # -- its submodules ------------------------------------------------------------------------------------------------

    def watch_submodules(self) -> None:
        """If the loop has not called the model so far, record which submodules it calls instead."""
        if not self.called:
            self._submodule_calls = SubmoduleCalls(self._run.model)

    def report_submodules(self) -> None:
        """Record and print which submodules are called instead of the model."""
        observed = self._run.observed
        if self._submodule_calls is not None:
            called, self._submodule_calls = self._submodule_calls.close(), None
            if not self.called:
                observed.uncalled = advice(self._run.model, called)
                self._say(f"{observed.uncalled}. Until then only its loader and optimizer are considered")
        elif self.called:
            observed.uncalled = ""

    def close(self) -> None:
        """Restore the submodules."""
        if self._submodule_calls is not None:
            self._submodule_calls.close()


class SubmoduleCalls:
    """Record which submodules of `model` the loop itself calls, for some steps: `self.net(x)` in a training step.

    Args:
        model: a module; a compiled submodule is recorded as a whole.
    """

    def __init__(self, model: nn.Module) -> None:
        self._called: dict[str, None] = {}
        self._original_slots: list[tuple[nn.Module, dict[str, Any]]] = []
        self._open("", model)

    def _open(self, prefix: str, module: nn.Module) -> None:
        for name, part in module.named_children():
            path = f"{prefix}{name}"
            slot = callslot.contents(part)
            self._original_slots.append((part, slot))
            inner = slot.get(callslot.NAME)
            call = part._call_impl if inner is None else inner
            callslot.fill(part, callslot.SlotCall(partial(self._note, path, call)))
            if inner is None and not hasattr(part, "_orig_mod"):
                self._open(f"{path}.", part)

    def _note(self, path: str, call: callslot.Call, *args: Any, **kwargs: Any) -> Any:
        self._called.setdefault(path)
        return call(*args, **kwargs)

    def close(self) -> list[str]:
        """Restore the submodules, and return the paths of those that the loop itself called."""
        for part, slot in reversed(self._original_slots):
            callslot.restore(part, slot)
        self._original_slots = []
        outer = [path for path in self._called if not any(path.startswith(f"{other}.") for other in self._called)]
        return outer


def advice(model: nn.Module, parts: list[str]) -> str:
    """Return what to pass in place of a model that is never called itself."""
    name = type(model).__name__
    if not parts:
        return (
            f"the training steps call neither {name} nor a part of it, or call it within a function that is compiled; "
            "pass the module that they call"
        )
    if len(parts) == 1:
        return f"the training steps call {name}'s {parts[0]}, never {name} itself; pass model.{parts[0]}"
    names = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) <= 4 else f"{', '.join(parts[:3])} and others"
    return (
        f"the training steps call {name}'s {names}, never {name} itself; pass one of them (model.{parts[0]}), or call "
        "them in its forward, and call the model"
    )
