"""Whether the loop uses what was passed to `accel.optimize`; the user is warned if it doesn't."""

from __future__ import annotations

from collections.abc import Callable

from accel.run.context import Run
from accel.session import submodule_calls as parts
from accel.session.submodule_calls import SubmoduleCalls

# After so many updates or training calls without a batch, the loop is assumed to iterate another loader.
_UPDATES_WITHOUT_BATCH, _CALLS_WITHOUT_BATCH = 3, 12
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
        self._updates = self._calls = 0
        self._requests_elsewhere = 0
        self._has_warned = False
        self._submodule_calls: SubmoduleCalls | None = None

    # -- the loader ----------------------------------------------------------------------------------------------------

    def updated_without_batch(self) -> None:
        """The model was updated, and the loader has not been iterated."""
        self._updates += 1
        self._warn_once(self._updates, _UPDATES_WITHOUT_BATCH, "was updated")

    def called_without_batch(self) -> None:
        """The model was called, and the loader has not been iterated."""
        self._calls += 1
        self._warn_once(self._calls, _CALLS_WITHOUT_BATCH, "was called")

    def requested_elsewhere(self) -> None:
        """A batch is requested by another thread than the one that trained last: perhaps it trains from now on."""
        self._requests_elsewhere += 1
        if self._requests_elsewhere == _REQUESTS_ELSEWHERE:
            self._say(
                f"the batches of {self._model} are taken by another thread than the one that trains it, so that its "
                "steps can't be told apart and nothing more is tried; iterate the loader in the loop itself"
            )

    def _warn_once(self, times: int, limit: int, what: str) -> None:
        if times == limit and not self._has_warned:
            self._has_warned = True
            self._say(
                f"{self._model} {what} {times} times without a batch from the loader that "
                "accel.optimize returned; iterate that one, or nothing is made faster"
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
                observed.uncalled = parts.advice(self._run.model, called)
                self._say(f"{observed.uncalled}. Until then only its loader and optimizer are considered")
        elif self.called:
            observed.uncalled = ""

    def close(self) -> None:
        """Restore the submodules."""
        if self._submodule_calls is not None:
            self._submodule_calls.close()
