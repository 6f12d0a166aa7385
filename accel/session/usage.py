"""Whether the loop uses what was passed to `accel.optimize`; the user is warned if it doesn't."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from accel.run.context import Run

# After so many updates without a batch, the loop is assumed to iterate another loader.
_UPDATES_WITHOUT_BATCH = 3
# After so many requests of another thread than the one that trains, the loop is taken to fetch there.
_REQUESTS_ELSEWHERE = 8
# After so many backward passes without a call of the model or a step of its optimizer, the loop is assumed to train
# another model. A pass over the loader that trains nothing, to gather statistics say, counts nothing.
_PASSES_ELSEWHERE = 32


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
        self._updates = self._requests_elsewhere = self._passes_elsewhere = 0

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

    def trained_elsewhere(self) -> None:
        """A backward pass has run, and neither a training call of the model before it nor a step of its optimizer."""
        self._passes_elsewhere += 1
        if self._passes_elsewhere == _PASSES_ELSEWHERE:
            self._say(
                f"{self._passes_elsewhere} backward passes ran without a training call of {self._model} or a step of "
                "its optimizer; pass the model that the loop trains"
            )

    def tell_uncalled(self) -> None:
        """Say once, after the first steps, what to pass in place of a model that the loop has not called so far."""
        observed = self._run.observed
        if self.called:
            observed.uncalled = ""
        elif not observed.uncalled:
            observed.uncalled = _advice(self._run.model)
            self._say(f"{observed.uncalled}. Until then only its loader and optimizer are considered")


def _advice(model: nn.Module) -> str:
    parts = {name: len(list(part.parameters())) for name, part in model.named_children()}
    such = f", such as model.{max(parts, key=lambda name: parts[name])}" if parts else ""
    return (
        f"the training steps never call {type(model).__name__} itself, or only within a function that is compiled; "
        f"pass the module that they call{such}"
    )
